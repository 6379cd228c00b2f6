"""`Checkpoint.snapshot` with the real PyTorch."""

from pathlib import Path

import pytest

from tests.integrations.trainings import TIMEOUT_S, reports, run

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(2 * TIMEOUT_S)]


def test_torch_snapshot_equals_the_state_of_its_step(project: Path, tmp_path: Path) -> None:
    done = run(project, "snapshots.py", str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    (said,) = reports(done.stdout)
    changed_exact_tied_with_metadata = [True, True, True, True]
    assert said["exact"] == [changed_exact_tied_with_metadata] * 4
    assert said["size"] == [True, True]
    assert said["kinds"] == [[], 1.0, True]
    assert said["resumed"] == [["step-00000004", "step-00000008"], True]

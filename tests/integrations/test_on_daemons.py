"""Trainings as jobs on real daemons: a reclaim or a migration does not change the final weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mesh.daemon.stack import Stack
from tests.e2e.commands import job_state, ok, running_with_checkpoint, until
from tests.integrations.trainings import SHORT, digest_of
from tests.tiers import FRAMEWORKS_PYTHON

pytestmark = [pytest.mark.e2e, pytest.mark.frameworks]
WAIT_S = 120.0  # the import of a framework takes ten seconds, more on a busy machine


@pytest.mark.long
@pytest.mark.parametrize(
    ("program", "pace_s", "departure"),
    [
        pytest.param("train_hf.py", 0.3, "its owner took the machine back", marks=pytest.mark.slow),
        ("train_lightning.py", 0.15, "moved by its user"),
    ],
)
def test_migrated_training_ends_with_the_same_weights(
    project: Path, undisturbed: Callable[..., str], program: str, pace_s: float, departure: str
) -> None:
    sees = [str(FRAMEWORKS_PYTHON.parents[1])]
    with Stack(3, overrides={"slots": 1, "grace_s": 30.0, "process_sees": sees}) as stack:
        stack.start_all()
        submitter = stack.nodes[0]
        order = ("submit", "--ckpt", "ckpts", "--ckpt-mode", "rename", "--")
        training = (str(FRAMEWORKS_PYTHON), program, *SHORT, "--pace", str(pace_s))
        job = ok(submitter, *order, *training, cwd=project).strip()
        first = stack.node(running_with_checkpoint(submitter, job)["node"])
        if "owner" in departure:
            ok(first, "reclaim")
        else:
            ok(submitter, "job", "migrate", job)

        def ended() -> dict[str, Any]:
            state = job_state(submitter, job)
            return state if state.get("outcome") else {}

        end = until(ended, "the job to end", WAIT_S)
        log = ok(submitter, "logs", job)
        left, *_, last = end["attempts"]
        assert end["state"] == "done" and last["node"] != first.nick, log
        assert departure in left["reason"] and left["last_step"] == end["attempts"][1]["resumed_step"], end["attempts"]
        assert digest_of(log) == undisturbed(program, *SHORT)

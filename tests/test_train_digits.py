"""The example alone: it ends with the same weights after stops, kills and damaged checkpoints."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "docs" / "examples" / "train_digits.py"
EPOCHS = "4"


def start(ckpt: Path, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(EXAMPLE), "--epochs", EPOCHS, "--ckpt", str(ckpt)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **env},
    )


def finish(ckpt: Path, **env: str) -> str:
    process = start(ckpt, **env)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out
    return out.split("sha256 ")[1].split()[0]


def wait_for_epoch(process: subprocess.Popen[str], epoch: int) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(f"epoch {epoch}/"):
            return
    pytest.fail("the training ended early")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Run it undisturbed; return its digest, and the directory with its progress and its results."""
    home = tmp_path_factory.mktemp("undisturbed")
    (home / "ctl").mkdir()
    return finish(home / "ckpt", MESH_CTL_DIR=str(home / "ctl"), MESH_OUT_DIR=str(home / "out")), home


@pytest.fixture
def undisturbed(whole: tuple[str, Path]) -> str:
    return whole[0]


def end(process: subprocess.Popen[str], number: signal.Signals) -> tuple[int, str]:
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    return process.returncode, out


def test_training_stopped_within_an_epoch_ends_with_the_same_weights(tmp_path: Path, undisturbed: str) -> None:
    process = start(tmp_path, MESH="1")
    wait_for_epoch(process, 2)
    code, out = end(process, signal.SIGTERM)
    assert code == 85 and "saved at epoch 2" in out
    assert finish(tmp_path) == undisturbed


def test_killed_training_ends_with_the_same_weights(tmp_path: Path, undisturbed: str) -> None:
    process = start(tmp_path)
    wait_for_epoch(process, 3)
    end(process, signal.SIGKILL)
    assert finish(tmp_path) == undisturbed


def test_damaged_checkpoint_is_reported_and_skipped(tmp_path: Path, undisturbed: str) -> None:
    process = start(tmp_path)
    wait_for_epoch(process, 3)
    end(process, signal.SIGKILL)
    newest = max(tmp_path.glob("step-*")) / "state.npz"
    newest.write_bytes(newest.read_bytes()[:-100])
    process = start(tmp_path)
    out, _ = process.communicate(timeout=120)
    assert f"skipping checkpoint {newest.parent.name}" in out
    assert out.split("sha256 ")[1].split()[0] == undisturbed


def test_training_reports_progress_and_publishes_weights(whole: tuple[str, Path]) -> None:
    import hashlib

    digest, home = whole
    progress = json.loads((home / "ctl" / "progress.json").read_text())
    assert progress["step"] == progress["of"] > 0
    assert hashlib.sha256((home / "out" / "weights.bin").read_bytes()).hexdigest() == digest


def test_sigterm_without_a_mesh_exits_with_143(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "MESH"}
    process = subprocess.Popen(
        [sys.executable, str(EXAMPLE), "--epochs", EPOCHS], stdout=subprocess.PIPE, text=True, env=environment
    )
    wait_for_epoch(process, 1)
    assert end(process, signal.SIGTERM)[0] == 143

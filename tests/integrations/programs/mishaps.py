"""External faults of a training, each at a chosen step."""

import json
import os
import signal
from pathlib import Path


def notice() -> None:
    """Give notice as the mesh does: notice.json by rename, then SIGTERM if the program handles it."""
    control = Path(os.environ["MESH_CTL_DIR"])
    fields = {"seq": 1, "kind": "vacate", "deadline_unix": 2e9, "grace_s": 30.0, "reason": "its node leaves"}
    (control / ".notice.tmp").write_text(json.dumps(fields))
    (control / ".notice.tmp").rename(control / "notice.json")
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        signal.raise_signal(signal.SIGTERM)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_when_published(step: int) -> None:
    """Send SIGKILL when this checkpoint is written completely but not yet renamed."""
    rename = Path.rename

    def killed(self: Path, target: str | Path) -> Path:
        if Path(target).name == f"step-{step:08d}":
            kill()
        return rename(self, target)

    Path.rename = killed  # type: ignore[method-assign]

"""Cleanup runs after a killed test run, and not after one that ends normally."""

import os
import subprocess
import sys
from pathlib import Path

from tests.cleanup import MARK
from tests.e2e.commands import until

RUN = """
import subprocess, sys, time
from tests.cleanup import cleanup

directory, ends = sys.argv[1:]
for word in ("first", "second"):
    cleanup().undo("sh", "-c", f"echo {word} >> {directory}/undone")
daemon = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "mesh.daemon.entry"], start_new_session=True)
print(daemon.pid, flush=True)
if ends:
    daemon.kill()
    cleanup().close()
else:
    time.sleep(600)
"""


def start(directory: Path, ends: str) -> subprocess.Popen[str]:
    env = {name: value for name, value in os.environ.items() if name != MARK}
    command = [sys.executable, "-c", RUN, str(directory), ends]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env, cwd=Path(__file__).parents[1])


def test_killed_run_leaves_no_process(tmp_path: Path) -> None:
    with start(tmp_path, "") as run:
        try:
            assert run.stdout is not None
            daemon = Path("/proc", run.stdout.readline().strip())
            # A program has its environment only a moment after its start.
            (mark,) = until(
                lambda: [word for word in _words(daemon) if word.startswith(f"{MARK}=")], "the daemon to be marked"
            )
        finally:
            run.kill()
    undone = tmp_path / "undone"
    until(lambda: undone.exists() and undone.read_text() == "second\nfirst\n", "all commands to run, last first")
    assert not [path for path in Path("/proc").glob("[0-9]*") if mark in _words(path)], (
        "a process of the run is still alive"
    )


def _words(process: Path) -> list[str]:
    """Return the environment of a process, or nothing if it has ended."""
    try:
        return (process / "environ").read_text(errors="replace").split("\0")
    except OSError:
        return []


def test_normal_end_of_run_undoes_nothing(tmp_path: Path) -> None:
    with start(tmp_path, "ends") as run:
        run.communicate()
    assert run.returncode == 0 and not (tmp_path / "undone").exists()

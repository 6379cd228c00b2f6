"""What a run leaves that is killed goes; what one leaves that ends by itself is its own affair."""

import os
import subprocess
import sys
from pathlib import Path

from tests.aftermath import MARK
from tests.e2e.commands import until

RUN = """
import subprocess, sys, time
from tests.aftermath import aftermath

directory, ends = sys.argv[1:]
for word in ("first", "second"):
    aftermath().undo("sh", "-c", f"echo {word} >> {directory}/undone")
daemon = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "mesh.entry"], start_new_session=True)
print(daemon.pid, flush=True)
if ends:
    daemon.kill()
    aftermath().close()
else:
    time.sleep(600)
"""


def start(directory: Path, ends: str) -> subprocess.Popen[str]:
    env = {name: value for name, value in os.environ.items() if name != MARK}
    command = [sys.executable, "-c", RUN, str(directory), ends]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env, cwd=Path(__file__).parents[1])


def test_of_a_run_that_is_killed_nothing_goes_on(tmp_path: Path) -> None:
    with start(tmp_path, "") as run:
        try:
            assert run.stdout is not None
            daemon = Path("/proc", run.stdout.readline().strip())
            # A program has its environment a moment after it has been started.
            (mark,) = until(lambda: [word for word in _words(daemon) if word.startswith(f"{MARK}=")], "it to be marked")
        finally:
            run.kill()
    undone = tmp_path / "undone"
    until(lambda: undone.exists() and undone.read_text() == "second\nfirst\n", "all to be undone, the last first")
    assert not [path for path in Path("/proc").glob("[0-9]*") if mark in _words(path)], "nor what it had started"


def _words(process: Path) -> list[str]:
    """Its environment; none of one that has ended."""
    try:
        return (process / "environ").read_text(errors="replace").split("\0")
    except OSError:
        return []


def test_a_run_that_ends_has_cleaned_up_itself(tmp_path: Path) -> None:
    with start(tmp_path, "ends"):
        pass
    assert not (tmp_path / "undone").exists()

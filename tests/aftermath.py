"""What is undone after a run that was killed: its daemons end, and its namespaces, mounts and engines go.

Tests clean up after themselves; one whose process gets SIGKILL cannot. A process that waits for the end of this one does it then.
Standard library only: it is run as a program of its own.
"""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

MARK = "MESH_TESTS_RUN"  # in the environment of all that a run has started
DONE = "done"
ENDS_S = 15.0  # for what goes by itself once its daemon is gone: guests, containers; ours
LOOK_S = 0.1


class Aftermath:
    """Waits in a process of its own; `undo`: what to run when this one has been killed, the last first."""

    def __init__(self) -> None:
        mark = f"{os.getpid()}-{secrets.token_hex(8)}"
        outside = {name: value for name, value in os.environ.items() if name != MARK}  # or it would end itself
        self._waits = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, mark],
            env=outside,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        os.environ[MARK] = mark

    def undo(self, *words: str) -> None:
        self._tell(json.dumps(words))

    def close(self) -> None:
        """The run has come to its end, and has cleaned up."""
        self._tell(DONE)
        self._waits.communicate()

    def _tell(self, line: str) -> None:
        assert self._waits.stdin is not None
        self._waits.stdin.write(line + "\n")
        self._waits.stdin.flush()


@cache
def aftermath() -> Aftermath:
    """Of this process."""
    return Aftermath()


# --- in the process that waits


def marked(mark: str) -> dict[int, str]:
    """What a run has started and still goes on: pid and command."""
    found = {}
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if process.name.isdigit() and f"{MARK}={mark}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found[int(process.name)] = (
                    (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
    return found


def send(number: signal.Signals, pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def clean(mark: str, orders: list[list[str]]) -> None:
    """Daemons first: what they have started goes after them, containers too, if their wardens are left the time."""
    send(signal.SIGKILL, [pid for pid, command in marked(mark).items() if "mesh.entry" in command])
    send(signal.SIGTERM, [pid for pid, command in marked(mark).items() if command.startswith("dockerd ")])
    deadline = time.monotonic() + ENDS_S
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(LOOK_S)
    while left := marked(mark):
        send(signal.SIGKILL, list(left))
        time.sleep(LOOK_S)
    for order in reversed(orders):
        subprocess.run(order, stdin=subprocess.DEVNULL, capture_output=True, check=False)


def main() -> None:
    lines = sys.stdin.read().splitlines()
    if lines[-1:] != [DONE]:
        clean(sys.argv[1], [json.loads(line) for line in lines])


if __name__ == "__main__":
    main()

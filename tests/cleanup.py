"""Cleanup after a killed test run: end its daemons, and remove its namespaces, mounts and engines.

Tests clean up after themselves, but not after SIGKILL. A second process waits for the end of the test run and cleans up then. It
runs this file as a program, with the standard library only.
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

MARK = "MESH_TESTS_RUN"  # in the environment of every process that a run starts
DONE = "done"
ENDS_S = 15.0  # time for guests and containers to end after their daemon (own choice)
LOOK_S = 0.1


class Cleanup:
    """A second process that runs the commands given to `undo`, last first, if this process is killed."""

    def __init__(self) -> None:
        mark = f"{os.getpid()}-{secrets.token_hex(8)}"
        outside = {name: value for name, value in os.environ.items() if name != MARK}  # else it would kill itself
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
        """Report that the run has ended normally and cleaned up."""
        self._tell(DONE)
        self._waits.communicate()

    def _tell(self, line: str) -> None:
        assert self._waits.stdin is not None
        self._waits.stdin.write(line + "\n")
        self._waits.stdin.flush()


@cache
def cleanup() -> Cleanup:
    """Return the cleanup of this process."""
    return Cleanup()


# --- in the second process


def marked(mark: str) -> dict[int, str]:
    """Return the processes of a run that are still alive: pid and command."""
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
    """End the daemons first, so that their watchdogs end guests and containers; then the rest, then run the commands."""
    send(signal.SIGKILL, [pid for pid, command in marked(mark).items() if "mesh.daemon.entry" in command])
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

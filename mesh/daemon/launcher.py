"""Starting a daemon as a process of its own, and waiting until it answers or has said why not."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from mesh.api.client import Client
from mesh.daemon.layout import Layout
from mesh.util.errors import MeshError

TAIL_BYTES = 1 << 18  # of a log that is shown (own choice)
START_TIMEOUT_S = 180.0  # a first start compiles every module: 80 s on an emulated machine (own measurement)


def daemon_command(where: Layout, overrides: dict[str, Any]) -> list[str]:
    config = ["--config", str(where.config_root)] if where.config_root is not None else []
    state = ["--state", str(where.root), *config]
    return [sys.executable, "-m", "mesh.daemon.entry", *state, "--overrides", json.dumps(overrides)]


def start_daemon(where: Layout, overrides: dict[str, Any], within: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
    """Start a daemon of its own session, logging to its state directory; `within`: a command that runs it, as `setpriv`."""
    with where.log.open("ab") as log:
        return subprocess.Popen(
            [*within, *daemon_command(where, overrides)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def wait_ready(where: Layout, process: subprocess.Popen[bytes], timeout_s: float = START_TIMEOUT_S) -> dict[str, Any]:
    """Return the daemon's status once it answers; MeshError with its last message if it does not start."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise MeshError(last_words(where.log))
        if where.socket.exists():
            try:
                status: dict[str, Any] = Client(where.socket).get("/v1/status", timeout_s=5)
                if status["pid"] == process.pid:
                    return status
            except MeshError:
                pass
        time.sleep(0.05)
    raise MeshError(f"the daemon did not answer within {timeout_s:g} s; its log is {where.log}")


def _full(directory: Path) -> bool:
    try:
        disk = os.statvfs(directory)
    except OSError:
        return False
    return (disk.f_bavail if os.geteuid() else disk.f_bfree) == 0


def log_tail(log: Path, lines: int) -> list[str]:
    """Return the last lines of a log, of its last TAIL_BYTES; empty without a log."""
    if not log.exists():
        return []
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        return file.read(TAIL_BYTES).decode(errors="replace").splitlines()[-lines:]


def last_words(log: Path) -> str:
    """The daemon's own message, without the log around it."""
    lines = log_tail(log, 20)
    spoken = [line.removeprefix("mesh: ") for line in lines if line.startswith("mesh: ")]
    if _full(log.parent):  # what it said at the end may be cut off, or missing
        return f"{log.parent}: its disk is full. Free some space, or name another state directory with --state."
    if spoken:
        return spoken[-1]
    return f"the daemon ended at once ({lines[-1] if lines else 'without a word'}); its log is {log}"

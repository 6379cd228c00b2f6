"""CPU time and memory of `mesh top` in a terminal, with a daemon of many nodes and jobs.

The daemon replays a recording (tests/top/recorded.py); between two refreshes, one node and every running job change.
"""

import asyncio
import fcntl
import os
import pty
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from mesh.daemon.layout import Layout
from tests.bench.harness import cpu_s, resident_mib, row
from tests.top.recorded import Recorded

NODES, JOBS = 500, 200
SIZES = ((80, 24), (200, 60))
SETTLE_S, SLICES, SLICE_S = 5.0, 5, 4.0


class Busy(Recorded):
    """A large mesh that changes between two refreshes."""

    def __init__(self, socket_path: Path) -> None:
        super().__init__(socket_path)
        nodes, jobs = self.answers["/v1/nodes"]["nodes"], self.answers["/v1/jobs"]["jobs"]
        me, others = [one for one in nodes if one["me"]], [one for one in nodes if not one["me"]]
        running = next(job for job in jobs if job["state"] == "running")
        more = [{**others[0], "node": f"{n:03}{others[0]['node'][3:]}", "nick": f"lab-{n:03}"} for n in range(1, NODES)]
        self.answers["/v1/nodes"]["nodes"] = me + more
        self.answers["/v1/jobs"]["jobs"] = [
            {**running, "job": f"{n:03}{running['job'][3:]}", "name": f"job-{n:03}", "node": f"lab-{n + 1:03}"}
            for n in range(JOBS)
        ]
        self._look = 0

    async def _answer(self, request: web.Request) -> web.Response:
        if request.path == "/v1/status":  # the first request of a refresh
            self._look += 1
            node = self.answers["/v1/nodes"]["nodes"][1 + self._look % (NODES - 1)]
            node["slots_free"] = 1 - node["slots_free"]
            for job in self.answers["/v1/jobs"]["jobs"]:
                job["at_risk_s"] += 1.0
        return await super()._answer(request)


@contextmanager
def answering(socket_path: Path) -> Iterator[None]:
    loop, busy = asyncio.new_event_loop(), Busy(socket_path)
    loop.run_until_complete(busy.start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield
    finally:
        asyncio.run_coroutine_threadsafe(busy.stop(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def rows() -> list[dict[str, Any]]:
    found = []
    with tempfile.TemporaryDirectory() as name, answering(Layout(Path(name)).socket):
        for columns, lines in SIZES:
            milliseconds, mebibytes = _taken(name, columns, lines)
            what = f"mesh top, {NODES} nodes and {JOBS} jobs, {columns}x{lines}"
            found.append(row(f"{what}: CPU", milliseconds, "ms a second", goal="-", met=None))
            found.append(row(f"{what}: memory", mebibytes, "MiB", goal="-", met=None))
    return found


def _taken(state: str, columns: int, lines: int) -> tuple[list[float], list[float]]:
    here, there = pty.openpty()
    fcntl.ioctl(there, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    command = [sys.executable, "-m", "mesh.cli", "--state", state, "top"]
    env = {**os.environ, "TERM": "xterm-256color"}
    process = subprocess.Popen(command, stdin=there, stdout=there, stderr=there, env=env, start_new_session=True)
    os.close(there)
    drawn = bytearray()
    reader = threading.Thread(target=_take, args=(here, drawn))
    reader.start()
    try:
        time.sleep(SETTLE_S)
        milliseconds, mebibytes = [], []
        for _ in range(SLICES):
            begun, before = time.monotonic(), cpu_s(process.pid)
            time.sleep(SLICE_S)
            milliseconds.append(1000 * (cpu_s(process.pid) - before) / (time.monotonic() - begun))
            mebibytes.append(resident_mib(process.pid))
        assert b"job-0" in drawn, bytes(drawn[-1000:])
        return milliseconds, mebibytes
    finally:
        process.terminate()
        process.wait()
        reader.join()
        os.close(here)


def _take(terminal: int, drawn: bytearray) -> None:
    """Read its output to the end."""
    try:
        while data := os.read(terminal, 65_536):
            drawn += data
    except OSError:  # EIO: the other end is closed
        return

"""Reads a second of the daemon's API over its socket, beside a bare aiohttp server that returns the same bytes."""

import importlib
import importlib.util
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from mesh.daemon.stack import Stack  # noqa: E402
from tests.bench.harness import cpu_s, row, write  # noqa: E402

READS = ("/v1/status", "/v1/nodes", "/v1/jobs", "/v1/lend", "/v1/openapi.json")
ROUNDS, ROUND_S = 5, 2.0
CONNECTIONS = 8  # each sends the next request as soon as it has an answer
JOBS = 20
GOAL = 2000.0

_BARE = """
import sys
from aiohttp import web

body = sys.stdin.buffer.read()

async def answer(request):
    return web.Response(body=body, content_type="application/json")

app = web.Application()
app.router.add_get("/", answer)
web.run_app(app, path=sys.argv[1], access_log=None, print=None)
"""


class Reader:
    """Open connections in one thread, so that the client takes little CPU from the server."""

    def __init__(self, path: Path, target: str) -> None:
        self._request = f"GET {target} HTTP/1.1\r\nHost: mesh\r\n\r\n".encode()
        self._connections = [socket.socket(socket.AF_UNIX) for _ in range(CONNECTIONS)]
        for connection in self._connections:
            connection.connect(str(path))

    def per_second(self, seconds: float) -> float:
        begun, count = time.perf_counter(), 0
        for connection in self._connections:
            connection.sendall(self._request)
        while time.perf_counter() < begun + seconds:
            for connection in self._connections:
                _answer(connection)
                connection.sendall(self._request)
                count += 1
        took = time.perf_counter() - begun
        for connection in self._connections:
            _answer(connection)
        return count / took

    def close(self) -> None:
        for connection in self._connections:
            connection.close()


def _answer(connection: socket.socket) -> bytes:
    data = connection.recv(1 << 20)
    head, _, body = data.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 "), head
    length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
    while len(body) < length:
        body += connection.recv(1 << 20)
    return body


def main() -> None:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name, Stack(3) as stack:
        stack.start_all()
        node = stack.nodes[0]
        for _ in range(JOBS):
            node.client.post("/v1/jobs", {"argv": ["true"]})
        for number, target in enumerate(READS):
            path = Path(name) / f"{number}.sock"
            probe = Reader(node.where.socket, target)
            probe._connections[0].sendall(probe._request)
            body = _answer(probe._connections[0])
            bare = subprocess.Popen([sys.executable, "-c", _BARE, str(path)], stdin=subprocess.PIPE)
            try:
                assert bare.stdin is not None
                bare.stdin.write(body)
                bare.stdin.close()
                while not path.exists():
                    time.sleep(0.05)
                beside = Reader(path, "/")
                ours, theirs, work = [], [], []
                assert node.process is not None
                for _ in range(ROUNDS):
                    before = cpu_s(node.process.pid)
                    ours.append(probe.per_second(ROUND_S))
                    spent = cpu_s(node.process.pid) - before
                    work.append(ours[-1] * ROUND_S / spent)
                    theirs.append(beside.per_second(ROUND_S))
                beside.close()
                probe.close()
            finally:
                bare.terminate()
                bare.wait()
            goal, met = f">= {GOAL:g}", None if target.endswith(".json") else sorted(ours)[ROUNDS // 2] >= GOAL
            what = f"GET {target} ({len(body)} bytes)"
            rows.append(row(what, ours, "a second", goal=goal, met=met, peer="bare aiohttp", peer_values=theirs))
            # Requests for each second of CPU time do not depend on other load of the machine.
            fast = None if met is None else sorted(work)[ROUNDS // 2] >= GOAL
            rows.append(row(f"{what}, a second of the daemon's CPU", work, "", goal=goal, met=fast))
    if importlib.util.find_spec("tests.bench.web") is not None:
        rows += importlib.import_module("tests.bench.web").rows()
    write("api", rows)


if __name__ == "__main__":
    main()

"""Ends this node's containers when its daemon dies: containers, unlike processes, would go on without it.

A second process, standard library only, that waits on a pipe from the daemon. "bye" lets it go; a closed pipe without a bye is
a crash, and every container with this node's label is killed and removed, over the engine's own socket.
"""

import asyncio
import http.client
import json
import os
import signal
import socket
import sys
import urllib.parse
from pathlib import Path

LABEL_NODE = "campus-mesh.node"


class Warden:
    """The daemon's side."""

    def __init__(self, process: asyncio.subprocess.Process, daemon_end: int) -> None:
        self._process = process
        self._daemon_end = daemon_end

    @classmethod
    async def start(cls, docker_socket: str, node: str) -> "Warden":
        theirs, ours = os.pipe()
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-S",
            str(Path(__file__)),
            str(theirs),
            docker_socket,
            node,
            pass_fds=(theirs,),
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs)
        return cls(process, ours)

    async def dismiss(self) -> None:
        os.write(self._daemon_end, b"bye")
        os.close(self._daemon_end)
        await self._process.wait()


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=10)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(10)
        self.sock.connect(self._path)


def end_containers(docker_socket: str, node: str) -> None:
    """Kill and remove every container of this node."""
    filters = urllib.parse.quote(json.dumps({"label": [f"{LABEL_NODE}={node}"]}))
    for container in json.loads(_call(docker_socket, "GET", f"/containers/json?all=1&filters={filters}")):
        _call(docker_socket, "DELETE", f"/containers/{container['Id']}?force=1")


def _call(docker_socket: str, method: str, path: str) -> bytes:
    connection = _UnixConnection(docker_socket)
    try:
        connection.request(method, path)
        return connection.getresponse().read()
    finally:
        connection.close()


def main() -> None:
    descriptor, docker_socket, node = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    heard = b""
    while piece := os.read(descriptor, 64):
        heard += piece
    if b"bye" not in heard:
        end_containers(docker_socket, node)


if __name__ == "__main__":
    main()

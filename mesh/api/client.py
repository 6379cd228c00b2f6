"""The client of the local API: HTTP over the unix socket, as much of it as the daemon speaks.

Not by `http.client`: its parsers for e-mail and TLS are a quarter of what a command takes to start.
"""

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from mesh.api import no_daemon
from mesh.api.no_daemon import NoDaemon
from mesh.util.errors import ExitCode, MeshError
from mesh.util.processes import peer_of

LINE_LIMIT = 65_536  # bytes of a line before a body; as http.client's
PIECE_BYTES = 65_536
BUSY_S = 2.0  # for a daemon to empty a full queue of connections, as it does at each turn of its loop (own choice)
BUSY_LOOK_S = 0.02  # (own choice)

# Is told of each connection that is made in its context: another thread that shuts one down ends the call.
opened: ContextVar[Callable[[socket.socket], None]] = ContextVar("opened", default=lambda connection: None)


class BrokenAnswer(ConnectionError):
    """An answer that ends too early, or is not HTTP."""


class _Answer:
    """One response, which ends with its connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._file = connection.makefile("rb")
        version, _, rest = self._line().partition(" ")
        if not version.startswith("HTTP/1.") or not rest[:3].isdecimal():
            raise BrokenAnswer("the answer is no HTTP")
        self.status = int(rest[:3])
        headers = {}
        while line := self._line():
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
        chunked = headers.get("transfer-encoding", "").lower() == "chunked"
        self._length = None if chunked else _number(headers.get("content-length", ""), 10)

    def pieces(self) -> Iterator[bytes]:
        """Yield the body as it arrives; BrokenAnswer if it ends too early."""
        if self._length is not None:
            yield from self._bytes(self._length)
            return
        while size := _number(self._line().partition(";")[0], 16):
            yield from self._bytes(size)
            self._line()  # which is empty

    def read(self) -> bytes:
        return b"".join(self.pieces())

    def _bytes(self, count: int) -> Iterator[bytes]:
        while count:
            piece = self._file.read1(min(count, PIECE_BYTES))
            if not piece:
                raise BrokenAnswer("the answer breaks off")
            count -= len(piece)
            yield piece

    def _line(self) -> str:
        line = self._file.readline(LINE_LIMIT)
        if not line.endswith(b"\n"):
            raise BrokenAnswer("the answer breaks off")
        return line.rstrip(b"\r\n").decode("latin-1")


def _number(text: str, base: int) -> int:
    if not text.isalnum():
        raise BrokenAnswer("the answer does not say how long it is")
    try:
        return int(text, base)
    except ValueError as error:
        raise BrokenAnswer(f"{text[:20]!r} is no length") from error


class Client:
    """A client of one daemon; NoDaemon with the next step if it does not answer."""

    def __init__(self, socket_path: Path) -> None:
        self.socket_path = socket_path

    def get(self, path: str, timeout_s: float | None = 30.0) -> Any:
        return self._call("GET", path, None, timeout_s)

    def read(self, path: str, timeout_s: float | None = 30.0) -> bytes:
        """GET and return the body, not decoded."""
        return self._asked("GET", path, None, timeout_s)

    def post(self, path: str, body: dict[str, Any] | None = None, timeout_s: float | None = 30.0) -> Any:
        return self._call("POST", path, body or {}, timeout_s)

    def stream(self, path: str) -> Iterator[bytes]:
        """GET and yield the body as it arrives."""
        with self._connect(None) as connection:
            try:
                yield from self._answer(connection, "GET", path, None).pieces()
            except ConnectionError as error:
                raise no_daemon.stopped() from error

    def alive(self) -> bool:
        try:
            self.get("/v1/status", timeout_s=5.0)
        except MeshError:
            return False
        return True

    def _call(self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float | None) -> Any:
        return json.loads(self._asked(method, path, body, timeout_s))

    def _asked(self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float | None) -> bytes:
        with self._connect(timeout_s) as connection:
            try:
                return self._answer(connection, method, path, body).read()
            except TimeoutError as error:
                raise no_daemon.hangs(peer_of(connection)[0]) from error
            except ConnectionError as error:
                raise no_daemon.stopped() from error

    def _connect(self, timeout_s: float | None) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(timeout_s)
        until = time.monotonic() + BUSY_S
        try:
            while True:
                try:
                    connection.connect(str(self.socket_path))
                except BlockingIOError:  # its queue is full (unix(7))
                    if time.monotonic() >= until:
                        raise
                    time.sleep(BUSY_LOOK_S)
                else:
                    opened.get()(connection)
                    return connection
        except OSError as error:
            connection.close()
            raise self._unreached(error) from error

    def _unreached(self, error: OSError) -> NoDaemon:
        match error:
            case FileNotFoundError() | ConnectionRefusedError() | NotADirectoryError():
                return no_daemon.none_runs(self.socket_path.parent)
            case PermissionError():
                return no_daemon.of_another_user(self.socket_path)
            case BlockingIOError() | TimeoutError():
                return no_daemon.hangs(None)
        return no_daemon.unusable_socket(self.socket_path, error)

    def _answer(self, connection: socket.socket, method: str, path: str, body: dict[str, Any] | None) -> _Answer:
        data = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: mesh\r\nConnection: close\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        answer = _Answer(connection)
        if answer.status >= 400:
            text = answer.read().decode(errors="replace")
            try:
                problem = json.loads(text)
                raise MeshError(problem["detail"], ExitCode(problem["exit_code"]))
            except (ValueError, KeyError, TypeError):
                raise MeshError(f"the daemon answered {answer.status}: {text[:300]}") from None
        return answer

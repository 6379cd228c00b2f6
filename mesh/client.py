"""The command line's way to its own daemon: HTTP over the unix socket, standard library only, light to import."""

import http.client
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mesh.api.errors import ExitCode, MeshError


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout_s: float | None) -> None:
        super().__init__("mesh", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class Client:
    """Calls the daemon whose state is in `state`; MeshError with a next step when it is not there."""

    def __init__(self, socket_path: Path) -> None:
        self.socket_path = socket_path

    def get(self, path: str, timeout_s: float | None = 30.0) -> Any:
        return self._call("GET", path, None, timeout_s)

    def post(self, path: str, body: dict[str, Any] | None = None, timeout_s: float | None = 30.0) -> Any:
        return self._call("POST", path, body or {}, timeout_s)

    def stream(self, path: str) -> Iterator[bytes]:
        connection = self._connect(None)
        try:
            response = self._answer(connection, "GET", path, None)
            while piece := response.read1(65_536):
                yield piece
        except (http.client.IncompleteRead, ConnectionError) as error:
            raise MeshError("the daemon went away", ExitCode.NO_DAEMON) from error
        finally:
            connection.close()

    def alive(self) -> bool:
        try:
            self.get("/v1/status", timeout_s=5.0)
        except MeshError:
            return False
        return True

    def _call(self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float | None) -> Any:
        connection = self._connect(timeout_s)
        try:
            return json.loads(self._answer(connection, method, path, body).read())
        except TimeoutError as error:
            raise MeshError("the daemon does not answer; see its log with `mesh status --log`") from error
        except (ConnectionError, http.client.HTTPException) as error:
            raise MeshError("the daemon went away while it answered", ExitCode.NO_DAEMON) from error
        finally:
            connection.close()

    def _connect(self, timeout_s: float | None) -> _UnixConnection:
        connection = _UnixConnection(self.socket_path, timeout_s)
        try:
            connection.connect()
        except PermissionError as error:
            raise MeshError(f"{self.socket_path} belongs to another user", ExitCode.NO_DAEMON) from error
        except OSError as error:
            raise MeshError(
                f"no daemon runs here ({self.socket_path.parent}): start it with `mesh up`", ExitCode.NO_DAEMON
            ) from error
        return connection

    def _answer(
        self, connection: _UnixConnection, method: str, path: str, body: dict[str, Any] | None
    ) -> http.client.HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        connection.request(method, path, body=data, headers={"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status >= 400:
            text = response.read().decode(errors="replace")
            try:
                problem = json.loads(text)
                raise MeshError(problem["error"], ExitCode(problem["exit_code"]))
            except (ValueError, KeyError, TypeError):
                raise MeshError(f"the daemon answered {response.status}: {text[:300]}") from None
        return response

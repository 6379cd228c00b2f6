"""The HTTP client of the command line: complete answers are returned, all others raise a readable error."""

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as some

from mesh.api.client import BrokenAnswer, Client, _Answer
from mesh.api.no_daemon import NoDaemon
from mesh.cli import progress, terminal
from mesh.cli.main import cli
from mesh.daemon.layout import Layout
from mesh.util.errors import ExitCode, MeshError

HEAD = b"HTTP/1.1 200 OK\r\n"


def answer_of(data: bytes) -> bytes:
    here, there = socket.socketpair()
    with here, there:
        there.sendall(data)
        there.shutdown(socket.SHUT_WR)
        return _Answer(here).read()


def chunked(pieces: list[bytes]) -> bytes:
    said = b"".join(b"%x;a=b\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    return HEAD + b"Transfer-Encoding: Chunked\r\n\r\n" + said + b"0\r\n\r\n"


@given(pieces=some.lists(some.binary(min_size=1, max_size=40), max_size=5), cut=some.integers(0, 400))
def test_client_returns_complete_bodies_only(pieces: list[bytes], cut: int) -> None:
    body = b"".join(pieces)
    for whole in (chunked(pieces), HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body):
        assert answer_of(whole) == body
        least = len(whole) - (len(b"\r\n") if b"Chunked" in whole else 0)  # the last empty line is not needed
        if cut < least:
            with pytest.raises(BrokenAnswer):
                answer_of(whole[:cut])


@given(data=some.binary(max_size=200) | some.binary(max_size=100).map(lambda rest: HEAD + rest))
def test_client_rejects_malformed_answers(data: bytes) -> None:
    try:
        answer_of(data)
    except BrokenAnswer:
        return
    assert data.startswith(b"HTTP/1.")


@contextmanager
def daemon_that_says(path: Path, said: bytes) -> Iterator[Client]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            client, _ = listener.accept()
            with client:
                client.recv(65_536)
                client.sendall(said)

        thread = threading.Thread(target=serve)
        thread.start()
        yield Client(path)
        thread.join()


def test_client_that_reaches_nobody_keeps_no_connection_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    found = []
    for _ in range(3):
        with pytest.raises(NoDaemon) as error:
            Client(tmp_path / "none").get("/")
        found.append(error)  # its traceback keeps the connection
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


@pytest.mark.parametrize("status", [b"400 Bad Request", b"404 Not Found"])
def test_client_raises_the_error_of_the_daemon(tmp_path: Path, status: bytes) -> None:
    body = json.dumps({"detail": "no such job", "exit_code": 4}).encode()
    said = b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n" % (status, len(body)) + body
    with daemon_that_says(tmp_path / "s", said) as client, pytest.raises(MeshError, match="no such job") as found:
        client.get("/v1/jobs/x")
    assert found.value.code == ExitCode.NOT_FOUND


def test_client_reports_interrupted_stream(tmp_path: Path) -> None:
    with daemon_that_says(tmp_path / "s", chunked([b"half"])[:-5]) as client:
        heard = client.stream("/v1/jobs/x/log")
        assert next(heard) == b"half"
        with pytest.raises(MeshError, match="it stopped while it answered") as found:
            next(heard)
    assert found.value.code == ExitCode.NO_DAEMON
    with pytest.raises(MeshError, match="no daemon answers"):
        Client(tmp_path / "none").get("/")


@pytest.fixture
def busy(tmp_path: Path) -> Iterator[socket.socket]:
    """The socket of a daemon that accepts no connections, with a full queue."""
    path = tmp_path / "mesh.sock"
    with ExitStack() as opened:
        listener = opened.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(path))
        listener.listen(0)
        with pytest.raises(BlockingIOError):
            while True:
                other = opened.enter_context(socket.socket(socket.AF_UNIX))
                other.setblocking(False)
                other.connect(str(path))
        yield listener


def test_client_distinguishes_busy_daemon_from_no_daemon(
    tmp_path: Path, busy: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client(tmp_path / "mesh.sock")
    monkeypatch.setattr("mesh.api.client.BUSY_S", 0.05)
    with pytest.raises(NoDaemon, match="the one here hangs, or is too busy") as found:
        client.get("/")
    assert found.value.code == ExitCode.NO_DAEMON and found.value.runs
    monkeypatch.setattr("mesh.api.client.BUSY_S", 30.0)
    accepted = ExitStack()
    monkeypatch.setattr("mesh.api.client.time.sleep", lambda _: accepted.enter_context(busy.accept()[0]))
    with accepted, pytest.raises(NoDaemon, match=r"that with pid .* hangs, or is too busy"):
        client.get("/", timeout_s=0.05)  # accepted, but not answered


def test_down_leaves_the_guests_of_a_daemon_that_hangs(
    tmp_path: Path, busy: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "genesis").touch()
    removed: list[Layout] = []
    monkeypatch.setattr("mesh.api.client.BUSY_S", 0.05)
    monkeypatch.setattr("mesh.daemon.leftovers.remove", removed.append)
    monkeypatch.setenv("MESH_STATE", str(tmp_path))
    done = CliRunner().invoke(cli, ["down"])
    assert done.exit_code == ExitCode.NO_DAEMON and "`mesh killall` ends all guests" in done.stderr and not removed


def test_client_reports_unusable_socket_path(tmp_path: Path) -> None:
    with pytest.raises(MeshError, match="cannot be used"):
        Client(tmp_path / ("s" * 200)).get("/")


def test_client_reports_pid_of_hanging_daemon(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "mesh.sock"))
        listener.listen()
        with pytest.raises(MeshError, match=rf"pid {os.getpid()} hangs.*mesh killall") as found:
            Client(tmp_path / "mesh.sock").get("/v1/status", timeout_s=0.05)
    assert found.value.code == ExitCode.NO_DAEMON


def test_command_reports_slow_daemon_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said, heard = list[str](), threading.Event()
    monkeypatch.setattr(progress, "report", lambda words: (said.append(words), heard.set()))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "mesh.sock"))
        listener.listen()

        def serve() -> None:
            for waits in (True, False):
                caller, _ = listener.accept()
                with caller:
                    caller.recv(65_536)
                    assert not waits or heard.wait(60)
                    caller.sendall(HEAD + b"Content-Length: 2\r\n\r\n{}")

        thread = threading.Thread(target=serve)
        thread.start()
        daemon = terminal.client(click.Context(click.Command("x"), obj=tmp_path))
        assert daemon.get("/v1/jobs") == {}
        with progress.waiting_for("something else"):
            assert progress.active == 1 and daemon.get("/v1/jobs") == {} and progress.active == 1
        thread.join()
    assert len(said) == 1 and said[0].startswith("waiting for the daemon ... ") and not progress.active

"""The command line's own HTTP: what a daemon says, said whole or not; anything else is an error in words."""

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import click
import pytest
from hypothesis import given
from hypothesis import strategies as some

from mesh.api.errors import ExitCode, MeshError
from mesh.cli import telling, terminal
from mesh.client import BrokenAnswer, Client, _Answer

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
def test_a_body_comes_whole_or_not_at_all(pieces: list[bytes], cut: int) -> None:
    body = b"".join(pieces)
    for whole in (chunked(pieces), HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body):
        assert answer_of(whole) == body
        least = len(whole) - (len(b"\r\n") if b"Chunked" in whole else 0)  # nobody needs its last empty line
        if cut < least:
            with pytest.raises(BrokenAnswer):
                answer_of(whole[:cut])


@given(data=some.binary(max_size=200) | some.binary(max_size=100).map(lambda rest: HEAD + rest))
def test_what_is_no_answer_is_an_error(data: bytes) -> None:
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


def test_errors_are_what_the_daemon_says(tmp_path: Path) -> None:
    body = json.dumps({"detail": "no such job", "exit_code": 4}).encode()
    said = b"HTTP/1.1 404 Not Found\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    with daemon_that_says(tmp_path / "s", said) as client, pytest.raises(MeshError, match="no such job") as found:
        client.get("/v1/jobs/x")
    assert found.value.code == ExitCode.NOT_FOUND


def test_a_stream_that_breaks_off_is_told(tmp_path: Path) -> None:
    with daemon_that_says(tmp_path / "s", chunked([b"half"])[:-5]) as client:
        heard = client.stream("/v1/jobs/x/log")
        assert next(heard) == b"half"
        with pytest.raises(MeshError, match="went away") as found:
            next(heard)
    assert found.value.code == ExitCode.NO_DAEMON
    with pytest.raises(MeshError, match="no daemon runs here"):
        Client(tmp_path / "none").get("/")


def test_a_daemon_that_is_busy_is_not_taken_for_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s"
    with ExitStack() as opened:
        listener = opened.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(path))
        listener.listen(0)
        with pytest.raises(BlockingIOError):
            while True:  # as many as its queue holds
                other = opened.enter_context(socket.socket(socket.AF_UNIX))
                other.setblocking(False)
                other.connect(str(path))
        monkeypatch.setattr("mesh.client.BUSY_S", 0.05)
        with pytest.raises(MeshError, match="does not answer") as found:
            Client(path).get("/")
        assert found.value.code != ExitCode.NO_DAEMON
        monkeypatch.setattr("mesh.client.BUSY_S", 30.0)

        def accepts_when_asked_again(_: float) -> None:
            opened.enter_context(listener.accept()[0])

        monkeypatch.setattr("mesh.client.time.sleep", accepts_when_asked_again)
        with pytest.raises(MeshError, match="does not answer"):
            Client(path).get("/", timeout_s=0.05)  # it is heard, and nobody says anything


def test_what_else_is_wrong_with_its_socket_is_told(tmp_path: Path) -> None:
    with pytest.raises(MeshError, match="cannot be asked by"):
        Client(tmp_path / ("s" * 200)).get("/")


def test_a_daemon_that_hangs_is_named(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "mesh.sock"))
        listener.listen()
        with pytest.raises(MeshError, match=rf"\(pid {os.getpid()}\) does not answer.*mesh killall") as found:
            Client(tmp_path / "mesh.sock").get("/v1/status", timeout_s=0.05)
    assert found.value.code == ExitCode.ERROR


def test_who_waits_for_a_slow_daemon_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said, heard = list[str](), threading.Event()
    monkeypatch.setattr(telling, "say", lambda words: (said.append(words), heard.set()))
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
        with telling.patience("something else"):
            assert telling.under_way == 1 and daemon.get("/v1/jobs") == {} and telling.under_way == 1
        thread.join()
    assert len(said) == 1 and said[0].startswith("waiting for the daemon ... ") and not telling.under_way

"""Futures of jobs, over a daemon that is played: who unpickles an answer and when, and what ends no future."""

import concurrent.futures
import json
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mesh.api import no_daemon
from mesh.api.file_stream import Data, End, Entry, frame
from mesh.sdk import futures
from mesh.sdk.futures import Client, Executor, Job, JobFailed, RemoteTraceback
from mesh.util.errors import MeshError

unpickled: list[str] = []


class Code:
    """Code that runs, and ends the thread, where it is unpickled."""

    def __reduce__(self) -> Any:
        return _run, ()


def _run() -> None:
    unpickled.append(threading.current_thread().name)
    sys.exit(0)


class Daemon:
    """Jobs by their names. `answers` are the output directories of those that have ended; `failures` come before them."""

    def __init__(self) -> None:
        self.answers: dict[str, bytes] = {}
        self.failures: dict[str, list[MeshError]] = {}
        self.away = 0  # calls that it does not answer, from the next failure on
        self._down = 0

    def get(self, path: str) -> Any:
        if self._down:
            self._down -= 1
            raise no_daemon.none_runs(Path("/"))
        name = path.split("/")[3]
        outcome = {"kind": "done", "detail": "done"} if name in self.answers else None
        return {"job": {"job": name, "state": "running", "outcome": outcome}}

    def post(self, path: str) -> Any:
        self._fail(path)
        return {"jobs": [{"already": False}]}

    def stream(self, path: str) -> Iterator[bytes]:
        self._fail(path)
        yield self.answers[path.split("/")[3]]

    def answer(self, name: str, packed: bytes = b"", **reply: Any) -> None:
        files = {
            "answer.json": json.dumps({"as": "pickle" if packed else "json", **reply}).encode(),
            "answer.pkl": packed,
        }
        data = b"".join(
            frame(Entry(f"out/{file}".encode(), 0o100644, 0, len(text)))
            + (frame(Data(0, len(text)), text) if text else b"")
            for file, text in files.items()
        )
        self.answers[name] = data + frame(End())

    def _fail(self, path: str) -> None:
        if failures := self.failures.get(path.split("/")[3]):
            self._down = self.away
            raise failures.pop(0)


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Daemon:
    monkeypatch.setattr(futures, "POLL_S", 0.01)
    monkeypatch.setattr(futures, "AWAY_S", 0.01)
    unpickled.clear()
    return Daemon()


@pytest.fixture
def client(daemon: Daemon, tmp_path: Path) -> Client:
    client = Client(tmp_path)
    client.agent = daemon  # type: ignore[assignment]
    return client


def over(*jobs: Job[Any]) -> None:
    assert not concurrent.futures.wait(jobs, 20).not_done


def test_answer_is_unpickled_by_the_one_who_asks(client: Client, daemon: Daemon) -> None:
    daemon.answer("code", pickle.dumps(Code()), kind="value")
    error = {"kind": "error", "type": "KeyError", "text": "'x'", "traceback": "in there"}
    daemon.answer("fails", pickle.dumps(KeyError("x")), **error)
    daemon.answer("text", **error)
    daemon.answer("good", pickle.dumps((1, 2)), kind="value")
    daemon.answer("plain", kind="value", value=[3])
    code, fails, text, good, plain = (client.job(name) for name in ("code", "fails", "text", "good", "plain"))
    over(code, fails, text, good, plain)
    assert not unpickled
    for _ in range(2):
        with pytest.raises(JobFailed, match="cannot be read here"):
            code.result()
    assert unpickled == [threading.current_thread().name]
    assert isinstance(code.exception(), JobFailed)
    with pytest.raises(KeyError) as found:
        fails.result()
    assert isinstance(found.value.__cause__, RemoteTraceback) and fails.exception() is found.value
    assert str(text.exception()) == "KeyError: 'x'"
    assert good.result() is good.result() and good.result() == (1, 2) and good.exception() is None
    assert plain.result() == [3]


def test_exit_of_a_callback_ends_no_other_future(client: Client, daemon: Daemon) -> None:
    daemon.answer("sooner", kind="value", value=1)
    daemon.answer("fails", kind="error", type="E", text="", traceback="")
    later = client.job("later")
    for name in ("sooner", "fails"):
        job = client.job(name)
        job.add_done_callback(lambda job: sys.exit(0))
        over(job)
    daemon.answer("later", kind="value", value=2)
    assert later.result(20) == 2


def test_daemon_that_restarts_while_it_sends_an_answer_is_awaited(client: Client, daemon: Daemon) -> None:
    daemon.failures["job"], daemon.away = [no_daemon.stopped()], 2 * futures.FETCH_TRIES
    daemon.answer("job", kind="value", value=1)
    assert client.job("job").result(20) == 1


@pytest.mark.parametrize("error", [MeshError("its holder does not answer"), no_daemon.stopped()])
def test_answer_that_cannot_be_fetched_holds_up_no_other(
    client: Client, daemon: Daemon, monkeypatch: pytest.MonkeyPatch, error: MeshError
) -> None:
    monkeypatch.setattr(futures, "POLL_S", 0.05)
    daemon.failures["lost"] = [error] * futures.FETCH_TRIES
    daemon.answer("lost", kind="value", value=1)
    daemon.answer("good", kind="value", value=2)
    began = time.monotonic()
    lost, good = client.job("lost"), client.job("good")
    assert good.result(20) == 2 and not lost.done()
    with pytest.raises(JobFailed, match=r"is over \(done\), but "):
        lost.result(20)
    assert not daemon.failures["lost"] and time.monotonic() - began > 0.05 * (2 + 4 + 8 + 16)


def test_futures_end_in_a_forked_process(client: Client, daemon: Daemon) -> None:
    before = client.job("before")
    lock = client._lock
    lock.acquire()  # as its thread could hold it
    child = os.fork()
    if not child:
        code = 0
        signal.alarm(10)
        try:
            daemon.answer("before", kind="value", value=1)
            daemon.answer("new", kind="value", value=2)
            code = before.result(10) + client.job("new").result(10)
        finally:
            os._exit(code)
    lock.release()
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 3
    daemon.answer("before", kind="value", value=1)
    assert before.result(20) == 1


def test_shutdown_cancels_all_calls_before_it_raises(client: Client, daemon: Daemon) -> None:
    executor = Executor(client, max_workers=3)
    executor._jobs = [Job(client, name) for name in ("a", "b", "c")]
    daemon.failures["a"] = [MeshError("the daemon hangs")]
    with pytest.raises(MeshError, match="hangs"):
        executor.shutdown(cancel_futures=True)
    assert [job.cancelled() for job in executor._jobs] == [False, True, True]

"""Python functions as jobs of the mesh: `mesh.submit`, `mesh.Client`, `mesh.Job`, `mesh.Executor`; mesh/aio.py has them for
coroutines. docs/python-api.md.

>>> import mesh
>>> job = mesh.submit(sum, [1, 2, 3])
>>> job.result()
6
"""

import codecs
import concurrent.futures
import io
import json
import math
import pickle
import sqlite3
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeVar, Unpack, cast
from urllib.parse import quote

from mesh.api.errors import ExitCode, MeshError
from mesh.client import Client as Agent
from mesh.layout import Layout, state_directory
from mesh.needs import Needs, NeedsTable
from mesh.parcel import Terms, code_of, order_of, pack
from mesh.remote import ANSWER, PICKLE, Call

T = TypeVar("T")

LOOK_S = 0.3  # between two looks at jobs that are waited for, as `mesh run`; ours
AWAY_S = 2.0  # the same, while the daemon does not answer; ours
FETCH_TRIES = 5  # for a result whose holders do not answer just now; ours
FEW = 8  # jobs that are asked for one by one; ours
RECEIPT_LOOKS = 10  # for the receipt of what has just ended; ours
LOG_TAIL = 2000  # characters of it in an error; ours
UNKNOWN_S = 60.0  # for a daemon that was restarted to hear of a job again; ours
SHUT_DOWN = "cannot schedule new futures after shutdown"  # as concurrent.futures says it


class JobFailed(MeshError):
    """The job ended without a result of its function: it was killed, could not start, or raised what cannot be packed."""

    def __init__(self, text: str) -> None:
        super().__init__(text, ExitCode.JOB_FAILED)


class RemoteTraceback(Exception):
    """The cause of an exception that a function raised in its job: the traceback there."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


class Job(concurrent.futures.Future[T], Generic[T]):
    """A job of the mesh as a future: `result`, `exception`, `done`, `add_done_callback`, `concurrent.futures.wait`."""

    def __init__(self, client: "Client", id: str) -> None:
        super().__init__()
        self.client, self.id = client, id
        self.known_s = time.monotonic()  # when the daemon last knew it
        self._ending = threading.RLock()  # who cancels here may meet who hears that it was cancelled

    def __repr__(self) -> str:
        return f"<mesh.Job {self.id[:8]}{' over' if self.done() else ''}>"

    def info(self) -> dict[str, Any]:
        """All that `mesh ps --json` has of it, as it is now."""
        found: dict[str, Any] = self.client.agent.get(f"/v1/jobs/{self.id}")["job"]
        return found

    @property
    def state(self) -> str:
        """As it is now: `waiting`, `running`, `done`, `failed`, `cancelled` and others (docs/jobs.md)."""
        return str(self.info()["state"])

    def running(self) -> bool:
        return not self.done() and self.state == "running"

    def wait(self, timeout: float | None = None) -> str:
        """Until it is over: its state then. TimeoutError after `timeout` seconds."""
        until = math.inf if timeout is None else time.monotonic() + timeout
        if not concurrent.futures.wait([self], timeout).done:
            raise self.late(timeout)
        while (told := self.info())["outcome"] is None:  # one that was cancelled ends after its future
            if time.monotonic() >= until:
                raise self.late(timeout)
            time.sleep(LOOK_S)
        return str(told["state"])

    def late(self, timeout: float | None) -> TimeoutError:
        return TimeoutError(f"job {self.id[:8]} is not over after {timeout:g} s")

    def cancel(self) -> bool:
        """End it. False if it is over already."""
        if self.done():
            return self.cancelled()
        (told,) = self.client.agent.post(f"/v1/jobs/{self.id}/cancel")["jobs"]
        if told["already"]:
            return False
        self.set_cancelled()
        return True

    def set_cancelled(self) -> None:
        """Of the future alone: the job is, or will be."""
        with self._ending:
            if not self.done() and super().cancel():
                self.set_running_or_notify_cancel()

    def logs(self, follow: bool = False) -> Generator[str, None, None]:
        """Its output over all its attempts, in pieces; with `follow` until it is over."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for piece in self.client.agent.stream(f"/v1/jobs/{self.id}/log" + ("?follow=1" if follow else "")):
            yield decoder.decode(piece)

    def events(self) -> list[dict[str, Any]]:
        """What all who have a part in it say happened, oldest first."""
        found: list[dict[str, Any]] = self.client.agent.get(f"/v1/events?job={self.id}")["events"]
        return found

    def migrate(self, to: str = "") -> dict[str, Any]:
        """Move it to a node, or to the best other one."""
        answer: dict[str, Any] = self.client.agent.post(f"/v1/jobs/{self.id}/migrate", {"to": to})
        return answer


class _Watched(NamedTuple):
    """How a job's answer is read, and of which code it tells what that needs."""

    results: Literal["pickle", "json"]
    code: str = ""


class Client:
    """One daemon of this user. `state`: its state directory, as `mesh --state`; without it, as the command line has it."""

    def __init__(self, state: str | Path | None = None) -> None:
        self._layout = Layout(state_directory(None if state is None else str(state)))
        self.agent = Agent(self._layout.socket)
        self._needs = NeedsTable(self._layout.needs)
        self._watched: dict[Job[Any], _Watched] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def submit(self, function: Callable[..., T], /, *args: Any, **terms: Unpack[Terms]) -> Job[T]:
        """Run `function(*args)` on the mesh. Arguments by keyword: `functools.partial`, or `mesh.Call`."""
        if not callable(function):
            raise TypeError(f"{function!r} is not callable: submit(function, *args), with terms of the job by keyword")
        call = function if isinstance(function, Call) else Call(function, *args)
        return self.submit_call(call, terms)

    def submit_call(self, call: Call, terms: Terms) -> Job[Any]:
        code = ""
        if terms.get("gpus") == "auto":
            code = code_of(call, terms)
            asked = {name: value for name, value in terms.items() if name != "gpus"}
            terms = cast(Terms, {**self._needs.of(code).gpu_terms(), **asked})
        order = order_of(call, terms)
        results = terms.get("results", "pickle")
        with tempfile.TemporaryDirectory(prefix="mesh-call-") as name:
            pack(call, Path(name), terms.get("workdir"), results)
            answer = self.agent.post("/v1/jobs", {**order, "workdir": str(Path(name).resolve())}, timeout_s=600)
        return self._watch(answer["job"], _Watched(results, code))

    def needs(self, function: Callable[..., Any], **terms: Unpack[Terms]) -> Needs:
        """What runs of the same code with `gpus="auto"` have needed so far, in the same image and by the same Python."""
        return self._needs.of(code_of(Call(function), terms))

    def job(self, id: str, results: Literal["pickle", "json"] = "pickle") -> Job[Any]:
        """A job that was submitted before, by its id or the beginning of it, or by its name."""
        return self._watch(self.agent.get(f"/v1/jobs/{quote(id, safe='')}")["job"]["job"], _Watched(results))

    def jobs(self) -> list[dict[str, Any]]:
        """All jobs that the daemon knows, as `mesh ps --json` has them."""
        found: list[dict[str, Any]] = self.agent.get("/v1/jobs")["jobs"]
        return found

    def nodes(self) -> list[dict[str, Any]]:
        """All nodes that the daemon knows, as `mesh nodes --json` has them."""
        found: list[dict[str, Any]] = self.agent.get("/v1/nodes")["nodes"]
        return found

    def _watch(self, id: str, watched: "_Watched") -> Job[Any]:
        job: Job[Any] = Job(self, id)
        with self._lock:
            self._watched[job] = watched
            if self._thread is None:
                self._thread = threading.Thread(target=self._look, name="mesh-jobs", daemon=True)
                self._thread.start()
        return job

    def _look(self) -> None:
        """One thread looks at all jobs that are waited for; it ends with the last of them."""
        while True:
            with self._lock:
                for job in [job for job in self._watched if job.done()]:
                    del self._watched[job]
                watched = dict(self._watched)
                if not watched:
                    self._thread = None
                    return
            pause = LOOK_S
            try:
                self._settle(watched)
            except MeshError:  # its daemon is restarted, or will be: the jobs go on without it
                pause = AWAY_S
                for job in watched:
                    job.known_s = time.monotonic()
            except Exception as error:  # no future may wait for a thread that is gone
                for job in watched:
                    _end(job, error)
            time.sleep(pause)

    def _settle(self, watched: "dict[Job[Any], _Watched]") -> None:
        """Those that are over get what they gave."""
        states = self._states(list(watched))
        for job, how in watched.items():
            state = states.get(job.id)
            if state is not None:
                job.known_s = time.monotonic()
            elif time.monotonic() - job.known_s > UNKNOWN_S:
                _end(job, JobFailed(f"job {job.id[:8]} is not known to the daemon any more"))
            if state is None or state["outcome"] is None or job.done():
                continue
            if state["outcome"]["kind"] == "cancelled":
                job.set_cancelled()
                continue
            if how.code and state["outcome"]["kind"] == "done":
                self._learn(how.code, job)
            try:
                value = _answer_of(job, state["outcome"], how.results)
            except Exception as error:
                _end(job, error)
            else:
                with suppress(concurrent.futures.InvalidStateError):  # it was cancelled meanwhile
                    job.set_result(value)

    def _learn(self, code: str, job: Job[Any]) -> None:
        """What is not known then stays so: the next run asks for a whole GPU again."""
        with suppress(MeshError, sqlite3.Error):
            for _ in range(RECEIPT_LOOKS):
                found = self.agent.get(f"/v1/jobs/{job.id}/needs")
                if found["receipts"]:
                    self._needs.learn(code, job.id, found["vram_mib"], found["ran_s"])
                    return
                time.sleep(LOOK_S)

    def _states(self, jobs: list[Job[Any]]) -> dict[str, dict[str, Any]]:
        if len(jobs) > FEW:
            return {row["job"]: row for row in self.jobs()}
        found = {}
        for job in jobs:
            try:
                found[job.id] = job.info()
            except MeshError as error:
                if error.code != ExitCode.NOT_FOUND:
                    raise
        return found


class Executor(concurrent.futures.Executor):
    """Jobs of the mesh by the standard interface: for `dask.config.set(scheduler=...)` and all else that takes an executor.

    Each call is a job of its own, with these terms; that costs about a second, so give it calls that take minutes.
    """

    def __init__(self, client: Client | None = None, max_workers: int | None = None, **terms: Unpack[Terms]) -> None:
        self._client, self._terms = client or _default(), terms
        self._max_workers = max_workers or max(1, sum(row["slots"] for row in self._client.nodes()))  # which Dask reads
        self._jobs: list[Job[Any]] = []
        self._closed = False
        self._lock = threading.Lock()

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Job[T]:
        if self._closed:
            raise RuntimeError(SHUT_DOWN)
        job: Job[T] = self._client.submit_call(Call(fn, *args, **kwargs), self._terms)
        with self._lock:
            if not self._closed:
                self._jobs = [*(one for one in self._jobs if not one.done()), job]
                return job
        job.cancel()  # another thread has shut this down meanwhile, and did not see it
        raise RuntimeError(SHUT_DOWN)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        with self._lock:
            self._closed = True
        for job in self._jobs if cancel_futures else []:
            job.cancel()
        if wait:
            concurrent.futures.wait(self._jobs)


def submit(function: Callable[..., T], /, *args: Any, **terms: Unpack[Terms]) -> Job[T]:
    """Run `function(*args)` on the mesh, by this user's daemon: a future. See `Client.submit` and `Terms`."""
    return _default().submit(function, *args, **terms)


def _default() -> Client:
    return _client_of(str(state_directory()))


@cache
def _client_of(state: str) -> Client:
    return Client(state)


def _end(job: Job[Any], error: Exception) -> None:
    with suppress(concurrent.futures.InvalidStateError):  # it was cancelled meanwhile
        job.set_exception(error)


def _answer_of(job: Job[Any], outcome: dict[str, Any], results: str) -> Any:
    files = _published(job, outcome)
    if ANSWER not in files:
        raise JobFailed(f"job {job.id[:8]}: {outcome['detail']}{_tail(job)}")
    try:
        told = json.loads(files[ANSWER])
        packed = files[PICKLE] if told["as"] == "pickle" else None
        if packed is not None and results == "json":
            raise JobFailed(
                f"job {job.id[:8]} answers with what is no JSON, which is not looked at with results='json'"
            )
        if told["kind"] == "value":
            return told["value"] if packed is None else pickle.loads(packed)
        words, there = f"{told['type']}: {told['text']}", RemoteTraceback(str(told["traceback"]))
    except (ValueError, KeyError, TypeError, pickle.UnpicklingError, ImportError, AttributeError, EOFError) as error:
        raise JobFailed(f"job {job.id[:8]} is done, but its answer cannot be read here: {error!r}") from error
    raise _raised(words, packed) from there


def _raised(words: str, packed: bytes | None) -> Exception:
    """What a function raised; in words if that cannot be unpacked, or would end this program too."""
    if packed is None:
        return JobFailed(words)
    try:
        error = pickle.loads(packed)
    except Exception as unreadable:
        return JobFailed(f"{words} (it cannot be unpacked here: {unreadable!r})")
    return error if isinstance(error, Exception) else JobFailed(words)


def _published(job: Job[Any], outcome: dict[str, Any]) -> dict[str, bytes]:
    """The files of its output directory that make its answer; none if it left none."""
    for number in range(FETCH_TRIES):
        try:
            data = b"".join(job.client.agent.stream(f"/v1/jobs/{job.id}/files?path=out"))
        except MeshError as error:
            if error.code == ExitCode.NOT_FOUND:
                return {}
            if number == FETCH_TRIES - 1:
                raise JobFailed(f"job {job.id[:8]} is over ({outcome['detail']}), but {error}") from error
            time.sleep(LOOK_S * 2**number)
            continue
        wanted = {f"out/{name}": name for name in (ANSWER, PICKLE)}
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            found = [(wanted[member.name], tar.extractfile(member)) for member in tar if member.name in wanted]
            return {name: file.read() for name, file in found if file is not None}
    raise AssertionError("unreachable")


def _tail(job: Job[Any]) -> str:
    """The end of what it printed, for an error."""
    try:
        printed = "".join(job.logs())[-LOG_TAIL:].strip()
    except MeshError:
        return ""
    return f"\nThe end of its output:\n{printed}" if printed else ""

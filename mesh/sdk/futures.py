"""Python functions as jobs of the mesh: `mesh.submit`, `mesh.Client`, `mesh.Job`, `mesh.Executor`; mesh/sdk/aio.py has them for
coroutines. docs/how-to/python-api.md.

>>> import mesh
>>> job = mesh.submit(sum, [1, 2, 3])
>>> job.result()
6
"""

import codecs
import concurrent.futures
import json
import math
import os
import pickle
import sqlite3
import stat
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from datetime import datetime
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeVar, Unpack, cast
from urllib.parse import quote

from mesh.api.client import Client as Agent
from mesh.api.file_stream import entries
from mesh.daemon.layout import node_layout
from mesh.sdk.payload import Terms, code_of, order_of, pack
from mesh.sdk.remote import ANSWER, PICKLE, Call
from mesh.sdk.resource_history import Needs, NeedsTable
from mesh.util.errors import ExitCode, MeshError

T = TypeVar("T")

POLL_S = 0.3  # between two polls of awaited jobs, as in `mesh run` (own choice)
AWAY_S = 2.0  # the same, while the daemon does not answer (own choice)
ANSWER_LIMIT = 1 << 30  # bytes of an answer, which is read into memory (own choice)
FETCH_TRIES = 5  # attempts to fetch a result (own choice)
FEW = 8  # most jobs that are polled one by one (own choice)
RECEIPT_POLLS = 10  # for the receipt of a job that has just ended (own choice)
LOG_READ = 64 << 20  # characters of output that are read for it (own choice)
LOG_TAIL = 2000  # characters of output in an error (own choice)
UNKNOWN_S = 60.0  # for a restarted daemon to learn of a job again (own choice)
SHUT_DOWN = "cannot schedule new futures after shutdown"  # the message of concurrent.futures


class JobFailed(MeshError):
    """The job ended without a result: it was killed, could not start, or raised an error that cannot be pickled."""

    def __init__(self, text: str) -> None:
        super().__init__(text, ExitCode.NO_EXIT_CODE)


class RemoteTraceback(Exception):
    """The remote traceback, as the cause of an exception that a function raised in its job."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


class Job(concurrent.futures.Future[T], Generic[T]):
    """A job of the mesh as a future: `result`, `exception`, `done`, `add_done_callback`, `concurrent.futures.wait`."""

    def __init__(self, client: "Client", id: str) -> None:
        super().__init__()
        self.client, self.id = client, id
        self.known_s = time.monotonic()  # time at which the daemon last listed it
        self.fetches, self.fetch_s = 0, 0.0  # attempts to fetch its answer that failed, and when to try again
        self._ending = threading.RLock()  # guards cancel() against the thread that learns of the cancellation

    def __repr__(self) -> str:
        return f"<mesh.Job {self.id[:8]}{' over' if self.done() else ''}>"

    def result(self, timeout: float | None = None) -> T:
        """Return the function's result, or raise its exception. Unpickles both: that can run code of the node that answered."""
        error = self.exception(timeout)
        try:
            if error is not None:
                raise error
        finally:
            del error  # or its traceback would keep it
        found: Any = super().result()
        value: T = found.unpacked[0] if isinstance(found, _Packed) else found
        return value

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the exception of the function, or None. Unpickles the answer, as `result` does."""
        self.client.poll()
        error = super().exception(timeout)
        found = super().result() if error is None else error
        with self._ending:
            return found.unpacked[1] if isinstance(found, _Packed) else error

    def info(self) -> dict[str, Any]:
        """Return its present state, as `mesh ps --json` has it."""
        found: dict[str, Any] = self.client.agent.get(f"/v1/jobs/{self.id}")["job"]
        return found

    @property
    def state(self) -> str:
        """Return its present state: `waiting`, `running`, `done`, `failed`, `cancelled` and others (docs/explanation/jobs.md)."""
        return str(self.info()["state"])

    def running(self) -> bool:
        return not self.done() and self.state == "running"

    def wait(self, timeout: float | None = None) -> str:
        """Wait until it has ended and return its state. TimeoutError after `timeout` seconds."""
        until = math.inf if timeout is None else time.monotonic() + timeout
        if not concurrent.futures.wait([self], timeout).done:
            raise self.late(timeout)
        while (reply := self.info())["outcome"] is None:  # a cancelled job ends after its future
            if time.monotonic() >= until:
                raise self.late(timeout)
            time.sleep(POLL_S)
        return str(reply["state"])

    def late(self, timeout: float | None) -> TimeoutError:
        return TimeoutError(f"job {self.id[:8]} is not over after {timeout:g} s")

    def cancel(self) -> bool:
        """Cancel it. Return False if it has ended already."""
        if self.done():
            return self.cancelled()
        (reply,) = self.client.agent.post(f"/v1/jobs/{self.id}/cancel")["jobs"]
        if reply["already"]:
            return False
        self.set_cancelled()
        return True

    def set_cancelled(self) -> None:
        """Mark the future as cancelled; the job is cancelled separately."""
        with self._ending:
            if not self.done() and super().cancel():
                self.set_running_or_notify_cancel()

    def logs(
        self, follow: bool = False, since: datetime | None = None, timestamps: bool = False, rank: int = 0
    ) -> Generator[str, None, None]:
        """Yield the output of all its attempts in pieces; with `follow`, until it has ended.

        `since` selects the lines printed from that time on; `timestamps` puts the time before each line; `rank` is that of the
        node, of a job on several.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        path = f"/v1/jobs/{self.id}/log?follow={int(follow)}&timestamps={int(timestamps)}&rank={rank}"
        path += f"&since_unix_ms={max(0, int(1000 * since.timestamp()))}" if since is not None else ""
        for piece in self.client.agent.stream(path):
            yield decoder.decode(piece)

    def events(self) -> list[dict[str, Any]]:
        """Return its events from all nodes involved, oldest first."""
        found: list[dict[str, Any]] = self.client.agent.get(f"/v1/events?job={self.id}")["events"]
        return found

    def migrate(self, to: str = "") -> dict[str, Any]:
        """Move it to a node, or to the best other one."""
        answer: dict[str, Any] = self.client.agent.post(f"/v1/jobs/{self.id}/migrate", {"to": to})
        return answer


class _Watched(NamedTuple):
    """An awaited job: the format of its result, and the code whose needs it measures."""

    results: Literal["pickle", "json"]
    code: str = ""


class Client:
    """A client of this user's daemon. `state`: its state directory, as for `mesh --state` (default: that of the command line)."""

    def __init__(self, state: str | Path | None = None) -> None:
        self._layout = node_layout(None if state is None else str(state))
        self.agent = Agent(self._layout.socket)
        self._needs = NeedsTable(self._layout.needs)
        self._watched: dict[Job[Any], _Watched] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        _clients.add(self)

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
        """Return what earlier runs of the same code with `gpus="auto"` needed, in the same image and Python."""
        return self._needs.of(code_of(Call(function), terms))

    def job(self, id: str, results: Literal["pickle", "json"] = "pickle") -> Job[Any]:
        """Return a job by its name, its id or the beginning of its id."""
        return self._watch(self.agent.get(f"/v1/jobs/{quote(id, safe='')}")["job"]["job"], _Watched(results))

    def jobs(self) -> list[dict[str, Any]]:
        """Return all jobs that the daemon knows, as `mesh ps --json` has them."""
        found: list[dict[str, Any]] = self.agent.get("/v1/jobs")["jobs"]
        return found

    def nodes(self) -> list[dict[str, Any]]:
        """Return all nodes that the daemon knows, as `mesh nodes --json` has them."""
        found: list[dict[str, Any]] = self.agent.get("/v1/nodes")["nodes"]
        return found

    def _watch(self, id: str, watched: "_Watched") -> Job[Any]:
        job: Job[Any] = Job(self, id)
        with self._lock:
            self._watched[job] = watched
        self.poll()
        return job

    def poll(self) -> None:
        """Start the thread that polls all awaited jobs, unless it runs in this process."""
        with self._lock:
            if self._thread is None and self._watched:
                self._thread = threading.Thread(target=self._look, name="mesh-jobs", daemon=True)
                self._thread.start()

    def forked(self) -> None:
        """Forget the parent's thread, which could have held the lock."""
        self._lock, self._thread = threading.Lock(), None

    def _look(self) -> None:
        """Poll all awaited jobs; end with the last of them."""
        while True:
            with self._lock:
                for job in [job for job in self._watched if job.done()]:
                    del self._watched[job]
                watched = dict(self._watched)
                if not watched:
                    self._thread = None
                    return
            pause = POLL_S
            try:
                self._settle(watched)
            except MeshError:  # the daemon may be restarting; the jobs continue
                pause = AWAY_S
                for job in watched:
                    job.known_s = time.monotonic()
            except BaseException as error:  # no future may wait for a dead thread
                for job in watched:
                    _end(job, error)
            time.sleep(pause)

    def _settle(self, watched: "dict[Job[Any], _Watched]") -> None:
        """Settle the futures of jobs that have ended."""
        states = self._states(list(watched))
        for job, how in watched.items():
            state = states.get(job.id)
            if state is not None:
                job.known_s = time.monotonic()
            elif time.monotonic() - job.known_s > UNKNOWN_S:
                _end(job, JobFailed(f"job {job.id[:8]} is not known to the daemon any more"))
            if state is None or state["outcome"] is None or job.done() or time.monotonic() < job.fetch_s:
                continue
            try:
                self._finish(job, state["outcome"], how)
            except BaseException as error:  # a callback's SystemExit, too, is of this job alone
                _end(job, error)

    def _finish(self, job: Job[Any], outcome: dict[str, Any], how: "_Watched") -> None:
        if outcome["kind"] == "cancelled":
            job.set_cancelled()
            return
        files = _published(job, outcome)
        if files is None:
            return
        if how.code and outcome["kind"] == "done":
            self._learn(how.code, job)
        value = _answer_of(job, outcome, files, how.results)
        with suppress(concurrent.futures.InvalidStateError):  # cancelled meanwhile
            if isinstance(value, _Packed) and value.words:
                job.set_exception(value)
            else:
                job.set_result(value)

    def _learn(self, code: str, job: Job[Any]) -> None:
        """Store the needs of a run. If they are unknown, the next run asks for a whole GPU again."""
        with suppress(MeshError, sqlite3.Error):
            for _ in range(RECEIPT_POLLS):
                found = self.agent.get(f"/v1/jobs/{job.id}/needs")
                if found["receipts"]:
                    self._needs.learn(code, job.id, found["vram_mib"], found["ran_s"])
                    return
                time.sleep(POLL_S)

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
        self._max_workers = max_workers or max(1, sum(row["slots"] for row in self._client.nodes()))  # read by Dask
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
        job.cancel()  # another thread shut this executor down meanwhile
        raise RuntimeError(SHUT_DOWN)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        with self._lock:
            self._closed = True
        errors = []
        for job in self._jobs if cancel_futures else []:
            try:
                job.cancel()
            except MeshError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        if wait:
            concurrent.futures.wait(self._jobs)


def submit(function: Callable[..., T], /, *args: Any, **terms: Unpack[Terms]) -> Job[T]:
    """Run `function(*args)` on the mesh through this user's daemon; return a future. See `Client.submit` and `Terms`."""
    return _default().submit(function, *args, **terms)


def _default() -> Client:
    return _client_of(str(node_layout().root))


@cache
def _client_of(state: str) -> Client:
    return Client(state)


_clients: "weakref.WeakSet[Client]" = weakref.WeakSet()


def _forked() -> None:
    for client in list(_clients):
        client.forked()


os.register_at_fork(after_in_child=_forked)


def _end(job: Job[Any], error: BaseException) -> None:
    with suppress(BaseException):  # it is cancelled meanwhile, or a callback raises SystemExit
        job.set_exception(error)


class _Packed(Exception):
    """A pickled answer. `words`: the exception that it is, as text; empty for a value.

    It is unpickled when its user asks, since that runs code of the node that answered, as the user and in their thread.
    """

    def __init__(self, id: str, data: bytes, words: str = "") -> None:
        super().__init__(words)
        self._id, self._data, self.words = id, data, words

    @cached_property
    def unpacked(self) -> tuple[Any, Exception | None]:
        """The value and the exception of the answer; one of them is None."""
        if self.words:
            error = _raised(self.words, self._data)
            error.__cause__ = self.__cause__
            return None, error
        try:
            value = pickle.loads(self._data)
        except (Exception, SystemExit) as error:
            return None, _unreadable(self._id, error)
        self._data = b""
        return value, None


def _unreadable(id: str, error: BaseException) -> JobFailed:
    failed = JobFailed(f"job {id[:8]} is done, but its answer cannot be read here: {error!r}")
    failed.__cause__ = error
    return failed


def _answer_of(job: Job[Any], outcome: dict[str, Any], files: dict[str, bytes], results: str) -> Any:
    """Return the value that a job's files hold, or a `_Packed` one. JobFailed if there is none."""
    if ANSWER not in files:
        raise JobFailed(f"job {job.id[:8]}: {outcome['detail']}{_tail(job)}")
    try:
        reply = json.loads(files[ANSWER])
        packed = files[PICKLE] if reply["as"] == "pickle" else None
        if packed is not None and results == "json":
            raise JobFailed(
                f"job {job.id[:8]} answers with what is no JSON, which is not looked at with results='json'"
            )
        if reply["kind"] == "value":
            return reply["value"] if packed is None else _Packed(job.id, packed)
        words, there = f"{reply['type']}: {reply['text']}", RemoteTraceback(str(reply["traceback"]))
    except (ValueError, KeyError, TypeError) as error:
        raise _unreadable(job.id, error) from error
    if packed is None:
        raise JobFailed(words) from there
    raised = _Packed(job.id, packed, words)
    raised.__cause__ = there
    return raised


def _raised(words: str, packed: bytes) -> Exception:
    """Return the exception that a function raised; a JobFailed if it cannot be unpickled or would end this program."""
    try:
        error = pickle.loads(packed)
    except (Exception, SystemExit) as unreadable:
        return JobFailed(f"{words} (it cannot be unpacked here: {unreadable!r})")
    return error if isinstance(error, Exception) else JobFailed(words)


def _published(job: Job[Any], outcome: dict[str, Any]) -> dict[str, bytes] | None:
    """Return the files of its output directory that hold its answer; empty if there are none, None to try again later."""
    try:
        return _answer_files(job.client.agent.stream(f"/v1/jobs/{job.id}/files?path=out"))
    except JobFailed:
        raise
    except MeshError as error:
        if error.code == ExitCode.NOT_FOUND:
            return {}
        job.fetches += 1  # one at a restart of the daemon: nothing is fetched before it answers again
        if job.fetches == FETCH_TRIES:
            raise JobFailed(f"job {job.id[:8]} is over ({outcome['detail']}), but {error}") from error
        job.fetch_s = time.monotonic() + POLL_S * 2**job.fetches
        return None


def _answer_files(pieces: Iterator[bytes]) -> dict[str, bytes]:
    wanted = {f"out/{name}".encode(): name for name in (ANSWER, PICKLE)}
    found: dict[str, bytes] = {}
    for entry, data in entries(pieces, 2**63):  # all but the answer is skipped
        if entry.path not in wanted or not stat.S_ISREG(entry.mode):
            continue
        if entry.size > ANSWER_LIMIT:
            raise JobFailed(
                f"the answer has {entry.size} bytes, and {ANSWER_LIMIT >> 20} MiB fit into memory: "
                "write large results to $MESH_OUT_DIR and copy them with `mesh cp`"
            )
        content = bytearray(entry.size)
        for offset, piece in data:
            content[offset : offset + len(piece)] = piece
        found[wanted[entry.path]] = bytes(content)
    return found


def _tail(job: Job[Any]) -> str:
    """Return the end of its output, for an error message."""
    try:
        printed, read = "", 0
        for piece in job.logs():
            printed, read = (printed + piece)[-LOG_TAIL:], read + len(piece)
            if read > LOG_READ:
                break
    except MeshError:
        return ""
    printed = printed.strip()
    return f"\nThe end of its output:\n{printed}" if printed else ""

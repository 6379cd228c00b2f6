"""Python functions as jobs of the mesh: `mesh.submit`, `mesh.Client`, `mesh.Job`, `mesh.Executor`. docs/python-api.md.

>>> import mesh
>>> job = mesh.submit(sum, [1, 2, 3])
>>> job.result()
6
"""

import codecs
import concurrent.futures
import inspect
import io
import json
import os
import pickle
import shutil
import sqlite3
import sys
import sysconfig
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, Literal, NamedTuple, TypedDict, TypeVar, Unpack, cast
from urllib.parse import quote

from mesh.api.errors import ExitCode, MeshError
from mesh.client import Client as Agent
from mesh.duration import parse_duration
from mesh.layout import Layout, state_directory
from mesh.needs import Needs, NeedsTable, code_hash
from mesh.remote import ANSWER, CALL, HEADER, PICKLE, Call
from mesh.size import parse_size

T = TypeVar("T")

LOOK_S = 0.3  # between two looks at jobs that are waited for, as `mesh run`; ours
AWAY_S = 2.0  # the same, while the daemon does not answer; ours
FETCH_TRIES = 5  # for a result whose holders do not answer just now; ours
FEW = 8  # jobs that are asked for one by one; ours
RECEIPT_LOOKS = 10  # for the receipt of what has just ended; ours
LOG_TAIL = 2000  # characters of it in an error; ours
CARRIED = ".mesh-call"  # in the job's working directory
CKPT = "mesh-checkpoints"

_LAUNCH = f"""import os, sys
here = os.path.join(os.getcwd(), {CARRIED!r})
sys.path[0:1] = [here, os.getcwd()]
from pathlib import Path
from mesh.remote import main
sys.exit(main(Path(here)))
"""
# What travels of this package stands before the one that may be installed there, and that is behind it for all else.
_PACKAGE = "from pkgutil import extend_path\n__path__ = extend_path(__path__, __name__)\n"


class Terms(TypedDict, total=False):
    """What a job may be given, all of it by keyword; without any it needs no GPU. Sizes are MiB or as `"6g"`, times are seconds
    or as `"1h30m"`.

    `python`: what runs the function there; by default this very interpreter's path, in an image `python3`. It must be of the
    same minor version. `workdir`: a directory to take along; what lies in it can be imported. `results="json"`: take nothing but
    JSON back, so that whoever runs the function cannot run anything here. `checkpoint_every`: of an object with `checkpoint`,
    seconds, or `"auto"` (the default) for the mesh's own rule. `gpus="auto"`: one, with as much memory as runs of the same code
    have needed before. All others are as `mesh submit` has them.
    """

    gpus: int | Literal["auto"]
    gpu_share: int
    gpu_share_limit: int
    gpu_model: str
    vram: int | str
    vram_limit: int | str
    memory: int | str
    cpus: float
    image: str
    engine: Literal["process", "docker"]
    name: str
    env: dict[str, str]
    zone: str
    grace: float | str
    retries: int
    priority: int
    after: "Sequence[Job[Any] | str]"
    max_time: float | str
    home: str
    replicas: int
    checkpoint_every: float | str
    python: str
    workdir: str | Path
    results: Literal["pickle", "json"]


class JobFailed(MeshError):
    """The job ended without a result of its function: it was killed, could not start, or raised what cannot be packed."""

    def __init__(self, text: str) -> None:
        super().__init__(text, ExitCode.JOB_FAILED)


class RemoteTraceback(Exception):
    """The cause of an exception that a function raised in its job: the traceback there."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


class Job(concurrent.futures.Future[T], Generic[T]):
    """A job of the mesh as a future: `result`, `exception`, `done`, `add_done_callback`, `concurrent.futures.wait`, `await`."""

    def __init__(self, client: "Client", id: str) -> None:
        super().__init__()
        self.client, self.id = client, id

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
        if not concurrent.futures.wait([self], timeout).done:
            raise TimeoutError(f"job {self.id[:8]} is not over after {timeout:g} s")
        return self.state

    def cancel(self) -> bool:
        """End it. False if it is over already."""
        if self.done():
            return self.cancelled()
        (told,) = self.client.agent.post(f"/v1/jobs/{self.id}/cancel")["jobs"]
        if told["already"]:
            return False
        if super().cancel():
            self.set_running_or_notify_cancel()
        return True

    def logs(self, follow: bool = False) -> Iterator[str]:
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

    def __await__(self) -> Generator[Any, None, T]:
        import asyncio

        return asyncio.wrap_future(self).__await__()


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
        call = function if isinstance(function, Call) else Call(function, *args)
        return self.submit_call(call, terms)

    def submit_call(self, call: Call, terms: Terms) -> Job[Any]:
        code = ""
        if terms.get("gpus") == "auto":
            code = _code_of(call, terms)
            terms = cast(
                Terms,
                {**terms, **self._needs.of(code).gpu_terms(), **({"vram": terms["vram"]} if "vram" in terms else {})},
            )
        order = _order(call, terms)
        results = terms.get("results", "pickle")
        with tempfile.TemporaryDirectory(prefix="mesh-call-") as name:
            _pack(call, Path(name), terms.get("workdir"), results)
            answer = self.agent.post("/v1/jobs", {**order, "workdir": str(Path(name).resolve())}, timeout_s=600)
        return self._watch(answer["job"], _Watched(results, code))

    def needs(self, function: Callable[..., Any], **terms: Unpack[Terms]) -> Needs:
        """What runs of the same code with `gpus="auto"` have needed so far, in the same image and by the same Python."""
        return self._needs.of(_code_of(Call(function), terms))

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
                states = self._states(list(watched))
            except MeshError:  # its daemon is restarted, or will be: the jobs go on without it
                states, pause = {}, AWAY_S
            for job, how in watched.items():
                state = states.get(job.id)
                if state is not None and state["outcome"] is not None and not job.done():
                    if how.code and state["outcome"]["kind"] == "done":
                        self._learn(how.code, job)
                    _settle(job, state, how.results)
            time.sleep(pause)

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
        if len(jobs) <= FEW:
            return {job.id: job.info() for job in jobs}
        return {row["job"]: row for row in self.jobs()}


class Executor(concurrent.futures.Executor):
    """Jobs of the mesh by the standard interface: for `dask.config.set(scheduler=...)` and all else that takes an executor.

    Each call is a job of its own, with these terms; that costs about a second, so give it calls that take minutes.
    """

    def __init__(self, client: Client | None = None, max_workers: int | None = None, **terms: Unpack[Terms]) -> None:
        self._client, self._terms = client or _default(), terms
        self._max_workers = max_workers or max(1, sum(row["slots"] for row in self._client.nodes()))  # which Dask reads
        self._jobs: list[Job[Any]] = []
        self._closed = False

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Job[T]:
        if self._closed:
            raise RuntimeError("cannot schedule new futures after shutdown")
        job: Job[T] = self._client.submit_call(Call(fn, *args, **kwargs), self._terms)
        self._jobs = [*(one for one in self._jobs if not one.done()), job]
        return job

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
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


# --- there


def _order(call: Call, terms: Terms) -> dict[str, Any]:
    """The body of a submission."""
    unknown = set(terms) - Terms.__annotations__.keys()
    if unknown:
        raise TypeError(
            f"no such term: {', '.join(sorted(unknown))}. What a job may be given is in mesh.futures.Terms; "
            "arguments of the function by keyword go by functools.partial"
        )
    given: dict[str, Any] = dict(terms)
    for name in ("workdir", "results"):
        given.pop(name, None)
    every = given.pop("checkpoint_every", "auto")
    order: dict[str, Any] = {"name": getattr(call.function, "__name__", type(call.function).__name__)}
    given.pop("python", None)
    order["argv"] = [_python(terms), f"{CARRIED}/launch.py"]
    for name in ("vram", "vram_limit", "memory"):
        if name in given:
            size = given.pop(name)
            order[f"{name}_mib"] = size if isinstance(size, int) else parse_size(size)
    for name in ("grace", "max_time"):
        if name in given:
            order[f"{name}_s"] = _seconds(given.pop(name))
    if "after" in given:
        given["after"] = [one.id if isinstance(one, Job) else one for one in given["after"]]
    if "gpu_share" in given:
        given.setdefault("gpus", 1)
    if hasattr(call.function, "checkpoint"):
        timing = every if every == "auto" else _seconds(every)
        order |= {"ckpt": CKPT, "ckpt_mode": "rename", "ckpt_every": timing}
    return order | given


def _code_of(call: Call, terms: Terms) -> str:
    return code_hash(call.function, terms.get("image", ""), _python(terms))


def _python(terms: Terms) -> str:
    return terms.get("python") or ("python3" if "image" in terms else sys.executable)


def _seconds(time_: float | str) -> float:
    return parse_duration(time_) if isinstance(time_, str) else float(time_)


def _pack(call: Call, where: Path, workdir: str | Path | None, results: str) -> None:
    """Into a new directory: the user's files, the call, and what runs it."""
    cloudpickle = _cloudpickle()
    if workdir is not None:
        from mesh.jobs.workdir import collect_files

        for name, source in collect_files(Path(workdir), (CKPT,)).items():
            target = where / name.removeprefix("work/")
            target.parent.mkdir(parents=True, exist_ok=True)
            _link(source, target)
    carried = where / CARRIED
    (carried / "mesh").mkdir(parents=True)
    package = Path(__file__).parent
    (carried / "mesh" / "__init__.py").write_text(_PACKAGE + (package / "__init__.py").read_text())
    for name in ("job.py", "remote.py"):
        shutil.copy(package / name, carried / "mesh" / name)
    shutil.copytree(
        Path(cloudpickle.__file__).parent, carried / "cloudpickle", ignore=shutil.ignore_patterns("__pycache__")
    )
    (carried / "launch.py").write_text(_LAUNCH)
    (carried / HEADER).write_text(json.dumps({"python": sys.version_info[:2], "results": results}))
    modules = _own_modules(call, workdir)
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        (carried / CALL).write_bytes(cloudpickle.dumps(call))
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def _cloudpickle() -> Any:
    try:
        import cloudpickle
    except ImportError as error:
        raise MeshError("Python functions are packed by cloudpickle: pip install 'campus-mesh[api]'") from error
    return cloudpickle


def _own_modules(call: Call, workdir: str | Path | None) -> list[ModuleType]:
    """That of the function, if it is the user's own and not there where the function will run: it goes along by value."""
    found = inspect.getmodule(call.function) or inspect.getmodule(type(call.function))
    file = getattr(found, "__file__", None)
    if found is None or file is None or found.__name__ == "__main__":
        return []
    paths = sysconfig.get_paths()
    installed = [Path(paths[name]).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    installed += [Path(__file__).parent.resolve(), *([] if workdir is None else [Path(workdir).resolve()])]
    return [] if any(Path(file).resolve().is_relative_to(place) for place in installed) else [found]


def _link(source: Path, target: Path) -> None:
    if source.is_symlink():
        target.symlink_to(os.readlink(source))  # noqa: PTH115
        return
    try:
        os.link(source, target)
    except OSError:  # on another file system
        shutil.copy2(source, target)


# --- back


def _settle(job: Job[Any], state: dict[str, Any], results: str) -> None:
    """The future of a job that is over gets what that gave."""
    outcome = state["outcome"]
    if outcome["kind"] == "cancelled":
        concurrent.futures.Future.cancel(job)
        job.set_running_or_notify_cancel()
        return
    try:
        value = _answer_of(job, outcome, results)
    except BaseException as error:
        job.set_exception(error)
    else:
        job.set_result(value)


def _answer_of(job: Job[Any], outcome: dict[str, Any], results: str) -> Any:
    files = _published(job, outcome)
    if ANSWER not in files:
        raise JobFailed(f"job {job.id[:8]}: {outcome['detail']}{_tail(job)}")
    told = json.loads(files[ANSWER])
    packed = files.get(PICKLE) if told["as"] == "pickle" else None
    if packed is not None and results == "json":
        raise JobFailed(f"job {job.id[:8]} answers with what is no JSON, which is not looked at with results='json'")
    if told["kind"] == "value":
        return told["value"] if packed is None else pickle.loads(packed)
    try:
        error = JobFailed(f"{told['type']}: {told['text']}") if packed is None else pickle.loads(packed)
    except Exception as unreadable:
        error = JobFailed(f"{told['type']}: {told['text']} (it cannot be unpacked here: {unreadable!r})")
    error.__cause__ = RemoteTraceback(told["traceback"])
    raise error


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
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            wanted = {f"out/{name}": name for name in (ANSWER, PICKLE)}
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

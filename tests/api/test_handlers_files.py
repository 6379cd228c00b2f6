"""`mesh cp` from a running job, whose guest changes its files meanwhile, and from a lender that stalls; `submit --out`."""

import asyncio
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from mesh.api.file_stream import entries, packed
from mesh.api.handlers import files, submission
from mesh.api.handlers import lookup as lookup_module
from mesh.api.handlers.checkpoints import CheckpointHandlers
from mesh.api.handlers.jobs import JobHandlers
from mesh.api.handlers.logs import LogReader
from mesh.api.handlers.lookup import JobLookup
from mesh.api.handlers.submission import AGAIN_MAX_S, ASKED_MAX_S, DELIVERED_AT_ONCE, GIVEN_UP_AT, Delivery
from mesh.api.requests import SubmitOrder
from mesh.checkpoints.replicator import Expected, FetchError, Replicator
from mesh.checkpoints.witness_group import Words
from mesh.consensus.effects import WitnessRecord
from mesh.journal import JournalError
from mesh.model.record import JobRecord, Outcome
from mesh.model.spec import SpecError, check_spec, format_job
from mesh.rpc import streams
from mesh.util.backoff import Backoff
from mesh.util.errors import ExitCode, MeshError
from tests.ckptstore.worlds import open_store, save, write_tree
from tests.consensus.worlds import A, B, C, make_spec, make_witness


def names(top: Path) -> list[str]:
    return [os.fsdecode(entry.path) for entry, _ in entries(packed(top), 1 << 20)]


def before_opening(monkeypatch: pytest.MonkeyPatch, name: str, act: Callable[[Path], None]) -> None:
    """Act between the listing of a directory and its opening."""
    really = os.open

    def late(path: Any, *arguments: Any, **more: Any) -> int:
        if Path(path).name == name:
            monkeypatch.setattr(os, "open", really)
            act(Path(path))
        return really(path, *arguments, **more)

    monkeypatch.setattr(os, "open", late)


@pytest.fixture
def ckpts(tmp_path: Path) -> Path:
    for step in (1, 2):
        (tmp_path / "ckpts" / f"step-{step}").mkdir(parents=True)
        (tmp_path / "ckpts" / f"step-{step}" / "state").write_text(str(step))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "secret").touch()
    (tmp_path / "elsewhere" / "link-of-the-owner").symlink_to("/home/owner/private")
    (tmp_path / "ckpts" / "link").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(tmp_path / "ckpts" / "pipe")
    return tmp_path / "ckpts"


def test_stream_has_files_directories_and_links(ckpts: Path) -> None:
    below = {f"ckpts/{name}" for name in ("link", "step-1", "step-2", "step-1/state", "step-2/state")}
    whole = names(ckpts)
    assert whole[0] == "ckpts" and set(whole[1:]) == below and len(whole) == 6
    assert names(ckpts / "link") == []


def test_stream_skips_directory_removed_while_listing(ckpts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before_opening(monkeypatch, "step-1", shutil.rmtree)
    left = names(ckpts)
    assert "ckpts/step-2/state" in left and "ckpts/step-1/state" not in left


@pytest.mark.parametrize("name", ["step-1", "state"])
def test_stream_follows_no_link_put_in_place_while_listing(
    name: str, ckpts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replace(path: Path) -> None:
        shutil.move(path, ckpts / "moved")
        path.symlink_to(ckpts.parent / "elsewhere")

    before_opening(monkeypatch, name, replace)
    found = names(ckpts)
    assert "ckpts" in found and not any("secret" in path or "owner" in path for path in found)


@pytest.mark.parametrize(
    "path", ["../secret", "work/../../secret", "work/link", "work/near/x", "/etc/passwd", "no/file"]
)
async def test_path_out_of_the_directories_of_a_job_is_no_file(path: str, tmp_path: Path) -> None:
    base = tmp_path / "attempt"
    for name in (*files.PLACES, "workshop"):
        (base / name).mkdir(parents=True)
        (base / name / "x").touch()
    (tmp_path / "secret").touch()
    (base / "work" / "link").symlink_to(tmp_path / "secret")
    (base / "work" / "near").symlink_to(base / "workshop")
    (base / "work" / "saved").symlink_to(base / "ckpt")
    nothing: Any = None
    jobs: Any = SimpleNamespace(attempts={JOB: SimpleNamespace(base=base)})
    handlers = files.FileHandlers(jobs, nothing, nothing)
    assert b"".join([piece async for piece in handlers.running_files(JOB, "work/saved/x")])
    with pytest.raises(MeshError, match="has no file") as refused:
        handlers.running_files(JOB, path)
    assert refused.value.code == ExitCode.NOT_FOUND


async def test_files_of_a_job_are_for_its_user_only(tmp_path: Path) -> None:
    nothing: Any = None
    lookup = foreign_job()
    with pytest.raises(MeshError, match="ada's, not yours"):
        await files.FileHandlers(nothing, nothing, lookup).copy("x", "work")
    with pytest.raises(MeshError, match="ada's, not yours"):
        await CheckpointHandlers(nothing, nothing, nothing, lookup).pull("x", None, str(tmp_path / "new"))


async def test_description_tells_whose_a_job_is_and_no_status() -> None:
    """Any member can publish that its own job is another user's, or that another's job is its own."""
    theirs, own = foreign_job(claimed="bob"), foreign_job(claimed="mallory", key=BOB_KEY)
    with pytest.raises(MeshError, match="ada's, not yours"):
        await theirs.find_own("x")
    assert (await own.find_own("x")).job == JOB


BOB_KEY = b"b" * 32


def foreign_job(claimed: str = "ada", key: bytes = b"a" * 32) -> JobLookup:
    """Bob's node, which knows one job: its description is signed by a node of the user with this key."""
    nothing: Any = None

    async def describe(job: bytes) -> Any:
        return SimpleNamespace(user="ada", user_key=key)

    async def submitted(job: bytes) -> None:
        return None

    membership: Any = SimpleNamespace(credentials=SimpleNamespace(user="bob", user_key=BOB_KEY))
    jobs: Any = SimpleNamespace(
        participant=SimpleNamespace(witnesses={}),
        vouching=SimpleNamespace(describe=describe),
        authority=nothing,
    )
    journal: Any = SimpleNamespace(submitted=submitted)
    lookup = JobLookup(b"me", membership, journal, nothing, jobs, nothing)
    status: Any = SimpleNamespace(job=JOB, user=claimed, runner=b"me", outcome=None, witnesses=())
    lookup.find_job = lambda text: status  # type: ignore[method-assign]
    return lookup


class Dripping:
    """A peer that answers with the pieces that a test gives, or only after hours."""

    def __init__(self, pieces: Callable[[], AsyncIterator[bytes]], opens: bool = True) -> None:
        self._pieces, self._opens = pieces, opens

    @asynccontextmanager
    async def stream(self, *request: object) -> AsyncIterator[Any]:
        if not self._opens:
            await asyncio.Event().wait()
        reader = asyncio.StreamReader()

        async def feed() -> None:
            async for piece in self._pieces():
                reader.feed_data(piece)
            reader.feed_eof()

        feeding = asyncio.create_task(feed())
        try:
            yield SimpleNamespace(
                content=SimpleNamespace(readany=lambda: reader.read(1 << 20), readexactly=reader.readexactly)
            )
        finally:
            feeding.cancel()


async def drip() -> AsyncIterator[bytes]:
    while True:
        yield b"\0\0\0\1"
        await asyncio.sleep(0.01)


async def fast() -> AsyncIterator[bytes]:
    """Take longer than STALL_S below as a whole, but not for one piece, even on a loaded machine."""
    for _ in range(15):
        yield bytes(streams.STALL_BYTES)
        await asyncio.sleep(0.2)


async def copy(peer: Dripping) -> int:
    nothing: Any = None
    handlers = files.FileHandlers(nothing, peer, nothing)  # type: ignore[arg-type]
    return sum([len(piece) async for piece in handlers._from_runner(b"lender", b"j" * 16, "work")])


async def test_lender_that_drips_or_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async with asyncio.timeout(60):
        monkeypatch.setattr(streams, "STALL_S", 2.0)
        assert await copy(Dripping(fast)) == 15 * streams.STALL_BYTES
        monkeypatch.setattr(streams, "STALL_S", 0.2)
        assert await copy(Dripping(drip)) < 4000  # and the end says that it is not complete
        with pytest.raises(MeshError, match="does not answer"):
            await copy(Dripping(drip, opens=False))


@pytest.mark.parametrize("opens", [True, False])
async def test_log_is_read_from_a_witness_if_the_host_never_ends_its_answer(
    opens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "STALL_S", 0.2)

    async def endless() -> AsyncIterator[bytes]:
        yield b"\0\0"
        await asyncio.Event().wait()

    nothing: Any = None
    lookup: Any = SimpleNamespace(me=b"me")
    reader = LogReader(nothing, nothing, nothing, Dripping(endless, opens), lookup)  # type: ignore[arg-type]
    async with asyncio.timeout(60):
        assert [piece async for piece in reader._from(b"lender", b"j" * 16, 0, b"lender", 0, False, 0)] == []


# --- files that a job published

JOB, LATER = b"j" * 16, b"l" * 16
NOW = 1_800_000_000.0
KEEP_S = 7 * 86_400.0


def ended(unix: float, manifest: bytes | None = b"m") -> Outcome:
    return Outcome("done", "exit 0", 0, manifest, (), int(unix * 1000))


def record(outcome: Outcome | None) -> WitnessRecord:
    final = outcome is not None
    return msgspec.structs.replace(make_witness().witness_record, record=JobRecord(outcome=outcome), final=final)


class Finished:
    """A job that is over, with one published file in this node's store, and what was done to bring it home."""

    def __init__(self, directory: Path) -> None:
        write_tree(directory / "in", {"weights": b"w"})
        self.store = open_store(directory / "store")
        manifest = save(self.store, directory / "in", job=JOB, prefix="out").id
        self.status: Any = SimpleNamespace(
            job=JOB, attempts=(), witnesses=(), outcome=ended(NOW, manifest), runner=None, commit=None
        )
        self.stated: list[Outcome | None] | None = None  # by its witnesses; None: they confirm the status
        self.few, self.lock = False, None
        self.problem: Exception | None = None
        self.told: list[tuple[str, str]] = []
        self.requests: list[tuple[bytes, str]] = []
        nothing: Any = None
        replicator = Replicator(nothing, self.store)
        replicator.fetch = self._fetch  # type: ignore[assignment,method-assign]
        jobs: Any = SimpleNamespace(
            replicator=replicator,
            mesh_view=SimpleNamespace(adverts=dict),
            keyring=SimpleNamespace(cipher=self._cipher),
            job_table={JOB: self.status, LATER: self.status},
            vouching=SimpleNamespace(words=self._words),
            event_log=SimpleNamespace(add=lambda job, kind, reason, new: self.told.append((new, reason))),
        )
        self.lookup = JobLookup(b"me", nothing, nothing, self.store, jobs, nothing)
        self.lookup.find_job = lambda text: self.status  # type: ignore[method-assign]
        self.lookup.spec_of = self._spec_of  # type: ignore[method-assign]
        self.handlers = handlers = JobHandlers(nothing, nothing, nothing, nothing, jobs, nothing, self.lookup)
        journal: Any = SimpleNamespace(request_delivery=self._request, requested_deliveries=self._none)
        self.delivery = Delivery("output", journal, jobs, handlers.deliver, "brought home", KEEP_S)

    async def deliver(self, directory: Path) -> None:
        await self.delivery._deliver(JOB, str(directory))

    async def _words(self, job: bytes) -> Words:
        stated = [self.status.outcome] if self.stated is None else self.stated
        return Words(dict(zip((A, B, C), map(record, stated), strict=False)), self.few)

    async def _spec_of(self, status: object) -> Any:
        return make_spec(lock=self.lock)

    async def _cipher(self, *asked: object) -> None:
        return None

    async def _fetch(self, manifest: bytes, sources: list[bytes], of: Expected) -> None:
        assert (of.job, of.user) == (self.status.job, "ada") and of.may_sign(A)
        if self.problem is not None:
            raise self.problem

    async def _none(self, kind: str) -> dict[bytes, str]:
        return {}

    async def _request(self, kind: str, job: bytes, directory: str) -> None:
        self.requests.append((job, directory))


@pytest.fixture
def finished(tmp_path: Path) -> Iterator[Finished]:
    world = Finished(tmp_path)
    yield world
    world.store.close()


async def test_files_that_cannot_be_written_are_a_usage_error(finished: Finished, tmp_path: Path) -> None:
    (tmp_path / "afile").touch()
    for target in (tmp_path / "afile" / "x", tmp_path / ("n" * 300)):
        with pytest.raises(MeshError, match="could not be written") as caught:
            outcome = finished.status.outcome
            await finished.lookup.restore(finished.status, outcome.manifest, outcome.holders, "out", target)
        assert caught.value.code == ExitCode.USAGE


@pytest.mark.parametrize("stated", [[], [None, None, None], ["status", None, None]])
async def test_status_alone_delivers_nothing(
    finished: Finished, tmp_path: Path, stated: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any member can publish one, also of an end so long ago that no node keeps the files."""
    monkeypatch.setattr(submission.time, "time", lambda: NOW + 2 * KEEP_S)
    true = finished.status.outcome
    finished.stated = [true if one else None for one in stated]
    await finished.delivery.want(JOB, str(tmp_path / "home"))
    for _ in range(2 * GIVEN_UP_AT):
        await finished.deliver(tmp_path / "home")
    assert not (tmp_path / "home").exists() and finished.requests == [(JOB, str(tmp_path / "home"))]
    assert [new for new, _ in finished.told] == ["not brought home yet"]
    [row] = finished.delivery.rows()
    assert "most of the job's witnesses" in row.problem and not row.over
    asked, now = finished.delivery._asked, time.monotonic()
    assert not asked.is_due(JOB, now + ASKED_MAX_S - 60) and asked.is_due(JOB, now + ASKED_MAX_S)
    assert not finished.delivery._again.failures(JOB), "a rumour does not put off what comes after it"
    finished.stated = [true, true, None]
    finished.status.outcome = ended(NOW, b"made up by a member")
    await finished.deliver(tmp_path / "home")
    assert (tmp_path / "home" / "weights").read_bytes() == b"w" and finished.delivery.rows() == []


@pytest.mark.parametrize("few", [False, True])
async def test_pull_takes_what_witnesses_state(finished: Finished, tmp_path: Path, few: bool) -> None:
    """One of a few that are left is enough for a person who asks; none is not."""
    true, finished.status.outcome = finished.status.outcome, ended(NOW, b"made up by a member")
    for stated in ([], [None], [None, None, true] if not few else [true, finished.status.outcome]):
        finished.stated, finished.few = stated, few
        with pytest.raises(MeshError, match="that can be asked name no results"):
            await finished.handlers.pull("job", str(tmp_path / "new"))
    finished.stated = [None, None, true] if few else [true, None, true]
    await finished.handlers.pull("job", str(tmp_path / "new"))
    assert (tmp_path / "new" / "weights").read_bytes() == b"w"


async def test_files_of_a_finished_job_are_those_that_witnesses_state(finished: Finished, tmp_path: Path) -> None:
    """Python's results come so, and are unpickled. They lie in the clear where a start removes what a crash has left."""
    true, finished.status.outcome = finished.status.outcome, ended(NOW, b"made up by a member")
    nothing, jobs = None, tmp_path / "jobs"
    service: Any = SimpleNamespace(directory=jobs)
    reader = files.FileHandlers(service, nothing, finished.lookup)  # type: ignore[arg-type]
    finished.stated = [None, None, true]
    with pytest.raises(MeshError, match="that can be asked name no results"):
        await reader._from_store(finished.status, "out")
    finished.stated = [true, None, true]
    stream = await reader._from_store(finished.status, "out")
    assert [(place / "out" / "weights").read_bytes() for place in jobs.iterdir()] == [b"w"]
    assert b"weights" in b"".join([piece async for piece in stream]) and not list(jobs.iterdir())


async def test_files_of_a_running_job_come_from_the_node_that_witnesses_name() -> None:
    peers, named = list[bytes](), list[bytes | None]()

    @asynccontextmanager
    async def stream(node: bytes, *request: object) -> AsyncIterator[Any]:
        peers.append(node)
        yield SimpleNamespace(content=SimpleNamespace(readany=nothing))

    async def nothing() -> bytes:
        return b""

    async def runner_of(job: bytes) -> bytes | None:
        return named.pop()

    async def is_own(status: object) -> None:
        pass

    status = SimpleNamespace(job=JOB, runner=C, outcome=None)  # as C, a member, publishes
    lookup: Any = SimpleNamespace(me=B, find_job=lambda text: status, check_owner=is_own, runner_of=runner_of)
    unused: Any = None
    peer: Any = SimpleNamespace(stream=stream)
    handlers = files.FileHandlers(unused, peer, lookup)
    named.append(None)
    with pytest.raises(MeshError, match="do not say where it runs"):
        await handlers.copy("job", "out")
    named.append(A)
    assert [piece async for piece in await handlers.copy("job", "out")] == []
    assert peers == [A]


@pytest.mark.parametrize(("here", "views", "found"), [(True, (), b"me"), (False, (None,), None), (False, (C, None), A)])
async def test_witnesses_are_asked_where_a_job_runs(here: bool, views: tuple[bytes | None, ...], found: bytes) -> None:
    async def runner_of(job: bytes) -> bytes:
        return A

    nothing: Any = None
    shown = [SimpleNamespace(runner=runner, outcome=None) for runner in views]
    jobs: Any = SimpleNamespace(
        participant=SimpleNamespace(runners={JOB} if here else ()),
        job_table=SimpleNamespace(views_of=lambda job: shown),
        vouching=SimpleNamespace(runner_of=runner_of),
    )
    assert await JobLookup(b"me", nothing, nothing, nothing, jobs, nothing).runner_of(JOB) == found


@pytest.mark.parametrize("users", [("mallory",), ("mallory", "bob")])
async def test_owner_cancels_a_job_that_others_call_their_own(users: tuple[str, ...]) -> None:
    orders, nothing = list[Any](), cast(Any, None)
    lookup = foreign_job(claimed="mallory", key=BOB_KEY)
    views: Any = [SimpleNamespace(user=user, outcome=None, runner=A, witnesses=(B,), submitter=C) for user in users]
    status = SimpleNamespace(**vars(lookup.find_job("x")) | {"array": None, "state": "running"})
    lookup.find_jobs = lambda text: [status]  # type: ignore[method-assign,list-item]
    lookup._jobs.job_table = SimpleNamespace(views_of=lambda job: views)  # type: ignore[assignment]
    lookup._jobs.cancel = lambda *order: orders.append(order)  # type: ignore[method-assign]

    async def withdraw(job: bytes) -> None:
        pass

    submissions: Any = SimpleNamespace(withdraw=withdraw)
    handlers = JobHandlers(nothing, nothing, nothing, nothing, lookup._jobs, submissions, lookup)
    [row] = (await handlers.cancel("x")).jobs
    assert row.state == "cancelling" and orders == [(JOB, "bob", [A, B, C])]


async def test_files_without_the_key_of_their_job_are_refused(finished: Finished, tmp_path: Path) -> None:
    """A member can have a status name a manifest that it has signed; only who ran the job has the key."""
    outcome = finished.status.outcome
    finished.lock = SimpleNamespace(realm=b"r" * 8)
    with pytest.raises(MeshError, match="no files of this job"):
        await finished.lookup.restore(finished.status, outcome.manifest, (), "out", tmp_path / "new")
    finished.lock, finished.status.job = None, LATER
    with pytest.raises(MeshError, match="no files of this job"):
        await finished.lookup.restore(finished.status, outcome.manifest, (), "out", tmp_path / "new")
    assert not (tmp_path / "new").exists()


async def test_files_of_a_cache_take_a_part_of_the_free_disk(
    finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lender writes the result, and nobody asked for all of it."""
    status, outcome, here = finished.status, finished.status.outcome, tmp_path / "here"
    monkeypatch.setattr(lookup_module, "free_bytes", lambda target: 2 * (4096 + 1) - 1)
    with pytest.raises(MeshError, match="there is room for 4096"):
        await finished.lookup.restore(status, outcome.manifest, (), "out", here, part=2)
    with pytest.raises(MeshError, match="at most 0 are taken"):
        await finished.lookup.restore(status, outcome.manifest, (), "out", here, most=0)
    assert not here.exists()
    await finished.lookup.restore(status, outcome.manifest, (), "out", here)
    assert (here / "weights").read_bytes() == b"w"


async def test_delivery_gives_up_a_directory_that_cannot_be_written(finished: Finished, tmp_path: Path) -> None:
    (tmp_path / "afile").touch()
    await finished.deliver(tmp_path / "afile" / "x")
    assert [new for new, _ in finished.told] == ["not brought home"] and finished.requests == [(JOB, "")]
    [row] = finished.delivery.rows()
    assert row.job == format_job(JOB) and row.over and "could not be written" in row.problem


async def test_delivery_takes_any_exception_as_a_failed_try(finished: Finished, tmp_path: Path) -> None:
    finished.problem = RuntimeError("a fault of this program")
    await finished.delivery.want(JOB, str(tmp_path / "home"))
    finished.requests.clear()
    await finished.deliver(tmp_path / "home")
    assert finished.requests == []
    [row] = finished.delivery.rows()
    assert row.problem == "a fault of this program" and not row.over
    finished.problem = None
    await finished.deliver(tmp_path / "home")
    assert finished.delivery.rows() == []
    assert finished.requests == [(JOB, "")] and (tmp_path / "home" / "weights").read_bytes() == b"w"


async def test_delivery_waits_for_holders_and_reports_that_once(finished: Finished, tmp_path: Path) -> None:
    finished.problem = FetchError("none of its holders answers")
    for _ in range(50):
        await finished.deliver(tmp_path / "home")
    again, now = finished.delivery._again, time.monotonic()
    assert not again.is_due(JOB, now + AGAIN_MAX_S - 60) and again.is_due(JOB, now + AGAIN_MAX_S)
    assert [new for new, _ in finished.told] == ["not brought home yet"] and finished.requests == []


async def test_delivery_gives_up_what_nodes_need_not_keep_any_more(
    finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its user was away for weeks; the holders may need an hour to be found."""
    monkeypatch.setattr(submission.time, "time", lambda: NOW + KEEP_S + 1)
    finished.problem = FetchError("none of its holders answers")
    await finished.delivery.want(JOB, "home")
    for _ in range(GIVEN_UP_AT - 1):
        await finished.deliver(tmp_path / "home")
    assert finished.requests == [(JOB, "home")]
    await finished.deliver(tmp_path / "home")
    assert finished.requests[1:] == [(JOB, "")] and not finished.delivery._wanted
    new, reason = finished.told[-1]
    assert new == "not brought home" and "nodes keep files for 7 days after a job's end" in reason


async def test_hopeless_deliveries_keep_no_new_one_waiting(finished: Finished, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission, "LOOK_S", 0.01)
    finished.delivery._again = Backoff(0.0, 0.0)
    hopeless = {number.to_bytes(16): number for number in range(200)}
    table: Any = finished.delivery._jobs.job_table
    table |= {job: SimpleNamespace(outcome=ended(NOW + number)) for job, number in hopeless.items()}
    table[LATER] = SimpleNamespace(outcome=ended(NOW))  # long ago
    begun, most, came = list[str](), 0, asyncio.Event()

    async def bring(job: bytes, directory: str, outcome: Outcome) -> str:
        nonlocal most
        begun.append(directory)
        most = max(most, len(finished.delivery._delivering))
        if directory == "new":
            came.set()
            return "1 file"
        await asyncio.sleep(0.02)
        raise MeshError("its files cannot be reached now")

    finished.delivery._bring = bring
    for job, number in hopeless.items():
        await finished.delivery.want(job, f"{number}")
    running = asyncio.create_task(finished.delivery.run())
    async with asyncio.timeout(60):
        while len(begun) < 200:
            await asyncio.sleep(0.01)
    await finished.delivery.want(LATER, "new")
    async with asyncio.timeout(60):
        await came.wait()
    assert begun[:DELIVERED_AT_ONCE] == ["199", "198", "197", "196"] and most == DELIVERED_AT_ONCE
    assert begun.index("new") <= 200 + 2 * DELIVERED_AT_ONCE
    running.cancel()
    await asyncio.wait([running])
    assert not finished.delivery._delivering


async def test_journal_that_cannot_write_ends_the_delivery(finished: Finished, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission, "LOOK_S", 0.0)

    async def fail(kind: str, job: bytes, target: str) -> None:
        raise JournalError("the disk is full")

    await finished.delivery.want(JOB, "home")
    finished.status.outcome = ended(NOW, None)
    finished.delivery._journal.request_delivery = fail  # type: ignore[method-assign]
    async with asyncio.timeout(60):
        with pytest.raises(JournalError):
            await finished.delivery.run()


async def test_delivery_is_not_tried_before_its_time(finished: Finished, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission, "LOOK_S", 0.0)
    tried = asyncio.Event()

    async def deliver(job: bytes, *arguments: object) -> None:
        assert job == JOB
        tried.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(finished.delivery, "_deliver", deliver)
    for _ in range(12):
        finished.delivery._again.failed(LATER, time.monotonic())
    for job in (LATER, JOB):
        await finished.delivery.want(job, "/home/her/results")
    running = asyncio.create_task(finished.delivery.run())
    await asyncio.wait([running, asyncio.create_task(tried.wait())], return_when=asyncio.FIRST_COMPLETED)
    assert not running.done()
    running.cancel()


def test_environment_without_a_command_is_left_to_the_check_of_the_description(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "uv.lock"):
        (tmp_path / name).touch()
    assert submission._command(SubmitOrder(argv=[], uv=True, workdir=str(tmp_path)))["argv"] == ()
    with pytest.raises(SpecError, match="needs a command"):
        check_spec(make_spec(argv=()))

"""Working directories go when no job needs them, never before, and no member has those of others removed."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from ckptstore.errors import QuotaExceeded
from ckptstore.manifest import encode_manifest
from ckptstore.store import WORKDIR_SHARE, Store
from mesh.checkpoints.workdirs import ASKED, FALSE_S, UNNAMED_S, Workdirs
from mesh.consensus.status import JobStatus
from mesh.journal import Journal
from mesh.model.spec import JobSpec
from tests.checkpoints.test_retention import DAY_S, NOW, ONE, THREE, TWO, journal, told
from tests.ckptstore.worlds import fake_seal, feed, open_store, save, stream, write_tree
from tests.consensus.worlds import make_spec

__all__ = ["journal"]  # a fixture

KEEP_S = 7 * DAY_S
LATER = NOW + 365 * DAY_S


class Holder:
    """A node that holds working directories. Time is that of both clocks."""

    def __init__(self, directory: Path, journal: Journal) -> None:
        self.store, self._directory, self._journal = open_store(directory / "store"), directory, journal
        self.views: dict[bytes, list[JobStatus]] = {}
        self.ends: set[bytes] = set()
        self.specs: dict[bytes, JobSpec] = {}
        self.asked: list[bytes] = []
        self.restarted()

    def restarted(self) -> None:
        self.workdirs = Workdirs(
            self.store, self._journal, KEEP_S, lambda: self.views, lambda: self.ends, self._describe
        )

    async def _describe(self, job: bytes) -> JobSpec | None:
        self.asked.append(job)
        return self.specs.get(job)

    def upload(self, user: str = "ada", size: int = 1000) -> bytes:
        return upload(self.store, self._directory, user, size)

    def say(self, job: bytes, workdir: bytes, over: bool = False, user: str = "ada", true: bool = True) -> None:
        """Have a node publish a job that names a working directory; `true`: the job's description does so."""
        self.views.setdefault(job, []).append(msgspec.structs.replace(told(job, over), workdir=workdir))
        if true:
            self.specs[job] = make_spec(workdir=workdir, user=user)

    async def tidy(self, now: float) -> None:
        await self.workdirs.tidy(now, now)

    def kept(self) -> set[bytes]:
        return {info.id for info in self.store.manifests()}


def upload(store: Store, directory: Path, user: str, size: int) -> bytes:
    write_tree(directory / "in", {"train.py": os.urandom(size)})
    work = directory / "in"
    return save(store, work, 0, 0, job=bytes(16), prefix="work", kind="workdir", created_unix=1, user=user).id


@pytest.fixture
def holder(tmp_path: Path, journal: Journal) -> Holder:
    return Holder(tmp_path, journal)


async def test_working_directory_stays_for_some_days_after_its_last_job(holder: Holder) -> None:
    workdir = holder.upload()
    holder.say(ONE, workdir)
    holder.say(TWO, workdir)
    await holder.tidy(NOW)
    holder.views.clear()
    holder.say(ONE, workdir, over=True)
    await holder.tidy(NOW + DAY_S)
    holder.say(TWO, workdir, over=True)
    await holder.tidy(NOW + 5 * DAY_S)
    await holder.tidy(NOW + 5 * DAY_S + KEEP_S - 1)
    assert holder.kept() == {workdir}
    await holder.tidy(NOW + 5 * DAY_S + KEEP_S)
    assert not holder.kept()


async def test_end_that_only_this_node_remembers_counts(holder: Holder) -> None:
    workdir = holder.upload()
    await holder.workdirs.name(workdir, ONE)
    await holder.tidy(NOW)
    holder.ends.add(ONE)
    await holder.tidy(NOW + DAY_S)
    await holder.tidy(NOW + DAY_S + KEEP_S)
    assert not holder.kept()


async def test_job_of_which_nothing_is_heard_keeps_its_working_directory(holder: Holder, journal: Journal) -> None:
    workdir = holder.upload()
    holder.say(ONE, workdir)
    await holder.tidy(NOW)
    holder.views.clear()
    await holder.tidy(LATER)
    holder.restarted()
    await holder.workdirs.restore()
    await holder.tidy(LATER + DAY_S)
    await holder.tidy(LATER + 3 * DAY_S)
    assert holder.kept() == {workdir}


async def test_end_is_remembered_over_a_restart(holder: Holder) -> None:
    workdir = holder.upload()
    holder.say(ONE, workdir, over=True)
    await holder.tidy(NOW)
    holder.views.clear()
    holder.restarted()
    await holder.workdirs.restore()
    await holder.tidy(NOW + KEEP_S)
    assert not holder.kept()


async def test_job_that_continues_after_all_keeps_its_working_directory(holder: Holder) -> None:
    workdir = holder.upload()
    holder.say(ONE, workdir, over=True)
    await holder.tidy(NOW)
    holder.views.clear()
    holder.say(ONE, workdir)
    await holder.tidy(NOW + DAY_S)
    await holder.tidy(LATER)
    assert holder.kept() == {workdir}


async def test_one_that_no_job_names_goes_after_a_day_of_this_nodes_life(holder: Holder) -> None:
    workdir, named = holder.upload(), holder.upload()
    await holder.workdirs.name(named, ONE)
    await holder.tidy(NOW)
    await holder.tidy(NOW + UNNAMED_S - 1)
    assert holder.kept() == {workdir, named}
    holder.restarted()  # it knows nothing of the jobs of others yet
    await holder.workdirs.restore()
    await holder.tidy(NOW + 30 * DAY_S)
    assert holder.kept() == {workdir, named}
    await holder.tidy(NOW + 30 * DAY_S + UNNAMED_S)
    assert holder.kept() == {named}


async def test_day_without_a_job_is_not_counted_by_a_clock_that_can_be_set(holder: Holder) -> None:
    workdir = holder.upload()
    await holder.workdirs.tidy(NOW, 0.0)
    await holder.workdirs.tidy(LATER, 60.0)
    assert holder.kept() == {workdir}


async def test_job_submitted_during_the_look_keeps_its_working_directory(holder: Holder) -> None:
    """The last moment: its upload is a day old, and the job is submitted while this node asks about another one."""
    workdir, other = holder.upload(), holder.upload()
    holder.say(TWO, other)
    waiting = asyncio.Event()

    async def slow(job: bytes) -> JobSpec | None:
        await holder.workdirs.name(workdir, ONE)
        waiting.set()
        return None

    await holder.tidy(NOW)
    holder.workdirs._links.clear()
    holder.workdirs._describe = slow
    await holder.tidy(NOW + 2 * UNNAMED_S)
    assert waiting.is_set() and holder.kept() == {workdir, other}


async def test_hint_keeps_one_whose_job_nobody_describes(holder: Holder) -> None:
    workdir = holder.upload()
    holder.say(ONE, workdir, true=False)
    await holder.tidy(NOW)
    await holder.tidy(NOW + 2 * UNNAMED_S)
    assert holder.kept() == {workdir}


async def test_false_end_of_a_running_job_removes_nothing(holder: Holder) -> None:
    workdir = holder.upload()
    holder.say(ONE, workdir)
    holder.say(ONE, workdir, over=True)  # a hostile member's
    holder.ends.add(ONE)
    for days in range(0, 30, 3):
        await holder.tidy(NOW + days * DAY_S)
    assert holder.kept() == {workdir}


async def test_ended_jobs_of_others_remove_nothing(holder: Holder) -> None:
    """A member's own ended jobs that name another user's working directory are no jobs of it, nor are invented ones."""
    workdir = holder.upload("ada")
    holder.say(TWO, workdir, over=True, user="mallory")
    holder.say(THREE, workdir, over=True, true=False)
    for days in range(0, 30, 3):
        await holder.tidy(NOW + days * DAY_S)
    assert holder.kept() == {workdir}


async def test_false_hints_cost_a_bounded_number_of_questions(holder: Holder) -> None:
    workdir = holder.upload()
    for number in range(10 * ASKED):
        holder.say(number.to_bytes(16), workdir, true=False)
    holder.say(ONE, workdir)
    rounds = 0
    while ONE not in holder.workdirs._links.get(workdir, ()):
        await holder.tidy(NOW)
        rounds += 1
        assert len(holder.asked) <= rounds * ASKED and rounds < 500


async def test_hint_that_proves_false_is_followed_ever_more_rarely(holder: Holder) -> None:
    workdir = holder.upload()
    holder.say(ONE, workdir, true=False)
    for now in (0.0, FALSE_S - 1, FALSE_S, 3 * FALSE_S - 1):
        await holder.tidy(now)
    assert holder.asked == [ONE, ONE]
    holder.say(ONE, workdir)
    await holder.tidy(3 * FALSE_S)
    assert ONE in holder.workdirs._links[workdir]


@pytest.mark.parametrize("crash", ["before", "after"])
async def test_crash_during_a_removal_is_made_good(
    holder: Holder, journal: Journal, monkeypatch: pytest.MonkeyPatch, crash: str
) -> None:
    workdir, other = holder.upload(), holder.upload()
    holder.say(ONE, workdir, over=True)
    holder.say(TWO, other)
    await holder.tidy(NOW)
    forget: Callable[[bytes], None] = holder.store.forget

    def crashing(identity: bytes) -> None:
        if crash == "after":
            forget(identity)
        raise OSError("power is lost")

    monkeypatch.setattr(holder.store, "forget", crashing)
    with pytest.raises(OSError, match="power"):
        await holder.tidy(NOW + KEEP_S)
    monkeypatch.undo()
    assert holder.kept() == {other} | ({workdir} if crash == "before" else set())
    holder.restarted()
    await holder.workdirs.restore()
    await holder.tidy(NOW + KEEP_S + 60)
    assert holder.kept() == {other}
    assert [row[:2] for row in await journal.workdirs()] == [(other, TWO)]


def test_working_directories_of_one_user_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = open_store(tmp_path / "ours"), open_store(tmp_path / "theirs")
    ours.user, theirs.user = "ada", "eve"

    def send(user: str, size: int = 20_000) -> None:
        sealed = ours.sealed_manifest(identity := upload(ours, tmp_path, user, size))
        receiver = theirs.receive(10**9, user != theirs.user)
        for piece in stream(ours, theirs, identity):
            feed(receiver, piece)
        receiver.finish()
        theirs.accept_manifest(sealed)

    theirs.foreign_quota_bytes = WORKDIR_SHARE * 120_000
    for _ in range(4):
        send("mallory")
    with pytest.raises(QuotaExceeded, match="working directories of mallory"):
        send("mallory", 30_000)
    send("ada", 30_000)
    send("eve", 150_000)  # the node's own user
    monkeypatch.setattr("ckptstore.store.WORKDIRS", 5)
    send("mallory", 10)
    with pytest.raises(QuotaExceeded, match="working directories of mallory"):
        send("mallory", 10)


def test_manifests_of_working_directories_count_and_shared_chunks_count_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member offered 4,096 manifests of 16 MiB without chunks: 64 GiB."""
    ours, theirs = open_store(tmp_path / "ours"), open_store(tmp_path / "theirs")
    theirs.user, theirs.foreign_quota_bytes = "eve", WORKDIR_SHARE * 100_000
    saved = ours.manifest(upload(ours, tmp_path, "mallory", 40_000))
    receiver = theirs.receive(10**9, foreign=True)
    for piece in ours.stream(saved.chunks):
        feed(receiver, piece)
    receiver.finish()
    read = list[bytes]()
    manifest = theirs.manifest
    monkeypatch.setattr(theirs, "manifest", lambda identity: read.append(identity) or manifest(identity))

    def offer(number: int, tree_bytes: int) -> None:
        other = msgspec.structs.replace(saved, created_unix=number, realm=b"r" * 32, tree=b"t" * tree_bytes)
        theirs.accept_manifest(fake_seal(encode_manifest(other)))

    def forget_reads() -> None:
        theirs.manifests()
        read.clear()

    offer(1, 10)
    forget_reads()
    offer(2, 10)
    assert not read, "what would fit without shared chunks is not compared"
    for number in (3, 4):
        offer(number, 10)
    offer(5, 30_000)
    forget_reads()
    with pytest.raises(QuotaExceeded, match="working directories of mallory"):
        offer(6, 60_000)
    assert not read, "manifests that do not fit by themselves are refused at once"
    with pytest.raises(QuotaExceeded, match="working directories of mallory"):
        offer(7, 20_000)

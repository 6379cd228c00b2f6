"""Retention: when space is short, checkpoints of the jobs that ended longest ago go first; those still needed stay."""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from ckptstore.store import Store
from mesh.checkpoints.pruning import longest_over, needed_by_all, with_superseded
from mesh.checkpoints.retention import AT_ONCE, COLLECT_MIN_AGE_S, FULL_SHARE, SILENT_S, Retention, Views, excess_bytes
from mesh.consensus.status import JobStatus, status_of
from mesh.journal import Journal
from mesh.model.record import Outcome
from tests.ckptstore.worlds import open_store, save, write_tree
from tests.consensus.worlds import make_witness

DAY_S = 86_400.0
NOW = 100 * DAY_S
ONE, TWO, THREE = (name * 16 for name in (b"1", b"2", b"3"))
BYTES = 100_000


@pytest.fixture
async def journal(tmp_path: Path) -> AsyncIterator[Journal]:
    journal = Journal(tmp_path / "journal.sqlite")
    await journal.open()
    yield journal
    await journal.close()


def age(store: Store) -> None:
    """Make the packs old enough to be collected."""
    then = time.time() - COLLECT_MIN_AGE_S - 1
    for pack in store.packs.iterdir():
        os.utime(pack, (then, then))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Return a store with 300 kB of three jobs, without duplicate data."""
    store = open_store(tmp_path / "store", quota_bytes=10 * BYTES)
    for job in (ONE, TWO, THREE):
        write_tree(tmp_path / "in", {"a": os.urandom(BYTES)})
        save(store, tmp_path / "in", job=job)
    age(store)
    return store


@pytest.fixture
def retention(store: Store, journal: Journal) -> Retention:
    return make_retention(store, journal)


def make_retention(store: Store, journal: Journal, **needed: tuple[int, ...]) -> Retention:
    """Return the retention of a node that gets these answers of witnesses, by the first character of the job."""

    async def ask(job: bytes) -> tuple[int, ...]:
        return needed.get(f"job{job[:1].decode()}", ())

    return Retention(store, journal, 7 * DAY_S, ask)


async def tidy(retention: Retention, views: Views, now: float) -> None:
    await retention.tidy(views, now, now)


def told(job: bytes, over: bool = True, needed: tuple[int, ...] = ()) -> JobStatus:
    outcome = Outcome("done", "exit 0", 0, None, (), int(NOW * 1000)) if over else None
    status = status_of(job, make_witness(), None, "running", "", None)
    return msgspec.structs.replace(status, job=job, outcome=outcome, needed=needed)


def kept(store: Store) -> set[bytes]:
    return {info.job for info in store.manifests()}


def fill(store: Store) -> None:
    """Make the kept checkpoints slightly larger than their limit."""
    store.quota_bytes = int(store.stored_bytes() / FULL_SHARE) - BYTES // 2


async def test_all_checkpoints_stay_while_space_is_free(retention: Retention, store: Store) -> None:
    statuses = {job: [told(job)] for job in (ONE, TWO, THREE)}
    await tidy(retention, statuses, NOW)
    await tidy(retention, statuses, NOW + 1000 * DAY_S)
    assert kept(store) == {ONE, TWO, THREE}


async def test_job_that_ended_first_is_dropped_first_and_no_more_than_needed(
    retention: Retention, store: Store
) -> None:
    await tidy(retention, {ONE: [told(ONE)], TWO: [told(TWO, over=False)]}, NOW)
    await tidy(retention, {ONE: [told(ONE)], TWO: [told(TWO)]}, NOW + DAY_S)
    fill(store)
    before = store.stored_bytes()
    await tidy(retention, {}, NOW + 30 * DAY_S)
    assert kept(store) == {TWO, THREE} and store.stored_bytes() < before, "the space is freed at once"
    fill(store)
    await tidy(retention, {}, NOW + 30 * DAY_S)
    assert kept(store) == {THREE}, "no status reports the end of job three"
    fill(store)
    await tidy(retention, {}, NOW + 1000 * DAY_S)
    assert kept(store) == {THREE}


@pytest.mark.parametrize("young", [False, True])
async def test_garbage_goes_before_results(retention: Retention, store: Store, tmp_path: Path, young: bool) -> None:
    """Also garbage that may only be collected in a quarter of an hour."""
    await tidy(retention, {ONE: [told(ONE)]}, NOW)
    write_tree(tmp_path / "in", {"a": os.urandom(BYTES)})
    saved = save(store, tmp_path / "in", job=b"4" * 16)
    store.forget(saved.id)
    if not young:
        age(store)
    fill(store)
    await tidy(retention, {}, NOW + 30 * DAY_S)
    assert kept(store) == {ONE, TWO, THREE}
    fill(store)
    if young:
        age(store)
        await tidy(retention, {}, NOW + 30 * DAY_S)
        fill(store)
    await tidy(retention, {}, NOW + 30 * DAY_S)
    assert kept(store) == {TWO, THREE}, "there is no garbage any more"


async def test_space_of_young_packs_is_not_freed_yet(retention: Retention, store: Store, tmp_path: Path) -> None:
    """An upload writes its chunks before the manifest that names them."""
    write_tree(tmp_path / "in", {"a": os.urandom(BYTES)})
    saved = save(store, tmp_path / "in", job=b"4" * 16)
    store.forget(saved.id)
    before = store.stored_bytes()
    await tidy(retention, {}, NOW)
    assert store.stored_bytes() == before
    age(store)
    await tidy(retention, {}, NOW)
    assert store.stored_bytes() < before - BYTES / 2


async def test_recently_ended_job_stays_even_when_space_is_short(retention: Retention, store: Store) -> None:
    store.quota_bytes = 1
    statuses = {job: [told(job)] for job in (ONE, TWO, THREE)}
    await tidy(retention, statuses, NOW)
    await tidy(retention, statuses, NOW + 7 * DAY_S - 1)
    assert kept(store) == {ONE, TWO, THREE}
    await tidy(retention, {}, NOW + 7 * DAY_S)
    assert kept(store) == set()


async def test_job_reported_as_running_again_is_kept(retention: Retention, store: Store) -> None:
    store.quota_bytes = 1
    await tidy(retention, {ONE: [told(ONE)]}, NOW)
    await tidy(retention, {ONE: [told(ONE, over=False)]}, NOW + DAY_S)
    await tidy(retention, {}, NOW + 50 * DAY_S)
    assert ONE in kept(store)


async def test_jobs_submitted_on_this_node_are_kept(retention: Retention, store: Store, journal: Journal) -> None:
    store.quota_bytes = 1
    await journal.save_submitted(ONE, b"its description")
    await tidy(retention, {ONE: [told(ONE)], TWO: [told(TWO)]}, NOW)
    await tidy(retention, {}, NOW + 50 * DAY_S)
    assert kept(store) == {ONE, THREE}


async def test_end_times_of_jobs_survive_a_restart(retention: Retention, store: Store, journal: Journal) -> None:
    store.quota_bytes = 1
    await tidy(retention, {ONE: [told(ONE)]}, NOW)
    standby = make_retention(store, journal)
    await standby.restore()
    await tidy(standby, {}, NOW + 7 * DAY_S)
    assert kept(store) == {TWO, THREE}
    await tidy(standby, {}, NOW + 7 * DAY_S)
    assert await journal.ended() == {}, "the journal forgets a job without checkpoints here"


async def test_superseded_checkpoints_are_dropped_at_once(store: Store, journal: Journal, tmp_path: Path) -> None:
    for seq in (2, 3):
        save(store, tmp_path / "in", job=ONE, seq=seq)
        save(store, tmp_path / "in", job=TWO, seq=seq)
    retention = make_retention(store, journal, job1=(2, 3))
    await tidy(retention, {ONE: [told(ONE, over=False, needed=(2, 3))]}, NOW)
    assert [info.seq for info in store.manifests(ONE)] == [2, 3]
    assert [info.seq for info in store.manifests(TWO)] == [1, 2, 3], "no status tells what job two needs"


async def test_status_alone_has_nothing_forgotten(store: Store, journal: Journal, tmp_path: Path) -> None:
    """Any member can publish one, with any rank."""
    for seq in (2, 3):
        save(store, tmp_path / "in", job=ONE, seq=seq)
    false = told(ONE, over=False, needed=(2**30,))
    await tidy(make_retention(store, journal), {ONE: [false]}, NOW)
    assert [info.seq for info in store.manifests(ONE)] == [1, 2, 3], "its witnesses do not answer"
    await tidy(make_retention(store, journal, job1=(1, 2)), {ONE: [false, told(ONE, over=False)]}, NOW)
    assert [info.seq for info in store.manifests(ONE)] == [1, 2, 3], "its witnesses know better"


async def test_silent_witnesses_are_asked_ever_more_rarely(store: Store, journal: Journal, tmp_path: Path) -> None:
    save(store, tmp_path / "in", job=ONE, seq=2)
    asked, answer = list[float](), set[int]()

    async def ask(job: bytes) -> set[int]:
        asked.append(now)
        return answer

    retention, views = Retention(store, journal, 7 * DAY_S, ask), {ONE: [told(ONE, over=False, needed=(2,))]}
    for now in (0.0, SILENT_S - 1, SILENT_S, 3 * SILENT_S - 1, 3 * SILENT_S):
        await tidy(retention, views, now)
    assert asked == [0.0, SILENT_S, 3 * SILENT_S]
    answer.add(1)
    for now in (10 * SILENT_S, 10 * SILENT_S + 60):
        await tidy(retention, views, now)
    assert asked[3:] == [10 * SILENT_S, 10 * SILENT_S + 60], "they answer"


async def test_few_jobs_are_asked_about_at_the_same_time(store: Store, journal: Journal, tmp_path: Path) -> None:
    jobs = [name * 16 for name in (b"4", b"5", b"6", b"7", b"8", b"9")]
    for job in jobs:
        save(store, tmp_path / "in", job=job, seq=1)
    waiting, most = set[bytes](), list[int]()

    async def ask(job: bytes) -> set[int]:
        waiting.add(job)
        most.append(len(waiting))
        await asyncio.sleep(0.01)
        waiting.remove(job)
        return set()

    views = {job: [told(job, over=False, needed=(2,))] for job in jobs}
    await tidy(Retention(store, journal, 7 * DAY_S, ask), views, NOW)
    assert len(most) == len(jobs) and max(most) == AT_ONCE


async def test_job_that_one_node_says_to_continue_is_kept(retention: Retention, store: Store) -> None:
    store.quota_bytes = 1
    await tidy(retention, {ONE: [told(ONE), told(ONE, over=False)]}, NOW)
    await tidy(retention, {}, NOW + 50 * DAY_S)
    assert ONE in kept(store)


def test_witnesses_are_asked_only_about_jobs_with_something_to_forget(store: Store, tmp_path: Path) -> None:
    save(store, tmp_path / "in", job=ONE, seq=2)
    infos = store.manifests()
    for needed, jobs in (((), []), ((1,), []), ((1, 2), []), ((2,), [ONE]), ((1, 3), [ONE]), ((3,), [ONE])):
        views = {ONE: [told(ONE, over=False), told(ONE, over=False, needed=needed)], TWO: [told(TWO)]}
        assert with_superseded(views, infos) == jobs, needed


def test_record_that_is_furthest_behind_decides_what_is_needed() -> None:
    assert needed_by_all([]) == needed_by_all([(), (2, 3)]) == set()
    assert needed_by_all([(6, 7), (5, 6)]) == {5, 6}
    assert needed_by_all([(6, 7), (2**30,)]) == {6, 7}, "one witness lies"


def test_no_more_jobs_are_removed_than_make_up_for_the_excess(store: Store) -> None:
    infos, since = store.manifests(), {ONE: 1.0, TWO: 2.0, THREE: 3.0}
    first = next(info.total_bytes for info in infos if info.job == ONE)
    for excess, jobs in ((0, []), (1, [ONE]), (first, [ONE]), (first + 1, [ONE, TWO])):
        assert [info.job for info in longest_over(infos, since, excess)] == jobs


def test_excess_follows_the_tightest_limit(store: Store) -> None:
    stored = store.stored_bytes()
    roomy, full = (lambda _: (1 << 40, 0, 1 << 39)), (lambda _: (1 << 40, 1 << 40, 0))
    assert excess_bytes(store, roomy) < 0
    assert excess_bytes(store, full) == stored, "no more than the stored bytes can be freed"
    store.quota_bytes, store.foreign_quota_bytes = None, None
    assert excess_bytes(store, roomy) < 0
    store.quota_bytes = stored
    assert excess_bytes(store, roomy) == stored - int(stored * FULL_SHARE)
    store.quota_bytes, store.foreign_quota_bytes = None, 100
    store.foreign_bytes = lambda: 1000  # type: ignore[method-assign]
    assert excess_bytes(store, roomy) == 1000 - int(100 * FULL_SHARE)

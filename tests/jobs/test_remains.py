"""What jobs have left in a store goes when room is short: the longest over first, and never what somebody may still need."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from ckptstore.store import Store
from mesh.jobs.journal import Journal
from mesh.jobs.ledger import Outcome
from mesh.jobs.remains import FULL_SHARE, Remains, excess_bytes
from mesh.jobs.status import JobStatus, status_of
from tests.ckptstore.worlds import open_store, save, write_tree
from tests.jobs.worlds import make_witness

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


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """With something of three jobs: 300 kB, none of it alike."""
    store = open_store(tmp_path / "store", quota_bytes=10 * BYTES)
    for job in (ONE, TWO, THREE):
        write_tree(tmp_path / "in", {"a": os.urandom(BYTES)})
        save(store, tmp_path / "in", job=job)
    for pack in store.packs.iterdir():  # long ago: what is young is not collected
        os.utime(pack, (0, 0))
    return store


@pytest.fixture
def remains(store: Store, journal: Journal) -> Remains:
    return Remains(store, journal, keep_s=7 * DAY_S)


def told(job: bytes, over: bool = True, settled: int = 0) -> JobStatus:
    outcome = Outcome("done", "exit 0", 0, None, (), int(NOW * 1000)) if over else None
    status = status_of(job, make_witness(), None, "running", "", None)
    return msgspec.structs.replace(status, job=job, outcome=outcome, settled=settled)


def kept(store: Store) -> set[bytes]:
    return {info.job for info in store.manifests()}


def fill(store: Store) -> None:
    """What is kept is now just over what it may be."""
    store.quota_bytes = int(store.stored_bytes() / FULL_SHARE) - BYTES // 2


async def test_all_stays_while_there_is_room(remains: Remains, store: Store) -> None:
    statuses = {job: told(job) for job in (ONE, TWO, THREE)}
    await remains.tidy(statuses, NOW)
    await remains.tidy(statuses, NOW + 1000 * DAY_S)
    assert kept(store) == {ONE, TWO, THREE}


async def test_the_longest_over_goes_first_and_no_more_than_is_needed(remains: Remains, store: Store) -> None:
    await remains.tidy({ONE: told(ONE), TWO: told(TWO, over=False)}, NOW)
    await remains.tidy({ONE: told(ONE), TWO: told(TWO)}, NOW + DAY_S)
    fill(store)
    before = store.stored_bytes()
    await remains.tidy({}, NOW + 30 * DAY_S)
    assert kept(store) == {TWO, THREE} and store.stored_bytes() < before, "its bytes are free at once"
    fill(store)
    await remains.tidy({}, NOW + 30 * DAY_S)
    assert kept(store) == {THREE}, "of which nobody has said that it is over"
    fill(store)
    await remains.tidy({}, NOW + 1000 * DAY_S)
    assert kept(store) == {THREE}


async def test_what_has_lately_ended_stays_however_short_room_is(remains: Remains, store: Store) -> None:
    store.quota_bytes = 1
    statuses = {job: told(job) for job in (ONE, TWO, THREE)}
    await remains.tidy(statuses, NOW)
    await remains.tidy(statuses, NOW + 7 * DAY_S - 1)
    assert kept(store) == {ONE, TWO, THREE}
    await remains.tidy({}, NOW + 7 * DAY_S)
    assert kept(store) == set()


async def test_who_is_said_to_go_on_is_not_over(remains: Remains, store: Store) -> None:
    store.quota_bytes = 1
    await remains.tidy({ONE: told(ONE)}, NOW)
    await remains.tidy({ONE: told(ONE, over=False)}, NOW + DAY_S)
    await remains.tidy({}, NOW + 50 * DAY_S)
    assert ONE in kept(store)


async def test_what_was_submitted_here_stays(remains: Remains, store: Store, journal: Journal) -> None:
    store.quota_bytes = 1
    await journal.save_submitted(ONE, b"its description")
    await remains.tidy({ONE: told(ONE), TWO: told(TWO)}, NOW)
    await remains.tidy({}, NOW + 50 * DAY_S)
    assert kept(store) == {ONE, THREE}


async def test_since_when_it_is_over_outlasts_the_daemon(remains: Remains, store: Store, journal: Journal) -> None:
    store.quota_bytes = 1
    await remains.tidy({ONE: told(ONE)}, NOW)
    heir = Remains(store, journal, keep_s=7 * DAY_S)
    await heir.restore()
    await heir.tidy({}, NOW + 7 * DAY_S)
    assert kept(store) == {TWO, THREE}
    await heir.tidy({}, NOW + 7 * DAY_S)
    assert await journal.over() == {}, "nothing of it is here any more"


async def test_older_checkpoints_go_at_once(remains: Remains, store: Store, tmp_path: Path) -> None:
    for seq in (2, 3):
        save(store, tmp_path / "in", job=ONE, seq=seq)
    await remains.tidy({ONE: told(ONE, over=False, settled=3)}, NOW)
    assert [info.seq for info in store.manifests(ONE)] == [2, 3]


def test_the_fullest_of_its_limits_counts(store: Store) -> None:
    stored = store.stored_bytes()
    roomy, full = (lambda _: (1 << 40, 0, 1 << 39)), (lambda _: (1 << 40, 1 << 40, 0))
    assert excess_bytes(store, roomy) < 0
    assert excess_bytes(store, full) == stored, "more cannot come free"
    store.quota_bytes, store.foreign_quota_bytes = None, None
    assert excess_bytes(store, roomy) < 0
    store.quota_bytes = stored
    assert excess_bytes(store, roomy) == stored - int(stored * FULL_SHARE)

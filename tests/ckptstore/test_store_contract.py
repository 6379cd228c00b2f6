"""The contract of checkpoint stores: rules on which the protocol relies, held by the store on disk and the simulator's."""

import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from ckptstore.errors import FenceError, MissingChunks, NotFound, QuotaExceeded
from ckptstore.manifest import Kind
from ckptstore.store import Fence, FenceUse, ManifestInfo, Store
from sim.protocol.memory_store import MemoryStore
from tests.ckptstore.worlds import JOB, fake_seal, feed, open_store, stream, write_tree

BYTES = 100_000  # of each part of a saved state
OTHER = b"k" * 16


class Bench(Protocol):
    """One store; `parts` of a state are names, and equal names mean equal content."""

    def save(
        self, parts: str, *, term: int, seq: int, parent: bytes | None, kind: Kind, config: int, job: bytes
    ) -> bytes: ...
    def push(self, to: "Bench", identity: bytes, fence: FenceUse, parts: bool) -> None: ...
    def lacks(self, other: "Bench", identity: bytes) -> int:
        """Return how many of the parts of `other`'s manifest are missing here."""

    def parts(self, identity: bytes) -> bool:
        """Tell whether a manifest can be read, and its parts are all here."""

    def collect(self, age_s: float) -> None:
        """Collect as if all parts had last been touched `age_s` ago."""

    def reopen(self) -> "Bench": ...
    @property
    def store(self) -> Store | MemoryStore: ...


class OnDisk:
    def __init__(self, root: Path, quota_bytes: int | None = None) -> None:
        self.root, self.quota_bytes = root, quota_bytes
        self.store: Store = open_store(root / "store", quota_bytes)

    def save(
        self, parts: str, *, term: int, seq: int, parent: bytes | None, kind: Kind, config: int, job: bytes
    ) -> bytes:
        shutil.rmtree(self.root / "in", ignore_errors=True)
        content = {name: hashlib.shake_128(name.encode()).digest(BYTES) for name in parts}
        write_tree(self.root / "in", content)
        saved = self.store.save(
            {"ckpt": self.root / "in"},
            job=job,
            config=config,
            term=term,
            seq=seq,
            parent=parent,
            kind=kind,
            created_unix=1_800_000_000,
            seal=fake_seal,
            compress=False,
        )
        return saved.id

    def push(self, to: Bench, identity: bytes, fence: FenceUse, parts: bool) -> None:
        assert isinstance(to, OnDisk)
        if parts:
            receiver = to.store.receive(10**9)
            for piece in stream(self.store, to.store, identity):
                feed(receiver, piece)
            receiver.finish()
        to.store.accept_manifest(self.store.sealed_manifest(identity), fence)

    def lacks(self, other: Bench, identity: bytes) -> int:
        assert isinstance(other, OnDisk)
        return len(self.store.missing(other.store.manifest(identity).chunks))

    def parts(self, identity: bytes) -> bool:
        return not self.store.missing(self.store.manifest(identity).chunks)

    def collect(self, age_s: float) -> None:
        for pack in self.store.packs.iterdir():
            os.utime(pack, (time.time() - age_s,) * 2)
        self.store.collect(min_age_s=60.0, now_unix=time.time())

    def reopen(self) -> "OnDisk":
        self.store.close()
        return OnDisk(self.root, self.quota_bytes)


class InMemory:
    def __init__(self, quota_bytes: int | None = None) -> None:
        self.store = MemoryStore(quota_bytes)
        self.now = 0.0

    def save(
        self, parts: str, *, term: int, seq: int, parent: bytes | None, kind: Kind, config: int, job: bytes
    ) -> bytes:
        chunks = {hashlib.blake2b(name.encode(), digest_size=32).digest(): BYTES for name in parts}
        numbers = {"job": job, "config": config, "term": term, "seq": seq, "parent": parent}
        return self.store.save(chunks, kind=kind, now_unix=self.now, **numbers).info.id  # type: ignore[arg-type]

    def push(self, to: Bench, identity: bytes, fence: FenceUse, parts: bool) -> None:
        assert isinstance(to, InMemory)
        saved = self.store.manifest(identity)
        if parts:
            to.store.receive(self.store.sizes(to.store.missing(saved.chunks, to.now)), to.now)
        to.store.accept_manifest(saved, fence)

    def lacks(self, other: Bench, identity: bytes) -> int:
        assert isinstance(other, InMemory)
        return len(self.store.missing(other.store.manifest(identity).chunks, self.now))

    def parts(self, identity: bytes) -> bool:
        self.store.manifest(identity)
        return self.store.complete(identity)

    def collect(self, age_s: float) -> None:
        self.now += age_s
        self.store.collect(min_age_s=60.0, now_unix=self.now)

    def reopen(self) -> "InMemory":
        return self


class Stores:
    """Makes stores of one kind."""

    def __init__(self, root: Path, on_disk: bool) -> None:
        self._root, self._on_disk = root, on_disk
        self.made: list[Bench] = []

    def __call__(self, quota_bytes: int | None = None) -> Bench:
        root = self._root / str(len(self.made))
        bench: Bench = OnDisk(root, quota_bytes) if self._on_disk else InMemory(quota_bytes)
        self.made.append(bench)
        return bench


@pytest.fixture(params=["on disk", "in memory"])
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stores]:
    yield Stores(tmp_path, request.param == "on disk")


def save(
    bench: Bench,
    parts: str = "ab",
    term: int = 1,
    seq: int = 1,
    parent: bytes | None = None,
    kind: Kind = "checkpoint",
    config: int = 0,
    job: bytes = JOB,
) -> bytes:
    return bench.save(parts, term=term, seq=seq, parent=parent, kind=kind, config=config, job=job)


def push(source: Bench, to: Bench, identity: bytes, fence: FenceUse = "raise", parts: bool = True) -> None:
    source.push(to, identity, fence, parts)


def known(bench: Bench, job: bytes | None = None) -> list[tuple[int, int]]:
    return [(info.term, info.seq) for info in bench.store.manifests(job)]


def test_manifest_tells_job_config_term_number_parent_and_kind(stores: Stores) -> None:
    bench, other = stores(), stores()
    first = save(bench)
    second = save(bench, "abc", 3, 2, first, "result", config=4)
    push(bench, other, second)
    for held in (bench, other):
        info: ManifestInfo = held.store.manifests(JOB)[-1]
        assert (info.id, info.job, info.kind) == (second, JOB, "result")
        assert (info.config, info.term, info.seq, info.parent) == (4, 3, 2, first)
        assert info.total_bytes == 3 * BYTES


def test_manifests_are_listed_by_job_oldest_first(stores: Stores) -> None:
    bench = stores()
    save(bench, "a", 2, 3)
    save(bench, "b", 2, 2, job=OTHER)
    save(bench, "c", 2, 2, kind="result")
    assert known(bench, JOB) == [(2, 2), (2, 3)] and known(bench, OTHER) == [(2, 2)]
    assert len(bench.store.manifests()) == 3


def test_state_survives_a_restart(stores: Stores) -> None:
    bench = stores()
    identity = save(bench, term=3)
    again = bench.reopen()
    assert again.store.has(identity) and again.parts(identity) and again.store.fence(JOB) == Fence(3, 0)


def test_only_missing_parts_are_sent_and_manifests_need_all(stores: Stores) -> None:
    bench, other = stores(), stores()
    first = save(bench)
    assert other.lacks(bench, first) == 2
    with pytest.raises(MissingChunks):
        push(bench, other, first, parts=False)
    assert not other.store.has(first)
    push(bench, other, first)
    assert other.store.has(first) and other.parts(first)
    second = save(bench, "bc", seq=2)
    assert other.lacks(bench, second) == 1
    push(bench, other, second)
    push(bench, other, second, parts=False)
    assert known(other) == [(1, 1), (1, 2)]


def test_unknown_manifest_is_not_found(stores: Stores) -> None:
    bench = stores()
    assert not bench.store.has(b"?" * 32)
    with pytest.raises(NotFound):
        bench.parts(b"?" * 32)


@pytest.mark.parametrize("late", [(1, 9), (2, 0)])
def test_push_of_a_replaced_writer_is_refused(stores: Stores, late: tuple[int, int]) -> None:
    bench, other = stores(), stores()
    old = save(bench, "a", term=late[0], config=late[1])
    new = save(stores(), "b", term=2, config=1)
    push(stores.made[-1], other, new)
    assert other.store.fence(JOB) == Fence(2, 1), "the term orders writers, the config breaks ties"
    for use in ("raise", "check"):
        with pytest.raises(FenceError):
            push(bench, other, old, use)  # type: ignore[arg-type]
    assert not other.store.has(old) and other.store.fence(JOB) == Fence(2, 1)


def test_push_that_nobody_vouches_for_moves_no_fence(stores: Stores) -> None:
    bench, other = stores(), stores()
    new, old = save(bench, "a", term=5), save(stores(), "b", term=2)
    push(bench, other, new, "check")
    assert other.store.has(new) and other.store.fence(JOB) == Fence(0, 0)
    push(stores.made[-1], other, old)
    assert other.store.has(old)


def test_fetch_ignores_fences(stores: Stores) -> None:
    """An uncommitted checkpoint of a later term must not keep the committed one away."""
    bench, other = stores(), stores()
    committed = save(bench, "a", term=1)
    save(other, "b", term=2)
    push(bench, other, committed, "ignore")
    assert other.parts(committed) and other.store.fence(JOB) == Fence(2, 0)


def test_fences_are_per_job_and_workdirs_have_none(stores: Stores) -> None:
    bench, other = stores(), stores()
    save(other, "a", term=5)
    push(bench, other, save(bench, "b", term=1, job=OTHER))
    push(bench, other, save(bench, "c", term=0, seq=0, kind="workdir"))
    assert other.store.fence(JOB) == Fence(5, 0)


def test_own_save_of_a_replaced_writer_is_refused(stores: Stores) -> None:
    bench = stores()
    save(bench, "a", term=5)
    with pytest.raises(FenceError):
        save(bench, "b", term=4)
    assert known(bench) == [(5, 1)]


def test_save_beyond_the_quota_changes_nothing(stores: Stores) -> None:
    bench = stores(4 * BYTES)
    first = save(bench, "abc")
    before = bench.store.stored_bytes()
    with pytest.raises(QuotaExceeded):
        save(bench, "de", seq=2)
    assert bench.store.stored_bytes() == before and bench.parts(first)
    save(bench, "abc", seq=3)
    assert known(bench) == [(1, 1), (1, 3)], "parts that are here already take no room"


def test_push_beyond_the_quota_is_refused(stores: Stores) -> None:
    bench, other = stores(), stores(2 * BYTES)
    identity = save(bench, "abc")
    with pytest.raises(QuotaExceeded):
        push(bench, other, identity)
    assert not other.store.has(identity) and other.store.stored_bytes() == 0


def test_forgotten_parts_are_collected_once_they_are_old(stores: Stores) -> None:
    bench = stores()
    first, second = save(bench, "ab"), save(bench, "cd", seq=2)
    bench.store.forget(first)
    assert not bench.store.has(first)
    before = bench.store.stored_bytes()
    bench.collect(age_s=10.0)
    assert bench.store.stored_bytes() == before, "a peer may be about to bring a manifest for them"
    bench.collect(age_s=100.0)
    assert bench.store.stored_bytes() < before - BYTES and bench.parts(second)


def test_collection_keeps_what_another_manifest_needs(stores: Stores) -> None:
    bench = stores()
    first, second = save(bench, "ab"), save(bench, "ab", seq=2)
    bench.store.forget(first)
    bench.collect(age_s=100.0)
    assert bench.parts(second)


def test_forget_old_keeps_what_is_needed_and_whatever_is_newer(stores: Stores) -> None:
    bench = stores()
    saved = [save(bench, part, term, seq) for part, seq, term in (("a", 1, 1), ("b", 2, 1), ("c", 3, 2), ("d", 3, 3))]
    result = save(bench, "e", 3, 1, kind="result")
    for needed in ((), (1, 2)):
        assert bench.store.forget_old(JOB, needed) == []
    assert bench.store.forget_old(OTHER, (9,)) == []
    assert bench.store.forget_old(JOB, (2,)) == saved[:1]
    assert [bench.store.has(identity) for identity in (*saved, result)] == [False, True, True, True, True]

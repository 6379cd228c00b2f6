"""Deltas between checkpoints: used where they are smaller, never chained, and never without their base."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest

from ckptstore.checker import verify
from ckptstore.chunker import CHUNK_BYTES
from ckptstore.cipher import StateCipher
from ckptstore.errors import CorruptChunk, StoreError
from ckptstore.pack import PackWriter
from ckptstore.restorer import restore
from ckptstore.store import SavedManifest, Store
from tests.ckptstore.test_chunker import safetensors
from tests.ckptstore.worlds import CIPHER, JOB, copy, damage, feed, open_store, read_tree, save, write_tree

COUNT = 1 << 18  # elements: 1 MiB


def state(step: int) -> bytes:
    """Return a checkpoint with a slightly changed tensor and a frozen one."""
    start = np.random.default_rng(0).normal(0, 0.02, COUNT)
    moved = start + step * np.random.default_rng(1).normal(0, 1e-6, COUNT)
    return safetensors({"moved": moved.astype("f4").tobytes(), "frozen": start.astype("f4").tobytes()})


def train(store: Store, root: Path, steps: int, cipher: StateCipher | None = None) -> list[SavedManifest]:
    """Save a checkpoint per step, each in a directory of its own name, with the previous one removed."""
    saved: list[SavedManifest] = []
    for step in range(1, steps + 1):
        directory = root / f"in{step}"
        write_tree(directory, {f"step-{step:04}/model.safetensors": state(step)})
        saved.append(save(store, directory, seq=step, parent=saved[-1].id if saved else None, cipher=cipher))
    return saved


def delta_count(store: Store, saved: SavedManifest) -> int:
    places = [store.index.find(identity) for identity in saved.manifest.chunks]
    return sum(where is not None and where.base is not None for where in places)


@pytest.fixture(params=[None, CIPHER], ids=["open", "sealed"])
def cipher(request: pytest.FixtureRequest) -> StateCipher | None:
    return request.param  # type: ignore[no-any-return]


def test_checkpoint_is_stored_as_a_delta_to_an_earlier_one(tmp_path: Path, cipher: StateCipher | None) -> None:
    store = open_store(tmp_path / "store")
    first, second, third = train(store, tmp_path, 3, cipher)
    assert delta_count(store, first) == 0 and delta_count(store, second) == delta_count(store, third) == 1
    assert second.new_bytes < 0.6 * 4 * COUNT < 0.4 * first.new_bytes, "and the frozen tensor is not stored again"
    bases = {store.index.find(identity).base for s in (second, third) for identity in s.manifest.chunks} - {None}  # type: ignore[union-attr]
    assert len(bases) == 1 and bases <= set(first.manifest.chunks), "bases are not deltas themselves"
    for step, saved in enumerate((first, second, third), 1):
        store.restore(saved.id, tmp_path / f"out{step}", prefix="ckpt", cipher=cipher)
        assert read_tree(tmp_path / f"out{step}") == read_tree(tmp_path / f"in{step}")
    assert verify(store).bad_chunks == 0


def test_base_is_kept_as_long_as_its_deltas(tmp_path: Path, cipher: StateCipher | None) -> None:
    store = open_store(tmp_path / "store")
    _, _, third = train(store, tmp_path, 3, cipher)
    store.forget_old(JOB, needed=(3,))
    assert store.collect(min_age_s=0, now_unix=time.time() + 10).packs == 1, "the pack of the second checkpoint"
    store.close()
    store = open_store(tmp_path / "store")
    store.restore(third.id, tmp_path / "out", prefix="ckpt", cipher=cipher)
    assert read_tree(tmp_path / "out") == read_tree(tmp_path / "in3")
    store.forget(third.id)
    assert store.collect(min_age_s=0, now_unix=time.time() + 10).packs == 2


def test_delta_outlasts_its_damaged_base(tmp_path: Path, cipher: StateCipher | None) -> None:
    """The base may come back from another node, and the delta may be here alone."""
    ours, copied = open_store(tmp_path / "ours"), open_store(tmp_path / "copied")
    first, second = train(ours, tmp_path, 2, cipher)
    copy(ours, copied, first)
    ((delta, base),) = [
        (identity, where.base)
        for identity in second.manifest.chunks
        if (where := ours.index.find(identity)) is not None and where.base is not None
    ]
    place = ours.index.find(base)
    assert place is not None
    pack = ours.packs / f"{place.pack}.pack"
    damage(pack, place.offset + place.length - 1)
    report = verify(ours)
    assert (report.bad_chunks, report.quarantined) == (1, (pack.name,))
    assert ours.index.find(delta) is not None and ours.index.find(base) is None
    assert verify(ours).quarantined == ()
    copy(copied, ours, first)
    ours.restore(second.id, tmp_path / "out", prefix="ckpt", cipher=cipher)
    assert read_tree(tmp_path / "out") == read_tree(tmp_path / "in2")


def test_peer_with_the_base_gets_the_delta_and_another_gets_both(tmp_path: Path, cipher: StateCipher | None) -> None:
    ours, near, far = (open_store(tmp_path / name) for name in ("ours", "near", "far"))
    first, second = train(ours, tmp_path, 2, cipher)
    copy(ours, near, first)
    small, large = copy(ours, near, second), copy(ours, far, second)
    assert small < 0.6 * 4 * COUNT < large
    for store in (near, far):
        store.restore(second.id, tmp_path / f"out-{store.root.name}", prefix="ckpt", cipher=cipher)
        assert read_tree(tmp_path / f"out-{store.root.name}") == read_tree(tmp_path / "in2")


def test_base_is_sent_whole_to_a_peer_that_has_it_as_a_delta(tmp_path: Path, cipher: StateCipher | None) -> None:
    """The peer's copy of the base is a delta to an earlier checkpoint. This node's copy is whole, and is sent."""
    ours, theirs, other = (open_store(tmp_path / name) for name in ("ours", "theirs", "other"))
    one, two, three = (tmp_path / f"in{step}" for step in (1, 2, 3))
    for step, directory in enumerate((one, two, three), 1):
        write_tree(directory, {"model.safetensors": state(step)})
    first = save(theirs, one, seq=1, cipher=cipher)
    before = save(theirs, two, seq=2, parent=first.id, cipher=cipher)
    second = save(ours, two, seq=2, cipher=cipher)
    third = save(ours, three, seq=3, parent=second.id, cipher=cipher)
    assert delta_count(ours, third) == delta_count(theirs, before) == 1
    receiver = theirs.receive(10**9)
    with pytest.raises(CorruptChunk, match="base of a delta is a delta"):
        for piece in ours.stream(third.manifest.chunks):
            feed(receiver, piece)
    receiver.abort()
    copy(ours, theirs, third)
    assert delta_count(theirs, third) == 1 and delta_count(theirs, before) == 0
    theirs.restore(third.id, tmp_path / "out", prefix="ckpt", cipher=cipher)
    assert read_tree(tmp_path / "out") == read_tree(three)
    other.close()


def test_delta_without_its_base_is_refused(tmp_path: Path, cipher: StateCipher | None) -> None:
    ours, theirs = open_store(tmp_path / "ours"), open_store(tmp_path / "theirs")
    _, second = train(ours, tmp_path, 2, cipher)
    receiver = theirs.receive(10**9)
    with pytest.raises(CorruptChunk, match="before its base"):
        for piece in ours.stream(second.manifest.chunks):
            feed(receiver, piece)
    receiver.abort()


def test_damaged_base_is_reported_and_never_used(tmp_path: Path, cipher: StateCipher | None) -> None:
    store = open_store(tmp_path / "store")
    first, second = train(store, tmp_path, 2, cipher)
    moved = next(w for w in map(store.index.find, second.manifest.chunks) if w is not None and w.base is not None)
    assert moved.base is not None
    where = store.index.find(moved.base)
    assert where is not None
    pack = tmp_path / "store" / "packs" / f"{where.pack}.pack"
    damage(pack, where.offset + 5000)
    for saved in (first, second):
        with pytest.raises(StoreError):
            store.restore(saved.id, tmp_path / "out", prefix="ckpt", cipher=cipher)
    report = verify(store)
    assert set(report.damaged_manifests) == {first.id, second.id}


def test_nothing_is_compressed_without_compress(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    write_tree(tmp_path / "in", {"text": b"the same again. " * 10_000, "noise": os.urandom(1000)})
    plain = save(store, tmp_path / "in", compress=False)
    assert plain.new_bytes > 160_000


def test_checkpoint_whose_base_is_gone_is_stored_whole(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    (first,) = train(store, tmp_path, 1)
    for path in store.packs.glob("*.pack"):
        path.unlink()
        store.index.drop_pack(path.stem)
    write_tree(tmp_path / "in2", {"step-0002/model.safetensors": state(2)})
    second = save(store, tmp_path / "in2", seq=2, parent=first.id)
    assert delta_count(store, second) == 0
    store.restore(second.id, tmp_path / "out", prefix="ckpt")
    assert read_tree(tmp_path / "out") == read_tree(tmp_path / "in2")


def test_chunk_of_another_length_than_its_manifest_says_is_not_restored(tmp_path: Path) -> None:
    """Its own header may be right: the signer of the manifest lied."""
    store = open_store(tmp_path / "store")
    (saved,) = train(store, tmp_path, 1)
    manifest = saved.manifest
    longer = msgspec.structs.replace(manifest, lengths=tuple(min(CHUNK_BYTES, n + 1) for n in manifest.lengths))
    with ThreadPoolExecutor(1) as pool, pytest.raises(CorruptChunk, match="length its manifest says"):
        restore(longer, manifest.open().files, "ckpt/", tmp_path / "out", store.chunk, pool, 1)
    assert not (tmp_path / "out").exists()


def test_base_of_a_delta_is_kept_from_a_collection_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the time when the delta is made: the manifest that reaches the base comes last."""
    store, long_ago = open_store(tmp_path / "store"), time.time() - 7200
    held, publish = list[bool](), store.publish_pack

    def publishes(writer: PackWriter) -> None:
        held.append(all(pack.stat().st_mtime > long_ago + 60 for pack in store.packs.iterdir()))
        publish(writer)

    monkeypatch.setattr(store, "publish_pack", publishes)
    tensor = np.random.default_rng(0).normal(0, 0.02, COUNT)
    saved: list[SavedManifest] = []
    for step in (1, 2):
        for pack in store.packs.iterdir():
            os.utime(pack, (long_ago, long_ago))
        moved = tensor + step * np.random.default_rng(1).normal(0, 1e-6, COUNT)
        write_tree(tmp_path / f"in{step}", {"model.bin": moved.astype("f4").tobytes()})
        saved.append(save(store, tmp_path / f"in{step}", seq=step, parent=saved[-1].id if saved else None))
    assert delta_count(store, saved[1]) == 1
    assert held == [True, True]

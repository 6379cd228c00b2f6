"""Differences between checkpoints: chosen where they pay, never one upon another, and never without what they lean on."""

import os
import time
from pathlib import Path

import numpy as np
import pytest

from ckptstore.checker import verify
from ckptstore.errors import CorruptChunk, StoreError
from ckptstore.store import SavedManifest, Store
from ckptstore.vault import Vault
from tests.ckptstore.test_layout import safetensors
from tests.ckptstore.worlds import JOB, VAULT, copy, open_store, read_tree, save, write_tree

COUNT = 1 << 18  # elements: 1 MiB


def state(step: int) -> bytes:
    """A tensor that a training has moved a little, and one that is frozen."""
    start = np.random.default_rng(0).normal(0, 0.02, COUNT)
    moved = start + step * np.random.default_rng(1).normal(0, 1e-6, COUNT)
    return safetensors({"moved": moved.astype("f4").tobytes(), "frozen": start.astype("f4").tobytes()})


def train(store: Store, root: Path, steps: int, vault: Vault | None = None) -> list[SavedManifest]:
    """A checkpoint a step, each in a folder of its own name, the one before removed."""
    saved: list[SavedManifest] = []
    for step in range(1, steps + 1):
        directory = root / f"in{step}"
        write_tree(directory, {f"step-{step:04}/model.safetensors": state(step)})
        saved.append(save(store, directory, seq=step, parent=saved[-1].id if saved else None, vault=vault))
    return saved


def leans(store: Store, saved: SavedManifest) -> int:
    places = [store.index.find(identity) for identity in saved.manifest.chunks]
    return sum(where is not None and where.base is not None for where in places)


@pytest.fixture(params=[None, VAULT], ids=["open", "sealed"])
def vault(request: pytest.FixtureRequest) -> Vault | None:
    return request.param  # type: ignore[no-any-return]


def test_a_checkpoint_is_stored_as_the_difference_to_an_earlier_one(tmp_path: Path, vault: Vault | None) -> None:
    store = open_store(tmp_path / "store")
    first, second, third = train(store, tmp_path, 3, vault)
    assert leans(store, first) == 0 and leans(store, second) == leans(store, third) == 1
    assert second.new_bytes < 0.6 * 4 * COUNT < 0.4 * first.new_bytes, "and what is frozen is not stored again"
    bases = {store.index.find(identity).base for s in (second, third) for identity in s.manifest.chunks} - {None}  # type: ignore[union-attr]
    assert len(bases) == 1 and bases <= set(first.manifest.chunks), "a difference to what stands alone"
    for step, saved in enumerate((first, second, third), 1):
        store.restore(saved.id, tmp_path / f"out{step}", prefix="ckpt", vault=vault)
        assert read_tree(tmp_path / f"out{step}") == read_tree(tmp_path / f"in{step}")
    assert verify(store).bad_chunks == 0


def test_what_others_lean_on_is_kept_as_long_as_they_are(tmp_path: Path, vault: Vault | None) -> None:
    store = open_store(tmp_path / "store")
    _, _, third = train(store, tmp_path, 3, vault)
    store.prune(JOB, committed_seq=3, keep=1)
    assert store.collect(min_age_s=0, now_unix=time.time() + 10).packs == 1, "the second's"
    store.close()
    store = open_store(tmp_path / "store")
    store.restore(third.id, tmp_path / "out", prefix="ckpt", vault=vault)
    assert read_tree(tmp_path / "out") == read_tree(tmp_path / "in3")
    store.forget(third.id)
    assert store.collect(min_age_s=0, now_unix=time.time() + 10).packs == 2


def test_a_peer_that_has_the_earlier_one_is_sent_the_difference_and_another_both(
    tmp_path: Path, vault: Vault | None
) -> None:
    ours, near, far = (open_store(tmp_path / name) for name in ("ours", "near", "far"))
    first, second = train(ours, tmp_path, 2, vault)
    copy(ours, near, first)
    small, large = copy(ours, near, second), copy(ours, far, second)
    assert small < 0.6 * 4 * COUNT < large
    for store in (near, far):
        store.restore(second.id, tmp_path / f"out-{store.root.name}", prefix="ckpt", vault=vault)
        assert read_tree(tmp_path / f"out-{store.root.name}") == read_tree(tmp_path / "in2")


def test_what_others_lean_on_stands_alone_where_it_arrives(tmp_path: Path, vault: Vault | None) -> None:
    """Their copy of the base leans itself, since they had an earlier one, and ours does not: they are sent ours."""
    ours, theirs, other = (open_store(tmp_path / name) for name in ("ours", "theirs", "other"))
    one, two, three = (tmp_path / f"in{step}" for step in (1, 2, 3))
    for step, directory in enumerate((one, two, three), 1):
        write_tree(directory, {"model.safetensors": state(step)})
    first = save(theirs, one, seq=1, vault=vault)
    before = save(theirs, two, seq=2, parent=first.id, vault=vault)
    second = save(ours, two, seq=2, vault=vault)
    third = save(ours, three, seq=3, parent=second.id, vault=vault)
    assert leans(ours, third) == leans(theirs, before) == 1
    receiver = theirs.receive(10**9)
    with pytest.raises(CorruptChunk, match="leans on one that leans"):
        for piece in ours.frames(third.manifest.chunks):
            receiver.feed(piece)
    receiver.abort()
    copy(ours, theirs, third)
    assert leans(theirs, third) == 1 and leans(theirs, before) == 0
    theirs.restore(third.id, tmp_path / "out", prefix="ckpt", vault=vault)
    assert read_tree(tmp_path / "out") == read_tree(three)
    other.close()


def test_a_difference_without_its_base_is_refused(tmp_path: Path, vault: Vault | None) -> None:
    ours, theirs = open_store(tmp_path / "ours"), open_store(tmp_path / "theirs")
    _, second = train(ours, tmp_path, 2, vault)
    receiver = theirs.receive(10**9)
    with pytest.raises(CorruptChunk, match="before the one"):
        for piece in ours.frames(second.manifest.chunks):
            receiver.feed(piece)
    receiver.abort()


def test_a_damaged_base_is_told_and_never_mixed_in(tmp_path: Path, vault: Vault | None) -> None:
    store = open_store(tmp_path / "store")
    first, second = train(store, tmp_path, 2, vault)
    moved = next(w for w in map(store.index.find, second.manifest.chunks) if w is not None and w.base is not None)
    assert moved.base is not None
    where = store.index.find(moved.base)
    assert where is not None
    pack = tmp_path / "store" / "packs" / f"{where.pack}.pack"
    data = bytearray(pack.read_bytes())
    data[where.offset + 5000] ^= 1
    pack.write_bytes(bytes(data))
    for saved in (first, second):
        with pytest.raises(StoreError):
            store.restore(saved.id, tmp_path / "out", prefix="ckpt", vault=vault)
    report = verify(store)
    assert set(report.damaged_manifests) == {first.id, second.id}


def test_without_time_for_it_nothing_is_encoded(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    write_tree(tmp_path / "in", {"text": b"the same again. " * 10_000, "noise": os.urandom(1000)})
    plain = save(store, tmp_path / "in", encoding=False)
    assert plain.new_bytes > 160_000

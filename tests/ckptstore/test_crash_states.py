"""I1 to I8 in every state that a crash can leave after saving, receiving, forgetting and collecting."""

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from ckptstore.checker import verify
from ckptstore.cipher import StateCipher
from ckptstore.errors import StoreError
from tests.ckptstore.crashes import Mark, Recorder, State, crash_states
from tests.ckptstore.worlds import CIPHER, JOB, feed, open_store, read_tree, save, write_tree

pytestmark = pytest.mark.usefixtures("alone")
Tree = dict[str, bytes]


def history(root: Path, cipher: StateCipher | None) -> tuple[Recorder, dict[bytes, Tree]]:
    """Run a store's operations; return the recording and the content of each checkpoint."""
    trees: list[Tree] = [
        {"a": b"one " * 500, "same": os.urandom(900), "large": os.urandom(3000)},
        {"a": b"two " * 500, "same": b"", "large": os.urandom(3000)},
        {"a": b"tri " * 500},
    ]
    trees[1]["same"] = trees[0]["same"]
    held: dict[bytes, Tree] = {}
    home = root / "store"
    store = open_store(home)
    recorder = Recorder(home)
    with recorder.recording():
        first = save(store, planted(root / "1", trees[0]), seq=1, term=1, cipher=cipher)
        recorder.mark("promised", first.id)
        second = save(store, planted(root / "2", trees[1]), seq=2, term=2, parent=first.id, cipher=cipher)
        recorder.mark("promised", second.id)
    held[first.id], held[second.id] = trees[0], trees[1]
    other = open_store(root / "other")
    third = save(other, planted(root / "3", trees[2]), seq=3, term=2, job=b"k" * 16, cipher=cipher)
    held[third.id] = trees[2]
    with recorder.recording():
        receiver = store.receive(10**6)
        for piece in other.stream(third.manifest.chunks):
            feed(receiver, piece)
        receiver.finish()
        store.accept_manifest(third.sealed)
        recorder.mark("promised", third.id)
        recorder.mark("going", first.id)
        store.forget_old(JOB, needed=(2,))
        store.collect(min_age_s=0, now_unix=time.time() + 1000)
        recorder.mark("end")
    other.close()
    store.close()
    return recorder, held


def planted(directory: Path, tree: Tree) -> Path:
    write_tree(directory, tree)
    return directory


@pytest.mark.parametrize("cipher", [None, CIPHER], ids=["open", "sealed"])
def test_every_crash_state_is_consistent(tmp_path: Path, cipher: StateCipher | None) -> None:
    assert play(tmp_path, cipher) > 90


def play(root: Path, cipher: StateCipher | None = None) -> int:
    """Check every crash state; return their number."""
    recorder, held = history(root, cipher)
    states = 0
    for state, marks in crash_states(recorder.steps):
        states += 1
        check(root / "after", state, marks, held, cipher)
    return states


FAULTS = {
    "a pack is not synced": ("pack", "os.fsync"),
    "the directory of packs is not synced": ("pack", "sync_directory"),
    "a manifest or its directory is not synced": ("store", "os.fsync"),
    "the directory of manifests is not synced before packs go": ("collector", "sync_directory"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_missing_sync_is_detected(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name = FAULTS[fault]
    if name == "sync_directory":
        monkeypatch.setattr(f"ckptstore.{module}.{name}", lambda path: None)
    else:
        monkeypatch.setattr(f"ckptstore.{module}.os", NoFsync())
    with pytest.raises((AssertionError, StoreError)):
        play(tmp_path)


class NoFsync:
    """`os` with an fsync that does nothing."""

    def fsync(self, descriptor: int) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


def check(root: Path, state: State, marks: list[Mark], held: dict[bytes, Tree], cipher: StateCipher | None) -> None:
    shutil.rmtree(root, ignore_errors=True)
    write_tree(root / "store", dict(state))
    store = open_store(root / "store")
    try:
        assert not any((root / "store" / "tmp").iterdir()), "leftovers are removed"
        visible = {info.id for info in store.manifests()}
        kept = {mark.value for mark in marks if mark.what == "promised"}
        going = {mark.value for mark in marks if mark.what == "going"}
        assert kept - going <= visible <= set(held), "I6: promised checkpoints are present"
        for identity in visible:
            store.restore(
                identity, root / "out", prefix="ckpt", cipher=cipher
            )  # I1: a visible manifest can be restored
            assert read_tree(root / "out") == held[identity], "I3: exact, never a mix"
            shutil.rmtree(root / "out")
        assert verify(store).bad_chunks == 0, "I2"
        write_tree(root / "in", {"new": b"after the crash" * 99})
        again = save(store, root / "in", seq=9, term=9)
        store.collect(min_age_s=0, now_unix=time.time() + 10_000)
        assert store.missing(again.manifest.chunks) == [], "I4 and I7: the store still works"
        for identity in visible & kept - going:
            assert store.missing(store.manifest(identity).chunks) == []
    finally:
        store.close()

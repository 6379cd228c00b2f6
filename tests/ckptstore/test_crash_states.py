"""I1 to I8 in every state in which a crash may leave a store that has saved, received, pruned and collected."""

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from ckptstore.checker import verify
from ckptstore.errors import StoreError
from ckptstore.vault import Vault
from tests.ckptstore.crashes import Mark, Recorder, State, crash_states
from tests.ckptstore.worlds import JOB, VAULT, open_store, read_tree, save, write_tree

Tree = dict[str, bytes]


def history(root: Path, vault: Vault | None) -> tuple[Recorder, dict[bytes, Tree]]:
    """A store's life, and what each of its checkpoints held."""
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
        first = save(store, planted(root / "1", trees[0]), seq=1, term=1, vault=vault)
        recorder.mark("kept", first.id)
        second = save(store, planted(root / "2", trees[1]), seq=2, term=2, parent=first.id, vault=vault)
        recorder.mark("kept", second.id)
    held[first.id], held[second.id] = trees[0], trees[1]
    other = open_store(root / "other")
    third = save(other, planted(root / "3", trees[2]), seq=3, term=2, job=b"k" * 16, vault=vault)
    held[third.id] = trees[2]
    with recorder.recording():
        receiver = store.receive(10**6)
        for piece in other.frames(third.manifest.chunks):
            receiver.feed(piece)
        receiver.finish()
        store.accept_manifest(third.sealed)
        recorder.mark("kept", third.id)
        recorder.mark("going", first.id)
        store.prune(JOB, committed_seq=2, keep=1)
        store.collect(min_age_s=0, now_unix=time.time() + 1000)
        recorder.mark("end")
    other.close()
    store.close()
    return recorder, held


def planted(directory: Path, tree: Tree) -> Path:
    write_tree(directory, tree)
    return directory


@pytest.mark.parametrize("vault", [None, VAULT], ids=["open", "sealed"])
def test_whatever_a_crash_leaves_is_whole_or_not_there(tmp_path: Path, vault: Vault | None) -> None:
    assert play(tmp_path, vault) > 90


def play(root: Path, vault: Vault | None = None) -> int:
    """How many states there were."""
    recorder, held = history(root, vault)
    states = 0
    for state, marks in crash_states(recorder.steps):
        states += 1
        check(root / "after", state, marks, held, vault)
    return states


FAULTS = {
    "a pack is not synced": ("pack", "os.fsync"),
    "the directory of packs is not synced": ("pack", "sync_directory"),
    "a manifest or its directory is not synced": ("store", "os.fsync"),
    "the directory of manifests is not synced before packs go": ("collector", "sync_directory"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_left_out_is_found(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name = FAULTS[fault]
    if name == "sync_directory":
        monkeypatch.setattr(f"ckptstore.{module}.{name}", lambda path: None)
    else:
        monkeypatch.setattr(f"ckptstore.{module}.os", Careless())
    with pytest.raises((AssertionError, StoreError)):
        play(tmp_path)


class Careless:
    """`os` as it is, but for one thing that it does not do."""

    def fsync(self, descriptor: int) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


def check(root: Path, state: State, marks: list[Mark], held: dict[bytes, Tree], vault: Vault | None) -> None:
    shutil.rmtree(root, ignore_errors=True)
    write_tree(root / "store", dict(state))
    store = open_store(root / "store")
    try:
        assert not any((root / "store" / "tmp").iterdir()), "leftovers are cleared"
        visible = {info.id for info in store.manifests()}
        kept = {mark.value for mark in marks if mark.what == "kept"}
        going = {mark.value for mark in marks if mark.what == "going"}
        assert kept - going <= visible <= set(held), "I6: what was promised is there"
        for identity in visible:
            store.restore(
                identity, root / "out", prefix="ckpt", vault=vault
            )  # I1: a manifest that is visible can be restored
            assert read_tree(root / "out") == held[identity], "I3: exactly, never a mix"
            shutil.rmtree(root / "out")
        assert verify(store).bad_chunks == 0, "I2"
        write_tree(root / "in", {"new": b"after the crash" * 99})
        again = save(store, root / "in", seq=9, term=9)
        store.collect(min_age_s=0, now_unix=time.time() + 10_000)
        assert store.missing(again.manifest.chunks) == [], "I4 and I7: it goes on"
        for identity in visible & kept - going:
            assert store.missing(store.manifest(identity).chunks) == []
    finally:
        store.close()

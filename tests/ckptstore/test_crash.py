"""SIGKILL before each system call that changes files, while a store is opened, saves, prunes, collects and restores."""

import os
import shutil
import time
import uuid
from pathlib import Path

import pytest

from ckptstore.checker import verify
from tests.ckptstore.worlds import JOB, open_store, read_tree, save, write_tree
from tests.kill_points import Killed, Say, killed_at_each_call

pytestmark = [pytest.mark.strace, pytest.mark.usefixtures("alone")]
LAST = 3


def use_a_store(root: Path, say: Say) -> None:
    """Open a store without its index, with a damaged pack; then save, prune and collect twice, and restore."""
    store = open_store(root / "store")
    kept = store.manifests(JOB)[-1]
    for seq in range(3, LAST + 1):
        kept = save(store, root / str(seq), seq=seq, term=seq, parent=kept.id)
        say(f"saved {seq}")
        say(f"prunes {seq - 2}")
        store.forget_old(JOB, needed=(seq - 1, seq))
        say(f"pruned {seq - 2}")
        store.collect(min_age_s=0, now_unix=time.time() + 1000)
    store.restore(kept.id, root / "restored", prefix="ckpt")
    say("restored")
    store.close()


def check(killed: Killed, trees: dict[int, dict[str, bytes]]) -> None:
    told = {(what, int(seq)) for what, _, seq in (line.partition(" ") for line in killed.said) if seq}
    store = open_store(killed.root / "store")
    try:
        assert not list(store.tmp.iterdir()), "leftovers are removed"
        listed = {info.seq: info for info in store.manifests(JOB)}
        for seq in trees:
            saved = seq <= 2 or ("saved", seq) in told
            assert seq in listed or not saved or ("prunes", seq) in told, f"checkpoint {seq} is lost"
            assert seq not in listed or ("pruned", seq) not in told, f"checkpoint {seq} is back"
        report = verify(store)
        assert report.bad_chunks == 0 and report.damaged_manifests == (), "I1"
        for seq, info in listed.items():
            store.restore(info.id, killed.root / f"out-{seq}", prefix="ckpt")
            assert read_tree(killed.root / f"out-{seq}") == trees[seq], f"checkpoint {seq} is torn"
        if (killed.root / "restored").exists():
            assert read_tree(killed.root / "restored") == trees[LAST], "I3: a restore is complete or absent"
        else:
            assert "restored" not in killed.said
        again = save(store, killed.root / "1", seq=9, term=9)
        store.collect(min_age_s=0, now_unix=time.time() + 10_000)
        for identity in (again.id, *(info.id for info in listed.values())):
            assert store.missing(store.manifest(identity).chunks) == [], "I4 and I7: the store still works"
    finally:
        store.close()


def test_store_killed_at_any_call_loses_and_revives_nothing(tmp_path: Path) -> None:
    first = tmp_path / "first"
    same = os.urandom(3000)
    # Some chunks are shared by all, so that a collection rewrites packs.
    trees = {seq: {"own": os.urandom(5000), "same": same} for seq in range(1, LAST + 1)}
    for seq, tree in trees.items():
        write_tree(first / str(seq), tree)
    store = open_store(first / "store")
    for seq in (1, 2):
        save(store, first / str(seq), seq=seq, term=seq)
    store.close()
    for path in (first / "store").glob("index.sqlite*"):
        path.unlink()
    (first / "store" / "tmp" / "leftover").touch()
    damaged = next((first / "store" / "packs").iterdir())
    damaged.write_bytes(damaged.read_bytes() + b"the end of an object is missing")

    points = 0
    for killed in killed_at_each_call(use_a_store, lambda: Path(shutil.copytree(first, tmp_path / str(uuid.uuid4())))):
        try:
            check(killed, trees)
        except Exception as error:
            error.add_note(f"killed at {killed.point}, after {killed.said}")
            raise
        shutil.rmtree(killed.root)
        points += 1
    assert points > 60, "the store's calls must be followed"

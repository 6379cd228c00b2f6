"""SIGKILL at every failpoint; the reopened store must keep I1, I3 and I8."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ckptstore.checker import verify
from ckptstore.failpoints import NAMES
from tests.ckptstore.worlds import JOB, open_store, read_tree, save, write_tree

VICTIM = """
import sys, time
from pathlib import Path
from tests.ckptstore.worlds import JOB, open_store, save
root = Path(sys.argv[1])
store = open_store(root / "store")
if sys.argv[2] == "save":
    save(store, root / "new", seq=2, term=2)
elif sys.argv[2] == "restore":
    store.restore(store.manifests(JOB)[0].id, root / "restored", prefix="ckpt")
else:  # collect everything, or all but the few chunks of the first pack that the second checkpoint needs
    store.forget_old(JOB, needed=(99,) if sys.argv[2] == "collect" else (2,))
    store.collect(min_age_s=0, now_unix=time.time() + 1000)
print("survived")
"""


def kill_at(point: str, root: Path, action: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", VICTIM, str(root), action],
        env={**os.environ, "MESH_FAILPOINT": point},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -9, f"{point} was never reached: {done.stdout}{done.stderr}"


WRITES = [point for point in NAMES if point.startswith(("pack", "manifest", "fence"))]
COLLECTS = [point for point in NAMES if point.startswith("collect")]


@pytest.mark.parametrize("point", [*COLLECTS, *(point for point in WRITES if point.startswith("pack"))])
def test_killed_while_a_pack_is_rewritten(point: str, tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    trees = [{"a": os.urandom(5000), "same": b"s" * 3000} for _ in range(2)]
    for number, tree in enumerate(trees, 1):
        write_tree(tmp_path / str(number), tree)
        last = save(store, tmp_path / str(number), seq=number)
    store.close()
    kill_at(point, tmp_path, "repack")
    for _ in range(2):  # after the crash, and after another collection
        store = open_store(tmp_path / "store")
        assert verify(store).bad_chunks == 0
        store.restore(last.id, tmp_path / "out", prefix="ckpt")
        assert read_tree(tmp_path / "out") == trees[1], "I4"
        shutil.rmtree(tmp_path / "out")
        store.collect(min_age_s=0, now_unix=time.time() + 1000)
        store.close()
    assert len(list((tmp_path / "store" / "packs").iterdir())) == 2


@pytest.mark.parametrize("point", NAMES)
def test_killed_at_a_failpoint(point: str, tmp_path: Path) -> None:
    old, new = ({"a": os.urandom(5000), "same": b"s" * 3000} for _ in range(2))
    write_tree(tmp_path / "old", old)
    write_tree(tmp_path / "new", new)
    store = open_store(tmp_path / "store")
    first = save(store, tmp_path / "old", seq=1, term=1)
    store.close()
    action = "collect" if point.startswith("collect") else "restore" if point.startswith("restore") else "save"
    kill_at(point, tmp_path, action)

    store = open_store(tmp_path / "store")
    assert not list((tmp_path / "store" / "tmp").iterdir()), "leftovers are removed"
    report = verify(store)
    assert report.bad_chunks == 0 and report.damaged_manifests == (), "I1"
    assert not (tmp_path / "restored").exists(), "I3: a restore is complete or absent"
    if action != "collect":
        store.restore(first.id, tmp_path / "out", prefix="ckpt")
        assert read_tree(tmp_path / "out") == old, "I8: the earlier checkpoint is untouched"
        write_tree(tmp_path / "new", new)
        second = save(store, tmp_path / "new", seq=2, term=2)
        store.restore(second.id, tmp_path / "out2", prefix="ckpt")
        assert read_tree(tmp_path / "out2") == new, "I7: saving again works"
    store.collect(min_age_s=0, now_unix=time.time() + 10_000)
    assert all(not store.missing(store.manifest(info.id).chunks) for info in store.manifests(JOB)), "I4"
    store.close()

"""Detection of complete checkpoints in a directory, in each of the three modes."""

import os
import time
from pathlib import Path

import pytest

from mesh.checkpoints.commit_modes import committed_tree, link_checkpoints
from mesh.model.spec import Checkpointing

RENAME, MARKER = Checkpointing(mode="rename", keep=2), Checkpointing(mode="marker", keep=2)
STABLE = Checkpointing(mode="stable", stable_s=5.0)


def entry(directory: Path, name: str, age_s: float = 100.0) -> Path:
    path = directory / name
    path.mkdir(parents=True)
    (path / "state.bin").write_bytes(name.encode())
    moment = time.time() - age_s
    os.utime(path, (moment, moment))
    return path


@pytest.mark.parametrize("rules", [RENAME, MARKER, STABLE], ids=lambda rules: rules.mode)
def test_empty_directory_has_no_checkpoint(tmp_path: Path, rules: Checkpointing) -> None:
    assert committed_tree(tmp_path, rules, time.time()) is None


def test_rename_mode_takes_the_newest_final_names(tmp_path: Path) -> None:
    for age, name in enumerate(["step-9", "step-8", "step-7"]):
        entry(tmp_path, name, age_s=age)
    for unfinished in (".step-10.tmp", "step-11.part", "step-12.incomplete"):
        entry(tmp_path, unfinished, age_s=0)
    tree = committed_tree(tmp_path, RENAME, time.time())
    assert tree is not None and tree.resume == "step-9"
    assert tree.roots == {"ckpt/step-9": tmp_path / "step-9", "ckpt/step-8": tmp_path / "step-8"}
    same = committed_tree(tmp_path, RENAME, time.time())
    assert same is not None and same.key == tree.key
    entry(tmp_path, "step-10", age_s=-1)
    newer = committed_tree(tmp_path, RENAME, time.time())
    assert newer is not None and newer.key != tree.key and newer.resume == "step-10"


def test_marker_mode_requires_the_marker_file(tmp_path: Path) -> None:
    path = entry(tmp_path, "epoch-1")
    assert committed_tree(tmp_path, MARKER, time.time()) is None
    (path / "COMMITTED").touch()
    tree = committed_tree(tmp_path, MARKER, time.time())
    assert tree is not None and tree.resume == "epoch-1"


def test_stable_mode_waits_until_no_file_changes_or_is_open_for_writing(tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    file.write_bytes(b"weights")
    now = time.time()
    assert committed_tree(tmp_path, STABLE, now) is None
    assert committed_tree(tmp_path, STABLE, now, ended=True) is not None
    tree = committed_tree(tmp_path, STABLE, now + 6)
    assert tree is not None and tree.roots == {"ckpt": tmp_path} and tree.resume == ""
    with file.open("rb"):
        assert committed_tree(tmp_path, STABLE, now + 6) is not None, "whoever reads it changes nothing"
    with file.open("ab"):
        assert committed_tree(tmp_path, STABLE, now + 6) is None, "a process has the file open for writing"
    (tmp_path / "next.pt.tmp").touch()
    assert committed_tree(tmp_path, STABLE, now + 60) is None, "a temporary file marks an unfinished save"


def test_checkpoints_are_linked_inside_the_working_directory_only(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "ckpt").mkdir()
    link_checkpoints(tmp_path, "runs/last")
    assert (tmp_path / "work" / "runs" / "last").resolve() == tmp_path / "ckpt"
    (tmp_path / "owners").mkdir()
    (tmp_path / "work" / "out").symlink_to(tmp_path / "owners")
    with pytest.raises(OSError, match="leads out of the working directory"):
        link_checkpoints(tmp_path, "out/last")
    assert not list((tmp_path / "owners").iterdir())

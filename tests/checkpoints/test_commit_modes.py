"""Detection of complete checkpoints in a directory, in each of the three modes."""

import mmap
import os
import time
import tracemalloc
from pathlib import Path

import pytest

from ckptstore.tree_scan import Look, scan
from mesh.checkpoints import commit_modes
from mesh.checkpoints.commit_modes import (
    DONE_MARKER,
    MOST_BESIDE,
    committed_tree,
    is_done,
    link_checkpoints,
    open_for_writing,
)
from mesh.model.spec import Checkpointing
from tests.ckptstore.worlds import Mapping

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


def test_no_link_marks_a_checkpoint_or_a_job_as_done(tmp_path: Path) -> None:
    """A guest's link leads to a file of the host, which answered whether it is there, or to a mount that hangs."""
    (tmp_path / "secret").touch()
    ckpt = tmp_path / "ckpt"
    for path in (entry(ckpt, "step-1") / "COMMITTED", ckpt / DONE_MARKER):
        path.symlink_to(tmp_path / "secret")
    assert committed_tree(ckpt, MARKER, time.time()) is None and not is_done(ckpt)
    for path in (ckpt / "step-1" / "COMMITTED", ckpt / DONE_MARKER):
        path.unlink()
        path.touch()
    assert committed_tree(ckpt, MARKER, time.time()) is not None and is_done(ckpt)


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


@pytest.mark.parametrize(
    ("keep", "made", "saved", "resume"),
    [
        pytest.param(
            2,
            ["global_step9/", "latest", "zero_to_fp32.py", "global_step10/", "latest", "zero_to_fp32.py"],
            ["global_step10", "global_step9", "latest", "zero_to_fp32.py"],
            "global_step10",
            id="DeepSpeed",
        ),
        pytest.param(
            1,
            ["epoch=1-step=10.ckpt", "epoch=2-step=20.ckpt", "last.ckpt -> epoch=2-step=20.ckpt"],
            ["epoch=2-step=20.ckpt", "last.ckpt"],
            "epoch=2-step=20.ckpt",
            id="Lightning",
        ),
        pytest.param(
            1,
            ["ckpt-1/", "ckpt-2/", "latest -> ckpt-2", "log.txt"],
            ["ckpt-2", "latest", "log.txt"],
            "ckpt-2",
            id="log",
        ),
        pytest.param(1, ["step-7.pt", "logs/", "last -> logs"], ["last", "logs", "step-7.pt"], "step-7.pt", id="logs"),
        pytest.param(1, ["step-8/", "last/"], ["last", "step-8"], "step-8", id="unnumbered"),
        pytest.param(1, ["step-10/", "step-9/"], ["step-10"], "step-10", id="written late"),
        pytest.param(1, ["loss=0.9-step=1", "loss=0.5-step=2"], ["loss=0.5-step=2"], "loss=0.5-step=2", id="metric"),
        pytest.param(2, ["c.pt", "a.pt", "b.pt", "d.pt -> c.pt"], ["a.pt", "b.pt", "d.pt"], "b.pt", id="plain files"),
    ],
)
def test_what_lies_beside_checkpoints_takes_no_place_of_theirs(
    tmp_path: Path, keep: int, made: list[str], saved: list[str], resume: str
) -> None:
    for age, line in enumerate(reversed(made)):
        name, _, target = line.partition(" -> ")
        path, moment = tmp_path / name.rstrip("/"), time.time() - age
        if name.endswith("/"):
            path.mkdir(exist_ok=True)
        elif target:
            path.symlink_to(target)
        elif not path.exists():
            path.write_text(line)
        os.utime(path, (moment, moment), follow_symlinks=False)
    rules = Checkpointing(mode="rename", keep=keep)
    tree = committed_tree(tmp_path, rules, time.time())
    assert tree is not None and tree.resume == resume
    assert sorted(tree.roots) == [f"ckpt/{name}" for name in saved]
    alone = committed_tree(tmp_path, rules, time.time(), beside=False)
    assert alone is not None and alone.key == tree.key and alone.resume == resume
    assert list(alone.roots) == [f"ckpt/{resume}"]


@pytest.mark.parametrize("rules", [RENAME, MARKER, STABLE], ids=lambda rules: rules.mode)
def test_loop_of_links_hides_no_checkpoint(tmp_path: Path, rules: Checkpointing) -> None:
    (entry(tmp_path, "step-7") / "COMMITTED").touch()
    (tmp_path / "loop").symlink_to("loop")
    tree = committed_tree(tmp_path, rules, time.time() + 60)
    assert tree is not None and tree.resume == ("" if rules is STABLE else "step-7")


def test_links_alone_are_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "step-7").symlink_to("elsewhere")
    for rules in (RENAME, MARKER):
        assert committed_tree(tmp_path, rules, time.time()) is None


def test_files_saved_beside_checkpoints_are_bounded(tmp_path: Path) -> None:
    entry(tmp_path, "step-1")
    for number in range(100):
        (tmp_path / f"{number}.log").touch()
    tree = committed_tree(tmp_path, RENAME, time.time())
    assert tree is not None and "ckpt/step-1" in tree.roots and len(tree.roots) == 1 + MOST_BESIDE


@pytest.mark.parametrize(("rules", "most"), [(RENAME, 3), (STABLE, 7)])
def test_checkpoint_directory_has_a_bounded_number_of_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rules: Checkpointing, most: int
) -> None:
    """Mode `stable` looks at the whole tree: the directory itself, and three more with a file each."""
    monkeypatch.setattr(commit_modes, "MOST_ENTRIES", most)
    for number in range(3):
        entry(tmp_path, f"step-{number}")
    assert committed_tree(tmp_path, rules, time.time() + 60) is not None
    (tmp_path / ".fourth").touch()
    with pytest.raises(OSError, match=f"has more than {most} files and directories"):
        committed_tree(tmp_path, rules, time.time() + 60)


def test_stable_mode_tells_what_its_tree_must_still_look_like(tmp_path: Path) -> None:
    entry(tmp_path, "step-1")
    tree = committed_tree(tmp_path, STABLE, time.time() + 6)
    assert tree is not None and tree.scans == {"ckpt": scan(tmp_path)}
    assert set(tree.scans["ckpt"]) == {"", "step-1", "step-1/state.bin"}


def test_checkpoints_are_not_compared_with_every_file_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = 0

    class Entry(commit_modes._Entry):
        __hash__ = tuple.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return tuple.__eq__(self, other)

    monkeypatch.setattr(commit_modes, "_Entry", Entry)
    for number in range(40):
        entry(tmp_path, f"step-{number}")
        (tmp_path / f"{number}.log").touch()
    assert committed_tree(tmp_path, RENAME, time.time()) is not None
    assert compared < 400, "not each file with each checkpoint"


def test_marker_mode_requires_the_marker_file(tmp_path: Path) -> None:
    path = entry(tmp_path, "epoch-1")
    assert committed_tree(tmp_path, MARKER, time.time()) is None
    (path / "COMMITTED").touch()
    (tmp_path / "latest").symlink_to("epoch-1")
    tree = committed_tree(tmp_path, MARKER, time.time())
    assert tree is not None and tree.resume == "epoch-1" and set(tree.roots) == {"ckpt/epoch-1", "ckpt/latest"}


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


def test_stable_mode_sees_a_file_that_is_open_by_another_path(tmp_path: Path) -> None:
    """A container has its own paths for its checkpoints, as a link of the file here."""
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt" / "model.pt").write_bytes(b"half")
    (tmp_path / "inside").hardlink_to(tmp_path / "ckpt" / "model.pt")
    with (tmp_path / "inside").open("ab"):
        assert committed_tree(tmp_path / "ckpt", STABLE, time.time() + 6) is None
    assert committed_tree(tmp_path / "ckpt", STABLE, time.time() + 6) is not None


def test_open_files_of_other_file_systems_are_not_asked_for(tmp_path: Path) -> None:
    """A guest may serve one that never answers: a file in memory stands for its file, and is found only by asking."""
    other = os.memfd_create("other")
    try:
        assert not open_for_writing(tmp_path, [Look.of(os.fstat(other))])
        with (tmp_path / "own").open("wb") as own:
            assert open_for_writing(tmp_path, [Look.of(os.fstat(own.fileno()))])
    finally:
        os.close(other)


@pytest.mark.parametrize(
    ("flags", "access", "complete"),
    [(mmap.MAP_SHARED, "rw", False), (mmap.MAP_PRIVATE, "rw", True), (mmap.MAP_SHARED, "r", True)],
)
def test_stable_mode_waits_for_a_writable_mapping_to_end(
    tmp_path: Path, flags: int, access: str, complete: bool
) -> None:
    (tmp_path / "model.bin").write_bytes(bytes(mmap.PAGESIZE))
    rights = mmap.PROT_READ | (mmap.PROT_WRITE if "w" in access else 0)
    with (tmp_path / "model.bin").open("r+b") as file:
        # Without Python's copy of the descriptor, which would be open for writing itself.
        mapping = Mapping(file.fileno(), mmap.PAGESIZE, rights, flags)
    tree = committed_tree(tmp_path, STABLE, time.time() + 6)
    assert (tree is not None) == complete
    whole = committed_tree(tmp_path, STABLE, time.time() + 6, ended=True)
    assert whole is not None and committed_tree(tmp_path, STABLE, time.time() + 6, known=whole.key) == whole
    mapping.close()
    assert committed_tree(tmp_path, STABLE, time.time() + 6) is not None


def test_looking_for_writers_takes_little_memory(tmp_path: Path) -> None:
    """A guest with many mappings of files with long names took hundreds of MiB of its host's daemon."""
    place = tmp_path / Path(*["d" * 250] * 12)
    place.mkdir(parents=True)
    with (place / "model.bin").open("w+b") as file:
        file.write(bytes(mmap.PAGESIZE))
        file.flush()
        rights, size = mmap.PROT_READ | mmap.PROT_WRITE, mmap.PAGESIZE
        mappings = [Mapping(file.fileno(), size, rights, mmap.MAP_SHARED) for _ in range(3000)]
        look = Look.of(os.fstat(file.fileno()))
    tracemalloc.start()
    try:
        assert open_for_writing(place, [look])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        for mapping in mappings:
            mapping.close()
    assert peak < len(mappings) * 1000, "of 3,000 bytes each"


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

"""Trees as only a hostile guest makes them are looked through, and removed."""

import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from mesh.util import trees

ROOT = Path(__file__).parents[2]
DEEP = """
import os, sys
os.chdir(sys.argv[1])
for level in range(1500):
    os.mkdir("d" * 9)
    os.chdir("d" * 9)
    if not level % 500:
        os.symlink("/", "link")
        os.mkdir("closed", 0)
        open("file", "w").close()
os.chmod(".", 0)
"""


def test_tree_deeper_than_path_max_is_removed(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    # It is too deep for pytest to remove, should this test fail.
    request.addfinalizer(lambda: subprocess.run(["rm", "-rf", root], check=True))
    for directory in (root, outside):
        directory.mkdir()
    (outside / "kept").touch()
    (root / "link").symlink_to(outside)
    subprocess.run([sys.executable, "-c", DEEP, root], check=True)
    found = list(trees.walk(root))
    assert len(found) > trees.DEEPEST and "link" in {entry.name for entry in found}
    assert "kept" not in {entry.name for entry in found}, "links are not followed"
    with pytest.raises(trees.OutOfReach, match="more than 256 directories in each other"):
        list(trees.walk(root, strict=True))
    trees.remove(root)
    assert not root.exists() and (outside / "kept").exists()


CLOSED = """
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from mesh.execution.disk_usage import tree_use
from mesh.util.trees import OutOfReach, walk
if os.getuid() == 0:
    os.setgid(65534), os.setuid(65534)
for mode in (0o700, 0o000, 0o300, 0o400):
    with TemporaryDirectory() as root:
        closed = Path(root, "closed")
        closed.mkdir()
        (closed / "file").write_text("counts")
        closed.chmod(mode)
        try:
            print(tree_use([Path(root)])[1], end=" ")
        except OutOfReach:
            print(f"{mode:o}", len(list(walk(Path(root)))), end=" ")
        closed.chmod(0o700)
"""


def test_directory_that_its_owner_closed_is_noticed_where_all_must_be_counted() -> None:
    done = subprocess.run([sys.executable, "-c", CLOSED], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.stdout == "2 0 1 300 1 400 2 ", done.stderr


def test_file_link_or_missing_path_is_removed(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    for name in ("link", "nothing"):
        trees.remove(tmp_path / name)
    assert os.listdir(tmp_path) == ["kept"]  # noqa: PTH208


def test_walk_finds_all_and_directories_first(tmp_path: Path) -> None:
    for path in ("a/b/c", "a/d", "e"):
        (tmp_path / path).mkdir(parents=True, exist_ok=True)
        (tmp_path / path / "file").touch()

    found = [Path(entry.path) for entry in trees.walk(tmp_path)]
    assert sorted(found) == sorted(tmp_path.rglob("*"))
    assert all(path.parent == tmp_path or found.index(path.parent) < found.index(path) for path in found)


def test_deepest_and_widest_tree_is_walked_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / "deep"
    deep.joinpath(*["d"] * 256).mkdir(parents=True)
    assert len(list(trees.walk(deep, strict=True))) == 256
    deep.joinpath(*["d"] * 257).mkdir()
    assert len(list(trees.walk(deep))) == 257
    with pytest.raises(trees.OutOfReach, match="more than 256 directories"):
        list(trees.walk(deep, strict=True))
    monkeypatch.setattr(trees, "MOST_WAITING", 3)
    for number in range(4):
        (tmp_path / "wide" / "inner" / f"{number}" / "one" / "two").mkdir(parents=True)
        if number < 3:
            assert len(list(trees.walk(tmp_path / "wide", strict=True))) == 1 + 3 * (number + 1)
    assert len(list(trees.walk(tmp_path / "wide"))) < 13
    with pytest.raises(trees.OutOfReach, match="or 3 in one"):
        list(trees.walk(tmp_path / "wide", strict=True))


def test_removal_of_a_tree_keeps_no_descriptor_and_follows_no_link(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    (outside / "kept").mkdir(parents=True)
    for path in ("a/b/c/d/e", "a/b2/c", "f"):
        (root / path).mkdir(parents=True)
    for directory in [root, *(path for path in root.rglob("*") if path.is_dir())]:
        (directory / "file").touch()
        (directory / "link").symlink_to(outside)
    descriptors = os.listdir("/proc/self/fd")  # noqa: PTH208
    trees.remove(root)
    assert not root.exists() and (outside / "kept").is_dir()
    assert os.listdir("/proc/self/fd") == descriptors  # noqa: PTH208
    for fails in (root, tmp_path / "gone" / "inner"):
        trees.remove(fails)
    (tmp_path / "file").touch()
    trees.remove(tmp_path / "file")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["outside"]


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir])
def test_walk_of_many_files_takes_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], None]
) -> None:
    monkeypatch.setattr(trees, "MOST_WAITING", 100)
    for number in range(4000):
        make(tmp_path / f"{number:0200}")
    tracemalloc.start()
    try:
        assert sum(1 for _ in trees.walk(tmp_path)) == 4000
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()
    if make is Path.mkdir:
        with pytest.raises(trees.OutOfReach, match="or 100 in one"):
            list(trees.walk(tmp_path, strict=True))


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir, lambda path: (path / "inner").mkdir(parents=True)])
def test_tree_of_many_names_is_removed_in_little_memory(tmp_path: Path, make: Callable[[Path], None]) -> None:
    """A guest may leave ten million, whose names alone would take gigabytes of its host's daemon."""
    root = tmp_path / "tree"
    for place in (root, root / "below"):
        place.mkdir()
        for number in range(2000):
            make(place / f"{number:0200}")
    tracemalloc.start()
    try:
        trees.remove(root)
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()
    assert not root.exists()

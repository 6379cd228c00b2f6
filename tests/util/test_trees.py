"""Trees as only a hostile guest makes them are looked through, and removed."""

import os
import subprocess
import sys
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


def test_tree_deeper_than_path_max_is_removed(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    for directory in (root, outside):
        directory.mkdir()
    (outside / "kept").touch()
    (root / "link").symlink_to(outside)
    subprocess.run([sys.executable, "-c", DEEP, root], check=True)
    found = list(trees.walk(root))
    assert len(found) > trees.DEEPEST and found[0][2] == ["link"], "links are not followed"
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
            print(tree_use(Path(root))[1], end=" ")
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


def test_walk_matches_os_walk(tmp_path: Path) -> None:
    for path in ("a/b/c", "a/d", "e"):
        (tmp_path / path).mkdir(parents=True, exist_ok=True)
        (tmp_path / path / "file").touch()

    def sorted_walk(walk: object) -> list[tuple[str, list[str], list[str]]]:
        return sorted((place, sorted(names), sorted(files)) for place, names, files in walk)  # type: ignore[attr-defined]

    assert sorted_walk(trees.walk(tmp_path)) == sorted_walk(os.walk(tmp_path))

"""A stranger's tree is written below its directory and nowhere else."""

import os
import stat
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptstore.errors import BadPath
from ckptstore.tree_writer import TreeWriter
from tests.descriptors import descriptors_below

NAMES = st.sampled_from(
    ["a", "A", "b", "..", ".", "link", "link/x", "a/b", "a/link", "a/b/link/c", "/a", "b//c", "a/../../x", "é"]
)
TARGETS = st.sampled_from(["a", "..", "../..", "a/..", "a/../..", "/etc", ".", "../a", "../../a", "link/..", ""])
ENTRIES = st.lists(st.tuples(st.sampled_from(["file", "directory", "link"]), NAMES, TARGETS), max_size=12)


def write(tree: TreeWriter, kind: str, path: str, target: str = "", mode: int = 0o644) -> None:
    match kind:
        case "file":
            descriptor = tree.file(f"top/{path}", mode)
            os.write(descriptor, b"written")
            os.close(descriptor)
        case "directory":
            tree.directory(f"top/{path}", mode)
        case "link":
            tree.link(f"top/{path}", target)


def everything(root: Path) -> list[Path]:
    return [Path(where, name) for where, names, files in os.walk(root) for name in [*names, *files]]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=300)
@given(ENTRIES, st.booleans())
def test_no_sequence_of_entries_leaves_the_directory(
    tmp_path_factory: pytest.TempPathFactory, entries: list[tuple[str, str, str]], replaces: bool
) -> None:
    place = tmp_path_factory.mktemp("tree")
    inside, outside = place / "inside", place / "outside"
    outside.mkdir()
    (outside / "kept").write_text("mine")
    inside.mkdir()
    (inside / "link").symlink_to(outside)  # the user's own link, which the stranger may know of
    with TreeWriter(inside, "top/", replaces) as tree:
        for kind, path, target in entries:
            try:
                write(tree, kind, path, target)
            except (BadPath, OSError):
                continue
        assert descriptors_below(inside), "the root, at least"
    assert descriptors_below(place) == []
    assert [path.name for path in everything(outside)] == ["kept"] and (outside / "kept").read_text() == "mine"
    assert sorted(path.name for path in place.iterdir()) == ["inside", "outside"]
    own = inside / "link"
    for path in everything(inside):
        if path.is_symlink() and not (path == own and path.readlink() == outside):
            landed = Path(os.path.realpath(path))
            assert landed.is_relative_to(inside) or landed.is_relative_to(outside)  # by the user's own link only
            if landed.is_relative_to(outside):
                assert own.is_symlink() and own.readlink() == outside


def test_chain_of_links_cannot_climb_out(tmp_path: Path) -> None:
    """Each link alone stays inside, read as text; together they lead out (CVE-2025-4517)."""
    with TreeWriter(tmp_path) as tree:
        tree.directory("top/a/b", 0o755)
        tree.link("top/a/b/up", "../..")
        with pytest.raises(BadPath, match="beginning"):
            tree.link("top/out", "a/b/up/..")
        with pytest.raises(OSError, match="up"):
            tree.file("top/a/b/up/file", 0o644)
    assert [path.name for path in (tmp_path / "top").iterdir()] == ["a"]


@pytest.mark.parametrize("bits", [stat.S_ISUID, stat.S_ISGID, stat.S_ISVTX])
def test_tree_writer_sets_no_special_bits(bits: int, tmp_path: Path) -> None:
    with TreeWriter(tmp_path) as tree:
        os.close(tree.file("file", 0o755 | bits))
        tree.directory("directory", 0o755 | bits)
    for name in ("file", "directory"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o755


def test_file_is_replaced_only_where_asked(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("mine")
    os.link(tmp_path / "own", tmp_path / "file")
    with TreeWriter(tmp_path) as tree, pytest.raises(FileExistsError):
        tree.file("file", 0o644)
    with TreeWriter(tmp_path, replaces=True) as tree:
        os.close(tree.file("file", 0o644))
        with pytest.raises(IsADirectoryError):
            tree.directory("directory", 0o755)
            tree.file("directory", 0o644)
    assert (tmp_path / "file").read_text() == "" and (tmp_path / "own").read_text() == "mine"

import os
from pathlib import Path

import pytest

from mesh.jobs import workdir
from mesh.jobs.workdir import collect_files
from mesh.util.errors import ExitCode, MeshError
from tests.ckptstore.worlds import open_store, save


def make(directory: Path, *names: str) -> None:
    for name in names:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


def test_files_are_collected_without_caches_and_checkpoints(tmp_path: Path) -> None:
    make(
        tmp_path,
        "train.py",
        "lib/net.py",
        ".git/config",
        "lib/__pycache__/net.pyc",
        ".venv/bin/python",
        "ckpts/step-1/a",
    )
    files = collect_files(tmp_path, ("ckpts",))
    assert sorted(files) == ["work/lib", "work/lib/net.py", "work/train.py"]
    assert files["work/lib/net.py"] == tmp_path / "lib" / "net.py"


def test_meshignore_excludes_files(tmp_path: Path) -> None:
    make(tmp_path, "train.py", "data/images.bin", "notes.log", "sub/other.log", "sub/keep.txt")
    (tmp_path / ".meshignore").write_text("# big\ndata/\n\n*.log\n")
    assert sorted(collect_files(tmp_path, ())) == [
        "work/.meshignore",
        "work/sub",
        "work/sub/keep.txt",
        "work/train.py",
    ]


@pytest.mark.parametrize("below", ["", ".local/state/campus-mesh/"])
def test_key_of_a_node_is_never_sent(tmp_path: Path, below: str) -> None:
    make(tmp_path, "train.py", f"{below}node.key", f"{below}genesis")
    with pytest.raises(MeshError, match="with its key, which no other machine may have") as refused:
        collect_files(tmp_path, ())
    assert refused.value.code == ExitCode.USAGE


def test_state_of_a_node_that_is_ignored_keeps_no_job_from_being_sent(tmp_path: Path) -> None:
    make(tmp_path, "train.py", "certs/node.key", "state/node.key", "state/genesis")
    (tmp_path / ".meshignore").write_text("state/\n")
    assert "work/certs/node.key" in collect_files(tmp_path, ())


def test_gitignore_rules_apply_as_in_git(tmp_path: Path) -> None:
    make(
        tmp_path,
        "a.py",
        "a.tmp",
        "build/out.o",
        "sub/build/out.o",
        "sub/a.tmp",
        "sub/keep.tmp",
        "data/x.bin",
        "data/y.txt",
    )
    (tmp_path / ".gitignore").write_text("*.tmp\n/build/\n/data/*\n!/data/y.txt\n")
    (tmp_path / "sub" / ".gitignore").write_text("!keep.tmp\n")
    (tmp_path / ".meshignore").write_text("!data/x.bin\n")
    taken = {name.removeprefix("work/") for name in collect_files(tmp_path, ())} - {".gitignore", ".meshignore"}
    assert taken == {
        *("a.py", "sub", "sub/build", "sub/build/out.o", "sub/.gitignore", "sub/keep.tmp"),
        *("data", "data/x.bin", "data/y.txt"),
    }


def test_directories_are_collected_even_without_files(tmp_path: Path) -> None:
    make(tmp_path, "train.py", "old/a.log", "lib/net.py", "build/x")
    (tmp_path / "logs" / "deep").mkdir(parents=True)
    (tmp_path / ".gitignore").write_text("*.log\nbuild/\n")
    files = collect_files(tmp_path, ("ckpts",))
    directories = {"work/lib", "work/logs", "work/logs/deep", "work/old"}
    assert files.keys() == {"work/.gitignore", "work/lib/net.py", "work/train.py"} | directories
    store = open_store(tmp_path / "store")
    saved = save(store, files, kind="workdir", whole=False)
    store.restore(saved.id, tmp_path / "restored", prefix="work")
    assert (tmp_path / "restored" / "logs" / "deep").is_dir()
    assert not list((tmp_path / "restored" / "old").iterdir()), "what is ignored stays here"


def test_links_are_collected_as_links(tmp_path: Path) -> None:
    make(tmp_path, "real/a.txt")
    (tmp_path / "to-directory").symlink_to("real")
    (tmp_path / "real" / "loop").symlink_to("../real")
    assert sorted(collect_files(tmp_path, ())) == [
        "work/real",
        "work/real/a.txt",
        "work/real/loop",
        "work/to-directory",
    ]


@pytest.mark.parametrize("target", ["/srv/cache/wandb/core.log", "../../above", "real/../../above"])
def test_link_that_leads_out_is_refused_with_advice(tmp_path: Path, target: str) -> None:
    make(tmp_path, "real/a.txt", "wandb/.keep")
    (tmp_path / "wandb" / "debug.log").symlink_to(target)
    with pytest.raises(MeshError, match=r"^wandb/debug\.log .*\.gitignore or \.meshignore") as caught:
        collect_files(tmp_path, ())
    assert caught.value.code == ExitCode.USAGE
    (tmp_path / ".meshignore").write_text("wandb/\n")
    assert sorted(collect_files(tmp_path, ())) == ["work/.meshignore", "work/real", "work/real/a.txt"]


def test_too_large_directory_is_refused_with_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, *(f"{number}.bin" for number in range(20)))
    monkeypatch.setattr(workdir, "LIMIT_FILES", 10)
    with pytest.raises(MeshError, match=r"\.meshignore") as caught:
        collect_files(tmp_path, ())
    assert caught.value.code == ExitCode.USAGE


def test_missing_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MeshError, match="not a directory"):
        collect_files(tmp_path / "missing", ())


def test_working_directory_may_reach_its_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workdir, "LIMIT_BYTES", 10)
    monkeypatch.setattr(workdir, "LIMIT_FILES", 3)
    (tmp_path / "inner").mkdir()
    (tmp_path / "a").write_bytes(bytes(4))
    (tmp_path / "b").write_bytes(bytes(6))
    os.mkfifo(tmp_path / "pipe")
    assert collect_files(tmp_path, ()).keys() == {"work/inner", "work/a", "work/b"}
    (tmp_path / "b").write_bytes(bytes(7))
    with pytest.raises(MeshError, match="holds more than"):
        collect_files(tmp_path, ())
    (tmp_path / "b").write_bytes(b"")
    (tmp_path / "c").touch()
    with pytest.raises(MeshError, match="holds more than"):
        collect_files(tmp_path, ())

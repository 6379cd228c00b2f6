"""`--conda environment.yml`: any bytes are a file that is read, or an error that says what to do; a lock is made of no other."""

from pathlib import Path

import click
import pytest

from mesh.cli import conda_lock
from mesh.cli.conda_lock import locked, read_environment
from mesh.cli.job_file import MOST_BYTES
from mesh.model.environment import conda_packages_of
from mesh.util.errors import MeshError
from tests.conda_channel import channel

GOOD = b"name: demo\nprefix: /x\nchannels: [conda-forge, nodefaults]\ndependencies:\n  - python=3.12\n  - numpy >=2\n"


def test_environment_is_read() -> None:
    assert read_environment(GOOD, "e.yml") == (["conda-forge"], ["python=3.12", "numpy >=2"])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "has the keys channels and dependencies"),
        (b"- a\n", "has the keys channels and dependencies"),
        (b"\xff\xfe", "not UTF-8"),
        (b"a: \0", "e.yml"),
        (b"a: [", "e.yml:1"),
        (b"[" * 5000, "nested too deeply"),
        (b"#" * (MOST_BYTES + 1), "more than 1 MiB"),
        (b"&a [*a]: 1\n", "is not taken"),
        (b"a: &a [1, 1]\nb: &b [*a, *a]\n", "e.yml:1: the key 'a' is not taken"),
        (b"!!python/object/apply:os.system ['touch x']: 1\n", "is not taken"),
        (b"dependencies: !!python/object/apply:os.system ['touch x']\n", "names no channels"),
        (GOOD + b"variables: {A: b}\n", "e.yml:7: the key 'variables' is not taken: set variables by -e"),
        (GOOD + b"  - pip:\n    - torch\n", "e.yml:7: .* use --uv"),
        (GOOD + b"  - [a]\n", "is a word"),
        (GOOD + b"channels: [a]\n", "must be one list"),
        (b"channels: [defaults]\n", "name an address"),
        (b"channels: [nodefaults]\ndependencies: [a]\n", "names no channels"),
        (b"channels: [a]\ndependencies: []\n", "must be one list"),
        (b"channels: [a]\n", "names no dependencies"),
    ],
)
def test_other_bytes_are_refused_with_their_line(text: bytes, reason: str) -> None:
    with pytest.raises(click.UsageError, match=reason):
        read_environment(text, "e.yml")


def test_file_is_inside_the_working_directory(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (tmp_path / "e.yml").write_bytes(GOOD)
    (work / "link.yml").symlink_to(tmp_path / "e.yml")
    for name, reason in (
        ("../e.yml", "plain path"),
        ("/e.yml", "plain path"),
        ("e.yml", "No such file"),
        ("link.yml", "cannot read"),
    ):
        with pytest.raises(MeshError, match=reason):
            locked(work, name)
    assert not list(tmp_path.rglob("*.lock"))


def test_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "e.yml").write_bytes(
        GOOD.replace(b"conda-forge", b"http://127.0.0.1:9/none").replace(b"python=", b"\\")
    )
    with pytest.raises(MeshError, match="--conda: "):
        locked(tmp_path, "e.yml")
    (tmp_path / "e.yml").write_bytes(GOOD)
    monkeypatch.setattr(conda_lock, "CONDA_PLATFORMS", {})
    with pytest.raises(MeshError, match="conda has no packages for"):
        locked(tmp_path, "e.yml")
    monkeypatch.undo()
    monkeypatch.setattr(conda_lock, "find_spec", lambda name: None)
    with pytest.raises(MeshError, match="pip install py-rattler"):
        locked(tmp_path, "e.yml")
    assert [path.name for path in tmp_path.iterdir()] == ["e.yml"]


def test_lock_is_used_until_its_environment_changes(tmp_path: Path) -> None:
    with channel(tmp_path / "channel") as served:
        work = served.project(tmp_path / "work")
        assert locked(work, "./environment.yml") == "environment.yml.lock"
        lock = (work / "environment.yml.lock").read_text()
        assert sorted(map(str, conda_packages_of(lock))) == sorted(served.lines)
        served.paths.clear()
        assert locked(work, "environment.yml") == "environment.yml.lock" and not served.paths
        assert locked(work, "environment.yml.lock") == "environment.yml.lock"
        less = (work / "environment.yml").read_text().replace("  - tinypkg >=1\n", "")
        (work / "environment.yml").write_text(less)
        locked(work, "environment.yml")
        (native,) = conda_packages_of((work / "environment.yml.lock").read_text())
        assert native.name == "native"


def test_channel_without_hashes_makes_no_lock(tmp_path: Path) -> None:
    with channel(tmp_path / "channel") as served:
        work = served.project(tmp_path / "work")
        for index in (tmp_path / "channel").glob("*/repodata.json"):
            index.write_text(index.read_text().replace('"sha256"', '"other"'))
        with pytest.raises(MeshError, match="an address of a channel with its SHA-256"):
            locked(work, "environment.yml")
        assert not list(work.glob("*.lock"))

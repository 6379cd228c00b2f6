"""Control groups of a container, as plain files: which belong to it, and what they limit."""

import errno
import math
import os
from pathlib import Path

import pytest

from mesh.util import cgroups
from mesh.util.mounts import Mount

CONTAINER = "c5e4" * 16


@pytest.mark.parametrize(
    ("path", "own"),
    [
        (f"docker-{CONTAINER}.scope", 1),  # Docker with systemd
        (f"docker/{CONTAINER}", 1),  # Docker with cgroupfs
        (f"user.slice/libpod-{CONTAINER}.scope/container", 2),  # Podman with crun
        (f"machine.slice/libpod-{CONTAINER}.scope", 1),  # Podman with runc
        ("user.slice/session-1.scope", 0),
        (f"user.slice/libpod-{'f' * 64}.scope/container", 0),
        (f"docker/{CONTAINER}/system.slice/one.service", 0),  # of a machine in that container
    ],
)
def test_groups_of_a_container_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, own: int) -> None:
    group = tmp_path / path
    monkeypatch.setattr(cgroups, "groups_of", lambda pid: {"": group, "memory": group})
    assert cgroups.own_groups(7, CONTAINER) == (group, group.parent)[:own]


def test_container_in_a_child_group_is_frozen_thawed_and_killed(tmp_path: Path) -> None:
    """crun: the engine freezes the group below; a freeze above is seen below, not the other way round (cgroups(7))."""
    scope = tmp_path / f"libpod-{CONTAINER}.scope"
    group = scope / "container"
    group.mkdir(parents=True)
    for place in (scope, group):
        for name, text in (("cgroup.freeze", "0"), ("cgroup.kill", ""), ("cgroup.events", "populated 1\nfrozen 0\n")):
            (place / name).write_text(text)
    groups = (group, scope)
    assert cgroups.are_frozen(groups) is False
    assert cgroups.freeze(groups)
    assert (group / "cgroup.freeze").read_text() == "1" and (scope / "cgroup.freeze").read_text() == "0"
    (group / "cgroup.events").write_text("populated 1\nfrozen 1\n")
    assert cgroups.are_frozen(groups) is True
    for place in groups:
        cgroups.thaw(place)
        cgroups.kill_all(place)
    assert (group / "cgroup.freeze").read_text() == "0" and (scope / "cgroup.kill").read_text() == "1"


def test_lowest_limit_of_nested_groups_holds(tmp_path: Path) -> None:
    above, own = tmp_path / "a", tmp_path / "a" / "b"
    own.mkdir(parents=True)
    (above / "memory.max").write_text("max\n")
    (own / "memory.max").write_text("1000\n")
    (above / "cpu.max").write_text("50000 100000\n")
    (own / "cpu.max").write_text("max 100000\n")
    (above / "pids.max").write_text("5\n")
    limits = cgroups.limits_of((own, above))
    assert limits == {"memory.max": 1000, "memory.swap.max": math.inf, "pids.max": 5, "cpu.max": 0.5}


def test_groups_of_a_process_are_those_below_the_visible_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["0::/docker/abc/own", "4:memory,cpu:/docker/abcd", "5:freezer:/docker/abc"]
    roots = {"": ("/docker/abc", tmp_path), "memory": ("/docker/abc", tmp_path), "freezer": ("/", tmp_path / "f")}
    monkeypatch.setattr(cgroups, "lines_of", lambda path: lines)
    monkeypatch.setattr(cgroups, "mounts", lambda: roots)
    groups = cgroups.groups_of(7)
    assert groups == {"": tmp_path / "own", "freezer": tmp_path / "f" / "docker" / "abc"}, "abcd is beside the root"
    assert cgroups.is_in(7, tmp_path / "own") and cgroups.is_in(7, tmp_path) and not cgroups.is_in(7, tmp_path / "o")
    assert not cgroups.is_in(7, tmp_path / "own" / "below")


def test_version_two_is_found_beside_version_one(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [
        Mount("1", "0:1", "/", "/sys/fs/cgroup/unified", (), "cgroup2", "rw"),
        Mount("2", "0:2", "/a", "/sys/fs/cgroup/cpu", (), "cgroup", "rw,cpu,cpuacct"),
        Mount("3", "0:1", "/", "/other", (), "cgroup2", "rw"),
        Mount("4", "0:3", "/", "/tmp", (), "tmpfs", "rw"),
    ]
    monkeypatch.setattr(cgroups.mount_table, "mounts", lambda: seen)
    cgroups.mounts.cache_clear()
    try:
        found = cgroups.mounts()
    finally:
        cgroups.mounts.cache_clear()
    assert found[""] == ("/", Path("/sys/fs/cgroup/unified")), "the first one counts"
    assert found["cpu"] == found["cpuacct"] == ("/a", Path("/sys/fs/cgroup/cpu")) and len(found) == 4


def test_process_that_has_moved_away_is_none_of_the_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "cgroup.procs").write_text(f"{os.getpid()}\n{os.getppid()}\n")
    (tmp_path / "inner" / "cgroup.procs").write_text("1\n")
    spent: list[int] = []
    assert sorted(cgroups.pids_in(tmp_path, lambda: spent.append(1))) == sorted((1, os.getpid(), os.getppid()))
    assert len(spent) == 5, "each group and process counts"
    monkeypatch.setattr(cgroups, "groups_of", lambda pid: {"": tmp_path if pid == os.getpid() else Path("/other")})
    assert [process.pid for process in cgroups.processes_in(tmp_path)] == [os.getpid()]
    assert list(cgroups.pids_in(tmp_path / "gone")) == []


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM])
def test_group_that_cannot_be_read_now_is_not_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fails(*given: object, **more: object) -> str:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as here:
        here.setattr(Path, "read_text", fails)
        with pytest.raises(OSError, match=os.strerror(number)):
            list(cgroups.pids_in(tmp_path))
    monkeypatch.setattr(os, "scandir", fails)
    with pytest.raises(OSError, match=os.strerror(number)):
        list(cgroups.pids_in(tmp_path))


def test_group_without_a_state_is_neither_frozen_nor_thawed(tmp_path: Path) -> None:
    assert cgroups.are_frozen([tmp_path, tmp_path / "gone"]) is None and not cgroups.is_populated(tmp_path)
    assert not cgroups.freeze([tmp_path]) and not list(tmp_path.iterdir()), "no file is made"
    (tmp_path / "cgroup.events").write_text("populated 1\nfrozen 0\n")
    assert cgroups.is_populated(tmp_path)
    (tmp_path / "freezer.state").write_text("FREEZING\n")
    assert cgroups.are_frozen([tmp_path]) is False
    (tmp_path / "freezer.state").write_text("FROZEN\n")
    assert cgroups.are_frozen([tmp_path]) is True
    (tmp_path / "cgroup.freeze").write_text("0")
    assert cgroups.freeze([tmp_path]) and (tmp_path / "cgroup.freeze").read_text() == "0", (
        "engines use the first version"
    )


def test_memory_of_a_group_has_its_shared_and_swapped_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "one", tmp_path / "two"
    for group in (first, second):
        group.mkdir()
    monkeypatch.setattr(cgroups, "groups_of", lambda pid: {"": second})
    assert cgroups.memory_of(7) is None
    (second / "memory.stat").write_text("anon 100\nfile 5000\nshmem 20\nanon_thp 7\n")
    assert cgroups.memory_of(7) == 120
    (second / "memory.swap.current").write_text("3\n")
    assert cgroups.memory_of(7) == 123
    (first / "memory.stat").write_text("rss 1\ntotal_rss 10\ntotal_shmem 20\ntotal_swap 30\ntotal_cache 40\n")
    monkeypatch.setattr(cgroups, "groups_of", lambda pid: {"memory": first, "": second})
    assert cgroups.memory_of(7) == 60


def test_groups_are_removed_once_they_are_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a" / "inner").mkdir(parents=True)
    busy, later = tmp_path / "busy", tmp_path / "later"
    for group in (busy, later):
        (group / "inner").mkdir(parents=True)
    (busy / "process").touch()
    (later / "process").touch()
    monkeypatch.setattr(cgroups, "REMOVE_S", 0.3)
    looks: list[float] = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        (later / "process").unlink(missing_ok=True)

    monkeypatch.setattr(cgroups.time, "sleep", sleep)
    cgroups.remove_groups(tuple(str(tmp_path / name) for name in ("a", "gone", "busy", "later")))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["busy"] and looks
    looks.clear()
    cgroups.remove_groups((str(tmp_path / "gone"),))
    assert not looks, "one that has gone is removed"


def test_link_in_a_group_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere" / "inner").mkdir(parents=True)
    (tmp_path / "group").mkdir()
    (tmp_path / "group" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "group" / "cgroup.procs").write_text("1\n")
    (tmp_path / "elsewhere" / "cgroup.procs").write_text("2\n")
    assert list(cgroups.pids_in(tmp_path / "group")) == [1]
    monkeypatch.setattr(cgroups, "REMOVE_S", 0.01)
    cgroups.remove_groups((str(tmp_path / "group"),))
    assert (tmp_path / "elsewhere" / "inner").is_dir()

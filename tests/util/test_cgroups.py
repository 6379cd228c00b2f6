"""Control groups of a container, as plain files: which belong to it, and what they limit."""

import math
from pathlib import Path

import pytest

from mesh.util import cgroups

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

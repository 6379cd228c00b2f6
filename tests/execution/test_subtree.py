"""The daemon's subtree of control groups, on a copy of the kernel's files. `make test-machines` takes real ones."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mesh.execution.process import subtree
from mesh.execution.process.subtree import make_group

ALL = "cpuset cpu io memory hugetlb pids rdma misc"
Place = Callable[..., Path]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Return a function that puts this process into a group with `others`, of a machine with systemd."""
    asked: list[str] = []

    def put(name: str, controllers: str = ALL, others: str = "", scope: bool = True) -> Path:
        group = tmp_path / name
        group.mkdir(parents=True)
        for file, text in (("type", "domain"), ("controllers", controllers), ("subtree_control", "")):
            (group / f"cgroup.{file}").write_text(text)
        (group / "cgroup.procs").write_text(f"{os.getpid()}\n{others}")
        own = [group]

        def groups_of(pid: int) -> dict[str, Path]:
            leaf = own[0] / subtree.LEAF / "cgroup.procs"
            return {"": leaf.parent if leaf.exists() and leaf.read_text() == str(pid) else own[0]}

        def ask(before: Path, stop_s: float) -> bool:
            asked.append(before.name)
            if scope:
                own[0] = put("system.slice/campus-mesh-7.scope")
            return scope

        monkeypatch.setattr(subtree, "groups_of", groups_of)
        monkeypatch.setattr(subtree, "_ask_for_scope", ask)
        return group

    monkeypatch.setattr(subtree, "_has_systemd", lambda: True)
    put.asked = asked  # type: ignore[attr-defined]
    return put


def enabled(group: Path) -> str:
    return (group / "cgroup.subtree_control").read_text()


def test_service_moves_to_a_leaf_and_enables_controllers_one_by_one(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = place("system.slice/campus-mesh.service")
    said: list[tuple[str, str, bool]] = []
    write = Path.write_text

    def told(path: Path, text: str) -> int:
        said.append((path.name, text, path.parent.name == subtree.LEAF))
        return write(path, text)

    monkeypatch.setattr(Path, "write_text", told)
    subtree.claim(90.0)
    assert said[0] == ("cgroup.procs", str(os.getpid()), True), (
        "a group whose children have controllers holds no process"
    )
    assert {text for name, text, _ in said if name == "cgroup.subtree_control"} == {"+memory", "+pids", "+cpu", "+io"}
    assert subtree.own_groups() == {"": own} and place.asked == []  # type: ignore[attr-defined]
    group = make_group()
    assert group is not None and Path(group.plain()[""]).parent == own, "guests are beside the leaf"


@pytest.mark.parametrize(("user", "lingers", "asks"), [(0, False, True), (1000, True, True), (1000, False, False)])
def test_daemon_of_a_login_asks_for_a_scope_that_outlives_it(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: int, lingers: bool, asks: bool
) -> None:
    own = place("user.slice/session-3.scope", others="1\n")
    monkeypatch.setattr(os, "getuid", lambda: user)
    monkeypatch.setattr(subtree, "LINGER", tmp_path)
    monkeypatch.setattr(subtree, "_user", lambda: "alice")
    if lingers:
        (tmp_path / "alice").touch()
    subtree.claim(90.0)
    assert (place.asked == ["session-3.scope"]) == asks and enabled(own) == ""  # type: ignore[attr-defined]
    assert (subtree.own_groups()[""].name == "campus-mesh-7.scope") == asks
    if not asks:
        assert "enable-linger alice" in subtree.remedy(frozenset({"memory"}))


def test_group_of_other_programs_is_left_alone(place: Place) -> None:
    own = place("system.slice/ssh.service", others="1\n")
    subtree.claim(90.0)
    assert place.asked == [] and enabled(own) == "" and not (own / subtree.LEAF).exists()  # type: ignore[attr-defined]
    assert "install-service" in subtree.remedy(frozenset({"memory"}))


def test_missing_scope_changes_nothing(place: Place) -> None:
    own = place("user.slice/session-3.scope", others="1\n", scope=False)
    subtree.claim(90.0)
    assert enabled(own) == "" and not (own / subtree.LEAF).exists()


def test_user_learns_which_controllers_to_ask_for(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place("user.slice/app.slice/campus-mesh.service", controllers="memory pids")
    subtree.claim(90.0)
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    assert "Delegate=cpu io memory pids" in subtree.remedy(frozenset({"cpu", "io"}))


def test_machine_without_version_2_is_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(subtree, "groups_of", lambda pid: {"memory": tmp_path})
    subtree.claim(90.0)
    assert list(tmp_path.iterdir()) == [] and "version 2" in subtree.remedy(frozenset({"io"}))

"""`mesh leave`: what it says first, and what it does with the state. The daemon is one whose answers are given."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from membership.identity import Identity
from membership.trust import User, found_mesh
from mesh.api.no_daemon import none_runs
from mesh.cli import leave as leave_module
from mesh.cli import nodes as nodes_module
from mesh.cli.main import cli
from mesh.daemon.layout import Layout, save_membership
from mesh.util import trees
from mesh.util.errors import ExitCode
from tests.chains import admitted
from tests.cli.test_job_commands import Daemon

ROOT, OWN = (Identity(bytes([number]) * 32) for number in (1, 2))
Leave = Callable[..., tuple[Result, list[str]]]


def node(nick: str, user: str, **more: Any) -> dict[str, Any]:
    return {"nick": nick, "user": user, "me": False, "state": "alive", **more}


@pytest.fixture
def where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Layout:
    """The state of a member that was admitted by a founder."""
    now = time.time()
    genesis, chain = found_mesh(ROOT, "lab", "root", "ada", now)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    where = Layout(tmp_path / "campus-mesh", tmp_path / "config" / "campus-mesh")
    where.make()
    OWN.save(where.key)
    granted = admitted(ROOT, genesis, chain, OWN.node_id, "desk", User("bob", OWN.node_id, int(now) + 1), now)
    save_membership(where, genesis, granted, ())
    return where


@pytest.fixture
def leave(where: Layout, monkeypatch: pytest.MonkeyPatch) -> Leave:
    def leave(*words: str, others: list[dict[str, Any]] | None = None, runs: bool = True) -> tuple[Result, list[str]]:
        answers = {
            "GET /v1/nodes": lambda: {"nodes": [node("desk", "bob", me=True), *(others or [])]},
            "GET /v1/jobs?over=false": lambda: {
                "jobs": [{"job": "j" * 26, "user": "bob"}, {"job": "k" * 26, "user": "ada"}]
            },
            "GET /v1/data": lambda: {
                "data": [
                    {"name": "bob/\x1b[2J\none", "nodes": ["desk"]},
                    {"name": "bob/two", "nodes": ["desk", "rack"]},
                ]
            },
            "POST /v1/down": lambda: {"pid": 2**22 + 1, "guests": 0},  # beyond the pids of this kernel
        }

        def silent() -> Any:
            raise none_runs(where.root)

        daemon = Daemon(answers if runs else dict.fromkeys(answers, silent))
        monkeypatch.setattr(leave_module, "client", lambda ctx: daemon)
        monkeypatch.setattr(nodes_module, "client", lambda ctx: daemon)
        return CliRunner().invoke(cli, ["leave", *words], prog_name="mesh"), daemon.asked

    return leave


def aside(where: Layout) -> list[Path]:
    return list(where.root.parent.glob("campus-mesh-left-*"))


def test_nothing_happens_before_a_yes_to_what_is_lost(leave: Leave, where: Layout) -> None:
    done, asked = leave()
    assert done.exit_code == 1 and "POST /v1/down" not in asked and where.genesis.exists()
    assert "1 job of yours will go on, and no other machine of yours can fetch or cancel it: jjjjjjjj" in done.stderr
    assert "no other node has 1 data set (`mesh data pin` there): bob/" in done.stderr and "\x1b" not in done.stderr
    assert "\none" not in done.stderr, "the name of a data set begins no line"


@pytest.mark.parametrize(("state", "named"), [("alive", False), ("suspect", False), ("left", True), ("revoked", True)])
def test_jobs_are_no_loss_while_another_machine_of_their_user_is_there(leave: Leave, state: str, named: bool) -> None:
    done, _ = leave(others=[node("rack", "bob", state=state), node("hall", "ada")])
    assert ("of yours will go on" in done.stderr) is named


def test_state_is_put_aside_under_another_name(leave: Leave, where: Layout) -> None:
    done, _ = leave("--yes")
    assert done.exit_code == 0 and not where.root.exists()
    [kept] = aside(where)
    assert str(kept) in done.stdout and Identity.load(kept / "node.key").node_id == OWN.node_id
    assert "mesh member revoke desk" in done.stderr


@pytest.mark.parametrize("linked", [False, True])
def test_state_is_removed_if_asked(leave: Leave, where: Layout, linked: bool) -> None:
    """The directory may be a link to another disk."""
    disk = where.root.parent / "disk"
    if linked:
        where.root.rename(disk)
        where.root.symlink_to(disk)
    done, _ = leave("--yes", "--remove")
    assert done.exit_code == 0 and not (where.root.is_symlink() or where.root.exists() or disk.exists() or aside(where))


def test_removal_that_was_stopped_in_the_middle_can_be_done_again(
    leave: Leave, where: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else keys stay on the disk of a machine that is said to belong to no mesh."""
    real = trees.remove

    def stopped(path: Path) -> None:
        if path == where.root:
            where.genesis.unlink(missing_ok=True)  # what a directory has goes in any order
        if path in {where.key, where.root}:
            raise KeyboardInterrupt
        real(path)

    with monkeypatch.context() as patched:
        patched.setattr(trees, "remove", stopped)
        assert leave("--yes", "--remove")[0].exit_code != 0 and where.key.exists()
    assert leave("--yes", "--remove")[0].exit_code == 0 and not where.root.exists()


def test_machine_whose_daemon_has_stopped_can_leave(leave: Leave, where: Layout) -> None:
    done, _ = leave("--yes", runs=False)
    assert done.exit_code == 0 and aside(where)


def test_daemon_that_hangs_keeps_the_state(leave: Leave, where: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    from mesh.api.no_daemon import hangs

    monkeypatch.setattr(f"{__name__}.none_runs", lambda root: hangs(7))
    done, _ = leave("--yes", runs=False)
    assert done.exit_code == ExitCode.NO_DAEMON and where.genesis.exists()


def test_service_that_would_start_it_again_is_removed_first(leave: Leave, where: Layout, tmp_path: Path) -> None:
    unit = tmp_path / "config" / "systemd" / "user" / "campus-mesh.service"
    unit.parent.mkdir(parents=True)
    unit.write_text(f"ExecStart=python -m mesh.daemon.entry --state {where.root}\n")
    done, asked = leave("--yes")
    assert done.exit_code == 1 and "first run `mesh install-service --remove`" in done.stderr and not asked
    unit.write_text("ExecStart=python -m mesh.daemon.entry --state /srv/other\n")
    assert leave("--yes")[0].exit_code == 0


def test_only_founder_is_told_what_its_key_is_for(leave: Leave, where: Layout) -> None:
    where.key.unlink()
    ROOT.save(where.key)
    save_membership(where, *found_mesh(ROOT, "lab", "root", "ada", time.time()), ())
    assert "without the key of this founder nobody can revoke machines" in leave()[0].stderr
    genesis, chain = found_mesh(ROOT, "lab", "root", "ada", time.time(), [OWN.node_id], 1)
    save_membership(where, genesis, chain, ())
    assert "without the key" not in leave()[0].stderr

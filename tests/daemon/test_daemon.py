"""The composition root: what it gives its parts, and in which order it leaves."""

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from mesh.daemon.config import Settings
from mesh.daemon.daemon import Daemon
from mesh.daemon.layout import Layout
from mesh.network.switch import GUESTS


def test_nothing_is_lent_if_the_owners_last_order_cannot_be_read(tmp_path: Path) -> None:
    path, problems = tmp_path / "lending.json", dict[str, str]()
    path.write_text('{"lending": tr')
    node: Any = SimpleNamespace(_layout=SimpleNamespace(lending=path), _settings=Settings(lend=True))
    node.membership = SimpleNamespace(problems=problems)
    assert Daemon._load_lending(node).paused and "nothing is lent" in problems["lending"]
    path.write_text('{"lending": true}')
    assert not Daemon._load_lending(node).paused


def test_guests_see_neither_the_state_of_the_node_nor_sockets_of_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///srv/docker.sock")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/srv/run")
    monkeypatch.setenv("HOME", "/home/ada")
    node: Any = SimpleNamespace(_layout=Layout(tmp_path), _settings=Settings(process_sees=("/opt/data",)))
    sandbox = Daemon._sandbox(node)
    hidden = [
        "/home/ada",
        str(tmp_path),
        f"/run/user/{os.getuid()}",
        "/srv/run",
        "/run/docker.sock",
        "/srv/docker.sock",
    ]
    assert sandbox._hidden >= {Path(path).resolve() for path in hidden} and Path("/opt/data") in sandbox._sees


@pytest.mark.parametrize(("now", "reclaims"), [(False, ["reclaim"]), (True, [f"cut {GUESTS}", "kill"])])
async def test_leaving_node_takes_no_guest_before_it_reclaims_its_own(now: bool, reclaims: list[str]) -> None:
    steps: list[str] = []

    def step(name: str) -> Any:
        async def take(*given: object, **more: object) -> None:
            assert node._inventory.draining and node._leaving
            steps.append(name)

        return take

    policy = SimpleNamespace(pause=0.0)
    node: Any = SimpleNamespace(
        _leaving=False,
        _owner=SimpleNamespace(notice_s=5.0, policy=policy),
        _inventory=SimpleNamespace(draining=False),
        edge=SimpleNamespace(cut=lambda what: steps.append(f"cut {what}")),
        membership=SimpleNamespace(set_draining=lambda on: steps.append(f"draining {on}"), leave=step("farewell")),
        _advert_changed=lambda: steps.append("advert"),
        _reclaimer=SimpleNamespace(kill=step("kill"), leave=step("reclaim")),
        _submissions=SimpleNamespace(leave=step("submissions")),
        _jobs=SimpleNamespace(participant=SimpleNamespace(hosted=()), hand_over=step("hand over")),
    )
    await Daemon._leave(node, None, now)
    assert steps == ["draining True", "advert", *reclaims, "submissions", "hand over", "farewell"]


async def test_socket_is_open_to_its_user_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mesh.api.server.application", lambda handlers, log: web.Application())
    nothing: Any = None
    node: Any = SimpleNamespace(_handlers=nothing, _jobs=SimpleNamespace(event_log=nothing), _runners=[])
    node._layout = SimpleNamespace(socket=tmp_path / "node" / "mesh.sock")
    before = os.umask(0)
    try:
        await Daemon._serve_local(node)
        assert node._layout.socket.stat().st_mode & 0o777 == 0o600 and os.umask(0) == 0
        assert node._layout.socket.parent.stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(before)
        await asyncio.gather(*(runner.cleanup() for runner in node._runners))

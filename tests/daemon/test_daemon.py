"""The composition root: what it gives its parts, and in which order it leaves."""

import asyncio
import os
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import msgspec
import pytest
from aiohttp import web

from membership.effects import RecordChanged
from membership.events import EventsLost
from mesh.daemon import edge_shaping
from mesh.daemon.config import Settings
from mesh.daemon.daemon import Daemon
from mesh.daemon.layout import Layout
from mesh.network.switch import GUESTS
from mesh.network.tc import EdgeError
from mesh.rpc.client import Address
from mesh.util.errors import ExitCode, MeshError


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


async def test_node_gives_the_notice_that_it_was_asked_for() -> None:
    given: list[float] = []

    async def reclaim(hosted: object, leave: Any) -> None:
        given.append(leave.notice)

    async def nothing(*given: object) -> None: ...

    node: Any = MagicMock()
    node._owner.notice_s, node._owner.policy.pause, node._reclaimer.leave = 5.0, 0.0, reclaim
    node._submissions.leave = node._jobs.hand_over = node.membership.leave = nothing
    for grace_s in (None, 0.0, 7.0):
        await Daemon._leave(node, grace_s, False)
    assert given == [5.0, 0.0, 7.0]


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
        await Daemon._serve_local(node)  # in place of the socket that a killed daemon has left
    finally:
        os.umask(before)
        await asyncio.gather(*(runner.cleanup() for runner in node._runners))


async def test_edge_is_held_to_what_leaves_and_its_failures_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    now, steps, told = 0.0, list[object](), list[str]()

    class Enough(Exception):
        pass

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += edge_shaping.LOOK_S / 5
        if now > 3 * edge_shaping.LOOK_S:
            raise Enough

    async def to_thread(work: Any, *given: Any) -> Any:
        return work(*given)

    def give(need: float) -> None:
        steps.append(need)
        raise EdgeError("the queue is gone")

    monkeypatch.setattr(edge_shaping, "asyncio", SimpleNamespace(sleep=sleep, to_thread=to_thread))
    monkeypatch.setattr(edge_shaping, "time", SimpleNamespace(monotonic=lambda: now))
    looks: list[float] = []
    edge: Any = SimpleNamespace(watches=False, needs=lambda need: 17 < now < 20, give=give)
    edge.look = lambda: looks.append(now) or (["eth0 has another queue"] if len(looks) == 1 else [])
    wire, departures = SimpleNamespace(classed=True), SimpleNamespace(need_bps=lambda: 5e6)
    with pytest.raises(Enough):
        await edge_shaping.keep(edge, wire, departures, told.append)  # type: ignore[arg-type]
    assert wire.classed is False, "nobody reads the class of a stream"
    assert told == ["network edge: eth0 has another queue", "network edge: the queue is gone"] and steps == [5e6]
    assert looks == [15.0, 21.0, 36.0], "after a failure at once, else every LOOK_S"


def node_that_stops(steps: list[str], fails: str = "") -> Any:
    """A daemon whose parts note that they are closed."""

    def closes(name: str) -> Any:
        async def close() -> None:
            steps.append(name)
            if name == fails:
                raise OSError("the disk is gone")

        return close

    def note(name: str) -> Any:
        return lambda *given, **more: steps.append(name)

    def part(name: str) -> Any:
        return SimpleNamespace(close=closes(name))

    return SimpleNamespace(
        _attendance=SimpleNamespace(close=note("attendance")),
        _reclaimer=part("reclaimer"),
        _jobs=part("jobs"),
        _library=part("library"),
        _data=part("data"),
        _engines={"process": part("engine")},
        _switch=SimpleNamespace(close=note("switch")),
        _guard=part("guard"),
        _accounts=part("accounts"),
        edge=SimpleNamespace(close=note("edge")),
        _tunnels=part("tunnels"),
        _site=part("site"),
        _peer_server=part("peer server"),
        _runners=[SimpleNamespace(cleanup=closes("runner"))],
        _peers=part("peers"),
        membership=SimpleNamespace(stop=closes("membership")),
        _journal=part("journal"),
        _store=SimpleNamespace(close=note("store")),
        _layout=SimpleNamespace(socket=SimpleNamespace(unlink=note("socket"))),
    )


async def test_node_that_stops_closes_every_part_even_if_one_fails() -> None:
    steps: list[str] = []
    await Daemon.stop(node_that_stops(steps))
    assert len(steps) == len(set(steps)) == 19
    guests, guard, switch = (steps.index(name) for name in ("engine", "guard", "switch"))
    assert guests < switch < guard, "the gates of guests are shut as long as there are any"
    assert steps.index("jobs") < steps.index("journal") < steps.index("store"), "jobs write until they have ended"
    for fails in steps[1:-2]:
        failing: list[str] = []
        with suppress(OSError):
            await Daemon.stop(node_that_stops(failing, fails))
        assert failing == steps, fails


async def test_daemon_that_fails_ends_with_its_reason_and_leaves_first() -> None:
    steps: list[object] = []

    async def works() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            steps.append("work ends")

    async def leave(grace_s: float | None, now: bool) -> None:
        steps.append((grace_s, now))

    node: Any = SimpleNamespace(_run_parts=works, _leave=leave, _failure="", _down=asyncio.Future(), _leaving=False)
    node._ask_down = lambda grace_s, now: Daemon._ask_down(node, grace_s, now)
    running = asyncio.create_task(Daemon.run(node))
    await asyncio.sleep(0)
    Daemon._fail(node, "its certificate was revoked")
    Daemon._on_signal(node)  # asked twice: the first one counts
    assert await asyncio.wait([running], timeout=10) == ({running}, set())
    with pytest.raises(MeshError, match="its certificate was revoked"):
        await running
    assert steps == [(None, False), "work ends"]


def test_second_signal_ends_the_daemon_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    asked: list[bool] = []
    node: Any = SimpleNamespace(_leaving=False, _ask_down=lambda grace_s, now: asked.append(now))
    Daemon._on_signal(node)
    assert asked == [False] and not ended
    node._leaving = True
    Daemon._on_signal(node)
    assert ended == [1]


def test_peer_that_comes_before_this_node_serves_is_sent_away() -> None:
    taken: list[object] = []
    connection: Any = SimpleNamespace(close=lambda: taken.append("closed"))
    node: Any = SimpleNamespace(_peer_server=None)
    Daemon._take_peer(node, connection, "10.0.0.7")
    node._peer_server = SimpleNamespace(take=lambda connection, host: taken.append(host))
    Daemon._take_peer(node, connection, "10.0.0.7")
    assert taken == ["closed", "10.0.0.7"]


def test_address_of_a_peer_is_that_of_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = SimpleNamespace(api_port=0)
    monkeypatch.setattr("mesh.daemon.daemon.decode_facts", lambda body: facts)
    known = SimpleNamespace(record=lambda node, section: SimpleNamespace(body=b""), address_of=lambda node: ("h", 7373))
    node: Any = SimpleNamespace(membership=known)
    assert Daemon._lookup(node, b"n") == Address("h", 7373)
    facts.api_port = 8000
    assert Daemon._lookup(node, b"n") == Address("h", 8000)
    known.address_of = lambda node: None
    assert Daemon._lookup(node, b"n") is None


async def test_owner_without_a_page_is_not_given_one() -> None:
    node: Any = SimpleNamespace(_settings=Settings(web=False))
    with pytest.raises(MeshError, match="web = false") as refused:
        await Daemon._open_page(node)
    assert refused.value.code == ExitCode.REFUSED


async def test_reclaim_by_the_switch_is_finished_each_time_it_is_pressed() -> None:
    settled: list[int] = []
    node: Any = MagicMock()
    node._killed = asyncio.Event()

    async def settle() -> None:
        settled.append(1)
        assert len(settled) <= 3, "it was pressed three times"
        if len(settled) < 3:
            asyncio.get_running_loop().call_soon(node._killed.set)

    node._handlers.lending.settle_strike = settle
    following = asyncio.create_task(Daemon._follow_switch(node))
    node._killed.set()
    async with asyncio.timeout(10):
        while len(settled) < 3:
            await asyncio.sleep(0)
    for _ in range(5):
        await asyncio.sleep(0)
    following.cancel()
    assert len(settled) == 3 == node._jobs.event_log.add.call_count


async def test_lost_events_are_made_up_for_by_reading_all_again() -> None:
    seen: list[str] = []
    events: asyncio.Queue[Any] = asyncio.Queue()
    node: Any = MagicMock()
    node.membership.subscribe.return_value = events
    node._jobs.status_gossip.reload = lambda: seen.append("reload")
    node._jobs.views_changed = lambda: seen.append("views")
    node._jobs.status_gossip.on_section = lambda peer, section: seen.append(section)
    node._library.hear = lambda peer, section: seen.append(section)
    node._library.hear_all = lambda: seen.append("images")
    watching = asyncio.create_task(Daemon._watch_membership(node))

    async def after(event: Any) -> list[str]:
        seen.clear()
        await events.put(event)
        for _ in range(5):
            await asyncio.sleep(0)
        return list(seen)

    def changed(section: str) -> Any:
        return RecordChanged(b"n" * 32, section)

    await asyncio.sleep(0)
    assert seen == ["reload", "views"]
    assert await after(changed("advert")) == await after(changed("facts")) == ["views"]
    assert await after(changed("jobs/x")) == ["jobs/x"] and await after(changed("images/x")) == ["images/x"]
    assert await after(changed("other")) == []
    assert await after(EventsLost(3)) == ["reload", "images", "views"]
    watching.cancel()


def test_only_engines_that_the_owner_offers_are_made(tmp_path: Path) -> None:
    node: Any = MagicMock()
    node._settings = Settings(engines=("process",))
    node._layout = Layout(tmp_path)
    assert set(Daemon._make_engines(node)) == {"process"}
    node._settings = Settings(engines=())
    assert Daemon._make_engines(node) == {}


def test_peer_that_is_no_member_is_refused_by_its_name() -> None:
    node: Any = MagicMock()
    assert Daemon._refuse_peer(node, b"n" * 32) == ""
    node.trust.credentials.return_value = None
    assert "is not a member of this mesh" in Daemon._refuse_peer(node, b"n" * 32)


@pytest.mark.parametrize(
    ("settings", "roles", "problems"),
    [
        (Settings(lend=True, nick="desk"), ("provider", "user"), set()),
        (Settings(lend=True), ("user",), {"role"}),
        (Settings(lend=False), ("user",), set()),
        (Settings(nick="other"), ("provider",), {"nick"}),
    ],
)
async def test_what_a_certificate_does_not_allow_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, settings: Settings, roles: tuple[str, ...], problems: set[str]
) -> None:
    module = "mesh.daemon.daemon"
    steps: list[Any] = []

    class Node:
        def __init__(self, *given: object, **more: Any) -> None:
            self.credentials = SimpleNamespace(user="ada", roles=roles, nick="desk")
            self.problems: dict[str, str] = {}
            self.used_invites = SimpleNamespace(held=False)

        async def start(self) -> None:
            steps.append(self.used_invites.held)

    peers = MagicMock()
    peers.return_value.open = AsyncMock()
    for name, double in (("MembershipNode", Node), ("PeerClient", peers), ("Wire", steps.append)):
        monkeypatch.setattr(f"{module}.{name}", double)
    layout = Layout(tmp_path)
    layout.chain.write_bytes(b"chain")
    node: Any = MagicMock(_layout=layout, _settings=msgspec.structs.replace(settings, upload_mbps=80.0))
    await Daemon._open_membership(node)
    assert set(node.membership.problems) == problems
    assert steps == [True, 10e6], "an invite is used up only once that is known; bytes, not bits"
    node._settings = msgspec.structs.replace(settings, upload_mbps=0.0)
    await Daemon._open_membership(node)
    assert steps[-1] is None

"""Who may open a tunnel into a job, how many may be open, and when one closes."""

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from membership.trust import PROVIDER, USER, Credentials
from mesh.api.handlers import tunnels as module
from mesh.api.handlers.tunnels import Tunnels
from mesh.execution.session import SessionError
from mesh.jobs.tunnel_targets import EXEC, NotRunning
from mesh.rpc.frames import INPUT, OUTPUT, Data, Exit, Failed, Note, Opened, Order
from mesh.util.errors import ExitCode, MeshError
from tests.consensus.worlds import make_spec

JOB, WITHIN_S = b"j" * 16, 5.0
ADA = Credentials(b"n" * 32, "desk", "ada", b"u" * 32, 0, (USER, PROVIDER), False, b"", 0, 2**40)
BOB = msgspec.structs.replace(ADA, user="bob", user_key=b"b" * 32)
NAMESAKE = msgspec.structs.replace(ADA, user_key=b"b" * 32)
LENDER = msgspec.structs.replace(ADA, roles=(PROVIDER,))


class FakeSession:
    """A session whose command prints once and then runs until it is closed."""

    def __init__(self) -> None:
        self.frames: list[Any] = [Data(OUTPUT, b"hello")]
        self.taken: list[Any] = []
        self.closed = False

    async def receive(self) -> Any:
        if self.frames:
            return self.frames.pop(0)
        return await asyncio.Event().wait()

    async def send(self, frame: Any) -> None:
        self.taken.append(frame)

    async def close(self) -> None:
        self.closed = True


class FakeLine:
    """The user's side of a tunnel: what it asks for, and what it was sent."""

    def __init__(self, *asks: Any) -> None:
        self.asks, self.sent = list(asks), list[Any]()
        self.last: Any = None
        self._over = asyncio.Event()

    async def receive(self) -> Any:
        if self.asks:
            return self.asks.pop(0)
        await self._over.wait()
        return None

    async def send(self, frame: Any) -> None:
        self.sent.append(frame)

    async def close(self, last: Any = None) -> None:
        self.last = last
        self._over.set()


class World:
    def __init__(self, root: Path) -> None:
        (root / "ctl").mkdir()
        self.session = FakeSession()

        async def open_session(order: Order) -> FakeSession:
            if order.argv == ("no",):
                raise SessionError("not now")
            return self.session

        guest = SimpleNamespace(open_session=open_session)
        self.attempt = SimpleNamespace(base=root, spec=make_spec(user="ada", user_key=ADA.user_key), guest=guest)
        self.attempts: dict[bytes, Any] = {JOB: self.attempt}
        self.known: Credentials | None = ADA
        self.state = ("running", "")
        own_status = SimpleNamespace(state=lambda job: self.state)
        self.trust: Any = SimpleNamespace(credentials=lambda node, now: self.known)
        self.membership: Any = SimpleNamespace(credentials=SimpleNamespace(nick="desk"))
        self.jobs: Any = SimpleNamespace(attempts=self.attempts, own_status=own_status)
        self.tunnels = self.made(True)

    def made(self, interactive: bool) -> Tunnels:
        nothing: Any = None
        return Tunnels(self.trust, self.membership, self.jobs, nothing, nothing, interactive)

    async def serve(self, line: Any, who: Credentials = ADA, way: str = EXEC) -> None:
        async with asyncio.timeout(WITHIN_S):
            await self.tunnels.serve(line, JOB, way, who)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(module, "LOOK_S", 0.01)
    return World(tmp_path)


def order(*argv: str) -> Order:
    return Order(argv=argv)


@pytest.mark.parametrize(
    ("who", "why"), [(BOB, "is ada's, not yours"), (NAMESAKE, "is ada's, not yours"), (LENDER, "may lend, but not use")]
)
async def test_only_the_job_user_who_may_submit_comes_in(world: World, who: Credentials, why: str) -> None:
    (world.attempt.base / "ctl" / "notice").write_text("leave")
    for enter in (lambda: world.serve(FakeLine(order("sh")), who), lambda: control(world.tunnels, who)):
        with pytest.raises(MeshError, match=why) as refused:
            await enter()
        assert refused.value.code == ExitCode.REFUSED
    assert await control(world.tunnels, ADA) == b"leave"


async def control(tunnels: Tunnels, who: Credentials, name: str = "notice") -> bytes:
    return tunnels.own_control_file(JOB, name, who)


async def test_owner_decides_whether_anybody_comes_in(world: World) -> None:
    (world.attempt.base / "ctl" / "notice").write_text("leave")
    world.tunnels = world.made(False)
    for enter in (lambda: world.serve(FakeLine(order("sh"))), lambda: control(world.tunnels, ADA)):
        with pytest.raises(MeshError, match="allows no interactive sessions") as refused:
            await enter()
        assert refused.value.code == ExitCode.REFUSED


async def test_job_that_does_not_run_here_is_told_so(world: World) -> None:
    world.attempt.guest = None
    with pytest.raises(NotRunning, match="is being started"):
        await world.serve(FakeLine(order("sh")))
    del world.attempts[JOB]
    with pytest.raises(NotRunning, match="does not run on this node any more"):
        await world.serve(FakeLine(order("sh")))


async def test_control_file_is_a_plain_small_file_of_the_job(world: World, tmp_path: Path) -> None:
    place = world.attempt.base / "ctl"
    (tmp_path / "outside").write_text("secret")
    (place / "link").symlink_to(tmp_path / "outside")
    os.mkfifo(place / "pipe")
    (place / "large").write_bytes(b"x" * (module.CONTROL_BYTES + 1))
    for name in ("link", "pipe", "missing", "../outside", "", "a/b"):
        with pytest.raises(MeshError) as refused:
            await control(world.tunnels, ADA, name)
        assert refused.value.code == ExitCode.NOT_FOUND
    assert len(await control(world.tunnels, ADA, "large")) == module.CONTROL_BYTES


@pytest.mark.parametrize(("bound", "most"), [("OF_A_JOB", 2), ("OF_A_NODE", 2)])
async def test_open_tunnels_have_a_bound(world: World, monkeypatch: pytest.MonkeyPatch, bound: str, most: int) -> None:
    monkeypatch.setattr(module, bound, most)
    lines: list[FakeLine] = [FakeLine(order("sh")) for _ in range(most)]
    standing = [asyncio.create_task(world.serve(line)) for line in lines]
    async with asyncio.timeout(WITHIN_S):
        while not all(line.sent for line in lines):
            await asyncio.sleep(0.001)
    with pytest.raises(MeshError, match="too many tunnels") as refused:
        await world.serve(FakeLine(order("sh")))
    assert refused.value.code == ExitCode.REFUSED
    await world.tunnels.close()
    await asyncio.gather(*standing)
    assert all(line.last.again_s > 0 for line in lines)
    again = FakeLine(order("no"))
    await world.serve(again)  # those that were closed do not count
    assert again.sent[0].text == "not now"


@pytest.mark.parametrize("now", [None, BOB, LENDER], ids=["revoked", "another user's", "may not submit"])
async def test_tunnel_closes_once_its_user_may_not_enter_any_more(world: World, now: Credentials | None) -> None:
    line = FakeLine(order("sh"))
    standing = asyncio.create_task(world.serve(line))
    async with asyncio.timeout(WITHIN_S):
        while len(line.sent) < 2:
            await asyncio.sleep(0.001)
    assert line.sent == [Opened("desk"), Data(OUTPUT, b"hello")] and not standing.done()
    world.known = now
    await standing
    assert isinstance(line.last, Failed) and "not let in any more" in line.last.text
    assert line.last.code == ExitCode.REFUSED and world.session.closed


async def test_tunnel_closes_when_the_job_leaves_and_tells_of_its_notice(world: World) -> None:
    line = FakeLine(order("sh"))
    standing = asyncio.create_task(world.serve(line))
    world.state = ("vacating", "its owner is back")
    async with asyncio.timeout(WITHIN_S):
        while not any(isinstance(frame, Note) for frame in line.sent):
            await asyncio.sleep(0.001)
    world.attempts[JOB] = SimpleNamespace()  # the next attempt of the same job
    await standing
    assert "has left this node" in line.last.text and line.last.again_s > 0 and world.session.closed
    assert sum(isinstance(frame, Note) for frame in line.sent) == 1


@pytest.mark.parametrize("asks", [(Data(INPUT, b"x"),), (order("sh"), Exit(0)), (order("sh"), Data(OUTPUT, b"x"))])
async def test_frames_that_do_not_belong_end_the_tunnel(world: World, asks: tuple[Any, ...]) -> None:
    line = FakeLine(*asks)
    await world.serve(line)
    assert isinstance(line.sent[-1], Failed) and world.session.taken == []
    assert world.session.closed == (len(asks) > 1)


# --- on the node of the user


@pytest.mark.parametrize(
    ("over", "shown", "why"),
    [(False, b"x" * 32, "do not say where it runs"), (False, None, "does not run now"), (True, b"x" * 32, "is over")],
)
async def test_tunnel_goes_to_the_node_that_witnesses_name(
    world: World, over: bool, shown: bytes | None, why: str
) -> None:
    """A user may type a password, and any member can publish that it runs the job."""
    asked, runner = list[bytes](), [b"r" * 32]

    async def find_own(text: str) -> Any:
        return SimpleNamespace(job=JOB, runner=shown, outcome="its end" if over else None, state="running")

    async def runner_of(job: bytes) -> bytes | None:
        return runner.pop() if runner else None

    async def call(node: bytes, method: str, path: str) -> bytes:
        asked.append(node)
        return b"leave"

    lookup: Any = SimpleNamespace(me=b"m" * 32, find_own=find_own, runner_of=runner_of)
    peers: Any = SimpleNamespace(call=call)
    tunnels = Tunnels(world.trust, world.membership, world.jobs, peers, lookup, True)
    assert await tunnels.control_file("job", "notice") == "leave" and asked == [b"r" * 32]
    for enter in (lambda: tunnels.control_file("job", "notice"), lambda: tunnels._lead(cast(Any, None), "job", EXEC)):
        with pytest.raises(MeshError, match=why):
            await enter()
    assert len(asked) == 1

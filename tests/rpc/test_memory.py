"""Who gets memory for requests, and who loses it: members that drip, that hold much, and that compete, on real connections."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

import pytest
from aiohttp import web

from membership.identity import Identity
from mesh.rpc import memory
from mesh.rpc.client import PeerClient, PeerError
from mesh.rpc.memory import Memory
from mesh.rpc.server import peer_of
from tests.rpc.nodes import MESH, serve

HOST = Identity(bytes([9]) * 32)
MEMBERS = [Identity(bytes([number]) * 32) for number in range(1, 6)]
PLACES, OF_ONE = 8, 4
WINDOW_S = 0.5


class Taker:
    """A node with places for bodies that stream. `places` says who began one, in order."""

    def __init__(self) -> None:
        self.memory = Memory(OF_ONE, PLACES)
        self.began: list[bytes] = []

    async def take(self, request: web.Request) -> web.Response:
        async with self.memory.hold(peer_of(request), 1, request.transport) as held:
            self.began.append(peer_of(request))
            count = 0
            async for piece in request.content.iter_any():
                count += len(piece)
            held.waits = False
        return web.Response(text=str(count))

    def of(self, member: Identity) -> int:
        return self.memory._bytes[member.node_id]


class Stream:
    """A body that a member sends: a byte now and then, or `piece` as fast as it can. It ends once `over` is set."""

    def __init__(self, piece: bytes = b"x", pause_s: float = 0.05) -> None:
        self.over, self.piece, self.pause_s = asyncio.Event(), piece, pause_s

    async def body(self) -> AsyncIterator[bytes]:
        yield self.piece
        while not self.over.is_set():
            await asyncio.sleep(self.pause_s)
            yield self.piece


class World:
    def __init__(self, taker: Taker, clients: list[PeerClient]) -> None:
        self.taker, self.clients = taker, clients
        self.streams: list[Stream] = []
        self.calls: list[asyncio.Task[str]] = []

    def begin(self, member: int, stream: Stream) -> asyncio.Task[str]:
        async def put() -> str:
            peers = self.clients[member]
            async with peers.stream(HOST.node_id, "PUT", "/", stream.body()) as response:
                return (await response.read()).decode()

        self.streams.append(stream)
        self.calls.append(asyncio.create_task(put()))
        return self.calls[-1]

    async def fill(self, members: list[int], each: int, make: Callable[[], Stream] = Stream) -> None:
        before = len(self.taker.began)
        for member in members:
            for _ in range(each):
                self.begin(member, make())
        await until(lambda: len(self.taker.began) == before + each * len(members))


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(memory, "WINDOW_S", WINDOW_S)
    taker = Taker()
    app = web.Application()
    app.add_routes([web.put("/", taker.take)])
    server, address = await serve(app, HOST)
    async with AsyncExitStack() as stack:
        clients = [PeerClient(member, MESH, lambda node: address) for member in MEMBERS]
        for client in clients:
            await client.open()
            stack.push_async_callback(client.close)
        made = World(taker, clients)
        yield made
        for stream in made.streams:
            stream.over.set()
        await asyncio.gather(*made.calls, return_exceptions=True)
    await server.close()
    assert not taker.memory._held and not taker.memory._waiting and not taker.memory._bytes
    assert taker.memory._window is None


async def until(ready: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not ready():
            await asyncio.sleep(0.01)


def counting(places: Memory) -> Callable[[], int]:
    """Return a function that tells how many windows have ended from now on."""
    windows, watch = list[None](), places._watch

    def counted() -> None:
        windows.append(None)
        watch()

    places._watch = counted  # type: ignore[method-assign]
    return lambda: len(windows)


async def test_members_that_drip_keep_no_other_out(world: World) -> None:
    await world.fill([0, 1], OF_ONE)
    assert world.taker.memory._bytes.total() == PLACES
    for _ in range(2):
        call = world.begin(2, stream := Stream(bytes(1 << 16), 0.0))
        await until(lambda: world.taker.began[-1] == MEMBERS[2].node_id)
        stream.over.set()
        assert int(await call) > 0


async def test_slow_stream_goes_on_while_nobody_waits(world: World) -> None:
    await world.fill([0, 1], OF_ONE)
    call = world.begin(0, Stream())  # its member has its share, so it waits for nobody but itself
    await until(lambda: world.taker.memory._waiting)
    judged = counting(world.taker.memory)
    await until(lambda: judged() == 3)
    assert len(world.taker.began) == PLACES and not any(task.done() for task in world.calls) and not call.done()


async def test_slowest_stream_of_those_with_more_is_the_one_that_ends(world: World) -> None:
    """Of equal streams, those of the members that hold most count as the slowest."""
    fast = lambda: Stream(bytes(1 << 14), 0.01)  # noqa: E731
    await world.fill([0], OF_ONE, fast)
    await world.fill([1], OF_ONE - 1, fast)
    world.begin(1, drip := Stream())
    await until(lambda: len(world.taker.began) == PLACES)
    await until(lambda: world.taker.of(MEMBERS[1]) == OF_ONE)
    dripping = world.calls[-1]
    for member in (2, 3):
        world.begin(member, fast())
        await until(lambda: world.taker.began[-1] == MEMBERS[member].node_id)  # noqa: B023
    with pytest.raises(PeerError):
        await dripping
    assert not drip.over.is_set()
    assert world.taker.of(MEMBERS[2]) == world.taker.of(MEMBERS[3]) == 1


async def test_no_stream_ends_for_a_member_that_holds_as_much(world: World) -> None:
    await world.fill([0, 1, 2, 3], PLACES // 4)
    world.begin(0, Stream())
    judged = counting(world.taker.memory)
    await until(lambda: judged() == 3)
    assert len(world.taker.began) == PLACES and not any(task.done() for task in world.calls)


async def test_free_place_goes_to_the_member_that_holds_least(world: World) -> None:
    await world.fill([0, 1], OF_ONE, lambda: Stream(bytes(1 << 14), 0.01))
    ended = world.streams[0]
    world.begin(0, Stream())
    world.begin(0, Stream())
    await until(lambda: len(world.taker.memory._waiting) == 2)
    world.begin(2, Stream())
    await until(lambda: len(world.taker.memory._waiting) == 3)
    ended.over.set()
    await until(lambda: len(world.taker.began) > PLACES)
    assert world.taker.began[PLACES] == MEMBERS[2].node_id


async def test_members_with_many_requests_cost_another_the_wait_for_one() -> None:
    held, order, release = Memory(1, 2), list[bytes](), asyncio.Semaphore(0)

    async def hold(peer: bytes) -> None:
        async with held.hold(peer, 1):
            order.append(peer)
            await release.acquire()

    tasks = [asyncio.create_task(hold(peer)) for peer in (b"a", b"b") * 4]
    await until(lambda: len(held._waiting) == 6)
    tasks += [asyncio.create_task(hold(b"c")) for _ in range(2)]
    await until(lambda: len(held._waiting) == 8)
    for done in range(len(tasks)):
        await until(lambda done=done: len(order) == min(len(tasks), done + 2))  # type: ignore[misc]
        release.release()
    await asyncio.gather(*tasks)
    assert order[:2] == [b"a", b"b"] and order[2] == b"c" and order[2:8].count(b"c") == 2
    assert not held._turns and not held._requests


async def test_request_that_this_node_works_for_is_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The body has come: what takes so long is this node's disk."""
    monkeypatch.setattr(memory, "WINDOW_S", 0.1)
    release = asyncio.Event()
    held = Memory(2, 2)

    async def hold(peer: bytes, waits: bool) -> None:
        async with held.hold(peer, 1) as one:
            one.waits = waits
            await release.wait()

    tasks = [asyncio.create_task(hold(b"a", False)) for _ in range(2)]
    await until(lambda: len(held._held) == 2)
    tasks.append(asyncio.create_task(hold(b"b", True)))
    judged = counting(held)
    await until(lambda: judged() == 2)
    assert not any(one.ended for one in held._held)
    release.set()
    await asyncio.gather(*tasks)

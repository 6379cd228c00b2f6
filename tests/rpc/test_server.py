"""The server for other nodes: connections, requests and bodies count against bounds, and a flood keeps no member out."""

import asyncio
import gzip
import resource
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from membership.identity import Identity, NodeId
from membership.listener import HONEST_S
from membership.ratelimit import BURST_S
from mesh.rpc import client, memory, server
from mesh.rpc.client import Address, PeerClient, PeerError
from mesh.rpc.memory import Memory
from mesh.rpc.server import (
    BODY,
    MAX_HANDSHAKES_PER_HOST,
    MAX_PER_PEER,
    Bound,
    Handshakes,
    PeerServer,
    bounded,
    peer_of,
)
from tests.adversary.floods import handshakes
from tests.adversary.neighbour import ended, unfinished
from tests.descriptors import descriptors
from tests.rpc.nodes import MESH

HOST, MEMBER, OTHER = (Identity(bytes([number]) * 32) for number in (1, 2, 3))
MEMBERS = {MEMBER.node_id, OTHER.node_id}
KIB = 1024


class World:
    """A node that answers members, with small bounds."""

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()
        self.release = asyncio.Event()
        self.begun = 0
        self.callers: list[bytes] = []
        self.memory = Memory(200 * KIB, 300 * KIB)
        app = web.Application(
            middlewares=[
                bounded(
                    {
                        ("POST", "/echo"): Bound(64 * KIB),
                        ("POST", "/hold"): Bound(64 * KIB),
                        ("POST", "/wait"): Bound(),
                        ("GET", "/big"): Bound(),
                        ("GET", "/large"): Bound(answer=150 * KIB),
                    },
                    self.memory,
                )
            ]
        )
        app.add_routes(
            [
                web.post("/echo", self._echo),
                web.post("/hold", self._wait),
                web.post("/wait", self._wait),
                web.post("/stream", self._stream),
                web.get("/big", self._big),
                web.get("/large", self._large),
                web.get("/gzip", self._gzip),
                web.get("/moved", self._moved),
                web.get("/follow", self._follow),
                web.get("/tunnel", self._tunnel),
            ]
        )
        self.members = set(MEMBERS)
        self.former = set[NodeId]()  # to the clients
        self.server = PeerServer(
            app, HOST, MESH, lambda node: "" if node in self.members else "no member", self._count, look_s=0.01
        )
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]

    def _count(self, reason: str) -> None:
        self.counters[reason] += 1

    async def _echo(self, request: web.Request) -> web.Response:
        self.callers.append(peer_of(request))
        return web.Response(body=request[BODY])

    async def _wait(self, request: web.Request) -> web.Response:
        self.begun += 1
        await self.release.wait()
        return web.Response()

    async def _stream(self, request: web.Request) -> web.Response:
        """Take what has been read ahead only when no more is read, or nothing more comes."""
        content, taken = request.content, []
        while not content.at_eof():
            await until(lambda: content.is_eof() or request.protocol._reading_paused)
            taken.append(len(await content.readany()))
        return web.Response(text=" ".join(map(str, taken)))

    async def _big(self, request: web.Request) -> web.Response:
        return web.Response(body=bytes(100 * KIB))

    async def _large(self, request: web.Request) -> web.Response:
        self.begun += 1
        return web.Response(body=bytes(64 << 20))  # more than the kernel takes for a client that does not read

    async def _gzip(self, request: web.Request) -> web.Response:
        return web.Response(body=gzip.compress(bytes(10 * KIB)), headers={"Content-Encoding": "gzip"})

    async def _follow(self, request: web.Request) -> web.StreamResponse:
        """Answer as long as somebody listens, like a log that is followed."""
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"line")
            await asyncio.sleep(0.01)

    async def _tunnel(self, request: web.Request) -> web.WebSocketResponse:
        """Say nothing, as long as the other end is there."""
        tunnel = web.WebSocketResponse()
        await tunnel.prepare(request)
        await tunnel.receive()
        return tunnel

    async def _moved(self, request: web.Request) -> web.Response:
        raise web.HTTPTemporaryRedirect(f"http://127.0.0.1:{self.port}/echo")

    @asynccontextmanager
    async def client(self, identity: Identity = MEMBER) -> AsyncIterator[PeerClient]:
        peers = PeerClient(
            identity,
            MESH,
            lambda node: Address("127.0.0.1", self.port),
            refuse=lambda node: "it is no member" if node in self.former else "",
            look_s=0.01,
        )
        await peers.open()
        try:
            yield peers
        finally:
            await peers.close()


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    await made.server.start(made.listener)
    yield made
    made.release.set()
    await made.server.close()


async def until(ready: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not ready():
            await asyncio.sleep(0.01)


async def test_member_is_answered_and_known(world: World) -> None:
    async with world.client() as peers:
        assert await peers.call(HOST.node_id, "POST", "/echo", b"hello") == b"hello"
    assert world.callers == [MEMBER.node_id]


async def test_non_member_is_not_answered(world: World) -> None:
    async with world.client(Identity.generate()) as peers:
        with pytest.raises(PeerError, match="node "):
            await peers.call(HOST.node_id, "POST", "/echo", b"hello")
    assert not world.callers and world.counters["refused_foreign"] >= 1


@pytest.mark.parametrize("source", ["127.0.0.1", "127.0.0.2"])
async def test_unfinished_handshakes_do_not_keep_a_member_out(world: World, source: str) -> None:
    flood = await asyncio.to_thread(unfinished, world.port, 4 * MAX_HANDSHAKES_PER_HOST, source)
    await until(lambda: world.counters["refused_handshakes"] >= 3 * MAX_HANDSHAKES_PER_HOST)
    await asyncio.sleep(HONEST_S)  # the flood ends; its last connections stay
    async with world.client() as peers:
        assert await peers.call(HOST.node_id, "POST", "/echo", b"hello") == b"hello"
    for connection in flood:
        connection.close()


async def test_handshakes_of_many_addresses_are_bounded(world: World) -> None:
    flood: list[socket.socket] = []
    for number in range(2, 12):
        flood += await asyncio.to_thread(unfinished, world.port, 30, f"127.0.0.{number}")
        assert len(world.server._handshakes) <= server.MAX_HANDSHAKES
    await until(lambda: world.counters["refused_handshakes"] >= len(flood) - server.MAX_HANDSHAKES)
    async with world.client() as peers:
        assert await peers.call(HOST.node_id, "POST", "/echo", b"hello") == b"hello"
    assert await asyncio.to_thread(ended, flood[0])
    for connection in flood:
        connection.close()


async def test_handshake_that_takes_too_long_is_ended(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HANDSHAKE_S", 0.2)
    (connection,) = await asyncio.to_thread(unfinished, world.port, 1)
    assert await asyncio.to_thread(ended, connection)
    connection.close()
    await until(lambda: world.counters["refused_handshakes"] == 1)


class Begin:
    """Begins handshakes at the same moment, and counts those that may go on."""

    def __init__(self) -> None:
        self.limit = Handshakes()

    def __call__(self, host: str, times: int = 1, peer: bytes | None = None, now: float = 0.0) -> int:
        allowed = 0
        for _ in range(times):
            if self.limit.may_begin(host, now):
                allowed += 1
                if peer is not None:
                    self.limit.completed(host, peer, now)
        return allowed


def test_handshakes_of_a_stranger_are_limited() -> None:
    begin = Begin()
    assert begin("stranger", 1000) == server.PER_HOST_S * BURST_S
    assert begin("another") == 1
    assert begin("stranger", 1000, now=10.0) == server.PER_HOST_S * BURST_S, "its share refills"


def test_strangers_of_all_addresses_leave_members_their_share() -> None:
    begin = Begin()
    begin("home", peer=b"member")
    assert sum(begin(f"stranger {number}") for number in range(2000)) == server.STRANGERS_S * BURST_S
    assert begin("home", 20, peer=b"member") == 20
    assert begin("elsewhere", peer=b"new member") == 0
    assert begin("elsewhere", peer=b"new member", now=1.0) == 1


def test_members_at_one_address_do_not_use_up_its_share() -> None:
    begin = Begin()
    for number in range(100):
        assert begin("shared", 20, peer=b"%d" % number) == 20
    assert begin("elsewhere") == 1, "nor that of strangers"


def test_handshakes_of_one_member_are_limited() -> None:
    begin = Begin()
    assert begin("home", 1000, peer=b"member") == 2 * server.PER_HOST_S * BURST_S, "its own share and its address's"
    moved = sum(begin(f"home {number}", 1000, peer=b"other") for number in range(1000))
    most = server.STRANGERS_S + 2 * server.PER_HOST_S + server.PER_HOST_S
    assert moved <= most * BURST_S, "one address of a member is known, not many"


async def test_strangers_whole_handshakes_are_limited_and_a_member_reconnects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "PER_HOST_S", 0.5)
    monkeypatch.setattr(server, "STRANGERS_S", 0.15)
    world = World()
    await world.server.start(world.listener)
    try:
        async with world.client() as peers:
            await peers.call(HOST.node_id, "POST", "/echo", b"hello")
        begun = time.monotonic()
        tried, answered = await asyncio.to_thread(handshakes, world.port, 2.0, [f"127.0.1.{n}" for n in range(1, 41)])
        most = server.STRANGERS_S * (BURST_S + time.monotonic() - begun)
        assert 1 <= answered <= most < tried and world.counters["refused_handshakes"] >= tried - most
        async with world.client() as peers:
            assert await peers.call(HOST.node_id, "POST", "/echo", b"hello") == b"hello"
    finally:
        await world.server.close()


async def test_connections_that_wait_leave_others_their_turn(world: World) -> None:
    flood = unfinished(world.port, 500)  # before the server gets to run
    turns = 0
    while world.counters["refused_handshakes"] < len(flood) - MAX_HANDSHAKES_PER_HOST:
        turns += 1
        await asyncio.sleep(0)
    assert turns > len(flood) / 2
    for connection in flood:
        connection.close()


async def test_connections_of_one_member_are_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "CALLS_PER_NODE", MAX_PER_PEER + 10)
    monkeypatch.setattr(memory, "MAX_REQUESTS_PER_PEER", MAX_PER_PEER + 10)
    async with world.client() as greedy, world.client(OTHER) as modest:
        calls = []
        for count in (MAX_PER_PEER // 2, MAX_PER_PEER // 2, 10):
            calls += [asyncio.create_task(greedy.call(HOST.node_id, "POST", "/wait")) for _ in range(count)]
            await until(lambda: world.begun + world.counters["refused_busy"] >= len(calls))  # noqa: B023
        assert world.begun == MAX_PER_PEER
        assert await modest.call(HOST.node_id, "POST", "/echo", b"hello") == b"hello"
        world.release.set()
        done = await asyncio.gather(*calls, return_exceptions=True)
    assert sum(isinstance(one, PeerError) for one in done) == 10
    await until(lambda: not world.server._of_peer)


async def test_connections_leave_files_for_the_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "CALLS_PER_NODE", MAX_PER_PEER)
    monkeypatch.setattr(memory, "MAX_REQUESTS_PER_PEER", MAX_PER_PEER)
    most = MAX_PER_PEER + 6
    kept = server.FILES_KEPT + len(descriptors())  # earlier tests in this process left some open
    monkeypatch.setattr(server, "FILES_KEPT", kept)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (kept + server.MAX_HANDSHAKES + most, limits[1]))
    world = World()
    try:
        await world.server.start(world.listener)
        async with world.client() as one, world.client(OTHER) as other:
            calls = []
            for peers, count in ((one, 40), (other, 30), (other, 10)):
                calls += [asyncio.create_task(peers.call(HOST.node_id, "POST", "/wait")) for _ in range(count)]
                await until(lambda: world.begun + world.counters["refused_busy"] >= len(calls))  # noqa: B023
            assert (world.begun, world.counters["refused_busy"]) == (most, 10)
            world.release.set()
            await asyncio.gather(*calls, return_exceptions=True)
    finally:
        await world.server.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


async def test_requests_of_one_member_are_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "CALLS_PER_NODE", memory.MAX_REQUESTS_PER_PEER + 1)
    async with world.client() as greedy, world.client(OTHER) as modest:
        most = memory.MAX_REQUESTS_PER_PEER
        calls = [asyncio.create_task(greedy.call(HOST.node_id, "POST", "/wait")) for _ in range(most)]
        await until(lambda: world.begun == most)
        with pytest.raises(PeerError, match="503"):
            await greedy.call(HOST.node_id, "POST", "/wait")
        assert await modest.call(HOST.node_id, "POST", "/echo", b"hello") == b"hello"
        world.release.set()
        await asyncio.gather(*calls)


async def test_bodies_wait_for_memory_of_their_member(world: World) -> None:
    async with world.client() as greedy, world.client(OTHER) as modest:
        calls = [asyncio.create_task(greedy.call(HOST.node_id, "POST", "/hold", bytes(60 * KIB))) for _ in range(3)]
        await until(lambda: world.begun == 1)
        assert await modest.call(HOST.node_id, "POST", "/echo", b"hello") == b"hello"
        assert world.begun == 1, "two bodies of 64 KiB are more than one member's 200 KiB, each counted twice"
        world.release.set()
        await asyncio.gather(*calls)
    assert world.begun == 3


async def test_body_counts_as_long_as_it_says(world: World) -> None:
    async with world.client() as peers:
        calls = [asyncio.create_task(peers.call(HOST.node_id, "POST", "/hold", b"short")) for _ in range(3)]
        await until(lambda: world.begun == 3)
        world.release.set()
        await asyncio.gather(*calls)


@pytest.mark.parametrize("reads", [True, False])
async def test_answer_counts_until_it_is_sent_or_given_up(
    world: World, monkeypatch: pytest.MonkeyPatch, reads: bool
) -> None:
    monkeypatch.setattr(server, "ANSWER_S", 60.0 if reads else 1.0)
    async with world.client() as peers, peers.stream(HOST.node_id, "GET", "/large", b"") as answer:
        await until(lambda: world.begun)
        call = asyncio.create_task(peers.call(HOST.node_id, "POST", "/echo", bytes(60 * KIB)))
        await until(lambda: world.memory._requests[MEMBER.node_id] == 2)
        assert not call.done() and not world.callers, "the answer and a body are more than one member's 200 KiB"
        if reads:
            while await answer.content.readany():
                pass
        assert await call == bytes(60 * KIB)
    await until(lambda: not world.memory._requests and not world.memory._bytes)


async def test_memory_is_used_to_the_last_byte_and_forgets_who_used_it() -> None:
    memory, order = Memory(10, 15), list[str]()

    async def hold(peer: bytes, size: int, name: str) -> None:
        async with memory.hold(peer, size):
            order.append(name)

    async with memory.hold(b"a", 10):
        async with memory.hold(b"b", 5):
            waits = [
                asyncio.create_task(hold(*one)) for one in ((b"a", 1, "of a"), (b"b", 1, "of b"), (b"c", 0, "no size"))
            ]
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert order == ["no size"]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        await waits[1]
        assert order == ["no size", "of b"]
    await asyncio.gather(*waits)
    assert order[2:] == ["of a"] and not memory._bytes and not memory._requests


async def endless(piece: bytes) -> AsyncIterator[bytes]:
    while True:
        yield piece


@pytest.mark.parametrize("body", ["declared", "endless"])
async def test_body_over_the_bound_of_its_route_is_refused(world: World, body: str) -> None:
    async with world.client() as peers:
        data = bytes(65 * KIB) if body == "declared" else endless(bytes(KIB))
        with pytest.raises(PeerError) as caught:
            async with peers.stream(HOST.node_id, "POST", "/echo", data):
                pass
        assert caught.value.status in {413, None}, "the connection may end while the body is sent"
    assert not world.callers


async def test_body_of_a_read_is_refused(world: World) -> None:
    async with world.client() as peers:
        with pytest.raises(PeerError, match="413"):
            await peers.call(HOST.node_id, "GET", "/big", b"x")


async def test_body_of_a_stream_is_read_ahead_within_its_bound(world: World) -> None:
    async with world.client() as peers:
        taken = (await peers.call(HOST.node_id, "POST", "/stream", bytes(8 << 20))).split()
    assert sum(map(int, taken)) == 8 << 20
    assert 256 * KIB <= max(map(int, taken)) <= 512 * KIB, taken


async def test_slow_body_is_given_up(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "BODY_S", 0.2)
    never = asyncio.Event()

    async def stalling() -> AsyncIterator[bytes]:
        yield b"a beginning"
        await never.wait()

    async with world.client() as peers:
        with pytest.raises(PeerError, match="408"):
            async with peers.stream(HOST.node_id, "POST", "/echo", stalling()):
                pass
    assert not world.callers


async def test_request_is_not_inflated(world: World) -> None:
    packed = gzip.compress(bytes(10 * KIB))
    async with world.client() as peers:
        assert peers._session is not None
        peers._session.headers["Content-Encoding"] = "gzip"
        assert await peers.call(HOST.node_id, "POST", "/echo", packed) == packed


async def test_answer_is_not_inflated(world: World) -> None:
    async with world.client() as peers:
        answer = await peers.call(HOST.node_id, "GET", "/gzip")
    assert gzip.decompress(answer) == bytes(10 * KIB)


async def test_answer_over_the_bound_of_the_call_is_refused(world: World) -> None:
    async with world.client() as peers:
        with pytest.raises(PeerError, match="over 65536 bytes"):
            await peers.call(HOST.node_id, "GET", "/big", answer_bytes=64 * KIB)
        assert len(await peers.call(HOST.node_id, "GET", "/big", answer_bytes=100 * KIB)) == 100 * KIB


@pytest.mark.parametrize("how", ["call", "tunnel"])
async def test_redirect_is_not_followed(world: World, how: str) -> None:
    async with world.client() as peers:
        with pytest.raises(PeerError, match="redirect"):
            if how == "call":
                await peers.call(HOST.node_id, "GET", "/moved")
            else:
                async with peers.tunnel(HOST.node_id, "/moved"):
                    pass
    assert not world.callers


@pytest.mark.parametrize(("host", "port"), [("a..b", 7373), ("lab.example.edu", 7373), ("127.0.0.1", 70_000)])
async def test_address_that_a_member_invents_is_asked_of_nobody(
    host: str, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", None)
    peers = PeerClient(MEMBER, MESH, lambda node: Address(host, port))
    await peers.open()
    with pytest.raises(PeerError, match="no address is known"):
        await peers.call(HOST.node_id, "GET", "/big")
    await peers.close()


async def test_kept_connection_is_not_used_for_another_node_at_its_address(world: World) -> None:
    async with world.client() as peers:
        await peers.call(HOST.node_id, "POST", "/echo", b"hello")
        with pytest.raises(PeerError, match="another node answers"):
            await peers.call(OTHER.node_id, "POST", "/echo", b"secret")
    assert len(world.callers) == 1


async def test_idle_connection_and_unfinished_headers_are_closed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "KEEPALIVE_CLOSE_S", 0.3)
    patient = World()
    await patient.server.start(patient.listener)
    try:
        async with patient.client() as peers:
            assert peers._session is not None
            connector = peers._session.connector
            assert isinstance(connector, aiohttp.TCPConnector)
            context = connector._ssl
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", patient.port, ssl=context, server_hostname=client.node_name(HOST.node_id)
            )
            writer.write(b"POST /echo HTTP/1.1\r\nHost: x\r\nX-Unfinished: ")
            async with asyncio.timeout(10):
                assert await reader.read() == b""
            writer.close()
    finally:
        await patient.server.close()


async def test_answer_that_goes_on_ends_with_the_membership_of_its_reader(world: World) -> None:
    async with (
        asyncio.timeout(20),
        world.client() as leaving,
        world.client(OTHER) as staying,
        staying.stream(HOST.node_id, "GET", "/follow", b"") as kept,
    ):
        with pytest.raises(PeerError):
            async with leaving.stream(HOST.node_id, "GET", "/follow", b"") as cut:
                assert await cut.content.readexactly(4) == await kept.content.readexactly(4) == b"line"
                world.members.discard(MEMBER.node_id)
                while True:
                    await cut.content.readexactly(4)
        assert await kept.content.readexactly(4) == b"line"


async def test_streams_to_a_former_member_end(world: World) -> None:
    """They went on: a revoked node that ran a job went on to send its log, and to get what was typed."""
    received: asyncio.Queue[bytes] = asyncio.Queue()

    async def follow() -> None:
        async with peers.stream(HOST.node_id, "GET", "/follow", b"") as response:
            async for piece in response.content.iter_any():
                received.put_nowait(piece)

    async def upload() -> None:
        await peers.call(HOST.node_id, "POST", "/wait", b"", timeout_s=1000)

    async def tunnel() -> None:
        async with peers.tunnel(HOST.node_id, "/tunnel") as line:
            received.put_nowait(b"open")
            await line.receive()

    async with world.client() as peers:
        kept = [asyncio.create_task(work()) for work in (follow, upload, tunnel)]
        while await received.get() != b"open":
            pass
        await until(lambda: world.begun and received.qsize() > 1)
        assert not any(work.done() for work in kept)
        world.former.add(HOST.node_id)
        async with asyncio.timeout(20):
            results = await asyncio.gather(*kept, return_exceptions=True)
    assert [str(result) for result in results] == ["it is no member"] * 3
    assert all(isinstance(result, PeerError) for result in results)

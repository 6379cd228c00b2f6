"""Streams that keep to a pace, on real connections with TLS: how fast, what the kernel is told, and what is left afterwards."""

import asyncio
import math
import socket
import struct
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from ckptstore.pacing import FLOOR_BPS, MOST_SHARE, Background, Deadline, Rtt
from membership.identity import Identity
from mesh.rpc import paced_socket
from mesh.rpc.client import Address, PeerClient
from mesh.rpc.paced_socket import SO_MAX_PACING_RATE, UNLIMITED, PacedSocket
from mesh.rpc.pacing import Wire
from mesh.rpc.server import PeerServer
from tests.rpc.nodes import MESH, serve

MB = 10**6
OTHER = Identity.generate()


class Other:
    """A node that takes what is put to it and gives what is asked for; `seen` is when how much had come."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.seen: list[tuple[float, int]] = []
        self.sockets: list[Any] = []

    async def serve(self) -> tuple[PeerServer, Address]:
        app = web.Application()
        app.add_routes([web.put("/take", self._take), web.get("/give", self._give), web.get("/hello", self._hello)])
        return await serve(app, OTHER)

    async def _take(self, request: web.Request) -> web.Response:
        count = 0
        async for data in request.content.iter_any():
            count += len(data)
            self.seen.append((time.monotonic(), count))
        return web.Response(text=str(count))

    async def _give(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        async with self.wire.lane(Background()) as lane:
            lane.bind(request.transport)
            assert request.transport is not None
            self.sockets.append(request.transport.get_extra_info("socket"))
            async for piece in pieces(10 * MB):
                await response.write(piece)
            self.seen.append((pacing_rate(self.sockets[-1]), 0))
            await response.write_eof()
            await lane.drained()
        return response

    async def _hello(self, request: web.Request) -> web.Response:
        return web.Response(text="hello")


async def pieces(count: int, size: int = 1 << 20) -> AsyncIterator[bytes]:
    block = bytes(size)
    for start in range(0, count, size):
        yield block[: min(size, count - start)]


def pacing_rate(sock: Any) -> int:
    data = sock.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, struct.calcsize("@L"))
    return int(struct.unpack("@L", data)[0])


def congestion(sock: Any) -> bytes:
    return bytes(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)).split(b"\0")[0]


@pytest.fixture
async def other(tmp_path: Path) -> AsyncIterator[tuple[Other, Address]]:
    other = Other(Wire(10 * MB))
    server, address = await other.serve()
    yield other, address
    await server.close()


async def client(address: Address, wire: Wire) -> PeerClient:
    peers = PeerClient(Identity.generate(), MESH, lambda node: address, wire)
    await peers.open()
    return peers


async def put(peers: PeerClient, lane: Any, count: int) -> int:
    async with lane, peers.stream(OTHER.node_id, "PUT", "/take", pieces(count), lane) as response:
        return int(await response.read())


async def test_background_stream_keeps_to_budget(other: tuple[Other, Address], record_property: Any) -> None:
    node, address = other
    peers = await client(address, Wire(20 * MB))
    begun = time.monotonic()
    assert await put(peers, peers.wire.lane(Background()), 64 * MB) == 64 * MB
    taken = time.monotonic() - begun
    assert taken >= 2, "64 MB at 20 MB/s"
    start = node.seen[0][0] + 0.3
    middle = [(at, count) for at, count in node.seen if start <= at <= start + 2]
    rate = (middle[-1][1] - middle[0][1]) / (middle[-1][0] - middle[0][0]) if len(middle) > 1 else 0.0
    record_property("error over 2 s", abs(rate / (20 * MB) - 1))
    assert rate < 30 * MB
    await peers.close()


async def test_pacing_is_set_and_released(
    other: tuple[Other, Address],
) -> None:
    _, address = other
    peers = await client(address, Wire(10 * MB))
    assert await peers.call(OTHER.node_id, "GET", "/hello") == b"hello"
    lane = peers.wire.lane(Background())
    sending = asyncio.create_task(put(peers, lane, 4 * MB))
    while not peers.wire.owners:
        await asyncio.sleep(0.005)
    (transport,) = peers.wire.owners
    sock = transport.get_extra_info("socket")
    assert pacing_rate(sock) == 10 * MB and congestion(sock) in {b"cubic", b"reno"}
    assert await sending == 4 * MB and not peers.wire.owners
    assert pacing_rate(sock) == UNLIMITED and lane.held
    with socket.create_server(("127.0.0.1", 0)) as plain:
        assert congestion(sock) == congestion(plain), "as this system has it"
    port = sock.getsockname()
    async with peers.stream(OTHER.node_id, "PUT", "/take", pieces(64 * MB)) as response:
        await response.read()
        assert sock.getsockname() == port and pacing_rate(sock) == UNLIMITED, "the same connection, at full speed"
    await peers.close()


def test_released_connection_has_no_traffic_class() -> None:
    with socket.socket() as sock:
        paced = PacedSocket(sock)
        paced.enter(6)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY) == 6
        paced.release()
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY) == 0


async def test_broken_stream_releases_connection(other: tuple[Other, Address]) -> None:
    _, address = other
    peers = await client(address, Wire(10 * MB))
    sending = asyncio.create_task(put(peers, peers.wire.lane(Background()), 64 * MB))
    while not peers.wire.owners:
        await asyncio.sleep(0.005)
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    assert not peers.wire.owners and peers.wire.share_bps(Background()) == 10 * MB
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "pace of a stream"]
    await peers.close()


async def test_answer_is_paced(other: tuple[Other, Address]) -> None:
    node, address = other
    peers = await client(address, Wire())
    begun = time.monotonic()
    async with peers.stream(OTHER.node_id, "GET", "/give", b"") as response:
        assert len(await response.read()) == 10 * MB
    assert time.monotonic() - begun > 0.5, "10 MB at 10 MB/s"
    assert await peers.call(OTHER.node_id, "GET", "/hello") == b"hello", "the same connection again"
    assert node.seen == [(10 * MB, 0)] and pacing_rate(node.sockets[0]) == UNLIMITED
    await peers.close()


async def test_deadline_stream_goes_before_background(other: tuple[Other, Address]) -> None:
    _, address = other
    wire = Wire(40 * MB)
    peers = await client(address, wire)
    both = [asyncio.create_task(put(peers, wire.lane(Background()), 32 * MB)) for _ in range(2)]
    while len(wire.owners) < 2:
        await asyncio.sleep(0.005)
    socks = [transport.get_extra_info("socket") for transport in wire.owners]
    assert [pacing_rate(sock) for sock in socks] == [20 * MB] * 2
    until = time.monotonic() + 1.0
    urgent = asyncio.create_task(put(peers, wire.lane(Deadline(60 * MB, lambda: until - time.monotonic())), 60 * MB))
    while len(wire.owners) < 3:
        await asyncio.sleep(0.005)
    assert [pacing_rate(sock) for sock in socks] == [int(FLOOR_BPS)] * 2
    assert await urgent == 60 * MB
    assert [pacing_rate(sock) for sock in socks] == [20 * MB] * 2
    assert await asyncio.gather(*both) == [32 * MB] * 2
    await peers.close()


async def test_no_limit_without_budget(other: tuple[Other, Address]) -> None:
    _, address = other

    class Waits(Background):
        """On a link whose round-trip times do not depend on what else this machine does."""

        def __init__(self, after: float) -> None:
            super().__init__()
            self.after = after

        def tick(self, now: float, sent: int, rtt: Rtt | None, budget_bps: float | None) -> float | None:
            return super().tick(now, sent, Rtt(1.0 if sent > self.after else 0.001, 0.001), budget_bps)

    peers = await client(address, Wire())
    calm = peers.wire.lane(Waits(math.inf))
    assert await put(peers, calm, 16 * MB) == 16 * MB and not calm.held
    sending = asyncio.create_task(put(peers, peers.wire.lane(Waits(8 * MB)), 400 * MB))
    while not peers.wire.owners:
        await asyncio.sleep(0.005)
    sock = next(iter(peers.wire.owners)).get_extra_info("socket")
    assert pacing_rate(sock) == UNLIMITED
    async with asyncio.timeout(60):
        while pacing_rate(sock) == UNLIMITED:
            await asyncio.sleep(0.05)
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    await peers.close()


def test_unsupported_pacing_warns_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paced_socket, "_warned", set())
    ours, theirs = socket.socketpair()  # no TCP: the kernel refuses
    with ours, theirs:
        for _ in range(3):
            paced = PacedSocket(ours)
            assert not paced.limit(1e6) and paced.info() is None
            paced.release()
    assert caplog.text.count("streams are not paced") == 1
    closed = socket.create_server(("127.0.0.1", 0))
    closed.close()
    assert not PacedSocket(closed).limit(1e6)
    PacedSocket(closed).enter(6)


def test_background_streams_divide_budget_by_share() -> None:
    wire = Wire(10 * MB)
    large, small, other = (wire.lane(Background(lambda share=share: share)) for share in (3.0, 0.5, 1.5))  # type: ignore[misc]
    with wire.listed(large), wire.listed(small), wire.listed(other):
        assert [wire.share_bps(lane.pace) for lane in (large, small, other)] == [6 * MB, MB, 3 * MB]
        with wire.listed(wire.lane(Deadline(100, lambda: 1.0))):
            assert wire.share_bps(large.pace) == FLOOR_BPS
    assert wire.share_bps(small.pace) == 10 * MB, "alone it has all of it"
    assert wire.least_bps <= 10 * MB * (1 / MOST_SHARE) / (8 * MOST_SHARE), "what a stream may count on beside eight"

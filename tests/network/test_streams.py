"""Traffic classes of our streams, and rates for departing checkpoints."""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from aiohttp import web

from ckptstore.pacing import Background, Deadline, Pace
from membership.identity import Identity
from mesh.checkpoints.departure_transfers import Departures
from mesh.checkpoints.loss_estimate import Urgency
from mesh.daemon.edge_shaping import keep
from mesh.network.edge import Edge
from mesh.network.shaping import BULK, HOST, URGENT
from mesh.rpc.client import Address, PeerClient
from mesh.rpc.pacing import Wire
from mesh.rpc.server import PeerServer
from tests.network.wires import MACHINE, NEIGHBOUR, UP, WAIT_S, Wires, inside
from tests.rpc.nodes import MESH, serve

pytestmark = pytest.mark.bpf

MB = 10**6
Make = Callable[..., Edge]

TAKER = Identity.generate()


class Taker:
    """A node that takes what is put to it, as our own do."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.taken = 0

    async def serve(self, namespace: str, address: str) -> tuple[PeerServer, Address]:
        with inside(namespace):
            listening = socket.create_server((address, 0))
        app = web.Application()
        app.add_routes([web.put("/take", self._take)])
        return await serve(app, TAKER, listening)

    async def _take(self, request: web.Request) -> web.Response:
        with self.wire.taking(request.transport):
            async for data in request.content.iter_any():
                self.taken += len(data)
        return web.Response(text=str(self.taken))


@contextlib.asynccontextmanager
async def between(
    directory: Path, source: str, target: str, address: str, wire: Wire
) -> AsyncIterator[tuple[PeerClient, Taker]]:
    """A client in one namespace, a taker in another; both have this wire."""
    taker = Taker(wire)
    server, there = await taker.serve(target, address)
    peers = PeerClient(Identity.generate(), MESH, lambda node: there, wire)
    try:
        with inside(source):  # no other task of this test opens sockets
            await peers.open()
            yield peers, taker
    finally:
        await peers.close()
        await server.close()


async def pieces(count: int) -> AsyncIterator[bytes]:
    for _ in range(count // MB):
        yield bytes(MB)


async def put(peers: PeerClient, pace: Pace, count: int) -> None:
    lane = peers.wire.lane(pace)
    async with lane, peers.stream(TAKER.node_id, "PUT", "/take", pieces(count), lane) as response:
        await response.read()


async def until(ready: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not ready():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.02)


async def test_stream_class_follows_pace(wires: Wires, edges: Make, tmp_path: Path) -> None:
    edges(device=UP, mbps=1000)
    wire = Wire()
    async with between(tmp_path, wires.machine, wires.neighbour, NEIGHBOUR, wire) as (peers, _):
        await put(peers, Background(), 4 * MB)
        assert wires.sent(HOST.minor) > 4 * MB, "nobody looks: it is like everything else"
        wire.classed = True
        host = wires.sent(HOST.minor)
        await put(peers, Background(), 4 * MB)
        assert wires.sent(BULK.minor) > 4 * MB and not wires.sent(URGENT.minor)
        await put(peers, Deadline(4 * MB, lambda: 0.5), 4 * MB)
        assert wires.sent(URGENT.minor) > 4 * MB
        await peers.call(TAKER.node_id, "PUT", "/take", b"x" * MB)
        assert wires.sent(URGENT.minor) < 6 * MB and wires.sent(HOST.minor) > host + MB, "the same connection, let go"


async def test_cut_pauses_checkpoints_both_ways(wires: Wires, edges: Make, tmp_path: Path) -> None:
    edge = edges(device=UP, mbps=1000)
    ways = ((wires.machine, wires.neighbour, NEIGHBOUR), (wires.neighbour, wires.machine, MACHINE))
    for number, (source, target, address) in enumerate(ways):
        wire = Wire(10 * MB)
        wire.classed = True
        (here := tmp_path / str(number)).mkdir()
        async with between(here, source, target, address, wire) as (peers, taker):
            sending = asyncio.create_task(put(peers, Background(), 10 * MB))
            await until(lambda taker=taker: taker.taken > MB, "the stream to flow")
            edge.cut()
            seen, still = -1, time.monotonic()
            while time.monotonic() < still + 0.5:  # what was on its way has come
                if taker.taken != seen:
                    seen, still = taker.taken, time.monotonic()
                assert taker.taken < 10 * MB, "it was not stopped"
                await asyncio.sleep(0.02)
            assert not sending.done()
            edge.restore()
            await sending
            assert taker.taken == 10 * MB


async def test_departing_checkpoint_gets_and_returns_rate(wires: Wires, edges: Make) -> None:
    edge = edges(device=UP, mbps=100)
    wire, departures, told = Wire(), Departures(), list[str]()
    keeping = asyncio.create_task(keep(edge, wire, departures, told.append))
    try:
        await until(lambda: wire.classed, "the streams to have a class")
        with departures.departure(Urgency(departures.clock() + 100, 1.0)) as leaving, leaving.stream(80 * MB, None):
            await until(lambda: edge.state().reserved_mbps, "the stream to have its rate")
            assert 8 < edge.state().reserved_mbps < 12, "80 MB in 80 s, and what each packet costs"
            wires.tc("qdisc", "del", "dev", UP, "root")
            departures._open[0].aim_s -= 40
            await until(lambda: len(told) == 2 and edge.state().reserved_mbps > 14, f"the queue to be restored: {told}")
        await until(lambda: not edge.state().reserved_mbps, "the rate to be given back")
        assert "class change" in told[0] and "is shaped for 100 Mbit/s" in told[1]
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)

"""What our own streams say of themselves where the edge looks, and what departing checkpoints are given."""

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
from mesh.api.peer import READ_BYTES, Address, PeerClient
from mesh.api.tls import server_context
from mesh.api.wire import Wire
from mesh.edge.edge import Edge
from mesh.edge.keeper import keep
from mesh.edge.shaping import BULK, HOST, URGENT
from mesh.jobs.departures import Departures
from mesh.jobs.stake import Urgency
from tests.edge.wires import MACHINE, NEIGHBOUR, UP, WAIT_S, Wires, inside

pytestmark = pytest.mark.bpf

MB = 10**6
Make = Callable[..., Edge]


class Taker:
    """A node that takes what is put to it, as our own do."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.taken = 0

    async def serve(self, directory: Path, namespace: str, address: str) -> tuple[web.AppRunner, Address]:
        with inside(namespace):
            listening = socket.create_server((address, 0))
        app = web.Application()
        app.add_routes([web.put("/take", self._take)])
        context, fingerprint = server_context(directory / "tls.pem", Identity.generate().seed, "taker")
        runner = web.AppRunner(app, read_bufsize=READ_BYTES)
        await runner.setup()
        await web.SockSite(runner, listening, ssl_context=context).start()
        return runner, Address(address, listening.getsockname()[1], fingerprint)

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
    runner, there = await taker.serve(directory, target, address)
    peers = PeerClient(Identity.generate(), b"m" * 32, lambda node: there, wire)
    try:
        with inside(source):  # no other task of this test opens sockets
            await peers.open()
            yield peers, taker
    finally:
        await peers.close()
        await runner.cleanup()


async def pieces(count: int) -> AsyncIterator[bytes]:
    for _ in range(count // MB):
        yield bytes(MB)


async def put(peers: PeerClient, pace: Pace, count: int) -> None:
    lane = peers.wire.lane(pace)
    async with lane, peers.stream(b"n" * 32, "PUT", "/take", pieces(count), lane) as response:
        await response.read()


async def until(ready: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not ready():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.02)


async def test_streams_are_of_the_class_that_their_pace_asks_for(wires: Wires, edges: Make, tmp_path: Path) -> None:
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
        await peers.call(b"n" * 32, "PUT", "/take", b"x" * MB)
        assert wires.sent(URGENT.minor) < 6 * MB and wires.sent(HOST.minor) > host + MB, "the same connection, let go"


async def test_a_cut_stops_checkpoints_in_both_directions_and_they_go_on(
    wires: Wires, edges: Make, tmp_path: Path
) -> None:
    edge = edges(device=UP, mbps=1000)
    ways = ((wires.machine, wires.neighbour, NEIGHBOUR), (wires.neighbour, wires.machine, MACHINE))
    for number, (source, target, address) in enumerate(ways):
        wire = Wire(10 * MB)
        wire.classed = True
        (here := tmp_path / str(number)).mkdir()
        async with between(here, source, target, address, wire) as (peers, taker):
            sending = asyncio.create_task(put(peers, Background(), 10 * MB))
            await until(lambda taker=taker: taker.taken > MB, "it flows")
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


async def test_what_departs_is_given_its_rate_and_gives_it_back(wires: Wires, edges: Make) -> None:
    edge = edges(device=UP, mbps=100)
    wire, departures, told = Wire(), Departures(), list[str]()
    keeping = asyncio.create_task(keep(edge, wire, departures, told.append))
    try:
        await until(lambda: wire.classed, "streams are told")
        with departures.departure(Urgency(departures.clock() + 100, 1.0)) as leaving, leaving.stream(80 * MB, None):
            await until(lambda: edge.standing().reserved_mbps, "it has its rate")
            assert 8 < edge.standing().reserved_mbps < 12, "80 MB in 80 s, and what each packet costs"
            wires.tc("qdisc", "del", "dev", UP, "root")
            departures._open[0].aim_s -= 40
            await until(lambda: len(told) == 2 and edge.standing().reserved_mbps > 14, f"somebody took it away: {told}")
        await until(lambda: not edge.standing().reserved_mbps, "it is given back")
        assert "class change" in told[0] and "is shaped for 100 Mbit/s" in told[1]
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)

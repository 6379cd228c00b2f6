"""Floods at the port between nodes: what they cost a daemon, and what its authentication costs each call.

Real daemons on loopback whose job goes on; the floods are those of tests/adversary. A neighbour has no key, a member has one.
The cost of a call is compared with the design that this one replaced: TLS of the server alone, and a signature in each request.
"""

import argparse
import asyncio
import base64
import hashlib
import os
import socket
import ssl
import struct
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import aiohttp  # noqa: E402
from aiohttp import web  # noqa: E402

from membership.envelope import open_envelope, seal  # noqa: E402
from membership.identity import Identity  # noqa: E402
from mesh.daemon.stack import Stack, StackNode  # noqa: E402
from mesh.rpc.client import Address, PeerClient  # noqa: E402
from mesh.rpc.memory import Memory  # noqa: E402
from mesh.rpc.server import BODY, Bound, PeerServer, bounded, peer_of  # noqa: E402
from mesh.rpc.tls import certificate  # noqa: E402
from tests.adversary import floods  # noqa: E402
from tests.adversary.floods import MIB, Cost, Member, port_of  # noqa: E402
from tests.adversary.neighbour import private_key  # noqa: E402
from tests.bench.harness import cpu_s, row, write  # noqa: E402
from tests.e2e.commands import job_state, ok, running_with_checkpoint, submit_count, until  # noqa: E402

GROWTH_MIB, ANSWER_S, CALL_RATIO = 64.0, 1.0, 1.15
CALLS, PER_ROUND, NEW_CONNECTIONS = 40, 100, 60
MESH = b"m" * 16
ADDRESSES = [f"127.0.1.{number}" for number in range(1, 201)]


def flood_rows(quick: bool) -> list[dict[str, Any]]:
    scale = 10 if quick else 1
    rows: list[dict[str, Any]] = []
    with Stack(3, overrides={"slots": 1, "grace_s": 10.0}) as stack:
        stack.start_all()
        victim = stack.nodes[0]
        job = submit_count(victim, 1_000_000, "--replicas", "2")
        running_with_checkpoint(victim, job)
        port = port_of(victim)
        neighbour: dict[str, Callable[[Cost], object]] = {
            f"{2000 // scale} connections of a neighbour": lambda cost: floods.connections(port, 2000 // scale, cost),
            f"{1000 // scale} connections with slow headers": lambda cost: floods.slow_headers(
                port, 1000 // scale, cost
            ),
            f"{200 // scale} bodies of gzip, 64 MiB inflated": lambda cost: floods.gzip_flood(port, 200 // scale, cost),
            f"{40 // scale} bodies of 64 MiB": lambda cost: floods.large_bodies(port, 40 // scale, cost),
            f"whole handshakes for {100 // scale} s": lambda cost: floods.handshakes(port, 100 / scale, ADDRESSES[:1]),
            f"the same, of {len(ADDRESSES)} addresses": lambda cost: floods.handshakes(port, 100 / scale, ADDRESSES),
        }
        for name, attack in neighbour.items():
            rows += _costs(victim, job, f"a neighbour: {name}", attack)
        for method, path, size, count in (
            ("POST", "/v1/messages", 64 * MIB, 64),
            ("POST", "/v1/messages", 5 * MIB, 400),
            ("PUT", "/v1/manifests/" + "ab" * 32, 16 * MIB, 200),
            ("POST", "/v1/chunks/missing", 8 * MIB, 200),
        ):
            what = f"a member: {count // scale} times {method} {path[:14]} of {size // MIB} MiB"
            attack = _member(stack.nodes[1], victim, method, path, size, count // scale)
            rows += _costs(victim, job, what, attack)
        ok(victim, "cancel", job)
    return rows


def _member(
    node: StackNode, victim: StackNode, method: str, path: str, size: int, count: int
) -> Callable[[Cost], object]:
    async def send() -> None:
        member = Member(node, victim)
        await member.peers.open()
        try:
            body = os.urandom(size)
            await member.flood(method, path, lambda: body, count)
        finally:
            await member.peers.close()

    return lambda cost: asyncio.run(send())


def _costs(victim: StackNode, job: str, name: str, attack: Callable[[Cost], object]) -> list[dict[str, Any]]:
    assert victim.process is not None
    cost, before = Cost(victim), job_state(victim, job)["checkpoint"]["seq"]
    begun, cpu_before = time.monotonic(), cpu_s(victim.process.pid)
    with cost.watching():
        attack(cost)
    seconds = time.monotonic() - begun
    busy = 100 * (cpu_s(victim.process.pid) - cpu_before) / seconds
    until(lambda: job_state(victim, job)["checkpoint"]["seq"] > before, "the job to commit again")
    commits = job_state(victim, job)["checkpoint"]["seq"] - before
    return [
        row(f"{name}: memory", [cost.grown_mib], "MiB", goal=f"<= {GROWTH_MIB:g}", met=cost.grown_mib <= GROWTH_MIB),
        row(
            f"{name}: slowest status",
            [cost.slowest_s],
            "s",
            goal=f"<= {ANSWER_S:g}",
            met=cost.slowest_s <= ANSWER_S,
        ),
        row(f"{name}: of one processor", [busy], "%", goal="", met=None),
        row(f"{name}: commits of the job in {seconds:.0f} s", [commits], "", goal=">= 1", met=commits >= 1),
    ]


class Signed:
    """The design before: the server's certificate is pinned, and each request carries a signature of its caller."""

    def __init__(self, host: Identity, caller: Identity) -> None:
        self._host, self._caller = host, caller
        self._seen: set[tuple[bytes, bytes]] = set()

    async def start(self, directory: Path) -> None:
        made = certificate(self._host.node_id, MESH)
        file = directory / "signed.pem"
        file.write_text(private_key(self._host) + ssl.DER_cert_to_PEM_cert(made))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(file)
        self._pin = aiohttp.Fingerprint(hashlib.sha256(made).digest())
        app = web.Application()
        app.add_routes([web.post("/echo", self._echo)])
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=context).start()
        self._url = f"https://127.0.0.1:{self._runner.addresses[0][1]}/echo"
        self._session = aiohttp.ClientSession()

    async def call(self, body: bytes) -> None:
        now = time.time()
        claim = struct.pack("!d", now) + os.urandom(16) + self._host.node_id + hashlib.blake2b(body).digest()
        header = base64.b64encode(seal(self._caller, MESH, "request", claim)).decode()
        async with self._session.post(
            self._url, data=body, headers={"Mesh-Request": header}, ssl=self._pin
        ) as response:
            await response.read()

    async def reconnect(self) -> None:
        await self._session.close()
        self._session = aiohttp.ClientSession()

    async def close(self) -> None:
        await self._session.close()
        await self._runner.cleanup()

    async def _echo(self, request: web.Request) -> web.Response:
        body = await request.read()
        sender, claim = open_envelope(base64.b64decode(request.headers["Mesh-Request"]), MESH, "request")
        (sent,), nonce, recipient, digest = struct.unpack_from("!d", claim), claim[8:24], claim[24:56], claim[56:]
        fresh = abs(time.time() - sent) < 120 and (sender, nonce) not in self._seen
        if not fresh or recipient != self._host.node_id or digest != hashlib.blake2b(body).digest():
            raise web.HTTPForbidden
        self._seen.add((sender, nonce))
        return web.Response(body=body)


class Mutual:
    """The present design."""

    def __init__(self, host: Identity, caller: Identity) -> None:
        self._host, self._caller = host, caller

    async def start(self, directory: Path) -> None:
        bounds = bounded({("POST", "/echo"): Bound(1 << 20)}, Memory(1 << 25, 1 << 26))
        app = web.Application(middlewares=[bounds])
        app.add_routes([web.post("/echo", self._echo)])
        listener = socket.create_server(("127.0.0.1", 0))
        allowed = self._caller.node_id
        self._server = PeerServer(app, self._host, MESH, lambda node: "" if node == allowed else "no member")
        await self._server.start(listener)
        self._address = Address(*listener.getsockname()[:2])
        await self._open()

    async def _open(self) -> None:
        self._peers = PeerClient(self._caller, MESH, lambda node: self._address)
        await self._peers.open()

    async def call(self, body: bytes) -> None:
        await self._peers.call(self._host.node_id, "POST", "/echo", body)

    async def reconnect(self) -> None:
        await self._peers.close()
        await self._open()

    async def close(self) -> None:
        await self._peers.close()
        await self._server.close()

    async def _echo(self, request: web.Request) -> web.Response:
        assert peer_of(request) == self._caller.node_id
        return web.Response(body=request[BODY])


async def call_rows() -> list[dict[str, Any]]:
    host, caller, body = Identity.generate(), Identity.generate(), os.urandom(1000)
    with tempfile.TemporaryDirectory() as text:
        designs: tuple[Signed | Mutual, ...] = (Mutual(host, caller), Signed(host, caller))
        for design in designs:
            await design.start(Path(text))
            await design.call(body)
        kept: dict[int, list[float]] = {0: [], 1: []}
        fresh: dict[int, list[float]] = {0: [], 1: []}
        for _ in range(CALLS):
            for number, design in enumerate(designs):
                kept[number].append(await _ms(lambda: design.call(body), PER_ROUND))  # noqa: B023
        for _ in range(NEW_CONNECTIONS):
            for number, design in enumerate(designs):
                await design.reconnect()
                fresh[number].append(await _ms(lambda: design.call(body), 1))  # noqa: B023
        for design in designs:
            await design.close()
    peer = "signed requests over one-way TLS"
    rows = []
    for name, taken in (("a call of 1 kB on a kept connection", kept), ("a call on a new connection", fresh)):
        made = row(name, taken[0], "ms", goal=f"<= {CALL_RATIO} x the peer", met=None, peer=peer, peer_values=taken[1])
        made["met"] = made["value"] <= CALL_RATIO * made["peer_value"]
        rows.append(made)
    return rows


async def _ms(call: Callable[[], Awaitable[None]], times: int) -> float:
    begun = time.perf_counter()
    for _ in range(times):
        await call()
    return (time.perf_counter() - begun) / times * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of each flood")
    parser.add_argument("--only", choices=("floods", "calls"))
    options = parser.parse_args()
    rows = [] if options.only == "floods" else asyncio.run(call_rows())
    if options.only != "calls":
        rows += flood_rows(options.quick)
    write("adversary", rows)


if __name__ == "__main__":
    main()

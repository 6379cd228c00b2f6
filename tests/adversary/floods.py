"""Floods at the port between nodes, by a neighbour without a key and by a member, and what they cost the node."""

import asyncio
import gzip
import os
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from itertools import cycle

from ckptstore.chunker import CHUNK_BYTES
from ckptstore.encoding import RAW
from ckptstore.pack import STORED_CHECK_BYTES, ObjectHeader, encode_header
from membership.identity import Identity
from membership.trust import TrustStore
from mesh.daemon.stack import StackNode
from mesh.rpc.client import Address, PeerClient, PeerError
from mesh.rpc.memory import MAX_REQUESTS_PER_PEER
from tests.adversary.neighbour import plain_context, unfinished
from tests.bench.harness import resident_mib
from tests.e2e.commands import read

MIB = 1 << 20
ATTACKERS = 4  # threads, more than the cores of a small machine


class Cost:
    """Measures a daemon while others attack it: memory above the start in MiB, and the slowest `mesh status` in seconds."""

    def __init__(self, node: StackNode) -> None:
        assert node.process is not None
        self._node, self._pid = node, node.process.pid
        self._before = resident_mib(self._pid)
        self.grown_mib = self.slowest_s = 0.0

    @contextmanager
    def watching(self, every_s: float = 0.1) -> Iterator["Cost"]:
        """Look again and again in a thread, for the duration of the block."""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(every_s):
                self.look()

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield self
        finally:
            over.set()
            thread.join()

    def look(self) -> None:
        begun = time.monotonic()
        self._node.client.get("/v1/status")
        self.slowest_s = max(self.slowest_s, time.monotonic() - begun)
        self.grown_mib = max(self.grown_mib, resident_mib(self._pid) - self._before)


def port_of(node: StackNode) -> int:
    return int(read(node, "status")["api_port"])


def _hello(port: int, request: bytes) -> socket.socket | None:
    """Open a TLS connection without a certificate and send a request; None if the server ends it."""
    connection = socket.create_connection(("127.0.0.1", port), 5)
    with suppress(OSError, ssl.SSLError):
        secured = plain_context().wrap_socket(connection)
        secured.sendall(request)
        return secured
    connection.close()
    return None


def connections(port: int, count: int, cost: Cost) -> None:
    """Hold connections on which nothing is sent."""
    with ExitStack() as stack:
        for _ in range(0, count, 100):
            for connection in unfinished(port, min(100, count)):
                stack.enter_context(connection)
            cost.look()


def handshakes(port: int, duration_s: float, sources: Sequence[str]) -> tuple[int, int]:
    """Make whole handshakes as fast as a stranger can; return how many it began, and how many the node took part in."""
    over = time.monotonic() + duration_s
    context = plain_context()

    def attack(mine: Sequence[str]) -> tuple[int, int]:
        begun = answered = 0
        for source in cycle(mine):
            if time.monotonic() > over:
                break
            begun += 1
            with (
                suppress(OSError),
                socket.create_connection(("127.0.0.1", port), 5, (source, 0)) as connection,
                context.wrap_socket(connection),
            ):
                answered += 1
        return begun, answered

    with ThreadPoolExecutor(ATTACKERS) as pool:
        running = [pool.submit(attack, sources[number % len(sources) :: ATTACKERS]) for number in range(ATTACKERS)]
        counts = [one.result() for one in running]
    return sum(begun for begun, _ in counts), sum(answered for _, answered in counts)


def slow_headers(port: int, count: int, cost: Cost) -> None:
    """Hold connections with unfinished headers."""
    _requests(port, count, cost, b"GET /v1/usage HTTP/1.1\r\nHost: x\r\n")


def gzip_flood(port: int, count: int, cost: Cost) -> None:
    """Send bodies that inflate to 64 MiB each."""
    packed = gzip.compress(bytes(64 * MIB))
    head = b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n"
    _requests(port, count, cost, head % (len(packed) + 8) + packed)


def large_bodies(port: int, count: int, cost: Cost) -> None:
    """Send bodies of 64 MiB but for their last byte."""
    head = b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (64 * MIB)
    _requests(port, count, cost, head + bytes(64 * MIB - 1))


def _requests(port: int, count: int, cost: Cost, request: bytes) -> None:
    with ExitStack() as stack:
        for number in range(count):
            if (connection := _hello(port, request)) is not None:
                stack.enter_context(connection)
            if number % 20 == 19 or number == count - 1:
                cost.look()


class Member:
    """A hostile member: it has the key of one daemon and calls another as it likes."""

    def __init__(self, node: StackNode, victim: StackNode) -> None:
        identity = Identity.load(node.where.key)
        self.victim = Identity.load(victim.where.key).node_id
        mesh_id = TrustStore(node.where.genesis.read_bytes()).mesh_id
        address = Address("127.0.0.1", port_of(victim))
        self.peers = PeerClient(identity, mesh_id, lambda node: address)

    async def flood(self, method: str, path: str, body: Callable[[], bytes | AsyncIterator[bytes]], count: int) -> int:
        """Make this many calls at a time; return how many were answered with success."""

        async def one() -> bool:
            try:
                async with self.peers.stream(self.victim, method, path, body()) as response:
                    await response.read()
            except PeerError:
                return False
            return True

        return sum(await asyncio.gather(*(one() for _ in range(count))))

    async def leave_answers(self, path: str, body: bytes, count: int, looks: Callable[[], object]) -> None:
        """Make this many calls and read none of the answers; look once no more of them begin."""
        over, begun = asyncio.Event(), 0

        async def one() -> None:
            nonlocal begun
            with suppress(PeerError):
                async with self.peers.stream(self.victim, "POST", path, body):
                    begun += 1
                    await over.wait()

        tasks = [asyncio.create_task(one()) for _ in range(count)]
        try:
            async with asyncio.timeout(60):
                while not begun:
                    await asyncio.sleep(0.1)
            before = 0
            while before < begun:
                before = begun
                for _ in range(10):
                    await asyncio.to_thread(looks)
                    await asyncio.sleep(0.3)
        finally:
            over.set()
            await self.peers.close()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def stall_uploads(self, count: int, looks: Callable[[], object]) -> None:
        """Upload this many chunks of the largest size at a time, but for their last byte; look while the node holds them."""
        over, handed, refused = asyncio.Event(), 0, 0
        size = CHUNK_BYTES
        head = encode_header(ObjectHeader(bytes(32), RAW, 0, size, size, None, bytes(STORED_CHECK_BYTES), False))

        async def body() -> AsyncIterator[bytes]:
            nonlocal handed
            yield head + os.urandom(size - 1)
            handed += 1
            await over.wait()

        async def one() -> None:
            nonlocal refused
            try:
                async with self.peers.stream(self.victim, "PUT", "/v1/chunks?of=" + b"x".hex(), body()) as response:
                    await response.read()
            except PeerError:
                refused += 1

        tasks = [asyncio.create_task(one()) for _ in range(count)]
        try:
            async with asyncio.timeout(60):
                while handed + refused < count - MAX_REQUESTS_PER_PEER:
                    await asyncio.sleep(0.05)
            for _ in range(5):
                await asyncio.to_thread(looks)
        finally:
            over.set()
            await self.peers.close()
            await asyncio.gather(*tasks, return_exceptions=True)

"""Memory for requests that are being answered: who gets it, and who loses it again.

It is bounded for each peer and for all. The free part goes to the peer that holds least; of those that hold the same, to the one
that has got something longest ago, so that a peer with many requests costs another the wait for one. While a request waits for
longer than WINDOW_S, the slowest one of the peers that hold more ends: that which moved least, in that time, for what its peer
holds. So peers that drip keep nobody out, and while nobody waits, a slow stream goes on.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from membership.identity import NodeId, short_id
from mesh.rpc.paced_socket import PacedSocket

MAX_REQUESTS_PER_PEER = 16  # at a time; tunnels are not counted
# More than a paused stream takes between two pieces (`departure_transfers.BREATH_S`); two are less than `streams.IDLE_S`.
WINDOW_S = 8.0

log = logging.getLogger(__name__)


class Held:
    """What a request holds, once it is `granted`.

    `transport`: of its connection, which ends with it. `waits`: this node waits for the peer, so it may be ended.
    """

    def __init__(self, peer: NodeId, size: int, transport: asyncio.BaseTransport | None) -> None:
        self.peer, self.size, self.waits = peer, size, True
        self.granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.since_s = time.monotonic()  # that it waits; then, that it holds
        self.ended = False
        self._transport, self._before = transport, 0

    def look(self) -> None:
        self._before = self._carried()

    def moved(self) -> int:
        """Return the bytes that its connection has carried since the last look, both ways."""
        return self._carried() - self._before

    def end(self) -> None:
        log.info("a request of node %s is ended: it is slow, and others wait", short_id(self.peer))
        self.ended = True
        if isinstance(self._transport, asyncio.WriteTransport):
            self._transport.abort()

    def _carried(self) -> int:
        sock = None if self._transport is None else self._transport.get_extra_info("socket")
        info = None if sock is None else PacedSocket(sock).info()
        return 0 if info is None else info.acked + info.received


class Memory:
    """`per_peer` and `total`: most bytes of one peer and of all."""

    def __init__(self, per_peer: int, total: int) -> None:
        self._per_peer, self._total = per_peer, total
        self._bytes: Counter[NodeId] = Counter()
        self._requests: Counter[NodeId] = Counter()
        self._turns: Counter[NodeId] = Counter()  # which of all grants was a peer's last, while it has requests
        self._grants = 0
        self._waiting: list[Held] = []
        self._held: list[Held] = []
        self._window: asyncio.TimerHandle | None = None  # runs while a request waits
        self._window_began_s = 0.0

    @asynccontextmanager
    async def hold(
        self, peer: NodeId, size: int, transport: asyncio.BaseTransport | None = None
    ) -> AsyncIterator[Held]:
        """Hold `size` bytes for the block; wait until they are free. HTTP 503 if the peer has too many requests."""
        if self._requests[peer] >= MAX_REQUESTS_PER_PEER:
            raise web.HTTPServiceUnavailable(text=f"more than {MAX_REQUESTS_PER_PEER} requests at a time")
        self._requests[peer] += 1
        held = Held(peer, size, transport)
        self._waiting.append(held)
        try:
            self._share()
            await held.granted
            yield held
        finally:
            if held in self._held:
                self._held.remove(held)
                self._bytes[peer] -= size
            else:
                self._waiting.remove(held)
            self._requests[peer] -= 1
            if not self._requests[peer]:
                del self._turns[peer]
            self._requests += Counter()  # drops zeros
            self._bytes += Counter()
            self._share()

    def _share(self) -> None:
        """Grant what is free to the peers that hold least, and watch what is held while others wait."""
        while fitting := [one for one in self._waiting if self._fits(one)]:
            held = min(fitting, key=lambda one: (self._bytes[one.peer], self._turns[one.peer]))
            self._grants += 1
            self._turns[held.peer] = self._grants
            self._waiting.remove(held)
            self._held.append(held)
            self._bytes[held.peer] += held.size
            held.since_s = time.monotonic()
            if not held.granted.done():  # else its request was cancelled just now
                held.granted.set_result(None)
        if self._window is not None and not self._waiting:
            self._window.cancel()
            self._window = None
        elif self._window is None and self._waiting:
            self._watch()

    def _fits(self, one: Held) -> bool:
        return self._may_have(one) and self._bytes.total() + one.size <= self._total

    def _may_have(self, one: Held) -> bool:
        return self._bytes[one.peer] + one.size <= self._per_peer

    def _watch(self) -> None:
        self._window_began_s = time.monotonic()
        for one in self._held:
            one.look()
        self._window = asyncio.get_running_loop().call_later(WINDOW_S, self._judge)

    def _judge(self) -> None:
        """End the slowest requests for those that have waited through the window."""
        free, having = self._total - self._bytes.total(), Counter(self._bytes)
        for one in self._held:
            if one.ended:
                free, having[one.peer] = free + one.size, having[one.peer] - one.size
        for waiting in sorted(self._waiting, key=lambda one: self._bytes[one.peer]):
            if waiting.since_s <= self._window_began_s and self._may_have(waiting):
                ending = self._slowest(having, waiting.peer, waiting.size - free)
                for one in ending or ():
                    one.end()
                    free, having[one.peer] = free + one.size, having[one.peer] - one.size
                if ending is not None:
                    free, having[waiting.peer] = free - waiting.size, having[waiting.peer] + waiting.size
        self._watch()

    def _slowest(self, having: Counter[NodeId], peer: NodeId, size: int) -> list[Held] | None:
        """Return the slowest requests, `size` bytes together, of peers that hold more than this one; None if they are not enough.

        Those that were not watched through the window are spared.
        """
        watched = [one for one in self._held if one.waits and not one.ended and one.since_s <= self._window_began_s]
        lot = [one for one in watched if one.size and having[one.peer] > having[peer]]
        lot.sort(key=lambda one: (one.moved() / self._bytes[one.peer], -self._bytes[one.peer]))
        freed, slowest = 0, list[Held]()
        while freed < size and lot:
            slowest.append(lot.pop(0))
            freed += slowest[-1].size
        return slowest if freed >= size else None


HELD: web.RequestKey[Held] = web.RequestKey("held", Held)

"""Pacing of outgoing streams: the open streams, the rate of each, and the task that enforces it.

`ckptstore.pacing` decides the rates and the kernel enforces them (`paced_socket.py`). Connections are reused, so each belongs to
the stream that took it last and is released when that ends. If the network edge shapes outgoing traffic (`mesh.network`), streams
set their traffic class.
"""

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import AsyncIterable, Iterator
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import aiohttp
import msgspec
from aiohttp.abc import AbstractStreamWriter

from ckptstore.pacing import FLOOR_BPS, MOST_SHARE, TICK_S, Pace, Rtt
from membership.identity import NodeId
from mesh.network.shaping import BULK, HOST, URGENT
from mesh.rpc.memory import Memory
from mesh.rpc.paced_socket import PacedSocket

HELD = 0.8  # a stream that sent this part of what its pace allowed was limited by the pace, not by the network (own choice)
FEW = 8  # background streams at a time (own choice)
GIVEN, GIVEN_TO_ONE = 16, 8  # answers that are streams, at a time; each reads 9 MiB ahead (own choice)
DRAIN_S = 5.0  # for the kernel to send the rest of an answer before its connection is released (own choice)


class Cargo(msgspec.Struct, frozen=True):
    """The content and receiver of a stream, as far as known; `size` in bytes, 0 if unknown."""

    kind: str = ""
    to: NodeId | None = None
    job: bytes = b""
    size: int = 0


UNKNOWN = Cargo()


class Wire:
    """The outgoing streams of a node. `budget_bps`: bytes per second for all background streams; None is no limit."""

    def __init__(self, budget_bps: float | None = None) -> None:
        self.budget_bps = budget_bps
        self.owners: WeakKeyDictionary[asyncio.BaseTransport, Lane] = WeakKeyDictionary()
        self.classed = False  # streams set their traffic class
        self.giving = Memory(GIVEN_TO_ONE, GIVEN)  # a stream counts one
        self.sent: Counter[str] = Counter()  # bytes acknowledged by peers in ended streams, by urgency
        self._open: list[Lane] = []

    @property
    def least_bps(self) -> float:
        """Return the rate that every stream gets at least while few are open."""
        return FLOOR_BPS if self.budget_bps is None else min(FLOOR_BPS, self.budget_bps / FEW / MOST_SHARE**2)

    @property
    def open(self) -> tuple["Lane", ...]:
        """Return the streams that have a connection, oldest first."""
        return tuple(self._open)

    def lane(self, pace: Pace, cargo: Cargo = UNKNOWN) -> "Lane":
        return Lane(self, pace, cargo)

    def share_bps(self, pace: Pace) -> float | None:
        """Return a stream's part of the budget.

        Background streams divide it by their shares, and get almost nothing while a stream has a deadline.
        """
        if pace.urgent or not self._open:
            return self.budget_bps
        others = [lane for lane in self._open if not lane.pace.urgent]
        share = None
        if self.budget_bps is not None:
            share = self.budget_bps * pace.share / max(pace.share, sum(lane.pace.share for lane in others))
        if len(others) < len(self._open):
            return FLOOR_BPS if share is None else min(FLOOR_BPS, share)
        return share

    @contextlib.contextmanager
    def taking(self, transport: asyncio.BaseTransport | None) -> Iterator[None]:
        """While a stream comes in on a connection, put our acknowledgements in the host's traffic class."""
        sock: Any = transport.get_extra_info("socket") if transport is not None else None
        if not self.classed or sock is None:
            yield
            return
        answering = PacedSocket(sock)
        answering.enter(HOST.priority)
        try:
            yield
        finally:
            if transport not in self.owners:  # no outgoing stream uses the connection
                answering.enter(0)

    @contextlib.contextmanager
    def listed(self, lane: "Lane") -> Iterator[None]:
        """Count a stream as open, and adjust the rates of all."""
        self._open.append(lane)
        self._retune()
        try:
            yield
        finally:
            self._open.remove(lane)
            self._retune()

    def _retune(self) -> None:
        for lane in self._open:
            lane.tick()


class Lane:
    """One stream. It starts when it has a connection: `bind`."""

    def __init__(self, wire: Wire, pace: Pace, cargo: Cargo) -> None:
        self.pace = pace
        self.cargo = cargo
        self.began_s = time.monotonic()
        self._wire = wire
        self._transport: asyncio.BaseTransport | None = None
        self._socket: PacedSocket | None = None
        self._stack = contextlib.ExitStack()
        self._ticking: asyncio.Task[None] | None = None
        self._base: int | None = None  # bytes acknowledged on the connection before this stream
        self.sent = 0  # bytes acknowledged by the peer
        self._rate: float | None = 0.0
        self._allowed, self._looked_at = 0.0, 0.0

    @property
    def urgency(self) -> str:
        return "urgent" if self.pace.urgent else "background"

    @property
    def held(self) -> bool:
        """Return whether its pace, not the network, limited it."""
        return 0 < HELD * self._allowed <= self.sent

    async def __aenter__(self) -> "Lane":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
        self._stack.close()
        mine = self._transport is not None and self._wire.owners.get(self._transport) is self
        info = self._socket.info() if mine and self._socket is not None else None
        if info is not None and self._base is not None:
            self.sent = info.acked - self._base
        self._wire.sent[self.urgency] += self.sent
        if self._socket is None or self._transport is None or not mine:
            return  # another request uses the connection already
        del self._wire.owners[self._transport]
        self._socket.release()

    def bind(self, transport: asyncio.BaseTransport | None) -> None:
        """Pace this connection from now on."""
        sock: Any = transport.get_extra_info("socket") if transport is not None else None
        if transport is None or sock is None or self._transport is transport:
            return
        self._transport, self._socket, self._base = transport, PacedSocket(sock), None
        self._looked_at = time.monotonic()
        self._wire.owners[transport] = self
        if self._ticking is None:
            self._stack.enter_context(self._wire.listed(self))
            self._ticking = asyncio.create_task(self._tick_on(), name="pace of a stream")

    def tick(self) -> None:
        """Measure the connection and set its rate."""
        if self._socket is None:
            return
        now, info = time.monotonic(), self._socket.info()
        rtt = None
        if info is not None:
            self._base = info.acked if self._base is None else self._base
            self.sent = info.acked - self._base
            rtt = Rtt(info.smoothed_s, info.least_s) if info.smoothed_s else None
        rate = self.pace.tick(now, self.sent, rtt, self._wire.share_bps(self.pace))
        self._allowed += math.inf if self._rate is None else (now - self._looked_at) * self._rate
        self._rate, self._looked_at = rate, now
        self._socket.limit(rate)
        if self._wire.classed:
            self._socket.enter((URGENT if self.pace.urgent else BULK).priority)

    async def drained(self) -> None:
        """Wait until the kernel has sent all data, at most DRAIN_S: released earlier, the rest would go out in a burst."""
        until = time.monotonic() + DRAIN_S
        while self._socket is not None and time.monotonic() < until:
            info = self._socket.info()
            if info is None or not info.not_sent or (self._transport is not None and self._transport.is_closing()):
                return
            await asyncio.sleep(TICK_S / 10)

    async def _tick_on(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.tick()


class PacedBody(aiohttp.AsyncIterablePayload):
    """A body that binds its lane to the connection on which it is written."""

    def __init__(self, value: AsyncIterable[bytes | memoryview], lane: Lane) -> None:
        super().__init__(value)  # type: ignore[arg-type]  # a socket takes memoryviews as well
        self._lane = lane

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        self._lane.bind(getattr(writer, "transport", None))
        await super().write_with_length(writer, content_length)

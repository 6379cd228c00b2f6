"""What this node sends of checkpoints: which streams are open, how fast each may go, and the task that holds it to that.

The rates are decided by `ckptstore.pacing`; the kernel keeps them (`pacedsocket.py`). Connections are kept and used again, so
each belongs to the stream that took it last, and is let go when that ends. Where the edge looks at what leaves (`mesh.edge`),
streams say of which of its classes they are.
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
from mesh.api.pacedsocket import PacedSocket
from mesh.edge.shaping import BULK, HOST, URGENT

HELD = 0.8  # of what its pace allowed: a stream that sent as much was held back by that, not by the network; ours
FEW = 8  # streams in the background at once; ours
DRAIN_S = 5.0  # for what the kernel still has of an answer, before its connection is let go; ours


class Cargo(msgspec.Struct, frozen=True):
    """What a stream brings to whom, as far as that is known; `size` in bytes, 0 if it is not."""

    kind: str = ""
    to: NodeId | None = None
    job: bytes = b""
    size: int = 0


UNKNOWN = Cargo()


class Wire:
    """`budget_bps`: for all streams in the background together; None is no limit."""

    def __init__(self, budget_bps: float | None = None) -> None:
        self.budget_bps = budget_bps
        self.owners: WeakKeyDictionary[asyncio.BaseTransport, Lane] = WeakKeyDictionary()
        self.classed = False  # whether streams say of which class they are
        self.sent: Counter[str] = Counter()  # bytes that peers have acknowledged, by urgency, of streams that are over
        self._open: list[Lane] = []

    @property
    def least_bps(self) -> float:
        """What every stream may count on, as long as not many are open."""
        return FLOOR_BPS if self.budget_bps is None else min(FLOOR_BPS, self.budget_bps / FEW / MOST_SHARE**2)

    @property
    def open(self) -> tuple["Lane", ...]:
        """The streams that have a connection now, the oldest first."""
        return tuple(self._open)

    def lane(self, pace: Pace, cargo: Cargo = UNKNOWN) -> "Lane":
        return Lane(self, pace, cargo)

    def share_bps(self, pace: Pace) -> float | None:
        """Its part of the budget: those in the background have theirs by their shares, and next to nothing while one has a
        deadline."""
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
        """While a stream comes in by it, what is answered is cut when checkpoints are; else it goes with the machine's own."""
        sock: Any = transport.get_extra_info("socket") if transport is not None else None
        if not self.classed or sock is None:
            yield
            return
        answering = PacedSocket(sock)
        answering.enter(HOST.priority)
        try:
            yield
        finally:
            if transport not in self.owners:  # no stream has the connection already
                answering.enter(0)

    @contextlib.contextmanager
    def listed(self, lane: "Lane") -> Iterator[None]:
        """Count it, and tell all that their parts have changed."""
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
    """One stream, from the moment it has a connection: `bind`."""

    def __init__(self, wire: Wire, pace: Pace, cargo: Cargo) -> None:
        self.pace = pace
        self.cargo = cargo
        self.began_s = time.monotonic()
        self._wire = wire
        self._transport: asyncio.BaseTransport | None = None
        self._socket: PacedSocket | None = None
        self._stack = contextlib.ExitStack()
        self._ticking: asyncio.Task[None] | None = None
        self._base: int | None = None  # bytes that others had sent on it
        self.sent = 0  # bytes that the peer has acknowledged
        self._rate: float | None = 0.0
        self._allowed, self._looked_at = 0.0, 0.0

    @property
    def urgency(self) -> str:
        return "urgent" if self.pace.urgent else "background"

    @property
    def held(self) -> bool:
        """Whether its pace, and not the network, has been what kept it from being faster."""
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
            return  # another request has it already
        del self._wire.owners[self._transport]
        self._socket.release()

    def bind(self, transport: asyncio.BaseTransport | None) -> None:
        """From now on the connection keeps to the pace."""
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
        """Look at the connection, and set its rate."""
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
        """Wait until the kernel has sent what it was given, or it takes too long: let go earlier, that would come in a burst."""
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

    async def write(self, writer: AbstractStreamWriter) -> None:
        """Used by aiohttp before 3.12."""
        self._lane.bind(getattr(writer, "transport", None))
        await super().write(writer)

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        self._lane.bind(getattr(writer, "transport", None))
        await super().write_with_length(writer, content_length)

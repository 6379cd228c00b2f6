"""Departure transfers: which of the checkpoints that must leave this node by a deadline may send.

One job's checkpoint sends at a time, in the order of `ckptstore.deadline`; the order is planned again when a checkpoint is
added, learns its size, or is done. One that is overtaken pauses in the middle of its stream, and sends a piece now and then
so that its connection is not taken for broken. One that has the turn and does not use it (its peer is slow, or writes to its
disk) lets the next send beside it.
"""

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ckptstore.deadline import Upload, feasible, plan
from ckptstore.pacing import Deadline, Load, aim, time_for
from mesh.checkpoints.loss_estimate import Urgency
from mesh.util.boottime import boot_s
from mesh.util.byte_text import amount

SILENT_S = 2.0  # without a piece, then the next sends beside it (own choice)
BREATH_S = 5.0  # between pieces of a paused stream, which counts as broken after 20 s (`streams.IDLE_S`)
LOOK_S = 0.25  # between looks at whether the turn is used (own choice)


class Stream:
    """A stream to one peer. `promised_bps`: what the peer has nearly always reached, if known."""

    def __init__(self, departure: "Departure", pace: Deadline, promised_bps: float | None, now: float) -> None:
        self.departure, self.pace, self.promised_bps = departure, pace, promised_bps
        self.moved_s = now  # time of the last piece
        self.stood_aside = False

    @property
    def waits(self) -> bool:
        """Tell whether another checkpoint has the turn."""
        return not self.departure.queue.may(self)

    async def turn(self) -> None:
        """Wait until the next piece may be sent."""
        await self.departure.queue.turn(self)
        self.moved_s = self.departure.queue.clock()

    def rests(self) -> None:
        """All is sent; what remains is the peer's work."""
        self.moved_s = -math.inf
        self.departure.queue.look()

    def uses_wire(self, now: float) -> bool:
        return now - self.moved_s < SILENT_S

    def may_breathe(self, now: float) -> bool:
        return now - self.moved_s >= BREATH_S


class Departure:
    """One checkpoint on its way to one or several peers: in parallel, or one after the other if not all can be in time."""

    def __init__(self, queue: "Departures", urgency: Urgency, now: float) -> None:
        self.queue, self.urgency = queue, urgency
        self.aim_s = aim(now, urgency.deadline_s)
        self.late = False
        self.streams: list[Stream] = []
        self._told = False

    @property
    def remaining(self) -> int:
        return sum(stream.pace.remaining for stream in self.streams)

    @contextmanager
    def stream(self, count: int, promised_bps: float | None, sent: int = 0) -> Iterator[Stream]:
        """Open a stream of `count` bytes, `sent` of them sent already."""
        pace = Deadline(count, lambda: self.queue.time_for(self), sent)
        stream = Stream(self, pace, promised_bps, self.queue.clock())
        self.streams.append(stream)
        self.queue.replan()
        try:
            yield stream
        finally:
            self.streams.remove(stream)
            self.queue.replan()

    def upload(self) -> Upload:
        """Return the upload for the plan. All streams share one port, so one after the other takes as long."""
        known = [stream.promised_bps for stream in self.streams if stream.promised_bps is not None]
        return Upload(self.urgency.weight, self.remaining, self.urgency.deadline_s, min(known, default=None))

    def before(self, stream: Stream) -> list[Stream]:
        """Return the streams of this checkpoint that go first: one whole copy is worth more than two halves."""
        if not self.late:
            return []
        line = sorted(self.streams, key=lambda one: one.pace.remaining)
        return line[: line.index(stream)] if stream in line else []

    def warn(self, now: float) -> None:
        """Warn the user, once, that the checkpoint will probably be late; not while the rate is unknown."""
        upload = self.upload()
        if self._told or upload.bps is None:
            return
        self._told = True
        window_s = max(0.0, upload.deadline_s - now)
        size, rate = amount(upload.bytes), amount(upload.bps)
        if feasible(upload.bytes, upload.bps, window_s):
            why = f"{size} must wait for checkpoints with which more would be lost, and {window_s:.0f} s are left"
        elif len(self.streams) == 1:
            why = f"{size} cannot reach another node in {window_s:.0f} s at {rate}/s"
        else:
            why = f"{size} cannot reach {len(self.streams)} other nodes in {window_s:.0f} s at {rate}/s"
        self.urgency.warn(why)


class Departures:
    """The departing checkpoints of one node. `clock`: seconds of CLOCK_BOOTTIME."""

    def __init__(self, clock: Callable[[], float] = boot_s) -> None:
        self.clock = clock
        self._open: list[Departure] = []
        self._order: list[Departure] = []  # checkpoints that know their size, in the order of the plan
        self._changed = asyncio.Event()

    @contextmanager
    def departure(self, urgency: Urgency) -> Iterator[Departure]:
        departure = Departure(self, urgency, self.clock())
        self._open.append(departure)
        try:
            yield departure
        finally:
            self._open.remove(departure)
            self.replan()

    def replan(self) -> None:
        now = self.clock()
        ready = [departure for departure in self._open if departure.streams]
        found = plan([departure.upload() for departure in ready], now)
        self._order = [ready[i] for i in found.order]
        for i, departure in enumerate(ready):
            departure.late = i in found.late
            if departure.late:
                departure.warn(now)
        self.look()

    def look(self) -> None:
        """Let waiting streams check again whether it is their turn."""
        self._changed.set()
        self._changed = asyncio.Event()

    def may(self, stream: Stream) -> bool:
        """Tell whether a stream may send: no stream before it uses the network, or its own connection needs a sign of life."""
        now = self.clock()
        ahead = stream.departure.before(stream)
        for departure in self._order:
            if departure is stream.departure:
                break
            ahead += departure.streams
        return stream.may_breathe(now) or not any(other.uses_wire(now) for other in ahead)

    async def turn(self, stream: Stream) -> None:
        while not self.may(stream):
            stream.stood_aside = True
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def need_bps(self) -> float:
        """Return the least bytes per second with which all checkpoints that can be in time are in time; infinity if one is
        overdue.

        Checkpoints that will be late anyway hold nobody else back.
        """
        now, total, need = self.clock(), 0, 0.0
        for departure in self._order:
            if departure.late:
                continue
            total += departure.remaining
            left_s = departure.aim_s - now
            if total:
                need = max(need, total / left_s if left_s > 0 else math.inf)
        return need

    def time_for(self, departure: Departure) -> float:
        """Return the seconds in which a checkpoint should be done, so that those behind it can be in time; 0 is as fast as
        possible.
        """
        now = self.clock()
        if departure not in self._order or any(other.late for other in self._order):
            return 0.0
        behind = self._order[self._order.index(departure) + 1 :]
        loads = [Load(other.remaining, other.aim_s - now) for other in behind]
        return time_for(Load(departure.remaining, departure.aim_s - now), loads)

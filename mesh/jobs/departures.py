"""Which of the checkpoints that must leave this node by a deadline has the wire: one job's at a time, in the order of
`ckptstore.deadline`, planned anew when one is added, learns its size, or is done.

One that is overtaken stands aside in the middle of its stream: it breathes now and then, so that its connection is not taken for
broken. One that has the wire and does not use it (its peer is slow, or is writing to its disk) lets the next go beside it.
"""

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ckptstore.deadline import Upload, feasible, plan
from ckptstore.pacing import Deadline, Load, aim, time_for
from mesh.amount import amount
from mesh.engine.alarm import boot_s
from mesh.jobs.stake import Urgency

SILENT_S = 2.0  # without a piece, after which the next goes beside it; ours
BREATH_S = 5.0  # between two pieces of one that stands aside; a stream is broken after 20 s (`streams.IDLE_S`); ours
LOOK_S = 0.25  # at whether the one with the wire uses it; ours


class Stream:
    """To one peer, which is promised to take `promised_bps`, if that is known."""

    def __init__(self, departure: "Departure", pace: Deadline, promised_bps: float | None, now: float) -> None:
        self.departure, self.pace, self.promised_bps = departure, pace, promised_bps
        self.moved_s = now  # when the last piece went
        self.stood_aside = False

    @property
    def waits(self) -> bool:
        """Whether another has the wire."""
        return not self.departure.queue.may(self)

    async def turn(self) -> None:
        """Wait until the next piece may go."""
        await self.departure.queue.turn(self)
        self.moved_s = self.departure.queue.clock()

    def rests(self) -> None:
        """What is left is its peer's work."""
        self.moved_s = -math.inf
        self.departure.queue.look()

    def uses_wire(self, now: float) -> bool:
        return now - self.moved_s < SILENT_S

    def may_breathe(self, now: float) -> bool:
        return now - self.moved_s >= BREATH_S


class Departure:
    """One checkpoint on its way, to one peer or several: side by side, or one after the other if not all can be in time."""

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
        """A stream of so many bytes, some of them sent already."""
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
        """As the plan sees it: all its streams leave by one port, one after the other would take as long."""
        known = [stream.promised_bps for stream in self.streams if stream.promised_bps is not None]
        return Upload(self.urgency.weight, self.remaining, self.urgency.deadline_s, min(known, default=None))

    def before(self, stream: Stream) -> list[Stream]:
        """Those of its own streams that go first: one whole copy is worth more than two halves."""
        if not self.late:
            return []
        line = sorted(self.streams, key=lambda one: one.pace.remaining)
        return line[: line.index(stream)] if stream in line else []

    def warn(self, now: float) -> None:
        """Tell its user, once, that it is likely to be late. What is not known is not told."""
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
    """Of one node. `clock`: seconds of CLOCK_BOOTTIME."""

    def __init__(self, clock: Callable[[], float] = boot_s) -> None:
        self.clock = clock
        self._open: list[Departure] = []
        self._order: list[Departure] = []  # of those that know their size
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
        """Let all who wait look again whether it is their turn."""
        self._changed.set()
        self._changed = asyncio.Event()

    def may(self, stream: Stream) -> bool:
        """Whether nobody who comes before it uses the wire, or it has to breathe."""
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
        """The least bytes a second with which all are in time that can be; infinity if one should have been already. For those
        that will be late nobody else is held back."""
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
        """Seconds in which it should be done, so that those behind it can be in time too; 0 is as fast as it goes."""
        now = self.clock()
        if departure not in self._order or any(other.late for other in self._order):
            return 0.0
        behind = self._order[self._order.index(departure) + 1 :]
        loads = [Load(other.remaining, other.aim_s - now) for other in behind]
        return time_for(Load(departure.remaining, departure.aim_s - now), loads)

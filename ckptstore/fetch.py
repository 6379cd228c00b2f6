"""Fetching chunks from several holders at once, so that all end together. No I/O; times are seconds of any clock.

Each source is asked for as much as it can send in its share of the time that is left, by what it has sent so far: large requests
at first, ever smaller ones towards the end (guided self-scheduling). When nothing is left to ask for, who is idle is asked also
for what a slower one still owes, and the first to deliver counts (BitTorrent's end game). A source that fails or sends wrong
bytes is dropped, and what it still owed goes to the others.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

FIRST_BYTES = 8 << 20  # of a source that has not sent anything yet; ours
LONGEST_S = 1.0  # that one request is to take, so that rates are learnt and a slow source is seen; ours
SHARE = 0.5  # of what is left that is asked for at once, over all sources; ours
LEARN = 0.5  # the weight of the last request in a source's rate; ours
SOONER = 0.8  # of a slow source's remaining time within which a second one must be done to be asked; ours


class Request(msgspec.Struct, frozen=True):
    source: bytes
    ids: tuple[bytes, ...]


class Cancel(msgspec.Struct, frozen=True):
    """All that this source still owed has come from others: its request is of no more use."""

    source: bytes


class Fetched(msgspec.Struct, frozen=True):
    """`problem` is empty when everything is here."""

    problem: str


Action = Request | Cancel | Fetched


class _Open(msgspec.Struct):
    """A request that is under way."""

    ids: tuple[bytes, ...]
    since: float
    size: int


class Fetch:
    """`missing` gives each chunk's length."""

    def __init__(self, missing: Mapping[bytes, int], sources: Sequence[bytes]) -> None:
        self._sizes = dict(missing)
        self._queue = list(missing)
        self._left = set(missing)
        self._sources = list(dict.fromkeys(sources))
        self._open: dict[bytes, _Open] = {}
        self._rates: dict[bytes, float] = {}
        self.dropped: dict[bytes, str] = {}

    @property
    def left_bytes(self) -> int:
        return sum(self._sizes[identity] for identity in self._left)

    def start(self, now: float) -> list[Action]:
        return self._assign(now)

    def arrived(self, source: bytes, ids: Iterable[bytes], now: float) -> list[Action]:
        """A request was answered with these; what it owed but did not give is asked of others."""
        got = set(ids)
        self._left -= got
        request = self._open.pop(source, None)
        if request is None:
            return self._assign(now)
        rate = request.size / max(1e-6, now - request.since)
        self._rates[source] = self._rates.get(source, rate) * (1 - LEARN) + rate * LEARN
        short = [identity for identity in request.ids if identity in self._left]
        if short:
            return self._drop(source, short, "did not send all that it was asked for", now)
        return self._assign(now)

    def failed(self, source: bytes, reason: str, now: float) -> list[Action]:
        request = self._open.pop(source, None)
        owed = [identity for identity in request.ids if identity in self._left] if request is not None else []
        return self._drop(source, owed, reason, now)

    def _drop(self, source: bytes, owed: list[bytes], reason: str, now: float) -> list[Action]:
        self.dropped[source] = reason
        if source in self._sources:
            self._sources.remove(source)
        asked = {identity for request in self._open.values() for identity in request.ids}
        self._queue = [identity for identity in owed if identity not in asked] + self._queue
        return self._assign(now)

    def _assign(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for source in [source for source, request in self._open.items() if self._left.isdisjoint(request.ids)]:
            del self._open[source]
            actions.append(Cancel(source))
        self._queue = [identity for identity in self._queue if identity in self._left]
        # The fastest first, so that what is left for the end goes to them.
        for source in sorted(self._sources, key=lambda source: -self._rates.get(source, 0.0)):
            if source in self._open:
                continue
            ids = self._next(source) if self._queue else self._again(source, now)
            if ids:
                size = sum(self._sizes[identity] for identity in ids)
                self._open[source] = _Open(tuple(ids), now, size)
                actions.append(Request(source, tuple(ids)))
        if not self._left:
            return [*actions, Fetched("")]
        if not self._open:
            reasons = "; ".join(dict.fromkeys(self.dropped.values())) or "nobody who has it can be reached"
            return [*actions, Fetched(f"{len(self._left)} chunks could not be fetched: {reasons}")]
        return actions

    def _next(self, source: bytes) -> list[bytes]:
        """From the queue as much as it can send while the others send theirs; one chunk at least."""
        rate, left = self._rates.get(source), sum(self._sizes[identity] for identity in self._queue)
        if rate is None:
            budget = min(FIRST_BYTES, SHARE * left / len(self._sources))
        else:
            together = sum(self._rates.get(other, rate) for other in self._sources)
            budget = min(rate * LONGEST_S, SHARE * left * rate / together)
        count, size = 1, self._sizes[self._queue[0]]
        while count < len(self._queue) and size + self._sizes[self._queue[count]] <= budget:
            size += self._sizes[self._queue[count]]
            count += 1
        taken, self._queue = self._queue[:count], self._queue[count:]
        return taken

    def _again(self, source: bytes, now: float) -> list[bytes]:
        """One chunk that another still owes, if this one would be done with it sooner: the last that it will get to."""
        rate = self._rates.get(source)
        asked = [identity for request in self._open.values() for identity in request.ids]
        best: tuple[float, bytes] | None = None
        for other, request in self._open.items():
            owed = [identity for identity in request.ids if identity in self._left and asked.count(identity) == 1]
            if not owed or rate is None:
                continue
            slow = self._rates.get(other)
            remaining = request.since + request.size / slow - now if slow else request.size / rate
            soon = self._sizes[owed[-1]] / rate
            if soon < SOONER * remaining and (best is None or remaining > best[0]):
                best = (remaining, owed[-1])
        return [best[1]] if best is not None else []

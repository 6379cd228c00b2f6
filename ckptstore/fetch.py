"""Multi-source fetch: requests chunks from several holders so that all finish together. No I/O; times are seconds of any clock.

Each request is as large as the source can send in its share of the remaining time, by its rate so far: large requests first,
smaller ones towards the end (guided self-scheduling). When no chunks are left to request, idle sources are asked again for
chunks that a slower source has not delivered, and the first delivery counts (BitTorrent's end game). A source that fails or
sends wrong bytes is dropped, and its outstanding chunks go to the others.

A *partial* source is still fetching the same chunks. It is asked which of them it has, now and then, and requested those only.
A few have a place at a time. One that has nothing which is missing makes way for the one that has waited longest: nodes that
only say that they fetch keep no others from being asked. From the first on, chunks are requested in random order, and those
first that the fewest partial sources have (BitTorrent's rarest first), so that those who fetch at the same time get different
ones from the whole sources. What is awaited comes in order but for that: it is so within each window.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from random import Random

import msgspec

FIRST_BYTES = 8 << 20  # first request to a source (own choice)
LONGEST_S = 1.0  # longest request, so that rates are measured and slow sources noticed (own choice)
AWAITED_BYTES, AWAITED_S = 4 << 20, 0.25  # instead, of chunks that are awaited (own choice)
WINDOW_BYTES = 256 << 20  # of awaited chunks that come in any order (own choice)
SHARE = 0.5  # share of the remaining bytes requested at once, over all sources (own choice)
LEARN = 0.5  # weight of the last request in a source's rate (own choice)
ASK_AGAIN_S = 1.0  # between questions to a partial source that has nothing which is missing (own choice)
VAIN = 15  # such questions in a row until it is dropped, if no other source sends anything (own choice)
PLACES = 8  # partial sources at a time, as many as whole ones (own choice)
SOONER = 0.8  # a second source is asked if it needs less than this share of the slow one's remaining time (own choice)


class Request(msgspec.Struct, frozen=True):
    source: bytes
    ids: tuple[bytes, ...]


class Ask(msgspec.Struct, frozen=True):
    """Ask a partial source, after a while, which of these chunks it has."""

    source: bytes
    ids: tuple[bytes, ...]
    delay_s: float


class Cancel(msgspec.Struct, frozen=True):
    """Cancel the request to this source: others have delivered its chunks."""

    source: bytes


class FetchEnded(msgspec.Struct, frozen=True):
    """`problem` is empty if every chunk has arrived."""

    problem: str


Action = Request | Ask | Cancel | FetchEnded


class _Open(msgspec.Struct):
    """A request in progress."""

    ids: tuple[bytes, ...]
    since: float
    size: int


class _Partial(msgspec.Struct):
    """`has`: the chunks that a partial source reported; `vain`: questions in a row without news; `asked`: one is open."""

    has: set[bytes]
    vain: int = -1  # the first question is asked at once
    asked: bool = False


class Fetch:
    """Fetches the chunks of `missing`, given with their lengths.

    `awaited`: somebody uses them as they come, so requests are short: chunks are there once their request has ended. `rng`: draws
    the order in which they are requested while there are partial sources; None: that of `missing`.
    """

    def __init__(
        self,
        missing: Mapping[bytes, int],
        sources: Sequence[bytes],
        awaited: bool = False,
        rng: Random | None = None,
    ) -> None:
        self._first_bytes, self._longest_s = (AWAITED_BYTES, AWAITED_S) if awaited else (FIRST_BYTES, LONGEST_S)
        self._sizes = dict(missing)
        self._queue = list(missing)
        self._left = set(missing)
        self._sources = list(dict.fromkeys(sources))
        self._open: dict[bytes, _Open] = {}
        self._rates: dict[bytes, float] = {}
        self._partial: dict[bytes, _Partial] = {}  # those with a place
        self._waiting: dict[bytes, _Partial] = {}  # for a place, the longest first
        starts = accumulate(missing.values(), initial=0)
        self._windows = (
            {one: start // WINDOW_BYTES for one, start in zip(missing, starts, strict=False)} if awaited else {}
        )
        self._rng = rng
        self._shuffled = False
        self._copies = Counter[bytes]()  # of a chunk, at partial sources
        self.dropped: dict[bytes, str] = {}

    @property
    def left_bytes(self) -> int:
        return sum(self._sizes[identity] for identity in self._left)

    @property
    def all_requested(self) -> bool:
        """Return whether no chunk is left to request for the first time."""
        return not self._queue

    def start(self, now: float) -> list[Action]:
        return self._assign(now)

    def join(self, sources: Iterable[bytes], now: float) -> list[Action]:
        """Say who the partial sources are now."""
        new = (source for source in sources if source not in self._sources and source not in self.dropped)
        there = dict.fromkeys(new)
        waiting = {source: partial for source, partial in self._waiting.items() if source in there}
        self._waiting = waiting | {source: _Partial(set()) for source in there if source not in waiting}
        return self._assign(now) if self._seat() else []

    def _seat(self) -> bool:
        """Give free places to the partial sources that have waited longest; tell whether there were any."""
        new = list(self._waiting)[: PLACES - len(self._partial)]
        if new and not self._shuffled and self._rng is not None:
            self._rng.shuffle(self._queue)
            self._shuffled = True
        for source in new:
            self._partial[source] = partial = self._waiting.pop(source)
            self._sources.append(source)
            self._copies.update(partial.has)
        if new:
            self._sort()
        return bool(new)

    def _unseat(self, source: bytes) -> _Partial:
        partial = self._partial.pop(source)
        self._sources.remove(source)
        self._copies.subtract(partial.has)
        return partial

    def told(self, source: bytes, ids: Iterable[bytes], now: float) -> list[Action]:
        """Handle an answer of a partial source: these chunks are there."""
        partial = self._partial[source]
        new = self._left.intersection(ids) - partial.has
        partial.has |= new
        partial.asked, partial.vain = False, 0 if new or self._open else partial.vain + 1
        self._copies.update(new)
        self._sort()
        if partial.vain >= VAIN:
            return self._drop(source, [], "has nothing that is missing", now)
        if self._waiting and partial.has.isdisjoint(self._queue):
            self._waiting[source] = self._unseat(source)
            self._seat()
        return self._assign(now)

    def _sort(self) -> None:
        self._queue.sort(key=lambda identity: (self._windows.get(identity, 0), self._copies[identity]))

    def arrived(self, source: bytes, ids: Iterable[bytes], now: float) -> list[Action]:
        """Handle an answer with these chunks; a source that sent fewer than requested is dropped."""
        got = set(ids)
        self._left -= got
        request = self._open.pop(source, None)
        if request is None:
            return self._assign(now)
        rate = request.size / max(1e-6, now - request.since)
        self._rates[source] = self._rates.get(source, rate) * (1 - LEARN) + rate * LEARN
        short = [identity for identity in request.ids if identity in self._left]
        if short:
            return self._drop(source, short, "did not send all requested chunks", now)
        return self._assign(now)

    def came(self, ids: Iterable[bytes]) -> None:
        """Chunks have come by another way: they are not requested any more."""
        self._left -= set(ids)

    def failed(self, source: bytes, reason: str, now: float) -> list[Action]:
        request = self._open.pop(source, None)
        owed = [identity for identity in request.ids if identity in self._left] if request is not None else []
        return self._drop(source, owed, reason, now)

    def _drop(self, source: bytes, owed: list[bytes], reason: str, now: float) -> list[Action]:
        self.dropped[source] = reason
        if source in self._partial:
            self._unseat(source)
            self._seat()
        elif source in self._sources:
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
        # The fastest first, so that they get the last chunks.
        for source in sorted(self._sources, key=lambda source: -self._rates.get(source, 0.0)):
            partial = self._partial.get(source)
            if source in self._open or (partial is not None and partial.asked):
                continue
            ids = self._next(source) if self._queue else self._again(source, now)
            if ids:
                size = sum(self._sizes[identity] for identity in ids)
                self._open[source] = _Open(tuple(ids), now, size)
                actions.append(Request(source, tuple(ids)))
            elif partial is not None and self._queue:
                partial.asked = True
                actions.append(Ask(source, tuple(self._queue), 0.0 if partial.vain < 0 else ASK_AGAIN_S))
        if not self._left:
            return [*actions, FetchEnded("")]
        if not self._open and not any(partial.asked for partial in self._partial.values()):
            reasons = "; ".join(dict.fromkeys(self.dropped.values())) or "no holder can be reached"
            return [*actions, FetchEnded(f"{len(self._left)} chunks could not be fetched: {reasons}")]
        return actions

    def _next(self, source: bytes) -> list[bytes]:
        """Take from the queue what the source can send while the others send theirs, at least one chunk that it has."""
        partial = self._partial.get(source)
        queue = self._queue if partial is None else [identity for identity in self._queue if identity in partial.has]
        rate, left = self._rates.get(source), sum(self._sizes[identity] for identity in queue)
        if rate is None:
            budget = min(self._first_bytes, SHARE * left / len(self._sources))
        else:
            together = sum(self._rates.get(other, rate) for other in self._sources)
            budget = min(rate * self._longest_s, SHARE * left * rate / together)
        taken, size = list[bytes](), 0
        for identity in queue:
            size += self._sizes[identity]
            if taken and size > budget:
                break
            taken.append(identity)
        if partial is None:
            del self._queue[: len(taken)]
        else:
            gone = set(taken)
            self._queue = [identity for identity in self._queue if identity not in gone]
        return taken

    def _again(self, source: bytes, now: float) -> list[bytes]:
        """Return the last outstanding chunk of the slowest source, if this source would deliver it sooner."""
        rate, partial = self._rates.get(source), self._partial.get(source)
        asked = [identity for request in self._open.values() for identity in request.ids]
        best: tuple[float, bytes] | None = None
        for other, request in self._open.items():
            owed = [
                identity
                for identity in request.ids
                if identity in self._left
                and asked.count(identity) == 1
                and (partial is None or identity in partial.has)
            ]
            if not owed or rate is None:
                continue
            slow = self._rates.get(other)
            remaining = request.since + request.size / slow - now if slow else request.size / rate
            soon = self._sizes[owed[-1]] / rate
            if soon < SOONER * remaining and (best is None or remaining > best[0]):
                best = (remaining, owed[-1])
        return [best[1]] if best is not None else []

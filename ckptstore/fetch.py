"""Fetching chunks from several holders at once: one queue, the least busy source next. No I/O.

A source that fails or sends wrong bytes is dropped, and what it still owed goes to the others.
"""

from collections.abc import Sequence

import msgspec

BATCH_CHUNKS = 8  # 32 MiB a request: streamed, and small enough that the end is shared between sources


class Request(msgspec.Struct, frozen=True):
    source: bytes
    ids: tuple[bytes, ...]


class Fetched(msgspec.Struct, frozen=True):
    """`problem` is empty when everything is here."""

    problem: str


class Fetch:
    def __init__(self, missing: Sequence[bytes], sources: Sequence[bytes]) -> None:
        self._queue = list(dict.fromkeys(missing))
        self._sources = list(dict.fromkeys(sources))
        self._out: dict[bytes, tuple[bytes, ...]] = {}
        self.dropped: dict[bytes, str] = {}

    def start(self) -> list[Request | Fetched]:
        return self._assign()

    def arrived(self, source: bytes, ids: Sequence[bytes]) -> list[Request | Fetched]:
        """A request was answered; what it owed but did not give is asked for again."""
        owed = self._out.pop(source, ())
        short = [identity for identity in owed if identity not in set(ids)]
        if short:
            return self._drop(source, short, "did not send all that it was asked for")
        return self._assign()

    def failed(self, source: bytes, reason: str) -> list[Request | Fetched]:
        return self._drop(source, list(self._out.pop(source, ())), reason)

    def _drop(self, source: bytes, owed: list[bytes], reason: str) -> list[Request | Fetched]:
        self.dropped[source] = reason
        if source in self._sources:
            self._sources.remove(source)
        self._queue = owed + self._queue
        return self._assign()

    def _assign(self) -> list[Request | Fetched]:
        requests: list[Request | Fetched] = []
        for source in self._sources:
            if self._queue and source not in self._out:
                share = max(1, min(BATCH_CHUNKS, -(-len(self._queue) // max(1, len(self._sources)))))
                self._out[source] = tuple(self._queue[:share])
                del self._queue[:share]
                requests.append(Request(source, self._out[source]))
        if requests or self._out:
            return requests
        if self._queue:
            reasons = "; ".join(dict.fromkeys(self.dropped.values())) or "nobody who has it can be reached"
            return [Fetched(f"{len(self._queue)} chunks could not be fetched: {reasons}")]
        return [Fetched("")]

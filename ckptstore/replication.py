"""Getting a checkpoint onto k peers: which ones, in which order, and what to say when one fails. No I/O.

The peers the user chose come first; when one is gone, full, refuses or is too slow, the next of the fallback takes its place and
the user is told. One that is only slow goes on, and counts if it is done in time. A peer counts only when it has answered after
its own fsync (invariant I6).
"""

from collections.abc import Mapping, Sequence

import msgspec


class Ask(msgspec.Struct, frozen=True):
    """Ask `peer` which chunks it lacks, send those, then the manifest."""

    peer: bytes


class Settled(msgspec.Struct, frozen=True):
    """Nothing more will happen. `short` says why fewer than asked hold it, empty if enough do."""

    holders: tuple[bytes, ...]
    short: str


class StandIn(msgspec.Struct, frozen=True):
    """`peer` holds it in place of `missed`, whom the user chose."""

    peer: bytes
    missed: bytes
    reason: str


class Replication:
    """`gone`: why some of the chosen are not even asked."""

    def __init__(
        self, chosen: Sequence[bytes], fallback: Sequence[bytes], want: int, gone: Mapping[bytes, str] | None = None
    ) -> None:
        self._chosen = list(dict.fromkeys(chosen))
        self.failures: dict[bytes, str] = {peer: why for peer, why in (gone or {}).items() if peer in self._chosen}
        waiting = [*self._chosen, *(peer for peer in dict.fromkeys(fallback) if peer not in self._chosen)]
        self._waiting = [peer for peer in waiting if peer not in self.failures]
        # Everyone the user named gets a copy, even if fewer would do.
        self._want = max(want, len(self._chosen))
        self._busy: set[bytes] = set()
        self._slow: dict[bytes, str] = {}
        self.holders: list[bytes] = []

    def start(self) -> list[Ask | Settled]:
        return self._fill()

    def durable(self, peer: bytes) -> list[Ask | Settled]:
        """`peer` has the manifest and every chunk on its disk."""
        if self._over(peer):
            self.holders.append(peer)
        return self._fill()

    def failed(self, peer: bytes, reason: str) -> list[Ask | Settled]:
        if self._over(peer):
            self.failures[peer] = reason
        return self._fill()

    def slow(self, peer: bytes, reason: str) -> list[Ask | Settled]:
        """It has been at it for too long: another is asked besides, and the first to be done counts."""
        if peer in self._busy:
            self._busy.discard(peer)
            self._slow[peer] = reason
        return self._fill()

    def enough(self, reason: str) -> list[Ask | Settled]:
        """Whoever holds it by now has to do; nothing happens if nobody does."""
        return [Settled(tuple(self.holders), self._short(reason))] if self.holders else []

    @property
    def stand_ins(self) -> list[StandIn]:
        """Holders the user did not choose, and whose places they took."""
        others = [peer for peer in self.holders if peer not in self._chosen]
        reasons = self.failures | self._slow
        missed = [peer for peer in self._chosen if peer in reasons]
        return [StandIn(peer, one, reasons[one]) for peer, one in zip(others, missed, strict=False)]

    def _over(self, peer: bytes) -> bool:
        there = peer in self._busy or peer in self._slow
        self._busy.discard(peer)
        self._slow.pop(peer, None)
        return there

    def _fill(self) -> list[Ask | Settled]:
        asks: list[Ask | Settled] = []
        while len(self.holders) + len(self._busy) < self._want and self._waiting:
            peer = self._waiting.pop(0)
            self._busy.add(peer)
            asks.append(Ask(peer))
        if asks or (len(self.holders) < self._want and (self._busy or self._slow)):
            return asks
        short = ""
        if len(self.holders) < self._want:
            reasons = "; ".join(dict.fromkeys(self.failures.values())) or "no other node has room for checkpoints"
            short = self._short(reasons)
        return [Settled(tuple(self.holders), short)]

    def _short(self, reason: str) -> str:
        return f"on {len(self.holders)} of {self._want} peers: {reason}"

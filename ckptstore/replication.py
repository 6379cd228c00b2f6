"""Getting a checkpoint onto k peers: which ones, in which order, and what to say when one fails. No I/O.

The peers the user chose come first; when one is gone, full or refuses, the next of the fallback takes its place and the
user is told. A peer counts only when it has answered after its own fsync (invariant I6).
"""

from collections.abc import Sequence

import msgspec


class Ask(msgspec.Struct, frozen=True):
    """Ask `peer` which chunks it lacks, send those, then the manifest."""

    peer: bytes


class Settled(msgspec.Struct, frozen=True):
    """Nothing more will happen. `short` says why fewer than asked hold it, empty if enough do."""

    holders: tuple[bytes, ...]
    short: str


class Replication:
    def __init__(self, chosen: Sequence[bytes], fallback: Sequence[bytes], want: int) -> None:
        self._chosen = list(dict.fromkeys(chosen))
        self._waiting = [*self._chosen, *(peer for peer in dict.fromkeys(fallback) if peer not in self._chosen)]
        # Everyone the user named gets a copy, even if fewer would do.
        self._want = max(want, len(self._chosen))
        self._busy: set[bytes] = set()
        self.holders: list[bytes] = []
        self.failures: dict[bytes, str] = {}

    def start(self) -> list[Ask | Settled]:
        return self._fill()

    def durable(self, peer: bytes) -> list[Ask | Settled]:
        """`peer` has the manifest and every chunk on its disk."""
        if peer in self._busy:
            self._busy.discard(peer)
            self.holders.append(peer)
        return self._fill()

    def failed(self, peer: bytes, reason: str) -> list[Ask | Settled]:
        if peer in self._busy:
            self._busy.discard(peer)
            self.failures[peer] = reason
        return self._fill()

    @property
    def stand_ins(self) -> list[bytes]:
        """Holders the user did not choose."""
        return [peer for peer in self.holders if self._chosen and peer not in self._chosen]

    def _fill(self) -> list[Ask | Settled]:
        asks: list[Ask | Settled] = []
        while len(self.holders) + len(self._busy) < self._want and self._waiting:
            peer = self._waiting.pop(0)
            self._busy.add(peer)
            asks.append(Ask(peer))
        if asks or self._busy:
            return asks
        short = ""
        if len(self.holders) < self._want:
            reasons = "; ".join(dict.fromkeys(self.failures.values())) or "no other node has room for checkpoints"
            short = f"on {len(self.holders)} of {self._want} peers: {reasons}"
        return [Settled(tuple(self.holders), short)]

"""Replication plan: the peers that get copies of a checkpoint, in order, and the retry of a failed copy elsewhere. No I/O.

The peers that the user chose come first. If one is gone, full, refuses or is too slow, the next fallback peer takes its place,
and the user is informed. A slow peer continues, and counts if it finishes in time. A peer counts only when it has answered
after its own fsync (invariant I6).
"""

from collections.abc import Mapping, Sequence

import msgspec


class CopyTo(msgspec.Struct, frozen=True):
    """Ask `peer` which chunks it lacks, send those, then the manifest."""

    peer: bytes


class Settled(msgspec.Struct, frozen=True):
    """The replication has ended. `short` is the reason for too few copies, empty if there are enough."""

    holders: tuple[bytes, ...]
    short: str


class Substitute(msgspec.Struct, frozen=True):
    """`peer` holds a copy in place of `missed`, which the user chose."""

    peer: bytes
    missed: bytes
    reason: str


class Replication:
    """Places `want` copies, and one on each chosen peer. `gone`: chosen peers that are not available, with the reason."""

    def __init__(
        self, chosen: Sequence[bytes], fallback: Sequence[bytes], want: int, gone: Mapping[bytes, str] | None = None
    ) -> None:
        self._chosen = list(dict.fromkeys(chosen))
        self.failures: dict[bytes, str] = {peer: why for peer, why in (gone or {}).items() if peer in self._chosen}
        waiting = [*self._chosen, *(peer for peer in dict.fromkeys(fallback) if peer not in self._chosen)]
        self._waiting = [peer for peer in waiting if peer not in self.failures]
        # Each peer that the user named gets a copy, even if fewer are enough.
        self._want = max(want, len(self._chosen))
        self._busy: set[bytes] = set()
        self._slow: dict[bytes, str] = {}
        self.holders: list[bytes] = []

    def start(self) -> list[CopyTo | Settled]:
        return self._fill()

    def durable(self, peer: bytes) -> list[CopyTo | Settled]:
        """Record that `peer` has the manifest and every chunk on its disk."""
        if self._finish(peer):
            self.holders.append(peer)
        return self._fill()

    def retry_elsewhere(self, peer: bytes, reason: str) -> list[CopyTo | Settled]:
        """Record that the copy to `peer` failed, and start one on the next peer instead."""
        if self._finish(peer):
            self.failures[peer] = reason
        return self._fill()

    def slow(self, peer: bytes, reason: str) -> list[CopyTo | Settled]:
        """Start a copy on another peer as well; the first one to finish counts."""
        if peer in self._busy:
            self._busy.discard(peer)
            self._slow[peer] = reason
        return self._fill()

    def enough(self, reason: str) -> list[CopyTo | Settled]:
        """End the replication with the present copies; no effect if there are none."""
        return [Settled(tuple(self.holders), self._short(reason))] if self.holders else []

    @property
    def substitutes(self) -> list[Substitute]:
        """Holders that took the place of chosen peers."""
        others = [peer for peer in self.holders if peer not in self._chosen]
        reasons = self.failures | self._slow
        missed = [peer for peer in self._chosen if peer in reasons]
        return [Substitute(peer, one, reasons[one]) for peer, one in zip(others, missed, strict=False)]

    def _finish(self, peer: bytes) -> bool:
        """Remove a peer from those in progress; False if it was not."""
        active = peer in self._busy or peer in self._slow
        self._busy.discard(peer)
        self._slow.pop(peer, None)
        return active

    def _fill(self) -> list[CopyTo | Settled]:
        actions: list[CopyTo | Settled] = []
        while len(self.holders) + len(self._busy) < self._want and self._waiting:
            peer = self._waiting.pop(0)
            self._busy.add(peer)
            actions.append(CopyTo(peer))
        if actions or (len(self.holders) < self._want and (self._busy or self._slow)):
            return actions
        short = ""
        if len(self.holders) < self._want:
            reasons = "; ".join(dict.fromkeys(self.failures.values())) or "no other node has space for checkpoints"
            short = self._short(reasons)
        return [Settled(tuple(self.holders), short)]

    def _short(self, reason: str) -> str:
        return f"on {len(self.holders)} of {self._want} peers: {reason}"

"""Rumours waiting to be told: fewest transmissions first, then the longest, then the newest (memberlist's queue.go).

A packet's room is split so that membership news can never starve state, nor the reverse (memberlist issue 299).
"""

from math import ceil, log10

from sortedcontainers import SortedKeyList

from membership.wire import GossipKind

MEMBER_SHARE = 0.6  # at most this share of a packet, while records wait
RECORD_MULTIPLIER = 2  # half of memberlist's: what a rumour of state misses, lane 2 repairs
ITEM_OVERHEAD = 12  # msgpack framing of one item, generously


class Rumour:
    __slots__ = ("kind", "name", "number", "sealed", "transmits")

    def __init__(self, kind: GossipKind, name: bytes, sealed: bytes, number: int) -> None:
        self.kind: GossipKind = kind
        self.name = name
        self.sealed = sealed
        self.number = number
        self.transmits = 0


class RumourQueue:
    def __init__(self, retransmit_multiplier: int, capacity: int = 4096) -> None:
        self._multiplier = retransmit_multiplier
        self._capacity = capacity
        self._queue = SortedKeyList(key=lambda r: (r.transmits, -len(r.sealed), -r.number))
        self._by_name: dict[tuple[GossipKind, bytes], Rumour] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, kind: GossipKind, name: bytes, sealed: bytes) -> None:
        """Tell this, instead of anything older about the same name."""
        self._discard((kind, name))
        if len(self._queue) >= self._capacity:
            worst = self._queue[-1]
            self._discard((worst.kind, worst.name))
        self._count += 1
        rumour = Rumour(kind, name, sealed, self._count)
        self._queue.add(rumour)
        self._by_name[kind, name] = rumour

    def take(self, room: int, members: int) -> tuple[tuple[GossipKind, bytes], ...]:
        """Rumours that fit into `room` bytes, each counted as told once more."""
        rounds = ceil(log10(members + 1)) if members > 0 else 1
        limits = {"member": self._multiplier * rounds, "record": RECORD_MULTIPLIER * rounds}
        has_records = any(rumour.kind == "record" for rumour in self._queue)
        member_room = int(room * MEMBER_SHARE) if has_records else room
        chosen: list[Rumour] = []
        used = 0
        for kind, bound in (("member", member_room), ("record", room)):
            for rumour in self._queue:
                size = len(rumour.sealed) + ITEM_OVERHEAD
                if rumour.kind == kind and used + size <= bound:
                    chosen.append(rumour)
                    used += size
        for rumour in chosen:
            self._queue.remove(rumour)
            rumour.transmits += 1
            if rumour.transmits >= limits[rumour.kind]:
                del self._by_name[rumour.kind, rumour.name]
            else:
                self._queue.add(rumour)
        return tuple((rumour.kind, rumour.sealed) for rumour in chosen)

    def _discard(self, key: tuple[GossipKind, bytes]) -> None:
        known = self._by_name.pop(key, None)
        if known is not None:
            self._queue.remove(known)

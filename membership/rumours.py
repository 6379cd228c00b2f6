"""Rumour queue: urgent rumours first, then fewest transmissions, then longest, then newest (memberlist's queue.go).

The space of a packet is shared so that membership news cannot starve state, nor the reverse (memberlist issue 299).
"""

from math import ceil, log10
from operator import attrgetter

from sortedcontainers import SortedKeyList

from membership.wire import GossipKind

MEMBER_SHARE = 0.6  # at most this share of a packet, while records wait
RECORD_MULTIPLIER = 2  # half of memberlist's: lane 2 repairs a missed rumour
ITEM_OVERHEAD = 12  # msgpack framing of one item, generously
MAX_MISFITS = 4  # a packet counts as full after this many rumours did not fit

Key = tuple[GossipKind, bytes]


class Rumour:
    __slots__ = ("kind", "name", "number", "order", "sealed", "transmits", "urgent")

    def __init__(self, kind: GossipKind, name: bytes, sealed: bytes, number: int, urgent: bool) -> None:
        self.kind: GossipKind = kind
        self.name = name
        self.sealed = sealed
        self.number = number
        self.urgent = urgent
        self.transmits = 0
        self.order = self._order()

    def mark_sent(self) -> None:
        """Count a transmission. This changes its order, so it must not be in a queue."""
        self.transmits += 1
        self.order = self._order()

    def _order(self) -> tuple[bool, int, int, int]:
        return (self.transmits >= 2 or not self.urgent, self.transmits, -len(self.sealed), -self.number)

    @property
    def size(self) -> int:
        return len(self.sealed) + ITEM_OVERHEAD


class RumourQueue:
    def __init__(self, retransmit_multiplier: int, capacity: int = 4096) -> None:
        self._multiplier = retransmit_multiplier
        self._capacity = capacity
        self._queues = {"member": _queue(), "record": _queue()}
        self._by_name: dict[Key, Rumour] = {}
        self._count = 0
        self.waiting_bytes = 0

    def __len__(self) -> int:
        return len(self._by_name)

    def add(self, kind: GossipKind, name: bytes, sealed: bytes, urgent: bool = False) -> None:
        """Queue a rumour; it replaces an older one with the same name."""
        self._discard((kind, name))
        if len(self) >= self._capacity:
            worst = max((queue[-1] for queue in self._queues.values() if queue), key=lambda rumour: rumour.transmits)
            self._discard((worst.kind, worst.name))
        self._count += 1
        rumour = Rumour(kind, name, sealed, self._count, urgent)
        self._queues[kind].add(rumour)
        self._by_name[kind, name] = rumour
        self.waiting_bytes += rumour.size

    def rounds(self, members: int) -> int:
        """Return log10 of the mesh's size: the factor in the number of transmissions."""
        return ceil(log10(members + 1)) if members > 0 else 1

    def take(self, space: int, members: int) -> tuple[tuple[GossipKind, bytes], ...]:
        """Return rumours that fit into `space` bytes, and count a transmission of each."""
        if not self._by_name:
            return ()
        rounds = self.rounds(members)
        member_space = int(space * MEMBER_SHARE) if self._queues["record"] else space
        chosen: list[Rumour] = []
        used = 0
        for kind, bound in (("member", member_space), ("record", space)):
            misfits = 0
            for rumour in self._queues[kind]:
                if used + rumour.size <= bound:
                    chosen.append(rumour)
                    used += rumour.size
                elif (misfits := misfits + 1) >= MAX_MISFITS:
                    break
        for rumour in chosen:
            queue = self._queues[rumour.kind]
            queue.remove(rumour)
            rumour.mark_sent()
            full = rumour.kind == "member" or rumour.urgent
            if rumour.transmits >= rounds * (self._multiplier if full else RECORD_MULTIPLIER):
                del self._by_name[rumour.kind, rumour.name]
                self.waiting_bytes -= rumour.size
            else:
                queue.add(rumour)
        return tuple((rumour.kind, rumour.sealed) for rumour in chosen)

    def _discard(self, key: Key) -> None:
        known = self._by_name.pop(key, None)
        if known is not None:
            self._queues[known.kind].remove(known)
            self.waiting_bytes -= known.size


def _queue() -> "SortedKeyList[Rumour]":
    return SortedKeyList(key=attrgetter("order"))

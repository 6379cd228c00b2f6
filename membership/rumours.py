"""Rumours waiting to be told: urgent ones, then fewest transmissions, then the longest, then the newest (memberlist's queue.go).

A packet's room is split so that membership news can never starve state, nor the reverse (memberlist issue 299).
"""

from math import ceil, log10
from operator import attrgetter

from sortedcontainers import SortedKeyList

from membership.wire import GossipKind

MEMBER_SHARE = 0.6  # at most this share of a packet, while records wait
RECORD_MULTIPLIER = 2  # half of memberlist's: what a rumour of state misses, lane 2 repairs
ITEM_OVERHEAD = 12  # msgpack framing of one item, generously
MISFITS = 4  # rumours that did not fit, after which a packet counts as full

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

    def told(self) -> None:
        """Once more. Not while it is in a queue, whose order this changes."""
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
        """Tell this, instead of anything older about the same name."""
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
        return ceil(log10(members + 1)) if members > 0 else 1

    def take(self, room: int, members: int) -> tuple[tuple[GossipKind, bytes], ...]:
        """Rumours that fit into `room` bytes, each counted as told once more."""
        if not self._by_name:
            return ()
        rounds = self.rounds(members)
        member_room = int(room * MEMBER_SHARE) if self._queues["record"] else room
        chosen: list[Rumour] = []
        used = 0
        for kind, bound in (("member", member_room), ("record", room)):
            misfits = 0
            for rumour in self._queues[kind]:
                if used + rumour.size <= bound:
                    chosen.append(rumour)
                    used += rumour.size
                elif (misfits := misfits + 1) >= MISFITS:
                    break
        for rumour in chosen:
            queue = self._queues[rumour.kind]
            queue.remove(rumour)
            rumour.told()
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

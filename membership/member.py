"""Member table: this node's view of each member, and the one function that changes it.

Views are ordered by (epoch, incarnation, rank of the state): newer evidence wins, and at equal age the worse state wins. So
applying a set of evidence in any order, any number of times, gives the same table (invariants M2 and M3,
docs/reference/protocol.md).
"""

from hashlib import blake2b
from random import Random
from typing import Literal

import msgspec

from membership.wire import Alive, AnyEvidence, Dead, Left, Suspect

State = Literal["alive", "suspect", "dead", "left"]
_RANK: dict[State, int] = {"alive": 0, "suspect": 1, "dead": 2, "left": 3}


class Member(msgspec.Struct, frozen=True):
    """`alive_sealed` is the member's newest own statement; `verdict_sealed` is the accusation or farewell that outranks it."""

    node: bytes
    host: str
    port: int
    epoch: int
    incarnation: int
    state: State
    draining: bool
    since: float
    alive_sealed: bytes
    verdict_sealed: bytes | None = None

    @property
    def order(self) -> tuple[int, int, int]:
        return (self.epoch, self.incarnation, _RANK[self.state])

    @property
    def present(self) -> bool:
        return self.state in {"alive", "suspect"}


class MemberTable:
    def __init__(self, max_members: int) -> None:
        self._members: dict[bytes, Member] = {}
        self._present: list[bytes] = []  # in arbitrary order, to sample from
        self._position: dict[bytes, int] = {}
        self.root = 0  # hash of the present members and their incarnations: equal tables have equal roots
        self._max_members = max_members

    def __len__(self) -> int:
        return len(self._members)

    def get(self, node: bytes) -> Member | None:
        return self._members.get(node)

    def all(self) -> list[Member]:
        return list(self._members.values())

    def present(self) -> list[Member]:
        return [self._members[node] for node in self._present]

    @property
    def present_count(self) -> int:
        return len(self._present)

    def draw(self, count: int, rng: Random, without: tuple[bytes, ...] = ()) -> list[Member]:
        """Draw up to `count` different present members, excluding `without`."""
        wanted = min(len(self._present), count + len(without))
        drawn = [node for node in rng.sample(self._present, wanted) if node not in without]
        return [self._members[node] for node in drawn[:count]]

    def apply(self, evidence: AnyEvidence, sealed: bytes, now: float) -> tuple[Member | None, Member] | None:
        """Apply verified evidence; return the member (before, after), or None if nothing changed."""
        before = self._members.get(evidence.node)
        after = self._merged(before, evidence, sealed, now)
        if after is None or after == before:
            return None
        if before is None and len(self._members) >= self._max_members:
            return None
        assert before is None or after.order > before.order, "M2: views only advance"
        self._members[evidence.node] = after
        if after.present and (before is None or not before.present):
            self._position[after.node] = len(self._present)
            self._present.append(after.node)
        elif before is not None and before.present and not after.present:
            self._remove(after.node)
        self.root ^= _fingerprint(before) ^ _fingerprint(after)
        return before, after

    def forget(self, node: bytes) -> None:
        member = self._members.pop(node, None)
        self.root ^= _fingerprint(member)
        if member is not None and member.present:
            self._remove(node)

    def _remove(self, node: bytes) -> None:
        """Remove a node from the present ones by moving the last one into the gap."""
        position, last = self._position.pop(node), self._present.pop()
        if last != node:
            self._present[position] = last
            self._position[last] = position

    @staticmethod
    def _merged(before: Member | None, evidence: AnyEvidence, sealed: bytes, now: float) -> Member | None:
        age = (evidence.epoch, evidence.incarnation)
        if isinstance(evidence, Alive):
            if before is not None and age <= (before.epoch, before.incarnation):
                return None
            since = before.since if before is not None and before.state == "alive" else now
            return Member(
                node=evidence.node,
                host=evidence.host,
                port=evidence.port,
                epoch=evidence.epoch,
                incarnation=evidence.incarnation,
                state="alive",
                draining=evidence.draining,
                since=since,
                alive_sealed=sealed,
            )
        if before is None:
            return None  # an unknown node cannot be accused
        state: State = {Suspect: "suspect", Dead: "dead", Left: "left"}[type(evidence)]  # type: ignore[assignment]
        if (*age, _RANK[state]) <= before.order:
            return None
        return msgspec.structs.replace(
            before,
            epoch=evidence.epoch,
            incarnation=evidence.incarnation,
            state=state,
            since=now,
            verdict_sealed=sealed,
        )


def _fingerprint(member: Member | None) -> int:
    """Return a member's part of the root. It ignores suspicion, which rumours spread, and is 0 unless the member is present."""
    if member is None or not member.present:
        return 0
    key = member.node + b"%d.%d" % (member.epoch, member.incarnation)
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "big")

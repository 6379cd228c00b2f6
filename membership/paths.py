"""Paths: which members get packets over TCP, because UDP does not reach them.

Each node decides for what it sends. Its evidence: probes that only TCP answered, packets that came over TCP, acks to pings over
UDP. Where UDP reaches nobody, as behind a firewall that lets one TCP port through, it counts as blocked for every member.
"""

from collections import Counter

from membership.identity import NodeId

MISSES = 2  # probes in a row that only TCP answered; a single one may be a lost packet (own choice)
RECHECK_S = 15.0  # as after a failed check of the address (`reachability`)
VERIFIED_S = 300.0  # a ping over UDP that was answered is believed for this long, as a check of the address
BLOCKED_S, BLOCKED_LEAST = 10.0, 2  # without an ack over UDP, and with this many members that get none (own choice)


class Paths:
    def __init__(self) -> None:
        self._misses: Counter[NodeId] = Counter()
        self._checks: dict[NodeId, float] = {}  # members that get packets over TCP, and when to try UDP again
        self._verified: dict[NodeId, float] = {}
        self._acked_at = -1e9

    def missed(self, node: NodeId, now: float) -> None:
        """Note a probe that was answered over TCP and not over UDP."""
        self._misses[node] += 1
        if self._misses[node] >= MISSES:
            self._verified.pop(node, None)
            self.came_by_stream(node, now)

    def came_by_stream(self, node: NodeId, now: float) -> None:
        """Note a packet from a member that came over TCP: UDP is probably blocked both ways."""
        if now - self._verified.get(node, -1e9) >= VERIFIED_S:
            self._checks.setdefault(node, now + RECHECK_S)

    def acked(self, node: NodeId, now: float) -> None:
        """Note an ack that came over UDP."""
        self._acked_at = now
        del self._misses[node]

    def reached(self, node: NodeId, now: float) -> None:
        """Note that a ping over UDP was answered: the member gets packets over UDP again."""
        self._verified[node] = now
        self.forget(node)

    def forget(self, node: NodeId) -> None:
        self._checks.pop(node, None)
        del self._misses[node]

    def by_stream(self, node: NodeId, now: float) -> bool:
        """Return True if packets to this member go over TCP."""
        return node in self._checks or self.blocked(now)

    def blocked(self, now: float) -> bool:
        """Return True if UDP seems to reach nobody."""
        return len(self._checks) >= BLOCKED_LEAST and now - self._acked_at > BLOCKED_S

    def due(self, now: float) -> list[NodeId]:
        """Return the members to try over UDP now; each is returned again after RECHECK_S."""
        due = [node for node, at in self._checks.items() if now >= at]
        self._checks |= dict.fromkeys(due, now + RECHECK_S)
        return due

"""Failure detector state: the probe order, the current probe, probes relayed for others, and Lifeguard's local health."""

from random import Random

from membership.member import Member, MemberTable

MAX_RELAYS = 1024
RELAY_S = 4.0  # an answer to a relayed ping is passed on for this long


class LocalHealth:
    """Lifeguard's local health multiplier (Dadgar et al. 2017, section IV-A; memberlist's awareness.go).

    A node that may be slow itself probes more slowly before it accuses others. The score is 0 for a healthy node; each missed
    nack and each refutation of an accusation against this node adds 1, each successful probe subtracts 1.
    """

    def __init__(self, maximum: int) -> None:
        self._maximum = maximum
        self.score = 0

    def degrade(self, by: int = 1) -> None:
        self.score = min(self._maximum - 1, self.score + by)

    def improve(self) -> None:
        self.score = max(0, self.score - 1)

    def scaled(self, interval_s: float) -> float:
        return interval_s * (self.score + 1)


class Probe:
    """A ping whose ack is awaited, directly or through relays."""

    def __init__(self, target: bytes, nonce: int) -> None:
        self.target = target
        self.nonce = nonce
        self.acked = False
        self.heard = False  # the target itself acked
        self.expected_nacks = 0
        self.nacks: set[bytes] = set()

    @property
    def missed_nacks(self) -> int:
        """Number of relays that were asked and sent nothing, 1 if none were asked.

        Silent relays suggest that this node's own packets are lost.
        """
        return max(0, self.expected_nacks - len(self.nacks)) if self.expected_nacks else 1


class ProbeOrder:
    """Round-robin over all members in shuffled order (SWIM section 4.3); a new member is inserted at a random position."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._remaining: list[bytes] = []

    def insert(self, node: bytes) -> None:
        self._remaining.insert(self._rng.randint(0, len(self._remaining)), node)

    def next(self, table: MemberTable, me: bytes) -> Member | None:
        while True:
            if not self._remaining:
                self._remaining = [member.node for member in table.present() if member.node != me]
                self._rng.shuffle(self._remaining)
                if not self._remaining:
                    return None
            member = table.get(self._remaining.pop())
            if member is not None and member.present:
                return member


class Relays:
    """Pings sent on behalf of others: (requester, nonce of its request), by our ping's nonce and by our TCP ping's target."""

    def __init__(self) -> None:
        self._by_nonce: dict[int, tuple[bytes, int, float]] = {}
        self._by_target: dict[bytes, tuple[bytes, int]] = {}

    def __len__(self) -> int:
        return len(self._by_nonce)

    def add(self, nonce: int, target: bytes, requester: bytes, request_nonce: int, now: float) -> None:
        self._by_nonce = {nonce: relay for nonce, relay in self._by_nonce.items() if relay[2] > now}
        if len(self._by_nonce) < MAX_RELAYS:
            self._by_nonce[nonce] = (requester, request_nonce, now + RELAY_S)
        self._by_target[target] = (requester, request_nonce)

    def take(self, nonce: int, now: float) -> tuple[bytes, int] | None:
        """Return, once, the requester and its nonce for an ack to our ping; None if there is none or it is too late."""
        relay = self._by_nonce.pop(nonce, None)
        return relay[:2] if relay is not None and relay[2] > now else None

    def take_stream(self, target: bytes) -> tuple[bytes, int] | None:
        """Return, once, the requester and its nonce for a finished TCP ping of `target`."""
        return self._by_target.pop(target, None)

"""Probing's bookkeeping: whose turn it is, the one probe under way, and the probes that are relayed for others."""

from random import Random

from membership.member import Member, MemberTable

RELAYS_AT_ONCE = 1024
RELAY_S = 4.0  # a relayed ping's answer is passed on for so long


class Probe:
    """One ping whose answer is awaited, by itself and through relays."""

    def __init__(self, target: bytes, nonce: int) -> None:
        self.target = target
        self.nonce = nonce
        self.acked = False
        self.expected_nacks = 0
        self.nacks: set[bytes] = set()

    @property
    def missed_nacks(self) -> int:
        """Relays that were asked and said nothing: if ours are the packets that get lost, the silence is ours."""
        return max(0, self.expected_nacks - len(self.nacks)) if self.expected_nacks else 1


class Round:
    """Each member once, in shuffled order, then all again (SWIM section 4.3); a newcomer gets a random place."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._left: list[bytes] = []

    def insert(self, node: bytes) -> None:
        self._left.insert(self._rng.randint(0, len(self._left)), node)

    def next(self, table: MemberTable, me: bytes) -> Member | None:
        while True:
            if not self._left:
                self._left = [member.node for member in table.present() if member.node != me]
                self._rng.shuffle(self._left)
                if not self._left:
                    return None
            member = table.get(self._left.pop())
            if member is not None and member.present:
                return member


class Relays:
    """For whom we ping somebody: (asker, the asker's nonce), by our ping's nonce and by the target of our TCP ping."""

    def __init__(self) -> None:
        self._by_nonce: dict[int, tuple[bytes, int, float]] = {}
        self._by_target: dict[bytes, tuple[bytes, int]] = {}

    def __len__(self) -> int:
        return len(self._by_nonce)

    def add(self, nonce: int, target: bytes, asker: bytes, asked: int, now: float) -> None:
        self._by_nonce = {nonce: relay for nonce, relay in self._by_nonce.items() if relay[2] > now}
        if len(self._by_nonce) < RELAYS_AT_ONCE:
            self._by_nonce[nonce] = (asker, asked, now + RELAY_S)
        self._by_target[target] = (asker, asked)

    def answered(self, nonce: int, now: float) -> tuple[bytes, int] | None:
        """Whom an ack to our ping is passed on to, and as an answer to what."""
        relay = self._by_nonce.pop(nonce, None)
        return relay[:2] if relay is not None and relay[2] > now else None

    def stream_over(self, target: bytes) -> tuple[bytes, int] | None:
        return self._by_target.pop(target, None)

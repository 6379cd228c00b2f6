"""How far this node's clock is off, by what its peers' acks say: their median is trusted, no single one.

Nothing of liveness or leases depends on wall clocks. Certificates, ends of records and signed calls do, within a grace of two
minutes: a node whose clock is further off is told so instead of vanishing (hivemind allows 3 s, and says nothing).
"""

from collections import OrderedDict
from statistics import median

CLOCK_WARN_S = 5.0  # of a difference that is worth a word
PEERS_KEPT = 64
PEERS_NEEDED = 3  # of two clocks nobody can tell which is wrong; with fewer the offset is shown, not judged


class Skew:
    def __init__(self) -> None:
        self._offsets: OrderedDict[bytes, float] = OrderedDict()

    def heard(self, node: bytes, offset_s: float) -> None:
        """`offset_s`: how far that node's clock is ahead of ours. Its ack says whole seconds."""
        self._offsets[node] = offset_s
        self._offsets.move_to_end(node)
        if len(self._offsets) > PEERS_KEPT:
            self._offsets.popitem(last=False)

    @property
    def offset_s(self) -> float | None:
        """How far the peers' clocks are ahead of ours; None before the first has answered."""
        if not self._offsets:
            return None
        return median(self._offsets.values())

    @property
    def peers(self) -> int:
        return len(self._offsets)

    @property
    def ours_is_wrong(self) -> bool:
        """Whether enough peers agree with each other, against us, by more than a second's rounding and the way here."""
        if len(self._offsets) < PEERS_NEEDED:
            return False
        middle = median(self._offsets.values())
        spread = median(abs(offset - middle) for offset in self._offsets.values())
        return abs(middle) > max(2.0, 4 * spread)

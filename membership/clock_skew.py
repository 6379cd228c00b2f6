"""Clock skew: the offset of this node's clock, as the median of what its peers' acks report.

Liveness and leases never depend on wall clocks. Certificates, section expiry and signed calls do, within a grace period of two
minutes. A node whose clock is further off gets a warning instead of silently vanishing (hivemind allows 3 s and reports nothing).
"""

from collections import OrderedDict
from statistics import median

CLOCK_WARN_S = 5.0  # offsets above this are reported
MAX_PEERS = 64
MIN_PEERS = 3  # two clocks cannot show which is wrong; with fewer peers the offset is shown but not judged


class ClockSkew:
    def __init__(self) -> None:
        self._offsets: OrderedDict[bytes, float] = OrderedDict()

    def add_sample(self, node: bytes, offset_s: float) -> None:
        """Record that the clock of `node` is `offset_s` ahead of ours. Acks carry whole seconds."""
        self._offsets[node] = offset_s
        self._offsets.move_to_end(node)
        if len(self._offsets) > MAX_PEERS:
            self._offsets.popitem(last=False)

    @property
    def offset_s(self) -> float | None:
        """Median of the peers' offsets (positive: they are ahead); None before the first sample."""
        if not self._offsets:
            return None
        return median(self._offsets.values())

    @property
    def peers(self) -> int:
        """Number of peers with a sample."""
        return len(self._offsets)

    @property
    def local_clock_is_wrong(self) -> bool:
        """True if enough peers agree with each other and differ from this node by more than rounding and network delay."""
        if len(self._offsets) < MIN_PEERS:
            return False
        middle = median(self._offsets.values())
        spread = median(abs(offset - middle) for offset in self._offsets.values())
        return abs(middle) > max(2.0, 4 * spread)

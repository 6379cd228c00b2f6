"""Token buckets by source: who floods is refused before any of its signatures is checked, and only he."""

from collections import OrderedDict

BURST = 8.0  # seconds' worth that may come at once
SOURCES_KEPT = 4096


class Buckets:
    def __init__(self, rate_s: float) -> None:
        self._rate_s = rate_s
        self._full = rate_s * BURST
        self._levels: OrderedDict[object, tuple[float, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._levels)

    def admit(self, source: object, now: float) -> bool:
        level, at = self._levels.pop(source, (self._full, now))
        level = min(self._full, level + (now - at) * self._rate_s)
        admitted = level >= 1.0
        self._levels[source] = (level - 1.0 if admitted else level, now)
        if len(self._levels) > SOURCES_KEPT:
            self._levels.popitem(last=False)
        return admitted

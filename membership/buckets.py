"""Token buckets by source: who floods is refused before any of its signatures is checked, and only he."""

BURST = 8.0  # seconds' worth that may come at once
SOURCES_KEPT = 4096


class Buckets:
    def __init__(self, rate_s: float) -> None:
        self._rate_s = rate_s
        self._full = rate_s * BURST
        self._levels: dict[object, list[float]] = {}  # level, when

    def __len__(self) -> int:
        return len(self._levels)

    def admit(self, source: object, now: float) -> bool:
        bucket = self._levels.get(source)
        if bucket is None:
            if len(self._levels) >= SOURCES_KEPT:
                del self._levels[next(iter(self._levels))]
            bucket = self._levels[source] = [self._full, now]
        level, at = bucket
        level = min(self._full, level + (now - at) * self._rate_s)
        bucket[1] = now
        if level < 1.0:
            bucket[0] = level
            return False
        bucket[0] = level - 1.0
        return True

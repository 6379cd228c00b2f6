"""Rate limits by network address: token buckets for incoming packets, and a minimum interval between push-pulls."""

from collections import OrderedDict

BURST_S = 8.0  # a full bucket holds the tokens of this many seconds
MAX_SOURCES = 4096
MAX_ADDRESSES = 4096


class TokenBuckets:
    """One token bucket per source, so that a flood is refused before its signatures are checked and costs only its sender."""

    def __init__(self, rate_per_s: float, capacity: float | None = None) -> None:
        self._rate_per_s = rate_per_s
        self._capacity = capacity or rate_per_s * BURST_S
        self._buckets: dict[object, list[float]] = {}  # source -> [tokens, time of the last update]

    def __len__(self) -> int:
        return len(self._buckets)

    def allow(self, source: object, now: float, needed: float = 1.0) -> bool:
        """Take tokens of `source`; False if its bucket has too few."""
        bucket = self._buckets.get(source)
        if bucket is None:
            if len(self._buckets) >= MAX_SOURCES:
                del self._buckets[next(iter(self._buckets))]
            bucket = self._buckets[source] = [self._capacity, now]
        tokens, updated = bucket
        tokens = min(self._capacity, tokens + (now - updated) * self._rate_per_s)
        bucket[1] = now
        if tokens < needed:
            bucket[0] = tokens
            return False
        bucket[0] = tokens - needed
        return True

    def give_back(self, source: object, taken: float = 1.0) -> None:
        """Return tokens that `source` took."""
        if bucket := self._buckets.get(source):
            bucket[0] = min(self._capacity, bucket[0] + taken)


class MinimumInterval:
    """At most one event per address and interval, whichever caller asks; the last MAX_ADDRESSES of them are remembered."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._last: OrderedDict[tuple[str, int], float] = OrderedDict()  # the oldest first

    def __len__(self) -> int:
        return len(self._last)

    def allow(self, address: tuple[str, int], now: float) -> bool:
        """Return True, and start the next interval, if the last one is over."""
        if now - self._last.get(address, -1e9) < self._interval_s:
            return False
        self._last[address] = now
        self._last.move_to_end(address)
        if len(self._last) > MAX_ADDRESSES:
            self._last.popitem(last=False)
        return True

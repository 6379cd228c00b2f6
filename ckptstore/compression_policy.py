"""Compression policy: compress a save if that takes less time than sending the bytes it saves.

If a share `s` of the bytes is saved, a link carries `L` bytes per second and the codec encodes `C` on each of `n` idle cores,
then encoding costs 1/(Cn) seconds per byte and saves s/L. The share and the codec's speed are running means over the saves. Pure.
"""

DEFAULT_LINK_BPS = 117e6  # before anything was sent: Gigabit Ethernet
DEFAULT_CODEC_BPS = 0.8e9  # of input on one core (measured: planes and zstd of a float32 state)
DEFAULT_SAVED = 0.2  # share of the bytes before the first compressed save (measured on the same state)
LEARNING_RATE = 0.3  # weight of the last save (own choice)
MIN_CORES = 0.5  # a save gets its share of a busy machine too
MIN_BYTES, MIN_S = 1 << 20, 1e-3  # smaller saves are not measured
RETRY_EVERY = 8  # a save is compressed after this many plain ones, since the state changes (own choice)


class CompressionPolicy:
    """Decides for one job on one node."""

    def __init__(self) -> None:
        self.saved, self.codec_bps = DEFAULT_SAVED, DEFAULT_CODEC_BPS
        self._plain_saves = 0

    def should_compress(self, link_bps: float | None, idle_cores: float) -> bool:
        """Decide for the next save. `link_bps` is in bytes per second, None if unknown."""
        cores = max(MIN_CORES, idle_cores)
        if self.saved / (link_bps or DEFAULT_LINK_BPS) > 1 / (self.codec_bps * cores):
            return True
        self._plain_saves += 1
        if self._plain_saves < RETRY_EVERY:
            return False
        self._plain_saves = 0
        return True

    def learn(self, raw_bytes: int, stored_bytes: int, seconds: float, cores: float) -> None:
        """Record a compressed save: new bytes before and after, its duration, and the cores used."""
        if raw_bytes < MIN_BYTES or seconds < MIN_S:
            return
        self.saved += LEARNING_RATE * (max(0.0, 1 - stored_bytes / raw_bytes) - self.saved)
        self.codec_bps += LEARNING_RATE * (raw_bytes / seconds / max(MIN_CORES, cores) - self.codec_bps)

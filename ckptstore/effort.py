"""Whether to look for fewer bytes: it pays while the link is slower than the codec, and the job leaves cores for it.

With share `s` of the bytes saved, a link of `L` bytes a second and a codec of `C` on each of `n` idle cores, encoding costs
1/(Cn) a byte and saves s/L. Shares and speeds are learnt from save to save; each is a running mean. Pure.
"""

LINK_BPS = 117e6  # while nothing has been sent: gigabit Ethernet
CODEC_BPS = 0.8e9  # of input, one core: planes and zstd of a float32 state (own measurement)
SAVED = 0.2  # of the bytes, while nothing has been saved: the same
LEARN = 0.3  # the weight of what was seen last; ours
LEAST_CORES = 0.5  # a save takes its share of a busy machine all the same
LEAST_BYTES, LEAST_S = 1 << 20, 1e-3  # of a save that says something
TRY_EVERY = 8  # saves without encoding, after which it is tried again, for what is in a state changes; ours


class Effort:
    """Of one job's saves on this node."""

    def __init__(self) -> None:
        self.saved, self.codec_bps = SAVED, CODEC_BPS
        self._plain_since = 0

    def pays(self, link_bps: float | None, idle_cores: float) -> bool:
        cores = max(LEAST_CORES, idle_cores)
        if self.saved / (link_bps or LINK_BPS) > 1 / (self.codec_bps * cores):
            return True
        self._plain_since += 1
        if self._plain_since < TRY_EVERY:
            return False
        self._plain_since = 0
        return True

    def learn(self, raw_bytes: int, stored_bytes: int, seconds: float, cores: float) -> None:
        """A save with encoding cut so many new bytes down to so many, in this time on so many cores."""
        if raw_bytes < LEAST_BYTES or seconds < LEAST_S:
            return
        self.saved += LEARN * (max(0.0, 1 - stored_bytes / raw_bytes) - self.saved)
        self.codec_bps += LEARN * (raw_bytes / seconds / max(LEAST_CORES, cores) - self.codec_bps)

"""The slow outer loop of a job's share: events measure kernels from outside, NVML sees the device. Pure."""

TRIM_MOST = 0.1  # of the share, either way
TRIM_GAIN = 0.2  # settles within some ten looks, and takes a fifth of a single sample's noise
RESOLUTION = 1.0  # per cent of the device: NVML tells whole ones
THROTTLED = 0.9  # of the rate that it may work at: then it is the rate that holds it
SAME = 0.5  # per cent of the device: nothing was lent or taken back meanwhile


class Trim:
    """An integral controller: by which factor a job's share is to be multiplied, so that NVML sees the share that was agreed.

    Only while the job is throttled: one that uses less because it wants less must not be given more. The integral itself is
    clamped, so that it is not wound up by an error that it cannot mend.
    """

    def __init__(self) -> None:
        self._integral = 0.0

    @property
    def factor(self) -> float:
        return 1.0 + self._integral

    def update(self, share: float, measured: float | None, throttled: bool) -> float:
        """One look: the share that was agreed and what NVML measured, per cent. The factor from now on."""
        if throttled and measured is not None and share > 0 and abs(share - measured) > RESOLUTION:
            moved = self._integral + TRIM_GAIN * (share - measured) / share
            self._integral = max(-TRIM_MOST, min(TRIM_MOST, moved))
        return self.factor


class Pace:
    """One job on one device: whether its share has held it since the last look, and what follows for its trim."""

    def __init__(self) -> None:
        self.trim = Trim()
        self._last: tuple[float, float, float] | None = None  # when, GPU time, share

    def step(self, now: float, gpu_s: float, in_force: float, measured: float | None) -> float:
        """A look at `now`, in seconds: GPU time it has had by events, its share in force, with what is lent and trimmed, and what
        NVML measured, in per cent. The factor from now on."""
        agreed = in_force / self.trim.factor
        last, self._last = self._last, (now, gpu_s, agreed)
        if last is None or now <= last[0] or agreed >= 100:
            return self.trim.factor
        rate = (gpu_s - last[1]) / (now - last[0]) * 100
        throttled = abs(agreed - last[2]) < SAME and rate >= THROTTLED * in_force
        return self.trim.update(agreed, measured, throttled)

"""Share control: corrects a job's GPU share by NVML's measurements, since events miss part of the time of kernels. Pure."""

CORRECTION_MAX = 0.1  # of the share, either way
GAIN = 0.2  # settles within about ten samples, and takes a fifth of the noise of a single sample
RESOLUTION = 1.0  # per cent of the device; NVML reports whole per cents
THROTTLED = 0.9  # of its allowed rate; above it the job is limited by its share
UNCHANGED = 0.5  # per cent of the device; a smaller change of the share is ignored


class IntegralController:
    """The factor for a job's share with which NVML measures the agreed share.

    It only acts while the job is throttled: a job that needs less must not get a higher share. The integral is clamped against
    windup.
    """

    def __init__(self) -> None:
        self._integral = 0.0

    @property
    def factor(self) -> float:
        return 1.0 + self._integral

    def update(self, share: float, measured: float | None, throttled: bool) -> float:
        """Handle a sample: the agreed share and NVML's measurement, in per cent. Return the new factor."""
        if throttled and measured is not None and share > 0 and abs(share - measured) > RESOLUTION:
            moved = self._integral + GAIN * (share - measured) / share
            self._integral = max(-CORRECTION_MAX, min(CORRECTION_MAX, moved))
        return self.factor


class ShareControl:
    """One job on one device: detects whether its share throttled it since the last sample, and updates the controller."""

    def __init__(self) -> None:
        self.controller = IntegralController()
        self._last: tuple[float, float, float] | None = None  # time, GPU time, agreed share

    def step(self, now: float, gpu_s: float, in_force: float, measured: float | None) -> float:
        """Handle a sample at `now`, in seconds, and return the new factor.

        `gpu_s`: the job's total GPU time by events; `in_force`: its current share with what is lent and the factor; `measured`:
        NVML's measurement; both in per cent.
        """
        agreed = in_force / self.controller.factor
        last, self._last = self._last, (now, gpu_s, agreed)
        if last is None or now <= last[0] or agreed >= 100:
            return self.controller.factor
        rate = (gpu_s - last[1]) / (now - last[0]) * 100
        throttled = abs(agreed - last[2]) < UNCHANGED and rate >= THROTTLED * in_force
        return self.controller.update(agreed, measured, throttled)

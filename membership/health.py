"""Lifeguard's local health (section IV-A): a node that seems slow itself probes more slowly before it accuses others."""


class Health:
    """0 is healthy; each missed nack or refutation of ourselves is +1, each good probe -1."""

    def __init__(self, maximum: int) -> None:
        self._maximum = maximum
        self.score = 0

    def worse(self, by: int = 1) -> None:
        self.score = min(self._maximum - 1, self.score + by)

    def better(self) -> None:
        self.score = max(0, self.score - 1)

    def scaled(self, interval_s: float) -> float:
        return interval_s * (self.score + 1)

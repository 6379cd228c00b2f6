"""What a job would lose if it ended now, and by when it has to be saved. Pure."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from placement.advert import WHOLE


class Urgency(msgspec.Struct, frozen=True):
    """`deadline_s`: of CLOCK_BOOTTIME; `weight`: GPU-seconds that are lost without it; `warn` tells the user."""

    deadline_s: float
    weight: float
    warn: Callable[[str], None] = lambda text: None


class Stake:
    """Of one attempt that uses `percent` of a GPU. Moments are seconds of CLOCK_BOOTTIME; `warn` tells the job's user."""

    def __init__(self, percent: int, warn: Callable[[str], None]) -> None:
        self._percent = percent
        self._warn = warn
        self._since_s = 0.0
        self._step: int | None = None
        self._saved = False
        self._deadline_s: float | None = None
        self._listening: list[Callable[[Urgency], None]] = []

    def began(self, now: float, saved: bool, step: int | None) -> None:
        """It computes from here on; `saved`: there is a checkpoint, of this step if the job tells steps."""
        self._since_s, self._saved, self._step = now, saved, step

    def noticed(self, now: float, grace_s: float) -> None:
        """It must be elsewhere in that time."""
        self._deadline_s = now + grace_s
        for hurry in list(self._listening):
            hurry(self._urgency(now, self._deadline_s))

    @contextmanager
    def heard_by(self, hurry: Callable[[Urgency], None], now: float) -> Iterator[None]:
        """Tell this one that there is notice: at once, or when it comes."""
        if self._deadline_s is not None:
            hurry(self._urgency(now, self._deadline_s))
        self._listening.append(hurry)
        try:
            yield
        finally:
            self._listening.remove(hurry)

    def stored(self, since_s: float, step: int | None) -> None:
        """What it had computed until then is on other nodes."""
        self.began(since_s, True, step)

    def _urgency(self, now: float, deadline_s: float) -> Urgency:
        return Urgency(deadline_s, self._percent * max(0.0, now - self._since_s) / WHOLE, self._tell)

    def _tell(self, why: str) -> None:
        if not self._saved:
            stands = "there is no earlier checkpoint"
        elif self._step is None:
            stands = "the last checkpoint stands"
        else:
            stands = f"the checkpoint of step {self._step} stands"
        self._warn(f"{why}; {stands}. It is tried all the same")

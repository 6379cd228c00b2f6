"""Loss estimate: the work that a job would lose if it ended now, and the deadline for saving it. Pure."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from mesh.util.text import plural
from placement.destination import worth
from placement.queue import DEFAULT_PRIORITY


class Urgency(msgspec.Struct, frozen=True):
    """`deadline_s` is of CLOCK_BOOTTIME; `weight` is what the work at risk is worth (`placement.destination`); `warn` informs
    the user.
    """

    deadline_s: float
    weight: float
    warn: Callable[[str], None] = lambda text: None


class Lost(msgspec.Struct, frozen=True):
    """Work since the last checkpoint that other nodes hold: in seconds, and in steps if the job reports them."""

    seconds: float
    steps: int | None = None

    @property
    def text(self) -> str:
        if self.steps is not None:
            return f"{plural(self.steps, 'step')} since its last checkpoint" if self.steps else ""
        return f"{self.seconds:.1f} s of work since its last checkpoint" if self.seconds >= 0.1 else ""


class LossEstimate:
    """The estimate of one attempt that uses `percent` of a GPU. Times are seconds of CLOCK_BOOTTIME; `warn` informs the job's
    user.
    """

    def __init__(self, percent: int, warn: Callable[[str], None], priority: int = DEFAULT_PRIORITY) -> None:
        self._percent, self._priority = percent, priority
        self._warn = warn
        self._since_s = 0.0
        self._step: int | None = None
        self._saved = False
        self._noticed_s = math.inf
        self._deadline_s: float | None = None
        self.share = 1.0  # share of the bandwidth for background checkpoints
        self._listening: list[Callable[[Urgency], None]] = []

    @property
    def deadline_s(self) -> float | None:
        """Return when the guest must be elsewhere, once it has notice."""
        return self._deadline_s

    def began(self, now: float, saved: bool, step: int | None) -> None:
        """The guest computes from now on. `saved`: there is a checkpoint, at `step` if the job reports steps."""
        self._since_s, self._saved, self._step = now, saved, step

    def stood_still(self, since_s: float, until_s: float) -> None:
        """The guest computed nothing in this time."""
        self._since_s += max(0.0, until_s - max(since_s, self._since_s))

    def lost(self, until_s: float, step: int | None) -> Lost:
        """Return the loss if nothing is saved of what was computed until `until_s`, when the guest had come to `step`."""
        known = step is not None and (self._step is not None or not self._saved)
        steps = max(0, (step or 0) - (self._step or 0)) if known else None
        return Lost(max(0.0, until_s - self._since_s) if self._since_s else 0.0, steps)

    def noticed(self, now: float, grace_s: float) -> None:
        """The guest must be elsewhere in `grace_s`."""
        self._noticed_s = min(self._noticed_s, now)
        self._deadline_s = now + grace_s
        for hurry in list(self._listening):
            hurry(self._urgency(now, self._deadline_s))

    @contextmanager
    def heard_by(self, hurry: Callable[[Urgency], None], now: float) -> Iterator[None]:
        """Call `hurry` with the urgency, at once or when there is notice."""
        if self._deadline_s is not None:
            hurry(self._urgency(now, self._deadline_s))
        self._listening.append(hurry)
        try:
            yield
        finally:
            self._listening.remove(hurry)

    def stored(self, since_s: float, step: int | None) -> None:
        """Other nodes hold the work done until `since_s`."""
        self.began(since_s, True, step)

    def yielded(self, now: float) -> None:
        """The guest ended as one that has saved, and nothing is newer than the last checkpoint.

        If that checkpoint was made after the notice, the guest did nothing since, however long its end took.
        """
        if self._since_s >= self._noticed_s:
            self._since_s = max(self._since_s, now)

    def _urgency(self, now: float, deadline_s: float) -> Urgency:
        return Urgency(deadline_s, worth(now - self._since_s, self._percent, self._priority), self._tell)

    def _tell(self, why: str) -> None:
        if not self._saved:
            stands = "there is no earlier checkpoint"
        elif self._step is None:
            stands = "the last checkpoint stands"
        else:
            stands = f"the checkpoint of step {self._step} stands"
        self._warn(f"{why}; {stands}. The transfer continues")

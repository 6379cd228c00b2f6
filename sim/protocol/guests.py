"""Guests of the simulated world: steps that they take, how they fail, and the limits that their jobs have. The seed decides."""

from collections.abc import Sequence
from random import Random
from typing import Any

import msgspec

from mesh.consensus.contract import EXIT_CHECKPOINTED, EXIT_NOT_FOUND, EXIT_TEMPFAIL
from mesh.consensus.reports import GuestExited, GuestFailed
from sim.protocol.faults import WorkPlan

GRACE_S = 5.0  # of jobs with limits: shorter than most of their runs
SAVED_EXIT = GuestExited(EXIT_CHECKPOINTED, False, False)
DONE = GuestExited(0, False, False)
BREAKDOWNS: Sequence[GuestExited | GuestFailed] = (  # of a job whose guests always fail
    GuestExited(1, False, False),
    GuestExited(139, False, False),  # SIGSEGV
    GuestExited(137, True, False),  # the kernel's out-of-memory killer
    GuestExited(EXIT_NOT_FOUND, False, False),
    GuestFailed("its image is not what it says", elsewhere=False),
)
HICCUPS: Sequence[GuestExited | GuestFailed] = (  # of one attempt
    *BREAKDOWNS[:3],
    GuestExited(EXIT_TEMPFAIL, False, False),
    SAVED_EXIT,
    GuestExited(1, False, False, fault="its GPU has fallen off the bus"),
    GuestFailed("no place is left on the disk", elsewhere=True),
)
MOST_HICCUPS = 4  # of one job: some of them do not spend its error budget


class Failure(msgspec.Struct, frozen=True):
    """How a guest ends once it has reached this step. A `GuestFailed` never starts."""

    step: int
    end: GuestExited | GuestFailed


class Work(msgspec.Struct):
    """What the guests of one job do: its length in steps, the step at which all fail, and how the next ones fail, each at once
    or some steps after its start.
    """

    steps: int
    breaks: Failure | None = None
    hiccups: list[Failure] = []
    ignores_notices: bool = False

    def next_failure(self, step: int) -> Failure | None:
        """Return how a guest that starts at this step will fail, if it will."""
        if self.hiccups:
            hiccup = self.hiccups.pop(0)
            return Failure(step + hiccup.step, hiccup.end)
        return self.breaks


class Guest:
    """A guest: one step a second, a checkpoint every few steps."""

    def __init__(
        self, work: Work, step: int, term: int, gang_member: bool = False, failure: Failure | None = None
    ) -> None:
        self.step = self.saved = step
        self.term = term
        self.gang_member = gang_member
        self.vacating = False
        self.ended = False
        self._work, self._failure = work, failure

    @property
    def done(self) -> bool:
        return self.step >= self._work.steps

    def end(self) -> GuestExited | None:
        """Return how the guest ends now, by itself or at a notice; None if it goes on."""
        failure = self._failure
        if failure is not None and self.step >= failure.step and isinstance(failure.end, GuestExited):
            return failure.end
        if self.done:
            return DONE
        return SAVED_EXIT if self.vacating and not self._work.ignores_notices else None


def draw_work(rng: Random, plan: WorkPlan, steps: int, unix_ms: int) -> tuple[Work, dict[str, Any]]:
    """Draw what the guests of a job do, and the fields of its spec that say what it may do."""
    work, fields = Work(steps), dict[str, Any]()
    if rng.random() < plan.failing:
        fields["error_budget"] = rng.randint(0, 3)
        if rng.random() < 0.3:
            fields["retry_codes"] = (1, 139)
        if rng.random() < 0.5:
            work.breaks = Failure(rng.choice([0, rng.randint(1, steps)]), rng.choice(BREAKDOWNS))
        else:
            times = rng.randint(1, MOST_HICCUPS)
            work.hiccups = [Failure(rng.choice([0, rng.randint(1, 12)]), rng.choice(HICCUPS)) for _ in range(times)]
    if rng.random() < plan.limited:
        fields["grace_s"] = GRACE_S
        if rng.random() < 0.5:
            fields["max_time_s"] = rng.uniform(5.0, 1.5 * steps)
        else:
            fields["deadline_unix_ms"] = unix_ms + int(1000 * rng.uniform(10.0, 3.0 * steps))
    work.ignores_notices = rng.random() < plan.stubborn
    return work, fields

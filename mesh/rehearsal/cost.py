"""What a departure cost a job: until it had left, until it ran again, and what it had to do again."""

from itertools import pairwise
from math import inf
from statistics import median
from typing import Literal

import msgspec

from mesh.rehearsal.facts import Departure, Play
from mesh.rehearsal.restart import step_of

KILLED = 137  # 128 + SIGKILL


class Cost(msgspec.Struct, frozen=True):
    """`left_s`: from the notice until it had saved, copied and gone; `lost_s`, `lost_steps`: work that is in no checkpoint;
    `back_s`: until it ran elsewhere; `first_step_s`: from there until it reported a step."""

    kind: Literal["noticed", "sudden"]
    attempt: int  # the one that was ended
    left_s: float | None
    lost_s: float
    lost_steps: int | None
    back_s: float
    first_step_s: float | None

    @property
    def total_s(self) -> float:
        return (self.left_s or 0.0) + self.lost_s + self.back_s


class Checkpoints(msgspec.Struct, frozen=True):
    """The newest one's bytes, and the seconds between two as they are committed."""

    bytes: int
    interval_s: float | None


def costs(play: Play) -> list[Cost]:
    found = [_cost(play, "noticed", play.noticed), _cost(play, "sudden", play.sudden)]
    return [cost for cost in found if cost is not None]


def saved_at_notice(play: Play) -> bool:
    """Whether it wrote a checkpoint after it had been told to go."""
    notice = play.noticed
    return notice is not None and any(c.written_unix >= notice.unix for c in play.of_attempt(notice.attempt))


def checkpoints(play: Play) -> Checkpoints | None:
    if not play.checkpoints:
        return None
    return Checkpoints(play.checkpoints[-1].bytes, interval_s(play))


def interval_s(play: Play) -> float | None:
    """The usual time between checkpoints; with one only, what it took to come to it."""
    between, until_first = [], []
    for attempt in play.attempts:
        # What it saved for its notice it would not have saved then.
        until = play.noticed.unix if play.noticed is not None and attempt.number == play.noticed.attempt else inf
        found = [checkpoint for checkpoint in play.of_attempt(attempt.number) if checkpoint.written_unix < until]
        between += [(b.written_unix - a.written_unix) / (b.seq - a.seq) for a, b in pairwise(found)]
        until_first += [found[0].written_unix - attempt.running_unix] if found else []
    gaps = [gap for gap in between if gap > 0] or [gap for gap in until_first if gap > 0]
    return median(gaps) if gaps else None


def _cost(play: Play, kind: Literal["noticed", "sudden"], departure: Departure | None) -> Cost | None:
    if departure is None:
        return None
    left, back = play.attempt(departure.attempt), play.attempt(departure.attempt + 1)
    kept = play.resumed_by(departure.attempt + 1)
    if left is None or back is None or kept is None or not back.running_unix:
        return None
    noticed = departure.grace_s is not None
    gone = left.ended_unix if noticed else departure.unix
    saved = noticed and saved_at_notice(play)
    # Who saves and leaves may tell its last step after that; who was killed worked on in vain.
    reached = left.step_at(kept.written_unix if saved and left.exit_code != KILLED else gone)
    at = step_of(play, kept)
    lost_steps = None if reached is None or at is None else max(0, reached - at)
    return Cost(
        kind=kind,
        attempt=departure.attempt,
        left_s=max(0.0, gone - departure.unix) if noticed else None,
        lost_s=0.0 if saved else max(0.0, (departure.unix if noticed else gone) - kept.written_unix),
        lost_steps=lost_steps,
        back_s=max(0.0, back.running_unix - gone),
        first_step_s=max(0.0, back.steps[0][0] - back.running_unix) if back.steps else None,
    )

"""A training that records who did which step and when, under any system.

`endure` sends it through a script of departures. Each departure takes the machine that runs it, at the same phase between two
checkpoints, and returns the machine once the training runs elsewhere.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Literal, Protocol, TypeVar

EVERY = 10  # steps from one checkpoint of count.py to the next
AWAY_S = 8.0  # a machine stays away at least this long
WAIT_S = 900.0

Kind = Literal["notice", "killed", "cut", "unasked"]
Script = Sequence[tuple[float, Kind]]
T = TypeVar("T")


@dataclass(frozen=True)
class Beat:
    at: float
    node: str
    attempt: int
    step: int


@dataclass(frozen=True)
class Trace:
    """A file with one line for each step, written by every process that runs the training, with this machine's clock."""

    path: Path

    def beats(self) -> list[Beat]:
        if not self.path.exists():
            return []
        lines = (line.split() for line in self.path.read_text().splitlines())
        return [Beat(float(at), node, int(attempt), int(step)) for at, node, attempt, step in lines]

    def newest(self) -> Beat | None:
        """Return the last step of the newest attempt; an older one may still run on a partitioned machine."""
        return max(self.beats(), key=lambda beat: (beat.attempt, beat.at), default=None)

    def attempts(self) -> list[list[Beat]]:
        """Return the steps of each attempt, in order."""
        beats = sorted(self.beats(), key=lambda beat: (beat.attempt, beat.at))
        return [list(group) for _, group in groupby(beats, key=lambda beat: beat.attempt)]

    def took_s(self) -> float:
        newest = self.newest()
        return newest.at - self.beats()[0].at if newest else 0.0


class System(Protocol):
    """A system that runs trainings on machines that come and go."""

    def submit(self, trace: Trace, steps: int, pace_s: float) -> str: ...

    def depart(self, kind: Kind, node: str) -> None: ...

    def come_back(self, kind: Kind, node: str) -> None: ...

    def result(self, job: str) -> str:
        """Return the result of the training; empty while it runs."""
        ...


@dataclass(frozen=True)
class Departure:
    kind: Kind
    attempt: int
    lost_steps: int  # done before the departure and again after it
    still_s: float  # from the departure to the first step elsewhere


@dataclass(frozen=True)
class Ordeal:
    departures: list[Departure]
    took_s: float
    right: bool  # both trainings ended with the right result
    calm_s: float  # duration of the same training on a machine that stayed
    unasked: int  # moves of either training outside of the script


def endure(
    system: System, directory: Path, script: Script, *, phase: int, steps: int, pace_s: float, digest: str
) -> Ordeal:
    """Run two trainings: one on a machine that stays, one on machines that depart `phase` steps after a checkpoint."""
    calm, trace = Trace(directory / "calm"), Trace(directory / "trace")
    beside = system.submit(calm, steps, pace_s)
    until(calm.newest, "the first training to run")
    job = system.submit(trace, steps, pace_s)
    begun = until(trace.newest, "the training to run").at
    departures = []
    for after, kind in script:
        beat = until(lambda due=begun + after: _ripe(trace, due, phase, pace_s), "the training to run on")  # type: ignore[misc]
        at = time.time()
        system.depart(kind, beat.node)
        departures.append(_survived(trace, kind, at, beat.attempt))
        until(lambda at=at: time.time() >= at + AWAY_S, "its machine to come back")  # type: ignore[misc]
        system.come_back(kind, beat.node)
    results = [until(lambda job=job: system.result(job), "the training to end") for job in (job, beside)]  # type: ignore[misc]
    departures += (more := _unasked(trace, departures))
    unasked = len(more) + len(_unasked(calm, []))
    return Ordeal(departures, trace.took_s(), results == [digest, digest], calm.took_s(), unasked)


def _ripe(trace: Trace, due: float, phase: int, pace_s: float) -> Beat | None:
    """Return the present step if a due departure may happen now."""
    beat = trace.newest()
    fresh = beat is not None and beat.at > time.time() - 2 * pace_s
    return beat if beat is not None and fresh and beat.at >= due and beat.step % EVERY == phase else None


def _survived(trace: Trace, kind: Kind, at: float, attempt: int) -> Departure:
    def again() -> Beat | None:
        return next((beat for beat in trace.beats() if beat.attempt > attempt), None)

    first = until(again, f"the training to go on ({kind})")
    # After a notice, a guest works until it has saved. Steps on a partitioned machine do not count as done.
    own = [beat for beat in trace.beats() if beat.attempt == attempt and (kind == "notice" or beat.at <= at)]
    return Departure(kind, attempt, max(beat.step for beat in own) - (first.step - 1), first.at - at)


def _unasked(trace: Trace, asked: list[Departure]) -> list[Departure]:
    known = {departure.attempt for departure in asked}
    return [
        Departure("unasked", old[0].attempt, old[-1].step - (new[0].step - 1), new[0].at - old[-1].at)
        for old, new in pairwise(trace.attempts())
        if old[0].attempt not in known
    ]


def until(ready: Callable[[], T | None], what: str, timeout_s: float = WAIT_S, look_s: float = 0.03) -> T:
    deadline = time.monotonic() + timeout_s
    while not (value := ready()):
        if time.monotonic() > deadline:
            raise SystemExit(f"waited {timeout_s:g} s for {what}")
        time.sleep(look_s)
    return value

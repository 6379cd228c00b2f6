"""Upload schedule of a leaving node: which uploads can meet their deadlines, and in which order to send them. No I/O.

It minimizes the weighted number of late jobs (1 || sum w U in scheduling notation) with the dynamic program of Lawler and Moore
(1969). That is pseudo-polynomial, so times are rounded to STEPS of the longest window; with equal deadlines it is a knapsack.
"""

import math
from collections.abc import Sequence

import msgspec

from ckptstore.pacing import AIM

STEPS = 4096  # per longest window; rounding costs 64 uploads at most 1.6 % of it (own choice)
LEAST_WEIGHT = 1e-6  # so that uploads without a loss are still sent


class Upload(msgspec.Struct, frozen=True):
    """`weight`: GPU-seconds lost without it; `bps`: promised rate of its link in bytes per second, None if unknown."""

    weight: float
    bytes: int
    deadline_s: float
    bps: float | None


class Plan(msgspec.Struct, frozen=True):
    """Indices of the uploads in sending order, and of those that will be late."""

    order: tuple[int, ...]
    late: frozenset[int]


def feasible(count: int, promised_bps: float | None, window_s: float, margin: float = AIM) -> bool:
    """Return True if `count` bytes can be sent in the share `margin` of the window, or if the rate is unknown."""
    return promised_bps is None or count <= promised_bps * window_s * margin


def plan(uploads: Sequence[Upload], now: float) -> Plan:
    """Order uploads: those that can be on time by deadline, then the others; ties by weight per second of sending (Smith 1956).

    `now` is on the clock of the deadlines.
    """
    times, deadlines = scaled(uploads, now)
    weights = [max(LEAST_WEIGHT, upload.weight) for upload in uploads]
    density = [weight / max(1e-9, cost) for weight, cost in zip(weights, seconds(uploads), strict=True)]
    early = on_time(times, deadlines, weights)
    late = frozenset(range(len(uploads))) - early
    first = sorted(early, key=lambda i: (deadlines[i], -density[i], i))
    return Plan((*first, *sorted(late, key=lambda i: (-density[i], i))), late)


def scaled(uploads: Sequence[Upload], now: float) -> tuple[list[int], list[int]]:
    """Return the duration (rounded up) and the window (rounded down) of each upload in steps.

    An unknown rate counts as the slowest known one, since all uploads share a port; if none is known, uploads take no time.
    """
    windows = [AIM * max(0.0, upload.deadline_s - now) for upload in uploads]
    step_s = max(windows, default=0.0) / STEPS
    slowest = _slowest(uploads)
    if step_s <= 0 or slowest <= 0:
        return [STEPS + 1] * len(uploads), [STEPS if step_s > 0 else 0] * len(uploads)
    taken = [upload.bytes / (slowest if upload.bps is None else upload.bps) for upload in uploads]
    # The tolerance keeps a rounding error from making an exact fit too long.
    times = [math.ceil(min(STEPS + 1, seconds / step_s - 1e-6)) for seconds in taken]
    return times, [math.floor(min(STEPS, window / step_s + 1e-6)) for window in windows]


def _slowest(uploads: Sequence[Upload]) -> float:
    return min((upload.bps for upload in uploads if upload.bps is not None), default=math.inf)


def seconds(uploads: Sequence[Upload]) -> list[float]:
    """Return the sending time of each upload, for comparison; their bytes if no rate is known."""
    slowest = _slowest(uploads)
    unknown = slowest if 0 < slowest < math.inf else 1.0
    return [upload.bytes / (upload.bps if upload.bps is not None and upload.bps > 0 else unknown) for upload in uploads]


_Taken = tuple[int, "_Taken | None"]
_State = tuple[int, float, _Taken | None]


def on_time(times: Sequence[int], deadlines: Sequence[int], weights: Sequence[float]) -> frozenset[int]:
    """Return the heaviest set of jobs that one machine can finish on time, with integer times and deadlines; exact."""
    # The states that can still be best: time used, weight, and the job added last, with the state before. Both numbers grow.
    states: list[_State] = [(0, 0.0, None)]
    for i in sorted(range(len(times)), key=lambda i: deadlines[i]):
        fit = (state for state in states if state[0] + times[i] <= deadlines[i])
        reached = [*states, *((used + times[i], weight + weights[i], (i, taken)) for used, weight, taken in fit)]
        states = []
        for state in sorted(reached, key=lambda state: (state[0], -state[1])):  # stable: the earlier of equal ones
            if not states or state[1] > states[-1][1]:
                states.append(state)
    found, taken = set[int](), states[-1][2]
    while taken is not None:
        i, taken = taken
        found.add(i)
    return frozenset(found)

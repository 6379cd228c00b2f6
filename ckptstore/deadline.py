"""Which uploads of a leaving node can be in time, and in which order to send them. No I/O.

The least weighted number of late jobs, 1 || sum w U in the scheduling notation, solved by the dynamic program of Lawler and Moore
(1969): pseudo-polynomial, so times are counted in STEPS of the longest window; with equal deadlines it is a knapsack.
"""

import math
from collections.abc import Sequence

import msgspec

from ckptstore.pacing import AIM

STEPS = 4096  # of the longest window; rounding costs 64 uploads 1.6 % of it at most; ours
LEAST_WEIGHT = 1e-6  # so that what is worth nothing is sent all the same


class Upload(msgspec.Struct, frozen=True):
    """`weight`: what is lost without it (GPU-seconds); `bps`: what its link is promised to carry, None if nobody knows."""

    weight: float
    bytes: int
    deadline_s: float
    bps: float | None


class Plan(msgspec.Struct, frozen=True):
    """Positions of uploads: all of them, the first to be sent first; and those that will be late."""

    order: tuple[int, ...]
    late: frozenset[int]


def feasible(count: int, promised_bps: float | None, window_s: float, margin: float = AIM) -> bool:
    """Whether so many bytes can go in `margin` of the window. Nobody is refused for what is not known."""
    return promised_bps is None or count <= promised_bps * window_s * margin


def plan(uploads: Sequence[Upload], now: float) -> Plan:
    """Those that can be on time by their deadlines, then the others; of equals, by weight for each second on the wire (Smith
    1956), as `placement.destination` has it. `now` on the deadlines' clock."""
    times, deadlines = scaled(uploads, now)
    weights = [max(LEAST_WEIGHT, upload.weight) for upload in uploads]
    density = [weight / max(1e-9, cost) for weight, cost in zip(weights, seconds(uploads), strict=True)]
    early = on_time(times, deadlines, weights)
    late = frozenset(range(len(uploads))) - early
    first = sorted(early, key=lambda i: (deadlines[i], -density[i], i))
    return Plan((*first, *sorted(late, key=lambda i: (-density[i], i))), late)


def scaled(uploads: Sequence[Upload], now: float) -> tuple[list[int], list[int]]:
    """How long each takes and has, in whole steps: never less than it takes, never more than it has.

    One whose link is not known counts with the slowest that is, for all leave by the same port; if none is, it takes no time.
    """
    windows = [AIM * max(0.0, upload.deadline_s - now) for upload in uploads]
    step_s = max(windows, default=0.0) / STEPS
    slowest = _slowest(uploads)
    if step_s <= 0 or slowest <= 0:
        return [STEPS + 1] * len(uploads), [STEPS if step_s > 0 else 0] * len(uploads)
    taken = [upload.bytes / (slowest if upload.bps is None else upload.bps) for upload in uploads]
    # A rounding error more would make what just fits too long.
    times = [min(STEPS + 1, math.ceil(seconds / step_s - 1e-6)) for seconds in taken]
    return times, [min(STEPS, math.floor(window / step_s + 1e-6)) for window in windows]


def _slowest(uploads: Sequence[Upload]) -> float:
    return min((upload.bps for upload in uploads if upload.bps is not None), default=math.inf)


def seconds(uploads: Sequence[Upload]) -> list[float]:
    """On the wire, to compare them by; if nothing is known of any link, their bytes."""
    slowest = _slowest(uploads)
    unknown = slowest if 0 < slowest < math.inf else 1.0
    return [upload.bytes / (upload.bps if upload.bps is not None and upload.bps > 0 else unknown) for upload in uploads]


def on_time(times: Sequence[int], deadlines: Sequence[int], weights: Sequence[float]) -> frozenset[int]:
    """The heaviest set of jobs that one machine can do in time, each of a whole time, by a whole deadline; exact."""
    import numpy as np  # late, as in `coding`

    order = sorted(range(len(times)), key=lambda i: deadlines[i])
    last = min(max(deadlines, default=0), sum(times))
    best = np.full(last + 1, -np.inf)  # the most weight with so much time used
    best[0] = 0.0
    taken: list[np.ndarray] = []
    for i in order:
        chosen = np.zeros(last + 1, dtype=bool)
        until = min(deadlines[i], last)
        if times[i] <= until:
            with_it = best[: until - times[i] + 1] + weights[i]
            better = with_it > best[times[i] : until + 1]
            chosen[times[i] : until + 1] = better
            best[times[i] : until + 1] = np.where(better, with_it, best[times[i] : until + 1])
        taken.append(chosen)
    found, used = set(), int(np.argmax(best))
    for i, chosen in zip(reversed(order), reversed(taken), strict=True):
        if chosen[used]:
            found.add(i)
            used -= times[i]
    return frozenset(found)

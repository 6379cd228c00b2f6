"""Counters of a run, and the metrics made from them (docs/reference/campus-worlds.md has the formulas)."""

from collections.abc import Sequence

import msgspec

SCHEMA = 1
BACK_WITHIN_S = 900.0  # a job that returns within this time of its machine's return has migrated back (own choice)
RESUMED_WITHIN_S = 300.0  # a migration succeeds if the job computes again within this time of its last step


class Counters(msgspec.Struct):
    """GPU-seconds, seconds and counts of a run, from the end of the warm-up on."""

    useful: float = 0.0
    lost: float = 0.0
    stalled: float = 0.0
    restoring: float = 0.0
    redundant: float = 0.0
    held: float = 0.0
    departures: int = 0  # of machines under a job
    noticed: int = 0
    migrated: int = 0
    saved_in_time: int = 0
    could_return: int = 0
    returned: int = 0
    checkpoints: int = 0
    finished: int = 0
    restarted: int = 0  # jobs that lost work without any safe checkpoint
    interrupted_s: float = 0.0  # finish - start of jobs with 2 to 4 departures
    interrupted_work_s: float = 0.0
    interrupted_jobs: int = 0
    waited_s: float = 0.0  # until the first start
    started: int = 0
    downtimes: list[float] = msgspec.field(default_factory=list)


class Result(msgspec.Struct, frozen=True):
    """The metrics of one run of one policy."""

    schema: int
    world: str
    policy: str
    seed: int
    metrics: dict[str, float]
    events: int
    digest: str


# name: (unit, 1 if more is better and -1 if less is better, meaning)
METRICS: dict[str, tuple[str, int, str]] = {
    "work_loss": ("GPU-h per 100 delivered", -1, "useful work since the last safe checkpoint, lost at departures"),
    "overhead": ("GPU-h per 100 delivered", -1, "stalls for checkpoints, restores, redundant work"),
    "loss_and_overhead": ("GPU-h per 100 delivered", -1, "the sum of both"),
    "downtime_mean": ("s", -1, "from the last useful step to the next one, mean over departures"),
    "downtime_p50": ("s", -1, "its median"),
    "downtime_p95": ("s", -1, "its 95th percentile"),
    "migration_success": ("share", 1, "of noticed departures: saved elsewhere in time, and resumed within 5 min"),
    "saved_in_time": ("share", 1, "of noticed departures: saved elsewhere before the notice ended"),
    "migrate_back": ("share", 1, "of displaced jobs still running at their machine's return: back within 15 min"),
    "makespan_inflation": ("share", -1, "of jobs with 2 to 4 departures: (finish - start) / work - 1"),
    "goodput": ("share", 1, "useful GPU time of the GPU time that was lent"),
    "utilisation": ("share", 1, "GPUs held by guests or used by owners, of all GPU time"),
    "owner_use": ("share", 0, "GPUs used by owners, of all GPU time"),
    "background_loss": ("share", -1, "of other uplink traffic that checkpoints delayed"),
    "backup_peak": ("share", -1, "of all machines' links, used by checkpoints in the busiest hour"),
    "backup_mean": ("share", -1, "the same, on average"),
    "uplink_peak": ("share", -1, "of all uplinks, both directions, used by checkpoints in the busiest hour"),
    "uplink_mean": ("share", -1, "the same, on average"),
    "wait_mean": ("s", -1, "from submission to the first start"),
    "departures": ("count", 0, "of machines, under a running job"),
    "checkpoints": ("count", 0, "that became safe"),
    "finished": ("count", 1, "jobs"),
    "delivered": ("GPU-h", 1, "useful work that was kept"),
    "lost": ("GPU-h", -1, "work lost at departures, the numerator of work_loss"),
    "overhead_h": ("GPU-h", -1, "the numerator of overhead"),
}


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the `share`-quantile of sorted values by linear interpolation; 0 if there are none."""
    if not ordered:
        return 0.0
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def share(part: float, whole: float) -> float:
    """Return the quotient; 0 if the denominator is 0."""
    return part / whole if whole else 0.0

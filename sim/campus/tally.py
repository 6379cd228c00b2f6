"""What is counted in a run, and the figures made of it. docs/simulator.md has each formula."""

from collections.abc import Iterable, Sequence
from math import fsum

import msgspec

SCHEMA = 1
BACK_WITHIN_S = 900.0  # of its machine's return, a job counts as having gone home; ours
RESUMED_WITHIN_S = 300.0  # of its last useful step: then a migration has succeeded


class Tally(msgspec.Struct):
    """GPU-seconds, seconds and counts, from the end of the warm-up on."""

    useful: float = 0.0
    lost: float = 0.0
    stalled: float = 0.0
    restoring: float = 0.0
    redundant: float = 0.0
    held: float = 0.0
    departures: int = 0  # of a machine, under a job
    noticed: int = 0
    migrated: int = 0
    saved_in_time: int = 0
    could_return: int = 0
    returned: int = 0
    checkpoints: int = 0
    finished: int = 0
    restarted: int = 0  # from the beginning, though something had been saved
    interrupted_s: float = 0.0  # finish - start of those with 2 to 4 departures
    interrupted_work_s: float = 0.0
    interrupted_jobs: int = 0
    waited_s: float = 0.0  # until the first start
    started: int = 0
    downtimes: list[float] = msgspec.field(default_factory=list)


class Result(msgspec.Struct, frozen=True):
    """One run of one policy. Hours are GPU-hours."""

    schema: int
    world: str
    policy: str
    seed: int
    figures: dict[str, float]
    events: int
    digest: str


# name: (unit, which way is better, what it is)
FIGURES: dict[str, tuple[str, int, str]] = {
    "work_loss": ("GPU-h per 100 delivered", -1, "useful work since the last safe checkpoint, lost at departures"),
    "overhead": ("GPU-h per 100 delivered", -1, "stalls for checkpoints, restores, redundant work"),
    "loss_and_overhead": ("GPU-h per 100 delivered", -1, "both"),
    "downtime_mean": ("s", -1, "from the last useful step to the first one elsewhere, per departure"),
    "downtime_p50": ("s", -1, "its median"),
    "downtime_p95": ("s", -1, "its 95th percentile"),
    "migration_success": ("share", 1, "of noticed departures: saved elsewhere in time, and resumed within 5 min"),
    "saved_in_time": ("share", 1, "of noticed departures: saved elsewhere before the notice ended"),
    "migrate_back": ("share", 1, "of jobs sent away and still running at their machine's return: back within 15 min"),
    "makespan_inflation": ("share", -1, "of jobs with 2 to 4 departures: finish - start over work, less 1"),
    "goodput": ("share", 1, "useful GPU time of the GPU time that was lent"),
    "utilisation": ("share", 1, "GPUs held by guests or used by owners, of all GPU time"),
    "owner_use": ("share", 0, "GPUs used by owners, of all GPU time"),
    "background_loss": ("share", -1, "of the uplinks' own traffic that checkpoints kept from being sent in time"),
    "backup_peak": ("share", -1, "of all machines' links that checkpoints used to send, in the busiest hour"),
    "backup_mean": ("share", -1, "the same, on average"),
    "uplink_peak": ("share", -1, "of all buildings' uplinks, both ways, in the busiest hour"),
    "uplink_mean": ("share", -1, "the same, on average"),
    "wait_mean": ("s", -1, "from submission to the first start"),
    "departures": ("count", 0, "of machines, under a running job"),
    "checkpoints": ("count", 0, "that became safe"),
    "finished": ("count", 1, "jobs"),
    "delivered": ("GPU-h", 1, "useful work that was kept"),
    "lost": ("GPU-h", -1, "what work_loss is made of"),
    "overhead_h": ("GPU-h", -1, "what overhead is made of"),
}


def percentile(ordered: Sequence[float], share: float) -> float:
    """By linear interpolation; 0 of nothing."""
    if not ordered:
        return 0.0
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def mean(values: Iterable[float]) -> float:
    """0 of nothing."""
    found = list(values)
    return fsum(found) / len(found) if found else 0.0


def share(part: float, whole: float) -> float:
    """0 of nothing."""
    return part / whole if whole else 0.0

"""Claims of ReclaimNet and GPUnion, checked against this simulator.

No parameter is tuned to match. Where a definition differs from the paper's, the result says so.
"""

from collections.abc import Mapping, Sequence

import msgspec

from sim.campus.statistics import Interval, mean_of, reduction
from sim.campus.study import Sample, common_seeds

Setup = tuple[str, tuple[str, ...]]  # a preset, and the changes to it


class Claim(msgspec.Struct, frozen=True):
    """A published figure: the value of `metric` under `mesh`, or its reduction against the `baseline` policy.

    Exactly one of `at_least` and `at_most` states the value that meets the claim.
    """

    source: str
    claim: str
    world: str
    metric: str
    baseline: str = ""
    at_least: float | None = None
    at_most: float | None = None
    caveat: str = ""
    changes: tuple[str, ...] = ()

    @property
    def setup(self) -> Setup:
        return self.world, self.changes


CLAIMS: tuple[Claim, ...] = (
    Claim(
        "ReclaimNet",
        "work loss 66 % less than Slurm's requeue (from the beginning)",
        "reclaimnet-54",
        "work_loss",
        "slurm-s0",
        0.66,
    ),
    Claim(
        "ReclaimNet",
        "work loss 66 % less than Slurm's requeue (hourly checkpoints)",
        "reclaimnet-54",
        "work_loss",
        "slurm-s60",
        0.66,
    ),
    Claim(
        "ReclaimNet", "work loss 38 % less than pipeline redundancy", "reclaimnet-54", "work_loss", "redundant", 0.38
    ),
    Claim(
        "ReclaimNet",
        "the same, counting loss and overhead",
        "reclaimnet-54",
        "loss_and_overhead",
        "redundant",
        0.38,
        caveat="the paper counts loss alone",
    ),
    Claim(
        "ReclaimNet",
        "downtime 38 % shorter than requeue (Slurm's own timings)",
        "reclaimnet-54",
        "downtime_mean",
        "slurm-s60",
        0.38,
    ),
    Claim(
        "ReclaimNet", "the same (Slurm's shortest timings)", "reclaimnet-54", "downtime_mean", "slurm-s60-fast", 0.38
    ),
    Claim(
        "ReclaimNet",
        "background traffic degraded by less than 3 %",
        "reclaimnet-54",
        "background_loss",
        at_most=0.03,
        caveat="here: the share of the uplinks' own bytes that arrived late",
    ),
    Claim(
        "GPUnion",
        "94 % of scheduled departures succeed: checkpoint safe elsewhere in time",
        "gpunion-11",
        "saved_in_time",
        at_least=0.94,
    ),
    Claim(
        "GPUnion",
        "94 % of scheduled departures succeed: and the job runs again within 5 min",
        "gpunion-11",
        "migration_success",
        at_least=0.94,
        caveat="waiting for a free GPU counts too",
    ),
    Claim(
        "our goal",
        "95 % of noticed departures succeed, on the larger campus",
        "reclaimnet-54",
        "migration_success",
        at_least=0.95,
    ),
    Claim("GPUnion", "67 % of displaced jobs migrate back", "gpunion-11", "migrate_back", at_least=0.67),
    Claim("GPUnion", "3 to 7 % more time at 2 to 4 interruptions", "gpunion-11", "makespan_inflation", at_most=0.07),
    Claim(
        "GPUnion",
        "utilisation from 34 to 67 %",
        "gpunion-11",
        "utilisation",
        at_least=0.67,
        caveat="the number of submitted jobs is an input; twenty trainings a week cannot fill the GPUs",
    ),
    Claim(
        "GPUnion",
        "utilisation from 34 to 67 %, with a queue that is never empty",
        "gpunion-11",
        "utilisation",
        at_least=0.67,
        caveat="sixty more trainings wait from the start, enough to fill the lent time",
        changes=("jobs.at_start=60",),
    ),
    Claim("GPUnion", "backups use less than 2 % of the bandwidth", "gpunion-11", "backup_peak", at_most=0.02),
)


class ClaimResult(msgspec.Struct, frozen=True):
    source: str
    claim: str
    world: str
    value: float
    low: float
    high: float
    n: int
    verdict: str
    caveat: str


def policies_of(setup: Setup) -> list[str]:
    """Return the policies that the claims on this setup need."""
    against = (claim.baseline for claim in CLAIMS if claim.setup == setup and claim.baseline)
    return list(dict.fromkeys(["mesh", *against]))


def setups() -> list[Setup]:
    return list(dict.fromkeys(claim.setup for claim in CLAIMS))


def evaluate(samples: Mapping[tuple[Setup, str], Sample], claims: Sequence[Claim] = CLAIMS) -> list[ClaimResult]:
    """Return the results of the claims that have replications."""
    found = []
    for claim in claims:
        ours = samples.get((claim.setup, "mesh"))
        other = samples.get((claim.setup, claim.baseline)) if claim.baseline else ours
        if ours is None or other is None or not (seeds := common_seeds(ours, other)):
            continue
        interval = _interval(claim, ours, other, seeds)
        found.append(
            ClaimResult(
                claim.source,
                claim.claim,
                " ".join((claim.world, *claim.changes)),
                interval.value,
                interval.low,
                interval.high,
                interval.n,
                verdict(claim, interval),
                claim.caveat,
            )
        )
    return found


def _interval(claim: Claim, ours: Sample, other: Sample, seeds: Sequence[int]) -> Interval:
    if claim.baseline:
        return reduction(other.values(claim.metric, seeds), ours.values(claim.metric, seeds))
    return mean_of(ours.values(claim.metric, seeds))


def verdict(claim: Claim, interval: Interval) -> str:
    """Return "met" or "not met" if the whole interval agrees, else "undecided"; a single run has no interval."""
    if interval.n < 2:
        return "undecided"
    if claim.at_least is not None:
        worst, best = interval.low - claim.at_least, interval.high - claim.at_least
    else:
        assert claim.at_most is not None
        worst, best = claim.at_most - interval.high, claim.at_most - interval.low
    return "met" if worst >= 0 else "not met" if best < 0 else "undecided"

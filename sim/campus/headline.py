"""What ReclaimNet and GPUnion claim, and what comes out here. Nothing is tuned to match;
where a definition differs, the row says so."""

from collections.abc import Mapping, Sequence

import msgspec

from sim.campus.statistics import Interval, mean_of, reduction
from sim.campus.study import Side, shared

Place = tuple[str, tuple[str, ...]]  # a preset, and what is changed in it


class Claim(msgspec.Struct, frozen=True):
    """`of`: the figure; `against`: the policy it is a reduction against, or none; `least`/`most`: what would meet it."""

    source: str
    claim: str
    world: str
    of: str
    against: str = ""
    least: float | None = None
    most: float | None = None
    differs: str = ""
    changes: tuple[str, ...] = ()

    @property
    def place(self) -> Place:
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
        "the same, with what each pays for it: loss and overhead",
        "reclaimnet-54",
        "loss_and_overhead",
        "redundant",
        0.38,
        differs="the paper counts loss alone",
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
        most=0.03,
        differs="here: the part of the uplinks' own bytes that came late",
    ),
    Claim(
        "GPUnion",
        "94 % of scheduled departures succeed: safe elsewhere in time",
        "gpunion-11",
        "saved_in_time",
        least=0.94,
    ),
    Claim(
        "GPUnion",
        "94 % of scheduled departures succeed: and running again within 5 min",
        "gpunion-11",
        "migration_success",
        least=0.94,
        differs="whether a place was free counts too",
    ),
    Claim(
        "our goal",
        "95 % of noticed departures succeed, on the larger campus",
        "reclaimnet-54",
        "migration_success",
        least=0.95,
    ),
    Claim("GPUnion", "67 % of displaced jobs migrate back", "gpunion-11", "migrate_back", least=0.67),
    Claim("GPUnion", "3 to 7 % more time at 2 to 4 interruptions", "gpunion-11", "makespan_inflation", most=0.07),
    Claim(
        "GPUnion",
        "utilisation from 34 to 67 %",
        "gpunion-11",
        "utilisation",
        least=0.67,
        differs="follows from how many jobs are submitted, an input: twenty trainings in a week are all there is here",
    ),
    Claim(
        "GPUnion",
        "utilisation from 34 to 67 %: with a queue that is never empty",
        "gpunion-11",
        "utilisation",
        least=0.67,
        differs="sixty more trainings wait from the beginning: what the lent time has room for",
        changes=("jobs.at_start=60",),
    ),
    Claim("GPUnion", "backups use less than 2 % of the bandwidth", "gpunion-11", "backup_peak", most=0.02),
)


class Row(msgspec.Struct, frozen=True):
    source: str
    claim: str
    world: str
    ours: float
    low: float
    high: float
    n: int
    verdict: str
    differs: str


def policies_of(place: Place) -> list[str]:
    """Whom the claims on this world need."""
    against = (claim.against for claim in CLAIMS if claim.place == place and claim.against)
    return list(dict.fromkeys(["mesh", *against]))


def places() -> list[Place]:
    return list(dict.fromkeys(claim.place for claim in CLAIMS))


def rows(sides: Mapping[tuple[Place, str], Side], claims: Sequence[Claim] = CLAIMS) -> list[Row]:
    """Of those claims for which there are replications."""
    found = []
    for claim in claims:
        ours = sides.get((claim.place, "mesh"))
        other = sides.get((claim.place, claim.against)) if claim.against else ours
        if ours is None or other is None or not (seeds := shared(ours, other)):
            continue
        interval = _interval(claim, ours, other, seeds)
        found.append(
            Row(
                claim.source,
                claim.claim,
                " ".join((claim.world, *claim.changes)),
                interval.value,
                interval.low,
                interval.high,
                interval.n,
                verdict(claim, interval),
                claim.differs,
            )
        )
    return found


def _interval(claim: Claim, ours: Side, other: Side, seeds: Sequence[int]) -> Interval:
    if claim.against:
        return reduction(other.values(claim.of, seeds), ours.values(claim.of, seeds))
    return mean_of(ours.values(claim.of, seeds))


def verdict(claim: Claim, interval: Interval) -> str:
    """Met or not, where the whole interval says so; else undecided, as one run alone is, which has no interval."""
    if interval.n < 2:
        return "undecided"
    if claim.least is not None:
        worst, best = interval.low - claim.least, interval.high - claim.least
    else:
        assert claim.most is not None
        worst, best = claim.most - interval.high, claim.most - interval.low
    return "met" if worst >= 0 else "not met" if best < 0 else "undecided"

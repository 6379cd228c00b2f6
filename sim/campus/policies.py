"""The policies to compare: the product's and the baselines.

docs/reference/campus-worlds.md gives the source of each number.
"""

import re
from random import Random
from typing import Literal

import msgspec

from sim.campus.schedules import Never, Oracle, Periodic, Product, Schedule, Young


class Detection(msgspec.Struct, frozen=True):
    """The delay from a sudden departure until the machine's jobs may start elsewhere.

    It is uniform between `min_s` and `min_s + spread_s`. With `measured`, it is drawn from the simulated delays of the membership
    protocol, and is not shorter than the rest of the job's lease (`min_s`).
    """

    min_s: float
    spread_s: float = 0.0
    measured: bool = False


class Redundancy(msgspec.Struct, frozen=True):
    """Redundant execution of each step on two machines: extra work (a share), and the pause when one of them departs."""

    overhead: float
    pause_s: float


class Policy(msgspec.Struct, frozen=True):
    """A policy for placement, checkpoints and departures.

    `place` selects the machine of a job. `keeps` is the storage of checkpoints: `copies` peers, a file server that never fails,
    or none. `notice` is the reaction to a notice. `requeue_s` is the minimum time from a known departure to the next start. With
    `yields`, checkpoints give way to other campus traffic. With `migrates_back`, jobs return to their first machine.
    `destinations` tells whether one plan places all jobs of a leaving machine, or each job is placed alone.
    """

    name: str
    description: str
    schedule: Schedule
    detection: Detection
    place: Literal["rendezvous", "first fit", "longest"] = "first fit"
    keeps: Literal["peers", "server", "nowhere"] = "server"
    notice: Literal["migrate", "save", "ignore"] = "ignore"
    copies: int = 2
    requeue_s: float = 0.0
    yields: bool = False
    migrates_back: bool = False
    settle_s: float = 60.0
    redundancy: Redundancy | None = None
    destinations: Literal["joint", "solo"] = "joint"


SLURM = Detection(300.0)  # default of SlurmdTimeout
# Slurm holds a requeued job until its credential has expired (cred_expire, 120 s) and the scheduler has run.
SLURM_REQUEUE_S = 121.0
SLURM_FAST, SLURM_FAST_REQUEUE_S = Detection(6.0), 6.9  # shortest timings that worked: medians of `make bench-slurm`
LEASE_S = 15.0  # mesh/daemon/config.py
MESH = Detection(LEASE_S, 0.0, measured=True)
HANDOVER_S = 0.4  # from a stored checkpoint to a start elsewhere: `make bench-jobs`, upper end
# Three missed heartbeats of ten seconds: detected between 20 and 30 s after the last one.
GPUNION = Detection(20.0, 10.0)

POLICIES: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        Policy(
            "mesh",
            "the product: survival-weighted rendezvous, checkpoints on two peers by integrated hazard, migration under notice",
            Product(),
            MESH,
            place="rendezvous",
            keeps="peers",
            notice="migrate",
            requeue_s=HANDOVER_S,
            yields=True,
            migrates_back=True,
        ),
        Policy(
            "slurm-s0",
            "Slurm, preempt and requeue: jobs start from the beginning",
            Never(),
            SLURM,
            keeps="nowhere",
            requeue_s=SLURM_REQUEUE_S,
        ),
        Policy(
            "slurm-s60",
            "Slurm, requeue; the program checkpoints every hour to a file server",
            Periodic(3600.0),
            SLURM,
            requeue_s=SLURM_REQUEUE_S,
        ),
        Policy(
            "slurm-s60-fast",
            "as slurm-s60, with the shortest timings that worked in Slurm",
            Periodic(3600.0),
            SLURM_FAST,
            requeue_s=SLURM_FAST_REQUEUE_S,
        ),
        Policy(
            "periodic-30",
            "the product with a checkpoint every half hour, ignoring notices",
            Periodic(1800.0),
            MESH,
            place="rendezvous",
            keeps="peers",
            requeue_s=HANDOVER_S,
            yields=True,
        ),
        Policy(
            "young-daly",
            "the product with Daly's interval for the mean departure rate, ignoring notices",
            Young(daly=True),
            MESH,
            place="rendezvous",
            keeps="peers",
            requeue_s=HANDOVER_S,
            yields=True,
        ),
        Policy(
            "gpunion",
            "a coordinator with heartbeats, a fixed interval, a last checkpoint under notice, and migrating back",
            Periodic(900.0),
            GPUNION,
            notice="save",
            requeue_s=5.0,
            migrates_back=True,
            settle_s=0.0,
        ),
        Policy(
            "redundant",
            "as Bamboo: every step on two machines, half-hourly checkpoints in case both depart",
            Periodic(1800.0),
            Detection(0.0),
            redundancy=Redundancy(0.15, 40.0),
        ),
        Policy(
            "oracle",
            "knows every departure: placement by the longest stay, one checkpoint just before its end",
            Oracle(),
            MESH,
            place="longest",
            keeps="peers",
            notice="migrate",
            requeue_s=HANDOVER_S,
            yields=True,
            destinations="solo",
        ),
    )
}


POLICIES["mesh-solo"] = msgspec.structs.replace(
    POLICIES["mesh"],
    name="mesh-solo",
    description="as mesh, but each job of a leaving machine chooses its destination alone, without regard to bandwidth",
    destinations="solo",
)

PERIODIC = re.compile(r"periodic-([1-9]\d{0,3})")


def is_policy(name: str) -> bool:
    return name in POLICIES or PERIODIC.fullmatch(name) is not None


def find_policy(name: str) -> Policy:
    """Return a policy by name, or `periodic-N` with an interval of N minutes; ValueError if the name is unknown."""
    if name in POLICIES:
        return POLICIES[name]
    if (found := PERIODIC.fullmatch(name)) is None:
        raise ValueError(f"unknown policy {name!r}; choose from {', '.join(POLICIES)}, or periodic-N (minutes)")
    description = f"a checkpoint every {found[1]} minutes on two peers"
    return msgspec.structs.replace(
        POLICIES["periodic-30"], name=name, description=description, schedule=Periodic(60.0 * int(found[1]))
    )


def delay_s(detection: Detection, quantiles: tuple[float, ...], rng: Random) -> float:
    """Draw the delay from a sudden departure to the earliest start elsewhere."""
    u = rng.random()
    if not detection.measured:
        return detection.min_s + u * detection.spread_s
    place = u * (len(quantiles) - 1)
    below = int(place)
    above = min(below + 1, len(quantiles) - 1)
    found = quantiles[below] + (quantiles[above] - quantiles[below]) * (place - below)
    # The last renewal was up to a third of the lease ago; witnesses wait 1.05 leases from it.
    return max(found, detection.min_s * (1.05 - u / 3))

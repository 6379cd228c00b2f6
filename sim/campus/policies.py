"""The policies that are compared: ours and the baselines, all on the same ports.

docs/simulator.md says where each number comes from.
"""

import re
from random import Random
from typing import Literal

import msgspec

from sim.campus.schedules import Never, Oracle, Periodic, Product, Schedule, Young


class Detection(msgspec.Struct, frozen=True):
    """How long until a machine that is gone without a word is given up and its jobs may start elsewhere: `least_s`, and evenly up
    to `spread_s` more; or, with `measured`, drawn from what the membership protocol does in its own simulation, and not before
    the job's lease is over."""

    least_s: float
    spread_s: float = 0.0
    measured: bool = False


class Redundancy(msgspec.Struct, frozen=True):
    """Each step is computed twice, on two machines: so much more work, and so long a pause when one of them goes."""

    overhead: float
    pause_s: float


class Policy(msgspec.Struct, frozen=True):
    """`place`: who gets a job. `keeps`: where checkpoints lie: with `copies` peers, on a file server that never fails, nowhere.
    `notice`: what is done with one. `requeue_s`: from a departure that is known to the next start, at least. `yields`: its
    checkpoints give way to the campus's own traffic. `goes_home`: jobs return to where they first ran. `destinations`: whether
    the jobs of a machine that leaves are sent to others by one plan, or each by itself."""

    name: str
    says: str
    schedule: Schedule
    detection: Detection
    place: Literal["rendezvous", "first fit", "longest"] = "first fit"
    keeps: Literal["peers", "server", "nowhere"] = "server"
    notice: Literal["migrate", "save", "ignore"] = "ignore"
    copies: int = 2
    requeue_s: float = 0.0
    yields: bool = False
    goes_home: bool = False
    settle_s: float = 60.0
    redundancy: Redundancy | None = None
    destinations: Literal["joint", "solo"] = "joint"


# SlurmdTimeout's default; and the shortest that `make bench-slurm` got to work: detection and restart together 12.7 s.
SLURM = Detection(300.0)
# A requeued job is held back until its credential has expired (cred_expire, 120 s) and the scheduler has turned.
SLURM_REQUEUE_S = 121.0
SLURM_FAST, SLURM_FAST_REQUEUE_S = Detection(6.0), 6.9  # `make bench-slurm`, medians
LEASE_S = 15.0  # mesh/config.py
MESH = Detection(LEASE_S, 0.0, measured=True)
HANDOVER_S = 0.4  # from a stored checkpoint to a start elsewhere: `make bench-jobs`, upper end
# Three missed heartbeats of ten seconds: found between 20 and 30 s after the last one.
GPUNION = Detection(20.0, 10.0)

POLICIES: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        Policy(
            "mesh",
            "ours: survival-weighted rendezvous, checkpoints by the hazard's integral on two peers, migration under notice",
            Product(),
            MESH,
            place="rendezvous",
            keeps="peers",
            notice="migrate",
            requeue_s=HANDOVER_S,
            yields=True,
            goes_home=True,
        ),
        Policy(
            "slurm-s0",
            "Slurm, preempt and requeue: starts from its beginning",
            Never(),
            SLURM,
            keeps="nowhere",
            requeue_s=SLURM_REQUEUE_S,
        ),
        Policy(
            "slurm-s60",
            "Slurm, requeue; the program saves every hour to a file server",
            Periodic(3600.0),
            SLURM,
            requeue_s=SLURM_REQUEUE_S,
        ),
        Policy(
            "slurm-s60-fast",
            "as slurm-s60, with the shortest timings that Slurm was made to work with",
            Periodic(3600.0),
            SLURM_FAST,
            requeue_s=SLURM_FAST_REQUEUE_S,
        ),
        Policy(
            "periodic-30",
            "our mechanics with a checkpoint every half hour, and no use of notices",
            Periodic(1800.0),
            MESH,
            place="rendezvous",
            keeps="peers",
            requeue_s=HANDOVER_S,
            yields=True,
        ),
        Policy(
            "young-daly",
            "our mechanics with Daly's interval for the campus's mean, and no use of notices",
            Young(daly=True),
            MESH,
            place="rendezvous",
            keeps="peers",
            requeue_s=HANDOVER_S,
            yields=True,
        ),
        Policy(
            "gpunion",
            "a coordinator with heartbeats, a fixed interval, a last save under notice, and return",
            Periodic(900.0),
            GPUNION,
            notice="save",
            requeue_s=5.0,
            goes_home=True,
            settle_s=0.0,
        ),
        Policy(
            "redundant",
            "Bamboo-like: every step on two machines, half-hourly checkpoints for when both go",
            Periodic(1800.0),
            Detection(0.0),
            redundancy=Redundancy(0.15, 40.0),
        ),
        Policy(
            "oracle",
            "knows when each machine goes: the longest stay, and one checkpoint just before its end",
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
    says="as mesh, but the jobs of a leaving machine choose where to go one by one, whatever the paths can carry",
    destinations="solo",
)

PERIODIC = re.compile(r"periodic-([1-9]\d{0,3})")


def is_policy(name: str) -> bool:
    return name in POLICIES or PERIODIC.fullmatch(name) is not None


def find_policy(name: str) -> Policy:
    """One of the above, or `periodic-N` with an interval of N minutes; ValueError if there is none of that name."""
    if name in POLICIES:
        return POLICIES[name]
    if (found := PERIODIC.fullmatch(name)) is None:
        raise ValueError(f"there is no policy {name!r}; there are: {', '.join(POLICIES)}, and periodic-N (minutes)")
    says = f"a checkpoint every {found[1]} minutes on two peers"
    return msgspec.structs.replace(
        POLICIES["periodic-30"], name=name, says=says, schedule=Periodic(60.0 * int(found[1]))
    )


def delay_s(detection: Detection, quantiles: tuple[float, ...], rng: Random) -> float:
    """From a sudden departure to the next start that it allows."""
    u = rng.random()
    if not detection.measured:
        return detection.least_s + u * detection.spread_s
    place = u * (len(quantiles) - 1)
    below = int(place)
    above = min(below + 1, len(quantiles) - 1)
    found = quantiles[below] + (quantiles[above] - quantiles[below]) * (place - below)
    # The lease was renewed some time ago, at most a third of it: its rest on the witnesses' side is 1.05 less that.
    return max(found, detection.least_s * (1.05 - u / 3))

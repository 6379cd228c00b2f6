"""What is submitted, and when: like the departures, the same for every policy."""

from math import cos, pi

import msgspec

from sim.campus.chance import quantile, waiting
from sim.campus.churn import DAY_S
from sim.campus.world import Jobs, World
from sim.streams import Streams

BUSIEST_S = 14 * 3600.0
GIB = float(1 << 30)


class Order(msgspec.Struct, frozen=True):
    """A job: `work_s` on GPUs that nobody takes away, `changed` the part of its state that each checkpoint has to send."""

    number: int
    at: float
    user: str
    gpus: int
    vram_mib: int
    work_s: float
    state_bytes: float
    changed: float

    @property
    def id(self) -> bytes:
        return b"job-%08d" % self.number + bytes(20)


def orders(world: World, streams: Streams) -> list[Order]:
    """In the order of their coming."""
    jobs = world.jobs
    arrivals = streams.get("campus", "arrivals")
    times = [0.0] * jobs.at_start
    end = min(world.days, jobs.until_day) * DAY_S
    peak = 2 * jobs.by_day / (1 + jobs.by_day)  # of the rate, relative to its mean
    now = 0.0
    while jobs.per_day:
        now += waiting(arrivals.random()) * DAY_S / (jobs.per_day * peak)
        keep = arrivals.random()
        if now >= end:
            break
        if keep * peak < _relative(jobs, now):
            times.append(now)
    return [_order(jobs, number, at, streams) for number, at in enumerate(times)]


def _relative(jobs: Jobs, now: float) -> float:
    """How much more than on average is submitted at this time of day."""
    swing = (jobs.by_day - 1) / (jobs.by_day + 1)
    return 1 + swing * cos(2 * pi * (now - BUSIEST_S) / DAY_S)


def _order(jobs: Jobs, number: int, at: float, streams: Streams) -> Order:
    stream = streams.get("campus", "jobs")
    work, state, gpus, vram, changed, user = (stream.random() for _ in range(6))
    wanted, total = jobs.gpus[-1][0], 0.0
    for count, share in jobs.gpus:
        total += share
        if gpus < total:
            wanted = count
            break
    low, high = jobs.changed
    return Order(
        number,
        at,
        f"user{int(user * jobs.users):03d}",
        wanted,
        int(jobs.vram_gib[int(vram * len(jobs.vram_gib))] * 1024),
        quantile(jobs.hours, work) * 3600,
        quantile(jobs.state_gib, state) * GIB,
        low + changed * (high - low),
    )

"""What is submitted, and when: like the departures, the same for every policy."""

from functools import cached_property
from math import cos, pi

import msgspec

from sim.campus.chance import quantile, waiting
from sim.campus.churn import DAY_S
from sim.campus.mixes import Ran, jobs_of
from sim.campus.world import Jobs, Mix, World
from sim.streams import Streams

BUSIEST_S = 14 * 3600.0
GIB = float(1 << 30)


class Order(msgspec.Struct, frozen=True, dict=True):
    """A job: `work_s` on GPUs that nobody takes away, `changed` the part of its state that each checkpoint has to send."""

    number: int
    at: float
    user: str
    gpus: int
    vram_mib: int
    work_s: float
    state_bytes: float
    changed: float

    @cached_property
    def id(self) -> bytes:
        return b"job-%08d" % self.number + bytes(20)

    @property
    def shape(self) -> tuple[int, int]:
        """What a machine must have for it: GPUs, and MiB on each."""
        return self.gpus, self.vram_mib


def orders(world: World, streams: Streams) -> list[Order]:
    """In the order of their coming."""
    jobs = world.jobs
    if jobs.mix is not None and jobs.mix.arrivals:
        return _told(world, jobs.mix, streams)
    busiest = max([1.0, *(period.jobs for period in world.periods)])
    arrivals = streams.get("campus", "arrivals")
    times = [0.0] * jobs.at_start
    end = min(world.days, jobs.until_day) * DAY_S
    peak = 2 * jobs.by_day / (1 + jobs.by_day) * busiest  # of the rate, relative to its mean
    now = 0.0
    while jobs.per_day:
        now += waiting(arrivals.random()) * DAY_S / (jobs.per_day * peak)
        keep = arrivals.random()
        if now >= end:
            break
        if keep * peak < _relative(jobs, now) * _of_day(world, int(now // DAY_S)):
            times.append(now)
    return [_order(jobs, number, at, streams) for number, at in enumerate(times)]


def _told(world: World, mix: Mix, streams: Streams) -> list[Order]:
    """When the file says so."""
    end = min(world.days, world.jobs.until_day) * DAY_S
    came = [ran for ran in jobs_of(mix) if ran.at < end]
    return [_order(world.jobs, number, ran.at, streams, ran) for number, ran in enumerate(came)]


def _of_day(world: World, day: int) -> float:
    """How much more than on other days is submitted on this one."""
    factor = 1.0
    for period in world.periods:
        if world.day_of(period.first) <= day <= world.day_of(period.last):
            factor *= period.jobs
    return factor


def _relative(jobs: Jobs, now: float) -> float:
    """How much more than on average is submitted at this time of day."""
    swing = (jobs.by_day - 1) / (jobs.by_day + 1)
    return 1 + swing * cos(2 * pi * (now - BUSIEST_S) / DAY_S)


def _order(jobs: Jobs, number: int, at: float, streams: Streams, ran: Ran | None = None) -> Order:
    stream = streams.get("campus", "jobs")
    work, state, gpus, vram, changed, user = (stream.random() for _ in range(6))
    wanted, total = jobs.gpus[-1][0], 0.0
    for count, share in jobs.gpus:
        total += share
        if gpus < total:
            wanted = count
            break
    if ran is None and jobs.mix is not None:
        found = jobs_of(jobs.mix)
        ran = found[int(work * len(found))]
    low, high = jobs.changed
    return Order(
        number,
        at,
        f"user{int(user * jobs.users):03d}",
        wanted if ran is None or not ran.gpus else ran.gpus,
        int(jobs.vram_gib[int(vram * len(jobs.vram_gib))] * 1024),
        _hours_s(jobs, work) if ran is None else ran.ran_s,
        quantile(jobs.state_gib, state) * GIB,
        low + changed * (high - low),
    )


def _hours_s(jobs: Jobs, u: float) -> float:
    assert jobs.hours is not None
    return quantile(jobs.hours, u) * 3600

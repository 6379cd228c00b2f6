"""One run, looked at while it goes on: what was where, what each departure cost, what was foretold. The report is drawn from it.

The run knows nothing of it. Its kernel is stopped at each moment that is looked at, and its log keeps some of the lines that it
hashes: the digest is that of a run at which nobody looks.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from mesh.jobs.onward import WENT_HOME
from sim.campus.campus import Campus
from sim.campus.churn import DAY_S, absences, machines
from sim.campus.guest import Job
from sim.campus.policies import find_policy
from sim.campus.replication import result_of
from sim.campus.tally import Result
from sim.campus.world import DAYS, World
from sim.kernel import EventLog
from sim.streams import Streams

HOUR_S = 3600.0
WINDOWS_S = (HOUR_S, 4 * HOUR_S)  # over which a forecast is held against what came; as docs/survival.md
AGES_S = (300.0, 900.0, 1800.0, *(HOUR_S * hours for hours in (1, 2, 4, 8, 12, 16, 24, 36, 48)))
MOST_STAYS = 1000  # whose beginnings are asked about
End = Literal["finished", "moved", "lost", "went home", "running"]


class Hour(msgspec.Struct, frozen=True):
    """GPUs at its beginning; of what all uplinks could carry in it, what their own traffic wants, and what is `ours`."""

    at_s: float
    guests: int
    owners: float
    idle: int
    own: float
    ours: float


class Run(msgspec.Struct, frozen=True):
    """An attempt of a job on a machine."""

    job: int
    attempt: int
    machine: str
    gpus: int
    start_s: float
    end_s: float
    end: End


class Away(msgspec.Struct, frozen=True):
    machine: str
    start_s: float
    end_s: float
    kind: str


class Observation(msgspec.Struct, frozen=True):
    """`lost`: GPU-s of each departure under a job, from the warm-up's end on; `down`: s, of each that ended. `stays`: (s, ended).
    `foretold`: the mean forecast of a stay at its beginning, at AGES_S; `forecasts`: of each of WINDOWS_S, (forecast, stayed)."""

    result: Result
    begins: str
    counts_from_s: float
    end_s: float
    gpus: dict[str, int]
    hours: list[Hour]
    runs: list[Run]
    away: list[Away]
    lost: list[float]
    down: list[float]
    stays: list[tuple[float, bool]]
    foretold: list[float]
    forecasts: list[list[tuple[float, bool]]]


class Notebook(EventLog):
    """A log that keeps what became of jobs."""

    def __init__(self) -> None:
        super().__init__()
        self.finished: dict[int, float] = {}
        self.losses: list[tuple[float, int, float]] = []  # (when, job, work in s)
        self.lost_at: dict[int, list[float]] = {}  # by job, where there was work

    def add(self, time_s: float, *facts: bytes | str | int) -> None:
        super().add(time_s, *facts)
        match facts:
            case ("finish", int(job)):
                self.finished[job] = time_s
            case ("lost", int(job), str(work)):
                self.losses.append((time_s, job, float(work)))
                if float(work) > 0:
                    self.lost_at.setdefault(job, []).append(time_s)


def observe(world: World, policy: str, seed: int, forecasts: bool = False) -> Observation:
    """With `forecasts`, the estimator is asked every hour, and at the beginnings of stays: they are the same under any policy."""
    campus = Campus(world, find_policy(policy), seed)
    campus.log = notes = Notebook()
    hours: list[Hour] = []
    said: list[list[tuple[float, bool]]] = [[] for _ in WINDOWS_S]
    stays = [
        (host.number, start, end, ended)
        for host in campus.hosts
        for start, end, ended in _stays([(one.start, one.end) for one in host.absences], campus.end)
        if start >= campus.counts_from
    ]
    every = -(-len(stays) // MOST_STAYS) or 1
    begun = sorted((start, number) for number, start, _, _ in stays[::every]) if forecasts else []
    foretold = [0.0] * len(AGES_S)
    ticks = [(HOUR_S * hour, -1) for hour in range(int(campus.end // HOUR_S))]
    campus.begin()
    for at, number in sorted([*ticks, *begun]):
        campus.kernel.run(at)
        if number >= 0:
            for place, age_s in enumerate(AGES_S):
                foretold[place] += campus.forecast.survival(number, at, age_s) / len(begun)
            continue
        hours.append(_hour(campus, at))
        if forecasts and at >= campus.counts_from:
            _ask(campus, at, said)
    campus.kernel.run(campus.end)
    campus.close()
    carried = _carried(campus)
    hours = [msgspec.structs.replace(hour, ours=carried.get(int(hour.at_s // HOUR_S), 0.0)) for hour in hours]
    gpus = {job.order.number: job.order.gpus for job in campus.jobs}
    lost = [work * gpus[job] for at, job, work in notes.losses if at >= campus.counts_from]
    return Observation(
        result_of(campus),
        world.begins,
        campus.counts_from,
        campus.end,
        {host.machine.name: host.machine.gpus for host in campus.hosts},
        hours,
        [run for job in campus.jobs for run in _runs(job, notes, campus.end)],
        [Away(host.machine.name, one.start, one.end, one.kind) for host in campus.hosts for one in host.absences],
        [*lost, *[0.0] * (campus.tally.departures - len(lost))],
        campus.tally.downtimes,
        [(end - start, ended) for _, start, end, ended in stays],
        foretold,
        said,
    )


def availability(world: World, seeds: Sequence[int]) -> list[list[float]]:
    """The part of the GPUs that is lent, by weekday (Monday first) and hour, from the end of the warm-up on."""
    there = machines(world)
    end, start = world.days * DAY_S, world.days * DAY_S * world.warm_up
    first = DAYS.index(world.begins)
    away = [[0.0] * 24 for _ in DAYS]
    for seed in seeds:
        for machine, gone in zip(there, absences(world, there, Streams(seed)), strict=True):
            for one in gone:
                for hour, seconds in _cut(max(one.start, start), min(one.end, end)):
                    away[(first + hour // 24) % 7][hour % 24] += seconds * machine.gpus
    total = [[0.0] * 24 for _ in DAYS]
    gpus = sum(machine.gpus for machine in there)
    for hour, seconds in _cut(start, end):
        total[(first + hour // 24) % 7][hour % 24] += seconds * gpus * len(seeds)
    return [
        [1 - gone / whole if whole else -1.0 for gone, whole in zip(*rows, strict=True)]
        for rows in zip(away, total, strict=True)
    ]


def _cut(start: float, end: float) -> Iterator[tuple[int, float]]:
    """The hours between, each with its seconds."""
    while start < end:
        hour = int(start // HOUR_S)
        upper = min(end, (hour + 1) * HOUR_S)
        yield hour, upper - start
        start = upper


def _stays(gone: Sequence[tuple[float, float]], end: float) -> Iterator[tuple[float, float, bool]]:
    since = 0.0
    for start, until in gone:
        if start > since:
            yield since, min(start, end), start < end
        since = until
    if since < end:
        yield since, end, False


def _hour(campus: Campus, at: float) -> Hour:
    guests = idle = 0
    owners = 0.0
    for host in campus.hosts:
        if host.lent:
            guests += host.machine.gpus - host.free
            idle += host.free
        else:
            owners += host.machine.gpus * campus.world.owners[host.machine.owners].busy
    links = campus.fabric.uplinks
    return Hour(at, guests, owners, idle, sum(one.demand for one in links) / sum(one.capacity for one in links), 0.0)


def _carried(campus: Campus) -> dict[int, float]:
    """By hour: what checkpoints took of the uplinks."""
    whole = sum(link.capacity for link in campus.fabric.uplinks) * HOUR_S
    return {hour: count / whole for hour, count in campus.fabric.crossed.items()}


def _ask(campus: Campus, at: float, said: list[list[tuple[float, bool]]]) -> None:
    there = [host for host in campus.hosts if host.lent and not host.leaving]
    for window_s, found in zip(WINDOWS_S, said, strict=True):
        if at + window_s <= campus.end:
            found += [
                (campus.forecast.survival(host.number, at, window_s), host.departs_at > at + window_s) for host in there
            ]


def _runs(job: Job, notes: Notebook, end: float) -> Iterator[Run]:
    losses = notes.lost_at.get(job.order.number, [])
    starts = [attempt.running_unix_ms / 1000 for attempt in job.attempts]
    for place, attempt in enumerate(job.attempts):
        last = place == len(starts) - 1
        until = end if last else starts[place + 1]
        how: End = "running"
        if attempt.ended_unix_ms:
            stopped = attempt.ended_unix_ms / 1000
            lost = any(stopped - 1 <= at <= until for at in losses)
            how = "went home" if attempt.reason == WENT_HOME else "lost" if lost else "moved"
        elif last and job.order.number in notes.finished:
            stopped, how = notes.finished[job.order.number], "finished"
        else:
            stopped = until
        yield Run(job.order.number, attempt.number, attempt.nick, job.order.gpus, starts[place], stopped, how)

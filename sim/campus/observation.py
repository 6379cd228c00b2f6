"""Observation of one run for the report: GPU use by hour, attempts, departures and their losses, and forecasts.

Observing does not change the run. The kernel stops at each observed moment, and the event log records some of the entries it
hashes, so the digest equals that of an unobserved run.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from mesh.consensus.next_placement import WENT_HOME
from sim.campus.campus import Campus
from sim.campus.churn import DAY_S, absences, machines
from sim.campus.metrics import Result
from sim.campus.policies import find_policy
from sim.campus.replication import result_of
from sim.campus.state import Job
from sim.campus.world import DAYS, World
from sim.kernel import EventLog, Streams

HOUR_S = 3600.0
WINDOWS_S = (
    HOUR_S,
    4 * HOUR_S,
)  # windows in which forecasts are checked, as in docs/explanation/survival-evaluation.md
AGES_S = (300.0, 900.0, 1800.0, *(HOUR_S * hours for hours in (1, 2, 4, 8, 12, 16, 24, 36, 48)))
MAX_STAYS = 1000  # stays whose start is forecast
End = Literal["finished", "moved", "lost", "went home", "running"]


class HourSample(msgspec.Struct, frozen=True):
    """GPUs in use at the start of an hour. `own_load` and `checkpoint_load` are shares of all uplinks' capacity."""

    at_s: float
    guests: int
    owners: float
    idle: int
    own_load: float
    checkpoint_load: float


class AttemptSpan(msgspec.Struct, frozen=True):
    """One attempt of a job on a machine."""

    job: int
    attempt: int
    machine: str
    gpus: int
    start_s: float
    end_s: float
    end: End


class AbsenceSpan(msgspec.Struct, frozen=True):
    """One absence of a machine."""

    machine: str
    start_s: float
    end_s: float
    kind: str


class Observation(msgspec.Struct, frozen=True):
    """The observations of one run. Losses, downtimes and stays count from the end of the warm-up.

    `lost` is in GPU-s for each departure under a job, `down` in s for each downtime that ended, `stays` are (length in s, ended).
    `predicted` is the mean survival forecast at the start of stays, for each of AGES_S; `forecasts` has (forecast, stayed) pairs
    for each of WINDOWS_S.
    """

    result: Result
    first_weekday: str
    counts_from_s: float
    end_s: float
    gpus: dict[str, int]
    hours: list[HourSample]
    runs: list[AttemptSpan]
    away: list[AbsenceSpan]
    lost: list[float]
    down: list[float]
    stays: list[tuple[float, bool]]
    predicted: list[float]
    forecasts: list[list[tuple[float, bool]]]


class RecordingLog(EventLog):
    """An event log that also records when jobs finished and lost work."""

    def __init__(self) -> None:
        super().__init__()
        self.finished: dict[int, float] = {}
        self.losses: list[tuple[float, int, float]] = []  # (time, job, work in s)
        self.lost_at: dict[int, list[float]] = {}  # by job, times of losses greater than 0

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
    """Run a world and observe it. With `forecasts`, ask the estimator every hour and at the start of stays.

    Forecasts are the same under every policy.
    """
    campus = Campus(world, find_policy(policy), seed)
    campus.log = recorded = RecordingLog()
    hours: list[HourSample] = []
    forecast_pairs: list[list[tuple[float, bool]]] = [[] for _ in WINDOWS_S]
    stays = [
        (host.number, start, end, ended)
        for host in campus.hosts
        for start, end, ended in _stays([(one.start, one.end) for one in host.absences], campus.end)
        if start >= campus.counts_from
    ]
    every = -(-len(stays) // MAX_STAYS) or 1
    begun = sorted((start, number) for number, start, _, _ in stays[::every]) if forecasts else []
    predicted = [0.0] * len(AGES_S)
    ticks = [(HOUR_S * hour, -1) for hour in range(int(campus.end // HOUR_S))]
    campus.begin()
    for at, number in sorted([*ticks, *begun]):
        campus.kernel.run(at)
        if number >= 0:
            for place, age_s in enumerate(AGES_S):
                predicted[place] += campus.forecast.survival(number, at, age_s) / len(begun)
            continue
        hours.append(_hour(campus, at))
        if forecasts and at >= campus.counts_from:
            _ask(campus, at, forecast_pairs)
    campus.kernel.run(campus.end)
    campus.close()
    carried = _carried(campus)
    hours = [
        msgspec.structs.replace(hour, checkpoint_load=carried.get(int(hour.at_s // HOUR_S), 0.0)) for hour in hours
    ]
    gpus = {job.submission.number: job.submission.gpus for job in campus.jobs}
    lost = [work * gpus[job] for at, job, work in recorded.losses if at >= campus.counts_from]
    return Observation(
        result_of(campus),
        world.first_weekday,
        campus.counts_from,
        campus.end,
        {host.machine.name: host.machine.gpus for host in campus.hosts},
        hours,
        [run for job in campus.jobs for run in _runs(job, recorded, campus.end)],
        [
            AbsenceSpan(host.machine.name, one.start, one.end, one.kind)
            for host in campus.hosts
            for one in host.absences
        ],
        [*lost, *[0.0] * (campus.counters.departures - len(lost))],
        campus.counters.downtimes,
        [(end - start, ended) for _, start, end, ended in stays],
        predicted,
        forecast_pairs,
    )


def availability(world: World, seeds: Sequence[int]) -> list[list[float]]:
    """Return the share of GPUs lent by weekday (Monday first) and hour, after the warm-up; -1 for hours that never occur."""
    there = machines(world)
    end, start = world.days * DAY_S, world.days * DAY_S * world.warm_up
    first = DAYS.index(world.first_weekday)
    away = [[0.0] * 24 for _ in DAYS]
    for seed in seeds:
        for machine, gone in zip(there, absences(world, there, Streams(seed)), strict=True):
            for one in gone:
                for hour, seconds in _by_hour(max(one.start, start), min(one.end, end)):
                    away[(first + hour // 24) % 7][hour % 24] += seconds * machine.gpus
    total = [[0.0] * 24 for _ in DAYS]
    gpus = sum(machine.gpus for machine in there)
    for hour, seconds in _by_hour(start, end):
        total[(first + hour // 24) % 7][hour % 24] += seconds * gpus * len(seeds)
    return [
        [1 - gone / whole if whole else -1.0 for gone, whole in zip(*rows, strict=True)]
        for rows in zip(away, total, strict=True)
    ]


def _by_hour(start: float, end: float) -> Iterator[tuple[int, float]]:
    """Split a span into hours: (hour number, seconds in it)."""
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


def _hour(campus: Campus, at: float) -> HourSample:
    guests = idle = 0
    owners = 0.0
    for host in campus.hosts:
        if host.lent:
            guests += host.machine.gpus - host.free
            idle += host.free
        else:
            owners += host.machine.gpus * campus.world.owners[host.machine.owners].busy
    links = campus.topology.uplinks
    return HourSample(
        at, guests, owners, idle, sum(one.demand for one in links) / sum(one.capacity for one in links), 0.0
    )


def _carried(campus: Campus) -> dict[int, float]:
    """Return the share of the uplinks' capacity that checkpoints used, by hour."""
    whole = sum(link.capacity for link in campus.topology.uplinks) * HOUR_S
    return {hour: count / whole for hour, count in campus.topology.uplink_bytes.items()}


def _ask(campus: Campus, at: float, forecast_pairs: list[list[tuple[float, bool]]]) -> None:
    there = [host for host in campus.hosts if host.lent and not host.leaving]
    for window_s, found in zip(WINDOWS_S, forecast_pairs, strict=True):
        if at + window_s <= campus.end:
            found += [
                (campus.forecast.survival(host.number, at, window_s), host.departs_at > at + window_s) for host in there
            ]


def _runs(job: Job, recorded: RecordingLog, end: float) -> Iterator[AttemptSpan]:
    losses = recorded.lost_at.get(job.submission.number, [])
    starts = [attempt.running_unix_ms / 1000 for attempt in job.attempts]
    for place, attempt in enumerate(job.attempts):
        last = place == len(starts) - 1
        until = end if last else starts[place + 1]
        how: End = "running"
        if attempt.ended_unix_ms:
            stopped = attempt.ended_unix_ms / 1000
            lost = any(stopped - 1 <= at <= until for at in losses)
            how = "went home" if attempt.reason == WENT_HOME else "lost" if lost else "moved"
        elif last and job.submission.number in recorded.finished:
            stopped, how = recorded.finished[job.submission.number], "finished"
        else:
            stopped = until
        yield AttemptSpan(
            job.submission.number, attempt.number, attempt.nick, job.submission.gpus, starts[place], stopped, how
        )

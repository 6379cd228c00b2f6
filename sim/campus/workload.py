"""Workload: the submitted jobs, drawn from a world or read from a cluster's trace; the same for every policy.

Forms of job traces: `philly` is a column of run times (s) of Microsoft's Philly cluster, as in Alibaba's clusterdata; `openb` is
the list of pods of its cluster-trace-gpu-v2023, in which a part of a GPU counts as a whole one; `swf` is the Standard Workload
Format. A file with malformed lines is rejected with their numbers.
"""

from collections.abc import Callable
from functools import cached_property, lru_cache
from math import cos, pi
from pathlib import Path

import msgspec

from placement.availability import TraceError
from placement.traces import each_line, read_swf
from sim.campus.churn import DAY_S
from sim.campus.distributions import exponential, quantile
from sim.campus.traces import number, with_digest
from sim.campus.world import Jobs, JobTrace, World, WorldError
from sim.kernel import Streams

BUSIEST_S = 14 * 3600.0
GIB = float(1 << 30)
PHILLY, OPENB_HEADER = (
    "runtime",
    "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time",
)


class TracedJob(msgspec.Struct, frozen=True):
    """A job of a trace: submission time from the first job on, run time, and GPUs (0: not in the file)."""

    at: float
    ran_s: float
    gpus: int


class Submission(msgspec.Struct, frozen=True, dict=True):
    """A submitted job: `work_s` of undisturbed computing; `changed` is the share of its state that a checkpoint sends."""

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
        """The requirement on a machine: number of GPUs, and MiB of memory on each."""
        return self.gpus, self.vram_mib


def submissions(world: World, streams: Streams) -> list[Submission]:
    """Return all jobs in order of submission."""
    jobs = world.jobs
    if jobs.trace is not None and jobs.trace.arrivals:
        return _traced_submissions(world, jobs.trace, streams)
    busiest = max([1.0, *(period.job_factor for period in world.periods)])
    arrivals = streams.get("campus", "arrivals")
    times = [0.0] * jobs.at_start
    end = min(world.days, jobs.until_day) * DAY_S
    peak = 2 * jobs.day_night_ratio / (1 + jobs.day_night_ratio) * busiest  # of the rate, relative to its mean
    now = 0.0
    while jobs.per_day:
        now += exponential(arrivals.random()) * DAY_S / (jobs.per_day * peak)
        keep = arrivals.random()
        if now >= end:
            break
        if keep * peak < _hour_factor(jobs, now) * _day_factor(world, int(now // DAY_S)):
            times.append(now)
    return [_draw_job(jobs, number, at, streams) for number, at in enumerate(times)]


def _traced_submissions(world: World, trace: JobTrace, streams: Streams) -> list[Submission]:
    """Return the jobs of a trace at its own submission times."""
    end = min(world.days, world.jobs.until_day) * DAY_S
    traced = [job for job in read_job_trace(trace) if job.at < end]
    return [_draw_job(world.jobs, number, job.at, streams, job) for number, job in enumerate(traced)]


def _day_factor(world: World, day: int) -> float:
    """Return the factor of the submission rate on this day."""
    factor = 1.0
    for period in world.periods:
        if world.day_of(period.first) <= day <= world.day_of(period.last):
            factor *= period.job_factor
    return factor


def _hour_factor(jobs: Jobs, now: float) -> float:
    """Return the factor of the submission rate at this time of day; its mean is 1."""
    swing = (jobs.day_night_ratio - 1) / (jobs.day_night_ratio + 1)
    return 1 + swing * cos(2 * pi * (now - BUSIEST_S) / DAY_S)


def _draw_job(jobs: Jobs, number: int, at: float, streams: Streams, traced: TracedJob | None = None) -> Submission:
    stream = streams.get("campus", "jobs")
    work, state, gpus, vram, changed, user = (stream.random() for _ in range(6))
    wanted, total = jobs.gpus[-1][0], 0.0
    for count, share in jobs.gpus:
        total += share
        if gpus < total:
            wanted = count
            break
    if traced is None and jobs.trace is not None:
        found = read_job_trace(jobs.trace)
        traced = found[int(work * len(found))]
    low, high = jobs.changed
    return Submission(
        number,
        at,
        f"user{int(user * jobs.users):03d}",
        wanted if traced is None or not traced.gpus else traced.gpus,
        int(jobs.vram_gib[int(vram * len(jobs.vram_gib))] * 1024),
        _hours_s(jobs, work) if traced is None else traced.ran_s,
        quantile(jobs.state_gib, state) * GIB,
        low + changed * (high - low),
    )


def _hours_s(jobs: Jobs, u: float) -> float:
    assert jobs.hours is not None
    return quantile(jobs.hours, u) * 3600


@lru_cache(maxsize=4)
def read_job_trace(trace: JobTrace) -> tuple[TracedJob, ...]:
    """Return the jobs within the bounds of the trace, in order of submission; WorldError names malformed lines."""
    with_digest(trace)
    try:
        text = Path(trace.file).read_text(encoding="utf-8", errors="replace")
        found = READERS[trace.form](text)
    except (TraceError, OSError) as error:
        raise WorldError(f"{trace.file}: {error}") from error
    fit = [
        job
        for job in found
        if trace.min_h * 3600 <= job.ran_s <= trace.max_h * 3600 and job.ran_s > 0 and job.gpus <= trace.max_gpus
    ]
    if not fit:
        raise WorldError(f"{trace.file}: none of its {len(found)} jobs is within min_h, max_h and max_gpus")
    begun = min(job.at for job in fit)
    return tuple(
        sorted(
            (msgspec.structs.replace(job, at=job.at - begun) for job in fit),
            key=lambda job: (job.at, job.ran_s, job.gpus),
        )
    )


def read_philly(text: str) -> list[TracedJob]:
    jobs: list[TracedJob] = []
    _each_row(text, "list of run times", PHILLY, lambda fields: jobs.append(TracedJob(0.0, number(fields[0]), 0)))
    return jobs


def read_openb(text: str) -> list[TracedJob]:
    """Return the placed pods with a GPU; their run time lasts from placement to deletion."""
    jobs: list[TracedJob] = []

    def read(fields: list[str]) -> None:
        gpus, created = number(fields[3]), number(fields[8])
        if gpus != int(gpus) or gpus > 64:
            raise ValueError(f"{gpus:g} GPUs")
        if not fields[10] or not fields[9] or not gpus:
            return
        deleted, placed = number(fields[9]), number(fields[10])
        if deleted < placed or placed < created:
            raise ValueError("it ends before it begins")
        jobs.append(TracedJob(created, deleted - placed, int(gpus)))

    _each_row(text, "list of openb's pods", OPENB_HEADER, read)
    return jobs


def read_workload(text: str) -> list[TracedJob]:
    return [TracedJob(job.submitted, job.end - job.start, 0) for job in read_swf(text)]


READERS: dict[str, Callable[[str], list[TracedJob]]] = {
    "philly": read_philly,
    "openb": read_openb,
    "swf": read_workload,
}


def _each_row(text: str, what: str, header: str, read: Callable[[list[str]], None]) -> None:
    columns = len(header.split(","))
    first = True

    def row(line: str) -> None:
        nonlocal first
        if first:
            first = False
            if line.removeprefix("\ufeff") != header:
                raise ValueError(f"the header is not {header}")
            return
        if not line:
            return
        fields = line.split(",")
        if len(fields) != columns:
            raise ValueError(f"{len(fields)} fields instead of {columns}")
        read(fields)

    each_line(text, what, row)

"""Jobs as a real cluster's users brought them: run times, and GPUs where the file has them.

`philly`: a column of run times (s), of Microsoft's Philly cluster, as Alibaba's clusterdata has it. `openb`: the pods of its
cluster-trace-gpu-v2023; a part of a GPU counts as a whole one. `swf`: Standard Workload Format. Lines that are not understood are
named, and nothing is read from such a file.
"""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import msgspec

from placement.stays import TraceError
from placement.traces import each_line, read_swf
from sim.campus.traces import number, sealed
from sim.campus.world import Mix, WorldError

PHILLY, OPENB_HEADER = (
    "runtime",
    "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time",
)


class Ran(msgspec.Struct, frozen=True):
    """`at`: when it was submitted, from the first one on; `gpus` 0 where the file does not say."""

    at: float
    ran_s: float
    gpus: int


@lru_cache(maxsize=4)
def jobs_of(mix: Mix) -> tuple[Ran, ...]:
    """In the order of their coming, those between the mix's bounds; WorldError naming the lines that are wrong."""
    sealed(mix)
    try:
        text = Path(mix.file).read_text(encoding="utf-8", errors="replace")
        found = READERS[mix.form](text)
    except (TraceError, OSError) as error:
        raise WorldError(f"{mix.file}: {error}") from error
    fit = [
        job
        for job in found
        if mix.least_h * 3600 <= job.ran_s <= mix.most_h * 3600 and job.ran_s > 0 and job.gpus <= mix.most_gpus
    ]
    if not fit:
        raise WorldError(f"{mix.file}: none of its {len(found)} jobs is between least_h, most_h and most_gpus")
    begun = min(job.at for job in fit)
    return tuple(
        sorted(
            (msgspec.structs.replace(job, at=job.at - begun) for job in fit),
            key=lambda job: (job.at, job.ran_s, job.gpus),
        )
    )


def read_philly(text: str) -> list[Ran]:
    jobs: list[Ran] = []
    _each_row(text, "list of run times", PHILLY, lambda fields: jobs.append(Ran(0.0, number(fields[0]), 0)))
    return jobs


def read_openb(text: str) -> list[Ran]:
    """Pods with a GPU that were placed; their run time is from then until they were deleted."""
    jobs: list[Ran] = []

    def read(fields: list[str]) -> None:
        gpus, created = number(fields[3]), number(fields[8])
        if gpus != int(gpus) or gpus > 64:
            raise ValueError(f"{gpus:g} GPUs")
        if not fields[10] or not fields[9] or not gpus:
            return
        deleted, placed = number(fields[9]), number(fields[10])
        if deleted < placed or placed < created:
            raise ValueError("it ends before it begins")
        jobs.append(Ran(created, deleted - placed, int(gpus)))

    _each_row(text, "list of openb's pods", OPENB_HEADER, read)
    return jobs


def read_workload(text: str) -> list[Ran]:
    return [Ran(job.submitted, job.end - job.start, 0) for job in read_swf(text)]


READERS: dict[str, Callable[[str], list[Ran]]] = {"philly": read_philly, "openb": read_openb, "swf": read_workload}


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

"""Readers of published traces, each from a file's text to a `Trace`.

Formats: jobs with their nodes (Standard Workload Format with node lists, or CSV), availability as JSON (the spot traces of Wu et
al., NSDI '24) and the Failure Trace Archive's event_trace.tab. `logins.py` reads a machine's login records.
A file with an invalid line is refused; the error names the lines.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Annotated

import msgspec

from placement.availability import Span, Trace, TraceError, busy, trace_of_held, trace_of_lent

HELD_AT = 0.5  # part of a node's cores in use by the owner's jobs from which the node counts as reclaimed (own choice)
NAMED = 5  # invalid lines that an error names
LATEST = 2.0**40  # Unix seconds; a later time is a mistake
MOST_CORES = 1_000_000
MOST_SAMPLES = 10_000_000
MOST_SLOTS = 1024

CSV_HEADER = "node,start,end,cores"
SWF_FIELDS = 18
SWF_START = re.compile(r";\s*UnixStartTime:\s*(\d+)\s*$")


class Job(msgspec.Struct, frozen=True):
    """A job in a workload trace. `nodes`: (node, cores) pairs, empty if the file does not list them. `submitted`: SWF only."""

    start: float
    end: float
    cores: int
    user: str
    nodes: tuple[tuple[str, int], ...] = ()
    submitted: float = 0.0


def each_line(text: str, what: str, read: Callable[[str], None]) -> None:
    """Call `read` on every line. Raises TraceError with the numbers of the lines for which it raises ValueError."""
    wrong: list[str] = []
    count = 0
    for number, line in enumerate(text.split("\n"), 1):
        try:
            read(line.strip())
        except ValueError as error:
            count += 1
            if count <= NAMED:
                wrong.append(f"line {number}: {error}")
    if wrong:
        more = f"; and {count - NAMED} more" if count > NAMED else ""
        raise TraceError(f"not a valid {what}: {'; '.join(wrong)}{more}")


def read_swf(text: str) -> list[Job]:
    """Read Standard Workload Format. After its 18 fields a job may list the node of each of its cores: {1241,1241,1242}.

    Times count from the header's UnixStartTime, or from the epoch without one. Jobs that never ran are left out.
    """
    jobs: list[Job] = []
    begun = 0.0

    def read(line: str) -> None:
        nonlocal begun
        if not line or line.startswith(";"):
            found = SWF_START.match(line)
            begun = float(found[1]) if found else begun
            return
        head, _, rest = line.partition("{")
        fields = head.split()
        if len(fields) < SWF_FIELDS:
            raise ValueError(f"{len(fields)} fields instead of {SWF_FIELDS}")
        submitted, waited, ran, cores = (_number(field) for field in fields[1:5])
        if ran <= 0 or cores <= 0:
            return
        if cores > MOST_CORES:
            raise ValueError(f"{cores:g} cores")
        nodes: Counter[str] = Counter()
        if rest:
            listed, closed, _ = rest.partition("}")
            if not closed:
                raise ValueError("the list of nodes has no closing brace")
            nodes.update(name.strip() for name in listed.split(",") if name.strip())
        start = _moment(begun + submitted + max(0.0, waited))
        came = _moment(begun + submitted)
        jobs.append(Job(start, _moment(start + ran), int(cores), fields[11], tuple(nodes.items()), came))

    each_line(text, "Standard Workload Format", read)
    return jobs


def read_job_csv(text: str) -> list[Job]:
    """Read CSV with a line for each node of each job, under the header node,start,end,cores,user (Unix seconds)."""
    jobs: list[Job] = []
    header = True

    def read(line: str) -> None:
        nonlocal header
        if not line or line.startswith("#"):
            return
        fields = [field.strip() for field in line.split(",")]
        if header:
            header = False
            if fields[:4] != CSV_HEADER.split(","):
                raise ValueError(f"the first line is not {CSV_HEADER},user")
            return
        if len(fields) not in {4, 5}:
            raise ValueError(f"{len(fields)} fields instead of 5")
        start, end, cores = _moment(_number(fields[1])), _moment(_number(fields[2])), _number(fields[3])
        if not fields[0] or end < start or not 1 <= cores <= MOST_CORES:
            raise ValueError("the node is missing, the end is before the start, or the number of cores is out of range")
        jobs.append(Job(start, end, int(cores), fields[4] if len(fields) > 4 else "", ((fields[0], int(cores)),)))

    each_line(text, "list of jobs by node", read)
    return jobs


def nodes_of_jobs(jobs: Iterable[Job], held_at: float = HELD_AT) -> Trace:
    """Derive a trace from jobs: a node is lent while its owner's jobs use less than the part `held_at` of its cores.

    A node's number of cores is the most that are ever in use at once. The trace ends at the start of the last job: later arrivals
    are not recorded.
    """
    demands: dict[str, list[tuple[float, float, float]]] = {}
    first, last = float("inf"), float("-inf")
    for job in jobs:
        first, last = min(first, job.start), max(last, job.start)
        for node, cores in job.nodes:
            if job.end > job.start:
                demands.setdefault(node, []).append((job.start, job.end, cores))
    if not demands:
        raise TraceError("no job in this file lists the nodes it ran on")
    if first >= last:
        raise TraceError("all jobs start at the same time, so the trace has no length")
    held = {node: busy(wanted, held_at * _most(wanted)) for node, wanted in demands.items()}
    return trace_of_held(held, first, last)


def read_nodes(text: str) -> Trace:
    """Read jobs with their nodes, as SWF or CSV."""
    first = next((line for line in text.split("\n") if line.strip() and line.lstrip()[0] not in ";#"), "")
    jobs = read_job_csv(text) if first.partition(",")[0].strip() == "node" else read_swf(text)
    return nodes_of_jobs(jobs)


class _Metadata(msgspec.Struct):
    gap_seconds: Annotated[float, msgspec.Meta(gt=0, le=86_400)]


class _Availability(msgspec.Struct):
    metadata: _Metadata
    data: list[Annotated[int, msgspec.Meta(ge=0, le=MOST_SLOTS)]]


_availability = msgspec.json.Decoder(_Availability)


def read_availability(text: str, name: str) -> Trace:
    """Read `{"metadata": {"gap_seconds": N}, "data": [number available, ...]}`; time begins at 0.

    The trace has as many nodes as are ever available at once; node i is lent while more than i are available.
    """
    try:
        read = _availability.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise TraceError(f"not a valid availability trace: {error}") from error
    if not 2 <= len(read.data) <= MOST_SAMPLES:
        raise TraceError(f"not a valid availability trace: {len(read.data)} samples")
    gap, most = read.metadata.gap_seconds, max(1, *read.data)
    lent: dict[str, list[Span]] = {name if most == 1 else f"{name}/{slot}": [] for slot in range(most)}
    for slot, spans in enumerate(lent.values()):
        since: int | None = None
        for number, count in enumerate([*read.data, 0]):
            if count > slot and since is None:
                since = number
            elif count <= slot and since is not None:
                spans.append((since * gap, number * gap))
                since = None
    return trace_of_lent(lent, 0.0, len(read.data) * gap)


def read_fta(text: str) -> Trace:
    """Read the Failure Trace Archive's event_trace.tab. Its columns: event, component, node and platform ids, node name, type
    (1: available), start, end, cause of the end. Time without an event counts as not available."""
    lent: dict[str, list[Span]] = {}
    first, last = float("inf"), float("-inf")

    def read(line: str) -> None:
        nonlocal first, last
        if not line or line.startswith("#"):
            return
        fields = line.split("\t")
        if len(fields) < 8:
            raise ValueError(f"{len(fields)} columns instead of 8 or more")
        node, kind = fields[4] or fields[2], fields[5].strip()
        start, end = _moment(_number(fields[6])), _moment(_number(fields[7]))
        if not node or kind not in {"0", "1"} or end < start:
            raise ValueError("the node is missing, the type is neither 0 nor 1, or the end is before the start")
        first, last = min(first, start), max(last, end)
        spans = lent.setdefault(node, [])
        if kind == "1":
            spans.append((start, end))

    each_line(text, "event_trace.tab", read)
    if first >= last:
        raise TraceError("not a valid event_trace.tab: it covers no time")
    return trace_of_lent(lent, first, last)


def _most(demands: list[tuple[float, float, float]]) -> float:
    """Return the largest amount in use at once."""
    changes = sorted(change for start, end, amount in demands for change in ((start, amount), (end, -amount)))
    load = most = 0.0
    for _, amount in changes:
        load += amount
        most = max(most, load)
    return most


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{text[:40]!r} is not a number") from None
    if not -LATEST < value < LATEST:
        raise ValueError(f"{text[:40]!r} is out of range")
    return value


def _moment(unix: float) -> float:
    if not 0 <= unix < LATEST:
        raise ValueError(f"{unix:g} is not a valid time")
    return unix

"""Absences from trace files. The form `events` has the columns node,start,end,state,cause.

Times are in seconds, the state is `away`, and the cause is noticed, sudden, brief or empty. The importers of `placement` read all
other forms; they yield stays, and the time between stays is absence.
"""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from hashlib import blake2b
from math import ceil
from pathlib import Path
from typing import TypeVar

import msgspec

from mesh.forecast.tracefiles import files_of, read_traces
from placement.availability import Stay, TraceError
from sim.campus.world import DAYS, JobTrace, Kind, Trace, WorldError

HEADER = ["node", "start", "end", "state", "cause"]
KINDS: dict[str, Kind | None] = {"": None, "noticed": "noticed", "sudden": "sudden", "brief": "brief"}
NAMED = 5  # malformed lines that an error names
MAX_VALUE = 2.0**40
DAY_S = 86_400.0
EPOCH_WEEKDAY = 3  # Unix time began on a Thursday

Source = TypeVar("Source", Trace, JobTrace)


class Away(msgspec.Struct, frozen=True):
    """One absence of a traced node, in seconds; `cause` None if the trace does not say."""

    start: float
    end: float
    cause: Kind | None = None


def with_digest(source: Source) -> Source:
    """Return the source with the digest of its files' content; WorldError if it differs from a present one, or on read errors."""
    digest = blake2b(digest_size=16)
    try:
        for path in files_of([Path(source.file)]):
            # A journal may be in use, so its parsed content counts, not its bytes.
            journal = source.form == "journal"
            content = repr(read_traces([path], "journal", 0.0)).encode() if journal else path.read_bytes()
            digest.update(len(content).to_bytes(8, "big") + content)
    except TraceError as error:
        raise WorldError(f"{source.file}: {error}") from error
    except OSError as error:
        raise WorldError(f"{source.file}: {error.strerror or error}") from error
    if source.digest not in {"", digest.hexdigest()}:
        raise WorldError(f"{source.file} has changed: its digest is {digest.hexdigest()}, expected {source.digest}")
    return msgspec.structs.replace(source, digest=digest.hexdigest())


@lru_cache(maxsize=8)
def read_trace(trace: Trace, length_s: float, first_day: int) -> dict[str, list[Away]]:
    """Return the absences of each node in order, from the start of the world; WorldError names malformed lines."""
    with_digest(trace)
    if trace.form == "events":
        path = Path(trace.file)
        try:
            return parse_events(path.read_text(encoding="utf-8"), trace.file, length_s)
        except (OSError, UnicodeDecodeError) as error:
            raise WorldError(f"{trace.file}: {error}") from error
    offset_s = trace.utc_offset_h * 3600
    try:
        stays = read_traces(files_of([Path(trace.file)]), trace.form, offset_s)
    except (TraceError, OSError) as error:
        raise WorldError(str(error)) from error
    begins = stays.first if trace.form == "spot-json" else midnight(stays.first, first_day, offset_s)
    if stays.last < begins + length_s:
        has = max(0.0, stays.last - begins) / DAY_S
        raise WorldError(
            f"{trace.file}: it has {has:.1f} days from its first {DAYS[first_day]} on; the world needs {length_s / DAY_S:g}"
        )
    return {node: list(_between(spans, begins, begins + length_s)) for node, spans in stays.nodes.items()}


def midnight(unix: float, weekday: int, utc_offset_s: float) -> float:
    """Return the first local midnight from `unix` on that starts this weekday (Monday is 0)."""
    day = ceil((unix + utc_offset_s) / DAY_S)
    day += (weekday - EPOCH_WEEKDAY - day) % 7
    return day * DAY_S - utc_offset_s


def _between(stays: Iterable[Stay], first: float, last: float) -> Iterator[Away]:
    """Yield the absences between stays, without causes; times count from `first`."""
    since = first
    for stay in stays:
        if stay.start >= last:
            break
        if stay.start > since:
            yield Away(since - first, stay.start - first)
        since = max(since, stay.end)
    if since < last:
        yield Away(since - first, last - first)


def parse_events(text: str, source: str, length_s: float) -> dict[str, list[Away]]:
    lines = text.splitlines()
    if not lines or [word.strip() for word in lines[0].split(",")] != HEADER:
        raise WorldError(f"{source}: line 1: the header is not {','.join(HEADER)}")
    nodes: dict[str, list[Away]] = {}
    wrong: list[str] = []
    last = 0.0
    for number, line in enumerate(lines[1:], 2):
        if not line.strip():
            continue
        try:
            node, away = _line(line)
        except ValueError as error:
            wrong.append(f"line {number}: {error}")
            continue
        last = max(last, away.end)
        kept = nodes.setdefault(node, [])
        if away.end > away.start:
            kept.append(away)
    if wrong:
        more = f"; and {len(wrong) - NAMED} more" if len(wrong) > NAMED else ""
        raise WorldError(f"{source}: {'; '.join(wrong[:NAMED])}{more}")
    if last < length_s:
        raise WorldError(f"{source}: it has {last / 86_400:.1f} days; the world needs {length_s / 86_400:g}")
    return {node: _merged(spans, length_s) for node, spans in nodes.items()}


def _line(line: str) -> tuple[str, Away]:
    words = [word.strip() for word in line.split(",")]
    if len(words) != len(HEADER):
        raise ValueError(f"{len(words)} fields instead of {len(HEADER)}")
    node, start, end = words[0], number(words[1]), number(words[2])
    if not node:
        raise ValueError("no node")
    if words[3] != "away":
        raise ValueError(f"the state {words[3][:20]!r} is not away")
    if words[4] not in KINDS:
        raise ValueError(f"the cause {words[4][:20]!r} is not noticed, sudden, brief or empty")
    if end < start:
        raise ValueError("it ends before it starts")
    return node, Away(start, end, KINDS[words[4]])


def number(word: str) -> float:
    """Parse a number of a file; ValueError names the mistake."""
    try:
        value = float(word)
    except ValueError:
        raise ValueError(f"{word[:40]!r} is not a number") from None
    if not 0 <= value < MAX_VALUE:
        raise ValueError(f"{word[:40]!r} is out of range")
    return value


def _merged(spans: list[Away], length_s: float) -> list[Away]:
    found: list[Away] = []
    for away in sorted(spans, key=lambda one: (one.start, one.end)):
        if away.start >= length_s:
            continue
        if found and away.start <= found[-1].end:
            found[-1] = Away(found[-1].start, max(found[-1].end, away.end), found[-1].cause)
        else:
            found.append(away)
    return found

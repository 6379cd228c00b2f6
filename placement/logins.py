"""Readers of login records: the output of `last`, or the file /var/log/wtmp.

A machine is lent while it is up and nobody is logged in. `last` has to print years (`last -F` or `--time-format=iso`); its
default output has none. A session without a recorded end counts for its start only.
"""

import calendar
import re
import struct
from collections.abc import Iterable

from placement.availability import Span, Trace, TraceError, trace_of_held
from placement.traces import each_line

MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"]
_FULL = r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) (\w{3}) +(\d{1,2}) (\d\d):(\d\d):(\d\d) (\d{4})"
_ISO = r"(\d{4})-(\d\d)-(\d\d)T(\d\d):(\d\d):(\d\d)(?:[.,]\d+)?(?:([+-])(\d\d):?(\d\d)|Z)?"
FULL, ISO = re.compile(_FULL), re.compile(_ISO)
LASTED = re.compile(r"\((?:(\d{1,5})\+)?(\d\d):(\d\d)(?::(\d\d))?\)\s*$")
SYSTEM = {"reboot", "shutdown", "runlevel"}
UNKNOWN_END_S = 60.0  # assumed length of a session whose end is not recorded

# utmp(5) of Linux on 64-bit machines: type, pid, line, id, user, host, exit, session, seconds, microseconds, address.
RECORD = struct.Struct("<h2xi32s4s32s256s2hi2i4i20s")
RUN_LEVEL, BOOT, LOGIN, DEAD, LAST_TYPE = 1, 2, 7, 8, 9


def read_last(text: str, node: str, utc_offset_s: float = 0.0) -> Trace:
    """Read the output of `last -F` or `last --time-format=iso`; local times are `utc_offset_s` ahead of UTC."""
    sessions: list[tuple[float, float | None]] = []
    boots: list[tuple[float, float | None]] = []
    begins: list[float] = []

    def read(line: str) -> None:
        words = line.split()
        if not words:
            return
        times = _times(line, utc_offset_s)
        if len(words) > 1 and words[1] == "begins":
            begins.extend(times[:1])
            return
        if not _times(line.partition(" - ")[0], utc_offset_s):
            raise ValueError("the date has no year: write the file with `last -F`")
        start = times[0]
        found = LASTED.search(line)
        if len(times) > 1:
            end: float | None = times[1]
        elif found:
            days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
            end = start + days * 86_400 + hours * 3600 + minutes * 60 + seconds
        elif "still" in words:
            end = None
        else:
            end = start + UNKNOWN_END_S
        if end is not None and end < start:
            raise ValueError("the session ends before it begins")
        if words[0] == "reboot":
            boots.append((start, end))
        elif words[0] not in SYSTEM:
            sessions.append((start, end))

    each_line(text, "output of `last`", read)
    seen = [moment for pair in (*sessions, *boots) for moment in pair if moment is not None]
    if not seen:
        raise TraceError("not a valid output of `last`: it has neither logins nor boots")
    first, last = min([*begins, *seen]), max(seen)
    spans = [(start, last if end is None else end) for start, end in sessions]
    return _trace(node, spans, [(start, last if end is None else end) for start, end in boots], first, last)


def read_wtmp(data: bytes, node: str) -> Trace:
    """Read a wtmp file of 64-bit Linux, little-endian."""
    if not data or len(data) % RECORD.size:
        raise TraceError(f"not a valid wtmp file: {len(data)} bytes are not a multiple of {RECORD.size}")
    open_since: dict[bytes, float] = {}
    sessions: list[Span] = []
    ups: list[Span] = []
    up_since: float | None = None
    moments: list[float] = []

    def end_all(now: float) -> None:
        sessions.extend((start, max(start, now)) for start in open_since.values())
        open_since.clear()

    for number, fields in enumerate(RECORD.iter_unpack(data), 1):
        kind, line, user, now = fields[0], fields[2].rstrip(b"\0"), fields[4].rstrip(b"\0"), float(fields[9])
        if not 0 <= kind <= LAST_TYPE or now < 0:
            raise TraceError(f"not a valid wtmp file: record {number} has type {kind} at time {now:g}")
        moments.append(now)
        if kind == BOOT or (kind == RUN_LEVEL and user == b"shutdown"):
            end_all(now)
            if up_since is not None:
                ups.append((up_since, max(up_since, now)))
            up_since = now if kind == BOOT else None
        elif kind in {LOGIN, DEAD}:
            since = open_since.pop(line, None)
            if since is not None:
                sessions.append((since, max(since, now)))
            if kind == LOGIN:
                open_since[line] = now
    first, last = min(moments), max(moments)
    end_all(last)
    if up_since is not None:
        ups.append((up_since, last))
    return _trace(node, sessions, ups, first, last)


def _trace(node: str, sessions: Iterable[Span], ups: Iterable[Span], first: float, last: float) -> Trace:
    if first >= last:
        raise TraceError("these logins cover no time")
    held = list(sessions)
    since = first
    up = sorted(ups)
    for start, end in up:  # the time before the first recorded boot is unknown: it counts as up
        if start > since > first:
            held.append((since, start))
        since = max(since, end)
    if up and since < last:
        held.append((since, last))
    return trace_of_held({node: held}, first, last)


def _times(line: str, utc_offset_s: float) -> list[float]:
    times: list[float] = []
    for found in FULL.finditer(line):
        month, day, hour, minute, second, year = found.groups()
        if month not in MONTHS:
            raise ValueError(f"{month!r} is not a month")
        times.append(
            _unix(int(year), MONTHS.index(month) + 1, int(day), int(hour), int(minute), int(second)) - utc_offset_s
        )
    for found in ISO.finditer(line):
        year, month, day, hour, minute, second, sign, hours, minutes = found.groups()
        offset = utc_offset_s
        if sign:
            offset = (int(hours) * 3600 + int(minutes) * 60) * (1 if sign == "+" else -1)
        elif found[0].endswith("Z"):
            offset = 0.0
        times.append(_unix(int(year), int(month), int(day), int(hour), int(minute), int(second)) - offset)
    return times


def _unix(year: int, month: int, day: int, hour: int, minute: int, second: int) -> float:
    if not (1970 <= year < 9999 and 1 <= month <= 12 and 1 <= day <= calendar.monthrange(year, month)[1]):
        raise ValueError(f"{year}-{month:02}-{day:02} is not a valid date")
    if hour > 23 or minute > 59 or second > 60:
        raise ValueError(f"{hour:02}:{minute:02}:{second:02} is not a valid time of day")
    return float(calendar.timegm((year, month, day, hour, minute, second)))

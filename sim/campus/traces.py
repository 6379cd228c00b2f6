"""Absences from a file, in one neutral form: node,start,end,state,cause (seconds; state `away`; cause noticed, sudden, brief
or nothing).

Importers of other formats give stays (`placement`); `events_of` writes them in this form.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from sim.campus.world import Kind, WorldError

HEADER = ["node", "start", "end", "state", "cause"]
KINDS: dict[str, Kind | None] = {"": None, "noticed": "noticed", "sudden": "sudden", "brief": "brief"}
NAMED = 5  # of the lines that are wrong
LATEST = 2.0**40


class Away(msgspec.Struct, frozen=True):
    start: float
    end: float
    cause: Kind | None = None


class Stay(Protocol):
    """Lent from `start` to `end`, as an importer has it."""

    @property
    def start(self) -> float: ...
    @property
    def end(self) -> float: ...


def events_of(nodes: Mapping[str, Iterable[Stay]], first: float, last: float) -> Iterator[str]:
    """The lines of a file of this form: whatever lies between stays is an absence of which no cause is known."""
    yield ",".join(HEADER)
    for node, stays in nodes.items():
        since = first
        for stay in stays:
            if stay.start > since:
                yield f"{node},{since - first!r},{stay.start - first!r},away,"
            since = max(since, stay.end)
        if since < last:
            yield f"{node},{since - first!r},{last - first!r},away,"
        else:
            yield f"{node},{last - first!r},{last - first!r},away,"  # so that one who is never away is known


def read_events(path: str, length_s: float) -> dict[str, list[Away]]:
    """Of each node, its absences in order, from the earliest start (or 0) on; WorldError naming the lines that are wrong."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise WorldError(f"{path}: {error}") from error
    return parse_events(text, path, length_s)


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
        raise WorldError(f"{source}: it ends after {last / 86_400:.1f} days, and the world has {length_s / 86_400:g}")
    return {node: _merged(spans, length_s) for node, spans in nodes.items()}


def _line(line: str) -> tuple[str, Away]:
    words = [word.strip() for word in line.split(",")]
    if len(words) != len(HEADER):
        raise ValueError(f"{len(words)} fields instead of {len(HEADER)}")
    node, start, end = words[0], _number(words[1]), _number(words[2])
    if not node:
        raise ValueError("no node")
    if words[3] != "away":
        raise ValueError(f"the state {words[3][:20]!r} is not away")
    if words[4] not in KINDS:
        raise ValueError(f"the cause {words[4][:20]!r} is none of noticed, sudden, brief, or nothing")
    if end < start:
        raise ValueError("it ends before it starts")
    return node, Away(start, end, KINDS[words[4]])


def _number(word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        raise ValueError(f"{word[:40]!r} is no number") from None
    if not 0 <= value < LATEST:
        raise ValueError(f"{word[:40]!r} is out of all bounds")
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

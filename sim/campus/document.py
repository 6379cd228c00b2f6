"""Strict TOML documents: unknown keys, wrong types and impossible numbers are errors that name the line.

A typo must never silently mean "default". Changes such as `jobs.per_day=200` apply before validation.
"""

import re
import tomllib
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

MAX_BYTES = 1 << 20

Place = tuple[str | int, ...]
Change = tuple[str, Any]  # the dotted path of a value, and the value
Kind = TypeVar("Kind")


def strict(
    data: bytes, source: str, kind: type[Kind], error: type[ValueError], changes: Sequence[str | Change] = ()
) -> "tuple[Kind, Positions]":
    """Decode a document of this kind and return it with its line numbers.

    Raises `error` with the source, the line and the mistake.
    """
    if len(data) > MAX_BYTES:
        raise error(f"{source}: {len(data)} bytes; a {kind.__name__.lower()} file has at most {MAX_BYTES}")
    try:
        text = data.decode()
        values = tomllib.loads(text)
    except UnicodeDecodeError as wrong:
        raise error(f"{source}: line {data[: wrong.start].count(10) + 1}: not UTF-8") from wrong
    except (ValueError, RecursionError) as wrong:
        raise error(f"{source}: {wrong}") from wrong
    for change in changes:
        _apply(values, change, error)
    positions = Positions(text)
    try:
        return msgspec.convert(values, kind), positions
    except (msgspec.ValidationError, RecursionError) as wrong:
        line, text = positions.of_error(str(wrong))
        raise error(f"{source}: line {line}: {text}") from wrong


def parse_change(text: str, wrong: type[ValueError]) -> Change:
    place, equals, written = text.partition("=")
    if not equals or not place.strip():
        raise wrong(f"{text!r} is not a change: write PATH=VALUE, as in jobs.per_day=200")
    try:
        return place, tomllib.loads(f"value = {written}")["value"]
    except (ValueError, RecursionError, KeyError) as error:
        raise wrong(f"{text!r}: {written!r} is not a TOML value (text needs quotes)") from error


def flat(values: dict[str, Any], above: str = "") -> list[Change]:
    """Flatten nested tables into changes, one for each value that is not a table."""
    found: list[Change] = []
    for name, value in values.items():
        place = f"{above}.{name}" if above else name
        found += flat(value, place) if isinstance(value, dict) else [(place, value)]
    return found


def _apply(values: dict[str, Any], change: str | Change, wrong: type[ValueError]) -> None:
    place, value = parse_change(change, wrong) if isinstance(change, str) else change
    names = [name.strip() for name in place.split(".")]
    if not all(names):
        raise wrong(f"{place!r} is not a path: join names with dots, as in jobs.per_day")
    inside: Any = values
    for name in names[:-1]:
        inside = inside.setdefault(name, {}) if isinstance(inside, dict) else inside[_index(inside, name, place, wrong)]
    if isinstance(inside, dict):
        inside[names[-1]] = value
    elif names[-1] == str(len(inside) if isinstance(inside, list) else ""):
        inside.append(value)  # the index after the last one adds an item
    else:
        inside[_index(inside, names[-1], place, wrong)] = value


def _index(inside: Any, name: str, place: str, wrong: type[ValueError]) -> int:
    if not isinstance(inside, list) or not name.isdecimal() or int(name) >= len(inside):
        raise wrong(f"{place!r}: {name!r} does not exist")
    return int(name)


class Positions:
    """The line numbers of the values in a TOML file, found from headers and keys at the start of lines."""

    def __init__(self, text: str) -> None:
        self._lines: dict[Place, int] = {}
        counts: dict[Place, int] = {}
        table: Place = ()
        for number, line in enumerate(text.split("\n"), 1):
            header = re.match(r"\s*(\[\[?)\s*([^\[\]]+?)\s*\]", line)
            key = re.match(r"\s*([A-Za-z0-9_.\"'-]+)\s*=", line)
            if header:
                table = self._names(header[2])
                for depth in range(1, len(table)):
                    if table[:depth] in counts:
                        table = (*table[:depth], counts[table[:depth]], *table[depth:])
                        break
                if header[1] == "[[":
                    counts[table] = counts.get(table, -1) + 1
                    self._lines.setdefault(table, number)
                    table = (*table, counts[table])
                self._lines.setdefault(table, number)
            elif key:
                self._lines.setdefault((*table, *self._names(key[1])), number)

    @staticmethod
    def _names(dotted: str) -> Place:
        return tuple(part.strip().strip("\"'") for part in dotted.split("."))

    def has(self, place: Place) -> bool:
        return place in self._lines

    def line(self, place: Place) -> int:
        """Return the line of this value, or of the nearest enclosing table that has one."""
        for depth in range(len(place), 0, -1):
            if place[:depth] in self._lines:
                return self._lines[place[:depth]]
        return 1

    def of_error(self, message: str) -> tuple[int, str]:
        """Return the line of a msgspec error, and its text without msgspec's path."""
        text, _, rest = message.partition(" - at `$")
        path = rest.rstrip("`")
        place: Place = tuple(
            int(index) if index else name for name, index in re.findall(r"\.([^.\[\]]+)|\[(\d+)\]", path)
        )
        field = re.search(r"unknown field `([^`]*)`", text)
        if field:
            place = (*place, field[1])
        name = ".".join(str(part) for part in place)
        # msgspec writes [...] for the user's own keys (an owner's name): the line is that of the enclosing table.
        return self.line(place), f"{text[:1].lower()}{text[1:]}" + (f" ({name})" if name and not field else "")

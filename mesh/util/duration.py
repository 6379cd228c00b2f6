"""Durations as people write them: `90`, `90s`, `2m`, `1h30m`, `1.5h`, `2d`. Used by the command line and the policy file."""

import re

UNITS = {"d": 86_400, "h": 3600, "m": 60, "s": 1}
MOST_S = 1e9  # thirty years (own choice)

_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)([dhms])")


class DurationError(ValueError):
    """A text is not a duration."""


def parse_duration(text: str) -> float:
    """Return seconds. Larger units come first, each at most once; a plain number is seconds. DurationError says what is wrong."""
    parts = _PART.findall(text)
    seconds = -1.0
    if parts and "".join(number + unit for number, unit in parts) == text:
        units = [unit for _, unit in parts]
        if units == sorted(set(units), key="dhms".index):
            seconds = sum(float(number) * UNITS[unit] for number, unit in parts)
    elif re.fullmatch(r"[0-9]+(?:\.[0-9]+)?(?:e[0-9]{1,2})?", text):
        seconds = float(text)
    if not 0 <= seconds < MOST_S:
        raise DurationError(f"{text!r} is not a duration: write 30s, 2m, 1h30m or 1d")
    return seconds


def duration_words(seconds: float) -> str:
    """Return the text that `parse_duration` reads as this many seconds, rounded to a tenth."""
    tenths = max(0, round(seconds * 10))
    whole, rest = divmod(tenths, 10)
    words = ""
    for unit, size in UNITS.items():
        count, whole = divmod(whole, size)
        tail = f".{rest}" if unit == "s" and rest else ""
        words += f"{count}{tail}{unit}" if count or tail else ""
    return words or "0s"


def lasting(length_s: float) -> str:
    """Format a length of time for people, in one or two units: 45s, 2h5m, 30d."""
    seconds = max(0, int(length_s))
    for size, unit, below, smaller in ((86_400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if seconds >= size:
            rest = seconds % size // below
            return f"{seconds // size}{unit}" + (f"{rest}{smaller}" if rest else "")
    return f"{seconds}s"

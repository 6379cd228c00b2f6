"""The hours of the week in which a machine is lent, in local time. Pure: the clock is an argument.

    Mon-Fri 20-08; Sat-Sun          Mon,Wed 12:30-13:30, 20-08; Sun 0-24          20-08          always          never

A range over midnight belongs to the day on which it begins. Hours follow the local clock: when daylight saving time begins, a
range is an hour shorter; when it ends, the repeated hour is in the range both times or neither.
"""

import re
from collections.abc import Callable, Sequence

import msgspec

DAY, WEEK = 24 * 60, 7 * 24 * 60  # minutes
DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
SHIFT = 120  # minutes by which local time may jump; two hours is the historical maximum (double summer time)
MOST_CHARS = 1000

_HOURS = re.compile(r"(\d{1,2})(?::(\d{2}))?\s*-\s*(\d{1,2})(?::(\d{2}))?")

Clock = Callable[[float], int]  # Unix seconds -> minute of the week in local time; Monday 00:00 is 0


class HoursError(ValueError):
    """A text does not name hours."""


class Hours(msgspec.Struct, frozen=True):
    """Hours of the week. `spans`: half-open intervals of minutes, disjoint and sorted."""

    spans: tuple[tuple[int, int], ...]

    @property
    def always(self) -> bool:
        return self.spans == ((0, WEEK),)

    @property
    def minutes(self) -> int:
        """Return the minutes in a week."""
        return sum(end - begin for begin, end in self.spans)

    @property
    def longest(self) -> int:
        """Return the longest uninterrupted time in minutes, across the end of the week too."""
        if self.always or not self.spans:
            return self.minutes
        lengths = [end - begin for begin, end in self.spans]
        if self.spans[0][0] == 0 and self.spans[-1][1] == WEEK:
            lengths.append(lengths[0] + lengths[-1])
        return max(lengths)

    def hold(self, minute: int) -> bool:
        """Return whether this minute of the week is within the hours."""
        return any(begin <= minute < end for begin, end in self.spans)

    def changes_at(self, now_unix: float, clock: Clock) -> float | None:
        """Return when the hours next begin or end (Unix seconds, to the minute); None if never."""
        if self.always or not self.spans:
            return None
        present, minute = self.hold(clock(now_unix)), clock(now_unix)
        edges = {edge % WEEK for span in self.spans for edge in span}
        ahead = min((edge - minute - 1) % WEEK + 1 for edge in edges if self.hold(edge) != present)
        # Local time may jump before then: check it minute by minute from SHIFT minutes before.
        start = now_unix - now_unix % 60
        for step in range(max(1, ahead - SHIFT), ahead + WEEK):
            if self.hold(clock(start + 60 * step)) != present:
                return start + 60 * step
        return None

    def __str__(self) -> str:
        """Return the text that parses back to these hours, with days of equal ranges combined."""
        if self.always:
            return "always"
        days: dict[tuple[int, int], list[int]] = {}
        for begin, end in _whole(self.spans):
            days.setdefault((begin % DAY, end - begin), []).append(begin // DAY)
        return (
            "; ".join(f"{_days(some)} {_time(at)}-{_time(_ends(at, length))}" for (at, length), some in days.items())
            or "never"
        )


ALWAYS, NEVER = Hours(((0, WEEK),)), Hours(())


def parse_hours(texts: str | Sequence[str]) -> Hours:
    """Parse one text, or several combined. HoursError names the part that is wrong."""
    spans: list[tuple[int, int]] = []
    for text in [texts] if isinstance(texts, str) else texts:
        if len(text) > MOST_CHARS:
            raise HoursError(f"hours have at most {MOST_CHARS} characters")
        word = text.strip().lower()
        if word == "always":
            return ALWAYS
        if word == "never":
            continue
        for part in text.split(";"):
            if part.strip():
                spans += _part(part.strip())
        if not text.strip(" ;\t\n"):
            raise HoursError("no hours given: write Mon-Fri 20-08, always or never")
    return Hours(_merged(spans))


def _part(text: str) -> list[tuple[int, int]]:
    """Parse days, then hours; without days every day, without hours all day."""
    days: list[int] = []
    hours: list[tuple[int, int]] = []
    for word in re.split(r",|(?<=[A-Za-z])\s+(?=\d)", text):
        item = word.strip()
        if re.match(r"\d", item):
            hours.append(_hours(item, text))
        elif hours:
            raise HoursError(f"{text!r}: days after hours belong to another range: put a semicolon before {item!r}")
        else:
            days += _day_range(item, text)
    return [(day * DAY + begin, day * DAY + end) for day in days or range(7) for begin, end in hours or [(0, DAY)]]


def _hours(item: str, text: str) -> tuple[int, int]:
    found = _HOURS.fullmatch(item)
    if found is None:
        raise HoursError(f"{text!r}: {item!r} is not a range of hours: write 20-08 or 20:30-08:00")
    begin, end = (int(hour) * 60 + int(minute or 0) for hour, minute in (found.group(1, 2), found.group(3, 4)))
    if begin >= DAY or end > DAY or int(found[2] or 0) > 59 or int(found[4] or 0) > 59:
        raise HoursError(f"{text!r}: {item!r} is not a time of day: write 0:00 to 24:00")
    if begin == end:
        raise HoursError(f"{text!r}: {item!r} is empty: all day is 0-24")
    return begin, end if end > begin else end + DAY


def _day_range(item: str, text: str) -> list[int]:
    names = [name.strip()[:3].title() for name in item.split("-")]
    whole = [name.strip().lower() for name in item.split("-")]
    if len(names) > 2 or any(name not in DAYS for name in names) or not all(map(_is_day, whole)):
        raise HoursError(f"{text!r}: {item!r} is not a day: write Mon, Mon-Fri or Mon,Wed")
    first, last = DAYS.index(names[0]), DAYS.index(names[-1])
    return [(first + step) % 7 for step in range((last - first) % 7 + 1)]


def _is_day(word: str) -> bool:
    """Return whether a word is a day: three letters or the whole name."""
    return word in {name.lower() for name in DAYS} or word in LONG_DAYS


LONG_DAYS = {"monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"}


def _merged(spans: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return the spans folded into one week, merged and sorted."""
    folded = [part for begin, end in spans for part in ((begin, min(end, WEEK)), (0, end - WEEK)) if part[1] > part[0]]
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(folded):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return tuple(merged)


def _whole(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return spans unfolded at the end of the week, and cut at midnights where longer than a day."""
    if len(spans) > 1 and spans[0][0] == 0 and spans[-1][1] == WEEK:
        spans = [*spans[1:-1], (spans[-1][0], WEEK + spans[0][1])]
    found = []
    for first, end in spans:
        begin = first
        while end - begin > DAY:
            midnight = (begin // DAY + 1) * DAY
            found.append((begin, midnight))
            begin = midnight
        found.append((begin, end))
    return sorted((begin % WEEK, begin % WEEK + end - begin) for begin, end in found)


def _days(days: Sequence[int]) -> str:
    """Format days, in order, with runs as Mon-Fri."""
    runs: list[list[int]] = []
    for day in days:
        if runs and day == runs[-1][-1] + 1:
            runs[-1].append(day)
        else:
            runs.append([day])
    return ",".join(DAYS[run[0]] if len(run) == 1 else f"{DAYS[run[0]]}-{DAYS[run[-1]]}" for run in runs)


def _ends(begin: int, length: int) -> int:
    end = begin + length
    return end if end <= DAY else end - DAY


def _time(minute: int) -> str:
    return f"{minute // 60:02d}:{minute % 60:02d}"

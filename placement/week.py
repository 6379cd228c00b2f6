"""A node's week: in which part of each hour, from Monday 0:00 to Sunday 23:00 local time, it was lent."""

from collections.abc import Iterable
from math import floor

from placement.factors import HOUR_S
from placement.stays import Span
from placement.summary import UNSEEN, WEEK_HOURS

MOST_HOURS = 24 * 120  # of history that is looked at


def week_of(stays: Iterable[Span], first: float, last: float, utc_offset_s: float) -> bytes:
    """Per cent for each hour of the week, of all such hours between `first` and `last`; 255 for those there were none of."""
    first = max(first, last - MOST_HOURS * HOUR_S)
    known, lent = [0.0] * WEEK_HOURS, [0.0] * WEEK_HOURS
    for spans, seconds in (([(first, last)], known), (stays, lent)):
        for start, end in spans:
            now, until = max(first, start), min(last, end)
            hour = floor((now + utc_offset_s) / HOUR_S)
            while now < until:
                upper = min(until, max(now, (hour + 1) * HOUR_S - utc_offset_s))
                seconds[(hour + 72) % WEEK_HOURS] += upper - now  # the epoch began on a Thursday
                now, hour = upper, hour + 1
    return bytes(round(100 * min(1.0, there / of)) if of > 0 else UNSEEN for there, of in zip(lent, known, strict=True))

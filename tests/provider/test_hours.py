"""Hours of the week: parsing and evaluation, also past midnight and across clock changes."""

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.provider.hours import ALWAYS, DAY, DAYS, NEVER, WEEK, Clock, Hours, HoursError, parse_hours

BERLIN = ZoneInfo("Europe/Berlin")


def clock(zone: ZoneInfo) -> Clock:
    def minute(unix_s: float) -> int:
        shown = datetime.fromtimestamp(unix_s, zone)
        return shown.weekday() * DAY + shown.hour * 60 + shown.minute

    return minute


def at(day: str, time: str) -> int:
    hour, minute = time.split(":")
    return DAYS.index(day) * DAY + int(hour) * 60 + int(minute)


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        (
            "Mon-Fri 20-08",
            ["Mon 20:00", "Tue 07:59", "Fri 23:59", "Sat 07:59"],
            ["Mon 07:59", "Mon 19:59", "Tue 08:00", "Sun 03:00"],
        ),
        ("Mon-Fri 20-08; Sat-Sun", ["Sat 12:00", "Sun 23:59"], ["Mon 00:00", "Mon 12:00"]),
        (
            "Fri-Mon 22:30-6",
            ["Fri 22:30", "Mon 23:00", "Tue 05:59"],
            ["Fri 05:00", "Tue 22:30", "Fri 22:29", "Mon 12:00"],
        ),
        ("Mon 8-20, 9-10", ["Mon 08:00", "Mon 19:59"], ["Mon 07:59", "Mon 20:00"]),
        ("Tue,Mon,Mon 8-9" + " " * 985, ["Mon 08:59", "Tue 08:00"], ["Wed 08:00", "Mon 09:00"]),
        ("Mon,Wed 12-13, 20-21", ["Mon 12:30", "Wed 20:30"], ["Tue 12:30", "Mon 13:00"]),
        ("20-08", [f"{day} 03:00" for day in DAYS], [f"{day} 12:00" for day in DAYS]),
        ("Sun 23-01", ["Sun 23:30", "Mon 00:59"], ["Mon 01:00", "Mon 23:30"]),
        ("sunday", ["Sun 00:00", "Sun 23:59"], ["Mon 00:00", "Sat 23:59"]),
        ("Tue 0-24", ["Tue 00:00", "Tue 23:59"], ["Wed 00:00"]),
        ("never", [], ["Mon 00:00"]),
        ("Always", ["Mon 00:00"], []),
    ],
)
def test_hours_are_parsed(text: str, inside: list[str], outside: list[str]) -> None:
    hours = parse_hours(text)
    assert all(hours.hold(at(*moment.split())) for moment in inside)
    assert not any(hours.hold(at(*moment.split())) for moment in outside)
    assert parse_hours(str(hours)) == hours


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no hours given"),
        (" ; ", "no hours given"),
        ("Mon 20-20", "is empty"),
        ("Mon 24-8", "is not a time of day"),
        ("Mon 10-11:60", "is not a time of day"),
        ("x" * 1001, "characters"),
        ("Mon 25-26", "is not a time of day"),
        ("Mon 10:60-11", "is not a time of day"),
        ("Montag 20-08", "'Montag' is not a day"),
        ("Mon-Wed-Fri 20-08", "is not a day"),
        ("Mon 20-08, Tue", "semicolon"),
        ("20", "not a range of hours"),
        ("x" * 2000, "characters"),
    ],
)
def test_invalid_part_of_hours_is_named(text: str, words: str) -> None:
    with pytest.raises(HoursError, match=words):
        parse_hours(text)


@given(st.text(max_size=40) | st.text(alphabet="MonTueFri 0123456789:-,;", max_size=40))
def test_hours_parser_accepts_or_raises(text: str) -> None:
    try:
        hours = parse_hours(text)
    except HoursError:
        return
    assert 0 <= hours.minutes <= WEEK


spans = st.lists(
    st.tuples(st.integers(0, WEEK - 1), st.integers(1, WEEK)).filter(lambda span: span[0] < span[1]), max_size=6
)


@given(spans)
def test_hours_round_trip(some: list[tuple[int, int]]) -> None:
    minutes = {minute for begin, end in some for minute in range(begin, end)}
    edges = sorted(minute for minute in minutes if minute - 1 not in minutes)
    hours = Hours(tuple((begin, next(end for end in range(begin, WEEK + 1) if end not in minutes)) for begin in edges))
    assert parse_hours(str(hours)) == hours and hours.minutes == len(minutes)
    assert all(hours.hold(minute) == (minute in minutes) for minute in range(0, WEEK, 7))


@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 47), st.integers(1, 47)), min_size=1, max_size=3),
    st.integers(0, 400 * 24 * 60),
)
def test_next_change_is_found(parts: list[tuple[int, int, int]], minute: int) -> None:
    """Compare with a check in small steps, through a year with clock changes."""
    times = [
        (f"{half // 2}:{half % 2 * 30:02d}", f"{(half + some) % 48 // 2}:{(half + some) % 2 * 30:02d}")
        for _, half, some in parts
    ]
    hours = parse_hours("; ".join(f"{DAYS[day]} {a}-{b}" for (day, _, _), (a, b) in zip(parts, times, strict=True)))
    now = datetime(2026, 1, 1, tzinfo=UTC).timestamp() + 60 * minute
    found, shown = hours.changes_at(now, clock(BERLIN)), clock(BERLIN)
    assert found is not None and hours.hold(shown(found)) != hours.hold(shown(now)) == hours.hold(shown(found - 60))
    steps = range(0, int(found - now), 600)
    assert {hours.hold(shown(now + step)) for step in steps} == {hours.hold(shown(now))}


@pytest.mark.parametrize(
    ("date", "hours_long"),
    [
        (datetime(2026, 3, 28, 22, tzinfo=BERLIN), 9),
        (datetime(2026, 10, 24, 22, tzinfo=BERLIN), 11),
        (datetime(2026, 6, 6, 22, tzinfo=BERLIN), 10),
    ],
)
def test_daylight_saving_changes_night_length(date: datetime, hours_long: int) -> None:
    hours = parse_hours("22-08")
    assert (
        hours.changes_at(date.timestamp(), clock(BERLIN))
        == date.timestamp() + timedelta(hours=hours_long).total_seconds()
    )


def test_always_and_never_have_no_change() -> None:
    assert ALWAYS.changes_at(0.0, clock(BERLIN)) is NEVER.changes_at(0.0, clock(BERLIN)) is None
    assert (str(ALWAYS), str(NEVER), ALWAYS.longest, NEVER.longest) == ("always", "never", WEEK, 0)
    assert parse_hours("Sun 20-24; Mon 0-8").longest == 12 * 60 and parse_hours(["Mon", "Tue"]).longest == 2 * DAY
    assert (
        parse_hours(["never", "Sat"]) == parse_hours("Sat")
        and str(parse_hours("Wed,Mon,Tue 8-9")) == "Mon-Wed 08:00-09:00"
    )


def test_change_is_told_to_the_minute() -> None:
    monday = datetime(2026, 6, 1, 12, tzinfo=BERLIN).timestamp()
    assert {parse_hours("Mon 13-14").changes_at(monday + s, clock(BERLIN)) for s in (0, 59, 3541, 3599)} == {
        monday + 3600
    }

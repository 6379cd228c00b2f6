"""This node's stays on disk, and the estimates and summaries made from them; a crash loses at most five minutes."""

import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from mesh.journal import Journal, OwnStay
from mesh.provider.attendance import KEEP_S, SLEPT_S, TELL_S, Attendance, local_offset_s
from placement.advert import HOUR, Advert
from placement.summary import UNSEEN, decode_summary
from tests.placement.test_placement import advert

ME, OTHER = b"m" * 32, b"o" * 32
DAY_S, HOUR_S = 86_400.0, 3600.0
NOW = 1.7e9


class World:
    """An attendance with fake adverts and summaries of other nodes."""

    def __init__(self, journal: Journal) -> None:
        self.published: list[bytes] = []
        self.adverts: list[Advert] = []
        self.told: dict[bytes, bytes] = {}
        self.attendance = Attendance(
            ME, journal, self.published.append, lambda: self.adverts, self.zones, lambda: self.told
        )

    def zones(self) -> dict[bytes, str]:
        return {ME: "lab", **{advert.node: advert.zone for advert in self.adverts}}

    def live(self, start: float, end: float, lent: bool = True, step_s: float = 60.0) -> float:
        now = start
        while now < end:
            self.attendance.tick(now, lent)
            now += step_s
        return now


@pytest.fixture
async def journal(tmp_path: Path) -> AsyncIterator[Journal]:
    journal = Journal(tmp_path / "journal.sqlite")
    await journal.open()
    yield journal
    await journal.close()


async def test_stays_survive_restart(journal: Journal) -> None:
    world = World(journal)
    await world.attendance.open(NOW)
    world.live(NOW, NOW + HOUR_S)
    world.live(NOW + HOUR_S, NOW + 2 * HOUR_S, lent=False)
    world.live(NOW + 2 * HOUR_S, NOW + 5 * HOUR_S)
    world.attendance.close(NOW + 5 * HOUR_S)
    kept = await journal.stays()
    assert [(stay.start_ms / 1000 - NOW, stay.end_ms / 1000 - NOW, stay.cause) for stay in kept] == [
        (0.0, HOUR_S, "reclaimed"),
        (2 * HOUR_S, 5 * HOUR_S, "reclaimed"),
    ]
    again = World(journal)
    await again.attendance.open(NOW + 6 * HOUR_S)
    before, after = world.attendance.estimator, again.attendance.estimator
    assert after.events == pytest.approx(before.events, rel=0.01)
    assert after.hours_lent == pytest.approx(before.hours_lent, rel=0.02)


async def test_crashed_stay_is_closed(journal: Journal) -> None:
    world = World(journal)
    await world.attendance.open(NOW)
    last = world.live(NOW, NOW + 2 * HOUR_S) - 60
    (open_,) = await journal.stays()
    assert open_.cause == "" and last - open_.end_ms / 1000 <= KEEP_S, "a crash leaves the stay open"
    again = World(journal)
    await again.attendance.open(NOW + DAY_S)
    (closed,) = await journal.stays()
    assert closed == msgspec.structs.replace(open_, cause="lost") and again.attendance.estimator.events > 0
    again.attendance.tick(NOW + DAY_S, True)
    again.attendance.close(NOW + DAY_S + 90)
    assert len(await journal.stays()) == 2


async def test_sleep_ends_stay(journal: Journal) -> None:
    world = World(journal)
    await world.attendance.open(NOW)
    last = world.live(NOW, NOW + HOUR_S) - 60
    world.attendance.tick(NOW + 9 * HOUR_S, True)
    assert world.attendance.since_unix == NOW + 9 * HOUR_S > last + SLEPT_S
    assert [(stay.end_ms / 1000, stay.cause) for stay in await journal.stays()][:1] == [(last, "lost")]


async def test_planned_end_is_not_a_departure(journal: Journal) -> None:
    world = World(journal)
    await world.attendance.open(NOW)
    world.live(NOW, NOW + HOUR_S)
    before = world.attendance.foretold[HOUR]
    world.attendance.until_unix = NOW + 1.5 * HOUR_S
    world.live(NOW + HOUR_S, NOW + 1.5 * HOUR_S)
    assert before > 16 and world.attendance.foretold[HOUR] == 1, "no survival past the planned end"
    world.attendance.tick(NOW + 1.5 * HOUR_S, False)
    (stay,) = await journal.stays()
    assert stay.cause == "planned" and world.attendance.estimator.events == 0
    assert decode_summary(world.published[-1]).since_unix == 0


async def test_frequent_leaver_is_capped(journal: Journal) -> None:
    world = World(journal)
    await world.attendance.open(NOW)
    now = NOW
    for _ in range(12):
        for paused in (False, True):
            world.adverts = [advert(OTHER, weight=64, paused=paused), advert(b"\1" * 32, weight=64)]
            now = world.live(now, now + 1200)
    world.adverts = [advert(OTHER, weight=64), advert(b"\1" * 32, weight=64)]
    world.live(now, now + 120)
    assert list(world.attendance.caps) == [OTHER] and world.attendance.caps[OTHER][HOUR] < 24
    world.adverts = []
    world.live(now + 120, now + 3600)
    assert not world.attendance.caps


async def test_summaries_form_prior_and_garbage_is_ignored(tmp_path: Path, journal: Journal) -> None:
    other = Journal(tmp_path / "other.sqlite")
    await other.open()
    flaky = World(other)
    await flaky.attendance.open(NOW)
    for hour in range(48):
        flaky.live(NOW + hour * HOUR_S, NOW + hour * HOUR_S + 900)
        flaky.live(NOW + hour * HOUR_S + 900, NOW + (hour + 1) * HOUR_S, lent=False)
    now = flaky.live(NOW + 48 * HOUR_S, NOW + 48 * HOUR_S + 600)
    await other.close()

    world, alone = World(journal), World(journal)
    for each in (world, alone):
        await each.attendance.open(now)
    world.told = {bytes([number]) * 32: flaky.published[-1] for number in range(20)} | {OTHER: b"rubbish", ME: b"own"}
    world.adverts = [advert(OTHER, zone="lab", up_since_unix=int(now)), advert(b"\1" * 32, zone="elsewhere")]
    assert world.attendance.tick(now, True) < alone.attendance.tick(now, True)
    assert world.attendance.told_by(OTHER) is None and world.attendance.told_by(b"\1" * 32) is not None
    estimator = world.attendance.estimator
    assert estimator.nodes[OTHER].since == int(now), "a node of the same zone is observed"
    assert estimator.zones["lab"].share == 1.0
    world.adverts = [msgspec.structs.replace(world.adverts[0], paused=True)]
    world.attendance.tick(now + 60, True)
    assert estimator.nodes[OTHER].since is None and estimator.zones["lab"].share == 0.5
    assert estimator.zones["lab"].recent.rate > 1
    world.told, world.adverts = {}, []
    world.attendance.tick(now + HOUR_S / 4 + 61, True)
    assert set(estimator.nodes) == {ME}


async def test_clock_jump_is_tolerated(journal: Journal) -> None:
    world = World(journal)
    await world.attendance.open(10.0)
    for now in (10.0, 70.0, NOW, NOW + 60, 100.0, 160.0, NOW + 120, NOW + 180):
        assert all(1 <= weight <= 64 for weight in world.attendance.tick(now, True))
    world.attendance.close(NOW + 181)
    world.attendance.tick(NOW + 4e8, True)  # years ahead, corrected a minute later
    world.attendance.tick(NOW + 1000, True)
    assert world.attendance.since_unix == NOW + 1000
    world.live(NOW + 1000, NOW + 1000 + HOUR_S)
    known = world.attendance.estimator.nodes[ME]
    assert known.since == NOW + 1000 and known.seen >= NOW + 1000 + HOUR_S - 120
    again = World(journal)
    await again.attendance.open(NOW + 500)
    assert all(1 <= weight <= 64 for weight in again.attendance.tick(NOW + 500, True))
    assert all(stay.start_ms <= stay.end_ms for stay in await journal.stays())


async def test_local_offset_is_this_machine() -> None:
    assert local_offset_s(NOW) == time.localtime(NOW).tm_gmtoff
    assert isinstance(OwnStay(1, 2, "").cause, str)


async def test_own_summary_is_not_taken_for_another_nodes(journal: Journal) -> None:
    """Else this node's own departures would no longer count for the campus here."""
    world = World(journal)
    await world.attendance.open(NOW)
    world.live(NOW, NOW + HOUR_S)
    world.told = {ME: world.published[-1]}
    world.live(NOW + HOUR_S, NOW + 2 * HOUR_S)
    assert world.attendance.estimator.nodes[ME].campus


async def test_summary_is_published_after_changes_and_now_and_then(journal: Journal) -> None:
    world = World(journal)
    await world.attendance.open(NOW)
    now = world.live(NOW, NOW + 2 * TELL_S, lent=False)
    assert not world.published, "it has never been lent"
    counts = []
    for seconds, lent in ((60.0, True), (TELL_S - 120, True), (180.0, True), (60.0, False), (TELL_S + 60, False)):
        now = world.live(now, now + seconds, lent)
        counts.append(len(world.published))
    assert counts == [1, 1, 2, 3, 4]
    assert decode_summary(world.published[1]).since_unix > 0 == decode_summary(world.published[3]).since_unix


async def test_present_stay_counts_in_the_week(journal: Journal) -> None:
    world = World(journal)
    await world.attendance.open(NOW)
    world.live(NOW, NOW + 2 * DAY_S, step_s=600.0)
    week = world.attendance.summary(NOW + 2 * DAY_S).week
    assert set(week) == {100, UNSEEN} and week.count(100) in {48, 49}
    world.live(NOW + 2 * DAY_S, NOW + 3 * DAY_S, lent=False, step_s=600.0)
    later = world.attendance.summary(NOW + 3 * DAY_S).week
    assert later.count(100) in {47, 48} and later.count(0) in {23, 24}

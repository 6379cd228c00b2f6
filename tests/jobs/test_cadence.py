"""A guest is told when to save, and what happens to it moves that; with a real control directory and a real journal."""

import asyncio
import json
from collections.abc import Iterator
from math import inf, sqrt
from pathlib import Path

import msgspec
import pytest

from ckptstore.pacing import MOST_SHARE
from mesh.jobs.cadence import Cadence, Cadences
from mesh.jobs.commits import being_written
from mesh.jobs.journal import Journal
from mesh.jobs.spec import Checkpointing, Every, SpecError, decode_spec, encode_spec
from mesh.jobs.stake import Lost, Stake
from placement.schedule import LEAST_S, Cover
from tests.jobs.worlds import make_spec

RATE = 1 / 36_000
NOW, UNIX = 1000.0, 2_000_000.0


def rates(start: float) -> Iterator[tuple[float, float]]:
    assert start >= UNIX - 50, "asked in Unix time"
    return iter([(inf, RATE)])


class Running:
    """An attempt, as far as the cadences see it."""

    def __init__(self, directory: Path, every: Every = None, gpus: int = 0, grace_s: float = 30.0) -> None:
        spec = make_spec(checkpointing=Checkpointing(mode="rename", every=every), gpus=gpus, grace_s=grace_s)
        directory.mkdir(exist_ok=True)
        self.directory = directory
        self.cadence = Cadence(spec, directory, Stake(100, lambda text: None))
        self.heeds_notice: bool | None = True
        self.notices: list[str] = []
        self.rungs: dict[str, float] = {}
        self.work = Lost(0.0)

    def lost(self) -> Lost:
        return self.work

    def notify(self, kind: str, grace_s: float, reason: str) -> None:
        self.notices.append(kind)

    def look(self, now: float, cover: Cover = Cover(), rate: float = RATE) -> bool:  # noqa: B008 - it is frozen
        return asyncio.run(
            self.cadence.look(now, UNIX + now - NOW, cover, True, lambda start: iter([(inf, rate)]), 0.0)
        )

    def told(self) -> dict[str, float]:
        return dict(json.loads((self.directory / "schedule.json").read_text()))


def test_a_guest_finds_when_it_is_due_and_anew_when_it_has_saved(tmp_path: Path) -> None:
    guest = Running(tmp_path)
    guest.look(NOW)
    assert not (tmp_path / "schedule.json").exists(), "it has not begun"
    guest.cadence.began(NOW)
    assert not guest.look(NOW)
    young = sqrt(2 * 2.0 / RATE)
    assert guest.told()["due_unix"] == pytest.approx(UNIX + young) and guest.told()["number"] == 1
    assert guest.cadence.next is not None and guest.cadence.next.why == "hazard"
    assert guest.cadence.next.loss_s == pytest.approx(RATE * young**2 / 2, rel=0.1)

    (tmp_path / "stall.json").write_text('{"seconds": 8.0}')
    guest.cadence.saved(NOW + 100.0)
    guest.look(NOW + 100.0)
    assert guest.told()["number"] == 2
    assert guest.told()["due_unix"] == pytest.approx(UNIX + 100 + 2 * young), "it costs four times what was guessed"

    guest.cadence.failed(NOW + 130.0)
    guest.look(NOW + 130.0)
    assert guest.told()["number"] == 3
    assert guest.told()["due_unix"] == pytest.approx(max(UNIX + 2 * young, UNIX + 130 + LEAST_S))
    guest.cadence.stood_still(NOW + 130.0, NOW + 230.0)
    guest.cadence.ended()
    assert not guest.look(NOW + 9999.0) and guest.cadence.next is None


def test_of_a_guest_that_tells_nothing_it_is_seen_how_long_it_writes(tmp_path: Path) -> None:
    ckpt = tmp_path / "ckpt"
    ckpt.mkdir()
    guest = Running(tmp_path / "ctl")
    guest.cadence.began(NOW)
    (ckpt / ".gitignore").touch()  # never final, and no sign of anything
    guest.cadence.sees(NOW, being_written(ckpt))
    for step, took_s in enumerate((3.0, 9.0, 6.0)):
        begun = NOW + 100 * step
        (ckpt / f".step-{step}.tmp").touch()
        guest.cadence.sees(begun, being_written(ckpt))
        guest.cadence.sees(begun + took_s / 2, being_written(ckpt))
        (ckpt / f".step-{step}.tmp").rename(ckpt / f"step-{step}")
        guest.cadence.sees(begun + took_s, being_written(ckpt))
        guest.cadence.saved(begun + took_s)
    assert guest.cadence.schedule.stall_s.value == 6.0
    guest.cadence.saved(NOW + 400.0)  # of which nothing was seen
    assert guest.cadence.schedule.stall_s.value == 6.0
    assert being_written(tmp_path / "nowhere") == frozenset()


def test_a_notice_that_suffices_makes_it_rarer_and_one_that_cannot_does_not(tmp_path: Path) -> None:
    cover = Cover(100.0, 100.0)
    for name, upload_s, lossy in (("fits", 5.0, cover.lossy), ("does not", 500.0, 1.0)):
        guest = Running(tmp_path / name)
        guest.cadence.began(NOW)
        guest.cadence.stored(NOW + upload_s, NOW, 10)
        guest.look(NOW + 1.0, cover, rate=1 / 3600)
        due = guest.cadence.schedule.due
        assert guest.cadence.lossy == lossy and due is not None and due.why != "most"
        least = 500.0 if lossy == 1.0 else 0.0
        assert due.interval_s == pytest.approx(max(sqrt(2 * 2.0 * 3600 / lossy), least, LEAST_S), abs=1.0)


def test_only_who_asked_gets_a_notice_and_once_each_time(tmp_path: Path) -> None:
    silent, timed = Running(tmp_path / "silent"), Running(tmp_path / "timed", every=5.0)
    for guest in (silent, timed):
        guest.cadence.began(NOW)
    assert [silent.look(NOW + later) for later in (0.0, 4.0, 6.0, 7.0)] == [False] * 4
    assert [timed.look(NOW + later) for later in (0.0, 4.0, 6.0, 7.0)] == [False, False, True, False]
    assert timed.told()["why"] == "asked" and timed.told()["interval_s"] == 5.0
    timed.cadence.saved(NOW + 7.0)
    assert [timed.look(NOW + later) for later in (7.0, 11.0, 12.0, 13.0)] == [False, False, True, False]


def test_a_full_or_hostile_control_directory_keeps_nobody_from_saving(tmp_path: Path) -> None:
    guest = Running(tmp_path / "ctl")
    guest.cadence.began(NOW)
    (guest.directory / "schedule.json").mkdir()  # a guest may put anything there
    (guest.directory / "stall.json").symlink_to("/dev/zero")
    guest.cadence.saved(NOW)
    guest.look(NOW)
    assert guest.told()["number"] == 1 and not guest.cadence.schedule.stall_s.known
    (guest.directory / "schedule.json").unlink()
    guest.directory.rmdir() if not any(guest.directory.iterdir()) else (guest.directory / "stall.json").unlink()
    guest.directory.rmdir()
    guest.cadence.saved(NOW + 50.0)
    guest.look(NOW + 50.0)
    guest.directory.mkdir()
    guest.look(NOW + 50.0 + 15.0)
    assert guest.told()["number"] == 2, "told once it can be"


def test_co_residents_share_the_wire_and_what_a_notice_saved_is_remembered(tmp_path: Path) -> None:
    async def play() -> None:
        journal = Journal(tmp_path / "journal.sqlite")
        await journal.open()
        cadences = Cadences(journal)
        await cadences.restore()
        cadences.rates = rates
        small, large = Running(tmp_path / "small", gpus=1), Running(tmp_path / "large", every="auto", gpus=8)
        for guest, size in ((small, 10**8), (large, 4 * 10**10)):
            guest.cadence.began(NOW)
            guest.cadence.stored(NOW + 1.0, NOW, size)
        await cadences.look([small, large], NOW + 1.0, None)
        free = [guest.cadence.schedule.interval_s for guest in (small, large)]
        assert small.cadence.stake.share == 1 / MOST_SHARE and 1 < large.cadence.stake.share < MOST_SHARE
        for guest in (small, large):
            guest.cadence.saved(NOW + 2.0)
        await cadences.look([small, large], NOW + 2.0, 1e7)
        tight = [guest.cadence.schedule.interval_s for guest in (small, large)]
        assert free[0] == pytest.approx(free[1]) and tight[1] > 3 * free[1] and tight[0] < 2 * free[0]
        await cadences.look([small, large], NOW + 2.0 + tight[1], 1e7)
        assert large.notices == ["checkpoint"] and small.notices == []

        for reason, rungs, lost, heeds in (
            ("vacated: its node leaves", {"notice": 1.0}, Lost(0.0, 0), True),
            ("vacated: its node leaves", {"notice": 1.0}, Lost(7.0), None),
            ("vacated: killed", {"killed": 1.0}, Lost(0.0, 0), True),
            ("vacated: its node leaves", {"notice": 1.0}, Lost(9.0), False),
            ("done", {}, Lost(9.0), True),
        ):
            small.rungs, small.work, small.heeds_notice = rungs, lost, heeds
            cadences.left(small, reason)
        assert (cadences.cover.departed, cadences.cover.covered) == (3, 1)
        await journal.close()
        again = Journal(tmp_path / "journal.sqlite")
        await again.open()
        later = Cadences(again)
        await later.restore()
        assert later.cover == cadences.cover
        await again.close()

    asyncio.run(play())


@pytest.mark.parametrize("every", ["auto", 1.0, 3600.0, None])
def test_how_often_is_a_part_of_the_description(every: Every) -> None:
    spec = make_spec(checkpointing=Checkpointing(every=every))
    assert decode_spec(encode_spec(spec)) == spec


def test_a_description_of_an_older_submitter_asks_for_nothing_and_nonsense_is_refused() -> None:
    spec = make_spec(checkpointing=Checkpointing())
    fields = msgspec.to_builtins(spec, builtin_types=(bytes,))
    assert "every" not in fields["checkpointing"], "what is not asked for is not sent"
    assert decode_spec(msgspec.msgpack.encode(fields)) == spec
    for every in (0.5, -1.0, inf, 1e9):
        with pytest.raises(SpecError, match="every second to every 7 days"):
            encode_spec(make_spec(checkpointing=Checkpointing(every=every)))

"""Save schedules of guests and their updates, with a real control directory and a real journal."""

import asyncio
import json
from collections.abc import Iterator
from math import inf, sqrt
from pathlib import Path

import msgspec
import pytest

from ckptstore.pacing import MOST_SHARE
from mesh.checkpoints.commit_modes import being_written
from mesh.checkpoints.loss_estimate import LossEstimate, Lost
from mesh.checkpoints.save_schedule import MAX_STALL_BYTES, SaveSchedule, SaveSchedules, decode_stall
from mesh.journal import Journal
from mesh.model.spec import Checkpointing, Every, SpecError, decode_spec, encode_spec
from placement.schedule import LEAST_S, Cover
from tests.consensus.worlds import make_spec

RATE = 1 / 36_000
NOW, UNIX = 1000.0, 2_000_000.0


def rates(start: float) -> Iterator[tuple[float, float]]:
    assert start >= UNIX - 50, "rates are requested in Unix time"
    return iter([(inf, RATE)])


class Running:
    """The attributes of an attempt that SaveSchedules reads."""

    def __init__(self, directory: Path, every: Every = None, gpus: int = 0, grace_s: float = 30.0) -> None:
        spec = make_spec(checkpointing=Checkpointing(mode="rename", every=every), gpus=gpus, grace_s=grace_s)
        directory.mkdir(exist_ok=True)
        self.directory = directory
        self.save_schedule = SaveSchedule(spec, directory, LossEstimate(100, lambda text: None))
        self.heeds_notice: bool | None = True
        self.notices: list[str] = []
        self.stages: dict[str, float] = {}
        self.work = Lost(0.0)

    def lost(self) -> Lost:
        return self.work

    def notify(self, kind: str, grace_s: float, reason: str) -> None:
        self.notices.append(kind)

    def look(self, now: float, cover: Cover = Cover(), rate: float = RATE) -> bool:  # noqa: B008 - it is frozen
        return asyncio.run(
            self.save_schedule.look(now, UNIX + now - NOW, cover, True, lambda start: iter([(inf, rate)]), 0.0)
        )

    def told(self) -> dict[str, float]:
        return dict(json.loads((self.directory / "schedule.json").read_text()))


def test_schedule_file_gives_the_next_save_time_and_follows_each_save(tmp_path: Path) -> None:
    guest = Running(tmp_path)
    guest.look(NOW)
    assert not (tmp_path / "schedule.json").exists(), "it has not begun"
    guest.save_schedule.began(NOW)
    assert not guest.look(NOW)
    young = sqrt(2 * 2.0 / RATE)
    assert guest.told()["due_unix"] == pytest.approx(UNIX + young) and guest.told()["number"] == 1
    assert guest.save_schedule.next is not None and guest.save_schedule.next.why == "hazard"
    assert guest.save_schedule.next.loss_s == pytest.approx(RATE * young**2 / 2, rel=0.1)

    (tmp_path / "stall.json").write_text('{"seconds": 8.0}')
    guest.save_schedule.saved(NOW + 100.0)
    guest.look(NOW + 100.0)
    assert guest.told()["number"] == 2
    assert guest.told()["due_unix"] == pytest.approx(UNIX + 100 + 2 * young), "the save takes four times the estimate"

    guest.save_schedule.failed(NOW + 130.0)
    guest.look(NOW + 130.0)
    assert guest.told()["number"] == 3
    assert guest.told()["due_unix"] == pytest.approx(max(UNIX + 2 * young, UNIX + 130 + LEAST_S))
    since = guest.save_schedule.schedule.since
    guest.save_schedule.stood_still(NOW + 130.0, NOW + 230.0)
    assert guest.save_schedule.schedule.since == since + 100.0
    guest.save_schedule.stood_still(since - 50.0, since + 110.0)
    assert guest.save_schedule.schedule.since == since + 110.0, "what it did before counts already"
    guest.save_schedule.ended()
    assert not guest.look(NOW + 9999.0) and guest.save_schedule.next is None


def test_save_time_of_a_silent_guest_is_measured_from_its_files(tmp_path: Path) -> None:
    ckpt = tmp_path / "ckpt"
    ckpt.mkdir()
    guest = Running(tmp_path / "ctl")
    guest.save_schedule.began(NOW)
    (ckpt / ".gitignore").touch()  # never a complete checkpoint and never a sign of a save
    guest.save_schedule.sees(NOW, being_written(ckpt))
    for step, took_s in enumerate((3.0, 9.0, 6.0)):
        begun = NOW + 100 * step
        (ckpt / f".step-{step}.tmp").touch()
        guest.save_schedule.sees(begun, being_written(ckpt))
        guest.save_schedule.sees(begun + took_s / 2, being_written(ckpt))
        (ckpt / f".step-{step}.tmp").rename(ckpt / f"step-{step}")
        guest.save_schedule.sees(begun + took_s, being_written(ckpt))
        guest.save_schedule.saved(begun + took_s)
    assert guest.save_schedule.schedule.stall_s.value == 6.0
    guest.save_schedule.saved(NOW + 400.0)  # a save without observed files
    assert guest.save_schedule.schedule.stall_s.value == 6.0
    assert being_written(tmp_path / "nowhere") == frozenset()


def test_saves_are_rarer_only_if_a_notice_leaves_time_to_save(tmp_path: Path) -> None:
    cover = Cover(100.0, 100.0)
    for name, upload_s, lossy in (("fits", 5.0, cover.lossy), ("does not", 500.0, 1.0)):
        guest = Running(tmp_path / name)
        guest.save_schedule.began(NOW)
        guest.save_schedule.stored(NOW + upload_s, NOW, 10)
        guest.look(NOW + 1.0, cover, rate=1 / 3600)
        due = guest.save_schedule.schedule.due
        assert guest.save_schedule.lossy == lossy and due is not None and due.why != "most"
        least = 500.0 if lossy == 1.0 else 0.0
        assert due.interval_s == pytest.approx(max(sqrt(2 * 2.0 * 3600 / lossy), least, LEAST_S), abs=1.0)


def test_next_save_is_planned_anew_after_an_upload(tmp_path: Path) -> None:
    guest, cover = Running(tmp_path), Cover(100.0, 100.0)
    guest.save_schedule.began(NOW)
    guest.look(NOW, cover)
    assert guest.save_schedule.lossy == cover.lossy
    guest.save_schedule.stored(NOW + 500.0, NOW, 10)
    guest.look(NOW + 1.0, cover)
    assert guest.save_schedule.lossy == 1.0, "a notice leaves no time for it"


def test_guest_with_an_interval_gets_one_notice_per_due_save(tmp_path: Path) -> None:
    silent, timed = Running(tmp_path / "silent"), Running(tmp_path / "timed", every=5.0)
    for guest in (silent, timed):
        guest.save_schedule.began(NOW)
    assert [silent.look(NOW + later) for later in (0.0, 4.0, 6.0, 7.0)] == [False] * 4
    assert [timed.look(NOW + later) for later in (0.0, 4.0, 6.0, 7.0)] == [False, False, True, False]
    assert timed.told()["why"] == "asked" and timed.told()["interval_s"] == 5.0
    timed.save_schedule.saved(NOW + 7.0)
    assert [timed.look(NOW + later) for later in (7.0, 11.0, 12.0, 13.0)] == [False, False, True, False]


@pytest.mark.parametrize("seconds", ["-1", "86401", "NaN", "1e999", '"1"', "null"])
def test_impossible_stall_is_ignored(seconds: str) -> None:
    assert decode_stall(b'{"seconds": 3.5}') == 3.5
    assert decode_stall(f'{{"seconds": {seconds}}}'.encode()) is None
    assert decode_stall(b'{"seconds": 3.5}' + bytes(MAX_STALL_BYTES).replace(b"\0", b" ")) is None


def test_stable_files_were_saved_before_they_were_seen_to_be(tmp_path: Path) -> None:
    rules = Checkpointing(mode="stable", stable_s=5.0)
    schedule = SaveSchedule(make_spec(checkpointing=rules), tmp_path, LossEstimate(100, lambda text: None))
    schedule.began(NOW)
    schedule.saved(NOW + 60.0)
    assert schedule.schedule.since == NOW + 55.0


def test_schedule_survives_a_full_or_hostile_control_directory(tmp_path: Path) -> None:
    guest = Running(tmp_path / "ctl")
    guest.save_schedule.began(NOW)
    (guest.directory / "schedule.json").mkdir()  # a guest may put anything there
    (guest.directory / "stall.json").symlink_to("/dev/zero")
    guest.save_schedule.saved(NOW)
    guest.look(NOW)
    assert guest.told()["number"] == 1 and not guest.save_schedule.schedule.stall_s.known
    (guest.directory / "schedule.json").unlink()
    guest.directory.rmdir() if not any(guest.directory.iterdir()) else (guest.directory / "stall.json").unlink()
    guest.directory.rmdir()
    guest.save_schedule.saved(NOW + 50.0)
    guest.look(NOW + 50.0)
    guest.directory.mkdir()
    guest.look(NOW + 50.0 + 15.0)
    assert guest.told()["number"] == 2, "the schedule is written as soon as possible"


def test_guests_share_the_uplink_and_notice_outcomes_survive_a_restart(tmp_path: Path) -> None:
    async def play() -> None:
        journal = Journal(tmp_path / "journal.sqlite")
        await journal.open()
        save_schedules = SaveSchedules(journal, rates)
        await save_schedules.restore()
        small, large = Running(tmp_path / "small", gpus=1), Running(tmp_path / "large", every="auto", gpus=8)
        for guest, size in ((small, 10**8), (large, 4 * 10**10)):
            guest.save_schedule.began(NOW)
            guest.save_schedule.stored(NOW + 1.0, NOW, size)
        await save_schedules.look([small, large], NOW + 1.0, None)
        free = [guest.save_schedule.schedule.interval_s for guest in (small, large)]
        assert small.save_schedule.loss.share == 1 / MOST_SHARE and 1 < large.save_schedule.loss.share < MOST_SHARE
        for guest in (small, large):
            guest.save_schedule.saved(NOW + 2.0)
        await save_schedules.look([small, large], NOW + 2.0, 1e7)
        tight = [guest.save_schedule.schedule.interval_s for guest in (small, large)]
        assert free[0] == pytest.approx(free[1]) and tight[1] > 3 * free[1] and tight[0] < 2 * free[0]
        await save_schedules.look([small, large], NOW + 2.0 + tight[1], 1e7)
        assert large.notices == ["checkpoint"] and small.notices == []

        for reason, stages, lost, heeds in (
            ("vacated: its node leaves", {"notice": 1.0}, Lost(0.0, 0), True),
            ("vacated: its node leaves", {"notice": 1.0}, Lost(7.0), None),
            ("vacated: killed", {"killed": 1.0}, Lost(0.0, 0), True),
            ("vacated: its node leaves", {"notice": 1.0}, Lost(9.0), False),
            ("done", {}, Lost(9.0), True),
        ):
            small.stages, small.work, small.heeds_notice = stages, lost, heeds
            save_schedules.left(small, reason)
        assert (save_schedules.cover.departed, save_schedules.cover.covered) == (3, 1)
        await journal.close()
        again = Journal(tmp_path / "journal.sqlite")
        await again.open()
        later = SaveSchedules(again)
        await later.restore()
        assert later.cover == save_schedules.cover
        await again.close()

    asyncio.run(play())


@pytest.mark.parametrize("every", ["auto", 1.0, 3600.0, None])
def test_save_interval_survives_encoding_of_the_spec(every: Every) -> None:
    spec = make_spec(checkpointing=Checkpointing(every=every))
    assert decode_spec(encode_spec(spec)) == spec


def test_spec_without_an_interval_is_valid_and_bad_intervals_are_refused() -> None:
    spec = make_spec(checkpointing=Checkpointing())
    fields = msgspec.to_builtins(spec, builtin_types=(bytes,))
    assert "every" not in fields["checkpointing"], "an interval that is not set is not sent"
    assert decode_spec(msgspec.msgpack.encode(fields)) == spec
    for every in (0.5, -1.0, inf, 1e9):
        with pytest.raises(SpecError, match="every second to every 7 days"):
            encode_spec(make_spec(checkpointing=Checkpointing(every=every)))

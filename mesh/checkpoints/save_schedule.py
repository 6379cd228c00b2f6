"""Save schedule: when each guest of this node is to save, by `placement/schedule.py`, fed with what happens here.

A guest finds the answer in `schedule.json` of its control directory, and writes how long a save blocks it to `stall.json`. A
guest whose spec says how often (`--ckpt-every`) gets a notice as well when a save is due.
"""

import json
import logging
import time
from asyncio import to_thread
from collections.abc import Iterable, Iterator
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Protocol

import msgspec

from ckptstore.pacing import MOST_SHARE
from membership.malformed import MALFORMED
from mesh.checkpoints.loss_estimate import LossEstimate, Lost
from mesh.consensus.contract import VACATED
from mesh.consensus.status import NextCheckpoint
from mesh.execution.control_files import put_file, read_file
from mesh.journal import Journal
from mesh.model.spec import Every, JobSpec
from placement.allocation import gpu_percent
from placement.schedule import Cover, Rates, Recent, Schedule, Upload, shares, upload_weight
from placement.survival import BASE_EVENTS, BASE_HOURS

LOOK_S = 15.0  # between plans while nothing happens (own choice)
GUESS_STALL_S = 2.0  # before a save was seen: a few GB to the page cache (own choice)
MAX_STALL_BYTES = 256
FIRST_RATE = BASE_EVENTS / BASE_HOURS / 3600


def base_rates(start_unix: float) -> Iterator[tuple[float, float]]:
    """Forecast the prior rate of departures for ever: for a node without a survival estimate."""
    return iter([(inf, FIRST_RATE)])


log = logging.getLogger(__name__)


class SaveSchedule:
    """The schedule of one attempt. Times are of CLOCK_BOOTTIME; `directory` is the control directory; `loss` sets the share
    of the bandwidth for its uploads.
    """

    def __init__(self, spec: JobSpec, directory: Path, loss: LossEstimate) -> None:
        rules, self.loss = spec.checkpointing, loss
        self.saves = rules is not None
        self.every: Every = rules.every if rules is not None else None
        self.weight = max(1, gpu_percent(spec.gpus, spec.gpu_share)) / 100
        self.grace_s = spec.grace_s
        self.schedule = Schedule(GUESS_STALL_S)
        self.bytes = Recent(0.0)
        self.lossy = 1.0
        self.next: NextCheckpoint | None = None
        self._quiet_s = rules.stable_s if rules is not None and rules.mode == "stable" else 0.0
        self._directory = directory
        self._runs = self._changed = False
        self._writing: dict[str, float] = {}  # time of the first sight
        self._wrote_s: float | None = None
        self._looked = -inf
        self._told = self._noticed = 0  # schedule numbers

    def began(self, now: float) -> None:
        self.schedule.began(now)
        self._runs = self._changed = self.saves

    def ended(self) -> None:
        """The guest is to leave, or has left."""
        self._runs, self.next = False, None

    def stood_still(self, since: float, until: float) -> None:
        self.schedule.pause(max(0.0, until - max(since, self.schedule.since)))
        self._changed = True

    def sees(self, now: float, writing: frozenset[str]) -> None:
        """Take the names of checkpoint files that are being written."""
        gone = self._writing.keys() - writing
        if gone:
            self._wrote_s = now - max(self._writing[name] for name in gone)
        self._writing = {name: self._writing.get(name, now) for name in writing}

    def saved(self, now: float, stall_s: float | None = None) -> None:
        """The guest has made a checkpoint.

        `stall_s`: how long that blocked it, where known; else what the guest has written to `stall.json`, else the time for
        which it was seen to write.
        """
        with suppress(OSError):
            if stall_s is None:
                stall_s = decode_stall(read_file(self._directory / "stall.json", MAX_STALL_BYTES))
        stall_s = self._wrote_s if stall_s is None else stall_s
        if stall_s is not None:
            self.schedule.stall_s.add(stall_s)
        self._wrote_s = None
        self.schedule.saved(now - self._quiet_s)
        self._changed = True

    def stored(self, now: float, since: float, size: int) -> None:
        """Other nodes hold the work done until `since`; `size` bytes were sent."""
        self.schedule.stored(now, since)
        self.bytes.add(size)
        self._changed = True

    def failed(self, now: float) -> None:
        self.schedule.failed(now)
        self._changed = True

    def upload(self, rate: float) -> Upload | None:
        """Return what the attempt sends, for the shares of the bandwidth; None before it has sent anything."""
        if not self._runs or not self.bytes.known:
            return None
        return Upload(self.bytes.value, self.schedule.stall_s.value, rate * self.lossy, self.weight)

    async def look(self, now: float, unix: float, cover: Cover, heeds: bool, rates: Rates, price_s: float) -> bool:
        """Plan the next save and write it for the guest; return whether the guest is to get a notice now."""
        if not self._runs:
            return False
        if self._changed or now - self._looked >= LOOK_S:
            self._changed, self._looked = False, now
            await self._plan(now, unix - now, cover, heeds, rates, price_s)
        due, number = self.schedule.due, self.schedule.number
        if self.every is None or due is None or due.at > now or self._noticed == number:
            return False
        self._noticed = number
        return True

    async def _plan(self, now: float, ahead: float, cover: Cover, heeds: bool, rates: Rates, price_s: float) -> None:
        """Plan the next save. `ahead`: Unix time minus this clock."""
        schedule = self.schedule
        self.lossy = cover.lossy_for(schedule.stall_s.value + schedule.upload_s.value, self.grace_s, heeds)

        def on_this_clock(start: float) -> Iterator[tuple[float, float]]:
            for until, rate in rates(start + ahead):
                yield until - ahead, rate

        every_s = self.every if isinstance(self.every, float) else None
        due = schedule.plan(now, self.lossy, on_this_clock, price_s, every_s)
        self.next = NextCheckpoint(round(due.at + ahead), round(due.interval_s, 1), round(due.loss_s, 1), due.why)
        if self._told == schedule.number:
            return
        fields = {"number": schedule.number, **msgspec.structs.asdict(self.next), "due_unix": due.at + ahead}
        try:
            await to_thread(put_file, self._directory / "schedule.json", json.dumps(fields).encode())
            self._told = schedule.number
        except OSError as error:  # a full disk: the guest keeps its own rhythm
            log.warning("a guest cannot be told when to save: %s", error)


class Guest(Protocol):
    """An attempt, as far as schedules need it."""

    save_schedule: SaveSchedule
    heeds_notice: bool | None  # None: unknown, assumed true
    stages: dict[str, float]

    def notify(self, kind: str, grace_s: float, reason: str) -> None: ...

    def lost(self) -> Lost: ...


class SaveSchedules:
    """The schedules of all attempts of this node. `rates`: departures per second of this machine from a Unix time on."""

    def __init__(self, journal: Journal, rates: Rates = base_rates) -> None:
        self._rates = rates
        self.cover = Cover()
        self._journal = journal

    async def restore(self) -> None:
        """Restore how guests have left in earlier runs."""
        for covered in await self._journal.departures():
            self.cover = self.cover.after(covered)

    async def look(self, guests: Iterable[Guest], now: float, budget_bps: float | None) -> None:
        """Update all schedules, about once a second. `budget_bps`: of all uploads."""
        unix, there = time.time(), list(guests)
        if not there:
            return
        rate = next(self._rates(unix), (inf, FIRST_RATE))[1]
        sent = {
            guest.save_schedule: upload for guest in there if (upload := guest.save_schedule.upload(rate)) is not None
        }
        prices = dict(zip(sent, shares(list(sent.values()), budget_bps or inf).price_s, strict=True))
        share_out(sent)
        for guest in there:
            save_schedule, heeds = guest.save_schedule, guest.heeds_notice is not False
            price_s = prices.get(save_schedule, 0.0)
            if await save_schedule.look(now, unix, self.cover, heeds, self._rates, price_s):
                guest.notify("checkpoint", save_schedule.schedule.interval_s, "a checkpoint is due")

    def left(self, guest: Guest, reason: str) -> None:
        """Learn from the end of an attempt whether a notice saves a guest's work; guests that save nothing or ignore notices
        teach nothing.
        """
        if reason.startswith(VACATED) and guest.save_schedule.saves and guest.heeds_notice is not False:
            covered = "notice" in guest.stages and not guest.lost().text
            self.cover = self.cover.after(covered)
            self._journal.note_departure(covered)


def share_out(sent: dict[SaveSchedule, Upload]) -> None:
    """Give each schedule its share of the bandwidth: 1 on average."""
    turns = {save_schedule: upload_weight(upload) for save_schedule, upload in sent.items()}
    mean = sum(turns.values()) / len(turns) if turns else 0.0
    for save_schedule, turn in turns.items():
        save_schedule.loss.share = min(MOST_SHARE, max(1 / MOST_SHARE, turn / mean)) if mean else 1.0


class _Stall(msgspec.Struct, frozen=True):
    seconds: float


_decoder = msgspec.json.Decoder(_Stall)


def decode_stall(data: bytes) -> float | None:
    """Decode a stall file into seconds; None if malformed."""
    if len(data) > MAX_STALL_BYTES:
        return None
    with suppress(*MALFORMED):
        seconds = _decoder.decode(data).seconds
        return seconds if 0 <= seconds <= 86_400 else None
    return None

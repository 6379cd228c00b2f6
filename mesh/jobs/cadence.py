"""When each guest of this node is to save: its schedule (`placement/schedule.py`), fed by what happens here, and told to it.

A guest finds the answer in `schedule.json` of its control directory; what its saves hold it up it leaves in `stall.json`. One
whose description says how often (`--ckpt-every`) gets a notice as well when the time has come.
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
from mesh.jobs.contract import VACATED
from mesh.jobs.ctlfiles import put_file, read_file
from mesh.jobs.journal import Journal
from mesh.jobs.spec import Every, JobSpec
from mesh.jobs.stake import Lost, Stake
from mesh.jobs.status import NextCheckpoint
from placement.allotment import percent
from placement.schedule import Cover, Rates, Recent, Schedule, Upload, shares, turn_share
from placement.survival import BASE_EVENTS, BASE_HOURS

LOOK_S = 15.0  # between two looks at what nothing has happened to; ours
GUESS_STALL_S = 2.0  # where nothing shows it: a few GB to a page cache; ours
MAX_STALL_BYTES = 256
FIRST_RATE = BASE_EVENTS / BASE_HOURS / 3600

log = logging.getLogger(__name__)


class Cadence:
    """Of one attempt. Times are of CLOCK_BOOTTIME; `directory` is its control directory, and by `stake` its uploads have their
    share of the wire."""

    def __init__(self, spec: JobSpec, directory: Path, stake: Stake) -> None:
        rules, self.stake = spec.checkpointing, stake
        self.saves = rules is not None
        self.every: Every = rules.every if rules is not None else None
        self.weight = max(1, percent(spec.gpus, spec.gpu_share)) / 100
        self.grace_s = spec.grace_s
        self.schedule = Schedule(GUESS_STALL_S)
        self.bytes = Recent(0.0)
        self.lossy = 1.0
        self.next: NextCheckpoint | None = None
        self._quiet_s = rules.stable_s if rules is not None and rules.mode == "stable" else 0.0
        self._directory = directory
        self._runs = self._changed = False
        self._writing: dict[str, float] = {}  # since when
        self._wrote_s: float | None = None
        self._looked = -inf
        self._told = self._noticed = 0  # which numbers

    def began(self, now: float) -> None:
        self.schedule.began(now)
        self._runs = self._changed = self.saves

    def ended(self) -> None:
        """It is to go, or has gone."""
        self._runs, self.next = False, None

    def stood_still(self, since: float, until: float) -> None:
        self.schedule.stood_still(max(0.0, until - max(since, self.schedule.since)))
        self._changed = True

    def sees(self, now: float, writing: frozenset[str]) -> None:
        """What of its checkpoints is being written."""
        gone = self._writing.keys() - writing
        if gone:
            self._wrote_s = now - max(self._writing[name] for name in gone)
        self._writing = {name: self._writing.get(name, now) for name in writing}

    def saved(self, now: float, stall_s: float | None = None) -> None:
        """A checkpoint of its has been found. `stall_s`: what it has held it up, where the guest need not tell; else, if it has
        not told either, the time for which it was seen to write."""
        with suppress(OSError):
            if stall_s is None:
                stall_s = decode_stall(read_file(self._directory / "stall.json", MAX_STALL_BYTES))
        stall_s = self._wrote_s if stall_s is None else stall_s
        if stall_s is not None:
            self.schedule.stall_s.saw(stall_s)
        self._wrote_s = None
        self.schedule.saved(now - self._quiet_s)
        self._changed = True

    def stored(self, now: float, since: float, size: int) -> None:
        """What it had computed until `since` is on other nodes: so many bytes went there."""
        self.schedule.stored(now, since)
        self.bytes.saw(size)
        self._changed = True

    def failed(self, now: float) -> None:
        self.schedule.failed(now)
        self._changed = True

    def upload(self, rate: float) -> Upload | None:
        """What it sends, as the shares of the wire see it; None before it has sent anything."""
        if not self._runs or not self.bytes.known:
            return None
        return Upload(self.bytes.value, self.schedule.stall_s.value, rate * self.lossy, self.weight)

    async def look(self, now: float, unix: float, cover: Cover, heeds: bool, rates: Rates, price_s: float) -> bool:
        """Settle when it is due, and tell the guest if that is new; whether it is to get a notice now."""
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
        """`ahead`: of this clock is Unix time."""
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
        told = {"number": schedule.number, **msgspec.structs.asdict(self.next), "due_unix": due.at + ahead}
        try:
            await to_thread(put_file, self._directory / "schedule.json", json.dumps(told).encode())
            self._told = schedule.number
        except OSError as error:  # a full disk: it saves as it sees fit
            log.warning("a guest cannot be told when to save: %s", error)


class Guest(Protocol):
    """An attempt, as far as it is looked at here."""

    cadence: Cadence
    heeds_notice: bool | None  # None: nothing is known, and it is believed
    rungs: dict[str, float]

    def notify(self, kind: str, grace_s: float, reason: str) -> None: ...

    def lost(self) -> Lost: ...


class Cadences:
    """Of this node. `rates`: departures a second of this machine, from a Unix time on, once somebody foretells them."""

    def __init__(self, journal: Journal) -> None:
        self.rates: Rates = lambda start: iter([(inf, FIRST_RATE)])
        self.cover = Cover()
        self._journal = journal

    async def restore(self) -> None:
        """How guests have left in earlier runs."""
        for covered in await self._journal.departures():
            self.cover = self.cover.after(covered)

    async def look(self, guests: Iterable[Guest], now: float, budget_bps: float | None) -> None:
        """At all of them, every second or so. `budget_bps`: of all uploads."""
        unix, there = time.time(), list(guests)
        if not there:
            return
        rate = next(self.rates(unix), (inf, FIRST_RATE))[1]
        sent = {guest.cadence: upload for guest in there if (upload := guest.cadence.upload(rate)) is not None}
        prices = dict(zip(sent, shares(list(sent.values()), budget_bps or inf).price_s, strict=True))
        share_out(sent)
        for guest in there:
            cadence, heeds = guest.cadence, guest.heeds_notice is not False
            price_s = prices.get(cadence, 0.0)
            if await cadence.look(now, unix, self.cover, heeds, self.rates, price_s):
                guest.notify("checkpoint", cadence.schedule.interval_s, "a checkpoint is due")

    def left(self, guest: Guest, reason: str) -> None:
        """Its attempt has ended here: if it had to go, learn whether a notice saved its work. Of one that saves nothing, or heeds
        no notice, nothing can be learnt of the others."""
        if reason.startswith(VACATED) and guest.cadence.saves and guest.heeds_notice is not False:
            covered = "notice" in guest.rungs and not guest.lost().words
            self.cover = self.cover.after(covered)
            self._journal.note_departure(covered)


def share_out(sent: dict[Cadence, Upload]) -> None:
    """How much of the wire each has beside the others: 1 on average."""
    turns = {cadence: turn_share(upload) for cadence, upload in sent.items()}
    mean = sum(turns.values()) / len(turns) if turns else 0.0
    for cadence, turn in turns.items():
        cadence.stake.share = min(MOST_SHARE, max(1 / MOST_SHARE, turn / mean)) if mean else 1.0


class _Stall(msgspec.Struct, frozen=True):
    seconds: float


_decoder = msgspec.json.Decoder(_Stall)


def decode_stall(data: bytes) -> float | None:
    """Seconds that a save has held a guest up, as it says; None for anything that is not that."""
    if len(data) > MAX_STALL_BYTES:
        return None
    with suppress(msgspec.MsgspecError, UnicodeDecodeError):
        seconds = _decoder.decode(data).seconds
        return seconds if 0 <= seconds <= 86_400 else None
    return None

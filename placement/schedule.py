"""When a job's next checkpoint is due, and how co-resident jobs share the wire for theirs.

A checkpoint is due when the integral of sqrt(lossy x rate / 2C) since the last one reaches 1: the fluid limit of aperiodic
checkpointing (Hiroyama, Dohi and Okamura 2013), and Young's interval (1974) where the rate is constant. `rate` is what the
survival estimator foretells for this machine, `lossy` the part of its departures that a notice does not cover, C what a
checkpoint holds the training up, with the price of the bytes that others cannot send meanwhile. What is uploaded late counts
late: the rate is taken as much later. `docs/schedule.md` derives all of it.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from math import inf, sqrt

import msgspec

# Seconds. The least: hashing and fsync cost a machine something that no stall shows. Ours.
LEAST_S, MOST_S = 60.0, 6 * 3600.0  # between two checkpoints
LEAST_STALL_S, MOST_STALL_S = 0.1, 3600.0  # ours: below a tenth of a second the least interval decides anyway
MOST_RATE = 1.0  # departures a second; nobody lends to be gone in less
STEPS = 512  # of a rate that changes: more than the estimator has in the longest interval by far; ours
HYSTERESIS = 0.2  # of the interval, by which its end must move to be told anew; that costs 1.7 per cent at most; ours
SEEN = 9  # values of which the median counts: four of them may be outliers; ours
DOUBT = 5.0  # departures that nothing covers are believed in beforehand: a new node's notice has to be seen to suffice; ours
FORGET = 64.0  # departures from which on the older ones count less; ours
MARGIN = 0.8  # of a notice, into which a save must fit; as `ckptstore.pacing.AIM`
HALVINGS = 60  # of the price's interval: to the last bits of a float

Rates = Callable[[float], Iterator[tuple[float, float]]]
"""Departures a second from that time on, each with until when it holds."""


class Cost(msgspec.Struct, frozen=True):
    """Of one checkpoint, in seconds. `stall_s`: the training stands still; `upload_s`: from then until it is safe elsewhere;
    `price_s`: what its bytes cost the other jobs of the node."""

    stall_s: float
    upload_s: float = 0.0
    price_s: float = 0.0


class Due(msgspec.Struct, frozen=True):
    """`at`: when, on the caller's clock. `loss_s`: of the work after `since`, so much is expected to be lost to departures before
    this checkpoint is safe. `why`: what set it: the `hazard`; the `least` or the `most` time between two; the `upload` of the
    one before, which it waits for; or its user `asked` for it."""

    since: float
    at: float
    loss_s: float
    why: str

    @property
    def interval_s(self) -> float:
        return self.at - self.since


def next_due(now: float, since: float, cost: Cost, lossy: float, rates: Rates) -> Due:
    """When the next is due, not before now; `since`: from when on the work is not saved (or not on its way yet)."""
    told = rates(since + _within(0.0, cost.upload_s, MOST_S))
    heard: list[tuple[float, float]] = []

    def listening(_: float) -> Iterator[tuple[float, float]]:
        for pair in told:
            heard.append(pair)
            yield pair

    at, why = due_at(now, since, cost, lossy, listening)
    return Due(since, at, expected_loss_s(since, at, cost, lossy, lambda _: chain(heard, told)), why)


def due_at(now: float, since: float, cost: Cost, lossy: float, rates: Rates) -> tuple[float, str]:
    """`at` and `why` of the next, for who does not ask what it risks."""
    stall_s = _within(LEAST_STALL_S, cost.stall_s, MOST_STALL_S) + _within(0.0, cost.price_s, MOST_STALL_S)
    upload_s = _within(0.0, cost.upload_s, MOST_S)
    least_s = min(MOST_S, max(LEAST_S, stall_s, upload_s))
    part = _within(0.0, lossy, 1.0)
    due_s, total = MOST_S, 0.0
    for begun, until, rate in _pieces(rates, since + upload_s, MOST_S):
        density = sqrt(rate * part / (2 * stall_s))
        if total + density * (until - begun) >= 1:
            due_s = begun + (1 - total) / density
            break
        total += density * (until - begun)
    why = "hazard" if due_s < MOST_S else "most"
    if due_s < least_s:
        due_s, why = least_s, "upload" if least_s == upload_s else "least"
    return max(now, since + due_s), why


def expected_loss_s(since: float, at: float, cost: Cost, lossy: float, rates: Rates) -> float:
    """Of the work after `since`, if a checkpoint of `at` is the next: from when the one before it is safe until it is itself."""
    upload_s, part = _within(0.0, cost.upload_s, MOST_S), _within(0.0, lossy, 1.0)
    length_s = max(0.0, at - since)
    loss_s = 0.0
    for begun, until, rate in _pieces(rates, since + upload_s, length_s):
        loss_s += rate * part * ((until + upload_s) ** 2 - (begun + upload_s) ** 2) / 2
    return min(loss_s, length_s + upload_s)


def _pieces(rates: Rates, start: float, length_s: float) -> Iterator[tuple[float, float, float]]:
    """(from, until, rate) in seconds after `start`, whatever `rates` gives; the last rate holds for what is left."""
    begun = rate = 0.0
    for until, found in islice(rates(start), STEPS):
        rate = _within(0.0, found, MOST_RATE)
        end = until - start
        if not end < length_s:  # or it is no number
            break
        if end > begun:
            yield begun, end, rate
            begun = end
    if begun < length_s:
        yield begun, length_s, rate


def _within(least: float, value: float, most: float) -> float:
    """`least` for what is no number."""
    if value > least:
        return value if value < most else most
    return least


class Recent:
    """What a thing has cost lately: the median of the last few."""

    def __init__(self, guess: float) -> None:
        self._guess = guess
        self._seen: deque[float] = deque(maxlen=SEEN)

    def saw(self, value: float) -> None:
        if 0 <= value < inf:
            self._seen.append(value)

    @property
    def known(self) -> bool:
        return bool(self._seen)

    @property
    def value(self) -> float:
        ordered = sorted(self._seen)
        return ordered[len(ordered) // 2] if ordered else self._guess


class Cover(msgspec.Struct, frozen=True):
    """Of a node's record: how many guests had to go, and of how many a notice saved all work."""

    departed: float = 0.0
    covered: float = 0.0

    def after(self, covered: bool) -> "Cover":
        """With one departure more."""
        left = FORGET / (FORGET + 1) if self.departed >= FORGET else 1.0
        return Cover(self.departed * left + 1, self.covered * left + covered)

    @property
    def lossy(self) -> float:
        """The part of the departures to come that a notice is not expected to cover."""
        return _within(0.0, 1 - self.covered / (self.departed + DOUBT), 1.0)

    def lossy_for(self, need_s: float, grace_s: float, heeds: bool) -> float:
        """The same for a guest that needs so long to be safe elsewhere after a notice of `grace_s`, if it `heeds` any."""
        return self.lossy if heeds and need_s <= MARGIN * grace_s else 1.0


class Schedule:
    """Of one guest: what it saves, what that costs, and when it should next. All times are of one clock, and do not run back.

    A checkpoint that was saved counts as on its way until it is stored, or has failed: then the work since the last one that
    is safe is at stake again. What is due stays due until something is saved.
    """

    def __init__(self, stall_s: float, upload_s: float = 0.0) -> None:
        self.stall_s, self.upload_s = Recent(stall_s), Recent(upload_s)
        self.number = 0  # of what is told: grows with each
        self.due: Due | None = None
        self._safe = self._since = 0.0
        self._not_before = -inf

    @property
    def since(self) -> float:
        """The work up to then is safe, or on its way to be."""
        return self._since

    def began(self, now: float) -> None:
        self._safe = self._since = now
        self.due = None

    def stood_still(self, for_s: float) -> None:
        """It has computed nothing meanwhile."""
        self._safe, self._since = self._safe + for_s, self._since + for_s
        if self.due is not None:
            self.due = msgspec.structs.replace(self.due, since=self.due.since + for_s, at=self.due.at + for_s)

    def saved(self, now: float) -> None:
        """The guest has published what it had computed until now."""
        self._since = max(self._since, now)
        self.due = None

    def stored(self, now: float, since: float) -> None:
        """What it had computed until `since` is safe."""
        self.upload_s.saw(now - since)
        self._safe = max(self._safe, since)
        self._since = max(self._since, self._safe)

    def failed(self, now: float) -> None:
        """What was on its way is not coming."""
        self._since, self.due = self._safe, None
        self._not_before = now + LEAST_S

    @property
    def interval_s(self) -> float:
        """Between two, as it was told last."""
        return self.due.interval_s if self.due is not None else MOST_S

    def cost(self, price_s: float = 0.0) -> Cost:
        return Cost(self.stall_s.value, self.upload_s.value, price_s)

    def plan(self, now: float, lossy: float, rates: Rates, price_s: float = 0.0, every_s: float | None = None) -> Due:
        """Look again. What was told stands, unless it was long ago and in vain, or it moves by more than a little. `every_s`:
        the user has said how often, and the rule only says what that risks."""
        told = self.due
        if told is not None and now < told.at + max(LEAST_S, told.interval_s) and told.at <= now:
            return told
        fresh = next_due(max(now, self._not_before), self._since, self.cost(price_s), lossy, rates)
        if every_s is not None:
            at = max(now, self._not_before, self._since + every_s)
            fresh = Due(self._since, at, expected_loss_s(self._since, at, self.cost(), lossy, rates), "asked")
        if told is not None and told.at > now and abs(fresh.at - told.at) < HYSTERESIS * told.interval_s:
            return told
        return self.tell(fresh)

    def tell(self, due: Due) -> Due:
        self.due, self.number = due, self.number + 1
        return due


class Upload(msgspec.Struct, frozen=True):
    """What one of a node's jobs sends: bytes of a checkpoint, what that stalls it, how often it loses what is not safe (a
    second), and how many GPUs then compute once more."""

    bytes: float
    stall_s: float
    rate: float
    weight: float


class Shares(msgspec.Struct, frozen=True):
    """`price`: GPU-seconds that a byte costs the others. `bps`: what each job is to send on average; `price_s`: the same price as
    seconds of its own stall."""

    price: float
    bps: tuple[float, ...]
    price_s: tuple[float, ...]


def shares(uploads: Sequence[Upload], budget_bps: float) -> Shares:
    """Of a budget, those with which least is lost and stalled, all in all: the minimum of
    sum w (C b/S + lambda S / 2b) over sum b <= B, which is b = S sqrt(lambda / 2(C + nu S/w)) for a price nu >= 0."""
    clean = [
        Upload(
            _within(1.0, upload.bytes, 1e18),
            _within(LEAST_STALL_S, upload.stall_s, MOST_STALL_S),
            _within(1e-12, upload.rate, MOST_RATE),
            _within(1e-3, upload.weight, 1e6),
        )
        for upload in uploads
    ]
    price = 0.0
    if clean and sum(_rate_at(upload, 0.0) for upload in clean) > budget_bps:
        budget = max(1.0, budget_bps)
        # With no stall at all the price has a closed form, which no stall can exceed.
        low, high = 0.0, (sum(sqrt(one.weight * one.rate * one.bytes / 2) for one in clean) / budget) ** 2
        for _ in range(HALVINGS):
            price = (low + high) / 2
            if sum(_rate_at(upload, price) for upload in clean) > budget:
                low = price
            else:
                high = price
        price = high
    return Shares(
        price,
        tuple(_rate_at(upload, price) for upload in clean),
        tuple(price * upload.bytes / upload.weight for upload in clean),
    )


def _rate_at(upload: Upload, price: float) -> float:
    return upload.bytes * sqrt(upload.rate / (2 * (upload.stall_s + price * upload.bytes / upload.weight)))


def turn_share(upload: Upload) -> float:
    """How much of the wire a checkpoint under way should have beside others: with sqrt(w lambda S) least is expected to be lost
    until all of them have arrived."""
    return sqrt(max(0.0, upload.weight * upload.rate * upload.bytes))

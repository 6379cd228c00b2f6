"""Checkpoint schedule: when a job's next checkpoint is due, and how the jobs of a node share its bandwidth for them.

A checkpoint is due when the integral of sqrt(lossy x rate / 2C) since the last one reaches 1: the fluid limit of aperiodic
checkpointing (Hiroyama, Dohi and Okamura 2013), and Young's interval (1974) for a constant rate. `rate` is the survival
estimator's hazard for this machine, `lossy` the part of its departures that a notice does not cover, and C the seconds that a
checkpoint stalls the training plus the price of the bytes that other jobs cannot send meanwhile. The rate is shifted by the
duration of the upload. `docs/explanation/schedule.md` derives the rule.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from math import inf, sqrt

import msgspec

# Seconds between two checkpoints (own choice). The minimum covers hashing and fsync, which no stall shows.
LEAST_S, MOST_S = 60.0, 6 * 3600.0
LEAST_STALL_S, MOST_STALL_S = 0.1, 3600.0  # below 0.1 s the least interval decides anyway (own choice)
MOST_RATE = 1.0  # departures a second, an upper bound
STEPS = 512  # pieces of the rate that are read; the estimator has fewer in the longest interval (own choice)
HYSTERESIS = (
    0.2  # part of the interval by which the due time must move to be announced; costs at most 1.7 % (own choice)
)
SEEN = 9  # values in a median: four of them may be outliers (own choice)
DOUBT = 5.0  # prior departures without cover: notices of a new node have to prove themselves (own choice)
FORGET = 64.0  # departures above which older ones count less (own choice)
MARGIN = 0.8  # part of a notice into which a save must fit; as `ckptstore.pacing.AIM`
HALVINGS = 60  # bisection steps for the price, to the precision of a float

Rates = Callable[[float], Iterator[tuple[float, float]]]
"""Yields (end, rate) from a start time on: departures a second, each rate until its end."""


class Cost(msgspec.Struct, frozen=True):
    """The cost of a checkpoint, in seconds. `stall_s`: the training stands still; `upload_s`: from then until the checkpoint is
    stored on another node; `price_s`: the delay that its bytes cause to other jobs of the node."""

    stall_s: float
    upload_s: float = 0.0
    price_s: float = 0.0


class Due(msgspec.Struct, frozen=True):
    """The next checkpoint, `at` a time of the caller's clock. `loss_s`: seconds of the work after `since` that are expected to be
    lost to departures before this checkpoint is safe. `why`: what determined the time: the `hazard`; the `least` or the `most`
    time between two; the `upload` of the previous one; or the interval that the user `asked` for."""

    since: float
    at: float
    loss_s: float
    why: str

    @property
    def interval_s(self) -> float:
        return self.at - self.since


def next_due(now: float, since: float, cost: Cost, lossy: float, rates: Rates) -> Due:
    """Return the next checkpoint, due now at the earliest. `since`: the work after it is neither saved nor being uploaded."""
    source = rates(since + _within(0.0, cost.upload_s, MOST_S))
    seen: list[tuple[float, float]] = []

    def recorded(_: float) -> Iterator[tuple[float, float]]:
        for pair in source:
            seen.append(pair)
            yield pair

    at, why = due_at(now, since, cost, lossy, recorded)
    return Due(since, at, expected_loss_s(since, at, cost, lossy, lambda _: chain(seen, source)), why)


def due_at(now: float, since: float, cost: Cost, lossy: float, rates: Rates) -> tuple[float, str]:
    """Return `at` and `why` of the next checkpoint, without its expected loss."""
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
    """Return the expected loss of work after `since` if the next checkpoint is due `at`, until that checkpoint is safe."""
    upload_s, part = _within(0.0, cost.upload_s, MOST_S), _within(0.0, lossy, 1.0)
    length_s = max(0.0, at - since)
    loss_s = 0.0
    for begun, until, rate in _pieces(rates, since + upload_s, length_s):
        loss_s += rate * part * ((until + upload_s) ** 2 - (begun + upload_s) ** 2) / 2
    return min(loss_s, length_s + upload_s)


def _pieces(rates: Rates, start: float, length_s: float) -> Iterator[tuple[float, float, float]]:
    """Yield (begin, end, rate) in seconds after `start`, for any output of `rates`; the last rate holds until `length_s`."""
    begun = rate = 0.0
    for until, found in islice(rates(start), STEPS):
        rate = _within(0.0, found, MOST_RATE)
        end = until - start
        if not end < length_s:  # also for NaN
            break
        if end > begun:
            yield begun, end, rate
            begun = end
    if begun < length_s:
        yield begun, length_s, rate


def _within(least: float, value: float, most: float) -> float:
    """Clamp the value; NaN gives `least`."""
    if value > least:
        return value if value < most else most
    return least


class Recent:
    """The median of the last `SEEN` values; a guess before the first."""

    def __init__(self, guess: float) -> None:
        self._guess = guess
        self._seen: deque[float] = deque(maxlen=SEEN)

    def add(self, value: float) -> None:
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
    """A node's record of departures: those of guests, and those in which a notice saved all work."""

    departed: float = 0.0
    covered: float = 0.0

    def after(self, covered: bool) -> "Cover":
        """Return the record with one more departure."""
        left = FORGET / (FORGET + 1) if self.departed >= FORGET else 1.0
        return Cover(self.departed * left + 1, self.covered * left + covered)

    @property
    def lossy(self) -> float:
        """The expected part of departures that a notice does not cover."""
        return _within(0.0, 1 - self.covered / (self.departed + DOUBT), 1.0)

    def lossy_for(self, need_s: float, grace_s: float, heeds: bool) -> float:
        """Return `lossy` for a guest that needs `need_s` of a notice of `grace_s` to save its work; 1 if it ignores notices."""
        return self.lossy if heeds and need_s <= MARGIN * grace_s else 1.0


class Schedule:
    """The schedule of one guest: the measured costs of its checkpoints, and when the next is due. All times are monotonic.

    A saved checkpoint counts as being uploaded until it is stored or has failed; if it failed, the work since the last stored
    checkpoint is at risk again. A checkpoint that is due stays due until one is saved.
    """

    def __init__(self, stall_s: float, upload_s: float = 0.0) -> None:
        self.stall_s, self.upload_s = Recent(stall_s), Recent(upload_s)
        self.number = 0  # of the announced due time: grows with each
        self.due: Due | None = None
        self._safe = self._since = 0.0
        self._not_before = -inf

    @property
    def since(self) -> float:
        """The time up to which work is stored or being uploaded."""
        return self._since

    def began(self, now: float) -> None:
        self._safe = self._since = now
        self.due = None

    def pause(self, for_s: float) -> None:
        """Shift the schedule by a time in which the guest computed nothing."""
        self._safe, self._since = self._safe + for_s, self._since + for_s
        if self.due is not None:
            self.due = msgspec.structs.replace(self.due, since=self.due.since + for_s, at=self.due.at + for_s)

    def saved(self, now: float) -> None:
        """Record that the guest saved its work until now."""
        self._since = max(self._since, now)
        self.due = None

    def stored(self, now: float, since: float) -> None:
        """Record that the work until `since` is stored elsewhere."""
        self.upload_s.add(now - since)
        self._safe = max(self._safe, since)
        self._since = max(self._since, self._safe)

    def failed(self, now: float) -> None:
        """Record that the upload failed."""
        self._since, self.due = self._safe, None
        self._not_before = now + LEAST_S

    @property
    def interval_s(self) -> float:
        """The interval that was announced last."""
        return self.due.interval_s if self.due is not None else MOST_S

    def cost(self, price_s: float = 0.0) -> Cost:
        return Cost(self.stall_s.value, self.upload_s.value, price_s)

    def plan(self, now: float, lossy: float, rates: Rates, price_s: float = 0.0, every_s: float | None = None) -> Due:
        """Compute the next due time, and announce it if it moved by more than the hysteresis, or was missed for long.

        `every_s`: the interval that the user asked for; the rule then only computes the expected loss.
        """
        announced = self.due
        if announced is not None and now < announced.at + max(LEAST_S, announced.interval_s) and announced.at <= now:
            return announced
        fresh = next_due(max(now, self._not_before), self._since, self.cost(price_s), lossy, rates)
        if every_s is not None:
            at = max(now, self._not_before, self._since + every_s)
            fresh = Due(self._since, at, expected_loss_s(self._since, at, self.cost(), lossy, rates), "asked")
        if announced is None:
            return self.announce(fresh)
        moved = abs(fresh.at - announced.at) >= HYSTERESIS * announced.interval_s
        return self.announce(fresh) if moved else announced

    def announce(self, due: Due) -> Due:
        self.due, self.number = due, self.number + 1
        return due


class Upload(msgspec.Struct, frozen=True):
    """The checkpoint uploads of one job: bytes of a checkpoint, seconds that it stalls the job, losses a second of work that is
    not stored, and the number of GPUs that then repeat it."""

    bytes: float
    stall_s: float
    rate: float
    weight: float


class Shares(msgspec.Struct, frozen=True):
    """Shares of the bandwidth. `price`: GPU-seconds that a byte costs the other jobs; `bps`: mean rate of each job; `price_s`:
    the price of a checkpoint in seconds of the job's own stall."""

    price: float
    bps: tuple[float, ...]
    price_s: tuple[float, ...]


def shares(uploads: Sequence[Upload], budget_bps: float) -> Shares:
    """Return the shares of a budget that minimise the total loss and stall: the minimum of sum w (C b/S + lambda S / 2b) over
    sum b <= B, which is b = S sqrt(lambda / 2(C + nu S/w)) for a price nu >= 0."""
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
        # Without any stall the price has a closed form, an upper bound for all stalls.
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


def upload_weight(upload: Upload) -> float:
    """Return the weight of an upload among concurrent ones: sqrt(w lambda S) minimises the expected loss of all."""
    return sqrt(max(0.0, upload.weight * upload.rate * upload.bytes))

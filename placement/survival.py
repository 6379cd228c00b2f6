"""The survival estimate S(t, t + w): the probability that a node stays lent, learnt on line from when machines were lent.

The hazard is a product of shrunk factors (`factors.py`):

    lambda0 x age x hour of the day, weekday or weekend     common to the campus
            x node x (node, age) x (node, four hours)       how this node differs
            x zone now x share of the zone lent x zone's week  machines of one room leave together

A calibration slope tempers the product, and S = (1 + theta H)^(-1/theta) with H its integral over the window: a Gamma frailty,
since no node is the average of its factors (`calibration.py`).
`docs/explanation/survival.md` has the formulas, the sources of the constants, and the limits. One update is O(1).
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from math import exp, floor, inf, log, sqrt

import msgspec

from placement import factors
from placement.advert import HORIZONS_S, MAX_WEIGHT
from placement.calibration import Frailty, Slope
from placement.factors import (
    AGE_EDGES_S,
    HOUR_S,
    SHARE_HALF_LIFE_S,
    WEEK,
    Factor,
    Fading,
    age_level,
    share_level,
)

# The departures that each prior is worth. Chosen as the half-lives are; the optimum is flat.
AGE_PRIOR, HOUR_PRIOR, SHARE_PRIOR = 7.0, 3.0, 20.0
NODE_PRIOR, OWN_AGE_PRIOR, OWN_BLOCK_PRIOR = 3.0, 5.0, 15.0
RECENT_PRIOR = 30.0  # of a zone's recent departures
WEEK_PRIOR = 5.0  # for each hour of a zone's week; a smaller one costs more where rooms leave at random hours
# One departure in twelve hours for a node that was lent four hours ago: between the 1.7 a day of a university cluster and the 7
# to 13 of spot instances, and soon outweighed.
BASE_EVENTS, BASE_HOURS = 1.0, 12.0
MOST_S = 90 * factors.DAY_S  # counted of one stay at a time, should the clock jump by years (own choice)
FORECAST_S = 4 * HOUR_S  # horizon of the forecasts from which the frailty is learnt: the longer one of the benchmark
RECENT_MEMORY_S = (
    4 * HOUR_S
)  # in which a zone's present state reverts half to its mean; without it 240-minute forecasts drift
Z_90 = 1.645


class Survival(msgspec.Struct, frozen=True):
    """The probability that a node stays, and its 90 per cent interval from counting error."""

    probability: float
    low: float
    high: float


class ZoneHistory:
    """The machines of one zone: recent departures, the share lent now and usually, and departures by the hour of the week."""

    __slots__ = ("at", "level", "recent", "share", "usual", "week")

    def __init__(self, now: float) -> None:
        self.at, self.share, self.usual = now, 1.0, 0.0
        self.level = share_level(1.0, 1.0)
        self.week = Factor(len(WEEK), WEEK_PRIOR)
        self.recent = Fading(RECENT_PRIOR, factors.RECENT_HALF_LIFE_S, now)

    def observe(self, lent: int, members: int, now: float) -> None:
        """Record the number of machines that are lent, of all members."""
        share = lent / members if members else 0.0
        if self.usual == 0.0:
            self.usual = share
        elif now > self.at:
            kept = 0.5 ** ((now - self.at) / SHARE_HALF_LIFE_S)
            self.usual = self.usual * kept + self.share * (1 - kept)
        self.at, self.share = max(now, self.at), share
        self.level = share_level(share, self.usual)


class Node:
    """The history of one node. `since`: the start of the present stay, None if the node is not lent. `campus`: its departures
    count for the campus's factors. `forecast`: the integrated hazard that was forecast until `due`."""

    __slots__ = ("ages", "blocks", "campus", "due", "forecast", "own", "seen", "since", "zone")

    def __init__(self, zone: ZoneHistory, now: float) -> None:
        self.zone, self.campus = zone, True
        self.own = Fading(NODE_PRIOR, factors.NODE_HALF_LIFE_S, now)
        self.ages = Factor(factors.OWN_AGES, OWN_AGE_PRIOR)
        self.blocks = Factor(factors.OWN_BLOCKS, OWN_BLOCK_PRIOR)
        self.since: float | None = None
        self.seen = now
        self.forecast, self.due = 0.0, inf


Span = tuple[float, float, float, int]  # start, end, rate of the hour, block


class Window:
    """A time window, cut where the hour changes; shared by all nodes whose survival is asked for."""

    __slots__ = ("_spans", "_zones", "end", "kappa", "reversion", "start")

    def __init__(
        self,
        start: float,
        end: float,
        spans: Iterable[tuple[float, float, int]],
        hours: Sequence[float],
        kappa: float,
    ) -> None:
        self.start, self.end, self.kappa = start, end, kappa
        self._spans = [(lower, upper, hours[WEEK[slot][0]] ** kappa, slot) for lower, upper, slot in spans]
        self._zones: dict[int, tuple[list[Span], list[tuple[int, float]]]] = {}
        self.reversion = _reversion(end - start)

    def spans(self, zone: ZoneHistory | None) -> tuple[list[Span], list[tuple[int, float]]]:
        """Return the spans weighted by this zone's week, and the weighted hours in each block."""
        found = self._zones.get(id(zone))
        if found is None:
            week, kappa = (_ONES if zone is None else zone.week.rates), self.kappa
            spans: list[Span] = []
            blocks: dict[int, float] = {}
            for lower, upper, rate, slot in self._spans:
                hourly, block = rate * week[slot] ** kappa, WEEK[slot][1]
                spans.append((lower, upper, hourly, block))
                blocks[block] = blocks.get(block, 0.0) + (upper - lower) / HOUR_S * hourly
            found = self._zones[id(zone)] = spans, list(blocks.items())
        return found


def _reversion(length_s: float) -> float:
    """Return the mean exponent of a zone's present state over a window of this length."""
    halvings = length_s / RECENT_MEMORY_S
    return float((1 - 0.5**halvings) / (halvings * log(2))) if halvings > 1e-9 else 1.0


class Estimator:
    """The estimator of one campus. Call `record_lent` every few minutes for each lent node, and `record_end`, in order of time.

    All times are Unix seconds; `utc_offset_s` is the present offset of local time, which may change with the season.
    """

    def __init__(self, now: float, utc_offset_s: float = 0.0) -> None:
        self.utc_offset_s = utc_offset_s
        self.nodes: dict[bytes, Node] = {}
        self.zones: dict[str, ZoneHistory] = {}
        self.events = self.hours_at_risk = self.hours_lent = 0.0
        self.other_events = self.other_hours = self.other_lent = 0.0
        self.slope, self.frailty = Slope(), Frailty()
        self.ages = Factor(factors.AGES, AGE_PRIOR, factors.AGE_SHAPE)
        self.hours = Factor(factors.HOURS, HOUR_PRIOR, circle=24)
        self.shares = Factor(factors.SHARES, SHARE_PRIOR)
        self.rate = self.mean = BASE_EVENTS / BASE_HOURS
        self._epoch = self._renewed = now
        self._scale = 1.0

    # --- observations

    def zone(self, name: str, now: float) -> ZoneHistory:
        """Return the history of this zone, created if new."""
        found = self.zones.get(name)
        if found is None:
            found = self.zones[name] = ZoneHistory(now)
        return found

    def add_node(self, node: bytes, zone: ZoneHistory, now: float) -> Node:
        """Return the node, created if new, and put it into this zone."""
        known = self.nodes.get(node)
        if known is None:
            known = self.nodes[node] = Node(zone, now)
        known.zone = zone
        return known

    def record_lent(self, node: bytes, now: float, since: float | None = None, zone: str = "") -> None:
        """Record that the node is lent, without a pause since `since` (default: the first such record)."""
        self._advance(now)
        known = self.nodes.get(node) or self.add_node(node, self.zone(zone, now), now)
        if known.since is None:
            known.since = now if since is None else min(since, now)
        elif now > known.seen:
            self._expose(known, known.seen, now)
        known.seen = max(known.seen, now)
        if known.campus and (now >= known.due or known.due == inf):
            self._resolve(known, stayed=True)
            known.forecast = self._integral(self.window(now, FORECAST_S), known.since, known)
            known.due = now + FORECAST_S

    def record_end(self, node: bytes, now: float, reclaimed: bool = True) -> None:
        """Record the end of a stay. With `reclaimed` False the end was announced beforehand and is no departure."""
        known = self.nodes.get(node)
        if known is None or known.since is None:
            return
        self._advance(now)
        last = max(now, known.seen)
        if reclaimed:
            self._expose(known, known.seen, last, departed=True)
            self._resolve(known, stayed=False)
        elif last > known.seen:
            self._expose(known, known.seen, last)
        known.since, known.seen, known.due = None, last, inf

    def forget(self, node: bytes) -> None:
        """Drop a node that is no longer a member."""
        self.nodes.pop(node, None)

    def drop_empty_zones(self) -> None:
        used = {id(node.zone) for node in self.nodes.values()}
        self.zones = {name: zone for name, zone in self.zones.items() if id(zone) in used}

    def turn_back(self, now: float) -> None:
        """Correct all times after the clock was set back to `now`."""
        for node in self.nodes.values():
            node.seen, node.own.at, node.due = min(node.seen, now), min(node.own.at, now), inf
            node.since = None if node.since is None else min(node.since, now)
        for zone in self.zones.values():
            zone.at, zone.recent.at = min(zone.at, now), min(zone.recent.at, now)
        self._epoch, self._renewed = min(self._epoch, now), min(self._renewed, now)

    # --- forecasts

    def window(self, now: float, horizon_s: float) -> Window:
        end = now + max(0.0, horizon_s)
        return Window(now, end, self._hours_between(now, end), self.hours.rates, self.slope.value)

    def hazard(self, node: bytes, window: Window) -> float:
        """Return the integral of the hazard over the window. An unknown or unlent node counts as lent from its start."""
        known = self.nodes.get(node)
        if known is None:
            return self._integral(window, window.start, None)
        return self._integral(window, window.start if known.since is None else known.since, known)

    def weights(self, nodes: Iterable[bytes], window: Window) -> list[int]:
        """Return each node's advert weight for this window."""
        return [weight(self.frailty.survival(self.hazard(node, window))) for node in nodes]

    def advert_weights(self, node: bytes, now: float, until: float = inf) -> tuple[int, ...]:
        """Return the node's advert weights for all of `HORIZONS_S`. `until`: when its owner takes it back."""
        windows = [self.window(now, horizon_s) for horizon_s in HORIZONS_S]
        return tuple(1 if window.end > until else self.weights((node,), window)[0] for window in windows)

    def rates(self, node: bytes, start: float) -> Iterator[tuple[float, float]]:
        """Yield (end, rate): departures a second from `start` on, each rate until its end. It changes with hour and age."""
        known = self.nodes.get(node)
        since = start if known is None or known.since is None else known.since
        own_ages: Sequence[float] = _ONES
        own_blocks: Sequence[float] = _ONES
        week: Sequence[float] = _ONES
        steady, present = self.rate, 1.0
        if known is not None:
            own_ages, own_blocks, week = known.ages.rates, known.blocks.rates, known.zone.week.rates
            steady *= known.own.rate
            present = known.zone.recent.rate * self.shares.rates[known.zone.level]
        kappa, offset_s, edges = self.slope.value, self.utc_offset_s, AGE_EDGES_S
        ages, hours = self.ages.rates, self.hours.rates
        common = self.mean ** (1 - kappa) / HOUR_S
        age, hour = age_level(start - since), floor((start + offset_s) / HOUR_S)
        while True:
            until = (hour + 1) * HOUR_S - offset_s
            slot = hour % len(WEEK)
            level, block = WEEK[slot]
            aged = ages[age] * own_ages[factors.OWN_AGE_OF[age]]
            if age < len(edges) and since + edges[age] <= until:
                until = since + edges[age]
                age += 1
            else:
                hour += 1
            if until > start:
                hourly = hours[level] * own_blocks[block] * week[slot]
                yield until, common * (steady * present ** _reversion(until - start) * aged * hourly) ** kappa
                start = until

    def survivals(self, nodes: Iterable[bytes], now: float, horizon_s: float) -> list[float]:
        """Return for each node the probability that it stays for another `horizon_s`."""
        window = self.window(now, horizon_s)
        return [self.frailty.survival(self.hazard(node, window)) for node in nodes]

    def survival(self, node: bytes, now: float, horizon_s: float, until: float | None = None) -> Survival:
        """Return the probability with its interval. `until`: when the owner takes the node back; it is 0 past that."""
        if until is not None and now + horizon_s > until:
            return Survival(0.0, 0.0, 0.0)
        hazard = self.hazard(node, self.window(now, horizon_s))
        spread = exp(Z_90 * sqrt(self._variance(node, now)))
        survival = self.frailty.survival
        return Survival(survival(hazard), survival(hazard * spread), survival(hazard / spread))

    # --- counts of the campus

    def adopt(
        self, base: tuple[float, float, float], counts: Sequence[tuple[Sequence[float], Sequence[float]]]
    ) -> None:
        """Replace the counts of all other nodes. `base`: departures, hours at risk and hours lent; `counts`: events and
        expectations by level, for each of `common`."""
        self.other_events, self.other_hours, self.other_lent = base
        for factor, (events, expected) in zip(self.common, counts, strict=True):
            factor.adopt(events, expected, self._scale)
        self._renew_rate()

    @property
    def common(self) -> tuple[Factor, Factor, Factor]:
        return self.ages, self.hours, self.shares

    @property
    def scale(self) -> float:
        """The weight of a count of now, relative to one at the epoch."""
        return self._scale

    # --- internals

    def _advance(self, now: float) -> None:
        self._scale = 2.0 ** min(1000.0, max(0.0, now - self._epoch) / factors.HALF_LIFE_S)
        shared = (*self.common, *(zone.week for zone in self.zones.values()))
        if self._scale > factors.REBASE:
            for factor in (*shared, *(own for node in self.nodes.values() for own in (node.ages, node.blocks))):
                factor.rebase(self._scale)
            self.events /= self._scale
            self.hours_at_risk /= self._scale
            self.hours_lent /= self._scale
            self._epoch, self._scale = now, 1.0
        if now - self._renewed > HOUR_S:  # levels without new counts fade too
            self._renewed = now
            for factor in shared:
                factor.renew(self._scale)

    def _expose(self, node: Node, start: float, end: float, departed: bool = False) -> None:
        """Count that the node was lent from `start` to `end`, with or without a departure at the end."""
        since = node.since
        assert since is not None and start <= end
        start = max(start, end - MOST_S)
        zone, share, scale = node.zone, node.zone.level, self._scale
        node.own.add(0.0, 0.0, end)
        zone.recent.add(0.0, 0.0, end)
        spans = list(self._spans(start, end, since))
        for number, (lower, upper, age, slot) in enumerate(spans):
            own_age = factors.OWN_AGE_OF[age]
            hour, block = WEEK[slot]
            events = 1.0 if departed and number == len(spans) - 1 else 0.0
            product = self.rate * self.ages.rates[age] * self.hours.rates[hour]
            product *= self.shares.rates[share] * zone.recent.rate * zone.week.rates[slot]
            product *= node.own.rate * node.ages.rates[own_age] * node.blocks.rates[block]
            hours = (upper - lower) / HOUR_S
            expected = product * hours
            if node.campus:
                if hours > 0:
                    self.slope.learn(events, hours, self.mean, product)
                self.hours_lent += hours * scale
                self.events += events * scale
                self.hours_at_risk += expected / self.rate * scale
                self.ages.add(age, events, expected / self.ages.relative(age), scale)
                self.hours.add(hour, events, expected / self.hours.rates[hour], scale)
                self.shares.add(share, events, expected / self.shares.rates[share], scale)
                self._renew_rate()
            zone.week.add(slot, events, expected / zone.week.rates[slot], scale)
            zone.recent.add(events, expected / zone.recent.rate, end)
            node.own.add(events, expected / node.own.rate, end)
            node.ages.add(own_age, events, expected / node.ages.rates[own_age], scale)
            node.blocks.add(block, events, expected / node.blocks.rates[block], scale)

    def _resolve(self, node: Node, stayed: bool) -> None:
        """Learn from the outcome of the node's forecast."""
        if node.due < inf and node.campus:
            self.frailty.learn(node.forecast, stayed)
        node.due = inf

    def _renew_rate(self) -> None:
        self.rate = (self.events / self._scale + self.other_events + BASE_EVENTS) / (
            self.hours_at_risk / self._scale + self.other_hours + BASE_HOURS
        )
        self.mean = (self.events / self._scale + self.other_events + BASE_EVENTS) / (
            self.hours_lent / self._scale + self.other_lent + BASE_HOURS
        )

    def _hours_between(self, start: float, end: float) -> Iterable[tuple[float, float, int]]:
        """Yield (start, end, hour of the week), cut where the hour changes; at least one span, which may be empty."""
        lower, hour = start, floor((start + self.utc_offset_s) / HOUR_S)
        while True:
            upper = min(end, max(lower, (hour + 1) * HOUR_S - self.utc_offset_s))
            yield lower, upper, hour % len(WEEK)
            if upper >= end:
                return
            lower, hour = upper, hour + 1

    def _spans(self, start: float, end: float, since: float) -> Iterable[tuple[float, float, int, int]]:
        """Yield (start, end, age level, hour of the week), cut where either changes."""
        for lower, upper, slot in self._hours_between(start, end):
            begun, age = lower, age_level(lower - since)
            while True:
                ended = min(upper, max(begun, since + AGE_EDGES_S[age])) if age < len(AGE_EDGES_S) else upper
                yield begun, ended, age, slot
                if ended >= upper:
                    break
                begun, age = ended, age + 1

    def _integral(self, window: Window, since: float, node: Node | None) -> float:
        rate, kappa = self.rate, window.kappa
        own_ages: Sequence[float] = _ONES
        own_blocks: Sequence[float] = _ONES
        if node is not None:
            rate *= node.own.rate * (node.zone.recent.rate * self.shares.rates[node.zone.level]) ** window.reversion
            own_ages, own_blocks = node.ages.rates, node.blocks.rates
        rate = self.mean ** (1 - kappa) * rate**kappa
        spans, blocks = window.spans(None if node is None else node.zone)
        ages = self.ages.rates
        age = bisect_right(AGE_EDGES_S, window.start - since)
        if age >= len(AGE_EDGES_S) or since + AGE_EDGES_S[age] >= window.end:
            total = 0.0
            for block, hours in blocks:
                total += own_blocks[block] ** kappa * hours
            return float(rate * (ages[age] * own_ages[factors.OWN_AGE_OF[age]]) ** kappa * total)
        total = 0.0
        now_rate = (ages[age] * own_ages[factors.OWN_AGE_OF[age]]) ** kappa
        edge = since + AGE_EDGES_S[age]
        for lower, upper, hourly, block in spans:
            begun, weight = lower, hourly * own_blocks[block] ** kappa
            while edge < upper:
                total += now_rate * weight * (edge - begun)
                begun = edge
                age += 1
                now_rate = (ages[age] * own_ages[factors.OWN_AGE_OF[age]]) ** kappa
                edge = since + AGE_EDGES_S[age] if age < len(AGE_EDGES_S) else float("inf")
            total += now_rate * weight * (upper - begun)
        return float(rate * total / HOUR_S)

    def _variance(self, node: bytes, now: float) -> float:
        """Return the variance of the hazard's logarithm that follows from counting error."""
        known, scale = self.nodes.get(node), self._scale
        since = now if known is None or known.since is None else known.since
        age, (hour, _) = age_level(now - since), WEEK[floor((now + self.utc_offset_s) / HOUR_S) % len(WEEK)]
        total = 1 / (self.events / scale + self.other_events + BASE_EVENTS)
        total += self.ages.variance(age, scale) + self.hours.variance(hour, scale)
        if known is None:
            return total + 1 / NODE_PRIOR + 1 / OWN_AGE_PRIOR
        return total + 1 / (known.own.events + NODE_PRIOR) + known.ages.variance(factors.OWN_AGE_OF[age], scale)


_ONES = (1.0,) * len(WEEK)


def weight(probability: float) -> int:
    """Return the advert's integer weight, 1 to 64, in steps of 4 so that small changes do not show."""
    return round(MAX_WEIGHT // 4 * probability) * 4 or 1

"""How likely a node stays: S(t, t + w), learnt as it goes from when machines were lent and taken back.

The hazard is a product of shrunk factors (`factors.py`), each counted on line and slowly forgotten:

    lambda0 x age x hour-of-day-and-weekend x last stay            what the campus has in common
            x node x (node, age) x (node, four hours)              how this node differs
            x room now x room's share lent x room's week           machines of a room leave together

of which as much is believed as has come true (`belief.py`), and S = (1 + theta H)^(-1/theta), H its integral over the window: a
Gamma frailty, since no node is the average of its factors. Theta is learnt as well.
`docs/survival.md` has the formulas, where the constants come from, and how far to trust it. One update is O(1).
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from math import exp, floor, inf, log, sqrt

import msgspec

from placement import factors
from placement.advert import HORIZONS_S, MAX_WEIGHT
from placement.belief import Belief, Frailty
from placement.factors import AGE_EDGES_S, HOUR_S, WEEK, Factor, Fading, age_level
from placement.room import Room

# Departures that a factor's prior counts for. Chosen as the half-lives are (docs/survival.md); the optimum is flat.
AGE_PRIOR, HOUR_PRIOR, STAY_PRIOR, SHARE_PRIOR = 7.0, 3.0, 50.0, 20.0
NODE_PRIOR, OWN_AGE_PRIOR, OWN_BLOCK_PRIOR = 3.0, 5.0, 15.0
# One departure in twelve hours of a node of four hours' age: between the 1.7 a day of a university cluster and the 7 to 13 of
# spot instances, and soon outweighed.
BASE_EVENTS, BASE_HOURS = 1.0, 12.0
MOST_S = 90 * factors.DAY_S  # counted of one stay at a time: a clock that jumps by years says nothing; ours
BET_S = 4 * HOUR_S  # of the forecasts from which the frailty is learnt: the longer ones of docs/survival.md
ROOM_MEMORY_S = 4 * HOUR_S  # what the room does now says half as much of four hours on
Z_90 = 1.645

LN2 = log(2.0)


class Survival(msgspec.Struct, frozen=True):
    """The probability that a node stays, and where it lies with 90 per cent, as far as what was counted can tell."""

    probability: float
    low: float
    high: float


class Node:
    """What is known of one node. `since`: lent since then; None while it is not. `campus`: what it does is counted for all.

    `bet`: the hazard that was foretold for the time until `due`.
    """

    __slots__ = ("ages", "bet", "blocks", "campus", "due", "last_stay_s", "own", "room", "seen", "since")

    def __init__(self, room: Room, now: float) -> None:
        self.room, self.campus = room, True
        self.own = Fading(NODE_PRIOR, factors.NODE_HALF_LIFE_S, now)
        self.ages = Factor(factors.OWN_AGES, OWN_AGE_PRIOR)
        self.blocks = Factor(factors.OWN_BLOCKS, OWN_BLOCK_PRIOR)
        self.since: float | None = None
        self.seen = now
        self.last_stay_s = 0.0
        self.bet, self.due = 0.0, inf


Span = tuple[float, float, float, int]  # from, to, the hour's factor, and the four hours that it lies in


class Window:
    """The hours between now and then, cut where the hour changes; made once for all nodes that are asked about."""

    __slots__ = ("_rooms", "_spans", "end", "kappa", "reversion", "start")

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
        self._rooms: dict[int, tuple[list[Span], list[tuple[int, float]]]] = {}
        self.reversion = _reversion(end - start)

    def of(self, room: Room | None) -> tuple[list[Span], list[tuple[int, float]]]:
        """Its spans by that room's timetable, and the hours of each four, as much longer as their hours are worse."""
        found = self._rooms.get(id(room))
        if found is None:
            week, kappa = (_ONES if room is None else room.week.rates), self.kappa
            spans: list[Span] = []
            blocks: dict[int, float] = {}
            for lower, upper, rate, slot in self._spans:
                hourly, block = rate * week[slot] ** kappa, WEEK[slot][1]
                spans.append((lower, upper, hourly, block))
                blocks[block] = blocks.get(block, 0.0) + (upper - lower) / HOUR_S * hourly
            found = self._rooms[id(room)] = spans, list(blocks.items())
        return found


def _reversion(length_s: float) -> float:
    """How much of what is unusual about a room now is left of it, on average over that time."""
    halvings = length_s / ROOM_MEMORY_S
    return float((1 - 0.5**halvings) / (halvings * LN2)) if halvings > 1e-9 else 1.0


class Estimator:
    """Feed it `lent` and `left` in the order of time (Unix seconds); one that goes on being lent is told every few minutes.

    `utc_offset_s` is local time's, now: it may change with the season.
    """

    def __init__(self, now: float, utc_offset_s: float = 0.0) -> None:
        self.utc_offset_s = utc_offset_s
        self.nodes: dict[bytes, Node] = {}
        self.rooms: dict[str, Room] = {}
        self.events = self.hours_at_risk = self.hours_lent = 0.0
        self.other_events = self.other_hours = self.other_lent = 0.0
        self.belief, self.frailty = Belief(), Frailty()
        self.ages = Factor(factors.AGES, AGE_PRIOR, factors.AGE_SHAPE)
        self.hours = Factor(factors.HOURS, HOUR_PRIOR, circle=24)
        self.stays = Factor(factors.STAYS, STAY_PRIOR)
        self.shares = Factor(factors.SHARES, SHARE_PRIOR)
        self.rate = self.mean = BASE_EVENTS / BASE_HOURS
        self._epoch = self._renewed = now
        self._scale = 1.0

    # --- what happens

    def room(self, name: str, now: float) -> Room:
        found = self.rooms.get(name)
        if found is None:
            found = self.rooms[name] = Room(now)
        return found

    def know(self, node: bytes, room: Room, now: float) -> Node:
        """The node, new or as it was, in this room."""
        known = self.nodes.get(node)
        if known is None:
            known = self.nodes[node] = Node(room, now)
        known.room = room
        return known

    def lent(self, node: bytes, now: float, since: float | None = None, room: str = "") -> None:
        """It is lent, and has been since then (by default: since it was first seen so), without a pause."""
        self._at(now)
        known = self.nodes.get(node) or self.know(node, self.room(room, now), now)
        if known.since is None:
            known.since = now if since is None else min(since, now)
        elif now > known.seen:
            self._expose(known, known.seen, now)
        known.seen = max(known.seen, now)
        if known.campus and (now >= known.due or known.due == inf):
            self._settle(known, stayed=True)
            known.bet = self._integral(self.window(now, BET_S), known.since, known)
            known.due = now + BET_S

    def left(self, node: bytes, now: float, reclaimed: bool = True) -> None:
        """It was taken back, at some time since it was last told to be lent; not `reclaimed`: as was known beforehand."""
        known = self.nodes.get(node)
        if known is None or known.since is None:
            return
        self._at(now)
        last = max(now, known.seen)
        if reclaimed:
            self._expose(known, known.seen, last, departed=True)
            known.room.depart(last)
            self._settle(known, stayed=False)
        elif last > known.seen:
            self._expose(known, known.seen, last)
        known.last_stay_s, known.since, known.seen, known.due = last - known.since, None, last, inf

    def forget(self, node: bytes) -> None:
        """It is a member no more."""
        self.nodes.pop(node, None)

    def tidy(self) -> None:
        """Forget the rooms that nobody is in."""
        used = {id(node.room) for node in self.nodes.values()}
        self.rooms = {name: room for name, room in self.rooms.items() if id(room) in used}

    def turn_back(self, now: float) -> None:
        """The clock was set back: nothing has been seen later than now, and what was lent has been since now."""
        for node in self.nodes.values():
            node.seen, node.own.at, node.due = min(node.seen, now), min(node.own.at, now), inf
            node.since = None if node.since is None else min(node.since, now)
        for room in self.rooms.values():
            room.at, room.regime.at = min(room.at, now), min(room.regime.at, now)
            room.last_departure = min(room.last_departure, now)
        self._epoch, self._renewed = min(self._epoch, now), min(self._renewed, now)

    # --- what is to be expected

    def window(self, now: float, horizon_s: float) -> Window:
        end = now + max(0.0, horizon_s)
        return Window(now, end, self._hours_between(now, end), self.hours.rates, self.belief.kappa)

    def hazard(self, node: bytes, window: Window) -> float:
        """The integral of the hazard over the window. A node that is not known, or not lent, counts as lent from now on."""
        known = self.nodes.get(node)
        if known is None:
            return self._integral(window, window.start, None)
        return self._integral(window, window.start if known.since is None else known.since, known)

    def weights(self, nodes: Iterable[bytes], window: Window) -> list[int]:
        """The advert's integer of each: how likely it stays through this window."""
        return [weight(self.frailty.stays(self.hazard(node, window))) for node in nodes]

    def rates(self, node: bytes, start: float) -> Iterator[tuple[float, float]]:
        """Departures a second from `start` on, each with until when it holds: it changes with the hour and with the age."""
        known = self.nodes.get(node)
        since = start if known is None or known.since is None else known.since
        own_ages, own_blocks, week = (
            (_ONES, _ONES, _ONES) if known is None else (known.ages.rates, known.blocks.rates, known.room.week.rates)
        )
        kappa, offset_s, edges = self.belief.kappa, self.utc_offset_s, AGE_EDGES_S
        ages, hours = self.ages.rates, self.hours.rates
        steady, fading = self.rate * self.stays.rates[0], 1.0
        if known is not None:
            steady = self.rate * self.stays.rates[factors.stay_level(known.last_stay_s)] * known.own.rate
            fading = known.room.regime.rate * self.shares.rates[known.room.level]
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
                factor = steady * fading ** _reversion(until - start) * aged * hourly
                yield until, common * factor**kappa
                start = until

    def survivals(self, nodes: Iterable[bytes], now: float, horizon_s: float) -> list[float]:
        """The probability for each that it stays for another `horizon_s`."""
        window = self.window(now, horizon_s)
        return [self.frailty.stays(self.hazard(node, window)) for node in nodes]

    def survival(self, node: bytes, now: float, horizon_s: float, until: float | None = None) -> Survival:
        """With its interval. `until`: its owner has said when he takes it back, and past that nobody stays."""
        if until is not None and now + horizon_s > until:
            return Survival(0.0, 0.0, 0.0)
        hazard = self.hazard(node, self.window(now, horizon_s))
        spread = exp(Z_90 * sqrt(self._variance(node, now)))
        stays = self.frailty.stays
        return Survival(stays(hazard), stays(hazard * spread), stays(hazard / spread))

    def together(self, nodes: Sequence[bytes], now: float, horizon_s: float) -> float:
        """The probability that all of them stay: in one room, a part of the departures is the same for all (a common shock)."""
        window = self.window(now, horizon_s)
        rooms: dict[int, tuple[float, list[float]]] = {}
        for node in nodes:
            known = self.nodes.get(node)
            key, common = (id(known.room), known.room.common) if known else (id(node), 0.0)
            rooms.setdefault(key, (common, []))[1].append(self.hazard(node, window))
        total = 0.0
        for common, hazards in rooms.values():
            total += max(hazards) * common + sum(hazards) * (1 - common)
        return self.frailty.stays(total)

    # --- the campus

    def adopt(
        self,
        base: tuple[float, float, float],
        ages: tuple[Sequence[float], Sequence[float]],
        hours: tuple[Sequence[float], Sequence[float]],
        stays: tuple[Sequence[float], Sequence[float]],
        shares: tuple[Sequence[float], Sequence[float]],
    ) -> None:
        """What the other nodes counted, in place of what was known of it before: departures, hours at risk and hours lent; then
        events and expectations by level."""
        self.other_events, self.other_hours, self.other_lent = base
        for factor, (events, expected) in zip(self.common(), (ages, hours, stays, shares), strict=True):
            factor.adopt(events, expected, self._scale)
        self._renew_rate()

    def common(self) -> tuple[Factor, Factor, Factor, Factor]:
        return self.ages, self.hours, self.stays, self.shares

    @property
    def scale(self) -> float:
        """What a count of now weighs beside one of the beginning."""
        return self._scale

    # --- inside

    def _at(self, now: float) -> None:
        self._scale = 2.0 ** min(1000.0, max(0.0, now - self._epoch) / factors.HALF_LIFE_S)
        if self._scale > factors.REBASE:
            own = (factor for node in self.nodes.values() for factor in (node.ages, node.blocks))
            for factor in (*self.common(), *own, *(room.week for room in self.rooms.values())):
                factor.rebase(self._scale)
            self.events /= self._scale
            self.hours_at_risk /= self._scale
            self.hours_lent /= self._scale
            self._epoch, self._scale = now, 1.0
        if now - self._renewed > HOUR_S:  # levels that are not touched fade too
            self._renewed = now
            for factor in (*self.common(), *(room.week for room in self.rooms.values())):
                factor.renew(self._scale)

    def _expose(self, node: Node, start: float, end: float, departed: bool = False) -> None:
        """It was lent from `start` to `end`, with a departure at the end or none."""
        since = node.since
        assert since is not None and start <= end
        start = max(start, end - MOST_S)
        stay = factors.stay_level(node.last_stay_s)
        room = node.room
        share, scale = room.level, self._scale
        node.own.fade(end)
        room.regime.fade(end)
        spans = list(self._spans(start, end, since))
        for number, (lower, upper, age, slot) in enumerate(spans):
            own_age = factors.OWN_AGE_OF[age]
            hour, block = WEEK[slot]
            events = 1.0 if departed and number == len(spans) - 1 else 0.0
            own = self.rate * self.ages.rates[age] * self.stays.rates[stay]
            own *= node.own.rate * node.ages.rates[own_age] * node.blocks.rates[block]
            common = self.hours.rates[hour] * self.shares.rates[share] * room.regime.rate * room.week.rates[slot]
            hours = (upper - lower) / HOUR_S
            expected = own * common * hours
            if node.campus:
                if hours > 0:
                    self.belief.learn(events, hours, self.mean, own * common)
                self.hours_lent += hours * scale
                self.events += events * scale
                self.hours_at_risk += expected / self.rate * scale
                self.ages.add(age, events, expected / self.ages.relative(age), scale)
                self.hours.add(hour, events, expected / self.hours.rates[hour], scale)
                self.stays.add(stay, events, expected / self.stays.rates[stay], scale)
                self.shares.add(share, events, expected / self.shares.rates[share], scale)
                self._renew_rate()
            room.week.add(slot, events, expected / room.week.rates[slot], scale)
            node.ages.add(own_age, events, expected / node.ages.rates[own_age], scale)
            node.blocks.add(block, events, expected / node.blocks.rates[block], scale)
            room.regime.add(events, expected / room.regime.rate, end)
            node.own.add(events, expected / node.own.rate, end)

    def _settle(self, node: Node, stayed: bool) -> None:
        """What was foretold of it has come out."""
        if node.due < inf and node.campus:
            self.frailty.learn(node.bet, stayed)
        node.due = inf

    def _renew_rate(self) -> None:
        self.rate = (self.events / self._scale + self.other_events + BASE_EVENTS) / (
            self.hours_at_risk / self._scale + self.other_hours + BASE_HOURS
        )
        self.mean = (self.events / self._scale + self.other_events + BASE_EVENTS) / (
            self.hours_lent / self._scale + self.other_lent + BASE_HOURS
        )

    def _hours_between(self, start: float, end: float) -> Iterable[tuple[float, float, int]]:
        """Cut where the hour changes, each with its place in the week; one empty span where nothing lies between."""
        lower, hour = start, floor((start + self.utc_offset_s) / HOUR_S)
        while True:
            upper = min(end, max(lower, (hour + 1) * HOUR_S - self.utc_offset_s))
            yield lower, upper, hour % len(WEEK)
            if upper >= end:
                return
            lower, hour = upper, hour + 1

    def _spans(self, start: float, end: float, since: float) -> Iterable[tuple[float, float, int, int]]:
        """Cut where the hour or the age's level changes: (from, to, age, hour of the week)."""
        for lower, upper, slot in self._hours_between(start, end):
            begun, age = lower, age_level(lower - since)
            while True:
                ended = min(upper, max(begun, since + AGE_EDGES_S[age])) if age < len(AGE_EDGES_S) else upper
                yield begun, ended, age, slot
                if ended >= upper:
                    break
                begun, age = ended, age + 1

    def _integral(self, window: Window, since: float, node: Node | None) -> float:
        rate, stay = self.rate, 0
        own_ages: Sequence[float] = _ONES
        own_blocks: Sequence[float] = _ONES
        if node is not None:
            rate *= node.own.rate * (node.room.regime.rate * self.shares.rates[node.room.level]) ** window.reversion
            stay = bisect_right(factors.STAY_EDGES_S, node.last_stay_s)
            own_ages, own_blocks = node.ages.rates, node.blocks.rates
        rate *= self.stays.rates[stay]
        kappa = window.kappa
        rate = self.mean ** (1 - kappa) * rate**kappa
        spans, blocks = window.of(None if node is None else node.room)
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
        """Of the hazard's logarithm, now: what each factor's counts leave open."""
        known, scale = self.nodes.get(node), self._scale
        since = now if known is None or known.since is None else known.since
        age, (hour, _) = age_level(now - since), WEEK[floor((now + self.utc_offset_s) / HOUR_S) % len(WEEK)]
        total = 1 / (self.events / scale + self.other_events + BASE_EVENTS)
        total += self.ages.variance(age, scale) + self.hours.variance(hour, scale)
        if known is None:
            return total + 1 / NODE_PRIOR + 1 / OWN_AGE_PRIOR
        return total + known.own.variance() + known.ages.variance(factors.OWN_AGE_OF[age], scale)


_ONES = (1.0,) * len(WEEK)


def windows(estimator: Estimator, now: float) -> tuple[Window, ...]:
    """Of an advert's horizons; made once for all nodes that are asked about."""
    return tuple(estimator.window(now, horizon) for horizon in HORIZONS_S)


def weights(estimator: Estimator, node: bytes, ahead: Iterable[Window], until: float = inf) -> tuple[int, ...]:
    """The advert's integers: how likely the node stays through each of these `windows`. `until`: when its owner takes it back."""
    stays = estimator.frailty.stays
    return tuple(1 if window.end > until else weight(stays(estimator.hazard(node, window))) for window in ahead)


def weight(probability: float) -> int:
    """The advert's integer weight, 1 to 64, in steps that do not flutter."""
    return round(MAX_WEIGHT // 4 * probability) * 4 or 1

"""Where the jobs of a leaving node go, all of them together (ReclaimNet's rule made joint). No I/O.

What is expected to be kept is the sum over the jobs of

    P(its state is there in time) x [ value x kept(to) + gpus x horizon x stays(place) ] + what a restart from less is worth

where `value` is the work since its last durable checkpoint, `to` gets the state and `place` runs it. Places hold what they have
room for, and the states leave by one port, one after the other: each that goes first takes time from those behind it. Such an
assignment with a knapsack inside is NP-hard, so it is searched: the best of a few greedy beginnings, then moves of one job and of
two until none helps. docs/destination.md has the formulas and how near it comes to the best there is.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from placement.advert import HORIZONS_S, MAX_WEIGHT, WHOLE, Advert, horizon_of
from placement.allotment import percent, served
from placement.filters import refusals
from placement.request import Request

HOUR_S = 3600.0  # for which an advert's weight counts
STRANDED = 0.95  # of its worth is left to a place for each whole GPU that is left beside the job; ours
HORIZON_S, LEAST_HORIZON_S = 1800.0, 300.0  # to the next durable checkpoint where nothing is known, and at least; ours
SUDDEN = 0.4  # of departures take what a node keeps with them at once; the others say so (docs/simulator.md); ours
RESTART = 0.5  # of a place's worth is left if the state is late and an older one has to do; ours
FETCHES = 0.9  # of it, for a place that has to fetch the state from who keeps it; ours
LIKELY = 0.5  # a state that is less likely to be in time goes behind those that are; ours
LEAST_SPREAD, MOST_SPREAD = 0.05, 3.0  # of a path: nothing is known better or worse; ours
LOGISTIC = math.pi / math.sqrt(3)  # the standard deviation of the standard logistic distribution
PLACES_PAST = 4  # options kept for each job, past one for each of the others; ours
GIVES_WAY = 3  # other options that are tried for a job which gives way; ours
SCORES = 250  # assignments looked at: some milliseconds; what more of them find is below 1 %; ours
MOMENT_S = 1e-3  # a state takes at least; ours
MOST_VALUE = 1e12  # GPU-seconds: more cannot be
BETTER = 1 + 1e-9  # less is rounding


class Way(msgspec.Struct, frozen=True):
    """One job's state to one node: `bytes` that are missing there; `bps` and the `spread` of its logarithm, of the path
    (`ckptstore.bandwidth.Path`); `stays`: P(the node is lent until the job's next durable checkpoint there, or its end).
    `place`: whether the job may run there; `favour`: how much better that is than elsewhere (home), or worse (an image is
    missing)."""

    node: bytes
    bytes: float
    bps: float
    spread: float
    stays: float
    place: bool
    favour: float = 1.0


class Leaver(msgspec.Struct, frozen=True):
    """A job that has to leave. `value`: GPU-seconds of work that nobody else has; `ready_s`: until its state can be sent;
    `ways` in the order of its ranking; `horizon_s`: from its start elsewhere to its next durable checkpoint, or its end."""

    request: Request
    value: float
    ways: tuple[Way, ...]
    ready_s: float = 0.0
    horizon_s: float = HORIZON_S


class Destination(msgspec.Struct, frozen=True):
    """Of one job: it is to run at `place` (None: nobody has room), its state goes to `to` (None: nobody can take it), so many
    bytes in so many `seconds` once it has the wire, there `at_s` from now, in time with this `chance`."""

    job: bytes
    place: bytes | None
    to: bytes | None
    bytes: float
    seconds: float
    at_s: float
    chance: float
    stays: float


class Assignment(msgspec.Struct, frozen=True):
    """`destinations` as the jobs were given; `order`: their positions, the state that leaves first first; `expected`:
    GPU-seconds that the whole is expected to keep."""

    destinations: tuple[Destination, ...]
    order: tuple[int, ...]
    expected: float


class Option(msgspec.Struct, frozen=True, gc=False):
    """What one job may do. It is worth `late` if its state is late, and `early` more if it is in time; `alone`: what is
    expected if it has the wire when it is ready, with the chance `surest`."""

    place: bytes | None
    to: bytes | None
    bytes: float
    seconds: float
    steep: float
    early: float
    late: float
    stays: float
    ready_s: float
    surest: float
    alone: float


def survival(advert: Advert, horizon_s: float) -> float:
    """P(lent for so long), by what the node's advert foretells, in 64ths: for the nearest of its horizons, and from there at a
    constant hazard. Never quite certain."""
    horizon = horizon_of(horizon_s)
    told_s = HORIZONS_S[horizon] if advert.stays else HOUR_S
    share = min(advert.weight_for(horizon) / MAX_WEIGHT, 1 - 0.5 / MAX_WEIGHT)
    return float(share ** (max(0.0, horizon_s) / told_s))


def stranding(request: Request, advert: Advert) -> float:
    """What a place there is worth beside one that it fills: wide jobs need whole GPUs that nobody has left stranded."""
    left = advert.whole_gpus_free - request.gpus if request.gpus and not request.is_share else 0
    return STRANDED ** max(0, left)


def worth(at_risk_s: float, share: int, priority: int = 50) -> float:
    """GPU-seconds at risk of a job that uses `share` per cent of a GPU. Priority 0 halves, 100 makes it half as much again."""
    return max(0.0, at_risk_s) * share / WHOLE * (0.5 + priority / 100)


def in_time(busy_s: float, window_s: float, steep: float) -> float:
    """P(what takes `busy_s` at the paths' medians is done in the window), with rates log-logistic around these."""
    if window_s <= 0 or not busy_s < math.inf:
        return 0.0
    if busy_s <= 0:
        return 1.0
    exponent = steep * math.log(busy_s / window_s)
    return 1 / (1 + math.exp(exponent)) if exponent < 700 else 0.0


def options(leaver: Leaver, window_s: float, others: int = 0) -> list[Option]:
    """What one job may sensibly do while so many `others` leave with it, best first: run at a place and send its state there, or
    to who can take it sooner and keeps it for that place; leave its state with a keeper and wait; nothing. Of the places, as many
    as the others could take and a few more are looked at: the best alone, and those that take the least time."""
    gpus = percent(leaver.request.gpus, leaver.request.gpu_share) / WHOLE
    horizon_s = min(max(LEAST_HORIZON_S, _finite(leaver.horizon_s, HORIZON_S)), 1e9)
    work = gpus * horizon_s
    value, ready_s = min(_finite(leaver.value), MOST_VALUE), _finite(leaver.ready_s, math.inf)
    left_s = window_s - ready_s
    ways = list({way.node: way for way in leaver.ways}.values())
    times = [_seconds(way) for way in ways]
    keeper = min(range(len(ways)), key=times.__getitem__, default=None)
    by_way = 0.0 if keeper is None else in_time(times[keeper], left_s, _steep(ways[keeper]))
    scored: list[tuple[float, float, int]] = []
    keepers: list[tuple[float, int]] = []
    for number, (way, seconds) in enumerate(zip(ways, times, strict=True)):
        stays = _chance(way.stays)
        early = in_time(seconds, left_s, _steep(way))
        kept = value * (1 - (1 - stays) * SUDDEN)
        keepers.append((-kept * early, number))
        if way.place:
            runs = work * stays * way.favour
            begun = _begun(seconds, horizon_s)
            direct = early * (kept + runs * (begun - RESTART))
            around = by_way * (value + runs * (max(RESTART, FETCHES * begun) - RESTART))
            scored.append((-(direct if direct > around else around) - runs * RESTART, seconds, number))
    wanted = others + PLACES_PAST
    scored.sort()
    places = {number for _, _, number in scored[:wanted]}
    places |= {number for _, _, number in sorted(scored[wanted:], key=lambda one: (one[1], one[0], one[2]))[:2]}
    found: list[Option] = []
    for number in sorted(places):
        way = ways[number]
        stays = _chance(way.stays)
        runs = work * stays * way.favour
        begun = _begun(times[number], horizon_s)
        direct = value * _kept(stays) + runs * (begun - RESTART)
        found.append(_option(way, way, direct, runs * RESTART, ready_s, left_s))
        if keeper is not None and times[keeper] < times[number]:
            kept = value * _kept(_chance(ways[keeper].stays))
            around = kept + runs * (max(RESTART, FETCHES * begun) - RESTART)
            found.append(_option(way, ways[keeper], around, runs * RESTART, ready_s, left_s))
    keepers.sort()
    for _, number in keepers[:2]:
        way = ways[number]
        found.append(_option(None, way, value * _kept(_chance(way.stays)), 0.0, ready_s, left_s))
    found.sort(key=lambda one: -one.alone)
    return [*found, NOTHING]


def _begun(seconds: float, horizon_s: float) -> float:
    """What is left of a place's worth if the job stands still until its state is there; not less than a restart from less."""
    return max(RESTART, horizon_s / (horizon_s + seconds))


def _kept(stays: float) -> float:
    """P(what a node keeps can still be had when it is needed)."""
    return 1 - (1 - stays) * SUDDEN


def _option(place: Way | None, to: Way, early: float, late: float, ready_s: float, left_s: float) -> Option:
    stays = _chance(to.stays if place is None else place.stays)
    where = None if place is None else place.node
    count, seconds, steep = _finite(to.bytes, 0.0 if to.bytes < 0 else math.inf), _seconds(to), _steep(to)
    surest = in_time(seconds, left_s, steep)
    return Option(where, to.node, count, seconds, steep, early, late, stays, ready_s, surest, late + early * surest)


def _steep(way: Way) -> float:
    return LOGISTIC / (way.spread if LEAST_SPREAD <= way.spread <= MOST_SPREAD else _clamped(way.spread))


def _clamped(spread: float) -> float:
    return LEAST_SPREAD if spread < LEAST_SPREAD else MOST_SPREAD


def _seconds(way: Way) -> float:
    if not way.bytes > 0:
        return 0.0 if way.bytes <= 0 else math.inf
    return way.bytes / way.bps if way.bps > 0 and way.bytes < math.inf else math.inf


def _finite(value: float, otherwise: float = 0.0) -> float:
    return value if 0 <= value < math.inf else otherwise


def _chance(value: float) -> float:
    return min(1.0, value) if value > 0 else 0.0  # also of what is no number


NOTHING = Option(None, None, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def plan(leavers: Sequence[Leaver], adverts: Mapping[bytes, Advert], window_s: float) -> Assignment:
    """Where each goes. `adverts`: what the nodes have room for now; who is not in it has none. The same input, the same plan."""
    window_s = _finite(window_s, 0.0)
    search = _Search(leavers, adverts, window_s)
    chosen = search.best()
    order, finished, chances = _schedule(chosen, window_s)
    destinations = tuple(
        Destination(
            leaver.request.job,
            option.place,
            option.to,
            option.bytes,
            option.seconds,
            finished[number],
            chances[number],
            option.stays,
        )
        for number, (leaver, option) in enumerate(zip(leavers, chosen, strict=True))
    )
    return Assignment(destinations, tuple(order), sum(search.worths(chosen)))


def _schedule(chosen: Sequence[Option], window_s: float) -> tuple[list[int], list[float], list[float]]:
    """In which order they leave, when each is there, with what chance: what is worth most for each second first (Smith 1956),
    and what is not likely to be in time at its turn last. If somebody is not, other orders are tried too: as above but nobody put
    off, and who is ready soon first."""
    dense = [-option.early / (option.seconds + MOMENT_S) for option in chosen]
    line = sorted(range(len(chosen)), key=dense.__getitem__)
    found, put_off = _run(chosen, line, window_s, LIKELY)
    if not put_off:
        return found
    soon = sorted(
        range(len(chosen)), key=lambda i: -chosen[i].early / (chosen[i].ready_s + chosen[i].seconds + MOMENT_S)
    )
    others = (_run(chosen, line, window_s, 0.0)[0], _run(chosen, soon, window_s, LIKELY)[0])
    return max((found, *others), key=lambda one: _early(chosen, one[2]))


def _early(chosen: Sequence[Option], chances: Sequence[float]) -> float:
    return sum(option.early * chance for option, chance in zip(chosen, chances, strict=True))


def _run(
    chosen: Sequence[Option], line: Sequence[int], window_s: float, likely: float
) -> tuple[tuple[list[int], list[float], list[float]], bool]:
    """One after the other; who is less likely than that, or worth nothing, after the others. Whether somebody was."""
    order: list[int] = []
    behind: list[int] = []
    at, chances = [math.inf] * len(chosen), [0.0] * len(chosen)
    clock = busy = weighed = 0.0
    put_off = False
    for late in (False, True):
        for i in behind if late else line:
            option = chosen[i]
            if option.to is None:
                (order if late else behind).append(i)
                continue
            begun = clock if clock > option.ready_s else option.ready_s
            took = busy + option.seconds
            # The rates of one port rise and fall together: one exponent for all, weighed by how long each sends.
            steeps = weighed + option.steep * option.seconds
            chance = in_time(took, window_s - (begun - busy), steeps / took if 0 < took < math.inf else option.steep)
            chance = min(chance, option.surest)
            if not late and (chance < likely or option.early <= 0):
                behind.append(i)
                put_off = put_off or option.early > 0
                continue
            at[i], chances[i] = begun + option.seconds, chance
            order.append(i)
            clock, busy, weighed = begun + option.seconds, took, steeps
    return (order, at, chances), put_off


class _Search:
    """Over what each job does; an assignment is a list of options, one for each job."""

    def __init__(self, leavers: Sequence[Leaver], adverts: Mapping[bytes, Advert], window_s: float) -> None:
        self._requests = [leaver.request for leaver in leavers]
        self._adverts, self._window_s = adverts, window_s
        self._options = [options(leaver, window_s, len(leavers) - 1) for leaver in leavers]
        self._fits: dict[tuple[bytes, tuple[int, ...]], bool] = {}
        self._left = SCORES

    def worths(self, chosen: Sequence[Option]) -> list[float]:
        """What is expected of each."""
        self._left -= 1
        _, _, chances = _schedule(chosen, self._window_s)
        return [option.late + option.early * chance for option, chance in zip(chosen, chances, strict=True)]

    def best(self) -> list[Option]:
        jobs = range(len(self._options))
        widest = sorted(jobs, key=lambda i: (self._width(i), -i), reverse=True)
        dearest = sorted(jobs, key=lambda i: (-self._options[i][0].alone, i))
        choosiest = sorted(jobs, key=lambda i: (-self._regret(i), i))
        begun = [self._greedy(order) for order in (widest, dearest, choosiest)]
        return self._improved(max(begun, key=lambda found: sum(self.worths(found))))

    def _width(self, i: int) -> tuple[int, int, int]:
        request = self._requests[i]
        return request.gpus, request.gpu_share, request.vram_mib

    def _regret(self, i: int) -> float:
        """What it would lose if its first place were taken."""
        mine = self._options[i]
        other = next((one for one in mine if one.place != mine[0].place), NOTHING)
        return mine[0].alone - other.alone

    def _greedy(self, order: Sequence[int]) -> list[Option]:
        chosen = [NOTHING] * len(self._options)
        for i in order:
            chosen[i] = next(one for one in self._options[i] if self._has_room(chosen, {i: one}))
        return chosen

    def _improved(self, chosen: list[Option]) -> list[Option]:
        """By the first change that helps, until none does."""
        worths = self.worths(chosen)
        while self._left > 0:
            for change in self._changes(chosen, worths):
                after = [change.get(i, one) for i, one in enumerate(chosen)]
                got = self.worths(after)
                if sum(got) > sum(worths) * BETTER:
                    chosen, worths = after, got
                    break
                if self._left <= 0:
                    return chosen
            else:
                break
        return chosen

    def _changes(self, chosen: list[Option], worths: Sequence[float]) -> Iterator[dict[int, Option]]:
        """Of one job, then of two: one takes what it likes, the other gives way. What cannot help is left out: those who change
        could gain so much were the wire free for them, and those who wait for it so much if they need it for less time."""
        jobs = range(len(chosen))
        slack = [one.alone - worth for one, worth in zip(chosen, worths, strict=True)]
        waits = sum(slack)
        for i in jobs:
            now = chosen[i]
            for one in self._options[i]:
                more = one.alone - worths[i]
                if more + waits - slack[i] <= 0:
                    break  # they come best first
                if one is not now and (more > 0 or one.seconds < now.seconds) and self._has_room(chosen, {i: one}):
                    yield {i: one}
        for i in jobs:
            for one in self._options[i]:
                more, least = one.alone - worths[i], one.seconds - chosen[i].seconds
                for j in jobs:
                    if j == i or (waits <= 0 and one.place != chosen[j].place):
                        continue
                    given, bound = 0, waits - slack[i] - slack[j]
                    for other in self._options[j]:
                        gain = more + other.alone - worths[j]
                        if gain + bound <= 0 or given == GIVES_WAY:
                            break
                        if other is chosen[j] or (gain <= 0 and least + other.seconds >= chosen[j].seconds):
                            continue
                        if self._has_room(chosen, {i: one, j: other}):
                            given += 1
                            yield {i: one, j: other}

    def _has_room(self, chosen: Sequence[Option], change: Mapping[int, Option]) -> bool:
        for one in change.values():
            if one.place is None:
                continue
            here = tuple(i for i in range(len(chosen)) if change.get(i, chosen[i]).place == one.place)
            known = self._fits.get((one.place, here))
            if known is None:
                known = self._fits[one.place, here] = self._together(one.place, here)
            if not known:
                return False
        return True

    def _together(self, node: bytes, jobs: Sequence[int]) -> bool:
        """Whether a node has room for all of these: the widest is served first."""
        advert = self._adverts.get(node)
        for i in sorted(jobs, key=lambda i: (self._width(i), i), reverse=True):
            if advert is None or refusals(self._requests[i], advert):
                return False
            advert = served(advert, self._requests[i])
        return advert is not None


def told(destination: Destination, name: Callable[[bytes], str], window_s: float) -> str:
    """In words, for the job's user."""
    place = destination.place
    to = destination.to
    size = f"{destination.bytes / 1e6:.1f} MB" if destination.bytes < 1e9 else f"{destination.bytes / 1e9:.1f} GB"
    head = f"goes on at {name(place)}" if place is not None else "waits: nobody has room for it"
    if to is None:
        return f"{head}; nobody can take its last state"
    where = "" if to == place else f" go to {name(to)}, who keeps them for it"
    if destination.bytes <= 0:
        return f"{head}, which lacks nothing of it" if to == place else f"{head}; {name(to)} keeps its state"
    if destination.chance < LIKELY:
        took = "too long" if not destination.at_s < math.inf else f"about {destination.at_s:.0f} s"
        return (
            f"{head}; {size}{where or ' that it lacks'} would take {took} of {max(0.0, window_s):.0f}: likely too late"
        )
    return f"{head}; {size}{where or ' that it lacks'}, there in about {destination.at_s:.0f} s, {destination.chance:.0%} in time"

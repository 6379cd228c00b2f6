"""Churn: the absences of each machine, computed before the simulation starts.

They depend on the world and the seed, not on the policy, so all policies meet the same departures. An owner's hazard is `rate x
machine x hour-of-day x weekend x age`. It is piecewise constant, so its integral is inverted exactly, with one draw for each
stay. Classes, shocks and outages take rooms and buildings together.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from math import ceil, exp, fsum, inf

import msgspec

from sim.campus.distributions import exponential, lognormal_factor, quantile
from sim.campus.traces import Away, read_trace
from sim.campus.world import DAYS, Kind, Lesson, Owners, Shock, World
from sim.kernel import Streams

HOUR_S, DAY_S = 3600.0, 86_400.0
AGE_EDGES_S = tuple(300.0 * 2**power for power in range(12))  # as in the survival estimate
PIVOT_S = 4 * HOUR_S


class Absence(msgspec.Struct, frozen=True):
    """An absence from `start` (the end of the notice, if any) to `end`, in seconds.

    The machine is off the network if it left without notice or is `dark` (without power).
    """

    start: float
    end: float
    kind: Kind
    notice_s: float
    dark: bool = False


class Machine(msgspec.Struct, frozen=True):
    name: str
    building: str
    room: str
    gpus: int
    vram_mib: int
    edge_bps: float  # bytes a second
    owners: str


def machines(world: World) -> list[Machine]:
    """Return all machines, distributed over the rooms of their groups."""
    found = []
    for group in world.groups:
        for number in range(group.count):
            room = group.rooms[number % len(group.rooms)]
            vram_mib, edge_bps = int(group.vram_gib * 1024), group.edge_gbps * 1e9 / 8
            name = f"{group.name}{number:03d}"
            found.append(Machine(name, room.split("/")[0], room, group.gpus, vram_mib, edge_bps, group.owners))
    return found


def absences(world: World, there: Sequence[Machine], streams: Streams) -> list[list[Absence]]:
    """Return the absences of each machine, in order and without overlap."""
    end = world.days * DAY_S
    forced = _forced(world, there, streams, end)
    hours = {name: hours_of(world, name) for name in world.owners}
    nodes = _traced(world)
    traced = 0
    found = []
    for number, machine in enumerate(there):
        if nodes and (not world.trace or not world.trace.owners or machine.owners in world.trace.owners):
            own = _traced_absences(world, machine, streams, nodes[traced % len(nodes)])
            found.append(list(_merged([*own, *forced[number]])) if forced[number] else own)
            traced += 1
        else:
            found.append(list(_of_owner(world, machine, streams, hours[machine.owners], forced[number], end)))
    return found


def _of_owner(
    world: World,
    machine: Machine,
    streams: Streams,
    hours: Sequence[float],
    forced: Sequence[Absence],
    end: float,
) -> Iterator[Absence]:
    owners = world.owners[machine.owners]
    stream = streams.get(machine.name, "churn")
    rate = owners.reclaims_per_day / DAY_S * lognormal_factor(owners.spread, stream.random())
    ages = age_rates(owners.age_shape, owners.reclaims_per_day)
    waits = iter([*forced, Absence(inf, inf, "sudden", 0.0)])
    next_forced = next(waits)
    now = 0.0
    while True:
        hazard, chosen, length, notice = (stream.random() for _ in range(4))
        leaves = departure(now, exponential(hazard) / rate if rate else inf, hours, ages, min(end, next_forced.start))
        if min(leaves, next_forced.start) >= end:
            return
        forced_first = next_forced.start <= leaves
        away = next_forced if forced_first else _drawn(owners, leaves, chosen, length, notice)
        until = away.end
        while next_forced.start <= until:
            until = max(until, next_forced.end)
            next_forced = next(waits)
        yield msgspec.structs.replace(away, end=until) if until != away.end else away
        now = until
        if now >= end:
            return


def _drawn(owners: Owners, start: float, chosen: float, length: float, notice: float) -> Absence:
    if chosen < owners.noticed:
        absent = quantile(owners.absent_h, length) * HOUR_S
        return Absence(start, start + absent, "noticed", quantile(owners.notice_s, notice))
    if chosen < owners.noticed + owners.brief:
        return Absence(start, start + quantile(owners.brief_s, length), "brief", 0.0)
    return Absence(start, start + quantile(owners.absent_h, length) * HOUR_S, "sudden", 0.0)


def departure(since: float, threshold: float, hours: Sequence[float], ages: Sequence[float], until: float) -> float:
    """Return when the integral of hours x ages from `since` reaches the threshold (seconds); `inf` if not before `until`."""
    now, total, age = since, 0.0, 0
    while now < until:
        hour = int(now // HOUR_S)
        upper = (hour + 1) * HOUR_S
        if age < len(AGE_EDGES_S):
            upper = min(upper, since + AGE_EDGES_S[age])
        rate = hours[hour % len(hours)] * ages[age]
        step = rate * (upper - now)
        if total + step >= threshold:
            return now + (threshold - total) / rate
        total += step
        now = upper
        if age < len(AGE_EDGES_S) and now >= since + AGE_EDGES_S[age]:
            age += 1
    return inf


def relative_hours(owners: Owners, first_day: int) -> list[float]:
    """Return the 168 factors of a week from the world's first day; their mean over a working day is 1."""
    day = list(owners.by_hour) or [1.0] * 24
    mean = fsum(day) / 24
    return [
        value / mean * (owners.weekend if (first_day + number) % 7 >= 5 else 1.0)
        for number in range(7)
        for value in day
    ]


def hours_of(world: World, name: str) -> list[float]:
    """Return the factors of a week, or of all hours of the world if special periods apply to these owners."""
    week = relative_hours(world.owners[name], world.first_day)
    special = [
        period
        for period in world.periods
        if period.reclaim_factor != 1 and (not period.owners or name in period.owners)
    ]
    if not special:
        return week
    hours = [week[hour % len(week)] for hour in range(24 * ceil(world.days))]
    for period in special:
        for hour in range(
            max(0, 24 * world.day_of(period.first)), min(len(hours), 24 * (world.day_of(period.last) + 1))
        ):
            hours[hour] *= period.reclaim_factor
    return hours


@lru_cache(maxsize=64)
def age_rates(shape: float, per_day: float) -> tuple[float, ...]:
    """Return the factor of each age bin: a Weibull's hazard, scaled so that the mean stay is 1 / `per_day` days."""
    edges = (0.0, *AGE_EDGES_S)
    middles = [(low + high) / 2 for low, high in pairwise(edges)] + [7 * DAY_S]
    raw = [(middle / PIVOT_S) ** (shape - 1) for middle in middles]
    if shape == 1 or per_day == 0:
        return tuple(1.0 for _ in raw)
    low, high = 1e-6, 1e6
    for _ in range(100):
        scale = (low * high) ** 0.5
        if mean_stay_s([scale * value for value in raw], per_day) > DAY_S / per_day:
            low = scale
        else:
            high = scale
    return tuple(scale * value for value in raw)


def mean_stay_s(factors: Sequence[float], per_day: float) -> float:
    """Return the mean stay: the integral of the survival function under these age factors."""
    total, survives, edges = 0.0, 1.0, (0.0, *AGE_EDGES_S, inf)
    for number, factor in enumerate(factors):
        rate = factor * per_day / DAY_S
        left = survives * exp(-rate * (edges[number + 1] - edges[number]))
        total += (survives - left) / rate
        survives = left
    return total


def _forced(world: World, there: Sequence[Machine], streams: Streams, end: float) -> list[list[Absence]]:
    """Return the absences of each machine that classes, shocks and outages cause, in order."""
    found: list[list[Absence]] = [[] for _ in there]
    for lesson in world.lessons:
        for start in _begins(lesson, world.first_day, end):
            held = _held(world, int(start // DAY_S))
            for number, machine in enumerate(there):
                # Draw even if the class is cancelled, so that a break does not change later draws.
                if (
                    machine.room in lesson.rooms
                    and streams.get(machine.name, "lessons").random() < lesson.share
                    and held
                ):
                    length = (lesson.ends_h - lesson.begins_h) * HOUR_S
                    found[number].append(Absence(start, start + length, lesson.kind, _notice(lesson)))
    for place, shock in enumerate(world.shocks):
        for where in sorted({_scope(shock, machine) for machine in there}):
            stream, now = streams.get(where, f"shock {place}"), 0.0
            while shock.per_week:
                now += exponential(stream.random()) * 7 * DAY_S / shock.per_week
                length = quantile(shock.absent_h, stream.random()) * HOUR_S
                if now >= end:
                    break
                for number, machine in enumerate(there):
                    if _scope(shock, machine) != where:
                        continue
                    if streams.get(machine.name, f"shock {place}").random() < shock.share:
                        found[number].append(Absence(now, now + length, shock.kind, _notice(shock)))
    for outage in world.outages:
        start = world.seconds_of(outage.at)
        kind: Kind = "noticed" if outage.notice_s else "sudden"
        for number, machine in enumerate(there):
            if not outage.buildings or machine.building in outage.buildings:
                found[number].append(Absence(start, start + outage.hours * HOUR_S, kind, outage.notice_s, True))
    return [sorted((one for one in each if one.start < end), key=lambda one: (one.start, one.end)) for each in found]


def _held(world: World, day: int) -> bool:
    return not any(
        not one.lessons and world.day_of(one.first) <= day <= world.day_of(one.last) for one in world.periods
    )


def _begins(lesson: Lesson, first_day: int, end: float) -> Iterator[float]:
    for number in range(int(end // DAY_S) + 1):
        if DAYS[(first_day + number) % 7] in lesson.days:
            yield number * DAY_S + lesson.begins_h * HOUR_S


def _notice(cause: Lesson | Shock) -> float:
    return cause.notice_s if cause.kind == "noticed" else 0.0


def _scope(shock: Shock, machine: Machine) -> str:
    return {"room": machine.room, "building": machine.building, "campus": ""}[shock.scope]


def _traced(world: World) -> list[list[Away]]:
    if world.trace is None:
        return []
    return list(read_trace(world.trace, world.days * DAY_S, world.first_day).values())


def _traced_absences(world: World, machine: Machine, streams: Streams, node: Sequence[Away]) -> list[Absence]:
    """Return the absences of a traced node; what the trace does not say is drawn as for the owners."""
    owners, stream = world.owners[machine.owners], streams.get(machine.name, "churn")
    return [_absence_of(owners, away, stream.random(), stream.random()) for away in node]


def _merged(absences: Sequence[Absence]) -> Iterator[Absence]:
    """Merge overlapping absences; the kind of the first one stays."""
    last: Absence | None = None
    for absence in sorted(absences, key=lambda one: (one.start, one.end)):
        if last is not None and absence.start <= last.end:
            last = msgspec.structs.replace(last, end=max(last.end, absence.end), dark=last.dark or absence.dark)
            continue
        if last is not None:
            yield last
        last = absence
    if last is not None:
        yield last


def _absence_of(owners: Owners, away: Away, chosen: float, notice: float) -> Absence:
    kind = away.cause
    if kind is None:
        noticed = chosen < owners.noticed
        kind = "noticed" if noticed else "brief" if away.end - away.start <= owners.brief_s.max else "sudden"
    return Absence(away.start, away.end, kind, quantile(owners.notice_s, notice) if kind == "noticed" else 0.0)

"""What a world's answer hangs on: each doubtful input moved down and up, all else as it was, under the same luck.

How owners announce themselves, and how often they come together, is known of no campus (docs/simulator.md): a study whose answer
turns with one of these has to measure it first.
"""

from collections.abc import Callable, Iterable, Mapping

import msgspec

from sim.campus.statistics import Interval, difference, mean_of
from sim.campus.study import Side, shared
from sim.campus.world import Kind, Owners, Shock, Spread, World

FACTOR = 4.0  # down and up, of what has no natural end; ours
TOGETHER = 0.25  # of the departures, at the upper end, take a whole room; ours
Change = Callable[[World], World]


class Knob(msgspec.Struct, frozen=True):
    """An input, and what its low and its high end are."""

    name: str
    low_says: str
    high_says: str
    low: Change
    high: Change
    of_owners: bool = False  # a trace says it instead


class Bar(msgspec.Struct, frozen=True):
    """One end of a knob: the figure there, and by how much it is more than at the base, paired by seed."""

    knob: str
    end: str
    says: str
    value: Interval
    more: Interval


class Tornado(msgspec.Struct, frozen=True):
    """The widest swing first."""

    world: str
    policy: str
    figure: str
    base: Interval
    bars: list[Bar]


def _each_owner(world: World, change: Callable[[Owners], Owners]) -> World:
    return msgspec.structs.replace(world, owners={name: change(one) for name, one in world.owners.items()})


def _times(spread: Spread, factor: float) -> Spread:
    return Spread(spread.median * factor, spread.sigma, spread.least * factor, min(1e9, spread.most * factor))


def _noticed(share: Callable[[float], float]) -> Change:
    """Of the owners' own departures; the rest is brief as often as before."""

    def change(one: Owners) -> Owners:
        now = share(one.noticed)
        rest = (1 - now) / (1 - one.noticed) if one.noticed < 1 else 0.0
        return msgspec.structs.replace(one, noticed=now, brief=min(1 - now, one.brief * rest))

    return lambda world: _each_owner(world, change)


def _notice_s(factor: float) -> Change:
    def change(world: World) -> World:
        longer = _each_owner(world, lambda one: msgspec.structs.replace(one, notice_s=_times(one.notice_s, factor)))
        lessons = tuple(msgspec.structs.replace(one, notice_s=one.notice_s * factor) for one in world.lessons)
        shocks = tuple(msgspec.structs.replace(one, notice_s=one.notice_s * factor) for one in world.shocks)
        cuts = tuple(msgspec.structs.replace(one, notice_s=one.notice_s * factor) for one in world.cuts)
        return msgspec.structs.replace(longer, lessons=lessons, shocks=shocks, cuts=cuts)

    return change


def _state(factor: float) -> Change:
    def change(world: World) -> World:
        jobs = msgspec.structs.replace(world.jobs, state_gib=_times(world.jobs.state_gib, factor))
        return msgspec.structs.replace(world, jobs=jobs)

    return change


def _uplink(factor: float) -> Change:
    def change(world: World) -> World:
        wire = msgspec.structs.replace(world.wire, uplink_gbps=world.wire.uplink_gbps * factor)
        return msgspec.structs.replace(world, wire=wire)

    return change


def _apart(world: World) -> World:
    """No shocks: what they took is taken by the owners, each machine for itself."""
    shocked = sum(shock.per_week / 7 * shock.share for shock in world.shocks)
    alone = _each_owner(
        world, lambda one: msgspec.structs.replace(one, reclaims_per_day=min(1000.0, one.reclaims_per_day + shocked))
    )
    return msgspec.structs.replace(alone, shocks=())


def _together(world: World) -> World:
    """A part of the owners' departures takes the whole room, as often and of the same kinds, but at any time of the day."""
    machines = {name: sum(group.count for group in world.groups if group.owners == name) for name in world.owners}
    mean = sum(world.owners[name].reclaims_per_day * count for name, count in machines.items()) / world.machines
    most = world.owners[max(machines, key=lambda name: machines[name])]
    sudden = max(0.0, 1 - most.noticed - most.brief)
    kinds: tuple[tuple[Kind, float, Spread], ...] = (
        ("noticed", most.noticed, most.absent_h),
        ("brief", most.brief, _times(most.brief_s, 1 / 3600)),
        ("sudden", sudden, most.absent_h),
    )
    shocks = tuple(
        Shock(
            "room",
            min(1000.0, 7 * mean * TOGETHER * share),
            absent_h,
            kind=kind,
            notice_s=most.notice_s.median,
        )
        for kind, share, absent_h in kinds
    )
    fewer = _each_owner(
        world, lambda one: msgspec.structs.replace(one, reclaims_per_day=one.reclaims_per_day * (1 - TOGETHER))
    )
    return msgspec.structs.replace(fewer, shocks=(*world.shocks, *shocks))


KNOBS: tuple[Knob, ...] = (
    Knob(
        "notice share",
        "half as many are noticed",
        "half of the others too",
        _noticed(lambda share: share / 2),
        _noticed(lambda share: (1 + share) / 2),
        of_owners=True,
    ),
    Knob("notice length", "a quarter", "four times", _notice_s(1 / FACTOR), _notice_s(FACTOR)),
    Knob("state size", "a quarter", "four times", _state(1 / FACTOR), _state(FACTOR)),
    Knob("uplink bandwidth", "a quarter", "four times", _uplink(1 / FACTOR), _uplink(FACTOR)),
    Knob(
        "correlation",
        "each machine for itself",
        "a quarter take the whole room",
        _apart,
        _together,
        of_owners=True,
    ),
)


def knobs(world: World) -> list[Knob]:
    """Those that mean something there."""
    return [knob for knob in KNOBS if world.trace is None or not knob.of_owners]


def variants(world: World) -> list[World]:
    """All that have to be run, the base first."""
    return [world, *(change(world) for knob in knobs(world) for change in (knob.low, knob.high))]


def tornado(world: World, policy: str, figure: str, sides: Mapping[str, Side]) -> Tornado:
    """`sides`: by the digest of each variant. ValueError if there is no seed that all have."""
    found = [sides[one.digest] for one in variants(world)]
    seeds = shared(*found)
    if not seeds:
        raise ValueError("no seed is finished for all ends of all inputs")
    base = found[0].values(figure, seeds)
    bars = []
    for place, knob in enumerate(knobs(world)):
        for end, says, side in (
            ("low", knob.low_says, found[1 + 2 * place]),
            ("high", knob.high_says, found[2 + 2 * place]),
        ):
            values = side.values(figure, seeds)
            bars.append(Bar(knob.name, end, says, mean_of(values), difference(base, values)))
    return Tornado(world.name, policy, figure, mean_of(base), _widest_first(bars))


def _widest_first(bars: Iterable[Bar]) -> list[Bar]:
    swing: dict[str, float] = {}
    for bar in bars:
        swing[bar.knob] = max(swing.get(bar.knob, 0.0), abs(bar.more.value))
    return sorted(bars, key=lambda bar: -swing[bar.knob])

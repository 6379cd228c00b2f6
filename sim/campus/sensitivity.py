"""Sensitivity of a world's result: each uncertain input changed down and up, one at a time, with the same random draws.

No public data says how often owners give notice and how often machines leave together. A study whose answer depends on these
inputs has to measure them first.
"""

from collections.abc import Callable, Iterable, Mapping

import msgspec

from sim.campus.statistics import Interval, difference, mean_of
from sim.campus.study import Sample, common_seeds
from sim.campus.world import Kind, Lognormal, Owners, Shock, World

FACTOR = 4.0  # down and up, for inputs without natural bounds (own choice)
TOGETHER = 0.25  # of the departures take a whole room at the upper end (own choice)
Change = Callable[[World], World]


class Input(msgspec.Struct, frozen=True):
    """An uncertain input, with its change to a low and to a high end."""

    name: str
    low_label: str
    high_label: str
    low: Change
    high: Change
    of_owners: bool = False  # does not apply to worlds with a trace


class Bar(msgspec.Struct, frozen=True):
    """One end of an input: the metric there, and its change from the base, paired by seed."""

    name: str
    end: str
    label: str
    value: Interval
    change: Interval


class Tornado(msgspec.Struct, frozen=True):
    """The sensitivity of a metric to all inputs, the widest swing first."""

    world: str
    policy: str
    metric: str
    base: Interval
    bars: list[Bar]


def _each_owner(world: World, change: Callable[[Owners], Owners]) -> World:
    return msgspec.structs.replace(world, owners={name: change(one) for name, one in world.owners.items()})


def _times(spread: Lognormal, factor: float) -> Lognormal:
    return Lognormal(spread.median * factor, spread.sigma, spread.min * factor, min(1e9, spread.max * factor))


def _noticed(share: Callable[[float], float]) -> Change:
    """Change the share of noticed departures; the others keep their proportions."""

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
        outages = tuple(msgspec.structs.replace(one, notice_s=one.notice_s * factor) for one in world.outages)
        return msgspec.structs.replace(longer, lessons=lessons, shocks=shocks, outages=outages)

    return change


def _state(factor: float) -> Change:
    def change(world: World) -> World:
        jobs = msgspec.structs.replace(world.jobs, state_gib=_times(world.jobs.state_gib, factor))
        return msgspec.structs.replace(world, jobs=jobs)

    return change


def _uplink(factor: float) -> Change:
    def change(world: World) -> World:
        network = msgspec.structs.replace(world.network, uplink_gbps=world.network.uplink_gbps * factor)
        return msgspec.structs.replace(world, network=network)

    return change


def _apart(world: World) -> World:
    """Replace shocks by independent departures at the same rate for each machine."""
    shocked = sum(shock.per_week / 7 * shock.share for shock in world.shocks)
    alone = _each_owner(
        world, lambda one: msgspec.structs.replace(one, reclaims_per_day=min(1000.0, one.reclaims_per_day + shocked))
    )
    return msgspec.structs.replace(alone, shocks=())


def _together(world: World) -> World:
    """Let a share of the owners' departures take the whole room, at the same rate and kinds, at any time of the day."""
    machines = {name: sum(group.count for group in world.groups if group.owners == name) for name in world.owners}
    mean = sum(world.owners[name].reclaims_per_day * count for name, count in machines.items()) / world.machines
    most = world.owners[max(machines, key=lambda name: machines[name])]
    sudden = max(0.0, 1 - most.noticed - most.brief)
    kinds: tuple[tuple[Kind, float, Lognormal], ...] = (
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


INPUTS: tuple[Input, ...] = (
    Input(
        "notice share",
        "half as many are noticed",
        "half of the others are noticed too",
        _noticed(lambda share: share / 2),
        _noticed(lambda share: (1 + share) / 2),
        of_owners=True,
    ),
    Input("notice length", "a quarter", "four times", _notice_s(1 / FACTOR), _notice_s(FACTOR)),
    Input("state size", "a quarter", "four times", _state(1 / FACTOR), _state(FACTOR)),
    Input("uplink bandwidth", "a quarter", "four times", _uplink(1 / FACTOR), _uplink(FACTOR)),
    Input(
        "correlation",
        "each machine departs alone",
        "a quarter take the whole room",
        _apart,
        _together,
        of_owners=True,
    ),
)


def inputs_of(world: World) -> list[Input]:
    """Return the inputs that apply to a world."""
    return [input_ for input_ in INPUTS if world.trace is None or not input_.of_owners]


def variants(world: World) -> list[World]:
    """Return the worlds to run: the base, then both ends of each input."""
    return [world, *(change(world) for input_ in inputs_of(world) for change in (input_.low, input_.high))]


def tornado(world: World, policy: str, metric: str, samples: Mapping[str, Sample]) -> Tornado:
    """Return the sensitivities from `samples`, by the digest of each variant; ValueError without a common seed."""
    found = [samples[one.digest] for one in variants(world)]
    seeds = common_seeds(*found)
    if not seeds:
        raise ValueError("no seed has finished for both ends of all inputs")
    base = found[0].values(metric, seeds)
    bars = []
    for place, input_ in enumerate(inputs_of(world)):
        for end, label, sample in (
            ("low", input_.low_label, found[1 + 2 * place]),
            ("high", input_.high_label, found[2 + 2 * place]),
        ):
            values = sample.values(metric, seeds)
            bars.append(Bar(input_.name, end, label, mean_of(values), difference(base, values)))
    return Tornado(world.name, policy, metric, mean_of(base), _widest_first(bars))


def _widest_first(bars: Iterable[Bar]) -> list[Bar]:
    swing: dict[str, float] = {}
    for bar in bars:
        swing[bar.name] = max(swing.get(bar.name, 0.0), abs(bar.change.value))
    return sorted(bars, key=lambda bar: -swing[bar.name])

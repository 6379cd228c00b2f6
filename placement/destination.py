"""Destinations: one plan for all jobs that leave a node (ReclaimNet's rule, applied to all of them together).

For a job, an option names the node that runs it next and the node that receives its state. The option's expected value is

    P(the state arrives in time) x [ value x P(kept) + gpus x horizon x P(node stays) ]  + the value of a restart from less

where `value` is the work since the last durable checkpoint. The job that would lose most without its first choice chooses first
(the regret rule of Vogel's approximation); each job takes its best option that fits what is left. The states then leave through
one port in the order of value per second (Smith 1956).
`docs/explanation/destination.md` has the formulas; decision 0015 compares this greedy plan with a search for the best.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import msgspec

from placement.advert import HORIZONS_S, MAX_WEIGHT, WHOLE, Advert, horizon_of
from placement.allocation import gpu_percent, reserve
from placement.filters import refusals
from placement.request import Request

HOUR_S = 3600.0  # the period that an advert's weight is for
STRANDED = 0.95  # factor on a node's value for each whole GPU that stays free beside the job (own choice)
HORIZON_S, LEAST_HORIZON_S = 1800.0, 300.0  # to the next durable checkpoint: default and minimum (own choice)
SUDDEN = 0.4  # part of departures that take the stored state with them at once (docs/reference/campus-worlds.md)
RESTART = (
    0.5  # part of a node's value that is left if the state is late and the job restarts from an older one (own choice)
)
FETCHES = 0.9  # factor on a node's value if it has to fetch the state from another holder (own choice)
LIKELY = 0.5  # a state with a lower chance to be in time leaves after the others (own choice)
LEAST_SPREAD, MOST_SPREAD = 0.05, 3.0  # bounds on the spread of a path's bandwidth (own choice)
LOGISTIC = math.pi / math.sqrt(3)  # standard deviation of the standard logistic distribution
MOMENT_S = 1e-3  # least time that a state is assumed to take
MOST_VALUE = 1e12  # GPU-seconds; a larger value is an error


class Target(msgspec.Struct, frozen=True):
    """A node that may receive a job's state.

    `bytes`: what is missing there; `bps` and `spread` (of its logarithm): bandwidth of the path (`ckptstore.bandwidth.Path`);
    `stays`: P(the node is lent until the job's next durable checkpoint there, or its end); `runs`: the job may run there;
    `favour`: factor on the value of running there, above 1 for the job's home, below 1 if for example an image is missing.
    """

    node: bytes
    bytes: float
    bps: float
    spread: float
    stays: float
    runs: bool
    favour: float = 1.0


class LeavingJob(msgspec.Struct, frozen=True):
    """A job that has to leave. `value`: GPU-seconds of work that no other node has; `ready_s`: until its state can be sent;
    `targets`: in the order of its ranking; `horizon_s`: from its start elsewhere to its next durable checkpoint, or its end."""

    request: Request
    value: float
    targets: tuple[Target, ...]
    ready_s: float = 0.0
    horizon_s: float = HORIZON_S


class Destination(msgspec.Struct, frozen=True):
    """The destination of one job. `place`: the node to run at, None if no node fits; `to`: the node that receives its state, None
    if no node can; `seconds`: to send `bytes`; `at_s`: from now until the state is there, in time with probability `chance`."""

    job: bytes
    place: bytes | None
    to: bytes | None
    bytes: float
    seconds: float
    at_s: float
    chance: float
    stays: float


class Plan(msgspec.Struct, frozen=True):
    """`destinations`: in the order of the given jobs; `order`: job positions in the order in which the states leave; `expected`:
    GPU-seconds that the plan is expected to keep."""

    destinations: tuple[Destination, ...]
    order: tuple[int, ...]
    expected: float


class Option(msgspec.Struct, frozen=True, gc=False):
    """A possible destination of one job. It is worth `late` if the state is late, and `early` more if it is in time; `alone`: the
    expected value if the port is free when the job is ready, with the chance `surest`."""

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


NOTHING = Option(None, None, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def survival(advert: Advert, horizon_s: float) -> float:
    """Return P(the node stays lent for `horizon_s`), from its advert: at the nearest horizon, then at a constant hazard."""
    horizon = horizon_of(horizon_s)
    advertised_s = HORIZONS_S[horizon] if advert.weights else HOUR_S
    share = min(advert.weight_for(horizon) / MAX_WEIGHT, 1 - 0.5 / MAX_WEIGHT)
    return float(share ** (max(0.0, horizon_s) / advertised_s))


def stranding(request: Request, advert: Advert) -> float:
    """Return the factor on a node's value for the whole GPUs left free beside the job: wide jobs need those."""
    left = advert.whole_gpus_free - request.gpus if request.gpus and not request.is_share else 0
    return STRANDED ** max(0, left)


def worth(at_risk_s: float, share: int, priority: int = 50) -> float:
    """Return the GPU-seconds at risk of a job that uses `share` per cent of a GPU, times 0.5 to 1.5 for priority 0 to 100."""
    return max(0.0, at_risk_s) * share / WHOLE * (0.5 + priority / 100)


def in_time(busy_s: float, window_s: float, steep: float) -> float:
    """Return P(a transfer of `busy_s` at the median bandwidth ends within the window), for log-logistic bandwidths."""
    if window_s <= 0 or not busy_s < math.inf:
        return 0.0
    if busy_s <= 0:
        return 1.0
    exponent = steep * math.log(busy_s / window_s)
    return 1 / (1 + math.exp(exponent)) if exponent < 700 else 0.0


def options(job: LeavingJob, window_s: float) -> list[Option]:
    """Return the job's options, best first.

    The job runs at a place, and its state goes there directly or to the keeper: the target that receives it soonest, from which
    the place fetches it. Or a target keeps the state while the job waits for a place.
    """
    gpus = gpu_percent(job.request.gpus, job.request.gpu_share) / WHOLE
    horizon_s = min(max(LEAST_HORIZON_S, _finite(job.horizon_s, HORIZON_S)), 1e9)
    value, ready_s = min(_finite(job.value), MOST_VALUE), _finite(job.ready_s, math.inf)
    targets = {target.node: target for target in job.targets}.values()
    keeper = min(targets, key=_seconds, default=None)
    found: list[Option] = []

    def add(place: Target | None, to: Target, early: float, late: float) -> None:
        seconds, steep = _seconds(to), LOGISTIC / min(max(LEAST_SPREAD, to.spread), MOST_SPREAD)
        early += value * (1 - (1 - _chance(to.stays)) * SUDDEN)
        surest = in_time(seconds, window_s - ready_s, steep)
        stays = _chance((place or to).stays)
        count = _finite(to.bytes, 0.0 if to.bytes < 0 else math.inf)
        node, alone = None if place is None else place.node, late + early * surest
        found.append(Option(node, to.node, count, seconds, steep, early, late, stays, ready_s, surest, alone))

    for target in targets:
        if target.runs:
            runs = gpus * horizon_s * _chance(target.stays) * target.favour
            seconds = _seconds(target)
            begun = max(RESTART, horizon_s / (horizon_s + seconds))  # the job stands still until its state is there
            add(target, target, runs * (begun - RESTART), runs * RESTART)
            if keeper is not None and _seconds(keeper) < seconds:
                add(target, keeper, runs * (max(RESTART, FETCHES * begun) - RESTART), runs * RESTART)
        add(None, target, 0.0, 0.0)
    found.sort(key=lambda option: -option.alone)
    return [*found, NOTHING]


def _seconds(target: Target) -> float:
    if not target.bytes > 0:
        return 0.0 if target.bytes <= 0 else math.inf
    return target.bytes / target.bps if target.bps > 0 and target.bytes < math.inf else math.inf


def _finite(value: float, otherwise: float = 0.0) -> float:
    return value if 0 <= value < math.inf else otherwise


def _chance(value: float) -> float:
    return min(1.0, value) if value > 0 else 0.0  # also for NaN


def plan(jobs: Sequence[LeavingJob], adverts: Mapping[bytes, Advert], window_s: float) -> Plan:
    """Plan all destinations. `adverts`: the capacity of the nodes now; a node without an advert has none. Deterministic."""
    window_s = _finite(window_s)
    left = dict(adverts)
    able = [options(job, window_s) for job in jobs]
    chosen = [NOTHING] * len(jobs)
    for i in sorted(range(len(jobs)), key=lambda i: -_regret(able[i])):
        request = jobs[i].request
        for option in able[i]:
            advert = None if option.place is None else left.get(option.place)
            if option.place is None or (advert is not None and not refusals(request, advert)):
                chosen[i] = option
                if advert is not None:
                    left[advert.node] = reserve(advert, request)
                break
    order, at_s, chances = _schedule(chosen, window_s)
    destinations = tuple(
        Destination(
            job.request.job, option.place, option.to, option.bytes, option.seconds, at_s[i], chances[i], option.stays
        )
        for i, (job, option) in enumerate(zip(jobs, chosen, strict=True))
    )
    expected = sum(option.late + option.early * chance for option, chance in zip(chosen, chances, strict=True))
    return Plan(destinations, tuple(order), expected)


def _regret(able: Sequence[Option]) -> float:
    """Return the expected value that the job loses if its best place is taken."""
    return able[0].alone - next((option.alone for option in able if option.place != able[0].place), 0.0)


def _schedule(chosen: Sequence[Option], window_s: float) -> tuple[list[int], list[float], list[float]]:
    """Order the states; return the order, the time at which each is there, and the chance that this is in time.

    The state with the most expected value per second goes first (Smith 1956). A state that is unlikely to be in time at its turn,
    or is worth nothing, goes after the others.
    """
    line = sorted(
        range(len(chosen)), key=lambda i: -chosen[i].early * chosen[i].surest / (chosen[i].seconds + MOMENT_S)
    )
    order: list[int] = []
    behind: list[int] = []
    at_s, chances = [math.inf] * len(chosen), [0.0] * len(chosen)
    clock = busy = weighed = 0.0
    for late in (False, True):
        for i in behind if late else line:
            option = chosen[i]
            if option.to is None:
                (order if late else behind).append(i)
                continue
            begun = max(clock, option.ready_s)
            took = busy + option.seconds
            # The rates through one port rise and fall together: one exponent for all, weighted by the time that each sends.
            steeps = weighed + option.steep * option.seconds
            chance = in_time(took, window_s - (begun - busy), steeps / took if 0 < took < math.inf else option.steep)
            chance = min(chance, option.surest)
            if not late and (chance < LIKELY or option.early <= 0):
                behind.append(i)
                continue
            at_s[i], chances[i] = begun + option.seconds, chance
            order.append(i)
            clock, busy, weighed = begun + option.seconds, took, steeps
    return order, at_s, chances


def describe(destination: Destination, name: Callable[[bytes], str], window_s: float) -> str:
    """Describe a destination to the job's user."""
    place, to = destination.place, destination.to
    head = "waits: no node has a free place" if place is None else f"continues on {name(place)}"
    if to is None:
        return f"{head}; no node can take its last state"
    if destination.bytes <= 0:
        return f"{head}, which has its state already" if to == place else f"{head}; {name(to)} keeps its state"
    size = f"{destination.bytes / 1e6:.1f} MB" if destination.bytes < 1e9 else f"{destination.bytes / 1e9:.1f} GB"
    sent = f"sends {size}" if to == place else f"sends {size} to {name(to)}, which keeps them"
    if destination.chance < LIKELY:
        took = "too long" if not destination.at_s < math.inf else f"about {destination.at_s:.0f} s"
        return f"{head}; {sent}, which would take {took} of {max(0.0, window_s):.0f}: likely too late"
    return f"{head}; {sent} in about {destination.at_s:.0f} s, {destination.chance:.0%} in time"

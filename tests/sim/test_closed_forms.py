"""The simulator against closed forms: a queue, renewals, Young's loss. Seeds are fixed; tolerances are 3 sigma or 1 %."""

from collections.abc import Sequence
from math import exp, sqrt
from random import Random

import msgspec
import pytest

from sim.campus.campus import Campus
from sim.campus.churn import (
    AGE_EDGES_S,
    DAY_S,
    HOUR_S,
    Machine,
    absences,
    age_rates,
    departure,
    machines,
    mean_stay_s,
    relative_hours,
)
from sim.campus.distributions import exponential, quantile
from sim.campus.policies import POLICIES, Policy
from sim.campus.schedules import Outlook, Periodic, Product, Young
from sim.campus.world import Lognormal, World
from sim.campus.world_files import find_world, parse_world
from sim.kernel import Kernel, Streams

SIGMAS = 3.0


def deviations(sample: Sequence[float], expected: float) -> float:
    """Return the distance of a sample's mean from the expected value, in standard errors."""
    mean = sum(sample) / len(sample)
    variance = sum((one - mean) ** 2 for one in sample) / (len(sample) - 1)
    return (mean - expected) / sqrt(variance / len(sample)) if variance else (0.0 if mean == expected else float("inf"))


def test_single_server_queue_waits_like_m_m_1() -> None:
    """The mean time in the system is 1/(mu - lambda), estimated in batches of customers."""
    arrival, service = 0.7, 1.0
    kernel, streams = Kernel(), Streams(11)
    coming, serving = streams.get("queue", "coming"), streams.get("queue", "serving")
    line: list[float] = []
    spent: list[float] = []

    def come() -> None:
        line.append(kernel.now)
        if len(line) == 1:
            kernel.post(exponential(serving.random()) / service, leave)
        kernel.post(exponential(coming.random()) / arrival, come)

    def leave() -> None:
        spent.append(kernel.now - line.pop(0))
        if line:
            kernel.post(exponential(serving.random()) / service, leave)

    come()
    kernel.run(150_000.0)
    batches = [sum(spent[n : n + 2000]) / 2000 for n in range(2000, len(spent) - 2000, 2000)]
    assert len(batches) > 40
    assert abs(deviations(batches, 1 / (service - arrival))) < SIGMAS


def renewing(shape: float) -> World:
    text = f"""
    name = "renewal"
    days = 200
    [[groups]]
    name = "m"
    count = 60
    owners = "o"
    [owners.o]
    reclaims_per_day = 2.0
    age_shape = {shape}
    brief = 0
    absent_h = {{ median = 4, sigma = 0.5, max = 1000 }}
    [jobs]
    per_day = 0
    hours = {{ median = 1 }}
    """
    return parse_world(text.encode(), "renewal")


@pytest.mark.parametrize("shape", [1.0, 0.57])
def test_lent_share_matches_an_alternating_renewal_process(shape: float) -> None:
    """The lent share is mean stay / (mean stay + mean absence), with one departure in each such cycle."""
    world = renewing(shape)
    there = machines(world)
    found = absences(world, there, Streams(5))
    up, down = DAY_S / 2.0, 4 * HOUR_S * exp(0.5**2 / 2)
    end = world.days * DAY_S
    # The first stays start with the run, so only the time after twenty days counts.
    start = 20 * DAY_S
    away = [sum(max(0.0, min(one.end, end) - max(one.start, start)) for one in each) / (end - start) for each in found]
    assert abs(deviations(away, down / (up + down))) < SIGMAS
    gone = [sum(one.start >= start for one in each) * (up + down) / (end - start) for each in found]
    assert abs(deviations(gone, 1.0)) < SIGMAS


def test_mean_stay_matches_the_rate_for_every_shape() -> None:
    for shape in (0.4, 0.57, 1.0, 1.5):
        assert mean_stay_s(age_rates(shape, 1.7), 1.7) == pytest.approx(DAY_S / 1.7, rel=0.01)


def test_hours_of_the_day_shift_departures_but_keep_their_number() -> None:
    """The hazard's integral is inverted exactly: a threshold of one day's integral gives a departure one day later."""
    owners = find_world("reclaimnet-54").owners["lab"]
    hours = relative_hours(owners, 0)
    assert len(hours) == 168
    flat = (1.0,) * (len(AGE_EDGES_S) + 1)
    assert departure(0.0, DAY_S, hours, flat, 1e9) == pytest.approx(DAY_S)
    assert departure(0.0, 5 * DAY_S + 2 * DAY_S * owners.weekend, hours, flat, 1e9) == pytest.approx(7 * DAY_S)
    assert departure(3 * HOUR_S, 1e9, hours, flat, 100.0) == float("inf")


def test_quantiles_match_the_truncated_lognormal() -> None:
    rng = Random(3)
    spread = Lognormal(4.0, 0.8)
    values = [quantile(spread, rng.random()) for _ in range(20_000)]
    assert abs(deviations(values, 4.0 * exp(0.8**2 / 2))) < SIGMAS
    cut = Lognormal(4.0, 0.8, 2.0, 6.0)
    values = [quantile(cut, rng.random()) for _ in range(2000)]
    assert min(values) >= 2.0 and max(values) <= 6.0


LONG_JOBS = """
name = "young"
days = 20
warm_up = 0
[[groups]]
name = "m"
count = 16
owners = "o"
edge_gbps = 1000
[owners.o]
reclaims_per_day = 4.0
noticed = 0
brief = 0
absent_h = { median = 0.01 }
[jobs]
at_start = 12
per_day = 0
hours = { median = 100000 }
state_gib = { median = 0.001, sigma = 0, min = 0 }
[costs]
stall_s = 60
launch_s = 0
"""


@pytest.mark.long
def test_lost_work_matches_youngs_formula() -> None:
    """With sudden departures at rate l and a checkpoint of C after each T of work, a departure costs
    ((1 - e^-lT)/l - T q)/(1 - q) with q = e^-l(T+C)."""
    world = parse_world(LONG_JOBS.encode(), "young")
    rate, stall, every = 4.0 / DAY_S, 60.0, 1800.0
    policy = msgspec.structs.replace(POLICIES["slurm-s60-fast"], schedule=Periodic(every))
    losses = []
    for seed in range(6):
        counters = Campus(world, policy, seed).run()
        assert counters.departures > 600
        losses.append(counters.lost / counters.departures)
    stays = exp(-rate * (every + stall))
    expected = ((1 - exp(-rate * every)) / rate - every * stays) / (1 - stays)
    assert abs(deviations(losses, expected)) < SIGMAS or sum(losses) / len(losses) == pytest.approx(expected, rel=0.01)


def waste(policy: Policy) -> float:
    counters = Campus(parse_world(LONG_JOBS.encode(), "young"), policy, 1).run()
    return (counters.lost + counters.stalled) / counters.useful


def test_youngs_interval_wastes_the_least_of_all_fixed_intervals() -> None:
    base = POLICIES["slurm-s60-fast"]
    best = Young().interval_s(60.0, DAY_S / 4.0)
    found = [waste(msgspec.structs.replace(base, schedule=Periodic(best * factor))) for factor in (0.4, 1.0, 2.5)]
    assert found[1] < min(found[0], found[2])


def outlook(rate: float, lossy: float = 1.0) -> Outlook:
    return Outlook(20.0, 30.0, 30.0, lossy, lambda start: iter([(float("inf"), rate)]), rate, float("inf"))


def test_hazard_rule_equals_youngs_rule_at_constant_hazard() -> None:
    for rate in (1 / 3600, 1 / 36_000):
        due = Product().next_checkpoint(100.0, 100.0, outlook(rate))
        assert due - 100.0 == pytest.approx(Young().interval_s(20.0, 1 / rate))
    quarter = Product().next_checkpoint(0.0, 0.0, outlook(1 / 3600, lossy=0.25))
    assert quarter == pytest.approx(2 * Young().interval_s(20.0, 3600.0))


def test_dalys_interval_matches_his_formula() -> None:
    """The interval is sqrt(2CM)[1 + sqrt(C/2M)/3 + (C/2M)/9] - C, or M if C is at least 2M."""
    assert Young(daly=True).interval_s(50.0, 10_000.0) == pytest.approx(1000 * (1 + 0.05 / 3 + 0.0025 / 9) - 50)
    assert Young(daly=True).interval_s(300.0, 100.0) == 100.0


def test_machines_are_distributed_over_rooms() -> None:
    there = machines(find_world("reclaimnet-54"))
    assert len(there) == 54 and sum(machine.gpus for machine in there) == 118
    assert len({machine.building for machine in there}) == 6
    assert isinstance(there[0], Machine)

"""The simulator against results that are known: a queue, renewals, Young's loss. Seeds are fixed; all within 3 sigma or 1 %."""

from collections.abc import Sequence
from math import exp, sqrt
from random import Random

import msgspec
import pytest

from sim.campus.campus import Campus
from sim.campus.chance import quantile, waiting
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
from sim.campus.policies import POLICIES, Policy
from sim.campus.schedules import Outlook, Periodic, Product, Young
from sim.campus.world import Spread, World, find_world, parse_world
from sim.kernel import Kernel
from sim.streams import Streams

SIGMAS = 3.0


def deviations(sample: Sequence[float], expected: float) -> float:
    """By how many standard errors the mean of a sample is off."""
    mean = sum(sample) / len(sample)
    variance = sum((one - mean) ** 2 for one in sample) / (len(sample) - 1)
    return (mean - expected) / sqrt(variance / len(sample)) if variance else (0.0 if mean == expected else float("inf"))


def test_a_queue_of_one_server_waits_as_m_m_1_does() -> None:
    """Mean time in the system 1/(mu - lambda), by batches of customers."""
    arrival, service = 0.7, 1.0
    kernel, streams = Kernel(), Streams(11)
    coming, serving = streams.get("queue", "coming"), streams.get("queue", "serving")
    line: list[float] = []
    spent: list[float] = []

    def come() -> None:
        line.append(kernel.now)
        if len(line) == 1:
            kernel.post(waiting(serving.random()) / service, leave)
        kernel.post(waiting(coming.random()) / arrival, come)

    def leave() -> None:
        spent.append(kernel.now - line.pop(0))
        if line:
            kernel.post(waiting(serving.random()) / service, leave)

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
    absent_h = {{ median = 4, sigma = 0.5, most = 1000 }}
    [jobs]
    per_day = 0
    hours = {{ median = 1 }}
    """
    return parse_world(text.encode(), "renewal")


@pytest.mark.parametrize("shape", [1.0, 0.57])
def test_machines_are_lent_as_an_alternating_renewal_process_is(shape: float) -> None:
    """The part of time: mean stay / (mean stay + mean absence); departures one per both."""
    world = renewing(shape)
    there = machines(world)
    found = absences(world, there, Streams(5))
    up, down = DAY_S / 2.0, 4 * HOUR_S * exp(0.5**2 / 2)
    end = world.days * DAY_S
    # The first stays begin with the run: what comes after twenty days counts.
    start = 20 * DAY_S
    away = [sum(max(0.0, min(one.end, end) - max(one.start, start)) for one in each) / (end - start) for each in found]
    assert abs(deviations(away, down / (up + down))) < SIGMAS
    gone = [sum(one.start >= start for one in each) * (up + down) / (end - start) for each in found]
    assert abs(deviations(gone, 1.0)) < SIGMAS


def test_stays_have_the_mean_that_the_world_says_whatever_their_shape() -> None:
    for shape in (0.4, 0.57, 1.0, 1.5):
        assert mean_stay_s(age_rates(shape, 1.7), 1.7) == pytest.approx(DAY_S / 1.7, rel=0.01)


def test_hours_of_the_day_move_departures_and_not_their_number() -> None:
    """The hazard's integral is inverted exactly: with a threshold of one day's integral the departure is a day later."""
    owners = find_world("reclaimnet-54").owners["lab"]
    hours = relative_hours(owners, 0)
    assert len(hours) == 168
    flat = (1.0,) * (len(AGE_EDGES_S) + 1)
    assert departure(0.0, DAY_S, hours, flat, 1e9) == pytest.approx(DAY_S)
    assert departure(0.0, 5 * DAY_S + 2 * DAY_S * owners.weekend, hours, flat, 1e9) == pytest.approx(7 * DAY_S)
    assert departure(3 * HOUR_S, 1e9, hours, flat, 100.0) == float("inf")


def test_a_spread_is_the_lognormal_it_says() -> None:
    rng = Random(3)
    spread = Spread(4.0, 0.8)
    values = [quantile(spread, rng.random()) for _ in range(20_000)]
    assert abs(deviations(values, 4.0 * exp(0.8**2 / 2))) < SIGMAS
    cut = Spread(4.0, 0.8, 2.0, 6.0)
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
state_gib = { median = 0.001, sigma = 0, least = 0 }
[costs]
stall_s = 60
launch_s = 0
"""


def test_work_is_lost_as_young_says() -> None:
    """Sudden departures at rate l, a checkpoint of C after each T of work: each departure costs
    ((1 - e^-lT)/l - T q)/(1 - q) with q = e^-l(T+C)."""
    world = parse_world(LONG_JOBS.encode(), "young")
    rate, stall, every = 4.0 / DAY_S, 60.0, 1800.0
    policy = msgspec.structs.replace(POLICIES["slurm-s60-fast"], schedule=Periodic(every))
    losses = []
    for seed in range(6):
        tally = Campus(world, policy, seed).run()
        assert tally.departures > 600
        losses.append(tally.lost / tally.departures)
    stays = exp(-rate * (every + stall))
    expected = ((1 - exp(-rate * every)) / rate - every * stays) / (1 - stays)
    assert abs(deviations(losses, expected)) < SIGMAS or sum(losses) / len(losses) == pytest.approx(expected, rel=0.01)


def waste(policy: Policy) -> float:
    tally = Campus(parse_world(LONG_JOBS.encode(), "young"), policy, 1).run()
    return (tally.lost + tally.stalled) / tally.useful


def test_youngs_interval_wastes_least_of_all_fixed_ones() -> None:
    base = POLICIES["slurm-s60-fast"]
    best = Young().interval_s(60.0, DAY_S / 4.0)
    found = [waste(msgspec.structs.replace(base, schedule=Periodic(best * factor))) for factor in (0.4, 1.0, 2.5)]
    assert found[1] < min(found[0], found[2])


def outlook(rate: float, lossy: float = 1.0) -> Outlook:
    return Outlook(20.0, 30.0, 30.0, lossy, lambda start: iter([(float("inf"), rate)]), rate, float("inf"))


def test_where_the_hazard_is_constant_its_integral_is_youngs_rule() -> None:
    for rate in (1 / 3600, 1 / 36_000):
        due = Product().next_checkpoint(100.0, 100.0, outlook(rate))
        assert due - 100.0 == pytest.approx(Young().interval_s(20.0, 1 / rate))
    quarter = Product().next_checkpoint(0.0, 0.0, outlook(1 / 3600, lossy=0.25))
    assert quarter == pytest.approx(2 * Young().interval_s(20.0, 3600.0))


def test_dalys_interval_is_his() -> None:
    """sqrt(2CM)[1 + sqrt(C/2M)/3 + (C/2M)/9] - C, and M where a checkpoint takes as long as two means."""
    assert Young(daly=True).interval_s(50.0, 10_000.0) == pytest.approx(1000 * (1 + 0.05 / 3 + 0.0025 / 9) - 50)
    assert Young(daly=True).interval_s(300.0, 100.0) == 100.0


def test_the_machines_of_a_world_are_dealt_over_its_rooms() -> None:
    there = machines(find_world("reclaimnet-54"))
    assert len(there) == 54 and sum(machine.gpus for machine in there) == 118
    assert len({machine.building for machine in there}) == 6
    assert isinstance(there[0], Machine)

"""Observation of a run: it matches the counters and does not change the run."""

import pytest

from sim.campus.observation import AGES_S, WINDOWS_S, Observation, availability, observe
from sim.campus.policies import POLICIES, find_policy
from sim.campus.replication import replicate
from sim.campus.world_files import find_world

WORLD = find_world("gpunion-11", ["warm_up=0.2"])


@pytest.fixture(scope="module", params=["mesh", "slurm-s60"])
def seen(request: pytest.FixtureRequest) -> Observation:
    return observe(WORLD, request.param, 3, forecasts=True)


def test_observed_run_has_the_same_digest(seen: Observation) -> None:
    assert seen.result == replicate(WORLD, POLICIES[seen.result.policy], 3)


def test_observation_matches_the_counters(seen: Observation) -> None:
    figures = seen.result.metrics
    assert len(seen.lost) == figures["departures"] and sum(seen.lost) == pytest.approx(3600 * figures["lost"], rel=0.05)
    assert sum(run.end == "finished" for run in seen.runs) >= figures["finished"]
    assert all(run.start_s <= run.end_s for run in seen.runs)
    assert {run.end for run in seen.runs} >= {"finished", "lost"}
    total = sum(seen.gpus.values())
    assert len(seen.hours) == WORLD.days * 24
    assert all(hour.guests + hour.owners + hour.idle <= total for hour in seen.hours)


def test_forecasts_cover_lent_machines(seen: Observation) -> None:
    assert len(seen.forecasts) == len(WINDOWS_S) and all(len(found) > 500 for found in seen.forecasts)
    assert all(0 < chance < 1 for found in seen.forecasts for chance, _ in found)
    assert len(seen.predicted) == len(AGES_S) and seen.predicted == sorted(seen.predicted, reverse=True)


def test_availability_is_the_complement_of_absences() -> None:
    by_hour = availability(find_world("gpunion-11", ["days=7", "warm_up=0"]), range(3))
    assert len(by_hour) == 7 and all(len(day) == 24 and all(0 <= part <= 1 for part in day) for day in by_hour)
    parts = [part for day in by_hour for part in day]
    use = [replicate(find_world("gpunion-11", ["warm_up=0"]), POLICIES["slurm-s0"], seed) for seed in range(3)]
    owners = sum(one.metrics["owner_use"] for one in use) / 3
    assert 0.8 * (1 - sum(parts) / len(parts)) == pytest.approx(owners)  # owners use 0.8 of their GPU time


def test_periodic_policies_exist_for_any_interval() -> None:
    assert find_policy("periodic-30") is POLICIES["periodic-30"]
    assert find_policy("periodic-5").schedule.next_checkpoint(10.0, 10.0, None) == 310.0  # type: ignore[arg-type]
    for wrong in ("periodic-0", "periodic-", "periodic-1e3", "periodic-99999", "mehs", ""):
        with pytest.raises(ValueError, match="unknown policy"):
            find_policy(wrong)

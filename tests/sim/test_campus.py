"""One run of a campus: conservation, the reaction of each policy to a departure, and determinism."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.advert import HORIZONS_S
from sim.campus.campus import Campus
from sim.campus.churn import Absence
from sim.campus.detection import detected_after_s, quantiles_s
from sim.campus.metrics import METRICS
from sim.campus.policies import POLICIES, Detection, delay_s
from sim.campus.replication import metrics_of, replicate
from sim.campus.state import UNLIKELY, WEIGHT_EPOCH_S, Host, fitting
from sim.campus.study import code_digest
from sim.campus.workload import submissions
from sim.campus.world import World
from sim.campus.world_files import find_world, parse_world
from sim.kernel import Streams

ROOT = Path(__file__).parents[2]

# Two machines that never leave by themselves, and one job of two hours. Tests add absences.
SMALL = """
name = "small"
days = 1
warm_up = 0
[[groups]]
name = "m"
count = 3
owners = "o"
[owners.o]
reclaims_per_day = 0
absent_h = { median = 1 }
[jobs]
at_start = 1
per_day = 0
hours = { median = 2 }
state_gib = { median = 1, sigma = 0 }
changed = [0.1, 0.1]
"""


def small(policy: str, absence: Absence | None, **changes: object) -> Campus:
    """Return a run of the small world in which the job's first host has this absence."""
    world = parse_world(SMALL.encode(), "small")
    scout = Campus(world, POLICIES[policy], 1)
    scout.begin()
    scout.kernel.run(1.0)
    campus = Campus(world, msgspec.structs.replace(POLICIES[policy], **changes), 1)
    if absence is not None:
        first = next(host.number for host in scout.hosts if host.guests)
        campus.hosts[first].absences = [absence]
    return campus


HOUR = 3600.0
NOTICED = Absence(HOUR, 2 * HOUR, "noticed", 120.0)
SUDDEN = Absence(HOUR, 2 * HOUR, "sudden", 0.0)


def test_undisturbed_job_takes_its_work_and_checkpoint_stalls() -> None:
    campus = small("slurm-s0", None)
    counters = campus.run()
    assert counters.finished == 1 and counters.useful == pytest.approx(2 * HOUR) and counters.lost == 0
    assert counters.held == pytest.approx(2 * HOUR + 1.3)


def test_slurm_requeue_without_checkpoints_loses_all_work() -> None:
    counters = small("slurm-s0", SUDDEN).run()
    assert counters.lost == pytest.approx(HOUR - 1.3) and counters.finished == 1
    assert counters.downtimes == [pytest.approx(300.0 + 121.0 + 1.3)]  # SlurmdTimeout, expiry of the credential, start


def test_periodic_checkpoints_lose_the_work_since_the_last_one() -> None:
    counters = small("periodic-30", SUDDEN).run()
    assert 25 * 60 < counters.lost < 30 * 60 and counters.finished == 1 and counters.checkpoints >= 2


def test_mesh_under_notice_loses_nothing_and_restarts_at_once() -> None:
    campus = small("mesh", NOTICED)
    counters = campus.run()
    assert counters.lost == 0 and (counters.noticed, counters.saved_in_time, counters.migrated) == (1, 1, 1)
    # Save (1 s copy and stall, 1 s to disk), send 0.1 GiB to three machines over 1 Gb/s, start, load in 1 s.
    assert 4.0 < counters.downtimes[0] < 20.0
    assert (counters.could_return, counters.finished) == (1, 1)


def test_job_migrates_back_once_its_first_machine_is_lent_again() -> None:
    campus = small("mesh", Absence(HOUR, HOUR + 600, "noticed", 120.0))
    counters = campus.run()
    assert (counters.could_return, counters.returned) == (1, 1)
    assert campus.jobs[0].attempts[-1].node == campus.jobs[0].attempts[0].node
    stayed = small("mesh", Absence(HOUR, HOUR + 600, "noticed", 120.0), migrates_back=False).run()
    assert (stayed.could_return, stayed.returned) == (1, 0)


def test_notice_too_short_for_the_upload_loses_unsafe_work() -> None:
    counters = small("mesh", Absence(HOUR, 2 * HOUR, "noticed", 1.0)).run()
    assert counters.saved_in_time == 0 and counters.lost > 0 and counters.finished == 1


def test_sudden_departure_costs_detection_and_lease() -> None:
    counters = small("mesh", SUDDEN).run()
    assert counters.lost > 0 and counters.downtimes[0] >= 15 * (1.05 - 1 / 3)


def test_redundancy_loses_nothing_and_has_constant_overhead() -> None:
    counters = small("redundant", SUDDEN).run()
    assert counters.lost == 0 and counters.redundant == pytest.approx(0.15 * 2 * HOUR)
    assert counters.downtimes == [pytest.approx(40.0 + 1.3 + 1.0)]


def test_redundancy_falls_back_to_its_checkpoint_when_both_machines_depart() -> None:
    campus = small("redundant", SUDDEN)
    for host in campus.hosts:
        host.absences = [SUDDEN]
    counters = campus.run()
    assert counters.lost > 0 and counters.finished == 1


def test_oracle_takes_one_checkpoint_and_loses_seconds() -> None:
    counters = small("oracle", None).run()
    assert counters.checkpoints == 0 and counters.lost == 0
    campus = small("oracle", None)
    for host in campus.hosts:
        host.absences = [SUDDEN]
    counters = campus.run()
    assert counters.checkpoints == 1 and 0 < counters.lost < 120


def test_job_waits_for_a_holder_when_all_holders_are_gone() -> None:
    campus = small("periodic-30", None)
    for host in campus.hosts:
        host.absences = [SUDDEN]
    counters = campus.run()
    assert counters.finished == 1 and counters.restarted == 0 and counters.lost < 30 * 60
    assert counters.downtimes[0] > HOUR - 60


class Watched(Campus):
    """A campus that checks its invariants whenever jobs start or stop."""

    def _start_waiting_jobs(self) -> None:
        super()._start_waiting_jobs()
        self.check()

    def check(self) -> None:
        for host in self.hosts:
            held = sum(job.submission.gpus for job in host.guests)
            assert 0 <= held <= host.machine.gpus
            if host.lent:
                assert host.free + held == host.machine.gpus, host.machine.name
            else:
                assert not host.guests
            for job in host.guests:
                assert job.host is host and job.state in {"starting", "running", "saving"}
            for job in host.keeps:
                assert host in job.holders
        for job in self.jobs:
            assert 0 <= job.safe <= job.submission.work_s + 1e-6
            assert (job in self.waiting) == (job.state == "waiting")
            assert job.state in {"waiting", "away", "done"} or job.host is not None
            if job.state == "done":
                assert job.upload is None and job.fetch is None and not job.holders


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(sorted(POLICIES)), st.integers(0, 1000), st.sampled_from(["lab-building", "gpunion-11"]))
def test_work_and_gpus_are_counted_once(policy: str, seed: int, name: str) -> None:
    world = find_world(name, ["days=3", "jobs.per_day=80", "network.uplink_gbps=0.5"])
    campus = Watched(world, POLICIES[policy], seed)
    counters = campus.run()
    campus.check()
    figures = metrics_of(campus)
    assert set(figures) == set(METRICS)
    assert 0 <= figures["goodput"] <= 1 and figures["utilisation"] <= 1 + 1e-9
    assert counters.useful <= counters.held + 1e-6
    assert counters.migrated <= counters.saved_in_time <= counters.noticed <= counters.departures
    assert counters.returned <= counters.could_return
    done = sum(job.submission.work_s * job.submission.gpus for job in campus.jobs if job.state == "done")
    assert done <= campus.counters.useful + 1e-6 or world.warm_up > 0


def test_warm_up_events_do_not_count() -> None:
    """A return and a notice in progress at the end of the warm-up do not count, so that no share exceeds 1."""
    for counts_from, returned in ((0.0, 1), (HOUR - 2, 1), (HOUR + 61, 0)):
        campus = small("mesh", Absence(HOUR, HOUR + 60, "noticed", 30.0))
        campus.counts_from = counts_from
        counters = campus.run()
        assert counters.returned == counters.could_return == returned
        assert counters.migrated <= counters.saved_in_time <= counters.noticed


def test_policies_meet_the_same_departures_jobs_and_traffic() -> None:
    """Common random numbers: the draws of a policy do not change other draws."""
    world = find_world("lab-building", ["days=2"])
    runs = [Campus(world, POLICIES[name], 7) for name in ("mesh", "slurm-s0", "redundant")]
    for campus in runs:
        campus.run()
    assert len({tuple(tuple(host.absences) for host in campus.hosts) for campus in runs}) == 1
    assert len({tuple(job.submission for job in campus.jobs) for campus in runs}) == 1
    assert len({campus.topology.offered_bytes for campus in runs}) == 1


def test_ranking_only_fitting_machines_gives_the_same_choice() -> None:
    """The simulator leaves out the machines that the product's filters would reject."""
    from placement.ranking import rank_nodes

    world = find_world("reclaimnet-54", ["days=1"])
    campus = Campus(world, POLICIES["mesh"], 3)
    campus.hosts[5].free = 0
    submissions = [job for job in _jobs(campus) if job.submission.gpus <= 2][:20]
    for job in submissions:
        able = fitting(campus.hosts, job.submission)
        everybody = rank_nodes(job.request(), [host.advert() for host in campus.hosts if host.free])
        chosen = campus.placement.choose(job, able)
        assert {candidate.node for candidate in everybody.candidates} == {host.id for host in able}
        assert chosen in able


def _jobs(campus: Campus):  # type: ignore[no-untyped-def]
    from sim.campus.state import Job

    return [Job(submission) for submission in submissions(campus.world, Streams(1))]


PROGRAM = """
from sim.campus.policies import POLICIES
from sim.campus.replication import replicate
from sim.campus.world_files import find_world
for name in ("mesh", "gpunion", "redundant"):
    print(replicate(find_world("lab-building", ["days=3"]), POLICIES[name], 5).digest)
"""


def test_run_depends_only_on_its_seed() -> None:
    """Processes with other hash seeds give the same digests."""
    found = {
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("0", "4242")
    }
    assert len(found) == 1 and len(set(found.pop().split())) == 3
    world = find_world("lab-building", ["days=1"])
    assert replicate(world, POLICIES["mesh"], 1).digest != replicate(world, POLICIES["mesh"], 2).digest
    assert len(code_digest()) == 32


def test_detection_delays_match_the_membership_protocol() -> None:
    """The stored quantiles contain three fresh runs of the protocol, and none is shorter than one probe."""
    quantiles = quantiles_s()
    assert list(quantiles) == sorted(quantiles) and len(quantiles) == 21
    for seed in (1001, 1002, 1003):
        assert quantiles[0] - 1.5 <= detected_after_s(seed) <= quantiles[-1] + 3.0
    rng = Streams(1).get("x", "y")
    assert 20.0 <= delay_s(Detection(20.0, 10.0), quantiles, rng) <= 30.0
    assert delay_s(Detection(0.0, measured=True), quantiles, rng) >= quantiles[0]


def weights(campus: Campus, at: float) -> list[tuple[int, ...]]:
    """Return the weights in the machines' adverts at this time."""
    campus.begin()
    campus.kernel.run(at)
    return [advert.weights for advert in campus.placement.adverts(campus.hosts, *range(len(HORIZONS_S)))]


def test_adverts_forecast_from_the_start_of_the_quarter_hour() -> None:
    for quarter in range(3):
        begun = quarter * WEIGHT_EPOCH_S
        assert weights(small("mesh", None), begun + 5) == weights(small("mesh", None), begun + WEIGHT_EPOCH_S - 5)
    assert weights(small("mesh", None), 5) != weights(small("mesh", None), 2 * WEIGHT_EPOCH_S + 5)


def test_machine_updates_its_advert_at_reclaim_and_return() -> None:
    """Both happen within one quarter of an hour, after its advert was cached."""
    campus = small("mesh", Absence(HOUR + 60, HOUR + 120, "noticed", 5.0))
    lent = weights(campus, HOUR + 30)
    gone = next(number for number, host in enumerate(campus.hosts) if host.absences)
    for at, unlikely in ((HOUR + 90, True), (HOUR + 150, False)):
        campus.kernel.run(at)
        now = [advert.weights for advert in campus.placement.adverts(campus.hosts, *range(len(HORIZONS_S)))]
        assert (now[gone] == UNLIKELY) == unlikely
    assert now[gone] != lent[gone], "its new stay begins at age zero"


def test_fitting_machines_are_lent_not_leaving_and_large_enough() -> None:
    campus = small("mesh", None)
    host, submission = campus.hosts[0], next(iter(_jobs(campus))).submission
    assert isinstance(host, Host) and fitting([host], submission) == [host]
    for field, value in (("free", 0), ("lent", False), ("leaving", True)):
        before = getattr(host, field)
        setattr(host, field, value)
        assert not fitting([host], submission)
        setattr(host, field, before)
    assert isinstance(campus.world, World)

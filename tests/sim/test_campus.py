"""One run of a campus: what is conserved, what each policy does with a departure, and that only the seed decides."""

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
from sim.campus.guest import UNLIKELY, WEIGHT_EPOCH_S, Host, fitting
from sim.campus.policies import POLICIES, Detection, delay_s
from sim.campus.replication import figures_of, replicate
from sim.campus.study import code_digest
from sim.campus.tally import FIGURES
from sim.campus.world import World, find_world, parse_world
from sim.streams import Streams

ROOT = Path(__file__).parents[2]

# Two machines that never leave by themselves, and one job of two hours; what happens to them, a test writes down.
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
    """A run of the small world in which the first host of the job has this absence."""
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


def test_undisturbed_a_job_takes_its_work_and_its_checkpoints() -> None:
    campus = small("slurm-s0", None)
    tally = campus.run()
    assert tally.finished == 1 and tally.useful == pytest.approx(2 * HOUR) and tally.lost == 0
    assert tally.held == pytest.approx(2 * HOUR + 1.3)


def test_requeued_from_its_beginning_it_loses_all_it_did() -> None:
    tally = small("slurm-s0", SUDDEN).run()
    assert tally.lost == pytest.approx(HOUR - 1.3) and tally.finished == 1
    assert tally.downtimes == [pytest.approx(300.0 + 121.0 + 1.3)]  # SlurmdTimeout, the credential, a start


def test_with_periodic_checkpoints_it_loses_what_came_after_the_last_one() -> None:
    tally = small("periodic-30", SUDDEN).run()
    assert 25 * 60 < tally.lost < 30 * 60 and tally.finished == 1 and tally.checkpoints >= 2


def test_under_notice_ours_loses_nothing_and_is_elsewhere_at_once() -> None:
    campus = small("mesh", NOTICED)
    tally = campus.run()
    assert tally.lost == 0 and (tally.noticed, tally.saved_in_time, tally.migrated) == (1, 1, 1)
    # Save (1 s copy and stall, 1 s to disk), a tenth of a GiB over 1 Gb/s to three, a start, 1 s to load it.
    assert 4.0 < tally.downtimes[0] < 20.0
    assert (tally.could_return, tally.finished) == (1, 1)


def test_its_home_gets_it_back_once_that_is_lent_again() -> None:
    campus = small("mesh", Absence(HOUR, HOUR + 600, "noticed", 120.0))
    tally = campus.run()
    assert (tally.could_return, tally.returned) == (1, 1)
    assert campus.jobs[0].attempts[-1].node == campus.jobs[0].attempts[0].node
    stayed = small("mesh", Absence(HOUR, HOUR + 600, "noticed", 120.0), goes_home=False).run()
    assert (stayed.could_return, stayed.returned) == (1, 0)


def test_a_notice_too_short_for_its_bytes_costs_what_was_not_safe() -> None:
    tally = small("mesh", Absence(HOUR, 2 * HOUR, "noticed", 1.0)).run()
    assert tally.saved_in_time == 0 and tally.lost > 0 and tally.finished == 1


def test_a_sudden_departure_is_found_out_by_detection_and_lease() -> None:
    tally = small("mesh", SUDDEN).run()
    assert tally.lost > 0 and tally.downtimes[0] >= 15 * (1.05 - 1 / 3)


def test_redundancy_loses_nothing_and_pays_all_the_time() -> None:
    tally = small("redundant", SUDDEN).run()
    assert tally.lost == 0 and tally.redundant == pytest.approx(0.15 * 2 * HOUR)
    assert tally.downtimes == [pytest.approx(40.0 + 1.3 + 1.0)]


def test_redundancy_falls_back_to_its_checkpoint_when_both_machines_go() -> None:
    campus = small("redundant", SUDDEN)
    for host in campus.hosts:
        host.absences = [SUDDEN]
    tally = campus.run()
    assert tally.lost > 0 and tally.finished == 1


def test_the_oracle_saves_once_and_loses_seconds() -> None:
    tally = small("oracle", None).run()
    assert tally.checkpoints == 0 and tally.lost == 0
    campus = small("oracle", None)
    for host in campus.hosts:
        host.absences = [SUDDEN]
    tally = campus.run()
    assert tally.checkpoints == 1 and 0 < tally.lost < 120


def test_when_every_holder_is_gone_a_job_waits_for_one_and_goes_on_from_there() -> None:
    campus = small("periodic-30", None)
    for host in campus.hosts:
        host.absences = [SUDDEN]
    tally = campus.run()
    assert tally.finished == 1 and tally.restarted == 0 and tally.lost < 30 * 60
    assert tally.downtimes[0] > HOUR - 60


class Watched(Campus):
    """Checks what must hold whenever machines fill up or empty."""

    def _fill(self) -> None:
        super()._fill()
        self.check()

    def check(self) -> None:
        for host in self.hosts:
            held = sum(job.order.gpus for job in host.guests)
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
            assert 0 <= job.safe <= job.order.work_s + 1e-6
            assert (job in self.waiting) == (job.state == "waiting")
            assert job.state in {"waiting", "away", "done"} or job.host is not None
            if job.state == "done":
                assert job.upload is None and job.fetch is None and not job.holders


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(sorted(POLICIES)), st.integers(0, 1000), st.sampled_from(["lab-building", "gpunion-11"]))
def test_nothing_is_counted_twice_and_no_gpu_either(policy: str, seed: int, name: str) -> None:
    world = find_world(name, ["days=3", "jobs.per_day=80", "wire.uplink_gbps=0.5"])
    campus = Watched(world, POLICIES[policy], seed)
    tally = campus.run()
    campus.check()
    figures = figures_of(campus)
    assert set(figures) == set(FIGURES)
    assert 0 <= figures["goodput"] <= 1 and figures["utilisation"] <= 1 + 1e-9
    assert tally.useful <= tally.held + 1e-6
    assert tally.migrated <= tally.saved_in_time <= tally.noticed <= tally.departures
    assert tally.returned <= tally.could_return
    done = sum(job.order.work_s * job.order.gpus for job in campus.jobs if job.state == "done")
    assert done <= campus.tally.useful + 1e-6 or world.warm_up > 0


def test_what_began_in_the_warm_up_counts_nowhere() -> None:
    """A return home and a notice under way as it ends: else more would come back, and be saved, than could."""
    for counts_from, returned in ((0.0, 1), (HOUR - 2, 1), (HOUR + 61, 0)):
        campus = small("mesh", Absence(HOUR, HOUR + 60, "noticed", 30.0))
        campus.counts_from = counts_from
        tally = campus.run()
        assert tally.returned == tally.could_return == returned
        assert tally.migrated <= tally.saved_in_time <= tally.noticed


def test_all_policies_meet_the_same_departures_jobs_and_traffic() -> None:
    """Common random numbers: what a policy draws shifts nobody else's luck."""
    world = find_world("lab-building", ["days=2"])
    runs = [Campus(world, POLICIES[name], 7) for name in ("mesh", "slurm-s0", "redundant")]
    for campus in runs:
        campus.run()
    assert len({tuple(tuple(host.absences) for host in campus.hosts) for campus in runs}) == 1
    assert len({tuple(job.order for job in campus.jobs) for campus in runs}) == 1
    assert len({campus.fabric.asked for campus in runs}) == 1


def test_ranking_only_those_who_can_take_it_changes_no_choice() -> None:
    """The simulator leaves out beforehand whom the product's filters would refuse."""
    from placement.ranking import rank_nodes

    world = find_world("reclaimnet-54", ["days=1"])
    campus = Campus(world, POLICIES["mesh"], 3)
    campus.hosts[5].free = 0
    orders = [job for job in _jobs(campus) if job.order.gpus <= 2][:20]
    for job in orders:
        able = fitting(campus.hosts, job.order)
        everybody = rank_nodes(job.request(), [host.advert() for host in campus.hosts if host.free])
        chosen = campus.placing.choose(job, able)
        assert {candidate.node for candidate in everybody.candidates} == {host.id for host in able}
        assert chosen in able


def _jobs(campus: Campus):  # type: ignore[no-untyped-def]
    from sim.campus.demand import orders
    from sim.campus.guest import Job

    return [Job(order) for order in orders(campus.world, Streams(1))]


PROGRAM = """
from sim.campus.policies import POLICIES
from sim.campus.replication import replicate
from sim.campus.world import find_world
for name in ("mesh", "gpunion", "redundant"):
    print(replicate(find_world("lab-building", ["days=3"]), POLICIES[name], 5).digest)
"""


def test_a_run_depends_on_nothing_but_its_seed() -> None:
    """Other processes, whose dictionaries and sets are ordered otherwise."""
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


def test_detection_is_what_the_membership_protocol_does() -> None:
    """The quantiles that are loaded hold three fresh runs of the protocol; no mesh knows before its first probe is over."""
    quantiles = quantiles_s()
    assert list(quantiles) == sorted(quantiles) and len(quantiles) == 21
    for seed in (1001, 1002, 1003):
        assert quantiles[0] - 1.5 <= detected_after_s(seed) <= quantiles[-1] + 3.0
    rng = Streams(1).get("x", "y")
    assert 20.0 <= delay_s(Detection(20.0, 10.0), quantiles, rng) <= 30.0
    assert delay_s(Detection(0.0, measured=True), quantiles, rng) >= quantiles[0]


def stays(campus: Campus, at: float) -> list[tuple[int, ...]]:
    """What the machines' adverts foretell when somebody looks then."""
    campus.begin()
    campus.kernel.run(at)
    return [advert.stays for advert in campus.placing.adverts(campus.hosts, *range(len(HORIZONS_S)))]


def test_adverts_foretell_from_the_quarter_hours_beginning_whenever_they_are_looked_at() -> None:
    for quarter in range(3):
        begun = quarter * WEIGHT_EPOCH_S
        assert stays(small("mesh", None), begun + 5) == stays(small("mesh", None), begun + WEIGHT_EPOCH_S - 5)
    assert stays(small("mesh", None), 5) != stays(small("mesh", None), 2 * WEIGHT_EPOCH_S + 5)


def test_a_machine_tells_at_once_that_it_is_taken_back_and_lent_again() -> None:
    """Both within one quarter of an hour, in which it was looked at before."""
    campus = small("mesh", Absence(HOUR + 60, HOUR + 120, "noticed", 5.0))
    lent = stays(campus, HOUR + 30)
    gone = next(number for number, host in enumerate(campus.hosts) if host.absences)
    for at, unlikely in ((HOUR + 90, True), (HOUR + 150, False)):
        campus.kernel.run(at)
        now = [advert.stays for advert in campus.placing.adverts(campus.hosts, *range(len(HORIZONS_S)))]
        assert (now[gone] == UNLIKELY) == unlikely
    assert now[gone] != lent[gone], "its stay begins anew"


def test_machines_that_fit_are_lent_not_leaving_and_large_enough() -> None:
    campus = small("mesh", None)
    host, order = campus.hosts[0], next(iter(_jobs(campus))).order
    assert isinstance(host, Host) and fitting([host], order) == [host]
    for field, value in (("free", 0), ("lent", False), ("leaving", True)):
        before = getattr(host, field)
        setattr(host, field, value)
        assert not fitting([host], order)
        setattr(host, field, before)
    assert isinstance(campus.world, World)

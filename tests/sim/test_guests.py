"""Guests that fail and jobs with limits in the simulated world, and negative controls for the rules about them."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from mesh.consensus.contract import judge
from mesh.consensus.effects import Effect, SetTimer
from mesh.consensus.runner import Runner
from mesh.consensus.view import Instant, Timer
from mesh.model.record import JobRecord
from sim.protocol.faults import FaultPlan, MeshPlan, WorkPlan, draw_work_plan
from sim.protocol.guest_checkers import JustEnds, Limits, Retries
from sim.protocol.jobs import JobsWorld
from sim.protocol.membership import Violation
from tests.consensus.worlds import JOB, make_spec
from tests.sim.test_jobs import DRAWN, checked, found


def test_every_kind_of_work_is_drawn_by_some_seed() -> None:
    for share in WorkPlan.__struct_fields__:
        assert DRAWN // 4 < sum(getattr(draw_work_plan(seed), share) > 0 for seed in range(DRAWN)) < DRAWN


@pytest.mark.parametrize("count", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_jobs_end_as_their_guests_do(count: int) -> None:
    """Without faults: a guest that always fails is tried as often as its job says; one that fails rarely gets to its end."""
    quiet = FaultPlan(incidents=(), news_every_s=0.0, until_s=300.0)
    worlds = [
        checked(seed, faults=quiet, mesh=MeshPlan(gangs=0.0), work=WorkPlan(failing=1.0)) for seed in range(count)
    ]
    ends = Counter[tuple[bool, str | None]]()
    for world in worlds:
        world.run()
        ends += Counter((world.work[job].breaks is not None, world.outcome(job)) for job in world.accepted)
    assert set(ends) == {(True, "failed"), (False, "failed"), (False, "done")}


def test_failures_of_later_attempts_do_not_count_for_one_that_was_cut_off() -> None:
    """Regression: a guest started on a machine that had stood still, while later attempts failed (seed 9235)."""
    checker = Retries()
    world: Any = SimpleNamespace(
        specs={JOB: make_spec(error_budget=0)}, recovered=set(), kernel=SimpleNamespace(now=1.0)
    )
    checker._failed[JOB], checker._known[JOB] = {6: 139}, {6}

    def launch(term: int) -> None:
        runners = {JOB: SimpleNamespace(term=term)}
        node: Any = SimpleNamespace(name="node007", participant=SimpleNamespace(runners=runners))
        checker.launched(world, node, JOB, b"")

    launch(5)
    with pytest.raises(Violation, match="after 1 failures"):
        launch(9)


@pytest.mark.slow
class TestNegativeControls:
    """Each test removes one rule, which a checker must detect."""

    def test_failures_that_do_not_count(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def patient(self: Runner, words: str, may_retry: bool, at: Instant) -> list[Effect]:
            self._blame_this_node()
            return self._release(f"failed ({words})", at)

        monkeypatch.setattr(Runner, "_fail", patient)
        failing = WorkPlan(failing=1.0)
        assert found(lambda seed: JobsWorld(seed, work=failing, job_checkers=[Retries()])).startswith("retries")

    def test_exit_codes_that_are_retried_against_the_spec(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Runner, "_may_retry", lambda self, code: True)
        failing = WorkPlan(failing=1.0)
        assert "after exit code" in found(lambda seed: JobsWorld(seed, work=failing, job_checkers=[Retries()]))

    def test_first_failure_that_ends_the_job(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Runner, "_may_retry", lambda self, code: False)
        failing = WorkPlan(failing=1.0)
        assert found(lambda seed: JobsWorld(seed, work=failing, job_checkers=[JustEnds()])).startswith("end")

    def test_exit_at_a_notice_that_counts_as_a_failure(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("mesh.consensus.contract.TERMINATED", frozenset[int]())
        stubborn = WorkPlan(stubborn=1.0)
        faults = FaultPlan(incidents=("notice",), incident_every_s=10.0, news_every_s=0.0, until_s=300.0)
        assert found(lambda seed: JobsWorld(seed, faults=faults, work=stubborn, job_checkers=[JustEnds()])).startswith(
            "end"
        )

    def test_departure_that_counts_as_done(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("mesh.consensus.runner.judge", lambda facts: "done" if facts.code == 85 else judge(facts))
        assert found(checked).startswith("end")

    @pytest.mark.parametrize("name", ["deadline", "max time"])
    def test_limits_that_are_not_kept(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        real = Runner.on_timer

        def timeless(self: Runner, timer: Timer, at: Instant) -> list[Effect]:
            return [] if timer.name == name else real(self, timer, at)

        monkeypatch.setattr(Runner, "on_timer", timeless)
        limited = WorkPlan(limited=1.0)
        violation = found(lambda seed: JobsWorld(seed, work=limited, job_checkers=[Limits()]))
        assert violation.startswith("limits") and ("deadline" in violation) == (name == "deadline")

    def test_running_time_of_earlier_attempts_that_is_forgotten(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(JobRecord, "ran_s", property(lambda self: 0.0))
        limited, small = WorkPlan(limited=1.0), MeshPlan(nodes=4, gangs=0.0)
        faults = FaultPlan(incidents=("notice",), incident_every_s=3.0, news_every_s=0.0, until_s=300.0)
        checkers = [Limits()]
        assert found(
            lambda seed: JobsWorld(seed, faults=faults, mesh=small, work=limited, job_checkers=checkers)
        ).startswith("limits")

    def test_grace_that_does_not_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = Runner.on_timer

        def gracious(self: Runner, timer: Timer, at: Instant) -> list[Effect]:
            return [] if timer.name == "grace" else real(self, timer, at)

        monkeypatch.setattr(Runner, "on_timer", gracious)
        limited = WorkPlan(limited=1.0, stubborn=1.0)
        assert found(lambda seed: JobsWorld(seed, work=limited, job_checkers=[Limits()])).startswith("limits")

    def test_limits_that_come_early(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = Runner._timer

        def hasty(self: Runner, name: str, at: float) -> SetTimer:
            return real(self, name, at - 60.0 if name in {"deadline", "max time"} else at)

        monkeypatch.setattr(Runner, "_timer", hasty)
        limited = WorkPlan(limited=1.0)
        assert found(lambda seed: JobsWorld(seed, work=limited, job_checkers=[JustEnds()])).startswith("end")

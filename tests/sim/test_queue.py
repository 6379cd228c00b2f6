"""Jobs that wait for others in the simulated world, and negative controls for what they wait for."""

from typing import Any

import msgspec
import pytest

from mesh.checkpoints.witness_group import Words
from mesh.consensus.effects import Effect
from mesh.consensus.leader import Leader
from mesh.consensus.reports import KillWanted, RunnerEvent, VacateWanted
from mesh.consensus.runner import Runner
from mesh.consensus.status import JobStatus
from mesh.consensus.view import Instant
from mesh.jobs.job_table import JobTable
from mesh.model.record import OutcomeKind
from sim.protocol.faults import FaultPlan, MeshPlan, WorkPlan
from sim.protocol.guest_checkers import JustEnds
from sim.protocol.jobs import JobsWorld
from sim.protocol.queue_checkers import MAKES_ROOM, ArrayLimit, InOrder, JustPreemption
from tests.sim.seeds import seeds
from tests.sim.test_jobs import found

QUIET = FaultPlan(incidents=("notice",), incident_every_s=40.0, news_every_s=0.0, until_s=300.0)
RUMOURS = FaultPlan(incidents=("rumour", "notice"), incident_every_s=5.0, news_every_s=0.0, until_s=300.0)
SMALL = MeshPlan(nodes=4, gangs=0.0)


def world(seed: int, checker: Any, **work: float) -> JobsWorld:
    return JobsWorld(seed, faults=QUIET, mesh=SMALL, work=WorkPlan(**work), job_checkers=[checker])


def busy(seed: int, checker: Any) -> JobsWorld:
    """Return a world in which two nodes have one place each, and jobs take long."""
    return JobsWorld(seed, faults=QUIET, mesh=SMALL, work=WorkPlan(busy=1.0), jobs=10, job_checkers=[checker])


def rumours(seed: int, **work: float) -> JobsWorld:
    """Return a world of jobs that come after others, or of another kind, in which a member publishes false statuses."""
    checkers: list[Any] = [InOrder(), ArrayLimit(), JustEnds()]
    return JobsWorld(seed, faults=RUMOURS, mesh=SMALL, work=WorkPlan(**(work or {"after": 1.0})), job_checkers=checkers)


@pytest.mark.parametrize("seed", seeds(1, 4))
def test_rumours_start_and_fail_no_job(seed: int) -> None:
    worlds = [rumours(seed), rumours(seed, arrays=1.0)]
    for world in worlds:
        world.run()
    assert all(world.rumours for world in worlds)


@pytest.mark.parametrize("seed", seeds(1, 4))
def test_jobs_end_while_members_bring_them_again_and_again(seed: int) -> None:
    faults = msgspec.structs.replace(QUIET, brought_again_s=5.0)
    JobsWorld(seed, faults=faults, mesh=SMALL, work=WorkPlan(after=1.0, busy=1.0), job_checkers=[InOrder()]).run()


@pytest.mark.parametrize("played", [(2,), pytest.param((0, 1, 2, 3), marks=pytest.mark.slow)])
def test_jobs_make_room_and_return(monkeypatch: pytest.MonkeyPatch, played: tuple[int, ...]) -> None:
    monkeypatch.setattr("sim.protocol.jobs.LONG_SHARE", 0.8)
    checkers = [JustPreemption() for _ in played]
    for seed, checker in zip(played, checkers, strict=True):
        busy(seed, checker).run()
    assert sum(checker.notices for checker in checkers) > 0


@pytest.mark.slow
class TestNegativeControls:
    """Each test removes one rule, which a checker must detect."""

    def test_leaders_that_do_not_wait(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Leader, "held_back", "")
        assert found(lambda seed: world(seed, InOrder(), after=1.0)).startswith("after")
        assert found(lambda seed: world(seed, ArrayLimit(), arrays=1.0)).startswith("array")

    def test_end_that_any_member_publishes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = JobTable.update

        def credulous(self: JobTable, source: bytes, job: bytes, view: JobStatus | None) -> bool:
            if view is not None and view.outcome is not None:
                self.end(job, view.outcome.kind, view.user, view.array)
            return real(self, source, job, view)

        monkeypatch.setattr(JobTable, "update", credulous)
        assert found(rumours).startswith(("after", "end"))
        assert found(lambda seed: rumours(seed, arrays=1.0)).startswith("array")

    def test_end_that_one_witness_states(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def any_of(words: Words, views: object) -> OutcomeKind | None:
            ends = [known.record.outcome for known in words.records.values() if known.final]
            return next((outcome.kind for outcome in ends if outcome is not None), None)

        monkeypatch.setattr("sim.protocol.upkeep.stated_end", any_of)
        assert found(rumours).startswith(("after", "end"))

    def test_failure_of_a_job_that_another_comes_after_is_ignored(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Leader, "_hopeless", lambda self, at: "")
        assert found(lambda seed: world(seed, InOrder(), after=1.0, failing=1.0)).startswith("J4")

    def test_success_of_a_job_that_another_comes_after_ends_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Leader, "_hopeless", lambda self, at: "no use" if self.spec.after else "")
        assert found(lambda seed: world(seed, JustEnds(), after=1.0)).startswith("end")

    def test_ends_in_an_array_that_nobody_counts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(JobTable, "array_ends", property(lambda self: {}))
        assert found(lambda seed: world(seed, ArrayLimit(), arrays=1.0)).startswith("J4")

    def test_runners_that_make_room_for_any_job(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("mesh.consensus.participant.must_yield", "placement.preemption.must_yield"):
            monkeypatch.setattr(name, lambda *asked: True)
        assert found(lambda seed: busy(seed, JustPreemption())).startswith("preemption")

    def test_guests_that_are_killed_for_another_job(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = Runner.handle

        def harsh(self: Runner, event: RunnerEvent, at: Instant) -> list[Effect]:
            makes_room = isinstance(event, VacateWanted) and event.reason.startswith(MAKES_ROOM)
            return real(self, KillWanted(event.reason) if makes_room else event, at)  # type: ignore[union-attr]

        monkeypatch.setattr(Runner, "handle", harsh)
        monkeypatch.setattr("sim.protocol.jobs.LONG_SHARE", 0.8)
        assert "is killed: it makes room" in found(lambda seed: busy(seed, JustPreemption()))

    def test_job_that_makes_room_does_not_return(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = Runner._release

        def final(self: Runner, reason: str, at: Instant) -> list[Effect]:
            if MAKES_ROOM not in reason:
                return real(self, reason, at)
            self._ending = f"failed ({reason})"
            return [self._result()]

        monkeypatch.setattr(Runner, "_release", final)
        monkeypatch.setattr("sim.protocol.jobs.LONG_SHARE", 0.8)
        assert found(lambda seed: busy(seed, JustEnds())).startswith("end")

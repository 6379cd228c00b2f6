"""Jobs on several nodes that need the same nodes, while the queue reserves nothing: directed runs of the simulated mesh."""

import pytest

from mesh.consensus.participant import Participant
from placement.queue import Patience
from sim.protocol.faults import FaultPlan, MeshPlan, WorkPlan
from sim.protocol.job_checkers import all_job_checkers
from sim.protocol.jobs import JobsWorld

SCARCE = MeshPlan(nodes=4, gangs=1.0)


class Everybody(frozenset[bytes]):
    def __contains__(self, job: object) -> bool:
        return True


@pytest.fixture(autouse=True)
def no_reservations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the queue's order, leaders start their gangs at the same time."""
    monkeypatch.setattr(Patience, "idle", lambda self, now: Everybody())


def compete(seed: int) -> int:
    """Run eight jobs on the only two nodes with a place, one each; return the largest number of attempts of a job."""
    world = JobsWorld(
        seed,
        faults=FaultPlan(until_s=300.0),
        mesh=SCARCE,
        work=WorkPlan(busy=1.0),
        jobs=8,
        job_checkers=all_job_checkers(),
    )
    world.run()
    records = [witness.witness_record for node in world.nodes for witness in node.participant.witnesses.values()]
    assert world.gang_members >= 8
    return max(len(record.record.attempts) for record in records)


@pytest.mark.parametrize("seed", [6, 11, 15])
def test_gangs_take_turns(seed: int) -> None:
    assert compete(seed) <= 6


def test_no_gang_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Participant, "_give_way", lambda *asked: [])
    assert compete(11) > 12, "each takes a node that another needs, time and again"

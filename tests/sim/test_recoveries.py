"""Two users recover one job on two sides of a cut: one history has it once the sides meet."""

from typing import Any

import pytest

from mesh.consensus.forced_reconfiguration import make_plan
from mesh.consensus.participant import Participant
from mesh.model.record import Outcome
from sim.protocol.faults import FaultPlan, MeshPlan, WorkPlan
from sim.protocol.jobs import JobNode, JobsWorld

QUIET = FaultPlan(incidents=(), news_every_s=0.0, until_s=300.0)
CUT_S, AGREE_S = 120.0, 90.0
LONG, SHORT = 250, 70  # steps of a job that goes on when the sides meet, and of one that has ended on both


def recover(world: JobsWorld, job: bytes, side: list[JobNode]) -> None:
    """Recover the job on the first node of a side from the records that are kept there."""
    records = {node.id: node.disk.witness_records[job] for node in side if job in node.disk.witness_records}
    plan = make_plan(job, records, side[0].view(), side[0].instant)
    world.recovered.add(job)
    side[0].recover(plan)


def split(seed: int, steps: int) -> tuple[JobsWorld, bytes]:
    """Return a world whose sides have met again; each had recovered the same job while a witness of it was down."""
    mesh = MeshPlan(nodes=8, gangs=0.0)
    world = JobsWorld(seed, faults=QUIET, mesh=mesh, jobs=2, work=WorkPlan())
    world.begin()
    world.until(lambda: any(world.specs[job].nonce != b"0" for job in world.accepted), 400.0, "submitted")
    job = next(job for job in world.accepted if world.specs[job].nonce != b"0")
    world.work[job].steps = steps
    world.until(lambda: bool(world.holders(job)), 60.0, "running")
    one, other, third = (node for node in world.nodes if node.id in world.groups[job].nodes)
    others = [node for node in world.nodes if node not in {one, other, third} and not node.gone]
    sides = [[one, *others[::2]], [other, *others[1::2]]]
    cut = {(a.id, b.id) for a in sides[0] for b in sides[1]}
    world.cuts.append(cut | {(b, a) for a, b in cut})
    third.powered_off = third.gone = True
    third.crash()
    world.kernel.run(world.kernel.now + 40.0)
    for side in sides:
        recover(world, job, side)
    world.kernel.run(world.kernel.now + CUT_S)
    holders = [node for node, _ in world.holders(job)]
    assert len({node in sides[0] for node in holders}) == 2 or len(ends(world, job)) == 2, "each side goes on"
    world.cuts.clear()
    world.kernel.run(world.kernel.now + AGREE_S)
    return world, job


def ends(world: JobsWorld, job: bytes) -> set[Outcome | None]:
    """Return the ends that nodes call final."""
    known = [node.disk.witness_records.get(job) for node in world.nodes if not node.gone]
    return {record.record.outcome for record in known if record is not None and record.final}


@pytest.mark.parametrize("steps", [LONG, SHORT])
@pytest.mark.parametrize("seed", range(3))
def test_one_of_two_recoveries_has_the_job(seed: int, steps: int) -> None:
    world, job = split(seed, steps)
    assert len(world.holders(job)) <= 1
    world.until(lambda: len(ends(world, job)) == 1, 2.0 * LONG, "ended")
    world.kernel.run(world.kernel.now + AGREE_S)
    assert len(ends(world, job)) == 1


def test_without_the_rule_both_ends_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    def deaf(self: Participant, *asked: Any) -> list[Any]:
        return []

    monkeypatch.setattr(Participant, "_overruled", deaf)
    world, job = split(0, SHORT)
    assert len(ends(world, job)) == 2

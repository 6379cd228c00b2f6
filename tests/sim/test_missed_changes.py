"""A witness that missed a change of its group, when the node that made it is gone: directed runs of the simulated mesh."""

import pytest

from mesh.consensus.participant import Participant
from mesh.model.record import Config, Voter
from sim.protocol.faults import FaultPlan, MeshPlan, WorkPlan
from sim.protocol.job_checkers import all_job_checkers
from sim.protocol.jobs import JobNode, JobsWorld
from sim.protocol.membership import Violation

QUIET = FaultPlan(until_s=600.0)


def lose(world: JobsWorld, node: JobNode) -> None:
    node.gone = node.powered_off = True
    node.crash()


def miss_changes(seed: int, changes: int = 1, newcomer_of: int = 0) -> tuple[JobsWorld, bytes]:
    """Return a world in which one of the two that are left of a job's last group missed the changes that made it; the other
    came with the change `newcomer_of`. All others of the group that it knows are lost.
    """
    world = JobsWorld(
        seed, faults=QUIET, mesh=MeshPlan(nodes=8, gangs=0.0), jobs=2, work=WorkPlan(), job_checkers=all_job_checkers()
    )
    world.begin()

    def usual() -> list[bytes]:
        """Return the job whose submitter does not leave for good at once."""
        return [job for job in world.accepted if world.specs[job].nonce != b"0"]

    world.until(lambda: bool(usual()), 400.0, "submitted")
    job = usual()[0]
    world.work[job].steps = 400
    world.until(lambda: bool(world.holders(job)) and world.groups[job].number == 0, 60.0, "running")
    runner = world.holders(job)[0][0]
    group = [world.by_id[node] for node in world.groups[job].nodes]
    stale, *others = sorted(group, key=lambda node: node is runner)
    world._closed.append(stale.id)
    known, joined = world.groups[job], list[bytes]()
    for leaver in others[:changes]:
        before = world.groups[job]
        leaver.gone = True
        leaver.leave()

        def changed(before: Config = before, leaver: JobNode = leaver) -> bool:
            config = world.groups[job]
            return config.number > before.number and not config.previous and leaver.id not in config.nodes

        world.until(changed, 60.0, "changed")
        world.kernel.run(world.kernel.now + 10.0)
        joined += [node for node in world.groups[job].nodes if node not in {*before.nodes, *joined}]
    assert stale.id in world.groups[job].nodes
    assert stale.disk.witness_records[job].config == known
    newcomer = world.by_id[joined[newcomer_of]]  # it has gone through each later change
    members = {world.by_id[node] for node in world.groups[job].nodes}
    for node in {*others, *members, *(node for node, _ in world.holders(job))} - {newcomer, stale}:
        if not node.gone:
            lose(world, node)
    world._open(stale.id)
    assert {Voter(node.id, node.disk.name) for node in (stale, newcomer)} < set(world.groups[job].members)
    return world, job


@pytest.mark.parametrize(("changes", "newcomer_of"), [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize("seed", range(4))
def test_job_goes_on(seed: int, changes: int, newcomer_of: int) -> None:
    world, job = miss_changes(seed, changes, newcomer_of)
    world.until(lambda: world.outcome(job) is not None, 600.0, "J4")
    assert world.outcome(job) == "done"


def test_no_witness_learns_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Participant, "_learn_group", lambda *asked: [])
    world, job = miss_changes(0)
    with pytest.raises(Violation, match="J4"):
        world.until(lambda: world.outcome(job) is not None, 600.0, "J4")


def test_witness_that_missed_two_changes_is_not_led(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Participant, "_lead", lambda *asked: [])
    world, job = miss_changes(0, 2)
    with pytest.raises(Violation, match="J4"):
        world.until(lambda: world.outcome(job) is not None, 600.0, "J4")

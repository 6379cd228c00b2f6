"""Checkpoints of simulated nodes: what a copy or a fetch does if the peer, the connection or a store fails."""

from collections.abc import Sequence

import msgspec
import pytest

from mesh.checkpoints.replica_policy import ReplicaPolicy
from mesh.consensus.reports import GuestFailed
from mesh.model.record import Commit, JobRecord
from sim.protocol.checkpoints import PART_BYTES, FetchProblem, content
from sim.protocol.faults import FaultPlan, MeshPlan, WorkPlan
from sim.protocol.jobs import JobNode, JobsWorld
from sim.protocol.memory_store import Saved

JOB = b"j" * 16
POLICY = ReplicaPolicy(0, 1, ())


@pytest.fixture
def world() -> JobsWorld:
    """Return a mesh of four nodes that know each other, without jobs and faults."""
    world = JobsWorld(1, mesh=MeshPlan(nodes=4), jobs=0, faults=FaultPlan(until_s=60.0, news_every_s=0.0))
    world.begin()
    world.kernel.run(60.0)
    return world


def save(node: JobNode, step: int = 5, seq: int = 1) -> Saved:
    return node.store.save(
        content(JOB, step), job=JOB, config=0, term=1, seq=seq, parent=None, kind="checkpoint", step=step, maker=node.id
    )


def copy(source: JobNode, saved: Saved, to: Sequence[JobNode], want: int = 1) -> tuple[bytes, ...]:
    """Copy a checkpoint; return its holders."""
    found: list[tuple[bytes, ...]] = []
    able = [node.id for node in to]
    source.replicate(saved, POLICY, able, want, lambda copies: found.append(copies.holders))
    source.world.kernel.run(source.world.kernel.now + 30.0)
    assert len(found) == 1
    return found[0]


def fetch(node: JobNode, saved: Saved, sources: Sequence[JobNode]) -> FetchProblem | None:
    found: list[FetchProblem | None] = []
    node.fetch(saved.info.id, [source.id for source in sources], found.append)
    node.world.kernel.run(node.world.kernel.now + 30.0)
    assert len(found) == 1
    return found[0]


def bring(node: JobNode, record: JobRecord) -> GuestFailed | None:
    found: list[GuestFailed | None] = []
    node.bring(JOB, record, found.append)
    node.world.kernel.run(node.world.kernel.now + 60.0)
    assert len(found) == 1
    return found[0]


def record_of(saved: Saved, holders: Sequence[JobNode], before: Saved | None = None) -> JobRecord:
    def commit(of: Saved) -> Commit:
        return Commit(of.info.seq, 1, of.info.id, None, tuple(node.id for node in holders), of.step, 0)

    return JobRecord(commit=commit(saved), predecessor=None if before is None else commit(before))


def break_calls(world: JobsWorld) -> None:
    world.faults = msgspec.structs.replace(world.faults, broken_calls=1.0)


def test_copy_goes_past_peers_that_do_not_answer_or_have_no_room(world: JobsWorld) -> None:
    source, firewalled, full, able = world.nodes
    firewalled.closed, full.store.full = True, True
    saved = save(source)
    assert copy(source, saved, [firewalled, full, able], want=2) == (able.id,)
    assert able.store.complete(saved.info.id) and not firewalled.store.has(saved.info.id)


def test_copy_that_breaks_off_keeps_whole_parts_and_does_not_count(world: JobsWorld) -> None:
    source, *others = world.nodes
    break_calls(world)
    arrived = set()
    for step in range(5, 100, 5):
        saved = save(source, step, step)
        assert copy(source, saved, others[:1]) == ()
        arrived.add((others[0].store.has(saved.info.id), len(others[0].store.missing(content(JOB, step)))))
    assert (True, 0) in arrived, "the answer may be lost after the peer has all of it"
    assert len({missing for _, missing in arrived}) > 1


def test_fetch_continues_with_another_source_after_a_connection_broke(world: JobsWorld) -> None:
    source, other, _, node = world.nodes
    saved = save(source)
    assert copy(source, saved, [other]) == (other.id,)
    break_calls(world)
    problem = fetch(node, saved, [source, other])
    assert problem is not None and problem.unsure == {source.id, other.id} and not node.store.complete(saved.info.id)
    world.faults = msgspec.structs.replace(world.faults, broken_calls=0.0)
    assert fetch(node, saved, [source, other]) is None and node.store.manifest(saved.info.id).step == 5


def test_fetch_tells_nodes_that_lack_it_from_nodes_that_are_away(world: JobsWorld) -> None:
    source, lacks, away, node = world.nodes
    saved = save(source)
    away.crash()
    assert fetch(node, saved, [lacks]) == FetchProblem()
    assert fetch(node, saved, [lacks, away]) == FetchProblem(frozenset({away.id}))


def test_start_without_its_checkpoint_reports_what_production_reports(world: JobsWorld) -> None:
    source, holder, _, node = world.nodes
    before, saved = save(source, 5, 1), save(source, 10, 2)
    assert copy(source, before, [holder]) == (holder.id,)
    failure = bring(node, record_of(saved, [holder], before))
    assert failure is None, "any node with room may have it"
    node.store.forget(saved.info.id)
    source.crash()
    world.kernel.run(world.kernel.now + 60.0)
    failure = bring(node, record_of(saved, [holder, source], before))
    assert failure is not None and (failure.unfetched, failure.predecessor_here) == ("away", True)
    failure = bring(node, record_of(saved, [holder], before))
    assert failure is not None and failure.unfetched == "lost"


def test_full_store_of_this_node_is_not_taken_for_a_lost_checkpoint(world: JobsWorld) -> None:
    source, _, _, node = world.nodes
    saved = save(source)
    node.limit_store(full=True, for_s=1000.0)
    failure = bring(node, record_of(saved, [source]))
    assert failure is not None and failure.elsewhere and not failure.unfetched
    world.kernel.run(world.kernel.now + 1000.0)
    assert bring(node, record_of(saved, [source])) is None


def test_quota_that_is_reached_ends_with_the_fault(world: JobsWorld) -> None:
    source, node = world.nodes[:2]
    node.limit_store(full=False, for_s=1000.0)
    saved = [save(source, step, step) for step in range(10, 60, 10)]
    assert copy(source, saved[-1], [node]) == () or copy(source, saved[0], [node]) == ()
    world.kernel.run(world.kernel.now + 1000.0)
    assert copy(source, saved[0], [node]) == (node.id,)


def played(jobs: int = 3) -> JobsWorld:
    """Return a world whose jobs have run without faults."""
    world = JobsWorld(
        3, mesh=MeshPlan(nodes=5), jobs=jobs, faults=FaultPlan(until_s=120.0, news_every_s=0.0), work=WorkPlan()
    )
    world.run()
    return world


def test_results_are_copied_to_two_other_nodes_and_old_checkpoints_are_pruned() -> None:
    world = played()
    world.kernel.run(world.kernel.now + 60.0)
    for job in world.accepted:
        results = [info.id for node in world.nodes for info in node.store.manifests(job) if info.kind == "result"]
        assert len(results) == 3 and len(set(results)) == 1
        saved = {info.seq for node in world.nodes for info in node.store.manifests(job) if info.kind == "checkpoint"}
        assert len(saved) <= 3 < world.work[job].steps // 5, "the last two, and one that was never committed"


def test_results_whose_holder_is_gone_are_copied_again() -> None:
    world = played()
    lost = next(node for node in world.nodes if any(info.kind == "result" for info in node.store.manifests()))
    lost.gone = lost.powered_off = True
    lost.crash()
    world.kernel.run(world.kernel.now + 120.0)
    there = [node for node in world.nodes if not node.gone]
    for job in world.accepted:
        copies = [info for node in there for info in node.store.manifests(job) if info.kind == "result"]
        assert len(copies) == 3


def test_chunks_of_pruned_checkpoints_are_collected() -> None:
    world = played()
    world.kernel.run(world.kernel.now + 120.0)
    for node in world.nodes:
        needed = {chunk for info in node.store.manifests() for chunk in node.store.manifest(info.id).chunks}
        assert node.store.stored_bytes() < (len(needed) + 1) * PART_BYTES

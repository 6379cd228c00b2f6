"""Departure planner: a failing plan does not delay a notice."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from ckptstore.bandwidth import Bandwidth
from mesh.checkpoints.replica_policy import ReplicaPolicy
from mesh.consensus.reports import VacateWanted
from mesh.jobs.departure_planner import DeparturePlanner
from mesh.model.record import JobRecord
from placement.allocation import gpu_percent
from placement.destination import HORIZON_S, worth
from placement.request import Request
from tests.consensus.worlds import JOB, A, B, C, make_advert, make_spec, make_view


def test_failing_plan_keeps_no_notice_from_a_guest(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> Any:
        raise RuntimeError("a fault in the plan")

    participant: Any = SimpleNamespace(runners={})
    mesh_view: Any = SimpleNamespace(look=broken)
    none: Any = None
    planner = DeparturePlanner(participant, {}, Bandwidth(), none, mesh_view, none, none, none)
    assert planner.notices([JOB], 30.0, "the owner") == {JOB: VacateWanted(30.0, "the owner", None)}
    assert "each goes to its standby" in caplog.text


def runner(job: bytes = JOB, nodes: int = 1) -> Any:
    request = Request(job=job, attempt=1, user="ada")
    return SimpleNamespace(
        term=3,
        spec=make_spec(most_nodes=nodes),
        record=JobRecord(),
        next_placement=SimpleNamespace(standby=B, request=lambda record, at: request),
    )


ATTEMPT: Any = SimpleNamespace(
    writer=SimpleNamespace(last_save=None, state_bytes=None),
    lost=lambda: SimpleNamespace(seconds=5.0),
    save_schedule=SimpleNamespace(next=None),
)


class World:
    """A planner of a node A with some guests, and nodes B and C, where one slot each is free."""

    def __init__(self, *jobs: bytes) -> None:
        self.runners = {job: runner(job) for job in jobs}
        self.attempts = dict.fromkeys(jobs, ATTEMPT)
        self.notes: list[tuple[Any, ...]] = []
        view = make_view(A, (A, B, C), adverts=[make_advert(node, slots=1, slots_free=1) for node in (B, C)])
        participant: Any = SimpleNamespace(runners=self.runners)
        sync: Any = SimpleNamespace(holders=lambda job, commit: frozenset())
        mesh_view: Any = SimpleNamespace(look=lambda: view)
        membership: Any = SimpleNamespace(members=list)

        def note(*given: Any, **more: Any) -> None:
            self.notes.append(given)

        self.planner = DeparturePlanner(
            participant,
            self.attempts,
            Bandwidth(),
            sync,
            mesh_view,
            membership,
            lambda job: ReplicaPolicy(0, 0, ()),
            note,
        )

    def place(self, job: bytes) -> bytes | None:
        found = self.planner.of(job)
        return None if found is None else found.place


def test_destination_is_chosen_once_and_for_one_attempt() -> None:
    world = World(JOB)
    world.planner.settle([JOB], 30.0)
    first = world.place(JOB)
    assert first in {B, C} and len(world.notes) == 1
    world.planner.settle([JOB], 30.0)
    assert world.place(JOB) == first and len(world.notes) == 1, "the user is told once"
    world.runners[JOB].term += 1
    assert world.place(JOB) is None, "it was chosen for an earlier attempt"
    world.planner.settle([JOB], 30.0)
    assert world.place(JOB) is not None and len(world.notes) == 2


def test_jobs_that_leave_one_after_another_do_not_share_a_slot() -> None:
    first, second = b"1" * 16, b"2" * 16
    world = World(first, second)
    world.planner.settle([first], 30.0)
    world.planner.settle([second], 30.0)
    assert {world.place(first), world.place(second)} == {B, C}


def test_slot_of_a_job_that_is_planned_again_is_free_for_it() -> None:
    first, second = b"1" * 16, b"2" * 16
    world = World(first, second)
    world.planner.settle([first, second], 30.0)
    chosen = {job: world.place(job) for job in (first, second)}
    _, again = world.planner.plan([first], 30.0)
    assert [found.place for found in again.destinations] == [chosen[first]]
    nowhere = msgspec.structs.replace(world.planner._chosen[first][1], place=None)
    world.planner._chosen[first] = (world.planner._chosen[first][0], nowhere)
    _, other = world.planner.plan([second], 30.0)
    assert [found.place for found in other.destinations] == [B], "a job without a place takes none"


def test_notice_names_the_place() -> None:
    world = World(JOB)
    notices = world.planner.notices([JOB], 30.0, "the owner")
    assert notices == {JOB: VacateWanted(30.0, "the owner", world.place(JOB))} and world.place(JOB) is not None


def test_job_with_the_longest_transfer_to_its_standby_comes_first() -> None:
    small, large, unknown, alone, unstarted = (bytes([number]) * 16 for number in range(5))
    world = World(small, large, unknown, alone)
    for job, size in ((small, 1 << 20), (large, 1 << 30), (alone, 1 << 31)):
        world.attempts[job] = SimpleNamespace(writer=SimpleNamespace(state_bytes=size))
    world.runners[alone].next_placement.standby = None
    world.runners[unstarted] = runner(unstarted)
    assert world.planner.slowest_first(world.runners) == [large, small, unknown, alone, unstarted]


def test_checkpoints_go_to_the_destination_first_and_then_to_the_preferred_node() -> None:
    world = World(JOB)
    assert world.planner.order(JOB, [A, B, C], None) == [A, B, C]
    assert world.planner.order(JOB, [A, B, C], C) == [C, A, B]
    world.planner.settle([JOB], 30.0)
    found = world.planner.of(JOB)
    assert found is not None
    world.planner._chosen[JOB] = (3, msgspec.structs.replace(found, to=B))
    assert world.planner.order(JOB, [A, B, C], C) == [B, C, A]
    assert world.planner.order(JOB, [A, C], C) == [C, A], "it may not hold checkpoints"


def test_user_is_told_that_the_size_of_the_state_is_unknown() -> None:
    world = World(JOB)
    world.planner.settle([JOB], 30.0)
    ((job, kind, text),) = world.notes
    assert (job, kind) == (JOB, "state") and "has saved nothing yet" in text
    world.attempts[JOB] = saved = SimpleNamespace(**vars(ATTEMPT))
    saved.writer = SimpleNamespace(last_save=None, state_bytes=1 << 20)
    world.runners[JOB].term += 1
    world.planner.settle([JOB], 30.0)
    assert "has saved nothing yet" not in world.notes[1][2]


def test_gang_has_no_destination() -> None:
    world = World(JOB)
    world.runners[JOB] = runner(nodes=2)
    world.planner.settle([JOB], 30.0)
    assert world.place(JOB) is None and not world.notes


def test_plan_is_made_from_what_the_guest_would_lose_and_who_has_the_rest() -> None:
    world = World(JOB)
    commit: Any = SimpleNamespace(holders=(B,))
    world.runners[JOB].record = msgspec.structs.replace(JobRecord(), commit=commit)
    world.attempts[JOB] = SimpleNamespace(
        writer=SimpleNamespace(last_save=(700, 2.5), state_bytes=9000),
        lost=lambda: SimpleNamespace(seconds=60.0),
        save_schedule=SimpleNamespace(next=SimpleNamespace(interval_s=77.0)),
    )
    planner: Any = world.planner
    planner._standby_sync.holders = lambda job, of: frozenset({C} if of is commit else ())
    planner._policy = lambda job: ReplicaPolicy(0, 0, (C, B))
    ((guest,), _) = planner.plan([JOB], 30.0)
    spec = world.runners[JOB].spec
    assert guest.value == worth(60.0, gpu_percent(spec.gpus, spec.gpu_share), spec.priority) > 0
    assert (guest.ready_s, guest.difference, guest.state, guest.horizon_s) == (2.5, 700, 9000, 77.0)
    assert (guest.holders, guest.keepers, guest.standby) == ({B, C}, (C, B), B)
    world.attempts[JOB].writer.last_save = None
    world.attempts[JOB].save_schedule.next = None
    ((guest,), _) = planner.plan([JOB], 30.0)
    assert (guest.ready_s, guest.difference, guest.horizon_s) == (0.0, 9000, HORIZON_S), (
        "all is new, and nothing is known"
    )


def test_slower_path_to_its_standby_makes_a_transfer_longer() -> None:
    near, far = b"1" * 16, b"2" * 16
    world = World(near, far)
    planner: Any = world.planner
    for job, standby in ((near, B), (far, C)):
        world.attempts[job] = SimpleNamespace(writer=SimpleNamespace(state_bytes=1 << 30))
        world.runners[job].next_placement.standby = standby
    planner.path = lambda node: SimpleNamespace(bps=1e9 if node == B else 1e6)
    assert planner.slowest_first([near, far]) == [far, near]

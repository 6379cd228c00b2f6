"""Destinations of several jobs that leave one node, from the view to `prefer` in each job record."""

from collections import Counter
from random import Random

import msgspec
import pytest

from ckptstore.bandwidth import UNKNOWN, Bandwidth, PathEstimate
from ckptstore.deadline import Upload
from ckptstore.deadline import plan as plan_uploads
from mesh.consensus.participant import Participant, Rules
from mesh.consensus.reports import GuestStarted, VacateWanted
from mesh.consensus.view import View
from mesh.jobs.destinations import Guest, _room, assignment
from mesh.model.spec import JobSpec, attempt_request
from placement.advert import WHOLE, Advert, Gpu, Portion
from placement.queue import Queue, Waiting
from placement.request import Request
from tests.consensus.worlds import A, B, C, D, E, at, make_advert, make_spec, make_start, make_view

MIB, GB = 24_000, 10**9
ALL = (A, B, C, D, E)


def lends(node: bytes, free: int, of: int = 8, weight: int = 32, **more: object) -> Advert:
    gpus = tuple(Gpu(f"{node[0]}/{n}", "gpu", MIB) for n in range(of))
    room = tuple(Portion(gpu.uuid, WHOLE, MIB) for gpu in gpus[:free])
    return make_advert(node, gpus=gpus, free_portions=room, slots=0, slots_free=0, weight=weight, **more)


def view(**free: int) -> View:
    """Return the view of D, which is about to leave; `a=2` means that node A has two free GPUs."""
    nodes = {"a": A, "b": B, "c": C, "e": E}
    adverts = [lends(nodes[name], count) for name, count in free.items()]
    return make_view(D, ALL, adverts=(lends(D, 0), *adverts))


def guest(
    number: int, gpus: int = 1, *, value: float = 900.0, difference: int = GB // 10, state: int = GB, **more: object
) -> Guest:
    spec = make_spec(gpus=gpus, nonce=bytes([number]) * 16)
    request = attempt_request(bytes([number]) * 16, spec, 1, (), 0)
    fields: dict[str, object] = {"holders": frozenset(), "keepers": (), "horizon_s": 1800.0}
    return Guest(spec, request, value, 0.5, difference, state, **{**fields, **more})  # type: ignore[arg-type]


def even(node: bytes, neighbours: object = ()) -> PathEstimate:
    return PathEstimate(1e8, 0.4, "measured", 9)


def test_departing_jobs_get_distinct_places_and_the_widest_the_widest_node() -> None:
    guests = [guest(1), guest(2), guest(3), guest(4, gpus=4)]
    found = assignment(guests, view(a=4, b=1, c=1, e=1), even, 120.0)
    assert [d.place for d in found.destinations][3] == A
    assert sorted(d.place or b"" for d in found.destinations[:3]) == [B, C, E]
    assert all(d.chance > 0.9 for d in found.destinations), "4 GB in 40 s of 120"


def test_places_promised_or_reserved_are_not_free() -> None:
    first = guest(1)
    (promised,) = assignment([first], view(a=1, b=1), even, 60.0).destinations
    assert promised.place is not None
    (second,) = assignment([guest(2)], view(a=1, b=1), even, 60.0, [(promised.place, first.request)]).destinations
    assert {promised.place, second.place} == {A, B}
    seen = view(a=2)
    urgent = Waiting(Request(b"u" * 16, 0, "bob", gpus=1), 100, 0)
    kept = msgspec.structs.replace(seen, queue=Queue([urgent], {}, seen.offers, 0))
    places = Counter(d.place for d in assignment([guest(1), guest(2)], kept, even, 60.0).destinations)
    assert places == {A: 1, None: 1}


def test_whole_gpu_is_more_room_than_parts_of_several() -> None:
    parts = tuple(Portion(f"{n}", WHOLE // 2, MIB // 2) for n in range(3))
    assert _room(lends(A, 1)) > _room(msgspec.structs.replace(lends(A, 0), free_portions=parts))


def test_measured_paths_limit_where_a_state_can_go() -> None:
    known = Bandwidth()
    for _ in range(5):
        known.record(A, GB, 100.0)
        known.record(B, GB, 1.0)
    big = guest(1, difference=20 * GB, state=20 * GB)
    (found,) = assignment([big], view(a=1, b=1), known.path, 60.0).destinations
    assert (found.place, found.to) == (B, B) and found.seconds == pytest.approx(20.0) and found.chance > 0.85
    holder = guest(1, difference=GB, state=40 * GB, holders=frozenset({C}))
    (kept,) = assignment([holder], view(a=1), lambda node, near: even(node), 30.0).destinations
    assert (kept.place, kept.to) == (A, C), "C has the checkpoint before, so only the difference goes there"


def test_home_is_preferred_and_a_full_holder_keeps_the_state() -> None:
    plain = guest(1)
    at_home = msgspec.structs.replace(plain, request=msgspec.structs.replace(plain.request, prefer=C))
    seen = make_view(D, ALL, adverts=(lends(A, 1, weight=40), lends(C, 1, weight=30)))
    assert assignment([at_home], seen, even, 60.0).destinations[0].place == C
    (waits,) = assignment([guest(1, holders=frozenset({B}))], view(), even, 60.0).destinations
    assert (waits.place, waits.to) == (None, B)


def test_every_job_gets_a_destination_without_measurements() -> None:
    new = msgspec.structs.replace(guest(1), difference=None, state=None)
    (found,) = assignment([new], view(a=1), lambda node, near: UNKNOWN, 30.0).destinations
    assert (found.place, found.bytes) == (A, 0.0)
    assert assignment([], view(a=1), even, 30.0).destinations == ()


def test_uploads_leave_in_the_order_of_the_plan() -> None:
    values = (100.0, 9000.0, 3000.0)
    guests = [guest(n, value=value, difference=2 * GB, state=2 * GB) for n, value in enumerate(values)]
    found = assignment(guests, view(a=1, b=1, c=1), even, 300.0)
    uploads = [Upload(value, 2 * GB, 300.0, 1e8) for value in values]
    assert found.order == plan_uploads(uploads, 0.0).order


class Node:
    """The participant of D, which runs these jobs."""

    def __init__(self, specs: list[JobSpec]) -> None:
        self.jobs = {bytes([number]) * 16: spec for number, spec in enumerate(specs, 1)}
        rules = Rules(lambda job, data: self.jobs[job], lambda job, spec, order: None, lambda *_: True)
        self.core = Participant(D, b"disk", "node-4", rules, Random(1))
        for job in self.jobs:
            start = msgspec.structs.replace(make_start(), job=job)
            self.core.receive(A, start, at(0.0))
            runner = self.core.runners[job]
            runner.state = "restoring"
            self.core.report(job, GuestStarted(None), at(1.0))

    def standbys(self) -> list[bytes | None]:
        return [self.core.runners[job].next_placement.standby for job in self.jobs]


def test_standbys_differ_per_job_and_the_notice_names_the_planned_node() -> None:
    node = Node([make_spec(gpus=1), make_spec(gpus=1), make_spec(gpus=4)])
    seen = view(a=4, b=1, c=1)
    node.core.observe(seen, at(2.0))
    assert node.standbys()[2] == A and sorted(standby or b"" for standby in node.standbys()[:2]) == [B, C]
    node.core.observe(view(a=1), at(3.0))
    assert Counter(node.standbys()) == {A: 1, None: 2}, "one free GPU is the standby of one"
    first = next(iter(node.jobs))
    out = node.core.report(first, VacateWanted(30.0, "the owner", E), at(4.0))
    assert node.core.runners[first].record.prefer == E and out

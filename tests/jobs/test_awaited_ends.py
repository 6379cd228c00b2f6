"""Awaited ends: a job that waits for another goes by the word of that one's witnesses."""

import asyncio
from collections import Counter
from functools import partial
from itertools import count, pairwise
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from mesh.checkpoints.witness_group import Words
from mesh.consensus.effects import WitnessRecord
from mesh.consensus.view import View
from mesh.jobs import awaited_ends
from mesh.jobs.awaited_ends import AGAIN_MAX_S, AGAIN_S, AT_ONCE, AwaitedEnds, stated_outcome
from mesh.jobs.job_table import JobTable
from mesh.model.record import JobRecord, OutcomeKind
from mesh.model.spec import JobSpec
from tests.consensus.worlds import A, B, C, D, make_leader, make_spec, make_witness
from tests.jobs.test_job_table import DONE, LIMITED, PLACE, view

FIRST = b"f" * 16
FAILED = msgspec.structs.replace(DONE, kind="failed")


def record(kind: OutcomeKind | None, final: bool = True) -> WitnessRecord:
    outcome = None if kind is None else msgspec.structs.replace(DONE, kind=kind)
    return msgspec.structs.replace(make_witness().witness_record, record=JobRecord(outcome=outcome), final=final)


class World:
    """A node whose leader has a job wait for `FIRST`; `records`: of the witnesses of that one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **spec: Any) -> None:
        self.now, self.records, self.few = 100.0, dict[bytes, WitnessRecord](), False
        self.asked: list[bytes] = []
        self.at_once: list[int] = []
        self.specs: dict[bytes, JobSpec] = {}
        self.learned = 0
        monkeypatch.setattr(awaited_ends.time, "monotonic", lambda: self.now)
        self.leader = make_leader(witness=make_witness(spec=make_spec(**{"after": (FIRST,), **spec})))
        self.leader.state = "waiting"
        participant: Any = SimpleNamespace(leaders={b"w" * 16: self.leader})
        self.table, vouching = JobTable(), self
        self.ends = AwaitedEnds(participant, self.table, vouching, self._learn)  # type: ignore[arg-type]

    def _learn(self) -> None:
        self.learned += 1

    async def words(self, job: bytes) -> Words:
        self.at_once.append(len(self.ends._asking))
        await asyncio.sleep(0)
        return Words(self.records, self.few)

    async def describe(self, job: bytes, first: bytes | None = None) -> JobSpec:
        assert first == self.leader.spec.submitter
        self.asked.append(job)
        return self.specs.get(job, make_spec(array=LIMITED))

    async def look(self) -> dict[bytes, OutcomeKind]:
        self.ends.look()
        while self.ends._tasks._tasks:
            await asyncio.sleep(0)
        return dict(self.table.ends)


async def test_status_alone_ends_no_job_for_those_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.table.update(B, FIRST, view("failed", outcome=FAILED))
    assert await world.look() == {}, "no witness answers"
    world.records = {A: record("done", final=False), B: record("done", final=False)}
    world.now += AGAIN_MAX_S
    assert await world.look() == {}, "an end that no majority is known to hold"
    world.records = {A: record("done")}
    world.now += AGAIN_MAX_S
    assert await world.look() == {FIRST: "done"} and world.learned == 1
    assert world.table.array_ends == {("ada", PLACE.array): 1 << PLACE.place}
    world.now += AGAIN_MAX_S
    asked = len(world.asked)
    assert await world.look() == {FIRST: "done"} and len(world.asked) == asked, "it is known now"


async def test_end_counts_as_most_witnesses_state_it(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.table.update(D, FIRST, view("failed", outcome=FAILED))
    world.records = {A: record("failed"), B: record(None, final=False)}
    assert await world.look() == {}, "one malicious witness says so, and another member"
    world.records = {A: record("failed"), B: record("done"), C: record("done")}
    world.now += AGAIN_S
    assert await world.look() == {FIRST: "done"}


async def test_word_of_one_of_few_witnesses_counts_if_another_node_says_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch)
    world.few, world.records = True, {A: record("failed"), B: record(None, final=False), C: record("done")}
    world.table.update(A, FIRST, view("failed", outcome=FAILED))
    assert await world.look() == {}, "a node does not confirm itself, and two witnesses say otherwise"
    world.table.update(D, FIRST, view("done", outcome=DONE))
    world.now += 300.0
    assert await world.look() == {FIRST: "done"}, "another node's status says so"
    world = World(monkeypatch)
    world.few, world.records = True, {A: record("failed"), B: record(None, final=False), C: record("failed")}
    assert await world.look() == {FIRST: "failed"}, "another witness says so"
    world = World(monkeypatch)
    world.few, world.records = True, {A: record(None, final=False)}
    for node in (B, C):
        world.table.update(node, FIRST, view("failed", outcome=FAILED))
    assert await world.look() == {}, "no witness says so"


async def test_witnesses_are_asked_now_and_then_while_the_job_may_be_over(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    await world.look()
    assert world.asked == [FIRST], "no node publishes it any more: who submitted the job knows it"
    world.now += AGAIN_S - 1
    await world.look()
    assert len(world.asked) == 1
    world.table.update(C, FIRST, view("running"))
    world.now += 2 * AGAIN_S
    await world.look()
    assert len(world.asked) == 1, "all say that it continues"
    world.table.update(A, FIRST, view("done", outcome=DONE))
    for state in ("watching", "waiting"):
        world.leader.state = state
        await world.look()
        assert len(world.asked) == 1 + (state == "waiting"), "the leader that acts needs to know"


async def test_witnesses_are_asked_ever_more_rarely_and_about_few_jobs_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    jobs = [number.to_bytes(16) for number in range(200)]
    world = World(monkeypatch, after=tuple(jobs))
    await world.look()
    assert sorted(world.asked) == jobs and max(world.at_once) == AT_ONCE, "each in its turn"
    times = []
    for _ in range(2000):
        world.now += 1.0
        asked = len(world.asked)
        await world.look()
        times += [world.now - 100.0] * (len(world.asked) > asked)
    assert [later - before for before, later in pairwise(times)] == [2, 4, 8, 16, 32, 64, 128, 256, 300, 300, 300, 300]


async def test_jobs_that_were_asked_about_least_often_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [number.to_bytes(16) for number in range(AT_ONCE + 1)]
    world = World(monkeypatch, after=tuple(jobs))
    for job in jobs[:AT_ONCE]:
        world.ends._again.failed(job, 0.0)
    world.ends.look()
    assert jobs[AT_ONCE] in world.ends._asking
    await world.look()


def invent(world: World, count: int, *nodes: bytes) -> list[bytes]:
    """Have nodes publish that so many jobs of the array are over."""
    of = len(world.table.views())
    jobs = [b"i" + number.to_bytes(15) for number in range(of, of + count)]
    for job in jobs:
        for node in nodes:
            status = msgspec.structs.replace(view("done", outcome=DONE, array=LIMITED), job=job)
            world.table.update(node, job, status)
    return jobs


async def test_jobs_that_others_come_after_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """They go first although they were asked about before, and the nodes of others publish inventions."""
    second = b"s" * 16
    world = World(monkeypatch, array=LIMITED, after=(FIRST, second))
    world.table.update(A, second, view("running"))
    last_first = SimpleNamespace(random=partial(next, count(0, -1)))  # among equal lines, so that chance helps nobody
    monkeypatch.setattr(awaited_ends, "random", last_first)
    for node in (A, B, C, D):
        invent(world, 100, node)
    world.ends._again.failed(FIRST, 0.0)
    world.ends.look()
    assert next(iter(world.ends._asking)) == FIRST and len(world.ends._asking) == AT_ONCE
    world.table.update(A, second, None)
    world.ends.look()
    assert second not in world.ends._asking, "all slots are in use"
    await world.look()
    assert second in world.asked[: AT_ONCE + 1], "it has the next slot"


async def test_nodes_that_publish_ends_share_the_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, array=LIMITED, after=())
    invented = invent(world, 400, D)
    mine = invent(world, 20, D, A)
    for job in mine:
        world.ends._again.failed(job, 0.0)
    world.ends.look()
    asking = Counter(job in mine for job in world.ends._asking)
    assert asking == {True: AT_ONCE // 2, False: AT_ONCE // 2}, "the member that invents ends claims the others, too"
    await world.look()
    assert sorted(world.asked) == sorted(invented + mine), "once each"
    assert set(world.asked[:48]) > set(mine), "as fast as if none were invented by another"
    world.now += AGAIN_MAX_S
    later = invent(world, 1, B)
    world.ends.look()
    assert later[0] in world.ends._asking
    await world.look()


async def test_node_that_starts_late_learns_the_first_ends_of_an_array(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eighty places ended over three days; statuses name their jobs, and their witnesses confirm each end."""
    array = msgspec.structs.replace(PLACE, of=100, limit=4)
    places = [msgspec.structs.replace(array, place=place, index=place) for place in range(100)]
    world = World(monkeypatch, after=(), array=places[80])
    for place in places[:80]:
        job = place.place.to_bytes(16)
        world.specs[job] = make_spec(array=place)
        world.table.update(B, job, msgspec.structs.replace(view("done", outcome=DONE, array=place), job=job))

    def held_back() -> str:
        ends = {"ends": world.table.ends, "array_ends": world.table.array_ends}
        world.leader.view = msgspec.structs.replace(world.leader.view or View(A), **ends)
        return world.leader.held_back

    await world.look()
    assert held_back() and not world.table.ends, "a status alone counts no place"
    world.records = {A: record("done")}
    world.now += AGAIN_S
    assert len(await world.look()) == 80 and not held_back()


async def test_places_of_an_array_without_a_limit_are_not_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in (0, 2):
        world = World(monkeypatch, after=(), array=msgspec.structs.replace(PLACE, place=3, limit=limit))
        place = msgspec.structs.replace(PLACE, limit=limit)
        world.table.update(A, FIRST, view("done", outcome=DONE, array=place))
        world.table.update(A, b"r" * 16, view("running", array=place))
        await world.look()
        assert world.asked == [FIRST] * bool(limit)


async def test_end_that_may_be_of_any_kind_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, after=(), after_any=(FIRST,))
    world.table.update(B, FIRST, view("failed", outcome=FAILED))
    world.records = {B: record("failed"), C: record("failed")}
    assert await world.look() == {FIRST: "failed"}


def test_outcome_counts_that_most_witnesses_state() -> None:
    """What a cache takes over is in it: one witness, or a few that are left, could name a result that they made up."""
    done, failed, going = record("done"), record("failed"), record("done", final=False)
    assert stated_outcome(Words({A: done, B: done, C: failed})) == done.record.outcome
    assert stated_outcome(Words({A: done})) == done.record.outcome
    for records in ({}, {A: done, B: failed}, {A: done, B: going, C: going}, {A: record(None), B: record(None)}):
        assert stated_outcome(Words(records)) is None
    assert stated_outcome(Words({A: done, B: done, C: done}, few=True)) is None

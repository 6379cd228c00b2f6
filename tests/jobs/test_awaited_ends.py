"""Awaited ends: a job that waits for another goes by the word of that one's witnesses."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from mesh.consensus.effects import WitnessRecord
from mesh.jobs import awaited_ends
from mesh.jobs.awaited_ends import AGAIN_S, AwaitedEnds
from mesh.jobs.job_table import JobTable
from mesh.model.record import JobRecord, OutcomeKind
from mesh.model.spec import JobSpec
from tests.consensus.worlds import A, B, C, make_leader, make_spec, make_witness
from tests.jobs.test_job_table import DONE, PLACE, view

FIRST = b"f" * 16
FAILED = msgspec.structs.replace(DONE, kind="failed")


def record(kind: OutcomeKind | None, final: bool = True) -> WitnessRecord:
    outcome = None if kind is None else msgspec.structs.replace(DONE, kind=kind)
    return msgspec.structs.replace(make_witness().witness_record, record=JobRecord(outcome=outcome), final=final)


class World:
    """A node whose leader has a job wait for `FIRST`; `records`: of the witnesses of that one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **spec: Any) -> None:
        self.now, self.records = 100.0, list[WitnessRecord]()
        self.asked: list[bytes | None] = []
        self.learned = 0
        monkeypatch.setattr(awaited_ends.time, "monotonic", lambda: self.now)
        self.leader = make_leader(witness=make_witness(spec=make_spec(**{"after": (FIRST,), **spec})))
        self.leader.state = "waiting"
        participant: Any = SimpleNamespace(leaders={b"w" * 16: self.leader})
        self.table, vouching = JobTable(), self
        self.ends = AwaitedEnds(participant, self.table, vouching, self._learn)  # type: ignore[arg-type]

    def _learn(self) -> None:
        self.learned += 1

    async def words(self, job: bytes) -> list[WitnessRecord]:
        return self.records

    async def describe(self, job: bytes, first: bytes | None = None) -> JobSpec:
        assert job == FIRST
        self.asked.append(first)
        return make_spec(array=PLACE)

    async def look(self) -> dict[bytes, OutcomeKind]:
        self.ends.look()
        while self.ends._tasks._tasks:
            await next(iter(self.ends._tasks._tasks))
        return dict(self.table.ends)


async def test_status_alone_ends_no_job_for_those_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.table.update(B, FIRST, view("failed", outcome=FAILED))
    assert await world.look() == {}, "no witness answers"
    world.records = [record("done", final=False), record("done", final=False)]
    world.now += AGAIN_S
    assert await world.look() == {}, "an end that no majority is known to hold"
    world.records = [record("done")]
    world.now += AGAIN_S
    assert await world.look() == {FIRST: "done"} and world.learned == 1
    assert world.table.array_ends == {PLACE.array: {PLACE.place}}
    world.now += AGAIN_S
    asked = len(world.asked)
    assert await world.look() == {FIRST: "done"} and len(world.asked) == asked, "it is known now"


async def test_end_counts_as_most_witnesses_state_it(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.records = [record("failed"), record(None, final=False)]
    assert await world.look() == {}, "one malicious witness says so"
    world.records = [record("failed"), record("done"), record("done")]
    world.now += AGAIN_S
    assert await world.look() == {FIRST: "done"}


async def test_witnesses_are_asked_now_and_then_while_the_job_may_be_over(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    await world.look()
    assert world.asked == [world.leader.spec.submitter], "no node publishes it any more: who submitted the job knows it"
    world.now += AGAIN_S - 1
    await world.look()
    assert len(world.asked) == 1
    world.table.update(C, FIRST, view("running"))
    world.now += AGAIN_S
    await world.look()
    assert len(world.asked) == 1, "all say that it continues"
    world.table.update(A, FIRST, view("done", outcome=DONE))
    for state in ("watching", "waiting"):
        world.leader.state = state
        await world.look()
        assert len(world.asked) == 1 + (state == "waiting"), "the leader that acts needs to know"


async def test_places_of_an_array_with_a_limit_are_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in (0, 2):
        world = World(monkeypatch, after=(), array=msgspec.structs.replace(PLACE, place=3, limit=limit))
        world.table.update(A, FIRST, view("done", outcome=DONE, array=PLACE))
        await world.look()
        assert world.table.array_ends == ({PLACE.array: {PLACE.place}} if limit else {}) and not world.asked

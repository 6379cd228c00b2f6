"""Repair: exactly one node copies a checkpoint that has lost holders, and only once the repair is due."""

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

import mesh.checkpoints.repair as module
from ckptstore.errors import StoreError
from mesh.checkpoints.repair import Repair
from mesh.checkpoints.repair_plan import LOST_S, MOST_COPIES, RETRY_S, Kept, RepairPlan, kept
from mesh.checkpoints.replica_policy import ReplicaPolicy
from mesh.checkpoints.replicator import Expected, FetchError, Replicated
from mesh.consensus.status import JobStatus
from mesh.model.record import Attempt, Commit, Config, Outcome
from mesh.model.spec import JobSpec
from tests.consensus.worlds import JOB, A, B, C, D, E, make_spec, voters

F = b"\x06" * 32
SPEC = make_spec()
CHECKPOINT, RESULT = b"c" * 32, b"r" * 32
COMMIT = Commit(3, 1, CHECKPOINT, None, (B, C), 30, 1)
RUNS = JobStatus(
    job=JOB,
    name="",
    user="ada",
    submitter=A,
    command="",
    created_unix_ms=0,
    state="running",
    detail="",
    rank=(0, 1, 1, 2),
    config=Config(0, 0, voters(A, B, C)),
    gpus=0,
    attempts=(Attempt(0, D, "d", 1, 0),),
    commit=COMMIT,
    runner=D,
)
AT_RISK = msgspec.structs.replace(RUNS, commit=msgspec.structs.replace(COMMIT, holders=(), wanted=2))
WAITS = msgspec.structs.replace(RUNS, state="pending", runner=None)
OVER = msgspec.structs.replace(WAITS, state="done", outcome=Outcome("done", "done", 0, RESULT, (B, C), 1))


class Bench:
    """Repair on one node, with a replicator that records its calls and a clock set by the test."""

    def __init__(self, me: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
        self.copied: list[tuple[bytes, tuple[bytes, ...], int]] = []
        self.told: list[tuple[bytes, tuple[bytes, ...]]] = []
        self.can_take: tuple[bytes, ...] = (E, F)
        self.fetched: list[tuple[bytes, tuple[bytes, ...]]] = []
        self.nobody_has_it = False
        self.now = 1000.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        self.has = True
        self.words: list[str] = []
        self.saved_by: bytes | None = None  # the job of each manifest here; None: the job that is asked about
        self.spec: JobSpec | None = SPEC
        store: Any = type(
            "Has",
            (),
            {
                "has": staticmethod(lambda manifest: self.has),
                "manifest": staticmethod(lambda manifest: SimpleNamespace(job=self.saved_by or self.jobs[manifest])),
            },
        )
        self.jobs: dict[bytes, bytes] = {}
        self.policy = ReplicaPolicy(0, 0, (B, C, E, F))
        replicator: Any = self
        self.repair = Repair(me, replicator, store, lambda job: self.policy, self.tell, self.relied_on)

    async def relied_on(self, job: bytes, manifest: bytes) -> JobSpec | None:
        return self.spec

    async def replicate(self, manifest: bytes, chosen: object, able: list[bytes], want: int) -> Replicated:
        self.copied.append((manifest, tuple(able), want))
        took = tuple(node for node in able if node in self.can_take)[:want]
        return Replicated(took, "" if took else "they are full", ())

    async def fetch(self, manifest: bytes, holders: list[bytes], of: Expected) -> None:
        assert of == Expected.of(JOB, SPEC)
        self.fetched.append((manifest, tuple(dict.fromkeys(holders))))
        if self.nobody_has_it:
            raise FetchError("no node has it")

    async def tell(self, job: bytes, manifest: bytes, holders: tuple[bytes, ...], words: str) -> None:
        self.words.append(words)
        self.told.append((manifest, holders))

    async def look(self, status: JobStatus, staying: set[bytes], after_s: float = 0.0, runs_here: bool = False) -> None:
        self.now += after_s
        self.jobs = dict.fromkeys((CHECKPOINT, RESULT), status.job)
        self.repair._look_at = 0.0
        self.repair.look([status], [status], staying, {JOB} if runs_here else set())
        if self.repair._task is not None:
            await asyncio.gather(self.repair._task)


def test_kept_names_the_manifest_its_holders_and_the_wanted_copies() -> None:
    assert kept(RUNS) == Kept(CHECKPOINT, (D, B, C), 2)
    assert kept(OVER) == Kept(RESULT, (D, B, C), 2)
    moved = msgspec.structs.replace(RUNS, runner=B, attempts=(*RUNS.attempts, Attempt(1, B, "b", 2, 0)))
    assert kept(moved) == Kept(CHECKPOINT, (B, D, C), 2), "a node that resumed from the checkpoint holds it too"
    assert kept(msgspec.structs.replace(RUNS, commit=None)) is None
    alone = msgspec.structs.replace(RUNS, commit=msgspec.structs.replace(COMMIT, holders=()))
    assert kept(alone) is None, "no other node was to hold the checkpoint"
    assert kept(AT_RISK) == Kept(CHECKPOINT, (D,), 2)
    starts = msgspec.structs.replace(RUNS, state="starting", runner=E)
    assert kept(starts) == Kept(CHECKPOINT, (D, B, C), 2), "it may not have fetched it yet"
    assert OVER.outcome is not None
    for changes in ({"manifest": None}, {"holders": ()}):
        nothing = msgspec.structs.replace(OVER.outcome, **changes)
        assert kept(msgspec.structs.replace(OVER, outcome=nothing)) is None
    assert kept(msgspec.structs.replace(OVER, attempts=())) == Kept(RESULT, (B, C), 2)


async def test_checkpoint_at_risk_is_copied_at_once_and_first(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(D, monkeypatch)
    await bench.look(AT_RISK, {A, B, C, D, E, F}, runs_here=True)
    assert bench.copied == [(CHECKPOINT, (B, C, E, F), 2)] and bench.told == [(CHECKPOINT, (E, F))]
    assert bench.words == ["too few nodes held what it saved; copied to 2 others"]
    one = msgspec.structs.replace(AT_RISK, commit=msgspec.structs.replace(COMMIT, holders=(B,), wanted=2))
    assert [due.lacking for due in RepairPlan(D, LOST_S).look([one], {B, D}, {JOB}, 0.0)] == [1], (
        "one of two is too few"
    )
    plan, job = RepairPlan(D, LOST_S), b"k" * 16
    lost = msgspec.structs.replace(RUNS, job=job, commit=msgspec.structs.replace(COMMIT, manifest=b"l" * 32))
    plan.look([lost], {D}, {job}, 0.0)
    due = plan.look([lost, AT_RISK], {D}, {job, JOB}, LOST_S)
    assert [shortage.manifest for shortage in due] == [CHECKPOINT, b"l" * 32]


def test_what_the_fewest_nodes_have_is_copied_first() -> None:
    jobs = (b"1" * 16, b"2" * 16)
    two, one = (
        msgspec.structs.replace(
            RUNS, job=job, commit=msgspec.structs.replace(COMMIT, manifest=job * 2, holders=holders)
        )
        for job, holders in zip(jobs, ((B, C), (C, E)), strict=True)
    )
    plan = RepairPlan(D, LOST_S)
    plan.look([two, one], {B, D}, jobs, 0.0)
    assert [len(shortage.there) for shortage in plan.look([two, one], {B, D}, jobs, LOST_S)] == [1, 2]


async def test_runner_replaces_a_lost_holder_and_reports_the_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(D, monkeypatch)
    everybody = {A, B, C, D, E, F}
    await bench.look(RUNS, everybody, LOST_S * 9, runs_here=True)
    assert not bench.copied
    await bench.look(RUNS, everybody - {C}, runs_here=True)
    await bench.look(RUNS, everybody - {C}, LOST_S - 1, runs_here=True)
    await bench.look(RUNS, everybody, 0.5, runs_here=True)
    await bench.look(RUNS, everybody - {C}, 0.5, runs_here=True)
    assert not bench.copied, "the holder returned in the meantime"
    await bench.look(RUNS, everybody - {C}, LOST_S, runs_here=True)
    assert bench.copied == [(CHECKPOINT, (C, E, F), 1)] and bench.told == [(CHECKPOINT, (B, E))]
    assert bench.words == ["1 of the nodes that held what it saved are away; copied to 1 others"]
    await bench.look(RUNS, everybody - {C}, LOST_S * 9, runs_here=True)
    assert len(bench.copied) == 1, "the node remembers the copy before a record names it"
    named = msgspec.structs.replace(RUNS, commit=msgspec.structs.replace(COMMIT, holders=(B, E)))
    bench.can_take = (F,)
    await bench.look(named, everybody - {C, E}, runs_here=True)
    await bench.look(named, everybody - {C, E}, LOST_S, runs_here=True)
    assert len(bench.copied) == 2 and bench.told[-1] == (CHECKPOINT, (B, F))


@pytest.mark.parametrize("status", [WAITS, OVER, msgspec.structs.replace(OVER, runner=D)])
async def test_first_remaining_holder_repairs_a_job_without_a_runner(
    status: JobStatus, monkeypatch: pytest.MonkeyPatch
) -> None:
    staying = {A, C, E, F}
    manifest = CHECKPOINT if status is WAITS else RESULT
    for me, acts in ((C, True), (A, False), (E, False)):
        bench = Bench(me, monkeypatch)
        await bench.look(status, staying)
        await bench.look(status, staying, LOST_S)
        assert bench.copied == ([(manifest, (B, E, F), 2)] if acts else [])


async def test_running_job_is_repaired_only_by_its_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(B, monkeypatch)
    await bench.look(RUNS, {A, B, D, E})
    await bench.look(RUNS, {A, B, D, E}, LOST_S)
    await bench.look(msgspec.structs.replace(RUNS, state="starting"), {A, B, D, E}, LOST_S)
    assert not bench.copied
    runner = Bench(D, monkeypatch)
    for _ in range(2):
        await runner.look(msgspec.structs.replace(RUNS, state="starting"), {A, B, D, E}, LOST_S, runs_here=True)
    assert not runner.copied, "it may not have the checkpoint yet"


async def test_one_copy_is_made_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(C, monkeypatch)
    others = [
        msgspec.structs.replace(WAITS, job=job, commit=msgspec.structs.replace(COMMIT, manifest=job * 2))
        for job in (b"1" * 16, b"2" * 16)
    ]
    bench.jobs, bench.spec = {job.job * 2: job.job for job in others}, None
    for _ in range(2):
        if bench.repair._task is not None:
            await bench.repair._task  # it looks for what should be here first
        bench.repair._look_at = 0.0
        bench.repair.look(others, others, {C, E, F}, set())
        bench.now += LOST_S
    assert bench.repair._task is not None
    await bench.repair._task
    assert len(bench.copied) == 1


async def test_copy_that_fails_is_retried_later(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(C, monkeypatch)

    async def fail(*asked: object) -> Replicated:
        bench.copied.append((CHECKPOINT, (), 0))
        raise StoreError("the checkpoint is damaged")

    bench.replicate = fail  # type: ignore[method-assign, assignment]
    for _ in range(4):
        await bench.look(WAITS, {C, E, F}, LOST_S)
    assert len(bench.copied) == 2 and not bench.told


async def test_repair_without_a_willing_node_is_retried_later(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(C, monkeypatch)
    bench.can_take = ()
    await bench.look(WAITS, {C, E, F})
    await bench.look(WAITS, {C, E, F}, LOST_S)
    await bench.look(WAITS, {C, E, F}, LOST_S)
    assert len(bench.copied) == 1 and not bench.told
    bench.can_take = (F,)
    await bench.look(WAITS, {C, E, F}, LOST_S)
    assert len(bench.copied) == 2 and bench.told == [(CHECKPOINT, (F,))]
    await bench.repair.close()


async def test_node_brings_back_what_records_say_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """A holder that lost its disk and is back looks as before to all others."""
    everybody = {A, B, C, D, E, F}
    bench = Bench(C, monkeypatch)
    bench.nobody_has_it = True
    await bench.look(RUNS, everybody)
    await bench.look(RUNS, everybody, RETRY_S - 1)
    assert bench.fetched == [(CHECKPOINT, (D, B, E, F))], "the runner is asked first, then holders, then any"
    bench.nobody_has_it = False
    for _ in range(3):
        await bench.look(RUNS, everybody, RETRY_S)
    assert len(bench.fetched) == 2 and not bench.copied, "once it is here, it is not looked for again"
    newer = msgspec.structs.replace(RUNS, commit=msgspec.structs.replace(COMMIT, manifest=b"n" * 32))
    await bench.look(newer, everybody)
    assert bench.fetched[2:] == [(b"n" * 32, (D, B, E, F))]


async def test_status_alone_makes_no_node_fetch_or_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any member can publish one, of a job of its own or of none."""
    bench = Bench(C, monkeypatch)
    bench.spec = None
    await bench.look(RUNS, {A, B, C, D, E, F})
    assert not bench.fetched, "its witnesses do not say so"
    bench.saved_by = b"another" + bytes(9)
    for _ in range(2):
        await bench.look(WAITS, {C, E, F}, LOST_S)
    assert not bench.copied, "another job has saved it"
    many = msgspec.structs.replace(COMMIT, wanted=2**40, holders=(C,))
    found = kept(msgspec.structs.replace(RUNS, commit=many))
    assert found is not None and found.others == MOST_COPIES


def test_false_status_hides_no_shortage_of_the_job_that_saved_it() -> None:
    plan, false = RepairPlan(C, LOST_S), msgspec.structs.replace(WAITS, job=b"f" * 16)
    for now in (0.0, LOST_S):
        due = plan.look([WAITS, false], {C, E, F}, set(), now)
    assert {shortage.job for shortage in due} == {JOB, false.job}
    assert {job for job, _ in plan.unsure([WAITS, false], 0.0)} == {JOB, false.job}


async def test_node_brings_back_nothing_that_it_need_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    for me, status in ((A, RUNS), (E, RUNS), (C, OVER), (C, msgspec.structs.replace(RUNS, commit=None))):
        bench = Bench(me, monkeypatch)
        await bench.look(status, {A, B, C, D, E, F})
        assert not bench.fetched, "results that were removed for lack of space stay away"


async def test_false_view_keeps_no_node_from_bringing_back_what_it_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(C, monkeypatch)
    false = msgspec.structs.replace(RUNS, commit=msgspec.structs.replace(COMMIT, holders=(E, F)))
    bench.repair.look([false], [RUNS, false, RUNS], {A, B, C, D, E, F}, set())
    assert bench.repair._task is not None
    await bench.repair._task
    assert bench.fetched == [(CHECKPOINT, (D, B, E, F))]
    assert len(RepairPlan(C, LOST_S).unsure([RUNS, false, RUNS], 0.0)) == 1, "two views of one checkpoint"


async def test_look_costs_nothing_while_the_last_one_is_recent(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, asked = Bench(C, monkeypatch), list[float]()
    look = bench.repair._plan.look
    monkeypatch.setattr(bench.repair._plan, "look", lambda *asks: (asked.append(bench.now), look(*asks))[1])
    for second in (0.0, module.LOOK_EVERY_S - 0.1, 0.1, module.LOOK_EVERY_S):
        bench.now += second
        bench.repair.look([OVER], [OVER], {C}, set())
    assert [at - 1000.0 for at in asked] == [0.0, module.LOOK_EVERY_S, 2 * module.LOOK_EVERY_S]


async def test_nothing_is_copied_that_is_not_here_or_that_no_node_can_take(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(D, monkeypatch)
    bench.has = False
    await bench.look(AT_RISK, {D, E, F}, runs_here=True)
    bench.has, bench.policy = True, ReplicaPolicy(0, 0, (D,))
    await bench.look(AT_RISK, {D}, RETRY_S, runs_here=True)
    assert not bench.copied and not bench.told
    bench.policy = ReplicaPolicy(0, 0, (D, E))
    await bench.look(AT_RISK, {D, E}, RETRY_S, runs_here=True)
    assert bench.copied == [(CHECKPOINT, (E,), 2)]


async def test_close_ends_what_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, waits = Bench(C, monkeypatch), asyncio.Event()
    await bench.repair.close()

    async def fetch(manifest: bytes, holders: list[bytes], of: object) -> None:
        bench.fetched.append((manifest, tuple(holders)))
        await waits.wait()

    bench.fetch = fetch  # type: ignore[method-assign]
    other = msgspec.structs.replace(RUNS, job=b"o" * 16, commit=msgspec.structs.replace(COMMIT, manifest=b"o" * 32))
    for _ in range(2):
        bench.repair._look_at = 0.0
        bench.repair.look([RUNS, other], [RUNS, other], {A, B, C, D, E, F}, set())
        await asyncio.sleep(0)
    task = bench.repair._task
    assert task is not None and len(bench.fetched) == 1, "one at a time"
    await bench.repair.close()
    assert task.cancelled()

"""Job service: behaviour when the input queue is full."""

import asyncio
import contextlib
import sqlite3
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from ckptstore.store import Store
from membership.identity import Identity
from mesh.checkpoints.replicator import Replicator
from mesh.consensus.effects import Ended, Left, Notify, SaveWitnessRecord, Send, WitnessRecord, decode_witness_record
from mesh.consensus.messages import Accept, Cancel, Enlist, EventReport, encode_message
from mesh.consensus.participant import STILL_ENDING, Directed
from mesh.consensus.reports import GuestStarted, VacateWanted
from mesh.consensus.view import Instant
from mesh.consensus.witness import Witness
from mesh.jobs import input_queue
from mesh.jobs import service as module
from mesh.jobs.input_queue import BATCH, LIMIT, OF_PEER, InputQueue, Overloaded
from mesh.jobs.logs import JobLogs
from mesh.jobs.message_sender import MessageSender
from mesh.jobs.service import JobService
from mesh.journal import Journal, JournalError
from mesh.model.events import MAX_REPORTED
from mesh.model.record import Config, JobRecord, Voter
from tests.ckptstore.worlds import CIPHER, save, write_tree
from tests.consensus.worlds import JOB, SPEC_BYTES, B, C, RunnerWorld, make_spec
from tests.wheels import alone

WAIT_S = 10.0


@pytest.fixture
async def jobs(tmp_path: Path) -> AsyncIterator[JobService]:
    """Return a service on a node without peers; its worker does not run."""
    journal = Journal(tmp_path / "journal.sqlite")
    await journal.open()
    membership: Any = SimpleNamespace(
        credentials=SimpleNamespace(nick="node1"),
        host="127.0.0.1",
        publish=print,
        members=lambda: [],
        records=lambda prefix: [],
        problems={},
    )
    anything: Any = SimpleNamespace(mesh_id=b"m" * 32)
    service = JobService(
        Identity.generate(),
        anything,
        membership,
        journal,
        Store(tmp_path / "store", lambda sealed: sealed),  # type: ignore[arg-type]
        {},
        anything,
        anything,
        tmp_path / "jobs",
        JobLogs(tmp_path / "logs"),
        alone(tmp_path / "environments", "", 0),
        lambda place: 0,
    )
    yield service
    await service.close()
    await journal.close()


def fill(jobs: JobService) -> None:
    for _ in range(LIMIT):
        jobs._inputs.put_now(lambda at: [])


async def test_submission_fails_at_once_when_the_input_queue_is_full(jobs: JobService) -> None:
    fill(jobs)
    async with asyncio.timeout(WAIT_S):
        problem = await jobs.submit_sealed(JOB, SPEC_BYTES, make_spec())
    assert problem is not None and "too much to do" in problem
    async with asyncio.timeout(WAIT_S):
        assert await jobs.submit_sealed(JOB, SPEC_BYTES, make_spec()), "the failed submission is forgotten"


async def test_cancel_raises_when_the_input_queue_is_full(jobs: JobService) -> None:
    fill(jobs)
    with pytest.raises(Overloaded):
        jobs.cancel(JOB, "ada", ())


async def test_peer_message_is_turned_away_while_half_the_queue_is_taken(jobs: JobService) -> None:
    fill(jobs)
    assert not jobs.deliver(B, encode_message(Cancel(job=JOB, user="ada")))


async def test_few_messages_of_one_peer_wait_at_a_time(jobs: JobService, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message counts by what it costs to handle. None is lost: the sender waits."""
    monkeypatch.setattr(input_queue, "ROOM_S", 0.01)
    reports = encode_message(EventReport(job=JOB, events=(b"sealed",) * MAX_REPORTED))
    for _ in range(OF_PEER // MAX_REPORTED):
        assert await jobs.room_for(B) and jobs.deliver(B, reports)
    assert not await jobs.room_for(B)
    assert await jobs.room_for(C) and jobs.deliver(C, encode_message(Cancel(job=JOB, user="ada")))
    monkeypatch.setattr(input_queue, "ROOM_S", WAIT_S)
    waiting = asyncio.create_task(jobs.room_for(B))
    await asyncio.sleep(0)

    async def work() -> None:
        while True:
            for item in await jobs._inputs.batch():
                item(Instant(1.0, 1))

    working = asyncio.create_task(work())
    assert await waiting and not jobs._inputs._of_peer
    working.cancel()


async def test_full_queue_leaves_other_work_its_turn() -> None:
    queue, done = InputQueue(), list[int]()
    for _ in range(4 * BATCH):
        queue.put_now(lambda at: [])

    async def work() -> None:
        while queue._queue.qsize():
            done.append(len(await queue.batch()))

    working = asyncio.create_task(work())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert sum(done) < 4 * BATCH, "the loop belongs to the worker until nothing waits"
    await working


async def test_report_of_an_attempt_waits_for_room_in_the_queue(jobs: JobService) -> None:
    fill(jobs)
    waiting = asyncio.create_task(jobs.report(JOB, GuestStarted(None)))
    await asyncio.sleep(0)
    assert not waiting.done()
    await jobs._inputs.batch()
    async with asyncio.timeout(WAIT_S):
        await waiting


async def test_timer_fires_again_until_the_queue_has_room(caplog: pytest.LogCaptureFixture) -> None:
    queue, fired = InputQueue(), list[float]()
    for _ in range(LIMIT):
        queue.put_now(lambda at: [])
    queue.set_timer((JOB, "runner", "renew"), 0.0, lambda at: fired.append(at.now) or [])
    async with asyncio.timeout(WAIT_S):
        while "renew" not in caplog.text:
            await asyncio.sleep(0.01)
        while not fired:
            for item in await queue.batch():
                item(Instant(1.0, 1))
    assert fired == [1.0]


async def test_newer_timer_replaces_the_one_with_its_key() -> None:
    queue, fired = InputQueue(), list[str]()
    key = (JOB, "runner", "renew")
    for name in ("older", "newer"):
        queue.set_timer(key, 0.0, lambda at, name=name: fired.append(name) or [])  # type: ignore[misc]
    queue.set_timer((JOB, "runner", "last"), 0.01, lambda at: fired.append("last") or [])
    async with asyncio.timeout(WAIT_S):
        while "last" not in fired:
            for item in await queue.batch():
                item(Instant(1.0, 1))
    assert fired == ["newer", "last"]


async def test_worker_keeps_messages_to_itself_when_the_queue_is_full() -> None:
    queue, order = InputQueue(), list[str]()
    for _ in range(LIMIT):
        queue.put_now(lambda at: order.append("queued") or [])
    queue.put_own(lambda at: order.append("own") or [])
    for item in await queue.batch():
        item(Instant(1.0, 1))
    assert order[0] == "own" and order.count("queued") == BATCH - 1


async def test_start_restores_everything_before_any_job(jobs: JobService, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def noted(name: str, part: Any, method: str) -> None:
        original = getattr(part, method)

        def wrapped(*given: Any) -> Any:
            done.append(name)
            return original(*given)

        monkeypatch.setattr(part, method, wrapped)

    cleared = {"secrets in memory": jobs._secret_files, "environments": jobs._environments}
    restored = {
        "keys": jobs.keyring,
        "keys of secrets": jobs.secrets_keyring,
        "schedules": jobs._save_schedules,
        "replicator": jobs.replicator,
        "archive": jobs.archive,
        "retention": jobs._retention,
        "working directories": jobs.workdirs,
    }
    for name, part in cleared.items():
        noted(name, part, "clear")
    for name, part in restored.items():
        noted(name, part, "restore")
    noted("jobs", jobs, "_restore_records")
    await jobs.restore()
    assert done[-1] == "jobs" and sorted(done[:-1]) == sorted([*cleared, *restored])


async def test_job_with_a_damaged_record_is_not_witnessed_anew(
    jobs: JobService, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def damaged() -> tuple[list[WitnessRecord], dict[bytes, str]]:
        return [], {JOB: "checksum"}

    monkeypatch.setattr(jobs._journal, "witness_records", damaged)
    await jobs.restore()
    assert jobs.participant.forgotten == {JOB}


def record(term: int) -> WitnessRecord:
    return WitnessRecord(
        job=JOB,
        disk=b"d" * 8,
        spec=SPEC_BYTES,
        config=Config(0, 0, (Voter(B, b"d" * 8),)),
        promised=term,
        accepted_term=0,
        record=JobRecord(),
        holder=None,
        cancel_wanted=False,
    )


async def test_promise_is_on_disk_before_it_is_sent(jobs: JobService) -> None:
    """A journal that stands still holds back every message of the batch, and the last record of the batch is kept."""
    sent, goes_on = list[list[int]](), threading.Event()

    async def deliver(to: bytes, body: bytes) -> None:
        with contextlib.closing(sqlite3.connect(jobs._journal.path)) as disk:
            rows = disk.execute("SELECT record FROM witness_records").fetchall()
        sent.append([decode_witness_record(data).promised for (data,) in rows])

    jobs._message_sender = MessageSender(deliver)
    published = list[bytes]()
    jobs.own_status.publish = published.append  # type: ignore[method-assign]
    promise = Directed(JOB, "witness", Send(B, Cancel(job=JOB, user="ada")))
    saves = [Directed(JOB, "witness", SaveWitnessRecord(record(term))) for term in (1, 2)]
    jobs._journal._thread.submit(goes_on.wait, WAIT_S)
    performing = asyncio.create_task(jobs._perform_all([promise, *saves]))
    try:
        for _ in range(100):
            await asyncio.sleep(0)
        assert not sent
    finally:
        goes_on.set()
    async with asyncio.timeout(WAIT_S):
        await performing
        await jobs._message_sender.flush(WAIT_S)
    assert sent == [[2]] and published == [JOB]


async def test_service_ends_without_a_word_when_it_cannot_save(jobs: JobService) -> None:
    """The cores then know what is not on disk, so nothing that follows from it may be sent."""
    sent = list[bytes]()

    async def deliver(to: bytes, body: bytes) -> None:
        sent.append(body)

    jobs._message_sender = MessageSender(deliver)
    jobs._journal._db.execute("PRAGMA max_page_count = 1")  # from now on its disk is full
    promise = Directed(JOB, "witness", Send(B, Cancel(job=JOB, user="ada")))
    large = msgspec.structs.replace(record(1), spec=bytes(1 << 20))
    jobs._inputs.put_now(lambda at: [promise, Directed(JOB, "witness", SaveWitnessRecord(large))])
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(ExceptionGroup) as ended:
            await jobs.run()
        await jobs._message_sender.flush(WAIT_S)
    assert ended.group_contains(JournalError, match="full")
    assert not sent


async def test_view_that_cannot_be_built_ends_nothing_and_reaches_no_core(jobs: JobService) -> None:
    def fail(*given: object) -> Any:
        raise IndexError("of a status that a member published")

    jobs.participant.observe = lambda view, at: pytest.fail("the cores saw it")  # type: ignore[method-assign]
    look, jobs.mesh_view.look = jobs.mesh_view.look, fail  # type: ignore[method-assign]
    for failures in range(1, module.TOLD_AT + 1):
        jobs._look_s = -1.0
        assert jobs._look(Instant(1.0, 1)) == [] and jobs._look_s >= 0, "the next look may take as long"
        assert ("view" in jobs._membership.problems) == (failures == module.TOLD_AT)
    jobs.participant.observe = lambda view, at: []  # type: ignore[method-assign]
    jobs.mesh_view.look = lambda: look.__self__.last  # type: ignore[attr-defined,method-assign]
    assert jobs._look(Instant(2.0, 2)) == [] and not jobs._membership.problems


async def test_step_of_the_upkeep_that_fails_ends_no_other(
    jobs: JobService, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried: list[str] = []

    def failing(name: str, error: Exception) -> Any:
        def step(*given: object) -> None:
            tried.append(name)
            raise error

        return step

    steps = {"tidy": jobs._retention, "_follow_hints": jobs.workdirs, "trim": jobs.logs, "archive_old": jobs.archive}
    for name, part in steps.items():
        monkeypatch.setattr(part, name, failing(name, OSError("the disk is full")))
    await jobs._tidy()
    assert tried == list(steps) and caplog.text.count("the disk is full") == len(steps)
    monkeypatch.setattr(jobs._retention, "tidy", failing("save", JournalError("it cannot write")))
    with pytest.raises(JournalError):
        await jobs._tidy()


async def test_round_of_the_upkeep_removes_the_keys_of_data_that_is_gone(jobs: JobService, tmp_path: Path) -> None:
    await jobs._journal.save_key(CIPHER.realm, CIPHER.key, collected=True)
    await jobs.keyring.restore()
    write_tree(tmp_path / "in", {"weights": b"w"})
    jobs._store.unseal = lambda sealed: (b"signer", sealed)
    saved = save(jobs._store, tmp_path / "in", cipher=CIPHER, seal=lambda payload: payload)
    await jobs._tidy()
    assert set(await jobs._journal.keys()) == {CIPHER.realm}
    jobs._store.forget(saved.id)
    await jobs._tidy()
    assert not await jobs._journal.keys()
    jobs.secrets_keyring._shares[JOB] = ()
    await jobs._tidy()
    assert not jobs.secrets_keyring._shares, "the job was deleted"


async def test_upkeep_goes_on_while_tidying_waits_for_nodes_that_do_not_answer(
    jobs: JobService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "UPKEEP_EVERY_S", 0.01)
    monkeypatch.setattr(module, "TIDY_EVERY_S", 0.02)
    monkeypatch.setattr(Replicator, "budget_bps", 0.0)
    rounds, begun, again = 0, asyncio.Event(), asyncio.Event()

    def look(*given: object) -> None:
        nonlocal rounds
        rounds += begun.is_set()
        if rounds == 3:
            again.set()

    async def tidy(*given: object) -> None:
        assert not begun.is_set(), "one round at a time"
        begun.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(jobs._repair, "look", look)
    monkeypatch.setattr(jobs._retention, "tidy", tidy)
    running = asyncio.create_task(jobs.run())
    async with asyncio.timeout(WAIT_S):
        await asyncio.wait([running, asyncio.create_task(again.wait())], return_when=asyncio.FIRST_COMPLETED)
    assert again.is_set(), running.exception()
    running.cancel()
    await asyncio.wait([running])


class Removed:
    """A stand-in for an attempt; closing it takes no time."""

    job, number = JOB, 1

    async def close(self) -> None:
        pass


@pytest.mark.parametrize("next_began", [False, True])
async def test_end_of_an_attempt_is_not_that_of_the_next_one(jobs: JobService, next_began: bool) -> None:
    over, present = Removed(), Removed()
    said, released = list[object](), list[bytes]()
    jobs.participant.report = lambda job, event, at: said.append(event) or []  # type: ignore[method-assign]
    jobs._inventory = SimpleNamespace(release=released.append)  # type: ignore[assignment]
    jobs.attempts[JOB] = present if next_began else over  # type: ignore[assignment]
    at = Instant(1.0, 1)
    jobs._reported(over, GuestStarted(None), at)  # type: ignore[arg-type]
    assert bool(said) is not next_began
    if not next_began:
        del jobs.attempts[JOB]
    await jobs._clear(JOB, over, "done")  # type: ignore[arg-type]
    assert bool(released) is not next_began, "the next attempt has its place"


async def test_report_of_an_end_that_fails_keeps_no_place(jobs: JobService) -> None:
    released, cleared = list[bytes](), asyncio.Event()
    jobs._inventory = SimpleNamespace(release=released.append)  # type: ignore[assignment]
    jobs._cleared[JOB] = cleared

    def failing(job: bytes, attempt: object, reason: str) -> None:
        raise ValueError("it does not fit")

    jobs._hooks = msgspec.structs.replace(jobs._hooks, attempt_cleared=failing)
    with pytest.raises(ValueError, match="does not fit"):
        await jobs._clear(JOB, Removed(), "done")  # type: ignore[arg-type]
    assert released == [JOB] and cleared.is_set()


async def test_next_attempt_waits_until_the_end_of_the_last_one_is_performed(jobs: JobService) -> None:
    """Regression: an end and the next start in one batch of inputs; the new attempt was ended, and the old guest kept running."""
    jobs._inventory = SimpleNamespace(admit=lambda request: "full", release=lambda job: None)  # type: ignore[assignment]
    jobs.attempts[JOB] = Removed()  # type: ignore[assignment]
    jobs._hooks = msgspec.structs.replace(jobs._hooks, attempt_ended=lambda *ended: None)
    jobs._save_schedules = SimpleNamespace(left=lambda *left: None)  # type: ignore[assignment]
    order = Enlist(JOB, 2, 1, SPEC_BYTES)
    assert jobs._admit(JOB, make_spec(), order) == STILL_ENDING
    jobs._perform(JOB, "member", Directed(JOB, "member", Ended("its runner is gone")))
    assert jobs._admit(JOB, make_spec(), order) == "full"


async def test_attempt_whose_log_cannot_be_written_is_refused(
    jobs: JobService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the error came up in the core, and ended the daemon with all its guests."""
    released = list[bytes]()
    inventory: Any = SimpleNamespace(admit=lambda request: None, advert=lambda: None, release=released.append)
    jobs._inventory, jobs._engines = inventory, {"process": inventory}
    monkeypatch.setattr(module, "engine_for", lambda request, advert: "process")
    (tmp_path / "logs").touch()  # a file in place of the directory fails for root, too
    refusal = jobs._admit(JOB, make_spec(), Enlist(JOB, 2, 1, SPEC_BYTES))
    assert refusal == "cannot write the job's log (Not a directory)" and released == [JOB] and JOB not in jobs.attempts


async def test_place_is_free_while_no_majority_takes_the_release(jobs: JobService) -> None:
    """Regression (simulator seed 1121189): two of three witnesses were lost, and the host's place with them."""
    released = list[bytes]()
    jobs._inventory = SimpleNamespace(release=released.append)  # type: ignore[assignment]
    jobs._hooks = msgspec.structs.replace(jobs._hooks, attempt_ended=lambda *ended: None)
    jobs._save_schedules = SimpleNamespace(left=lambda *left: None)  # type: ignore[assignment]
    jobs.attempts[JOB] = Removed()  # type: ignore[assignment]
    releasing = RunnerWorld()
    releasing.silent = set(releasing.witnesses)
    jobs.participant.runners[JOB] = releasing.runner
    assert jobs.participant.hosted == [JOB]
    for effect in [*releasing.begin(), *releasing.tell(VacateWanted(0.0, "the owner"))]:
        if isinstance(effect, Left):
            jobs._perform(JOB, "runner", Directed(JOB, "runner", effect))
    await asyncio.gather(*jobs._endings)
    assert released == [JOB] and jobs.participant.hosted == []

    staying: Any = SimpleNamespace(staying=frozenset())
    jobs.mesh_view.look = lambda: staying  # type: ignore[method-assign]
    leaving = asyncio.create_task(jobs.hand_over(WAIT_S))
    await asyncio.sleep(0)
    assert not leaving.done(), "a node that leaves waits for a majority to take the release"
    del jobs.participant.runners[JOB]
    jobs._perform(JOB, "runner", Directed(JOB, "runner", Ended("the owner")))
    async with asyncio.timeout(WAIT_S):
        await leaving
    assert released == [JOB]


async def test_notice_stops_copies_to_the_standby(jobs: JobService) -> None:
    """The last checkpoint of the job needs the network more."""
    done: list[object] = []
    jobs.attempts[JOB] = SimpleNamespace(perform=done.append)  # type: ignore[assignment]
    jobs._standby_sync.stop = done.append  # type: ignore[method-assign,assignment]
    notice = Notify("vacate", 30.0, "its owner is back")
    jobs._perform(JOB, "runner", Directed(JOB, "runner", notice))
    assert done == [JOB, notice]
    del jobs.attempts[JOB]


async def test_message_waits_for_what_it_is_judged_by(jobs: JobService, monkeypatch: pytest.MonkeyPatch) -> None:
    """One about an archived job waits for its record, one that asks for something until its witnesses vouch."""
    taken: list[str] = []

    async def archived(*given: object) -> None:
        taken.append("archived")

    async def vouched(*given: object) -> None:
        taken.append("vouched")

    monkeypatch.setattr(jobs, "_deliver_archived", archived)
    monkeypatch.setattr(jobs, "_deliver_vouched", vouched)
    monkeypatch.setattr(jobs, "_needs_vouching", lambda message: True)
    jobs.participant.archived.add(JOB)
    assert jobs.deliver(B, encode_message(Cancel(job=JOB, user="ada")))
    asks = encode_message(Enlist(JOB, 2, 1, SPEC_BYTES))
    assert jobs.deliver(B, asks)
    async with asyncio.timeout(WAIT_S):
        while len(taken) < 2:
            await asyncio.sleep(0)
    assert taken == ["archived", "vouched"]
    jobs.vouching._waiting[B] = 1 << 20
    assert not jobs.deliver(B, asks), "too many wait to be vouched for"


async def test_notice_goes_to_the_named_jobs_alone(jobs: JobService, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[list[bytes]] = []
    jobs.participant.members |= {b"1" * 16: None, b"2" * 16: None}  # type: ignore[dict-item]
    monkeypatch.setattr(jobs.departure_planner, "notices", lambda chosen, *more: told.append(chosen) or {})

    async def ended(*given: object, **more: object) -> None:
        return None

    monkeypatch.setattr(jobs, "_end_all", ended)
    assert await jobs.vacate(1.0, "the owner", [b"2" * 16]) == [b"2" * 16] and told == [[b"2" * 16]]
    assert len(await jobs.vacate(1.0, "the owner")) == 2
    jobs.participant.members.clear()


async def test_node_without_a_vote_asks_before_it_joins(jobs: JobService) -> None:
    me, disk = jobs._me, jobs.participant.disk
    group = Config(0, 0, (Voter(me, disk), Voter(B, b"b")))
    witness = Witness(msgspec.structs.replace(record(1), config=group, disk=disk), make_spec())
    jobs.participant.witnesses[JOB] = witness
    accept = Accept(JOB, 5, 1, Config(2, 5, (Voter(me, disk),)), JobRecord(), None, spec=SPEC_BYTES)
    assert not jobs._needs_vouching(accept), "its own record judges that"
    witness.witness_record = msgspec.structs.replace(witness.witness_record, config=Config(1, 1, (Voter(B, b"b"),)))
    assert jobs._needs_vouching(accept)

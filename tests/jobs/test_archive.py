"""Archive: old jobs leave memory, are found by id, name or prefix, and never restart."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from random import Random

import msgspec
import pytest

from mesh.consensus.effects import Send, WitnessRecord
from mesh.consensus.messages import Accept, Introduce, Refused
from mesh.consensus.participant import GONE, LEAST_BYTES, Directed, Participant, Rules
from mesh.consensus.status import status_of
from mesh.consensus.witness import Witness
from mesh.jobs import archive as past_module
from mesh.jobs.archive import Archive
from mesh.jobs.job_table import OWN, JobTable
from mesh.jobs.status_gossip import ENDED_TOLD_S
from mesh.journal import ArchivedJob, Journal
from mesh.model.record import Attempt, Config, JobRecord, Outcome
from mesh.model.spec import ArrayPlace, JobSpec, format_job
from tests.consensus.worlds import DISK, SPEC_BYTES, A, B, C, at, make_spec, make_witness, voters

NOW = 100 * 86_400.0
LONG_AGO = NOW - 2 * ENDED_TOLD_S
GROUP = Config(number=0, term=0, members=voters(A, B, C))


def number(count: int) -> bytes:
    return count.to_bytes(16)


class Node:
    """The parts of a daemon that handle jobs, on a real journal. Specs are stored by job, because nothing is signed here."""

    def __init__(self, journal: Journal) -> None:
        self.specs: dict[bytes, JobSpec] = {}
        self.job_table = JobTable()
        self.participant = Participant(A, DISK, "node-1", Rules(self.read, lambda *_: None, lambda *_: True), Random(1))
        self.left: list[bytes] = []
        self.journal = journal
        self.archive = Archive(
            journal, self.participant, self.job_table, self.read, self.take_up, self.show, self.left.append
        )

    def read(self, job: bytes, _spec: bytes) -> JobSpec:
        return self.specs[job]

    async def take_up(self, witness_records: Sequence[WitnessRecord]) -> None:
        for witness_record in witness_records:
            self.participant.restore(Witness.restored(witness_record, self.specs[witness_record.job], NOW), at(NOW))

    def show(self, job: bytes) -> None:
        witness = self.participant.witnesses[job]
        self.job_table.update(OWN, job, status_of(job, witness, None, "", "", None))

    async def has(self, job: bytes, ended: float | None = LONG_AGO, **changes: object) -> None:
        """Make the node a witness of this job; `ended` is a Unix time, or None for a running job."""
        self.specs[job] = make_spec(**changes)
        outcome = None if ended is None else Outcome("done", "exit 0", 0, None, (), int(ended * 1000))
        last = int((ended or NOW) * 1000)
        ran = Attempt(
            0, B, "node-2", 1, last - 60_000, last - 60_000, last if ended else 0, last, "done" if ended else ""
        )
        record = JobRecord(version=2, attempts=(ran,), outcome=outcome)
        witness_record = WitnessRecord(
            job, DISK, SPEC_BYTES, GROUP, 1, 1, record, None if ended else B, False, final=ended is not None
        )
        await self.journal.save_witness_records([witness_record])
        await self.take_up([witness_record])
        self.show(job)

    def accept(self, job: bytes, spec: bytes | None) -> list[object]:
        """Return this node's answer to a peer that was away and does not know of the job's end."""
        message = Accept(job=job, term=2, config=GROUP, round=1, record=JobRecord(version=1), holder=C, spec=spec)
        outputs = self.participant.receive(C, message, at(NOW))
        effects = [output.effect for output in outputs if isinstance(output, Directed)]
        return [effect.message for effect in effects if isinstance(effect, Send)]


@pytest.fixture
async def journal(tmp_path: Path) -> AsyncIterator[Journal]:
    journal = Journal(tmp_path / "journal.sqlite")
    await journal.open()
    yield journal
    await journal.close()


@pytest.fixture
def node(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> Node:
    monkeypatch.setattr(past_module, "AT_HAND", 2)
    return Node(journal)


async def test_archive_takes_only_the_oldest_finished_jobs(node: Node) -> None:
    for count in range(6):
        await node.has(number(count), LONG_AGO + count)
    await node.has(number(6), NOW - ENDED_TOLD_S / 2)
    await node.has(number(7), None)
    await node.archive.archive_old({number(1)}, NOW)
    away = {number(0), number(2), number(3), number(4), number(5)}
    assert node.participant.archived == away == set(node.left) and node.archive.count == 5
    assert set(node.job_table.all()) == {number(1), number(6), number(7)} == set(node.participant.witnesses)
    assert node.job_table.ends == {number(count): "done" for count in range(7)}, "dependent jobs still know the outcome"
    witness_records, _ = await node.journal.witness_records()
    assert {witness_record.job for witness_record in witness_records} == {number(1), number(6), number(7)}, (
        "a restart reads only these records"
    )


async def test_archive_of_one_user_is_bounded_and_takes_no_deleted_job_again(
    node: Node, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any user may end any number of jobs; and whoever has the description of one may submit it again."""
    monkeypatch.setattr(past_module, "OF_A_USER_BYTES", 2 * LEAST_BYTES)
    for count in range(5):
        await node.has(number(count), LONG_AGO - count, created_unix_ms=1_000 * (1 + count))
        await journal.save_shares(number(count), [b"a share"])
    await node.has(number(5), LONG_AGO - 10, user="eve", created_unix_ms=1)
    for count in (8, 9):  # the newest, which stay in memory
        await node.has(number(count), NOW)
    await node.archive.archive_old((), NOW)
    kept = {number(3), number(4), number(5)}
    assert node.participant.archived == kept == {job.job for job in await journal.archived()}
    assert {record.job for record in await journal.archived_witness_records(map(number, range(6)))} == kept
    assert await journal.shares() == {number(3): [b"a share"], number(4): [b"a share"]}
    again = Node(journal)
    again.specs = node.specs
    await again.archive.restore()
    for one in (node, again):
        (refusal,) = one.accept(number(2), SPEC_BYTES)
        assert isinstance(refusal, Refused) and refusal.problem == GONE and number(2) not in one.participant.witnesses
        one.specs[number(6)] = make_spec(created_unix_ms=3_001)
        one.accept(number(6), SPEC_BYTES)
        assert number(6) in one.participant.witnesses
        asked = Introduce(job=number(1), spec=SPEC_BYTES)
        (answer,) = one.participant.receive(B, asked, at(NOW))
        assert answer.effect.message.problem == GONE  # type: ignore[union-attr]


async def test_job_in_memory_is_not_deleted_from_the_archive(
    node: Node, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(past_module, "OF_A_USER_BYTES", 2 * LEAST_BYTES)
    for count in range(2):
        await node.has(number(count), created_unix_ms=1_000 + count)
    for count in (8, 9):
        await node.has(number(count), NOW)
    await node.archive.archive_old((), NOW)
    await node.archive.take_out([number(0)])
    for count in (2, 3):
        await node.has(number(count), created_unix_ms=1_000 + count)
    await node.archive.archive_old((), NOW)
    assert node.participant.archived == {number(2), number(3)} and number(0) in node.participant.witnesses
    assert [record.job for record in await journal.archived_witness_records([number(0), number(1)])] == [number(0)]


async def test_archive_leaves_the_newest_jobs_in_memory_whatever_their_age(node: Node) -> None:
    for count in range(2):
        await node.has(number(count))
    await node.archive.archive_old((), NOW)
    assert node.archive.count == 0


async def test_job_whose_end_is_not_certain_stays(node: Node, journal: Journal) -> None:
    for count in range(4):
        await node.has(number(count), LONG_AGO + count)
    witness = node.participant.witnesses[number(0)]
    witness.witness_record = msgspec.structs.replace(witness.witness_record, final=False)
    await node.archive.archive_old((), NOW)
    assert node.participant.archived == {number(1), number(2)}


async def test_false_status_changes_nothing_of_what_is_archived(node: Node, journal: Journal) -> None:
    """Nor does it keep a job in memory: any member can publish one that looks newer."""
    for count in range(4):
        await node.has(number(count), LONG_AGO + count)
    failed = Outcome("failed", "exit 1", 1, None, (), int(NOW * 1000))
    for count, changes in ((0, {"outcome": failed, "user": "eve"}), (1, {"array": ArrayPlace(b"a" * 16, 1, 0, 2, 1)})):
        own = node.job_table.own(number(count))
        assert own is not None
        false = msgspec.structs.replace(own, rank=(1, 2**40, 2**40, 2), **changes)
        node.job_table.update(C, number(count), false)
        assert node.job_table.get(number(count)) == false
    going = msgspec.structs.replace(false, job=number(9), outcome=None, rank=(0, 1, 1, 2))
    node.job_table.update(C, number(9), going)
    await node.archive.archive_old((), NOW)
    kept = {job.job: (job.user, job.kind, job.array) for job in await journal.archived()}
    assert kept == dict.fromkeys((number(0), number(1)), ("ada", "done", None))
    assert node.job_table.ends[number(0)] == "done"


async def test_array_waits_for_each_of_its_jobs(node: Node) -> None:
    array = b"a" * 16
    for place in range(4):
        await node.has(number(place), LONG_AGO, array=ArrayPlace(array, place + 1, place, 4))
    await node.archive.archive_old({number(2)}, NOW)
    assert node.archive.count == 0, "one of them is busy here"
    await node.archive.archive_old((), NOW)
    assert node.archive.count == 4


async def test_job_that_is_asked_for_while_it_is_archived_stays(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    for count in range(3):
        await node.has(number(count), LONG_AGO + count)
    write = node.journal.archive

    async def asked_meanwhile(jobs: list[ArchivedJob]) -> None:
        await write(jobs)
        node.archive._taken_out[number(0)] = 0.0

    monkeypatch.setattr(node.journal, "archive", asked_meanwhile)
    await node.archive.archive_old((), NOW)
    assert number(0) in node.participant.witnesses and not node.left


async def test_job_that_is_recovered_while_it_is_archived_goes_on(
    node: Node, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    for count in range(4):
        await node.has(number(count), LONG_AGO + count)
    write = node.journal.archive

    async def recovered_meanwhile(jobs: list[ArchivedJob]) -> None:
        await write(jobs)
        witness = node.participant.witnesses[number(0)]
        witness.witness_record = msgspec.structs.replace(witness.witness_record, final=False)
        await journal.save_witness_records([witness.witness_record])

    monkeypatch.setattr(node.journal, "archive", recovered_meanwhile)
    await node.archive.archive_old((), NOW)
    assert number(0) in node.participant.witnesses and node.left == [number(1)]
    assert number(0) in {record.job for record in (await journal.witness_records())[0]}, "a start would load it"


async def test_job_that_two_ask_for_is_loaded_once(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    for count in range(3):
        await node.has(number(count), LONG_AGO + count)
    await node.archive.archive_old((), NOW)
    loaded: list[list[bytes]] = []
    take_up = node.archive._restore_records

    async def slowly(records: Sequence[WitnessRecord]) -> None:
        await asyncio.sleep(0)
        loaded.append([record.job for record in records])
        await take_up(records)

    monkeypatch.setattr(node.archive, "_restore_records", slowly)
    await asyncio.gather(*(node.archive.take_out([number(0)]) for _ in range(3)))
    assert [jobs for jobs in loaded if jobs] == [[number(0)]]


async def test_array_is_archived_as_a_whole_once_every_job_is_over(node: Node) -> None:
    array = b"a" * 16
    for place in range(4):
        ended = None if place == 3 else LONG_AGO
        await node.has(number(place), ended, array=ArrayPlace(array, place + 1, place, 4, limit=2), name="my_sweep")
    await node.archive.archive_old((), NOW)
    assert node.archive.count == 0
    await node.has(number(3), LONG_AGO, array=ArrayPlace(array, 4, 3, 4, limit=2), name="my_sweep")
    await node.archive.archive_old((), NOW)
    assert node.archive.count == 4 and node.job_table.array_ends == {("ada", array): 0b1111}
    for text in ("my_sweep_2", "my_sweep_2-3", f"{format_job(array)[:6]}_2"):
        node.archive._taken_out.clear()
        await node.archive.archive_old((), NOW)
        assert node.archive.count == 4
        await node.archive.find(text, whole=False)
        assert node.archive.count == 0, f"{text} brings the whole array"


async def test_archived_job_is_found_by_id_name_and_prefix(node: Node) -> None:
    for count, name in enumerate(("sweep", "sweep", "sweeper", "train")):
        await node.has(number(count), LONG_AGO + count, name=name)
    for count in (8, 9):
        await node.has(number(count), NOW)
    first, second, third, fourth = (number(count) for count in range(4))
    for text, whole, found in (
        (format_job(first), False, {first}),
        ("sweep", False, {second}),
        ("swee", False, {second, third}),
        ("swee", True, set()),
        (format_job(first), True, {first}),
        (format_job(first)[:25], True, set()),
        (format_job(first)[:25], False, {first, second, third, fourth}),
        ("train", True, {fourth}),
        ("%", False, set()),
        ("", False, set()),
        ("\udcff", False, set()),
    ):
        await node.archive.archive_old((), NOW)
        node.archive._taken_out.clear()
        await node.archive.archive_old((), NOW)
        assert node.archive.count == 4
        await node.archive.find(text, whole)
        out = {first, second, third, fourth} - node.participant.archived
        assert out == found, text
        assert all(node.job_table.get(job) is not None for job in out)


async def test_requested_job_stays_in_memory_for_a_while(node: Node) -> None:
    for count in range(4):
        await node.has(number(count))
    await node.archive.archive_old((), NOW)
    assert node.archive.count == 2
    (gone, *_) = node.participant.archived
    await node.archive.take_out([gone, b"nobody's" * 2])
    await node.archive.archive_old((), NOW)
    assert gone in node.participant.witnesses


async def test_requested_job_leaves_again_later(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    for count in range(3):
        await node.has(number(count), LONG_AGO + count)
    await node.archive.archive_old((), NOW)
    clock = 1000.0
    monkeypatch.setattr(past_module.time, "monotonic", lambda: clock)
    await node.archive.take_out([number(0)])
    for passed, count in ((past_module.TAKEN_OUT_S - 1, 0), (1.0, 1)):
        clock += passed
        await node.archive.archive_old({number(1), number(2)}, NOW)
        assert node.archive.count == count
    assert node.participant.archived == {number(0)} and not node.archive._taken_out


async def test_status_is_current_until_the_end_of_the_job_has_been_told(node: Node) -> None:
    running, fresh, told, untold, doubtful = (number(count) for count in range(5))
    await node.has(running, None)
    await node.has(fresh, NOW - ENDED_TOLD_S)
    for job in (told, untold, doubtful):
        await node.has(job, NOW - ENDED_TOLD_S - 1)
    node.job_table.update(OWN, untold, None)
    witness = node.participant.witnesses[doubtful]
    witness.witness_record = msgspec.structs.replace(witness.witness_record, final=False)
    assert set(node.archive.current(NOW)) == {running, fresh, untold, doubtful}


async def test_end_in_an_array_with_a_limit_is_current_while_the_array_goes_on(node: Node) -> None:
    places = [ArrayPlace(b"a" * 16, index=place, place=place, of=4, limit=1) for place in range(4)]
    for place in places[:3]:
        await node.has(number(place.place), LONG_AGO, array=place)
    going = status_of(number(3), make_witness(spec=make_spec(array=places[3])), None, "running", "", None)
    over = msgspec.structs.replace(going, rank=(1, 2**40, 0, 0), outcome=Outcome("done", "", 0, None, (), 0))
    node.job_table.update(B, number(3), going)
    node.job_table.update(C, number(3), over)
    await node.archive.archive_old((), NOW)
    assert set(node.archive.current(NOW)) == {number(0), number(1), number(2)}, "the end of the last may be a lie"
    node.job_table.update(B, number(3), None)
    assert not set(node.archive.current(NOW))
    node.job_table.update(C, number(3), None)
    await node.archive.archive_old((), NOW)
    assert node.archive.count == 3


async def test_archived_job_is_refused_with_its_outcome_and_never_restarted(node: Node) -> None:
    for count in range(3):
        await node.has(number(count), LONG_AGO + count)
    await node.archive.archive_old((), NOW)
    job = number(0)
    (refused,) = node.accept(job, None)
    assert isinstance(refused, Refused) and refused.disk == b"", "without a record this disk is no voter"
    assert node.accept(job, SPEC_BYTES) == [] and job not in node.participant.witnesses
    await node.archive.take_out([job])
    (told,) = node.accept(job, SPEC_BYTES)
    assert isinstance(told, Refused) and told.finished and told.record is not None
    assert told.record.outcome is not None and told.record.outcome.kind == "done"


async def test_archive_survives_a_restart_with_outcomes_and_usage(node: Node, journal: Journal) -> None:
    for count in range(3):
        await node.has(number(count), LONG_AGO + count)
    used = node.job_table.usage(NOW)
    await node.archive.archive_old((), NOW)
    assert node.archive.count == 1 and node.job_table.usage(NOW) == used, "the recorded usage is unchanged"
    await node.archive.take_out([number(0)])
    assert node.job_table.usage(NOW) == used, "the usage is counted once"
    later = Node(journal)
    later.specs = node.specs
    await later.archive.restore()
    assert later.participant.archived == {number(0)} and later.job_table.ends == {number(0): "done"}
    assert sum(later.job_table.usage(NOW).values()) * 3 == sum(used.values())
    (status,) = await later.archive.ended_since(int((LONG_AGO - 1) * 1000))
    assert status.outcome is not None and status.state == "done" and later.archive.count == 1
    assert await later.archive.ended_since(int(NOW * 1000)) == []


async def test_damaged_archived_record_counts_as_missing(node: Node, journal: Journal) -> None:
    for count in range(3):
        await node.has(number(count), LONG_AGO + count)
    await node.archive.archive_old((), NOW)
    await journal._do(
        lambda: journal._db.execute("UPDATE witness_records SET record = x'c1' WHERE job = ?", [number(0)])
    )
    await node.archive.take_out([number(0)])
    assert node.participant.archived == {number(0)}
    assert node.accept(number(0), SPEC_BYTES) == [] and number(0) not in node.participant.witnesses

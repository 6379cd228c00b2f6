"""Jobs that have long been over: out of memory, found again by whatever names them, and never begun anew."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from random import Random

import pytest

from mesh.jobs import past as past_module
from mesh.jobs.board import OWN, Board
from mesh.jobs.effects import Cell, Send
from mesh.jobs.herald import ENDED_TOLD_S
from mesh.jobs.journal import Journal
from mesh.jobs.ledger import Attempt, Config, Ledger, Outcome
from mesh.jobs.messages import Accept, Refused
from mesh.jobs.participant import Directed, Participant, Rules
from mesh.jobs.past import Past
from mesh.jobs.spec import ArrayPlace, JobSpec, format_job
from mesh.jobs.status import status_of
from mesh.jobs.witness import Witness
from tests.jobs.worlds import DISK, SPEC_BYTES, A, B, C, at, make_spec, seats

NOW = 100 * 86_400.0
LONG_AGO = NOW - 2 * ENDED_TOLD_S
GROUP = Config(number=0, term=0, members=seats(A, B, C))


def number(count: int) -> bytes:
    return count.to_bytes(16)


class Node:
    """The parts of a daemon that remember jobs, on a real journal; specs by job, since nothing is signed here."""

    def __init__(self, journal: Journal) -> None:
        self.specs: dict[bytes, JobSpec] = {}
        self.board = Board()
        self.participant = Participant(A, DISK, "node-1", Rules(self.read, lambda *_: None, lambda *_: True), Random(1))
        self.left: list[bytes] = []
        self.journal = journal
        self.past = Past(journal, self.participant, self.board, self.read, self.take_up, self.show, self.left.append)

    def read(self, job: bytes, _spec: bytes) -> JobSpec:
        return self.specs[job]

    async def take_up(self, cells: Sequence[Cell]) -> None:
        for cell in cells:
            self.participant.restore(Witness.restored(cell, self.specs[cell.job], NOW), at(NOW))

    def show(self, job: bytes) -> None:
        witness = self.participant.witnesses[job]
        self.board.tell(OWN, job, status_of(job, witness, None, "", "", None))

    async def has(self, job: bytes, ended: float | None = LONG_AGO, **changes: object) -> None:
        """It is a witness of this one; `ended`: Unix time, None if it goes on."""
        self.specs[job] = make_spec(**changes)
        outcome = None if ended is None else Outcome("done", "exit 0", 0, None, (), int(ended * 1000))
        last = int((ended or NOW) * 1000)
        ran = Attempt(
            0, B, "node-2", 1, last - 60_000, last - 60_000, last if ended else 0, last, "done" if ended else ""
        )
        ledger = Ledger(version=2, attempts=(ran,), outcome=outcome)
        cell = Cell(job, DISK, SPEC_BYTES, GROUP, 1, 1, ledger, None if ended else B, False, final=ended is not None)
        await self.journal.save_cells([cell])
        await self.take_up([cell])
        self.show(job)

    def accept(self, job: bytes, spec: bytes | None) -> list[object]:
        """What this node answers to somebody who was away meanwhile, and knows of no end."""
        message = Accept(job=job, term=2, config=GROUP, round=1, ledger=Ledger(version=1), holder=C, spec=spec)
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


async def test_the_oldest_of_many_are_put_away_and_nothing_else(node: Node) -> None:
    for count in range(6):
        await node.has(number(count), LONG_AGO + count)
    await node.has(number(6), NOW - ENDED_TOLD_S / 2)
    await node.has(number(7), None)
    await node.past.put_away({number(1)}, NOW)
    away = {number(0), number(2), number(3), number(4), number(5)}
    assert node.participant.away == away == set(node.left) and node.past.count == 5
    assert set(node.board.all()) == {number(1), number(6), number(7)} == set(node.participant.witnesses)
    assert node.board.ends == {number(count): "done" for count in range(7)}, "who waits for it knows that it is over"
    cells, _ = await node.journal.cells()
    assert {cell.job for cell in cells} == {number(1), number(6), number(7)}, "a start reads no more than that"


async def test_as_many_as_are_kept_at_hand_stay_however_old(node: Node) -> None:
    for count in range(2):
        await node.has(number(count))
    await node.past.put_away((), NOW)
    assert node.past.count == 0


async def test_an_array_goes_as_a_whole_when_all_of_it_is_over(node: Node) -> None:
    array = b"a" * 16
    for place in range(4):
        ended = None if place == 3 else LONG_AGO
        await node.has(number(place), ended, array=ArrayPlace(array, place + 1, place, 4))
    await node.past.put_away((), NOW)
    assert node.past.count == 0
    await node.has(number(3), LONG_AGO, array=ArrayPlace(array, 4, 3, 4))
    await node.past.put_away((), NOW)
    assert node.past.count == 4 and node.board.array_ends == {array: {0, 1, 2, 3}}
    await node.past.find(f"{format_job(array)[:6]}_2", whole=False)
    assert node.past.count == 0, "an index counts among all"


async def test_it_is_found_by_its_id_its_name_and_the_beginning_of_either(node: Node) -> None:
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
        ("train", True, {fourth}),
        ("%", False, set()),
        ("", False, set()),
        ("\udcff", False, set()),
    ):
        await node.past.put_away((), NOW)
        node.past._taken_out.clear()
        await node.past.put_away((), NOW)
        assert node.past.count == 4
        await node.past.find(text, whole)
        out = {first, second, third, fourth} - node.participant.away
        assert out == found, text
        assert all(node.board.get(job) is not None for job in out)


async def test_what_was_asked_for_stays_for_a_while(node: Node) -> None:
    for count in range(4):
        await node.has(number(count))
    await node.past.put_away((), NOW)
    assert node.past.count == 2
    (gone, *_) = node.participant.away
    await node.past.take_out([gone, b"nobody's" * 2])
    await node.past.put_away((), NOW)
    assert gone in node.participant.witnesses


async def test_who_missed_its_end_is_told_of_it_and_cannot_begin_it_anew(node: Node) -> None:
    for count in range(3):
        await node.has(number(count), LONG_AGO + count)
    await node.past.put_away((), NOW)
    job = number(0)
    (refused,) = node.accept(job, None)
    assert isinstance(refused, Refused) and refused.disk == b"", "without its record this disk has no seat"
    assert node.accept(job, SPEC_BYTES) == [] and job not in node.participant.witnesses
    answers: list[object] = []
    node.past.at_hand(job, lambda: answers.extend(node.accept(job, SPEC_BYTES)))
    while not answers:
        await next(iter(node.past._chores._tasks))
    (told,) = answers
    assert isinstance(told, Refused) and told.finished and told.ledger is not None
    assert told.ledger.outcome is not None and told.ledger.outcome.kind == "done"


async def test_after_a_restart_it_is_away_still_and_its_end_is_known(node: Node, journal: Journal) -> None:
    for count in range(3):
        await node.has(number(count), LONG_AGO + count)
    used = node.board.usage(NOW)
    await node.past.put_away((), NOW)
    assert node.past.count == 1 and node.board.usage(NOW) == used, "what was used counts as before"
    await node.past.take_out([number(0)])
    assert node.board.usage(NOW) == used, "once"
    later = Node(journal)
    later.specs = node.specs
    await later.past.restore()
    assert later.participant.away == {number(0)} and later.board.ends == {number(0): "done"}
    assert sum(later.board.usage(NOW).values()) * 3 == sum(used.values())
    (status,) = await later.past.ended_since(int((LONG_AGO - 1) * 1000))
    assert status.outcome is not None and status.state == "done" and later.past.count == 1
    assert await later.past.ended_since(int(NOW * 1000)) == []


async def test_a_damaged_record_is_as_good_as_none(node: Node, journal: Journal) -> None:
    for count in range(3):
        await node.has(number(count), LONG_AGO + count)
    await node.past.put_away((), NOW)
    await journal._do(lambda: journal._db.execute("UPDATE cells SET cell = x'c1' WHERE job = ?", [number(0)]))
    await node.past.take_out([number(0)])
    assert node.participant.away == {number(0)}
    assert node.accept(number(0), SPEC_BYTES) == [] and number(0) not in node.participant.witnesses

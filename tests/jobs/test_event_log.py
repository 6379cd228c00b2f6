"""Event log: events are signed, chained, kept by witnesses and merged; forged events are refused."""

import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from membership.envelope import open_envelope, seal
from membership.identity import Identity
from membership.trust import TrustStore, found_mesh
from mesh.consensus.messages import EventReport, MessageError, decode_message, encode_message
from mesh.jobs import event_log
from mesh.jobs.event_log import EventLog
from mesh.journal import Journal
from mesh.model.events import (
    Event,
    EventError,
    Kind,
    decode_event,
    describe,
    encode_event,
)
from mesh.model.record import Attempt, JobRecord
from placement.advert import MAX_WEIGHT
from placement.decision import MOST_PASSED, NAMED, RULE, Decision
from tests.chains import admitted
from tests.consensus.worlds import JOB, A, make_witness


def lab(first: int) -> tuple[list[Identity], TrustStore]:
    """Two members of a mesh and their credentials."""
    now = time.time() - 60
    founder, member = (Identity(bytes([number]) * 32) for number in (first, first + 1))
    genesis, chain = found_mesh(founder, "lab", "root", "ada", now)
    trust = TrustStore(genesis)
    trust.admit_chain(chain, now)
    trust.admit_chain(admitted(founder, genesis, chain, member.node_id, "desk", "ada", now), now)
    return [founder, member], trust


class Node:
    def __init__(self, identity: Identity, trust: TrustStore, journal: Journal) -> None:
        self.identity, self.trust, self.journal = identity, trust, journal
        self.event_log = EventLog(identity, trust, journal)

    def told(self) -> list[EventReport]:
        return [told for _, told in self.event_log.unreported()]

    def take(self, sender: "Node", message: EventReport, **changes: object) -> int:
        """Take in a report of the node that holds the job's lease; return how many events are refused."""
        witness = make_witness()
        known = msgspec.structs.replace(witness.witness_record, **{"holder": sender.identity.node_id, **changes})
        return self.event_log.on_report(sender.identity.node_id, message, known, witness.spec)

    async def kept(self) -> list[bytes]:
        return [sealed for _, sealed in await self.journal.events(JOB, 0)]


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[list[Node]]:
    """Return a runner, a witness, and a node of another mesh."""
    (runner, witness), trust = lab(1)
    (stranger, _), other = lab(3)
    made = []
    for number, (identity, store) in enumerate([(runner, trust), (witness, trust), (stranger, other)]):
        journal = Journal(tmp_path / f"{number}.sqlite")
        await journal.open()
        made.append(Node(identity, store, journal))
    yield made
    for node in made:
        await node.journal.close()


async def test_events_are_kept_in_order_by_their_node_and_by_witnesses(nodes: list[Node]) -> None:
    runner, witness, _ = nodes
    runner.event_log.add(JOB, "state", new="running", attempt=0)
    runner.event_log.add(JOB, "checkpoint", "on 2 other nodes", number=1, step=10)
    (told,) = runner.told()
    assert runner.told() == [], "each event is reported once"
    assert witness.take(runner, told) == 0 == witness.take(runner, told)
    assert await witness.kept() == await runner.kept() == list(told.events)
    rows = witness.event_log.merge(JOB, [await witness.kept(), await runner.kept()])
    assert [(actor, event.kind, gap) for actor, event, gap in rows] == [
        (runner.identity.node_id, "state", False),
        (runner.identity.node_id, "checkpoint", False),
    ]
    assert rows[0][1].seq < rows[1][1].seq


async def test_last_events_of_a_bounded_number_of_jobs_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Notes come after the end of a job, too: of its files, or of the place that it had."""
    monkeypatch.setattr(event_log, "REMEMBERED", 8)
    identities, trust = lab(1)
    journal: Any = SimpleNamespace(record_event=lambda *given: None)
    log = EventLog(identities[0], trust, journal)
    first = log.add(JOB, "state")
    for number in range(7):
        log.add(number.to_bytes(16), "state")
    following = log.add(JOB, "state")
    assert following.previous and following.seq > first.seq and len(log._last) == 8
    for number in range(8):
        log.add(number.to_bytes(16), "state")
    assert not log.add(JOB, "state").previous and len(log._last) == 8


async def test_numbers_of_events_grow_over_restarts_and_when_the_clock_is_set_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    identities, trust = lab(1)
    journal: Any = SimpleNamespace(record_event=lambda *given: None)
    numbers = []
    for moments in ((5_000, 5_000, 4_000), (6_000,)):
        log = EventLog(identities[0], trust, journal)
        for unix_ms in moments:
            clock = SimpleNamespace(time=time.time, time_ns=lambda unix_ms=unix_ms: unix_ms * 1_000_000)
            monkeypatch.setattr(event_log, "time", clock)
            event = log.add(JOB, "state")
            numbers.append(event.seq)
            assert event.unix_ms == unix_ms
        assert log.counts == {"state": len(moments)}
    assert numbers == [5_000, 5_001, 5_002, 6_000]


async def test_merge_marks_missing_events(nodes: list[Node]) -> None:
    runner = nodes[0].event_log
    for state in ("starting", "running", "done"):
        runner.add(JOB, "state", new=state)
    first, _, last = await nodes[0].kept()
    assert [gap for *_, gap in runner.merge(JOB, [[first], [last]])] == [False, True]
    assert [gap for *_, gap in runner.merge(JOB, [[b"broken"], [first, b"", last]])] == [False, True]
    assert runner.merge(JOB, [[b"broken"]]) == []
    assert runner.merge(A[:16], [[first, last]]) == [], "a witness passes on events of another job"


async def test_events_of_strangers_and_of_other_jobs_are_refused(nodes: list[Node]) -> None:
    runner, witness, stranger = nodes
    stranger.event_log.add(JOB, "end", new="done")
    (foreign,) = stranger.told()
    assert witness.take(stranger, foreign) == 1
    runner.event_log.add(b"other job 16 byt", "end", new="done")
    (misplaced,) = runner.told()
    assert witness.take(runner, EventReport(job=JOB, events=misplaced.events)) == 1
    forged = bytearray(misplaced.events[0])
    forged[-1] ^= 1
    broken = EventReport(job=b"other job 16 byt", events=(bytes(forged), b"", b"x" * 9999))
    assert witness.take(runner, broken) == 3
    assert await witness.kept() == [] == await witness.journal.events(b"other job 16 byt", 0)


async def test_member_that_takes_no_part_reports_nothing(nodes: list[Node]) -> None:
    runner, witness, _ = nodes
    runner.event_log.add(JOB, "end", new="failed")
    (told,) = runner.told()
    assert witness.take(runner, told, holder=None) == 1 and await witness.kept() == []
    past = JobRecord(1, attempts=(Attempt(0, runner.identity.node_id, "desk", 1, 0, reason="vacated"),))
    assert witness.take(runner, told, holder=None, record=past) == 0, "it has run the job"


async def test_events_of_another_writer_are_refused(nodes: list[Node]) -> None:
    """The holder of the lease brings no events in the name of another member, genuine as they may be."""
    runner, witness, _ = nodes
    witness.event_log.add(JOB, "order", new="cancel")
    (others,) = witness.told()
    before = await witness.kept()
    assert runner.take(witness, others) == 0
    assert witness.take(runner, others) == 1 and await witness.kept() == before


async def test_events_beyond_the_limit_are_refused(nodes: list[Node]) -> None:
    runner, witness, _ = nodes
    for _ in range(67):
        runner.event_log.add(JOB, "state", "why " * 999)
    first, second = runner.told()
    assert len(first.events) == 64 and len(second.events) == 3
    assert decode_message(encode_message(first)) == first and witness.take(runner, first) == 0
    with pytest.raises(MessageError):
        decode_message(encode_message(EventReport(job=JOB, events=first.events + second.events)))
    assert len(await witness.kept()) == 64
    assert all(len(event.reason) == 300 for _, event, _ in witness.event_log.merge(JOB, [first.events]))


async def test_every_event_that_is_written_can_be_read(nodes: list[Node]) -> None:
    runner, witness, _ = nodes
    number = 2**53 - 1
    some = tuple(bytes([place]) * 32 for place in range(MOST_PASSED))
    order = tuple((node, number, MAX_WEIGHT) for node in some[:NAMED])
    decision = Decision(RULE, JOB, number, b"h" * 16, order, some, some)
    for text in ("é", "\ud800", "\U0001f600", "long " * 99):
        runner.event_log.add(
            JOB, "decision", text * 400, attempt=number, number=number, step=number, target=A, decision=decision
        )
    (told,) = runner.told()
    assert decode_message(encode_message(told)) == told and witness.take(runner, told) == 0
    assert all(event.reason for _, event, _ in witness.event_log.merge(JOB, [told.events]))


async def test_event_longer_than_any_of_ours_is_refused(nodes: list[Node]) -> None:
    runner, witness, _ = nodes
    runner.event_log.add(JOB, "state", new="running")
    event = decode_event(open_envelope(runner.told()[0].events[0], runner.trust.mesh_id, "event")[1])

    def padded(size: int) -> bytes:
        fields = encode_event(msgspec.structs.replace(event, new="x" * size))
        return seal(runner.identity, runner.trust.mesh_id, "event", fields)

    most = 1000 + 2048 - len(padded(1000))
    for size, length in ((most, 2048), (most + 1, 2049)):
        assert len(padded(size)) == length
        assert witness.take(runner, EventReport(job=JOB, events=(padded(size),))) == (length > 2048)


async def test_event_with_a_number_that_no_journal_keeps_is_refused(nodes: list[Node]) -> None:
    """One made the save fail that carries the notes of a witness, and so ended its daemon."""
    runner, witness, _ = nodes
    for number, refused in ((1 << 53, 1), (1 << 63, 1), (-1, 1), ((1 << 53) - 1, 0)):
        sealed = seal(runner.identity, runner.trust.mesh_id, "event", encode_event(Event(JOB, number, 0, "state")))
        assert witness.take(runner, EventReport(job=JOB, events=(sealed,))) == refused
    assert len(await witness.kept()) == 1


@given(st.binary(max_size=300))
def test_any_bytes_decode_to_an_event_or_an_error(data: bytes) -> None:
    try:
        assert isinstance(decode_event(data), Event)
    except EventError as error:
        assert "not an event" in str(error)


KINDS: list[Kind] = ["submitted", "order", "state", "checkpoint", "attempt", "end", "node"]


@given(st.sampled_from(KINDS), st.text(max_size=20), st.text(max_size=20), st.none() | st.integers(0, 99))
def test_every_event_is_encoded_and_described(kind: Kind, reason: str, new: str, number: int | None) -> None:
    event = Event(JOB, 1, 2, kind, b"p", reason=reason, new=new, number=number, step=number)
    assert decode_event(encode_event(event)) == event and (reason in describe(event) or reason == new)


def test_envelope_of_another_kind_is_not_an_event() -> None:
    (identity, _), trust = lab(1)
    payload = encode_event(Event(JOB, 1, 2, "state"))
    with pytest.raises(EventError):
        EventLog(identity, trust, Journal(Path("unused"))).open(seal(identity, trust.mesh_id, "record", payload))

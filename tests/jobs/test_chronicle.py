"""Events: signed, chained, kept by witnesses, and merged from what several of them have; whoever lies is not believed."""

import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from membership.envelope import seal
from membership.identity import Identity
from membership.trust import TrustStore, accept_invite, found_mesh, make_invite, parse_invite
from mesh.jobs.chronicle import Chronicle
from mesh.jobs.events import MAX_TOLD, REASON_CHARS, Event, EventError, Kind, decode_event, encode_event, words
from mesh.jobs.journal import Journal
from mesh.jobs.messages import Told
from tests.jobs.worlds import JOB


def lab(first: int) -> tuple[list[Identity], TrustStore]:
    """Two members of a mesh, and what they know of it."""
    now = time.time() - 60
    founder, member = (Identity(bytes([number]) * 32) for number in (first, first + 1))
    genesis, chain = found_mesh(founder, "lab", "root", "ada", now)
    trust = TrustStore(genesis)
    trust.admit_chain(chain, now)
    invite = parse_invite(make_invite(founder, chain, genesis, (), 3600, now), now)
    trust.admit_chain(accept_invite(invite, member.node_id, "desk", "ada", now), now)
    return [founder, member], trust


class Node:
    def __init__(self, identity: Identity, trust: TrustStore, journal: Journal) -> None:
        self.identity, self.trust, self.journal = identity, trust, journal
        self.chronicle = Chronicle(identity, trust, journal)

    def told(self) -> list[Told]:
        return [told for _, told in self.chronicle.untold()]

    async def kept(self) -> list[bytes]:
        return [sealed for _, sealed in await self.journal.events(JOB, 0)]


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[list[Node]]:
    """A runner, a witness, and a stranger to their mesh."""
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


async def test_what_is_said_is_kept_in_order_by_who_said_it_and_by_who_was_told(nodes: list[Node]) -> None:
    runner, witness, _ = nodes
    runner.chronicle.say(JOB, "state", new="running", attempt=0)
    runner.chronicle.say(JOB, "checkpoint", "on 2 other nodes", number=1, step=10)
    (told,) = runner.told()
    assert runner.told() == [], "once"
    assert witness.chronicle.take(told) == 0 == witness.chronicle.take(told)
    assert await witness.kept() == await runner.kept() == list(told.events)
    rows = witness.chronicle.merge([await witness.kept(), await runner.kept()])
    assert [(actor, event.kind, gap) for actor, event, gap in rows] == [
        (runner.identity.node_id, "state", False),
        (runner.identity.node_id, "checkpoint", False),
    ]
    assert rows[0][1].seq < rows[1][1].seq


async def test_what_is_missing_shows(nodes: list[Node]) -> None:
    runner = nodes[0].chronicle
    for state in ("starting", "running", "done"):
        runner.say(JOB, "state", new=state)
    first, _, last = await nodes[0].kept()
    assert [gap for *_, gap in runner.merge([[first], [last]])] == [False, True]


async def test_nobody_speaks_for_another_or_of_another_job(nodes: list[Node]) -> None:
    runner, witness, stranger = nodes
    stranger.chronicle.say(JOB, "end", new="done")
    (foreign,) = stranger.told()
    assert witness.chronicle.take(foreign) == 1
    runner.chronicle.say(b"other job 16 byt", "end", new="done")
    (misplaced,) = runner.told()
    assert witness.chronicle.take(Told(job=JOB, events=misplaced.events)) == 1
    forged = bytearray(misplaced.events[0])
    forged[-1] ^= 1
    assert witness.chronicle.take(Told(job=b"other job 16 byt", events=(bytes(forged), b"", b"x" * 9999))) == 3
    assert await witness.kept() == []


async def test_a_flood_is_cut_off(nodes: list[Node]) -> None:
    runner, witness, _ = nodes
    for _ in range(MAX_TOLD + 3):
        runner.chronicle.say(JOB, "state", "why " * 999)
    first, second = runner.told()
    assert len(first.events) == MAX_TOLD and len(second.events) == 3
    assert witness.chronicle.take(Told(job=JOB, events=first.events + second.events)) == 3
    assert all(len(event.reason) == REASON_CHARS for _, event, _ in witness.chronicle.merge([first.events]))


@given(st.binary(max_size=300))
def test_any_bytes_are_an_event_or_an_error_in_words(data: bytes) -> None:
    try:
        assert isinstance(decode_event(data), Event)
    except EventError as error:
        assert "not an event" in str(error)


KINDS: list[Kind] = ["submitted", "order", "state", "checkpoint", "attempt", "end", "node"]


@given(st.sampled_from(KINDS), st.text(max_size=20), st.text(max_size=20), st.none() | st.integers(0, 99))
def test_every_event_travels_and_reads(kind: Kind, reason: str, new: str, number: int | None) -> None:
    event = Event(JOB, 1, 2, kind, b"p", reason=reason, new=new, number=number, step=number)
    assert decode_event(encode_event(event)) == event and (reason in words(event) or reason == new)


def test_a_seal_for_something_else_is_no_event() -> None:
    (identity, _), trust = lab(1)
    payload = encode_event(Event(JOB, 1, 2, "state"))
    with pytest.raises(EventError):
        Chronicle(identity, trust, Journal(Path("unused"))).open(seal(identity, trust.mesh_id, "record", payload))

"""Lengths: every field from another node is bounded, and every text of this one is short enough for the others."""

from collections.abc import Iterator
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect

from membership.lengths import MOST_ID, MOST_LISTED, MOST_TEXT, SAID, shortened
from mesh.checkpoints.key_shares import Held, Share
from mesh.consensus.disk_age import DiskAge
from mesh.consensus.effects import Effect, Send, WitnessRecord, decode_witness_record
from mesh.consensus.forced_reconfiguration import ForcedReconfiguration
from mesh.consensus.gang import Gang, GangMember
from mesh.consensus.messages import (
    MAX_MESSAGE_BYTES,
    AnyMessage,
    Enlist,
    MessageError,
    decode_message,
    encode_message,
)
from mesh.consensus.reports import CheckpointFound, CheckpointStored, GuestFailed, GuestStarted, Recopied, ResultStored
from mesh.consensus.status import JobStatus, decode_status, encode_status, status_of
from mesh.consensus.submission_retry import HeldSubmissions, PendingSubmission
from mesh.jobs.authority import Warrant
from mesh.jobs.log_times import LogPiece
from mesh.model.events import Event
from mesh.model.record import Attempt, JobRecord, Outcome
from mesh.model.spec import SpecError, decode_spec, encode_spec
from tests.consensus.worlds import JOB, SPEC_BYTES, A, B, RunnerWorld, at, make_spec, make_witness
from tests.versions.vectors import sample

FROM_PEERS: dict[str, Any] = {
    "message": AnyMessage,
    **{
        kind.__name__: kind
        for kind in (WitnessRecord, JobStatus, Event, ForcedReconfiguration, PendingSubmission, HeldSubmissions)
    },
    **{kind.__name__: kind for kind in (DiskAge, Warrant, Share, Held, LogPiece)},
}
LONG = "an endless tale \ud800 of wörds " * 9999
MANY = tuple(number.to_bytes(32) for number in range(MOST_LISTED + 1))


def unbounded(info: Any, path: str = "") -> Iterator[str]:
    """Yield the fields within a type that may have any length."""
    match info:
        case inspect.StructType():
            for field in info.fields:
                yield from unbounded(field.type, f"{path}.{field.name}")
        case inspect.UnionType():
            for one in info.types:
                yield from unbounded(one, f"{path}:{getattr(one, 'tag', None) or ''}")
        case inspect.TupleType():
            for one in info.item_types:
                yield from unbounded(one, path)
        case inspect.StrType() | inspect.BytesType():
            yield from [path] * (info.max_length is None)
        case inspect.FloatType():
            yield from [path] * (info.ge is None or info.lt is None)  # such a field holds neither NaN nor infinity
        case inspect.VarTupleType() | inspect.ListType() | inspect.SetType() | inspect.FrozenSetType():
            yield from [path] * (info.max_length is None)
            yield from unbounded(info.item_type, path)
        case inspect.DictType():
            yield from [path] * (info.max_length is None)
            yield from unbounded(info.key_type, path)
            yield from unbounded(info.value_type, path)
        case inspect.RawType() | inspect.AnyType() | inspect.CustomType():
            yield path


@pytest.mark.parametrize("name", FROM_PEERS)
def test_every_field_from_a_peer_is_bounded(name: str) -> None:
    assert list(unbounded(inspect.type_info(FROM_PEERS[name]))) == []


def test_unbounded_fields_are_found() -> None:
    class Inner(msgspec.Struct):
        names: dict[str, tuple[bytes, ...]]
        grace_s: float

    class Outer(msgspec.Struct):
        pairs: tuple[tuple[int, str], ...]
        inner: Inner | None
        fits: list[int] | None = None

    found = [
        ".pairs",
        ".pairs",
        ".inner:.names",
        ".inner:.names",
        ".inner:.names",
        ".inner:.names",
        ".inner:.grace_s",
        ".fits:",
    ]
    assert list(unbounded(inspect.type_info(Outer))) == found


def lengthened(value: Any, choose: st.DataObject) -> Any:
    """Return a value in which one text, id or list is longer than any may be."""
    match value:
        case dict():
            key = choose.draw(st.sampled_from(sorted(value)))
            return value | {key: lengthened(value[key], choose)}
        case list() if value and choose.draw(st.booleans()):
            place = choose.draw(st.integers(0, len(value) - 1))
            return [*value[:place], lengthened(value[place], choose), *value[place + 1 :]]
        case list():
            return value * 99_999
        case str():
            return "x" * (MOST_TEXT + 1)
        case bytes():
            return b"x" * (MAX_MESSAGE_BYTES + 1)
    return b"no number has bytes"


@given(st.sampled_from([*get_args(AnyMessage), JobStatus, WitnessRecord]), st.data())
def test_field_that_is_too_long_is_refused(kind: Any, data: st.DataObject) -> None:
    raw = msgspec.msgpack.decode(msgspec.msgpack.encode(sample(kind)), strict=False)
    hostile = msgspec.msgpack.encode(lengthened(raw, data))
    if kind is JobStatus:
        assert decode_status(hostile) is None
    elif kind is WitnessRecord:
        with pytest.raises(msgspec.MsgspecError):
            decode_witness_record(hostile)
    else:
        with pytest.raises(MessageError):
            decode_message(hostile)


@given(st.text(st.characters(), max_size=3000), st.integers(1, 2000))
def test_shortened_text_can_be_read(text: str, most: int) -> None:
    short = shortened(text + "\ud800", most)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(short)) == short and len(short) <= most
    assert shortened("exit 1") == "exit 1" and shortened("é" * 1000) == "é" * 1000
    assert shortened("x" * 1001) == "x" * 999 + "…"


def readable(effects: list[Effect]) -> int:
    """Check that the messages among these effects can be read; return their number."""
    messages = [effect.message for effect in effects if isinstance(effect, Send)]
    assert [decode_message(encode_message(message)) for message in messages] == messages
    return len(messages)


def kept(world: RunnerWorld) -> list[WitnessRecord]:
    """Return the records of the witnesses; they can be read again, and so can their statuses."""
    for witness in world.witnesses.values():
        saved = msgspec.msgpack.encode(witness.witness_record)
        assert decode_witness_record(saved) == witness.witness_record
        status = status_of(JOB, witness, None, "", LONG, None)
        assert decode_status(encode_status(status)) == status
    return [witness.witness_record for witness in world.witnesses.values()]


def test_what_a_runner_writes_can_be_read() -> None:
    world = RunnerWorld(make_spec())
    world.begin()
    world.tell(GuestFailed(LONG, elsewhere=True))
    assert {len(one.record.attempts[-1].reason) for one in kept(world)} == {SAID}
    world = RunnerWorld(make_spec())
    world.begin()
    world.tell(GuestFailed(LONG, elsewhere=False))
    world.tell(ResultStored(None, MANY, LONG))
    for one in kept(world):
        assert one.record.outcome is not None
        assert len(one.record.outcome.detail) == SAID and len(one.record.outcome.holders) == MOST_LISTED


def test_long_text_that_an_earlier_release_wrote_can_be_read() -> None:
    """It did not cut the text of an error: here, one reason for each node of a large campus."""
    told = "; ".join(f"workstation-{number}: cannot be reached" for number in range(MOST_LISTED))
    attempt = Attempt(0, A, "desk", 1, 0, reason=f"could not start: {told}")
    record = JobRecord(attempts=(attempt,), outcome=Outcome("failed", told, None, None, (), 0))
    saved = msgspec.structs.replace(make_witness().witness_record, record=record)
    assert decode_witness_record(msgspec.msgpack.encode(saved)) == saved


def test_checkpoint_on_more_nodes_than_a_record_names_can_be_read() -> None:
    for event in (CheckpointStored(b"m" * 32, MANY, None, LONG), CheckpointStored(b"m" * 32, (B,), None)):
        world = RunnerWorld(make_spec())
        world.begin()
        world.tell(GuestStarted(None))
        world.tell(CheckpointFound())
        world.tell(event)
        world.tell(Recopied(b"m" * 32, MANY))
        for one in kept(world):
            assert one.record.commit is not None and len(one.record.commit.holders) == MOST_LISTED


def test_what_a_gang_writes_can_be_read() -> None:
    spec = make_spec(least_nodes=2, most_nodes=2)
    member = GangMember(A, Enlist(JOB, 1, 0, SPEC_BYTES), spec)
    assert readable(member.vacate(9.0, LONG, at(0.0)))
    assert readable(member.exited(1, LONG, at(0.0)))
    gang = Gang(JOB, spec, SPEC_BYTES, 1)
    gang.gather([(B, "b")], RunnerWorld(spec).runner.record, at(0.0))
    assert readable([*gang.dismiss(9.0, LONG, 0.0)])


OVERLONG: dict[str, Any] = {
    "nonce": b"n" * (MOST_ID + 1),
    "workdir": b"w" * (MOST_ID + 1),
    "workdir_holders": MANY,
    "image": "i" * (SAID + 1),
    "engine": "e" * (SAID + 1),
    "zone": "z" * (SAID + 1),
    "name": "n" * (1 << 19),
    "user": "u" * (1 << 19),
    "after": (JOB,) * 9999,
    "on": MANY,
    "driver": (1,) * 99,
    "retry_codes": (1,) * 999,
}


@pytest.mark.parametrize("name", OVERLONG)
def test_description_with_a_field_that_is_too_long_is_neither_written_nor_read(name: str) -> None:
    spec = msgspec.structs.replace(make_spec(), **{name: OVERLONG[name]})
    with pytest.raises(SpecError):
        encode_spec(spec)
    with pytest.raises(SpecError):
        decode_spec(msgspec.msgpack.encode(spec))

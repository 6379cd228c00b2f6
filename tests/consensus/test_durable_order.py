"""The order in which shells save and send."""

import msgspec

from mesh.consensus.durable_order import SaveRecords, in_durable_order
from mesh.consensus.effects import SaveWitnessRecord, Send, WitnessRecord
from mesh.consensus.messages import Cancel
from mesh.consensus.participant import Directed
from mesh.model.record import Config, JobRecord

JOB, OTHER = b"j" * 16, b"o" * 16


def save(job: bytes, promised: int) -> Directed:
    return Directed(job, "witness", SaveWitnessRecord(record(job, promised)))


def record(job: bytes, promised: int) -> WitnessRecord:
    empty = WitnessRecord(job, b"disk", b"spec", Config(0, 0, ()), 0, 0, JobRecord(), None, False)
    return msgspec.structs.replace(empty, promised=promised)


def send(job: bytes, user: str) -> Directed:
    return Directed(job, "witness", Send(b"a peer", Cancel(job=job, user=user)))


def test_everything_is_saved_in_one_write_before_anything_is_sent() -> None:
    steps = in_durable_order([send(JOB, "first"), save(JOB, 1), send(OTHER, "second"), save(OTHER, 7), save(JOB, 2)])
    saved = SaveRecords((record(JOB, 2), record(OTHER, 7)))
    assert steps == [saved, send(JOB, "first"), send(OTHER, "second")]


def test_nothing_is_written_without_a_promise() -> None:
    assert in_durable_order([send(JOB, "first")]) == [send(JOB, "first")]

"""Decoders of job messages, with valid and with hostile bytes."""

import contextlib
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.api.requests import InviteOrder, PauseOrder, PullOrder, ReclaimOrder, SubmitOrder
from mesh.consensus.messages import (
    COST_BYTES,
    MAX_MESSAGE_BYTES,
    MOST_WARRANTS,
    Accept,
    Accepted,
    AnyMessage,
    Cancel,
    Closed,
    Dismiss,
    EventReport,
    MemberLeaving,
    MessageError,
    Prepare,
    PreVote,
    Promised,
    Refused,
    Released,
    RunGranted,
    Start,
    StartAnswer,
    cost_of,
    decode_message,
    encode_message,
)
from mesh.consensus.status import ArchivedJob, Saving, archived, best_of, decode_status, encode_status, status_of
from mesh.jobs.message_sender import decode_batch
from mesh.model.record import MOST_VOTERS, Attempt, Commit, Config, JobRecord, Outcome, Voter
from tests.consensus.worlds import DISK, JOB, A, B, C, D, make_spec, make_witness, voters

CONFIG = Config(number=1, term=2, members=voters(A, B, C), previous=voters(A, B, D))
RECORD = JobRecord(
    version=4,
    commit=Commit(seq=1, term=2, manifest=b"m" * 32, parent=None, holders=(B,), step=3, created_unix_ms=5),
    attempts=(Attempt(number=0, node=D, nick="d", term=2, started_unix_ms=1),),
    outcome=Outcome(kind="done", detail="", exit_code=0, manifest=None, holders=(), ended_unix_ms=9),
)
EVERY: list[AnyMessage] = [
    Prepare(job=JOB, term=3),
    Promised(job=JOB, term=3, disk=DISK, config=CONFIG, accepted_term=2, record=RECORD, cancel_wanted=False),
    Accept(job=JOB, term=3, round=1, config=CONFIG, record=RECORD, holder=D, spec=b"s"),
    Accepted(job=JOB, term=3, disk=DISK, round=1),
    Refused(
        job=JOB,
        disk=DISK,
        term=3,
        round=1,
        promised=4,
        config=None,
        lease_left_s=1.0,
        needs_spec=False,
        finished=True,
        record=RECORD,
    ),
    Start(job=JOB, term=3, config=CONFIG, record=RECORD, spec=b"s"),
    StartAnswer(job=JOB, term=3, taken=False, reason="full"),
    Released(job=JOB, term=3),
    Cancel(job=JOB, user="ada"),
]


@pytest.mark.parametrize("message", EVERY, ids=lambda message: type(message).__name__)
def test_message_survives_encoding(message: AnyMessage) -> None:
    assert decode_message(encode_message(message)) == message


def test_group_of_too_many_is_malformed() -> None:
    for most, refused in ((MOST_VOTERS, False), (MOST_VOTERS + 1, True)):
        members = tuple(Voter(number.to_bytes(32), b"disk") for number in range(most))
        for group in (Config(1, 2, members), Config(1, 2, voters(A), members)):
            data = encode_message(Accept(JOB, 2, 1, group, JobRecord(), None))
            with pytest.raises(MessageError) if refused else contextlib.nullcontext():
                decode_message(data)


@pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf, -math.inf, 1e300])
def test_impossible_time_is_malformed(seconds: float) -> None:
    refused = Refused(JOB, 3, DISK, 2, 4, None, seconds, needs_spec=False, finished=False)
    leaving = MemberLeaving(JOB, 3, seconds, "its owner wants it back")
    for message in (refused, leaving, Dismiss(JOB, 3, seconds, "it is over"), RunGranted(JOB, 3, 1, seconds)):
        with pytest.raises(MessageError):
            decode_message(encode_message(message))


@pytest.mark.parametrize(
    ("message", "checks"),
    [
        (Cancel(JOB, "ada"), 0),
        (EventReport(JOB, (b"sealed",) * 64), 64),
        (Prepare(JOB, 3, CONFIG, (b"warrant",) * 5), 5),
        (PreVote(JOB, 3, CONFIG, (b"warrant",) * 5), 5),
        (Accept(JOB, 3, 1, CONFIG, RECORD, D, warrants=(b"warrant",) * 8), 8),
    ],
)
def test_cost_of_a_message_is_what_its_receiver_has_to_check(message: AnyMessage, checks: int) -> None:
    assert cost_of(message, 100) == 1 + checks
    assert cost_of(message, 4 * COST_BYTES) == 1 + checks + 4


@given(st.binary(max_size=300))
def test_hostile_bytes_raise_message_error(data: bytes) -> None:
    with pytest.raises(MessageError):
        decode_message(data)


@given(st.sampled_from(EVERY), st.data())
def test_damaged_message_raises_at_most_message_error(message: AnyMessage, data: st.DataObject) -> None:
    raw = bytearray(encode_message(message))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(MessageError):
        decode_message(bytes(raw))


def test_oversized_message_is_refused_before_decoding() -> None:
    with pytest.raises(MessageError, match="limit"):
        decode_message(b"\x81" * (MAX_MESSAGE_BYTES + 1))


@pytest.mark.parametrize(
    "message",
    [
        Prepare(JOB, 3, CONFIG, (b"w",) * (MOST_WARRANTS + 1)),
        Prepare(JOB, 3, CONFIG, (b"w" * 513,)),
        Accepted(JOB, 3, DISK, 1, warrant=b"w" * 513),
        Start(JOB, 3, CONFIG, RECORD, b"s", b"w" * 513),
    ],
    ids=["many", "long", "answer", "start"],
)
def test_warrants_are_bounded(message: AnyMessage) -> None:
    with pytest.raises(MessageError):
        decode_message(encode_message(message))


@pytest.mark.parametrize("number", [-1, 1 << 53])
def test_numbers_are_bounded(number: int) -> None:
    """A witness keeps them, and the next term or version must fit into a message."""
    messages: list[AnyMessage] = [
        Prepare(JOB, number),
        Refused(JOB, 3, DISK, 1, number, None, 0.0, needs_spec=False, finished=False),
        Promised(JOB, 3, DISK, CONFIG, number, RECORD, cancel_wanted=False),
        Accept(JOB, 3, 1, msgspec.structs.replace(CONFIG, number=number), RECORD, D),
        Accept(JOB, 3, 1, CONFIG, msgspec.structs.replace(RECORD, version=number), D),
        Closed(JOB, 3, RECORD.amended(outcome=msgspec.structs.replace(RECORD.outcome, ended_unix_ms=number))),
    ]
    for message in messages:
        with pytest.raises(MessageError):
            decode_message(encode_message(message))


@given(st.binary(max_size=300))
def test_hostile_batches_and_statuses_are_rejected(data: bytes) -> None:
    assert decode_status(data) is None
    try:
        mail = decode_batch(data)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return
    assert all(isinstance(piece, bytes) for piece in mail)


@pytest.mark.parametrize("kind", [SubmitOrder, ReclaimOrder, PauseOrder, InviteOrder, PullOrder])
@given(data=st.one_of(st.binary(max_size=200), st.text(max_size=200).map(str.encode)))
def test_hostile_orders_raise_only_decoding_errors(kind: type, data: bytes) -> None:
    with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
        msgspec.json.decode(data, type=kind)


def test_summary_of_a_job_that_claims_too_much_fits_into_the_archive() -> None:
    stays = tuple(
        Attempt(number, D, "d", 1, 0, running_unix_ms=1, ended_unix_ms=2, seen_unix_ms=2**53 - 1)
        for number in range(16)
    )
    witness = make_witness(spec=make_spec(gpus=10_000))
    over = JobRecord(1, attempts=stays, outcome=Outcome("done", "", 0, None, (), 1))
    witness.witness_record = msgspec.structs.replace(witness.witness_record, record=over, final=True)
    summary = archived(status_of(JOB, witness, None, "", "", None))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(summary), type=ArchivedJob) == summary


def test_best_of_returns_the_most_advanced_status_of_a_job() -> None:
    witness = make_witness()
    early = status_of(JOB, witness, None, "", "", None)
    assert early.state == "pending" and decode_status(encode_status(early)) == early
    witness.witness_record = msgspec.structs.replace(
        witness.witness_record, accepted_term=2, record=msgspec.structs.replace(RECORD, outcome=None)
    )
    running = status_of(JOB, witness, None, "", "", None)
    assert running.state == "starting" and running.runner == D and running.commit is not None
    witness.witness_record = msgspec.structs.replace(witness.witness_record, accepted_term=2, record=RECORD)
    ending = status_of(JOB, witness, None, "", "", None)
    assert ending.state == "ending" and ending.outcome is None, "a majority may still decide otherwise"
    witness.witness_record = msgspec.structs.replace(witness.witness_record, final=True)
    ended = status_of(JOB, witness, None, "", "", None)
    assert ended.state == "done" and ended.attempts[0].nick == "d"
    waiting = status_of(JOB, make_witness(), None, "pending", "no node can run it now", None)
    for pair in ([early, waiting], [waiting, early]):
        assert best_of(pair) == waiting, "the status of the acting leader has precedence"
    for views in ([early, running, ended], [ended, early, running]):
        assert best_of(views) == ended
    assert status_of(JOB, make_witness(spec=make_spec(argv=("x" * 999,))), None, "", "", None).command == "x" * 120
    quoted = status_of(JOB, make_witness(spec=make_spec(argv=("sh", "-c", "exit 7"))), None, "", "", None)
    assert quoted.command == "sh -c 'exit 7'", "as one would type it"
    told = msgspec.structs.replace(running, rank=(0, 2, 0, 2), standby=B, warm=True, commit=running.commit)
    assert best_of([told, running]).standby == B and best_of([running, told]).warm
    assert running.commit is not None
    newer = msgspec.structs.replace(running, commit=msgspec.structs.replace(running.commit, holders=(A,)))
    assert best_of([told, newer]).standby == B and not best_of([told, newer]).warm, "of the new one nothing is known"
    said = msgspec.structs.replace(told, detail="b holds checkpoints in place of c", heeds_notice=True)
    assert best_of([said, newer]).detail == said.detail and best_of([newer, said]).heeds_notice, "a witness cannot know"
    assert best_of([told, ended]) == ended
    far = msgspec.structs.replace(told, saving=Saving("checkpoint", 4, 1_000, 5, 10, 2))
    assert decode_status(encode_status(far)) == far and best_of([newer, far]).saving == far.saving
    assert best_of([far, ended]).saving is None

"""Every decoder of job traffic, with what it is meant for and with hostile bytes."""

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.api.orders import InviteOrder, PauseOrder, PullOrder, ReclaimOrder, SubmitOrder
from mesh.jobs.ledger import Attempt, Commit, Config, Ledger, Outcome
from mesh.jobs.messages import (
    MAX_MESSAGE_BYTES,
    Accept,
    Accepted,
    AnyMessage,
    Cancel,
    MessageError,
    Prepare,
    Promised,
    Refused,
    Released,
    Start,
    StartAnswer,
    decode_message,
    encode_message,
)
from mesh.jobs.postman import open_mail
from mesh.jobs.status import Saving, best_of, decode_status, encode_status, status_of
from tests.jobs.worlds import DISK, JOB, A, B, C, D, make_spec, make_witness, seats

CONFIG = Config(number=1, term=2, members=seats(A, B, C), previous=seats(A, B, D))
LEDGER = Ledger(
    version=4,
    commit=Commit(seq=1, term=2, manifest=b"m" * 32, parent=None, holders=(B,), step=3, created_unix_ms=5),
    attempts=(Attempt(number=0, node=D, nick="d", term=2, started_unix_ms=1),),
    outcome=Outcome(kind="done", detail="", exit_code=0, manifest=None, holders=(), ended_unix_ms=9),
)
EVERY: list[AnyMessage] = [
    Prepare(job=JOB, term=3),
    Promised(job=JOB, term=3, disk=DISK, config=CONFIG, accepted_term=2, ledger=LEDGER, cancel_wanted=False),
    Accept(job=JOB, term=3, round=1, config=CONFIG, ledger=LEDGER, holder=D, spec=b"s"),
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
        ledger=LEDGER,
    ),
    Start(job=JOB, term=3, config=CONFIG, ledger=LEDGER, spec=b"s"),
    StartAnswer(job=JOB, term=3, taken=False, reason="full"),
    Released(job=JOB, term=3),
    Cancel(job=JOB, user="ada"),
]


@pytest.mark.parametrize("message", EVERY, ids=lambda message: type(message).__name__)
def test_a_message_survives_the_wire(message: AnyMessage) -> None:
    assert decode_message(encode_message(message)) == message


@given(st.binary(max_size=300))
def test_hostile_bytes_are_no_message(data: bytes) -> None:
    with pytest.raises(MessageError):
        decode_message(data)


@given(st.sampled_from(EVERY), st.data())
def test_a_damaged_message_is_refused_or_another_message(message: AnyMessage, data: st.DataObject) -> None:
    raw = bytearray(encode_message(message))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(MessageError):
        decode_message(bytes(raw))


def test_a_message_over_the_limit_is_refused_unread() -> None:
    with pytest.raises(MessageError, match="limit"):
        decode_message(b"\x81" * (MAX_MESSAGE_BYTES + 1))


@given(st.binary(max_size=300))
def test_hostile_mail_and_statuses(data: bytes) -> None:
    assert decode_status(data) is None
    try:
        mail = open_mail(data)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return
    assert all(isinstance(piece, bytes) for piece in mail)


@pytest.mark.parametrize("kind", [SubmitOrder, ReclaimOrder, PauseOrder, InviteOrder, PullOrder])
@given(data=st.one_of(st.binary(max_size=200), st.text(max_size=200).map(str.encode)))
def test_hostile_orders_raise_one_kind_of_error(kind: type, data: bytes) -> None:
    with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
        msgspec.json.decode(data, type=kind)


def test_the_most_advanced_view_of_a_job_is_shown() -> None:
    witness = make_witness()
    early = status_of(JOB, witness, None, "", "", None)
    assert early.state == "pending" and decode_status(encode_status(early)) == early
    witness.cell = msgspec.structs.replace(
        witness.cell, accepted_term=2, ledger=msgspec.structs.replace(LEDGER, outcome=None)
    )
    running = status_of(JOB, witness, None, "", "", None)
    assert running.state == "starting" and running.runner == D and running.commit is not None
    witness.cell = msgspec.structs.replace(witness.cell, accepted_term=2, ledger=LEDGER)
    ending = status_of(JOB, witness, None, "", "", None)
    assert ending.state == "ending" and ending.outcome is None, "a majority may yet decide otherwise"
    witness.cell = msgspec.structs.replace(witness.cell, final=True)
    ended = status_of(JOB, witness, None, "", "", None)
    assert ended.state == "done" and ended.attempts[0].nick == "d"
    waiting = status_of(JOB, make_witness(), None, "pending", "no node can run it now", None)
    for pair in ([early, waiting], [waiting, early]):
        assert best_of(pair) == waiting, "who acts knows better than who watches"
    for views in ([early, running, ended], [ended, early, running]):
        assert best_of(views) == ended
    assert status_of(JOB, make_witness(spec=make_spec(argv=("x" * 999,))), None, "", "", None).command == "x" * 120
    told = msgspec.structs.replace(running, rank=(0, 2, 0, 2), heir=B, warm=True, commit=running.commit)
    assert best_of([told, running]).heir == B and best_of([running, told]).warm
    assert running.commit is not None
    newer = msgspec.structs.replace(running, commit=msgspec.structs.replace(running.commit, holders=(A,)))
    assert best_of([told, newer]).heir == B and not best_of([told, newer]).warm, "of the new one nothing is known"
    said = msgspec.structs.replace(told, detail="b holds checkpoints in place of c", heeds_notice=True)
    assert best_of([said, newer]).detail == said.detail and best_of([newer, said]).heeds_notice, "a witness cannot know"
    assert best_of([told, ended]) == ended
    far = msgspec.structs.replace(told, saving=Saving("checkpoint", 4, 1_000, 5, 10, 2))
    assert decode_status(encode_status(far)) == far and best_of([newer, far]).saving == far.saving
    assert best_of([far, ended]).saving is None

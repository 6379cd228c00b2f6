"""Events of jobs: signed, typed and chained, so that a node cannot deny what it has reported.

A node numbers its events about one job, and each names the hash of the one before it.
"""

from hashlib import blake2b
from typing import Literal

import msgspec

from membership.lengths import Id, Text
from membership.malformed import MALFORMED
from mesh.model.record import Number
from placement.decision import Decision

Kind = Literal["submitted", "order", "state", "decision", "checkpoint", "attempt", "end", "node", "audit"]
MAX_EVENT_BYTES = 2048  # when sealed; a reason is cut, so that it fits with the longest decision
REASON_CHARS, REASON_BYTES = 300, 600
MAX_REPORTED = 64  # events in one message
HASH_BYTES = 16


class EventError(ValueError):
    """The bytes are not an event."""


class Event(msgspec.Struct, frozen=True):
    """One event of a job (`job` None: of the node itself).

    Kinds: the job was `submitted`; its user gave an `order` (`new`: cancel, migrate, recover); its `state` here changed from
    `old` to `new`; a `decision` placed it on `target`; its `checkpoint` `number` was committed; an `attempt` ended here; the
    job came to its `end` (`new`); something happened to the `node`; or an `audit`: somebody gave the order `new` here.
    `target` names another node that the event is about.
    """

    job: Id | None
    seq: Number
    unix_ms: Number
    kind: Kind
    previous: Id = b""
    attempt: Number | None = None
    number: Number | None = None
    step: Number | None = None
    old: Text = ""
    new: Text = ""
    reason: Text = ""
    target: Id | None = None
    decision: Decision | None = None


_decoder = msgspec.msgpack.Decoder(Event)


def encode_event(event: Event) -> bytes:
    return msgspec.msgpack.encode(event)


def decode_event(payload: bytes) -> Event:
    try:
        return _decoder.decode(payload)
    except MALFORMED as error:
        raise EventError(f"not an event: {error}") from error


def hash_of(sealed: bytes) -> bytes:
    """Return the hash by which the node's next event about the same job names this one."""
    return blake2b(sealed, digest_size=HASH_BYTES, person=b"mesh-event").digest()


def describe(event: Event, target: str = "") -> str:
    """Describe an event for people; `target` is that node's name."""
    why = f": {event.reason}" if event.reason else ""
    match event.kind:
        case "submitted":
            return "submitted" + why
        case "order":
            return f"ordered by its user: {event.new}" + (f" to {target}" if target else "") + why
        case "state":
            return event.new + why
        case "decision":
            return f"placed on {target}" + why
        case "checkpoint":
            step = f" at step {event.step}" if event.step is not None else ""
            return f"checkpoint {event.number}{step} committed{why}"
        case "attempt":
            return "attempt ended here" + why
        case "end":
            if event.reason in {"", event.new}:
                return f"the job is over: {event.new}"
            begins = event.reason.startswith(f"{event.new} (")  # `failed (exit 1)`
            return f"the job is over: {event.reason if begins else f'{event.new} ({event.reason})'}"
    return event.reason

"""What happened to a job, as each node says it: signed, typed, and chained, so that nobody can take back what it has said.

A node's events about one job are numbered in the order in which it said them, and each names the hash of the one before it.
"""

from hashlib import blake2b
from typing import Literal

import msgspec

from placement.decision import Decision

Kind = Literal["submitted", "order", "state", "decision", "checkpoint", "attempt", "end", "node", "audit"]
MAX_EVENT_BYTES = 2048  # sealed; a reason is cut to REASON_CHARS
REASON_CHARS = 300
MAX_TOLD = 64  # events in one message
HASH_BYTES = 16


class EventError(ValueError):
    """Bytes that are no event."""


class Event(msgspec.Struct, frozen=True):
    """`kind`: it was `submitted`; its user gave an `order` (`new`: cancel, migrate, recover); its `state` here went from
    `old` to `new`; a `decision` gave it to `target`; its `checkpoint` number `number` counts; an `attempt` has ended here; it
    has come to its `end` (`new`); or something about the `node` itself, of no job; or an `audit`: somebody ordered `new` here, or
    did it. `target` is the node that it is about, if
    that is another one.
    """

    job: bytes | None
    seq: int
    unix_ms: int
    kind: Kind
    previous: bytes = b""
    attempt: int | None = None
    number: int | None = None
    step: int | None = None
    old: str = ""
    new: str = ""
    reason: str = ""
    target: bytes | None = None
    decision: Decision | None = None


_decoder = msgspec.msgpack.Decoder(Event)


def encode_event(event: Event) -> bytes:
    return msgspec.msgpack.encode(event)


def decode_event(payload: bytes) -> Event:
    try:
        return _decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise EventError(f"not an event: {error}") from error


def hash_of(sealed: bytes) -> bytes:
    """By which the next event of the same node, about the same job, names this one."""
    return blake2b(sealed, digest_size=HASH_BYTES, person=b"mesh-event").digest()


def words(event: Event, target: str = "") -> str:
    """An event as people read it; `target` is that node's name."""
    why = f": {event.reason}" if event.reason else ""
    match event.kind:
        case "submitted":
            return "submitted" + why
        case "order":
            return f"its user orders: {event.new}" + (f" to {target}" if target else "") + why
        case "state":
            return event.new + why
        case "decision":
            return f"given to {target}" + why
        case "checkpoint":
            step = f" at step {event.step}" if event.step is not None else ""
            return f"checkpoint {event.number}{step} committed{why}"
        case "attempt":
            return "attempt ended here" + why
        case "end":
            return f"the job is over: {event.new}" + (
                f" ({event.reason})" if event.reason not in {"", event.new} else ""
            )
    return event.reason

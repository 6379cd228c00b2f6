"""Frames between a session inside a guest and its user. No I/O.

A frame is one byte for its kind, then its bytes: input, output, errors, or a control message as JSON. Between nodes a frame is a
WebSocket message; on a byte stream its length comes first (`mesh.execution.session_framing`). Decoders treat the other end as
hostile: a guest can tamper with the programs that run in it.
"""

from typing import Annotated, Literal

import msgspec

from membership.malformed import MALFORMED

INPUT, OUTPUT, ERRORS, CONTROL = 0, 1, 2, 3
PIECE_BYTES = 32 * 1024  # of data in one frame (own choice)
MAX_FRAME_BYTES = 256 * 1024  # about the longest command line (`mesh.model.spec.MAX_TEXT_BYTES`)
MOVES_S = 120.0  # retry time for a job that does not run: a move takes a grace period and a restore (own choice)
LISTENS_S = 10.0  # for a program of a running job to start listening (own choice)
MAX_ARGUMENTS, MAX_TEXT = 4096, 2000

SignalName = Literal["INT", "TERM", "HUP", "QUIT", "TSTP", "CONT", "USR1", "USR2", "KILL"]
Side = Annotated[int, msgspec.Meta(ge=1, le=65_535)]  # of a terminal, in characters


class FrameError(ValueError):
    """The bytes are not a frame."""


class Data(msgspec.Struct, frozen=True):
    """Data of one stream. `kind` is INPUT, OUTPUT or ERRORS."""

    kind: int
    data: bytes


class Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="order"):
    """The command to run. `term`, `rows` and `columns` describe the user's terminal if it gets one (`tty`)."""

    argv: Annotated[tuple[str, ...], msgspec.Meta(min_length=1, max_length=MAX_ARGUMENTS)]
    tty: bool = False
    term: Annotated[str, msgspec.Meta(max_length=64, pattern=r"^[A-Za-z0-9+._-]*$")] = ""
    rows: Side = 24
    columns: Side = 80


class Resize(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="resize"):
    rows: Side
    columns: Side


class Signal(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="signal"):
    name: SignalName


class InputEnd(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="input_end"):
    """The end of input."""


class Opened(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="opened"):
    """The session is open on `node`."""

    node: str = ""


class Note(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="note"):
    """A note for the user, apart from the output."""

    text: Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]


class Exit(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="exit"):
    code: Annotated[int, msgspec.Meta(ge=0, le=255)]


class Failed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="failed"):
    """The session failed without an exit status.

    `code` is an exit code of the command line; `again_s`: for how many seconds a retry makes sense.
    """

    text: Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
    code: Annotated[int, msgspec.Meta(ge=1, le=255)] = 1
    again_s: Annotated[float, msgspec.Meta(ge=0, le=MOVES_S)] = 0.0


Control = Order | Resize | Signal | InputEnd | Opened | Note | Exit | Failed
Frame = Data | Control

_decoder: msgspec.json.Decoder[Control] = msgspec.json.Decoder(Control)
_encoder = msgspec.json.Encoder()


def encode_frame(frame: Frame) -> bytes:
    if isinstance(frame, Data):
        return bytes([frame.kind]) + frame.data
    return bytes([CONTROL]) + _encoder.encode(frame)


def decode_frame(data: bytes) -> Frame:
    """Decode a frame. FrameError if the bytes are not one."""
    if not 1 <= len(data) <= MAX_FRAME_BYTES:
        raise FrameError(f"a frame has 1 to {MAX_FRAME_BYTES} bytes, not {len(data)}")
    kind, rest = data[0], data[1:]
    if kind in {INPUT, OUTPUT, ERRORS}:
        return Data(kind, rest)
    if kind != CONTROL:
        raise FrameError(f"unknown kind of frame: {kind}")
    try:
        return _decoder.decode(rest)
    except MALFORMED as error:
        raise FrameError(f"not a control message: {error}") from error


def failed(text: str, code: int = 1, again_s: float = 0.0) -> Failed:
    """Return a failure with the text cut to the limit."""
    return Failed(text[:MAX_TEXT], code, again_s)

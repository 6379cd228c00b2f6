"""What a session inside a guest and its user say to each other, piece by piece. No I/O.

A frame is a byte that tells its kind, then its bytes: input, output, errors, or a word about the session as JSON. One is a
message of a WebSocket between nodes, and has its length before it on a stream (`mesh.engine.sessionwire`). Whoever decodes one
may have an enemy at the other end: a guest can meddle with what runs in it.
"""

from typing import Annotated, Literal

import msgspec

INPUT, OUTPUT, ERRORS, CONTROL = 0, 1, 2, 3
PIECE_BYTES = 32 * 1024  # of data in one frame; ours
MAX_FRAME_BYTES = 256 * 1024  # what a command line may have (`mesh.jobs.spec.MAX_TEXT_BYTES`) is about this; ours
MOVES_S = 120.0  # for a job that does not run: a move takes a grace and a restore; ours
LISTENS_S = 10.0  # for a program of a job that does, to listen where it is looked for; ours
MAX_ARGUMENTS, MAX_TEXT = 4096, 2000

SignalName = Literal["INT", "TERM", "HUP", "QUIT", "TSTP", "CONT", "USR1", "USR2", "KILL"]
Side = Annotated[int, msgspec.Meta(ge=1, le=65_535)]  # of a terminal, in characters


class FrameError(ValueError):
    """Bytes that are no frame."""


class Data(msgspec.Struct, frozen=True):
    """`kind` is INPUT, OUTPUT or ERRORS."""

    kind: int
    data: bytes


class Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="order"):
    """What is to run. `term`, `rows` and `columns` are of the user's terminal, if it is to have one (`tty`)."""

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
    """No more input comes."""


class Opened(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="opened"):
    """It stands; `node` is where."""

    node: str = ""


class Note(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="note"):
    """For the user, beside the output."""

    text: Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]


class Exit(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="exit"):
    code: Annotated[int, msgspec.Meta(ge=0, le=255)]


class Failed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="failed"):
    """It is over without an exit of its own. `code` as the command line's; `again_s`: how long it is worth trying again."""

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
    """FrameError for what cannot be one."""
    if not 1 <= len(data) <= MAX_FRAME_BYTES:
        raise FrameError(f"a frame has 1 to {MAX_FRAME_BYTES} bytes, not {len(data)}")
    kind, rest = data[0], data[1:]
    if kind in {INPUT, OUTPUT, ERRORS}:
        return Data(kind, rest)
    if kind != CONTROL:
        raise FrameError(f"no frame is of kind {kind}")
    try:
        return _decoder.decode(rest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise FrameError(f"not a word about a session: {error}") from error


def failed(text: str, code: int = 1, again_s: float = 0.0) -> Failed:
    """However long the text is."""
    return Failed(text[:MAX_TEXT], code, again_s)

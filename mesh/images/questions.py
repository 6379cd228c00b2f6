"""What nodes ask each other about images, and the answers. All of it is read as if an enemy had written it."""

from typing import TypeVar

import msgspec

from mesh.images.allowlist import Natural
from mesh.images.docket import MAX_DOCKET_BYTES, PIECE_HASH_BYTES

MAX_PIECES = 4096  # in one request: 16 GiB
MAX_ANSWER_BYTES = MAX_DOCKET_BYTES + 1024

T = TypeVar("T")


class Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`ready`: its layers are at hand; else the engine has to save it first. `busy`: to how many it is giving something now."""

    ready: bool
    busy: Natural


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The docket, or how far the engine has come with saving the image, in bytes."""

    docket: bytes = b""
    done: Natural = 0
    total: Natural = 0


class Fetching(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a node that was asked to fetch an image is getting on."""

    here: bool
    words: str = ""
    failed: bool = False


_offer_decoder, _answer_decoder = msgspec.msgpack.Decoder(Offer), msgspec.msgpack.Decoder(Answer)
_fetching_decoder, _pieces_decoder = msgspec.msgpack.Decoder(Fetching), msgspec.msgpack.Decoder(list[bytes])

encode = msgspec.msgpack.encode


def decode_offer(data: bytes) -> Offer:
    return _decoded(_offer_decoder, data)


def decode_answer(data: bytes) -> Answer:
    return _decoded(_answer_decoder, data)


def decode_fetching(data: bytes) -> Fetching:
    return _decoded(_fetching_decoder, data)


def decode_pieces(data: bytes) -> list[bytes]:
    """Which pieces are asked for; ValueError for anything else."""
    pieces = _decoded(_pieces_decoder, data)
    if not 1 <= len(pieces) <= MAX_PIECES or any(len(piece) != PIECE_HASH_BYTES for piece in pieces):
        raise ValueError(f"a request names 1 to {MAX_PIECES} pieces")
    return pieces


def _decoded(decoder: "msgspec.msgpack.Decoder[T]", data: bytes) -> T:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"not understood: {error}") from error

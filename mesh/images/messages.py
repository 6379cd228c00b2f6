"""Messages between nodes about images. Decoders treat the sender as hostile."""

from typing import TypeVar

import msgspec

from membership.malformed import MALFORMED
from mesh.images.allowlist import Natural
from mesh.images.image_manifest import MAX_IMAGE_MANIFEST_BYTES, PIECE_HASH_BYTES

MAX_PIECES = 4096  # in one request: 16 GiB
MAX_ANSWER_BYTES = MAX_IMAGE_MANIFEST_BYTES + 1024

T = TypeVar("T")


class Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An offer of an image. `ready`: its layers are at hand; else the engine saves it first. `busy`: streams in progress."""

    ready: bool
    busy: Natural


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The image manifest, or the engine's progress in saving the image, in bytes."""

    image_manifest: bytes = b""
    done: Natural = 0
    total: Natural = 0


class Fetching(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The progress of a node that was asked to fetch an image."""

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
    """Decode the hashes of requested pieces. ValueError if the request is not valid."""
    pieces = _decoded(_pieces_decoder, data)
    if not 1 <= len(pieces) <= MAX_PIECES or any(len(piece) != PIECE_HASH_BYTES for piece in pieces):
        raise ValueError(f"a request names 1 to {MAX_PIECES} pieces")
    return pieces


def _decoded(decoder: "msgspec.msgpack.Decoder[T]", data: bytes) -> T:
    try:
        return decoder.decode(data)
    except MALFORMED as error:
        raise ValueError(f"not understood: {error}") from error

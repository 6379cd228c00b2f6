"""Messages between nodes about images. Decoders treat the sender as hostile."""

from typing import Annotated

import msgspec

from membership.malformed import MALFORMED
from mesh.images.oci import MAX_BLOB_BYTES

MAX_PIECES = 4096  # in one request: 16 GiB

Piece = Annotated[int, msgspec.Meta(ge=0, le=MAX_BLOB_BYTES >> 22)]


class Fetching(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The progress of a node that was asked to fetch an image."""

    here: bool
    words: str = ""
    failed: bool = False


_fetching_decoder = msgspec.msgpack.Decoder(Fetching)
_pieces_decoder = msgspec.msgpack.Decoder(Annotated[list[Piece], msgspec.Meta(min_length=1, max_length=MAX_PIECES)])

encode = msgspec.msgpack.encode


def decode_fetching(data: bytes) -> Fetching:
    try:
        return _fetching_decoder.decode(data)
    except MALFORMED as error:
        raise ValueError(f"not understood: {error}") from error


def decode_pieces(data: bytes) -> list[int]:
    """Decode the numbers of the requested pieces of a blob. ValueError if the request is not valid."""
    try:
        pieces: list[int] = _pieces_decoder.decode(data)
        return pieces
    except MALFORMED as error:
        raise ValueError(f"not understood: {error}") from error

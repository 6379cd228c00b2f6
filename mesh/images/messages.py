"""Messages between nodes about images. Decoders treat the sender as hostile."""

import msgspec

from membership.malformed import MALFORMED

MAX_PIECES = 4096  # in one request: 16 GiB
PIECE_ID_BYTES = 36  # a blob's SHA-256 and the number of the piece


class Fetching(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The progress of a node that was asked to fetch an image."""

    here: bool
    words: str = ""
    failed: bool = False


_fetching_decoder, _pieces_decoder = msgspec.msgpack.Decoder(Fetching), msgspec.msgpack.Decoder(list[bytes])

encode = msgspec.msgpack.encode


def decode_fetching(data: bytes) -> Fetching:
    try:
        return _fetching_decoder.decode(data)
    except MALFORMED as error:
        raise ValueError(f"not understood: {error}") from error


def decode_pieces(data: bytes) -> list[bytes]:
    """Decode the ids of requested pieces. ValueError if the request is not valid."""
    try:
        pieces = _pieces_decoder.decode(data)
    except MALFORMED as error:
        raise ValueError(f"not understood: {error}") from error
    if not 1 <= len(pieces) <= MAX_PIECES or any(len(piece) != PIECE_ID_BYTES for piece in pieces):
        raise ValueError(f"a request names 1 to {MAX_PIECES} pieces")
    return pieces

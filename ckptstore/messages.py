"""Messages between nodes about chunks. Decoders raise ValueError, and nothing else, on invalid bytes."""

from typing import TypeVar

import msgspec

from ckptstore.pack import ID_BYTES
from membership.malformed import MALFORMED

MAX_IDS = 1 << 18  # per message: those of the largest manifest (`manifest.MAX_CHUNKS`)
MAX_IDS_BYTES = MAX_IDS * (ID_BYTES + 2) + 64  # of such a message

T = TypeVar("T")


class ChunkRequest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Asks for these chunks and, before each delta, its base in the source's store, unless the requester has it (`have`)."""

    ids: tuple[bytes, ...]
    have: tuple[bytes, ...] = ()


class MissingQuery(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Asks which of these chunks a holder lacks. Those in `not_delta` count as missing if they are stored as deltas there."""

    ids: tuple[bytes, ...]
    not_delta: tuple[bytes, ...] = ()


_request_decoder = msgspec.msgpack.Decoder(ChunkRequest)
_query_decoder = msgspec.msgpack.Decoder(MissingQuery)
_ids_decoder = msgspec.msgpack.Decoder(list[bytes])


def encode_chunk_request(request: ChunkRequest) -> bytes:
    return msgspec.msgpack.encode(request)


def decode_chunk_request(data: bytes) -> ChunkRequest:
    request = _decode(_request_decoder, data, "a chunk request")
    _check(request.ids, request.have)
    return request


def encode_missing_query(query: MissingQuery) -> bytes:
    return msgspec.msgpack.encode(query)


def decode_missing_query(data: bytes) -> MissingQuery:
    query = _decode(_query_decoder, data, "a query for missing chunks")
    _check(query.ids, query.not_delta)
    return query


def encode_ids(ids: list[bytes]) -> bytes:
    return msgspec.msgpack.encode(ids)


def decode_ids(data: bytes) -> list[bytes]:
    """Decode the answer to a MissingQuery."""
    ids = _decode(_ids_decoder, data, "a list of chunk ids")
    _check(ids)
    return ids


def _decode(decoder: msgspec.msgpack.Decoder[T], data: bytes, kind: str) -> T:
    try:
        return decoder.decode(data)
    except MALFORMED as error:
        raise ValueError(f"not {kind}: {error}") from error


def _check(*lists: tuple[bytes, ...] | list[bytes]) -> None:
    for ids in lists:
        if len(ids) > MAX_IDS or any(len(identity) != ID_BYTES for identity in ids):
            raise ValueError(f"chunk ids have {ID_BYTES} bytes, and a message holds at most {MAX_IDS} of them")

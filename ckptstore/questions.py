"""What nodes ask each other about chunks. Decoders raise ValueError, and nothing else, on what is no such question."""

import msgspec

from ckptstore.decoding import decoded
from ckptstore.pack import ID_BYTES

MAX_IDS = 1_000_000  # in one question: 4 TB


class Order(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a source is asked for: these chunks, and before each the one it leans on there, unless the asker has that."""

    ids: tuple[bytes, ...]
    have: tuple[bytes, ...] = ()


class Question(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Which of these chunks a holder lacks; those that are to stand `alone` there it lacks if they lean on others."""

    ids: tuple[bytes, ...]
    alone: tuple[bytes, ...] = ()


_order_decoder = msgspec.msgpack.Decoder(Order)
_question_decoder = msgspec.msgpack.Decoder(Question)
_ids_decoder = msgspec.msgpack.Decoder(list[bytes])


def encode_order(order: Order) -> bytes:
    return msgspec.msgpack.encode(order)


def decode_order(data: bytes) -> Order:
    order = decoded(_order_decoder, data, "an order of chunks")
    _check(order.ids, order.have)
    return order


def encode_question(question: Question) -> bytes:
    return msgspec.msgpack.encode(question)


def decode_question(data: bytes) -> Question:
    question = decoded(_question_decoder, data, "a question about chunks")
    _check(question.ids, question.alone)
    return question


def encode_ids(ids: list[bytes]) -> bytes:
    return msgspec.msgpack.encode(ids)


def decode_ids(data: bytes) -> list[bytes]:
    """The answer to a question."""
    ids = decoded(_ids_decoder, data, "a list of chunk ids")
    _check(ids)
    return ids


def _check(*lists: tuple[bytes, ...] | list[bytes]) -> None:
    for ids in lists:
        if len(ids) > MAX_IDS or any(len(identity) != ID_BYTES for identity in ids):
            raise ValueError(f"chunk ids have {ID_BYTES} bytes, and there are at most {MAX_IDS} of them")

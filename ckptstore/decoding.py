"""Bytes from elsewhere become a struct, or a ValueError that says what they were to be."""

from typing import TypeVar

import msgspec

T = TypeVar("T")


def decoded(decoder: msgspec.msgpack.Decoder[T], data: bytes, what: str) -> T:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"not {what}: {error}") from error

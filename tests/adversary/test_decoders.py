"""Every decoder of bytes from other nodes refuses hostile bytes with an error that its callers expect."""

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, get_type_hints

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.errors import StoreError
from membership.malformed import MALFORMED
from mesh.util.errors import MeshError
from tests.versions.vectors import ALL, sample

PACKAGES = (
    "membership",
    "placement",
    "ckptstore",
    "mesh.model",
    "mesh.consensus",
    "mesh.jobs",
    "mesh.rpc",
    "mesh.images",
)
PACKAGES += ("mesh.checkpoints", "mesh.gpus", "mesh.execution")
EXPECTED = (ValueError, msgspec.MsgspecError, MeshError, StoreError)
DEPTH = 100_000
NESTED = (b"\x91" * DEPTH + b"\x90", b"\x81\xa1a" * DEPTH + b"\x90", b"[" * DEPTH, b'{"a":' * DEPTH)
LENGTHS = (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff")
KNOWN = {"most": 32, "now_unix": 0.0, "unseal": lambda sealed: (b"n" * 32, sealed)}


def modules() -> Iterator[ModuleType]:
    for name in PACKAGES:
        package = importlib.import_module(name)
        yield package
        for found in pkgutil.iter_modules(package.__path__, f"{name}."):
            if not found.ispkg:
                yield importlib.import_module(found.name)


def decoders() -> dict[str, Callable[[bytes], Any]]:
    """Return every public function `decode_...` that takes bytes, ready to be called with them alone."""
    made: dict[str, Callable[[bytes], Any]] = {}
    for module in modules():
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if name.startswith("decode_") and function.__module__ == module.__name__ and _taken(function):
                made[f"{module.__name__}.{name}"] = _of_bytes(function)
    return made


def _taken(function: Callable[..., Any]) -> list[str]:
    """Return the parameter with the bytes of another node, if there is one."""
    hints = get_type_hints(function)
    return [name for name, kind in hints.items() if kind is bytes and name in {"data", "body", "payload", "sealed"}]


def _of_bytes(function: Callable[..., Any]) -> Callable[[bytes], Any]:
    hints = get_type_hints(function)
    hints.pop("return", None)
    (taken,) = _taken(function)
    others = {name: KNOWN.get(name, b"n" * 32) for name in hints if name != taken}
    return lambda data: function(**{taken: data}, **others)


DECODERS = decoders()
SAMPLES = {name: msgspec.msgpack.encode(sample(kind)) for name, kind in ALL.items()}


def refuse_or_decode(name: str, data: bytes) -> None:
    try:
        DECODERS[name](data)
    except EXPECTED as error:
        assert not isinstance(error, RecursionError), name


def with_nested_field(data: bytes) -> bytes | None:
    """Return a map with one more field, of deep nesting; None for an array."""
    if data[0] & 0xF0 == 0x80 and data[0] != 0x8F:
        return bytes([data[0] + 1]) + data[1:] + b"\xa5later" + NESTED[0]
    return None


def test_decoders_are_found() -> None:
    assert len(DECODERS) > 25 and "mesh.consensus.messages.decode_message" in DECODERS


@pytest.mark.parametrize("name", DECODERS)
def test_decoder_refuses_nesting_and_lengths(name: str) -> None:
    deep = [more for data in SAMPLES.values() if (more := with_nested_field(data)) is not None]
    assert deep
    for data in (b"", *NESTED, *LENGTHS, *deep):
        refuse_or_decode(name, data)


@pytest.mark.parametrize("name", DECODERS)
@settings(max_examples=20)
@given(data=st.data())
def test_decoder_refuses_mutated_messages(name: str, data: st.DataObject) -> None:
    raw = bytearray(SAMPLES[data.draw(st.sampled_from(sorted(SAMPLES)))])
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    refuse_or_decode(name, bytes(raw))


def test_malformed_covers_the_recursion_of_the_library() -> None:
    with pytest.raises(MALFORMED):
        msgspec.msgpack.decode(NESTED[0], type=dict[str, bytes])
    with pytest.raises(RecursionError):
        msgspec.msgpack.decode(NESTED[0])

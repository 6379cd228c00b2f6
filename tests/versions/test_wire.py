"""Nodes of two releases in one mesh: what an older one says is understood, and what a newer one adds is ignored or refused."""

from typing import Any

import msgspec
import pytest

from ckptstore.manifest import Manifest
from membership.envelope import VERSION, EnvelopeError, open_envelope, seal
from membership.identity import Identity
from mesh.versions import WIRE
from tests.versions.vectors import ALL, BINDING, HERE, STATEMENTS, frozen, sample

RELEASES = sorted(path.stem for path in HERE.glob("*.json"))


def named(kinds: tuple[Any, ...]) -> list[str]:
    return [name for name, kind in ALL.items() if kind in kinds]


@pytest.mark.parametrize("release", RELEASES)
def test_what_an_older_node_says_is_understood(release: str) -> None:
    vectors = frozen(release)
    assert len(vectors) > 40 and set(vectors) <= set(ALL), (
        "a type that was released is gone: who speaks it is not understood"
    )
    for name, (full, least) in vectors.items():
        value = msgspec.msgpack.decode(full, type=ALL[name])
        now = sample(ALL[name])
        for field in fields_of(full, value):
            assert getattr(value, field) == getattr(now, field), f"{name}.{field} has changed its meaning, or is gone"
        assert msgspec.msgpack.decode(least, type=ALL[name]) is not None


def fields_of(sealed: bytes, value: Any) -> list[str]:
    """Which fields were sent, by their names now."""
    told, config = msgspec.msgpack.decode(sealed), value.__struct_config__
    if isinstance(told, list):
        return list(value.__struct_fields__[: len(told) - (config.tag is not None)])
    return [field for field in told if field != config.tag_field]


@pytest.mark.parametrize("name", named(STATEMENTS))
def test_what_a_newer_node_adds_to_a_statement_is_ignored(name: str) -> None:
    value = sample(ALL[name])
    assert msgspec.msgpack.decode(grown(value), type=ALL[name]) == value


@pytest.mark.parametrize("name", named(BINDING))
def test_what_binds_is_refused_where_it_is_not_understood(name: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(grown(sample(ALL[name])), type=ALL[name])


@pytest.mark.parametrize("name", named(BINDING))
def test_what_is_not_used_is_not_sent(name: str) -> None:
    """So that a newer node that does not use what is new is understood by an older one."""
    kind = ALL[name]
    if kind is Manifest:
        return  # its bytes are its name, and its format is its own (docs/ckptstore-format.md)
    fields = msgspec.structs.fields(kind)
    if kind.__struct_config__.array_like:
        assert all(field.required for field in fields), f"{name}: an array cannot leave out a field"
        return
    told = msgspec.msgpack.decode(msgspec.msgpack.encode(sample(kind, full=False)))
    assert set(told) - {"type"} == {field.encode_name for field in fields if field.required}


def grown(value: Any) -> bytes:
    """As a newer release might send it: with one more field."""
    told = msgspec.msgpack.decode(msgspec.msgpack.encode(value))
    more = [*told, "new"] if isinstance(told, list) else {**told, "of_tomorrow": "new"}
    return msgspec.msgpack.encode(more)


def test_another_wire_is_refused_in_words() -> None:
    sealed = seal(Identity(b"i" * 32), b"m" * 16, "record", b"body")
    assert VERSION == WIRE
    with pytest.raises(EnvelopeError, match=rf"version {WIRE + 1} is not one this node speaks \({WIRE}\)"):
        open_envelope(bytes([WIRE + 1]) + sealed[1:], b"m" * 16, "record")

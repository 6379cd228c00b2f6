"""Nodes of two releases in one mesh: old messages are decoded, and unknown fields are ignored or refused."""

from typing import Any

import msgspec
import pytest

from ckptstore.manifest import Manifest
from membership.envelope import VERSION, EnvelopeError, open_envelope, seal
from membership.identity import Identity
from mesh.util.versions import WIRE
from tests.versions.vectors import ALL, BINDING, HERE, STATEMENTS, WITHDRAWN, frozen, sample

RELEASES = sorted(path.stem for path in HERE.glob("*.json"))


def named(kinds: tuple[Any, ...]) -> list[str]:
    return [name for name, kind in ALL.items() if kind in kinds]


@pytest.mark.parametrize("release", RELEASES)
def test_messages_of_an_older_release_are_decoded(release: str) -> None:
    vectors = frozen(release)
    assert len(vectors) > 40 and set(vectors) - WITHDRAWN <= set(ALL), (
        "a released type is missing, so messages of older nodes cannot be decoded"
    )
    for name in vectors.keys() - WITHDRAWN:
        full, least = vectors[name]
        old = msgspec.msgpack.decode(full)
        value = msgspec.msgpack.decode(full, type=ALL[name])
        for now in (sample(ALL[name]), value):
            known = msgspec.msgpack.decode(msgspec.msgpack.encode(now))
            assert told_before(known, old) == old, f"a field of {name} changed its meaning or is missing"
        assert msgspec.msgpack.decode(least, type=ALL[name]) is not None


def told_before(now: Any, old: Any) -> Any:
    """Return the part of a message that an older one had: structs in it have grown too."""
    if isinstance(now, dict) and isinstance(old, dict):
        return {field: told_before(now.get(field), value) for field, value in old.items()}
    if isinstance(now, list) and isinstance(old, list) and len(now) >= len(old):
        return [told_before(*both) for both in zip(now, old, strict=False)]
    return now


@pytest.mark.parametrize("name", named(STATEMENTS))
def test_unknown_fields_of_a_statement_are_ignored(name: str) -> None:
    value = sample(ALL[name])
    assert msgspec.msgpack.decode(grown(value), type=ALL[name]) == value


@pytest.mark.parametrize("name", named(BINDING))
def test_unknown_fields_of_a_binding_message_are_refused(name: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(grown(sample(ALL[name])), type=ALL[name])


@pytest.mark.parametrize("name", named(BINDING))
def test_unused_fields_are_not_sent(name: str) -> None:
    """An older node can then decode messages of a newer node that does not use its new fields."""
    kind = ALL[name]
    if kind is Manifest:
        return  # content-addressed, with a separate format (docs/reference/ckptstore-format.md)
    fields = msgspec.structs.fields(kind)
    if kind.__struct_config__.array_like:
        assert all(field.required for field in fields), f"{name}: an array cannot leave out a field"
        return
    told = msgspec.msgpack.decode(msgspec.msgpack.encode(sample(kind, full=False)))
    assert set(told) - {"type"} == {field.encode_name for field in fields if field.required}


def grown(value: Any) -> bytes:
    """Encode the value with one more field, as a newer release might."""
    told = msgspec.msgpack.decode(msgspec.msgpack.encode(value))
    more = [*told, "new"] if isinstance(told, list) else {**told, "of_tomorrow": "new"}
    return msgspec.msgpack.encode(more)


def test_unknown_wire_version_is_refused_with_a_message() -> None:
    sealed = seal(Identity(b"i" * 32), b"m" * 16, "record", b"body")
    assert VERSION == WIRE
    with pytest.raises(EnvelopeError, match=rf"version {WIRE + 1} is not supported \(this node uses version {WIRE}\)"):
        open_envelope(bytes([WIRE + 1]) + sealed[1:], b"m" * 16, "record")

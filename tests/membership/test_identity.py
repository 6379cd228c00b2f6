from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from membership.identity import Identity, IdentityError, format_id, parse_id, short_id, verify

KEYS = st.binary(min_size=32, max_size=32)
ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"


@given(KEYS)
def test_ids_round_trip_in_any_case(node: bytes) -> None:
    text = format_id(node)
    assert parse_id(text) == parse_id(text.upper().replace("-", " ")) == node
    assert text.replace("-", "").startswith(short_id(node))


@given(KEYS, st.integers(0, 55), st.sampled_from(ALPHABET))
def test_single_typo_in_an_id_is_detected(node: bytes, place: int, other: str) -> None:
    plain = format_id(node).replace("-", "")
    if plain[place] == other:
        return
    with pytest.raises(ValueError, match=r"check character|possible"):
        parse_id(plain[:place] + other + plain[place + 1 :])


@given(st.text(max_size=80))
def test_any_text_is_an_id_or_a_value_error(text: str) -> None:
    try:
        assert len(parse_id(text)) == 32
    except ValueError as error:
        assert str(error)


def test_key_file_readable_by_others_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "node.key"
    Identity.generate().save(path)
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o640)
    with pytest.raises(IdentityError, match="chmod 600"):
        Identity.load(path)


def test_key_file_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "node.key"
    first = Identity.generate()
    first.save(path)
    with pytest.raises(FileExistsError):
        Identity.generate().save(path)
    assert Identity.load(path).node_id == first.node_id


def test_damaged_key_file_error_gives_advice(tmp_path: Path) -> None:
    path = tmp_path / "node.key"
    path.write_bytes(b"short")
    path.chmod(0o600)
    with pytest.raises(IdentityError, match="join the mesh again"):
        Identity.load(path)


@given(st.binary(max_size=50), st.binary(max_size=50), st.binary(max_size=70))
def test_only_the_right_signature_verifies(context: bytes, payload: bytes, junk: bytes) -> None:
    identity = Identity(b"\x01" * 32)
    signature = identity.sign(context, payload)
    assert verify(identity.node_id, context, payload, signature)
    assert not verify(identity.node_id, context + b"x", payload, signature)
    assert not verify(identity.node_id, context, payload, junk)
    assert not verify(junk, context, payload, signature)

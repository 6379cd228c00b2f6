import pytest
from hypothesis import given
from hypothesis import strategies as st

from membership.envelope import EnvelopeError, Recent, open_envelope, seal
from membership.identity import Identity

ME = Identity(b"\x05" * 32)
MESH = b"m" * 16


@given(st.binary(max_size=200))
def test_round_trip(payload: bytes) -> None:
    assert open_envelope(seal(ME, MESH, "ping", payload), MESH, "ping") == (ME.node_id, payload)


@given(st.binary(max_size=100), st.data())
def test_envelope_with_a_changed_bit_is_refused(payload: bytes, data: st.DataObject) -> None:
    sealed = bytearray(seal(ME, MESH, "ping", payload))
    place = data.draw(st.integers(0, len(sealed) * 8 - 1))
    sealed[place // 8] ^= 1 << (place % 8)
    with pytest.raises(EnvelopeError):
        open_envelope(bytes(sealed), MESH, "ping")


def test_envelope_of_another_kind_or_mesh_is_refused() -> None:
    sealed = seal(ME, MESH, "record", b"x")
    for mesh, kind in [(MESH, "command"), (b"n" * 16, "record")]:
        with pytest.raises(EnvelopeError):
            open_envelope(sealed, mesh, kind)


@given(st.binary(max_size=300))
def test_hostile_bytes_raise_envelope_error(data: bytes) -> None:
    with pytest.raises(EnvelopeError):
        open_envelope(data, MESH, "ping")


@given(st.lists(st.binary(min_size=1, max_size=2), max_size=60))
def test_recent_remembers_the_last_values(values: list[bytes]) -> None:
    recent = Recent(8)
    window: list[bytes] = []
    for value in values:
        assert recent.seen_before(value) == (value in window)
        if value not in window:
            window = [*window, value][-8:]

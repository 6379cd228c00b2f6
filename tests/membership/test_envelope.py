import pytest
from hypothesis import given
from hypothesis import strategies as st

from membership.envelope import EnvelopeError, Recent, ReplayWindow, open_envelope, seal
from membership.identity import Identity

ME = Identity(b"\x05" * 32)
MESH = b"m" * 16


@given(st.binary(max_size=200))
def test_round_trip(payload: bytes) -> None:
    assert open_envelope(seal(ME, MESH, "ping", payload), MESH, "ping") == (ME.node_id, payload)


@given(st.binary(max_size=100), st.data())
def test_any_changed_bit_is_refused(payload: bytes, data: st.DataObject) -> None:
    sealed = bytearray(seal(ME, MESH, "ping", payload))
    place = data.draw(st.integers(0, len(sealed) * 8 - 1))
    sealed[place // 8] ^= 1 << (place % 8)
    with pytest.raises(EnvelopeError):
        open_envelope(bytes(sealed), MESH, "ping")


def test_another_kind_or_mesh_is_refused() -> None:
    sealed = seal(ME, MESH, "record", b"x")
    for mesh, kind in [(MESH, "command"), (b"n" * 16, "record")]:
        with pytest.raises(EnvelopeError):
            open_envelope(sealed, mesh, kind)


@given(st.binary(max_size=300))
def test_hostile_bytes_are_an_envelope_error(data: bytes) -> None:
    with pytest.raises(EnvelopeError):
        open_envelope(data, MESH, "ping")


def test_replays_are_refused_until_they_expire_and_after() -> None:
    window = ReplayWindow(capacity=100, grace_s=10)
    assert window.admit(b"a", b"1", expires_unix=60, now_unix=0)
    assert not window.admit(b"a", b"1", expires_unix=60, now_unix=1)
    assert window.admit(b"b", b"1", expires_unix=60, now_unix=1), "another sender's nonce is another one"
    assert not window.admit(b"a", b"1", expires_unix=60, now_unix=100), "expired by now"
    assert not window.admit(b"a", b"2", expires_unix=10_000, now_unix=0), "nobody may reserve the far future"


def test_a_flooding_sender_does_not_shut_out_others() -> None:
    window = ReplayWindow(capacity=1000, grace_s=0, per_sender=5)
    admitted = [window.admit(b"a", bytes([n]), 60, 0) for n in range(20)]
    assert admitted.count(True) == 5
    assert window.admit(b"b", b"x", 60, 0)
    assert window.admit(b"a", b"later", 200, 100), "room comes back when nonces expire"


@given(st.lists(st.binary(min_size=1, max_size=2), max_size=60))
def test_recent_remembers_the_last_values(values: list[bytes]) -> None:
    recent = Recent(8)
    window: list[bytes] = []
    for value in values:
        assert recent.seen_before(value) == (value in window)
        if value not in window:
            window = [*window, value][-8:]

"""Knocking: what is answered to whom, what waits, and what hostile bytes come to."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from membership.admission import (
    FORGOTTEN_AFTER_S,
    WAITING_AT_ONCE,
    Knock,
    Porch,
    decode_admitted,
    decode_waiting,
    encode_admitted,
    encode_waiting,
    make_knock,
    read_allow_list,
    read_answer,
)
from membership.envelope import EnvelopeError, Seals
from membership.identity import Identity, format_id
from membership.reconcile import FrameError
from membership.trust import ROLES, TrustError, TrustStore, admit_node, found_mesh, make_revocation

NOW = 1_800_000_000.0
ROOT, STRANGER = Identity(b"\x31" * 32), Identity(b"\x32" * 32)
GENESIS, CHAIN = found_mesh(ROOT, "lab", "root", "ada", NOW)


def nobody(node: bytes, knock: Knock) -> bytes:
    return b""


def porch() -> tuple[Porch, TrustStore]:
    store = TrustStore(GENESIS)
    return Porch(ROOT, store), store


def test_a_stranger_waits_until_it_is_let_in_and_the_answer_proves_itself() -> None:
    made, store = porch()
    knock = make_knock(STRANGER, 7, "desk", "bob")
    node, mesh, answer = read_answer(made.answer(knock, "10.0.0.9", CHAIN, NOW, nobody), 7, NOW)
    assert (node, mesh.mesh_id, answer.state) == (ROOT.node_id, store.mesh_id, "waiting")
    (entry,) = decode_waiting(encode_waiting(made.waiting()))
    assert (entry.node, entry.nick, entry.user, entry.host) == (STRANGER.node_id, "desk", "bob", "10.0.0.9")

    granted = admit_node(Seals(ROOT, store.mesh_id), store, CHAIN, STRANGER.node_id, "desk", "bob", ROLES, False, NOW)
    sealed = made.answer(make_knock(STRANGER, 8, "desk", "bob"), "10.0.0.9", CHAIN, NOW, lambda n, k: granted)
    _, mesh, answer = read_answer(sealed, 8, NOW)
    assert answer.state == "admitted" and mesh.check_chain(answer.granted, NOW).node_id == STRANGER.node_id
    assert made.waiting() == []


def test_an_answer_to_another_knock_or_by_another_node_is_refused() -> None:
    made, _ = porch()
    sealed = made.answer(make_knock(STRANGER, 7, "desk", "bob"), "h", CHAIN, NOW, nobody)
    with pytest.raises(TrustError, match="not from the node"):
        read_answer(sealed, 8, NOW)
    other_genesis, _ = found_mesh(STRANGER, "x", "x", "x", NOW)
    forged = Porch(STRANGER, TrustStore(other_genesis)).answer(
        make_knock(STRANGER, 7, "d", "b"), "h", CHAIN, NOW, nobody
    )
    with pytest.raises(TrustError):
        read_answer(forged, 7, NOW)


def test_the_revoked_are_told_and_never_decided_about() -> None:
    made, store = porch()
    store.admit_revocation(make_revocation(ROOT, store, STRANGER.node_id, "", NOW), NOW)
    sealed = made.answer(make_knock(STRANGER, 1, "d", "b"), "h", CHAIN, NOW, lambda n, k: pytest.fail("asked"))
    assert read_answer(sealed, 1, NOW)[2].state == "revoked" and made.waiting() == []


def test_few_wait_and_not_for_ever() -> None:
    made, _ = porch()
    for number in range(WAITING_AT_ONCE):
        made.answer(make_knock(Identity.generate(), number, "d", "b"), "h", CHAIN, NOW, nobody)
    sealed = made.answer(make_knock(STRANGER, 1, "d", "b"), "h", CHAIN, NOW, nobody)
    assert read_answer(sealed, 1, NOW)[2].state == "full" and len(made.waiting()) == WAITING_AT_ONCE
    later = NOW + FORGOTTEN_AFTER_S + 1
    sealed = made.answer(make_knock(STRANGER, 2, "d", "b"), "h", CHAIN, later, nobody)
    assert read_answer(sealed, 2, later)[2].state == "waiting" and len(made.waiting()) == 1


@given(st.binary(max_size=300))
def test_hostile_knocks_and_answers_are_refused(data: bytes) -> None:
    made, _ = porch()
    with pytest.raises((EnvelopeError, FrameError)):
        made.answer(b"K" + data, "h", CHAIN, NOW, nobody)
    with pytest.raises(TrustError):
        read_answer(data, 1, NOW)
    assert decode_waiting(data) is not None and decode_admitted(data) is not None
    assert made.waiting() == []


@given(st.text(max_size=70), st.text(max_size=70))
def test_names_are_bounded(nick: str, user: str) -> None:
    made, _ = porch()
    try:
        made.answer(make_knock(STRANGER, 1, nick, user), "h", CHAIN, NOW, nobody)
    except (FrameError, UnicodeEncodeError):
        assert not nick or not user or not (nick + user).isprintable() or len(nick) <= 64
    assert all(len(entry.nick) <= 64 and len(entry.user) <= 64 for entry in made.waiting())


def test_admitted_chains_come_back_as_they_were() -> None:
    assert decode_admitted(encode_admitted({b"a": b"b"})) == {b"a": b"b"}
    assert decode_admitted(b"") == {} and decode_waiting(b"") == []


def test_an_allow_list_names_its_mistakes(tmp_path: Path) -> None:
    path = tmp_path / "allow"
    assert read_allow_list(path) == {}
    key = format_id(STRANGER.node_id)
    path.write_text(f"\n# people\n{key} nick=desk user=bob roles=user  # his laptop\n")
    (entry,) = read_allow_list(path).values()
    assert (entry.node, entry.nick, entry.user, entry.roles) == (STRANGER.node_id, "desk", "bob", ("user",))
    for line, words in (
        ("abc", "characters"),
        (f"{key} admin", "nick=NAME"),
        (f"{key} roles=root", "provider and user"),
        (key[:-1] + ("a" if key[-1] != "a" else "b"), "check character"),
    ):
        path.write_text(f"\n{line}\n")
        with pytest.raises(TrustError, match="line 2") as refused:
            read_allow_list(path)
        assert words in str(refused.value)


@given(st.binary(max_size=100))
def test_hostile_allow_lists_are_errors_or_lists(data: bytes) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "allow"
        path.write_bytes(data)
        try:
            assert isinstance(read_allow_list(path), dict)
        except TrustError as error:
            assert str(path) in str(error)

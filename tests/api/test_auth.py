"""What gets past the gate between nodes: only what a member signed, for this node, this call, this body, once."""

import base64
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from membership.identity import Identity
from membership.trust import TrustStore, accept_invite, found_mesh, make_invite, parse_invite
from mesh.api.auth import VALID_S, Gatekeeper, RequestRefused, sign_request

NOW = 1_800_000_000
FOUNDER, MEMBER, STRANGER = (Identity(bytes([number]) * 32) for number in (1, 2, 3))
GENESIS, CHAIN = found_mesh(FOUNDER, "lab", "root", "ada", NOW)
INVITE = parse_invite(make_invite(FOUNDER, CHAIN, GENESIS, (), 3600, NOW), NOW)
BODY = b"the body"


def make_gate() -> tuple[Gatekeeper, bytes]:
    trust = TrustStore(GENESIS)
    trust.admit_chain(CHAIN, NOW)
    trust.admit_chain(accept_invite(INVITE, MEMBER.node_id, "desk", "bob", NOW), NOW)
    return Gatekeeper(FOUNDER.node_id, trust.mesh_id, trust), trust.mesh_id


def sign(mesh_id: bytes, identity: Identity = MEMBER, **changes: object) -> str:
    fields: dict[str, object] = {
        "recipient": FOUNDER.node_id,
        "method": "POST",
        "path": "/v1/messages",
        "body": BODY,
        "nonce": b"n" * 16,
        "now": NOW,
    }
    return sign_request(identity, mesh_id, **{**fields, **changes})  # type: ignore[arg-type]


def test_a_signed_call_of_a_member_is_let_in_with_its_standing() -> None:
    gate, mesh_id = make_gate()
    standing = gate.admit(sign(mesh_id), "POST", "/v1/messages", BODY, NOW)
    assert (standing.node_id, standing.user) == (MEMBER.node_id, "bob")


Tamper = Callable[[bytes], dict[str, object]]


@pytest.mark.parametrize(
    ("reason", "header"),
    [
        ("unsigned", lambda mesh: None),
        ("unsigned", lambda mesh: ""),
        ("unsigned", lambda mesh: "not base64 ÿ"),
        ("unsigned", lambda mesh: base64.b64encode(b"x" * 200).decode()),
        ("unsigned", lambda mesh: sign(b"another mesh" + b"\0" * 20)),
        ("foreign", lambda mesh: sign(mesh, STRANGER)),
        ("misdirected", lambda mesh: sign(mesh, recipient=STRANGER.node_id)),
        ("misdirected", lambda mesh: sign(mesh, method="PUT")),
        ("misdirected", lambda mesh: sign(mesh, path="/v1/messages?x=1")),
        ("altered", lambda mesh: sign(mesh, body=b"another body")),
        ("altered", lambda mesh: sign(mesh, body=None)),
        ("replayed", lambda mesh: sign(mesh, now=NOW - VALID_S - 600)),
    ],
)
def test_everything_else_is_refused_by_its_kind(reason: str, header: Callable[[bytes], str | None]) -> None:
    gate, mesh_id = make_gate()
    with pytest.raises(RequestRefused) as caught:
        gate.admit(header(mesh_id), "POST", "/v1/messages", BODY, NOW)
    assert caught.value.reason == reason


def test_a_call_is_let_in_once() -> None:
    gate, mesh_id = make_gate()
    gate.admit(sign(mesh_id), "POST", "/v1/messages", BODY, NOW)
    with pytest.raises(RequestRefused) as caught:
        gate.admit(sign(mesh_id), "POST", "/v1/messages", BODY, NOW + 1)
    assert caught.value.reason == "replayed"
    gate.admit(sign(mesh_id, nonce=b"m" * 16), "POST", "/v1/messages", BODY, NOW + 1)


def test_a_streamed_call_may_leave_its_body_unhashed_only_where_none_is_expected() -> None:
    gate, mesh_id = make_gate()
    gate.admit(sign(mesh_id, body=None, method="PUT", path="/v1/chunks"), "PUT", "/v1/chunks", None, NOW)


def test_a_member_whose_certificate_has_ended_is_foreign() -> None:
    gate, mesh_id = make_gate()
    late = NOW + 400 * 86_400
    with pytest.raises(RequestRefused) as caught:
        gate.admit(sign(mesh_id, now=late), "POST", "/v1/messages", BODY, late)
    assert caught.value.reason == "foreign"


@given(st.one_of(st.binary(max_size=300).map(lambda raw: base64.b64encode(raw).decode()), st.text(max_size=300)))
def test_hostile_headers_are_refused(header: str) -> None:
    gate, _ = make_gate()
    with pytest.raises(RequestRefused):
        gate.admit(header, "POST", "/v1/messages", BODY, NOW)


@given(st.data())
def test_one_altered_bit_is_refused(data: st.DataObject) -> None:
    gate, mesh_id = make_gate()
    raw = bytearray(base64.b64decode(sign(mesh_id)))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(RequestRefused):
        gate.admit(base64.b64encode(bytes(raw)).decode(), "POST", "/v1/messages", BODY, NOW)

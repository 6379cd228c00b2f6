"""Every direct call between nodes is signed by its sender: recipient, method, path, body hash, nonce, expiry.

The signature travels in one header. A body that is streamed is not hashed (`body` None); such routes accept only bytes that
prove themselves, chunk by chunk. Replays are refused until the expiry, then the expiry refuses them.
"""

import base64
import binascii
from hashlib import blake2b

import msgspec

from membership.envelope import EnvelopeError, ReplayWindow, open_envelope, seal
from membership.identity import Identity, NodeId
from membership.trust import Standing, TrustStore

HEADER = "Mesh-Request"
VALID_S = 60  # plus the clock grace below; well under the 120 s a command may live
CLOCK_GRACE_S = 120.0  # nodes may disagree about the time by this much


class RequestRefused(Exception):
    """The call is not let in; `reason` is a short word for the counters, the text is for people."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class SignedRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    recipient: bytes
    nonce: bytes
    expires_unix: int
    method: str
    path: str
    body: bytes | None


_decoder = msgspec.msgpack.Decoder(SignedRequest)


def body_hash(body: bytes) -> bytes:
    return blake2b(body, digest_size=32).digest()


def sign_request(
    identity: Identity,
    mesh_id: bytes,
    recipient: NodeId,
    method: str,
    path: str,
    body: bytes | None,
    nonce: bytes,
    now: int,
) -> str:
    request = SignedRequest(
        recipient=recipient,
        nonce=nonce,
        expires_unix=now + VALID_S,
        method=method,
        path=path,
        body=None if body is None else body_hash(body),
    )
    return base64.b64encode(seal(identity, mesh_id, "request", msgspec.msgpack.encode(request))).decode()


class Gatekeeper:
    """Checks signed requests for one node."""

    def __init__(self, me: NodeId, mesh_id: bytes, trust: TrustStore) -> None:
        self._me = me
        self._mesh_id = mesh_id
        self._trust = trust
        self._replays = ReplayWindow(capacity=65_536, grace_s=CLOCK_GRACE_S)

    def admit(self, header: str | None, method: str, path: str, body: bytes | None, now_unix: float) -> Standing:
        """The standing of the caller, or RequestRefused."""
        if not header:
            raise RequestRefused("unsigned", "the request is not signed")
        try:
            data = base64.b64decode(header, validate=True)
            sender, payload = open_envelope(data, self._mesh_id, "request")
            request = _decoder.decode(payload)
        except (binascii.Error, ValueError, EnvelopeError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise RequestRefused("unsigned", f"the request's signature is not valid: {error}") from error
        if request.recipient != self._me or request.method != method or request.path != path:
            raise RequestRefused("misdirected", "the request was signed for another node or another call")
        if request.body is not None and (body is None or body_hash(body) != request.body):
            raise RequestRefused("altered", "the body is not the one that was signed")
        if request.body is None and body is not None:
            raise RequestRefused("altered", "this call needs a signed body")
        standing = self._trust.standing(sender, now_unix)
        if standing is None:
            raise RequestRefused("foreign", "the sender is not a member of this mesh, or its certificate has ended")
        if not self._replays.admit(sender, request.nonce, request.expires_unix, now_unix):
            raise RequestRefused("replayed", "the request was seen before, or is too old: is the clock right?")
        return standing

"""Sealed (signed) envelopes: `version | sender | signature | payload`, relayed byte for byte.

The signature covers the context `mesh/v1/<kind>/<mesh id>` and the payload, so that a record cannot pass as a command, nor a
message of one mesh in another. A payload is verified before any of it is decoded. To seal means to sign here, not to encrypt.
"""

from collections import deque
from collections.abc import Callable, Sequence

from membership.identity import ID_BYTES, Identity, NodeId, verify

VERSION = 1
SIGNATURE_BYTES = 64
OVERHEAD = 1 + ID_BYTES + SIGNATURE_BYTES


class EnvelopeError(ValueError):
    """These bytes are not a valid envelope of this kind in this mesh."""


def seal(identity: Identity, mesh_id: bytes, kind: str, payload: bytes) -> bytes:
    signature = identity.sign(_context(mesh_id, kind), payload)
    return bytes([VERSION]) + identity.node_id + signature + payload


def open_envelope(data: bytes, mesh_id: bytes, kind: str) -> tuple[NodeId, bytes]:
    """Return the sender and the payload; EnvelopeError if the signature does not match."""
    if len(data) < OVERHEAD:
        raise EnvelopeError("too short for a signed message")
    if data[0] != VERSION:
        raise EnvelopeError(f"envelope version {data[0]} is not supported (this node uses version {VERSION})")
    sender = data[1 : 1 + ID_BYTES]
    signature = data[1 + ID_BYTES : OVERHEAD]
    payload = data[OVERHEAD:]
    if not verify(sender, _context(mesh_id, kind), payload, signature):
        raise EnvelopeError("the signature is invalid")
    return sender, payload


TAG_BYTES = 8  # a prefix of the key, enough to find it; the signature proves it
ADDRESSED_OVERHEAD = 1 + TAG_BYTES + SIGNATURE_BYTES


class UnknownSender(EnvelopeError):
    """No known node has this tag."""


def seal_to(identity: Identity, mesh_id: bytes, kind: str, recipient: NodeId, payload: bytes) -> bytes:
    """Seal for one recipient in few bytes: `version | first 8 bytes of the sender's key | signature | payload`.

    The signature covers the recipient, which is not sent: at any other node the signature is invalid.
    """
    signature = identity.sign(_context(mesh_id, kind) + recipient, payload)
    return bytes([VERSION]) + identity.node_id[:TAG_BYTES] + signature + payload


def open_addressed(
    data: bytes, mesh_id: bytes, kind: str, recipient: NodeId, resolve: Callable[[bytes], Sequence[NodeId]]
) -> tuple[NodeId, bytes]:
    """Return the sender and the payload. `resolve` returns the known keys that begin with a tag."""
    if len(data) < ADDRESSED_OVERHEAD or data[0] != VERSION:
        raise EnvelopeError("not an addressed message of this version")
    signature, payload = data[1 + TAG_BYTES : ADDRESSED_OVERHEAD], data[ADDRESSED_OVERHEAD:]
    candidates = resolve(data[1 : 1 + TAG_BYTES])
    if not candidates:
        raise UnknownSender("the sender is unknown")
    for sender in candidates:
        if verify(sender, _context(mesh_id, kind) + recipient, payload, signature):
            return sender, payload
    raise EnvelopeError("the signature is invalid, or the message is for another node")


class MeshSealer:
    """MeshSealer envelopes with one member's key in one mesh, and opens those of others."""

    def __init__(self, identity: Identity, mesh_id: bytes) -> None:
        self._identity, self._mesh_id = identity, mesh_id
        self.node_id = identity.node_id

    def seal(self, kind: str, payload: bytes) -> bytes:
        return seal(self._identity, self._mesh_id, kind, payload)

    def open(self, kind: str, data: bytes) -> tuple[NodeId, bytes]:
        return open_envelope(data, self._mesh_id, kind)

    def seal_to(self, recipient: NodeId, payload: bytes) -> bytes:
        return seal_to(self._identity, self._mesh_id, "swim", recipient, payload)

    def open_addressed(self, data: bytes, resolve: Callable[[bytes], Sequence[NodeId]]) -> tuple[NodeId, bytes]:
        return open_addressed(data, self._mesh_id, "swim", self.node_id, resolve)


def _context(mesh_id: bytes, kind: str) -> bytes:
    return b"mesh/v1/" + kind.encode() + b"/" + mesh_id


class Recent:
    """The last `capacity` values seen, to refuse duplicated packets cheaply."""

    def __init__(self, capacity: int) -> None:
        self._order: deque[bytes] = deque(maxlen=capacity)
        self._members: set[bytes] = set()

    def __contains__(self, value: bytes) -> bool:
        return value in self._members

    def seen_before(self, value: bytes) -> bool:
        """Add a value; return True if it was there already."""
        if value in self._members:
            return True
        if len(self._order) == self._order.maxlen:
            self._members.discard(self._order[0])
        self._order.append(value)
        self._members.add(value)
        return False

"""Signed bytes: `version | sender | signature | payload`, signed and relayed exactly as they are.

The signature covers the context `mesh/v1/<kind>/<mesh id>` before the payload, so that a record can never pass as a
command, nor anything from one mesh in another. Nothing of the payload is decoded before it is verified.
"""

from collections import OrderedDict, deque
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
    """The sender and the payload; EnvelopeError if a single bit is not as it was signed."""
    if len(data) < OVERHEAD:
        raise EnvelopeError("too short for a signed message")
    if data[0] != VERSION:
        raise EnvelopeError(f"version {data[0]} is not one this node speaks ({VERSION})")
    sender = data[1 : 1 + ID_BYTES]
    signature = data[1 + ID_BYTES : OVERHEAD]
    payload = data[OVERHEAD:]
    if not verify(sender, _context(mesh_id, kind), payload, signature):
        raise EnvelopeError("the signature does not fit")
    return sender, payload


TAG_BYTES = 8  # enough to find the key; the signature proves it
ADDRESSED_OVERHEAD = 1 + TAG_BYTES + SIGNATURE_BYTES


class UnknownSender(EnvelopeError):
    """Nobody known has this tag."""


def seal_to(identity: Identity, mesh_id: bytes, kind: str, recipient: NodeId, payload: bytes) -> bytes:
    """For one recipient, in as few bytes as can be: `version | sender's first 8 bytes | signature | payload`.

    The recipient is signed but not sent: to anybody else the signature does not fit.
    """
    signature = identity.sign(_context(mesh_id, kind) + recipient, payload)
    return bytes([VERSION]) + identity.node_id[:TAG_BYTES] + signature + payload


def open_addressed(
    data: bytes, mesh_id: bytes, kind: str, recipient: NodeId, resolve: Callable[[bytes], Sequence[NodeId]]
) -> tuple[NodeId, bytes]:
    """The sender and the payload; `resolve` gives the known keys that begin with a tag."""
    if len(data) < ADDRESSED_OVERHEAD or data[0] != VERSION:
        raise EnvelopeError("not an addressed message of this version")
    signature, payload = data[1 + TAG_BYTES : ADDRESSED_OVERHEAD], data[ADDRESSED_OVERHEAD:]
    candidates = resolve(data[1 : 1 + TAG_BYTES])
    if not candidates:
        raise UnknownSender("its sender is not known here")
    for sender in candidates:
        if verify(sender, _context(mesh_id, kind) + recipient, payload, signature):
            return sender, payload
    raise EnvelopeError("the signature does not fit, or it is for another node")


class Seals:
    """One member's signature in one mesh, and the check of everybody else's."""

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


class ReplayWindow:
    """Remembers (sender, nonce) until it expires. Bounded: a sender that floods it is refused, not the others."""

    def __init__(self, capacity: int, grace_s: float, per_sender: int = 4096) -> None:
        self._capacity = capacity
        self._grace_s = grace_s
        self._per_sender = per_sender
        self._seen: OrderedDict[tuple[NodeId, bytes], float] = OrderedDict()
        self._counts: dict[NodeId, int] = {}

    def admit(
        self, sender: NodeId, nonce: bytes, expires_unix: float, now_unix: float, max_life_s: float = 120
    ) -> bool:
        """True once for each nonce, and only while it has not expired (within the clock grace)."""
        if not now_unix - self._grace_s <= expires_unix <= now_unix + max_life_s + self._grace_s:
            return False
        self._expire(now_unix)
        key = (sender, nonce)
        if key in self._seen or len(self._seen) >= self._capacity:
            return False
        if self._counts.get(sender, 0) >= self._per_sender:
            return False
        self._seen[key] = expires_unix + self._grace_s
        self._counts[sender] = self._counts.get(sender, 0) + 1
        return True

    def _expire(self, now_unix: float) -> None:
        # Insertion order is nearly expiry order; a late one only stays a little longer.
        while self._seen:
            key, gone_at = next(iter(self._seen.items()))
            if gone_at >= now_unix:
                return
            del self._seen[key]
            self._counts[key[0]] -= 1
            if not self._counts[key[0]]:
                del self._counts[key[0]]


class Recent:
    """The last `capacity` values seen, for refusing duplicated packets cheaply."""

    def __init__(self, capacity: int) -> None:
        self._order: deque[bytes] = deque(maxlen=capacity)
        self._members: set[bytes] = set()

    def __contains__(self, value: bytes) -> bool:
        return value in self._members

    def seen_before(self, value: bytes) -> bool:
        """Whether the value is among the recent ones; it is from now on."""
        if value in self._members:
            return True
        if len(self._order) == self._order.maxlen:
            self._members.discard(self._order[0])
        self._order.append(value)
        self._members.add(value)
        return False

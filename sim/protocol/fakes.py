"""Fakes for the protocol worlds: checksums for signatures, cached certificates, members of a mesh, corrupted bytes."""

from binascii import crc32
from collections.abc import Callable
from functools import cache
from hashlib import blake2b
from random import Random

import msgspec

from membership.envelope import (
    ADDRESSED_OVERHEAD,
    OVERHEAD,
    TAG_BYTES,
    VERSION,
    EnvelopeError,
    MeshSealer,
    UnknownSender,
)
from membership.identity import Identity, NodeId
from membership.trust import ROLES, Certificate, TrustStore, User, admit_node, found_mesh

UNIX = 1_800_000_000.0
ADMITTER, ADMITTED, ENDORSED = 1, 2, 3  # nodes: the first has admitted the second, which has endorsed the third
USER_NAME = "sim"  # of the user to whom all nodes belong


class ChecksumSealer:
    """A fake for Ed25519 signatures: checksums of the same length over kind, sender, receiver and payload.

    It costs a hundredth of Ed25519. Certificates keep real signatures.
    """

    def __init__(self, identity: Identity, mesh_id: bytes, on_signed: Callable[[str, bytes, bytes], None]) -> None:
        self.node_id = identity.node_id
        self._real = MeshSealer(identity, mesh_id)
        self._on_signed = on_signed

    def seal(self, kind: str, payload: bytes) -> bytes:
        if kind == "certificate":
            return self._real.seal(kind, payload)
        sealed = bytes([VERSION]) + self.node_id + _mark(kind.encode(), self.node_id, payload) + payload
        self._on_signed(kind, payload, sealed)
        return sealed

    def open(self, kind: str, data: bytes) -> tuple[NodeId, bytes]:
        sender, payload = data[1:33], data[OVERHEAD:]
        if data[:1] != bytes([VERSION]) or data[33:OVERHEAD] != _mark(kind.encode(), sender, payload):
            raise EnvelopeError("the signature does not match")
        return sender, payload

    def seal_to(self, recipient: NodeId, payload: bytes) -> bytes:
        return bytes([VERSION]) + self.node_id[:TAG_BYTES] + _mark(recipient, self.node_id, payload) + payload

    def open_addressed(self, data: bytes, resolve: Callable[[bytes], list[NodeId]]) -> tuple[NodeId, bytes]:
        if len(data) < ADDRESSED_OVERHEAD or data[0] != VERSION:
            raise EnvelopeError("not an addressed message of this version")
        senders = resolve(data[1 : 1 + TAG_BYTES])
        if not senders:
            raise UnknownSender("its sender is not known here")
        payload = data[ADDRESSED_OVERHEAD:]
        for sender in senders:
            if data[1 + TAG_BYTES : ADDRESSED_OVERHEAD] == _mark(self.node_id, sender, payload):
                return sender, payload
        raise EnvelopeError("the signature does not fit, or it is for another node")


def _mark(context: bytes, sender: bytes, payload: bytes) -> bytes:
    return crc32(payload, crc32(sender, crc32(context))).to_bytes(64, "big")


class CachedTrust(TrustStore):
    """A trust store that verifies each certificate once in a process."""

    def _open_link(self, link: bytes) -> tuple[NodeId, Certificate]:
        found = _links.get(link)
        if found is None:
            found = _links[link] = super()._open_link(link)
        return found


_links: dict[bytes, tuple[NodeId, Certificate]] = {}


class SimulatedMembers(msgspec.Struct, frozen=True):
    genesis: bytes
    identities: list[Identity]
    chains: list[bytes]


@cache
def members(count: int, bound: bool = False) -> SimulatedMembers:
    """Return a mesh of `count` members, the same in every run; the first one is the root.

    With `bound`, the second one may admit others. It has admitted the third one, which has endorsed the fourth one.
    """
    identities, draw = [Identity(_digest(b"sim %d" % number)) for number in range(count)], Random("sim").randbytes
    genesis, chain = found_mesh(identities[0], "sim", "node000", USER_NAME, UNIX - 400, draw=draw)
    trust, chains = TrustStore(genesis), [chain]
    root, user = MeshSealer(identities[0], trust.mesh_id), trust.admit_chain(chain, UNIX).binding
    for number, identity in enumerate(identities[1:], 1):
        nick, signer, own, through = f"node{number:03d}", root, chain, tuple[bytes, ...]()
        may_admit, whose = bound and number == ADMITTER, user
        if bound and number in {ADMITTED, ENDORSED}:  # founders alone bind their own names
            whose = User("guest", identities[ADMITTED].node_id, int(UNIX) - 300)
        if bound and number == ADMITTED:
            signer, own = MeshSealer(identities[ADMITTER], trust.mesh_id), chains[ADMITTER]
        elif bound and number == ENDORSED:
            endorser = trust.check_chain(chains[ADMITTED], UNIX)
            through = (*endorser.through, endorser.node_id)
        chains.append(
            admit_node(
                signer, trust, own, identity.node_id, nick, whose, ROLES, may_admit, UNIX - 300, draw, through=through
            )
        )
    return SimulatedMembers(genesis, identities, chains)


def _digest(name: bytes) -> bytes:
    return blake2b(name, digest_size=32).digest()


def corrupt(data: bytes, rng: Random) -> bytes:
    """Return hostile bytes: random, truncated, with a flipped bit, or with a random payload."""
    match rng.randrange(4):
        case 0:
            return rng.randbytes(rng.randint(0, 1200))
        case 1:
            return data[: rng.randrange(len(data))]
        case 2:
            corrupted = bytearray(data)
            corrupted[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            return bytes(corrupted)
        case _:
            return data[:ADDRESSED_OVERHEAD] + rng.randbytes(len(data) - ADDRESSED_OVERHEAD)

"""What stands for cryptography and people in the simulator: checksums for signatures, cached certificates, hostile bytes."""

from binascii import crc32
from collections.abc import Callable
from functools import cache
from hashlib import blake2b
from random import Random

import msgspec

from membership.envelope import ADDRESSED_OVERHEAD, OVERHEAD, TAG_BYTES, VERSION, EnvelopeError, Seals, UnknownSender
from membership.identity import Identity, NodeId
from membership.trust import Certificate, TrustStore, accept_invite, found_mesh, make_invite, parse_invite

UNIX = 1_800_000_000.0


class PaperSeals:
    """Stands for Ed25519 at a hundredth of its cost: a checksum over kind, sender, receiver and payload, of the same length."""

    def __init__(self, identity: Identity, mesh_id: bytes, wrote: Callable[[str, bytes, bytes], None]) -> None:
        self.node_id = identity.node_id
        self._real = Seals(identity, mesh_id)
        self._wrote = wrote

    def seal(self, kind: str, payload: bytes) -> bytes:
        if kind == "certificate":
            return self._real.seal(kind, payload)
        sealed = bytes([VERSION]) + self.node_id + _mark(kind.encode(), self.node_id, payload) + payload
        self._wrote(kind, payload, sealed)
        return sealed

    def open(self, kind: str, data: bytes) -> tuple[NodeId, bytes]:
        sender, payload = data[1:33], data[OVERHEAD:]
        if data[:1] != bytes([VERSION]) or data[33:OVERHEAD] != _mark(kind.encode(), sender, payload):
            raise EnvelopeError("the signature does not fit")
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
    """Real certificates; the same one is verified once in a process."""

    def _open_link(self, link: bytes) -> tuple[NodeId, Certificate]:
        found = _links.get(link)
        if found is None:
            found = _links[link] = super()._open_link(link)
        return found


_links: dict[bytes, tuple[NodeId, Certificate]] = {}


class People(msgspec.Struct, frozen=True):
    genesis: bytes
    identities: list[Identity]
    chains: list[bytes]


@cache
def people(count: int) -> People:
    """A mesh of so many, the same in every run of a process; the first one is the root."""
    identities = [Identity(blake2b(b"sim %d" % number, digest_size=32).digest()) for number in range(count)]
    genesis, chain = found_mesh(identities[0], "sim", "node000", "sim", UNIX - 400)
    invite = parse_invite(make_invite(identities[0], chain, genesis, (), 90 * 86_400, UNIX - 400), UNIX)
    chains = [chain]
    for number, identity in enumerate(identities[1:], 1):
        chains.append(accept_invite(invite, identity.node_id, f"node{number:03d}", "sim", UNIX - 300))
    return People(genesis, identities, chains)


def spoil(data: bytes, rng: Random) -> bytes:
    """Hostile bytes made of real ones."""
    match rng.randrange(4):
        case 0:
            return rng.randbytes(rng.randint(0, 1200))
        case 1:
            return data[: rng.randrange(len(data))]
        case 2:
            spoilt = bytearray(data)
            spoilt[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            return bytes(spoilt)
        case _:
            return data[:ADDRESSED_OVERHEAD] + rng.randbytes(len(data) - ADDRESSED_OVERHEAD)

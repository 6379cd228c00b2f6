"""Wire format of lane 1: evidence about members (signed by its author, relayed verbatim) and the packets that carry it."""

from typing import Literal

import msgspec

from membership.addresses import is_endpoint
from membership.malformed import MALFORMED

MAX_EPOCH = 2**62
MAX_INCARNATION = 2**32
EPOCH_AHEAD_MS = 100 * 86_400_000  # epochs are start times; exceeds the lifetime of every certificate except a root's
MAX_NONCE = 2**63
# Sealed, with fields of later versions; it takes 210 bytes now. An ack with a statement and an accusation fits into a packet.
MAX_EVIDENCE_BYTES = 512


class Evidence(msgspec.Struct, frozen=True, array_like=True, tag=True):
    node: bytes
    epoch: int
    incarnation: int


class Alive(Evidence, frozen=True, array_like=True, tag="a"):
    """A node's statement about itself: it is alive at this address, and `draining` while it is about to leave.

    `boot` is the epoch with which this run of its daemon began. It tells two machines with one key apart.
    """

    host: str
    port: int
    draining: bool
    boot: int = 0


class Left(Evidence, frozen=True, array_like=True, tag="l"):
    """A node's statement about itself: it leaves the mesh."""


class Suspect(Evidence, frozen=True, array_like=True, tag="s"):
    """An accusation: the node answered neither the accuser nor its relays. `refused`: its machine refused a TCP connection."""

    refused: bool = False


class Dead(Evidence, frozen=True, array_like=True, tag="d"):
    """An accusation: the accuser's suspicion of the node ran out."""


AnyEvidence = Alive | Left | Suspect | Dead
GossipKind = Literal["member", "record"]
Gossip = tuple[tuple[GossipKind, bytes], ...]


class Packet(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """`nonce` makes each packet unique; `root` is the hash of the sender's state. The signature covers the receiver."""

    nonce: int
    root: bytes
    gossip: Gossip


class Ping(Packet, frozen=True, array_like=True, tag="p"):
    pass


class Ack(Packet, frozen=True, array_like=True, tag="a"):
    """`answers` is the nonce of the ping; `wall_unix` is the sender's clock in seconds, used to detect clock skew."""

    answers: int
    wall_unix: int = 0


class PingRequest(Packet, frozen=True, array_like=True, tag="r"):
    target: bytes


class Nack(Packet, frozen=True, array_like=True, tag="n"):
    answers: int


class Rumours(Packet, frozen=True, array_like=True, tag="g"):
    pass


AnyPacket = Ping | Ack | PingRequest | Nack | Rumours


class WireError(ValueError):
    """Bytes that are not a packet or evidence of this protocol."""


_packet_decoder: msgspec.msgpack.Decoder[AnyPacket] = msgspec.msgpack.Decoder(AnyPacket)
_evidence_decoder: msgspec.msgpack.Decoder[AnyEvidence] = msgspec.msgpack.Decoder(AnyEvidence)
encode = msgspec.msgpack.encode


def decode_packet(payload: bytes) -> AnyPacket:
    try:
        packet = _packet_decoder.decode(payload)
    except MALFORMED as error:
        raise WireError(f"not a packet: {error}") from error
    if not 0 <= packet.nonce < MAX_NONCE:
        raise WireError("impossible nonce")
    return packet


def decode_evidence(author: bytes, payload: bytes) -> AnyEvidence:
    """Decode evidence and check that its author may give it. WireError for anything else."""
    try:
        evidence = _evidence_decoder.decode(payload)
    except MALFORMED as error:
        raise WireError(f"not evidence: {error}") from error
    if isinstance(evidence, Alive | Left) and evidence.node != author:
        raise WireError("only a node itself may state that it is alive or has left")
    if not (0 <= evidence.epoch < MAX_EPOCH and 0 <= evidence.incarnation < MAX_INCARNATION):
        raise WireError("impossible epoch or incarnation")
    if isinstance(evidence, Alive) and not is_endpoint(evidence.host, evidence.port):
        raise WireError("impossible address")
    return evidence

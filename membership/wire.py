"""What travels: evidence about members (signed by its author, relayed verbatim) and the packets that carry it."""

from typing import Literal

import msgspec

MAX_EPOCH = 2**62
MAX_INCARNATION = 2**32
EPOCH_AHEAD_MS = 100 * 86_400_000  # an epoch is the wall clock of a start: longer than any certificate but a root's
MAX_NONCE = 2**63


class Evidence(msgspec.Struct, frozen=True, array_like=True, tag=True):
    node: bytes
    epoch: int
    incarnation: int


class Alive(Evidence, frozen=True, array_like=True, tag="a"):
    """Said by the node of itself: I am here, at this address; `draining` while I am about to leave.

    `boot` is the epoch that this run of its daemon began with: a machine that outbids us with another one has our key too.
    """

    host: str
    port: int
    draining: bool
    boot: int = 0


class Left(Evidence, frozen=True, array_like=True, tag="l"):
    """Said by the node of itself: I go, in order."""


class Suspect(Evidence, frozen=True, array_like=True, tag="s"):
    """Said by an accuser: it did not answer me or my relays. `refused`: its machine did, that no process listens there."""

    refused: bool = False


class Dead(Evidence, frozen=True, array_like=True, tag="d"):
    """Said by an accuser: my suspicion ran out."""


AnyEvidence = Alive | Left | Suspect | Dead
GossipKind = Literal["member", "record"]
Gossip = tuple[tuple[GossipKind, bytes], ...]


class Packet(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """`nonce` makes each one new; `root` is the hash of all that its sender knows. The receiver is bound by the signature."""

    nonce: int
    root: bytes
    gossip: Gossip


class Ping(Packet, frozen=True, array_like=True, tag="p"):
    pass


class Ack(Packet, frozen=True, array_like=True, tag="a"):
    """`answers` is the nonce of the ping; `wall_unix` the sender's clock, in seconds, by which a wrong clock is found."""

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
    """Bytes that are no packet or evidence of this protocol."""


_packet_decoder: msgspec.msgpack.Decoder[AnyPacket] = msgspec.msgpack.Decoder(AnyPacket)
_evidence_decoder: msgspec.msgpack.Decoder[AnyEvidence] = msgspec.msgpack.Decoder(AnyEvidence)
encode = msgspec.msgpack.encode


def decode_packet(payload: bytes) -> AnyPacket:
    try:
        packet = _packet_decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise WireError(f"not a packet: {error}") from error
    if not 0 <= packet.nonce < MAX_NONCE:
        raise WireError("impossible nonce")
    return packet


def decode_evidence(author: bytes, payload: bytes) -> AnyEvidence:
    """Evidence, if its author may give it: only the node itself says that it is alive or has left."""
    try:
        evidence = _evidence_decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise WireError(f"not evidence: {error}") from error
    if isinstance(evidence, Alive | Left) and evidence.node != author:
        raise WireError("only a node itself says that it is alive or has left")
    if not (0 <= evidence.epoch < MAX_EPOCH and 0 <= evidence.incarnation < MAX_INCARNATION):
        raise WireError("impossible epoch or incarnation")
    if isinstance(evidence, Alive) and not (0 < evidence.port < 65536 and 0 < len(evidence.host) <= 64):
        raise WireError("impossible address")
    return evidence

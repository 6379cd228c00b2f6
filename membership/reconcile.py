"""Frames of lane 2: push-pulls and other exchanges between two nodes over TCP.

In a push-pull both nodes send their chain and digests, then what the other lacks. Client: Hello, server: Reply (with its
delta), client: Delta, server: Done. Each frame is signed by its sender and echoes the other's nonce, so that a replayed frame
answers nothing. Records come before evidence, since they carry the certificates of the evidence's authors.
"""

import msgspec

from membership.addresses import is_endpoint, is_group
from membership.malformed import MALFORMED
from membership.records import Digest

FRAME_LIMIT = 4 * 1024 * 1024  # a digest of 4096 nodes with 16 sections each
DELTA_BYTES = 1024 * 1024  # of records; the rest follows in the next exchange
TOKEN_BYTES = 16  # of a connection that waits at a relay: nobody guesses it
MAX_EVIDENCE = 4096  # in a frame: an announcement and an accusation of each of 2000 members
STRANGER_FRAME_BYTES = (
    8 * 1024
)  # of a stranger, decoded before its chain is verified: more than any chain has (own choice)


class Frame(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    nonce: int


MemberDigest = list[tuple[bytes, int, int, int]]  # node, epoch, incarnation, rank of the state


class Greeting(Frame, frozen=True, array_like=True, tag="g"):
    """Begins a push-pull that is only needed if roots differ. Answer: `Done` if `root` is equal, else `Differs`, then Hello."""

    root: bytes


class Differs(Frame, frozen=True, array_like=True, tag="f"):
    answers: int


class Hello(Frame, frozen=True, array_like=True, tag="h"):
    chain: bytes
    digest: Digest
    members: MemberDigest


class Reply(Frame, frozen=True, array_like=True, tag="r"):
    answers: int
    chain: bytes
    digest: Digest
    members: MemberDigest
    records: list[bytes]
    evidence: list[bytes]


class StreamPing(Frame, frozen=True, array_like=True, tag="p"):
    """A ping over TCP, for nodes between which UDP is blocked. Answer: `Done`."""


class Delta(Frame, frozen=True, array_like=True, tag="d"):
    answers: int
    records: list[bytes]
    evidence: list[bytes]


class Done(Frame, frozen=True, array_like=True, tag="e"):
    answers: int


class Renew(Frame, frozen=True, array_like=True, tag="n"):
    """Asks for a new certificate."""

    chain: bytes


class Renewed(Frame, frozen=True, array_like=True, tag="c"):
    """`chain` is empty if the renewal was refused; then `problem` gives the reason."""

    answers: int
    chain: bytes
    problem: str


class ReachMe(Frame, frozen=True, array_like=True, tag="m"):
    """Asks the receiver to ping the sender at this address over UDP and TCP. Answer: `Reached`."""

    host: str
    port: int


class Reached(Frame, frozen=True, array_like=True, tag="t"):
    """`udp`: a ping was answered; `tcp`: acked, refused or silent; `seen_host`: source address of this exchange."""

    answers: int
    udp: bool
    tcp: str
    seen_host: str


class RelayMe(Frame, frozen=True, array_like=True, tag="l"):
    """Asks this node to pass connections on to the sender. Sent twice: `answers` is 0, then the nonce of the `Done` in between.

    Answer: `Relayed`, then a `Waiting` for each.
    """

    relay: bytes
    answers: int


class Relayed(Frame, frozen=True, array_like=True, tag="y"):
    """`port`: where the connections come in; 0 if it was refused, then `problem` gives the reason."""

    answers: int
    port: int
    problem: str


class Waiting(Frame, frozen=True, array_like=True, tag="i"):
    """A connection from this host (`address_group`) waits for one that begins with `token`."""

    answers: int
    token: bytes
    host: str


AnyFrame = (
    Greeting
    | Differs
    | Hello
    | Reply
    | StreamPing
    | Delta
    | Done
    | Renew
    | Renewed
    | ReachMe
    | Reached
    | RelayMe
    | Relayed
    | Waiting
)


class FrameError(ValueError):
    """Bytes that are not a frame of an exchange."""


class _HelloHead(Frame, frozen=True, array_like=True, tag="h"):
    chain: bytes
    digest: msgspec.Raw
    members: msgspec.Raw


class _ReplyHead(Frame, frozen=True, array_like=True, tag="r"):
    answers: int
    chain: bytes
    digest: msgspec.Raw
    members: msgspec.Raw
    records: msgspec.Raw
    evidence: msgspec.Raw


_decoder: msgspec.msgpack.Decoder[AnyFrame] = msgspec.msgpack.Decoder(AnyFrame)
_head_decoder: msgspec.msgpack.Decoder[_HelloHead | _ReplyHead] = msgspec.msgpack.Decoder(_HelloHead | _ReplyHead)
encode_frame = msgspec.msgpack.encode


def decode_frame(payload: bytes) -> AnyFrame:
    try:
        frame = _decoder.decode(payload)
    except MALFORMED as error:
        raise FrameError(f"not a push-pull frame: {error}") from error
    if isinstance(frame, Reply | Delta) and (
        sum(map(len, frame.records)) > DELTA_BYTES or len(frame.evidence) > MAX_EVIDENCE
    ):
        raise FrameError("more than a push-pull brings")
    if isinstance(frame, ReachMe) and not is_endpoint(frame.host, frame.port):
        raise FrameError("impossible address")
    if isinstance(frame, Relayed) and not 0 <= frame.port < 65536:
        raise FrameError("impossible port")
    if isinstance(frame, Waiting) and (len(frame.token) != TOKEN_BYTES or not is_group(frame.host)):
        raise FrameError("impossible connection")
    return frame


def introduction(payload: bytes) -> Hello:
    """Return a Hello, or a Reply's chain as one, with no more than the chain decoded; FrameError for any other frame."""
    try:
        head = _head_decoder.decode(payload)
        return Hello(head.nonce, head.chain, [], [])
    except MALFORMED as error:
        raise FrameError(f"not a frame that a node introduces itself by: {error}") from error

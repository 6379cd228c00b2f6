"""The push-pull: two nodes show each other their chains and digests and send each other what is missing, over TCP.

client: Hello -> server: Reply (its delta) -> client: Delta -> server: Done. Each frame is signed by its sender and echoes the
other's nonce, so that a replayed frame answers nothing. Records come before evidence, since they carry the certificates
that make the evidence's authors known.
"""

import msgspec

from membership.records import Digest

FRAME_LIMIT = 4 * 1024 * 1024  # a digest of 4096 nodes with 16 sections each
DELTA_BYTES = 1024 * 1024  # the rest comes with the next exchange


class Frame(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    nonce: int


MemberDigest = list[tuple[bytes, int, int, int]]  # node, epoch, incarnation, rank of the state


class Greeting(Frame, frozen=True, array_like=True, tag="g"):
    """Is your root this too? Then that was all (`Done`); else go on with Hello (`Differs`)."""

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
    """Are you there? Answered with `Done`: for nodes between which UDP is blocked."""


class Delta(Frame, frozen=True, array_like=True, tag="d"):
    answers: int
    records: list[bytes]
    evidence: list[bytes]


class Done(Frame, frozen=True, array_like=True, tag="e"):
    answers: int


class Renew(Frame, frozen=True, array_like=True, tag="n"):
    """Our certificates end soon: may we have new ones?"""

    chain: bytes


class Renewed(Frame, frozen=True, array_like=True, tag="c"):
    """`chain` is empty if not; then `problem` says why."""

    answers: int
    chain: bytes
    problem: str


class ReachMe(Frame, frozen=True, array_like=True, tag="m"):
    """Try to reach us at this address, by UDP and by TCP, and say what came of it."""

    host: str
    port: int


class Reached(Frame, frozen=True, array_like=True, tag="t"):
    """`udp`: whether a ping was answered; `tcp`: acked, refused or silent; `seen_host`: where this exchange came from."""

    answers: int
    udp: bool
    tcp: str
    seen_host: str


AnyFrame = Greeting | Differs | Hello | Reply | StreamPing | Delta | Done | Renew | Renewed | ReachMe | Reached


class FrameError(ValueError):
    """Bytes that are no frame of a push-pull."""


_decoder: msgspec.msgpack.Decoder[AnyFrame] = msgspec.msgpack.Decoder(AnyFrame)
encode_frame = msgspec.msgpack.encode


def decode_frame(payload: bytes) -> AnyFrame:
    try:
        return _decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise FrameError(f"not a push-pull frame: {error}") from error

"""What the SWIM core asks of its shell, and what it tells its users."""

from typing import Literal

import msgspec

from membership.wire import AnyPacket


class SendPacket(msgspec.Struct, frozen=True):
    to: bytes
    host: str
    port: int
    packet: AnyPacket


class SetTimer(msgspec.Struct, frozen=True):
    """Call `on_timer(name, token)` at `at`; a stale token is ignored by the core."""

    name: str
    token: int
    at: float


class StreamPing(msgspec.Struct, frozen=True):
    """Ask over TCP too, and say with `on_stream_ping` what came of it: UDP may be blocked, or the process gone."""

    node: bytes
    host: str
    port: int


StreamOutcome = Literal["acked", "refused", "silent"]


class WantReconcile(msgspec.Struct, frozen=True):
    """Push-pull with this member soon: it knows something else than we do. `unless_equal`: compare roots first."""

    node: bytes
    host: str
    port: int
    unless_equal: bool = False


class PersistEpoch(msgspec.Struct, frozen=True):
    """Write and fsync this epoch before anything else is sent."""

    epoch: int


class Cloned(msgspec.Struct, frozen=True):
    """Another machine, at this address, runs with our key; `younger` if ours was started last, and should go."""

    host: str
    port: int
    younger: bool


class MemberChanged(msgspec.Struct, frozen=True):
    """`state` is alive, suspect, unreachable, dead or left; `was` what it was before, empty for a new member."""

    node: bytes
    state: str
    was: str
    draining: bool


class RecordChanged(msgspec.Struct, frozen=True):
    node: bytes
    section: str


class KeepRevocations(msgspec.Struct, frozen=True):
    """Write these sealed revocations, all that are known, to disk."""

    sealed: list[bytes]


class KeepChain(msgspec.Struct, frozen=True):
    """Write our new certificates to disk."""

    chain: bytes


Effect = (
    SendPacket
    | SetTimer
    | StreamPing
    | WantReconcile
    | PersistEpoch
    | Cloned
    | MemberChanged
    | RecordChanged
    | KeepRevocations
    | KeepChain
)

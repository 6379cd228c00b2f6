"""Effects: commands of the membership core to its shell, and events for its users."""

from typing import Literal

import msgspec

from membership.wire import AnyPacket


class SendPacket(msgspec.Struct, frozen=True):
    to: bytes
    host: str
    port: int
    packet: AnyPacket


class SetTimer(msgspec.Struct, frozen=True):
    """Call `on_timer(name, token)` at time `at`; the core ignores a stale token."""

    name: str
    token: int
    at: float


class StreamPing(msgspec.Struct, frozen=True):
    """Ping over TCP as well and report the outcome to `on_stream_ping`: UDP may be blocked, or the process gone."""

    node: bytes
    host: str
    port: int


StreamOutcome = Literal["acked", "refused", "silent"]


class WantReconcile(msgspec.Struct, frozen=True):
    """Run a push-pull with this member, whose state differs. `unless_equal`: compare roots first.

    `unproven`: an unsigned packet named the address, so perhaps nobody is there.
    """

    node: bytes
    host: str
    port: int
    unless_equal: bool = False
    unproven: bool = False


class PersistEpoch(msgspec.Struct, frozen=True):
    """Write and fsync this epoch before anything else is sent."""

    epoch: int


class Cloned(msgspec.Struct, frozen=True):
    """Another machine at this address uses our key; `younger` if this node was started later, and so has to stop."""

    host: str
    port: int
    younger: bool


class MemberChanged(msgspec.Struct, frozen=True):
    """`state` is alive, suspect, unreachable, dead or left; `was` is the previous state, empty for a new member."""

    node: bytes
    state: str
    was: str
    draining: bool


class RecordChanged(msgspec.Struct, frozen=True):
    node: bytes
    section: str


class KeepRevocations(msgspec.Struct, frozen=True):
    """Write these sealed revocations, the complete set, to disk."""

    sealed: list[bytes]


class KeepChain(msgspec.Struct, frozen=True):
    """Write this node's new certificate chain to disk."""

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

"""Reports: what a node reports to a job's runner, or to its gang member, about the guest, its files and the owner's orders."""

from typing import Literal

import msgspec

from mesh.consensus.contract import EXIT_NOT_EXECUTABLE


class GuestStarted(msgspec.Struct, frozen=True):
    resumed_step: int | None


class GuestFailed(msgspec.Struct, frozen=True):
    """The guest could not be started here. `elsewhere`: another node may succeed.

    `unfetched`: its last checkpoint could not be fetched: nodes that may have it are away, or all answered that they do not
    have it whole (lost). `predecessor_here`: the checkpoint before it is here.
    """

    reason: str
    elsewhere: bool
    exit_code: int = EXIT_NOT_EXECUTABLE
    unfetched: Literal["", "away", "lost"] = ""
    predecessor_here: bool = False


class GuestExited(msgspec.Struct, frozen=True):
    """The guest has ended. `fault`: what is wrong with this node and may be the cause; the job is not blamed then."""

    code: int
    oom: bool
    forced_done: bool
    fault: str = ""


class CheckpointFound(msgspec.Struct, frozen=True):
    """The guest has committed something newer than what was last stored."""


class CheckpointStored(msgspec.Struct, frozen=True):
    """`manifest` is on this disk and on the disks of `holders`; None if there was nothing new. `like`: see `Commit`."""

    manifest: bytes | None
    holders: tuple[bytes, ...]
    step: int | None
    platform: str = ""


class CheckpointFailed(msgspec.Struct, frozen=True):
    reason: str


class Recopied(msgspec.Struct, frozen=True):
    """A checkpoint that had lost holders is now on the disks of these nodes."""

    manifest: bytes
    holders: tuple[bytes, ...]


class ResultStored(msgspec.Struct, frozen=True):
    manifest: bytes | None
    holders: tuple[bytes, ...]
    detail: str = ""


class Progressed(msgspec.Struct, frozen=True):
    step: int


class VacateWanted(msgspec.Struct, frozen=True):
    """The node's owner wants the guest to leave: to node `to` if that can take it, else to the standby."""

    grace_s: float
    reason: str
    to: bytes | None = None


class MigrateWanted(msgspec.Struct, frozen=True):
    """The job's user wants it elsewhere: on node `to`, if given and able to take it."""

    to: bytes | None


class KillWanted(msgspec.Struct, frozen=True):
    reason: str


class ClockStood(msgspec.Struct, frozen=True):
    """CLOCK_BOOTTIME stood still for a while, as in a paused virtual machine: a lease counted by it may be over."""


class CancelWanted(msgspec.Struct, frozen=True):
    pass


RunnerEvent = (
    GuestStarted
    | GuestFailed
    | GuestExited
    | CheckpointFound
    | CheckpointStored
    | CheckpointFailed
    | ResultStored
    | Recopied
    | Progressed
    | VacateWanted
    | MigrateWanted
    | KillWanted
    | CancelWanted
    | ClockStood
)

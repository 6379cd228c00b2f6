"""What a node reports to the runner of a job, or to its member of a gang: of the guest, of its files, of its owner's wishes."""

import msgspec


class GuestStarted(msgspec.Struct, frozen=True):
    resumed_step: int | None


class GuestFailed(msgspec.Struct, frozen=True):
    """It could not be started here. `fault` says whether another node could do better."""

    reason: str
    elsewhere: bool


class GuestExited(msgspec.Struct, frozen=True):
    """`fault`: what is wrong with this node, if that may be why; the job is not to blame then."""

    code: int
    oom: bool
    forced_done: bool
    fault: str = ""


class CheckpointFound(msgspec.Struct, frozen=True):
    """The guest has committed something that is newer than what was last stored."""


class CheckpointStored(msgspec.Struct, frozen=True):
    """`manifest` is on this disk and on the `holders`' disks. None when there was nothing new to store. `like`: see `Commit`."""

    manifest: bytes | None
    holders: tuple[bytes, ...]
    step: int | None
    like: str = ""


class CheckpointFailed(msgspec.Struct, frozen=True):
    reason: str


class Recopied(msgspec.Struct, frozen=True):
    """A checkpoint that had lost holders is on these nodes' disks now."""

    manifest: bytes
    holders: tuple[bytes, ...]


class ResultStored(msgspec.Struct, frozen=True):
    manifest: bytes | None
    holders: tuple[bytes, ...]
    detail: str = ""


class Progressed(msgspec.Struct, frozen=True):
    step: int


class VacateWanted(msgspec.Struct, frozen=True):
    """Its node wants it to leave: to `to`, if that is not None and can take it, or else to its heir."""

    grace_s: float
    reason: str
    to: bytes | None = None


class MigrateWanted(msgspec.Struct, frozen=True):
    """Its user wants it elsewhere: at `to`, if that is not None and can take it."""

    to: bytes | None


class KillWanted(msgspec.Struct, frozen=True):
    reason: str


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
)

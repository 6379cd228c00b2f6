"""What job cores ask of their shell. A shell performs effects in the order in which it got them: `SaveCell` before `Send`
is what makes a promise durable before it is given."""

from typing import Literal

import msgspec

from mesh.jobs.ledger import Commit, Config, Ledger, Outcome
from mesh.jobs.messages import AnyMessage, Post
from placement.decision import Decision


class Send(msgspec.Struct, frozen=True):
    to: bytes
    message: AnyMessage


class Cell(msgspec.Struct, frozen=True):
    """A witness's durable state of one job, on `disk`. The lease's clock is not in it: see `Witness.restored`."""

    job: bytes
    disk: bytes
    spec: bytes
    config: Config
    promised: int
    accepted_term: int
    ledger: Ledger
    holder: bytes | None
    cancel_wanted: bool
    final: bool = False  # a majority holds the outcome in `ledger`; until then another may still take its place


decode_cell = msgspec.msgpack.Decoder(Cell).decode


class SaveCell(msgspec.Struct, frozen=True):
    """Write this cell and fsync it before anything that follows."""

    cell: Cell


class SetTimer(msgspec.Struct, frozen=True):
    """Call back with `Timer(name, token)` at `at`. A newer timer of the same name replaces it."""

    name: str
    token: int
    at: float


class Launch(msgspec.Struct, frozen=True):
    """Restore the base checkpoint, if any, and start the guest; `post` is its place in a gang."""

    ledger: Ledger
    post: Post | None = None


class SaveCheckpoint(msgspec.Struct, frozen=True):
    """Store what the guest has committed and replicate it; answer with `CheckpointStored` or `CheckpointFailed`."""

    seq: int
    parent: bytes | None
    final: bool


class SaveResult(msgspec.Struct, frozen=True):
    """Store the log and the published files; answer with `ResultStored`."""

    seq: int
    parent: bytes | None


class Committed(msgspec.Struct, frozen=True):
    commit: Commit


class RunUntil(msgspec.Struct, frozen=True):
    """The guest may run until this moment of CLOCK_BOOTTIME, and stands still after it until it may again."""

    boot_s: float


class Kill(msgspec.Struct, frozen=True):
    reason: str


NoticeKind = Literal["vacate", "checkpoint"]


class Notify(msgspec.Struct, frozen=True):
    """Write the notice file and, for `vacate`, send SIGTERM where it is caught."""

    kind: NoticeKind
    grace_s: float
    reason: str


class Ended(msgspec.Struct, frozen=True):
    """The attempt is over here: clean up."""

    reason: str


class Concluded(msgspec.Struct, frozen=True):
    """The whole job is over, and it was decided here."""

    outcome: Outcome


class StateChanged(msgspec.Struct, frozen=True):
    state: str
    detail: str


class Decided(msgspec.Struct, frozen=True):
    """The job was given to the first of these."""

    decision: Decision


Effect = (
    Send
    | SaveCell
    | SetTimer
    | Launch
    | SaveCheckpoint
    | SaveResult
    | Committed
    | RunUntil
    | Kill
    | Notify
    | Ended
    | Concluded
    | StateChanged
    | Decided
)

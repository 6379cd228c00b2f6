"""Effects: what job cores ask of their shell.

A shell performs effects in the order in which it receives them. `SaveWitnessRecord` before `Send` makes a promise durable
before it is given: the condition under which an acceptor may restart (Lamport 2001).
"""

from typing import Annotated, Literal

import msgspec

from membership.lengths import Id
from mesh.consensus.messages import AnyMessage, GangPlace, Sealed, Warrants
from mesh.model.record import Commit, Config, JobRecord, Outcome
from placement.decision import Decision

# Groups before the present one that are kept: those of four changes, with the joint ones, in about 6 KiB. In the simulator, two
# changes were too few to prove the witnesses of a job whose only first witness had left for good (seed 5193).
MOST_EARLIER = 8


class Send(msgspec.Struct, frozen=True):
    to: bytes
    message: AnyMessage


class WitnessRecord(msgspec.Struct, frozen=True):
    """The durable state of one job on one witness, whose journal is `disk`. The lease clock is not part of it: see
    `Witness.restored`. `owner`: the attempt that has taken the lease in the accepted term. `warrants` name the group, once it has
    changed: for a witness that missed the change. `earlier` has groups before this one, joint ones too, with theirs, the
    latest first: for a witness that missed more than one change.
    """

    job: Id
    disk: Id
    spec: Sealed
    config: Config
    promised: int
    accepted_term: int
    record: JobRecord
    holder: Id | None
    cancel_wanted: bool
    owner: Id = b""
    final: bool = False  # a majority holds the outcome in `record`; until then another outcome may replace it
    reconfiguration: Sealed = (
        b""  # the user's word for the group that a recovery named, for nodes that knew the lost one
    )
    warrants: Warrants = ()
    earlier: Annotated[tuple[tuple[Config, Warrants], ...], msgspec.Meta(max_length=MOST_EARLIER)] = ()


decode_witness_record = msgspec.msgpack.Decoder(WitnessRecord).decode


class SaveWitnessRecord(msgspec.Struct, frozen=True):
    """Write this record and fsync it before anything that follows."""

    witness_record: WitnessRecord


class SetTimer(msgspec.Struct, frozen=True):
    """Report `Timer(name, token)` at time `at`. A newer timer of the same name replaces it."""

    name: str
    token: int
    at: float


class Launch(msgspec.Struct, frozen=True):
    """Restore the base checkpoint, if any, and start the guest. `place`: the guest's place in a gang."""

    record: JobRecord
    place: GangPlace | None = None


class SaveCheckpoint(msgspec.Struct, frozen=True):
    """Store what the guest has committed and replicate it. Answered by `CheckpointStored` or `CheckpointFailed`."""

    seq: int
    parent: bytes | None
    final: bool


class SaveResult(msgspec.Struct, frozen=True):
    """Store the log and the published files. Answered by `ResultStored`."""

    seq: int
    parent: bytes | None


class Committed(msgspec.Struct, frozen=True):
    commit: Commit


class Abandoned(msgspec.Struct, frozen=True):
    """A majority holds the record in which this checkpoint is given up for `instead`, or for the beginning."""

    commit: Commit
    instead: Commit | None
    reason: str


class RunUntil(msgspec.Struct, frozen=True):
    """Let the guest run until this time of CLOCK_BOOTTIME; it is frozen from then until it may run again."""

    boot_s: float


class Kill(msgspec.Struct, frozen=True):
    reason: str


NoticeKind = Literal["vacate", "checkpoint"]


class Notify(msgspec.Struct, frozen=True):
    """Write the notice file; for `vacate`, send SIGTERM if the guest catches it."""

    kind: NoticeKind
    grace_s: float
    reason: str


class Left(msgspec.Struct, frozen=True):
    """Nothing of the attempt computes on this node any more: give its place back. What is left is to release its lease, which
    waits for as long as no majority of its witnesses answers.
    """

    reason: str


class Ended(msgspec.Struct, frozen=True):
    """The attempt is over on this node: clean up."""

    reason: str


class Concluded(msgspec.Struct, frozen=True):
    """The job is over, and this node decided it."""

    outcome: Outcome


class StateChanged(msgspec.Struct, frozen=True):
    state: str
    detail: str


class Decided(msgspec.Struct, frozen=True):
    """The leader gives the job to the first of these nodes."""

    decision: Decision


class Submitted(msgspec.Struct, frozen=True):
    """The answer to a submission: None once a majority of the witnesses has the job on disk, else the reason."""

    problem: str | None


GuestEffect = Launch | SaveCheckpoint | SaveResult | RunUntil | Kill | Notify
Effect = (
    GuestEffect
    | Send
    | SaveWitnessRecord
    | SetTimer
    | Committed
    | Abandoned
    | Left
    | Ended
    | Concluded
    | StateChanged
    | Decided
    | Submitted
)

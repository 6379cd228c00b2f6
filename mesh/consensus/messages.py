"""Messages between job cores. Every message is one-way; a reply is a message of its own.

`Prepare`/`Promised` and `Accept`/`Accepted` are the two phases of Paxos on a job's record. An `Accept` that names a holder
also grants or renews its lease, unless it says otherwise; one that names none releases it. Answers name the disk that holds
the promise (`record.Voter`). `Start`/`StartAnswer` hand a term from the leader that won it to the node that will run the job.
"""

from typing import Annotated

import msgspec

from membership.lengths import Id, Text
from membership.malformed import MALFORMED
from mesh.model.events import MAX_REPORTED
from mesh.model.record import Config, JobRecord, Number, Seconds

MAX_MESSAGE_BYTES = 1 << 20  # a spec (256 KiB of text) and a full record, with a margin
Sealed = Annotated[bytes, msgspec.Meta(max_length=MAX_MESSAGE_BYTES)]
MOST_WARRANTS = 8  # of one message: a leader's, and those of two groups of three witnesses
SealedWarrant = Annotated[bytes, msgspec.Meta(max_length=512)]
Warrants = Annotated[tuple[SealedWarrant, ...], msgspec.Meta(max_length=MOST_WARRANTS)]


class Message(msgspec.Struct, frozen=True, tag_field="type", forbid_unknown_fields=True, omit_defaults=True):
    job: Id


class Prepare(Message, frozen=True, tag="prepare"):
    """Phase 1a: ask for a promise of `term`. Refused while another node's lease runs.

    `config` and `warrants`, once the group has changed: the group that the sender knows, and warrants that name it.
    """

    term: Number
    config: Config | None = None
    warrants: Warrants = ()


class PreVote(Message, frozen=True, tag="pre_vote"):
    """Ask whether `term` would be promised. The answer promises nothing (Raft's pre-vote, Ongaro 2014, section 9.6), so a
    partitioned node cannot raise terms and disrupt the others when it returns. `config` and `warrants`: as in `Prepare`.
    """

    term: Number
    config: Config | None = None
    warrants: Warrants = ()


class PreVoteGranted(Message, frozen=True, tag="pre_vote_granted"):
    """The term would be promised."""

    term: Number
    disk: Id


class Promised(Message, frozen=True, tag="promised"):
    term: Number
    disk: Id
    config: Config
    accepted_term: Number
    record: JobRecord
    cancel_wanted: bool


class Accept(Message, frozen=True, tag="accept"):
    """Phase 2a: hold this group and record under `term`. `holder` takes or renews the lease; None releases it. Without
    `renews`, the lease ends when it would have ended.

    `round` is the sender's counter and returns in the answer. `owner` is a random name of the attempt that takes the lease; a
    term has one. `spec` is sent until the receiver has it. `reconfiguration`,
    sealed by the job's user, installs a group that the old one has not voted for (`forced_reconfiguration.py`). `warrants`:
    of the leader that gave the runner its term, and of witnesses that have accepted it, or the group, since.
    """

    term: Number
    round: Number
    config: Config
    record: JobRecord
    holder: Id | None
    owner: Id = b""
    spec: Sealed | None = None
    reconfiguration: Sealed | None = None
    warrants: Warrants = ()
    renews: bool = True


class Accepted(Message, frozen=True, tag="accepted"):
    """`warrant`, for a lease or a changed group: this witness's statement that the sender has the term with that group, for
    witnesses that do not know it.
    """

    term: Number
    disk: Id
    round: Number
    cancel_wanted: bool = False
    warrant: SealedWarrant = b""


class Refused(Message, frozen=True, tag="refused"):
    """A refusal: a higher term was promised, a lease still runs (`lease_left_s`), or the receiver needs the job's spec.

    `problem`: the receiver becomes no witness of the job, for this reason.
    """

    term: Number
    disk: Id
    round: Number
    promised: Number
    config: Config | None
    lease_left_s: Seconds
    needs_spec: bool
    finished: bool
    accepted_term: Number = 0
    record: JobRecord | None = None
    problem: Text = ""


class Introduce(Message, frozen=True, tag="introduce"):
    """Ask a node whether it can be a witness of this job, before a group that needs its vote names it."""

    spec: Sealed


class Introduced(Message, frozen=True, tag="introduced"):
    """`problem` is empty if the node can read the job's spec and can vote with this disk."""

    disk: Id
    problem: Text = ""


class Start(Message, frozen=True, tag="start"):
    """Run this attempt under `term`. The record shows why the attempt before it ended. `warrant`, sealed by the leader, gives
    the term to the receiver; the witnesses ask for it.
    """

    term: Number
    config: Config
    record: JobRecord
    spec: Sealed
    warrant: SealedWarrant = b""


class StartAnswer(Message, frozen=True, tag="start_answer"):
    term: Number
    taken: bool
    reason: Text


class Released(Message, frozen=True, tag="released"):
    """Hint to the witnesses that the job has no runner any more, so that nobody waits for the lease to expire."""

    term: Number


class Closed(Message, frozen=True, tag="closed"):
    """A majority holds this record's outcome: the job is over. Sent by the node that proposed it, or by a witness."""

    term: Number
    record: JobRecord


class Migrate(Message, frozen=True, tag="migrate"):
    """The job's user wants it to continue elsewhere, on node `to` if that can take it. Sent to the runner; authority as for
    `Cancel`.
    """

    user: Text
    to: Id | None


class MakeRoom(Message, frozen=True, tag="make_room"):
    """A more important job, `wanted_by`, needs the place; its `spec`, signed by its submitter, shows the priority. Sent to
    the runner of `job`.
    """

    wanted_by: Id
    spec: Sealed


class GangPlace(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The place of a process in a gang: `rank` of `size`. The processes meet at `host:port`, which was free on the runner's
    machine.
    """

    rank: int
    size: int
    host: Text
    port: int


class Enlist(Message, frozen=True, tag="enlist"):
    """Reserve a place for this attempt of a job that runs on several nodes, under the sender's lease of this term."""

    term: Number
    number: Number
    spec: Sealed


class Enlisted(Message, frozen=True, tag="enlisted"):
    term: Number
    taken: bool
    reason: Text


class Begin(Message, frozen=True, tag="begin"):
    """All members have a place: start the guest from this record's checkpoint."""

    term: Number
    place: GangPlace
    record: JobRecord


class ExtendRun(Message, frozen=True, tag="extend_run"):
    """Ask how long this member's guest may run. `round` is the sender's counter and returns in the answer."""

    term: Number
    round: Number


class RunGranted(Message, frozen=True, tag="run_granted"):
    """The guest may run for `left_s` seconds from the time of the question: the rest of the runner's lease."""

    term: Number
    round: Number
    left_s: Seconds


class MemberEnded(Message, frozen=True, tag="member_ended"):
    """The member's guest has ended. `problem`: why the gang cannot continue, through no fault of the job; `how` it ended."""

    term: Number
    code: int
    problem: Text = ""
    how: Text = ""


class MemberLeaving(Message, frozen=True, tag="member_leaving"):
    """The owner of the member's machine wants it back."""

    term: Number
    grace_s: Seconds
    reason: Text


class Dismiss(Message, frozen=True, tag="dismiss"):
    """The gang ends: save and leave within the grace, or at once."""

    term: Number
    grace_s: Seconds
    reason: Text


class EventReport(Message, frozen=True, tag="event_report"):
    """Signed events of the job for its witnesses to keep (`model/events.py`)."""

    events: Annotated[tuple[Sealed, ...], msgspec.Meta(max_length=MAX_REPORTED)]


class Cancel(Message, frozen=True, tag="cancel"):
    """The job's user wants it ended. The receiver checks authority against the spec's user."""

    user: Text


GangMessage = Enlist | Enlisted | Begin | ExtendRun | RunGranted | MemberEnded | MemberLeaving | Dismiss

AnyMessage = (
    GangMessage
    | PreVote
    | PreVoteGranted
    | Prepare
    | Promised
    | Accept
    | Accepted
    | Refused
    | Introduce
    | Introduced
    | Start
    | StartAnswer
    | Released
    | Closed
    | Migrate
    | EventReport
    | MakeRoom
    | Cancel
)


COST_BYTES = 16_384  # hashed in less time than one signature is checked (own measurement)


def cost_of(message: AnyMessage, size: int) -> int:
    """Return what it costs at most to handle a message of this many bytes, in checks of a signature."""
    match message:
        case EventReport(events=sealed) | Accept(warrants=sealed) | Prepare(warrants=sealed) | PreVote(warrants=sealed):
            return 1 + len(sealed) + size // COST_BYTES
    return 1 + size // COST_BYTES


class MessageError(ValueError):
    """The bytes are not a job message."""


_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode_message(message: AnyMessage) -> bytes:
    return msgspec.msgpack.encode(message)


def decode_message(data: bytes) -> AnyMessage:
    if len(data) > MAX_MESSAGE_BYTES:
        raise MessageError(f"a message of {len(data)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    try:
        return _decoder.decode(data)
    except MALFORMED as error:
        raise MessageError(f"not a job message: {error}") from error

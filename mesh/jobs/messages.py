"""What job cores say to each other. Every message is one-way; a reply is a message of its own.

`Prepare`/`Promised` and `Accept`/`Accepted` are the two phases of Paxos on a job's ledger; an `Accept` that names a
holder also grants or renews its lease, one that names none releases it. Answers name the disk on which the promise
stands (`ledger.Seat`). `Start`/`StartAnswer` hand a term, like a
baton, from the steward that won it to the node that will run the job.
"""

import msgspec

from mesh.jobs.ledger import Config, Ledger


class Message(msgspec.Struct, frozen=True, tag_field="type", forbid_unknown_fields=True, omit_defaults=True):
    job: bytes


class Prepare(Message, frozen=True, tag="prepare"):
    """May I have `term`? Refused while somebody else's lease runs."""

    term: int


class Would(Message, frozen=True, tag="would"):
    """Would you promise `term`, were you asked for it? Nothing is promised by the answer (Raft's pre-vote, thesis section 9.6):
    so that one who is cut off does not promise itself what shuts out the others when it is back."""

    term: int


class Willing(Message, frozen=True, tag="willing"):
    """Yes, I would."""

    term: int
    disk: bytes


class Promised(Message, frozen=True, tag="promised"):
    term: int
    disk: bytes
    config: Config
    accepted_term: int
    ledger: Ledger
    cancel_wanted: bool


class Accept(Message, frozen=True, tag="accept"):
    """Under `term`, hold this config and ledger. `holder` takes or renews the lease; None releases it.

    `round` is the sender's own counter and comes back in the answer. `spec` travels until the receiver has it. `mandate`,
    sealed by the job's user, lets a group take over that the old one has not voted for (`recovery.py`).
    """

    term: int
    round: int
    config: Config
    ledger: Ledger
    holder: bytes | None
    spec: bytes | None = None
    mandate: bytes | None = None


class Accepted(Message, frozen=True, tag="accepted"):
    term: int
    disk: bytes
    round: int
    cancel_wanted: bool = False


class Refused(Message, frozen=True, tag="refused"):
    """Why not: a higher term was promised, a lease still runs (`lease_left_s`), or the job's spec is needed."""

    term: int
    disk: bytes
    round: int
    promised: int
    config: Config | None
    lease_left_s: float
    needs_spec: bool
    finished: bool
    accepted_term: int = 0
    ledger: Ledger | None = None


class Start(Message, frozen=True, tag="start"):
    """Run this attempt under `term`; the ledger already shows why the one before it ended."""

    term: int
    config: Config
    ledger: Ledger
    spec: bytes


class StartAnswer(Message, frozen=True, tag="start_answer"):
    term: int
    taken: bool
    reason: str


class Released(Message, frozen=True, tag="released"):
    """A hint to the other witnesses that the job has no runner any more, so that nobody waits for a lease to expire."""

    term: int


class Closed(Message, frozen=True, tag="closed"):
    """A majority holds this ledger's outcome: the job is over. From whoever carried it there, or knows of it as a witness."""

    term: int
    ledger: Ledger


class Migrate(Message, frozen=True, tag="migrate"):
    """The job's owner wants it elsewhere, at `to` if that can take it. To its runner; authority as for `Cancel`."""

    user: str
    to: bytes | None


class MakeRoom(Message, frozen=True, tag="make_room"):
    """Another job, `wanted_by`, matters more (its `spec`, as its submitter signed it, says so). To the runner of `job`."""

    wanted_by: bytes
    spec: bytes


class Post(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A place in a gang: `rank` of `size`; they meet at `host:port`, a port that was free on the leader's machine."""

    rank: int
    size: int
    host: str
    port: int


class Enlist(Message, frozen=True, tag="enlist"):
    """Keep a place for this attempt of a job that runs on several nodes, under the sender's lease of this term."""

    term: int
    number: int
    spec: bytes


class Enlisted(Message, frozen=True, tag="enlisted"):
    term: int
    taken: bool
    reason: str


class Begin(Message, frozen=True, tag="begin"):
    """All have a place: start the guest from this ledger's checkpoint."""

    term: int
    post: Post
    ledger: Ledger


class MayRun(Message, frozen=True, tag="may_run"):
    """For how long may this mate's guest go on? `round` is the sender's own and comes back."""

    term: int
    round: int


class Run(Message, frozen=True, tag="run"):
    """`left_s` seconds of the leader's lease, counted from the asking."""

    term: int
    round: int
    left_s: float


class MateEnded(Message, frozen=True, tag="mate_ended"):
    """The mate's guest has ended; `problem` if it never started."""

    term: int
    code: int
    problem: str = ""


class Leaving(Message, frozen=True, tag="leaving"):
    """The mate's owner wants the machine back."""

    term: int
    grace_s: float
    reason: str


class Dismiss(Message, frozen=True, tag="dismiss"):
    """The gang ends: save and go within the grace, or go at once."""

    term: int
    grace_s: float
    reason: str


class Told(Message, frozen=True, tag="told"):
    """Signed events of the job (`events.py`), for its witnesses to keep."""

    events: tuple[bytes, ...]


class Cancel(Message, frozen=True, tag="cancel"):
    """The job's owner wants it ended. Authority is checked by whoever receives it, against the spec's user."""

    user: str


GangMessage = Enlist | Enlisted | Begin | MayRun | Run | MateEnded | Leaving | Dismiss

AnyMessage = (
    GangMessage
    | Would
    | Willing
    | Prepare
    | Promised
    | Accept
    | Accepted
    | Refused
    | Start
    | StartAnswer
    | Released
    | Closed
    | Migrate
    | Told
    | MakeRoom
    | Cancel
)


class MessageError(ValueError):
    """Bytes that are no job message."""


MAX_MESSAGE_BYTES = 1 << 20  # a spec (256 KiB of text) and a full ledger, with room

_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode_message(message: AnyMessage) -> bytes:
    return msgspec.msgpack.encode(message)


def decode_message(data: bytes) -> AnyMessage:
    if len(data) > MAX_MESSAGE_BYTES:
        raise MessageError(f"a message of {len(data)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise MessageError(f"not a job message: {error}") from error

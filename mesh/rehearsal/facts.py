"""What was seen of a job while it was rehearsed. Times are seconds since the epoch, by this machine's one clock."""

import msgspec


class Checkpoint(msgspec.Struct, frozen=True):
    """One that was committed. `written_unix`: when the job wrote the last byte of it; `files`: a digest of each, by path."""

    seq: int
    attempt: int
    committed_unix: float
    written_unix: float
    bytes: int
    resume: str
    files: dict[str, str] = {}


class Attempt(msgspec.Struct, frozen=True):
    """`steps`: what it reported, and when; `written`: the entries of its checkpoint directory that are its own, in order."""

    number: int
    node: str
    running_unix: float = 0.0
    ended_unix: float = 0.0
    exit_code: int | None = None
    reason: str = ""
    steps: tuple[tuple[float, int], ...] = ()
    written: tuple[str, ...] = ()
    output: tuple[str, ...] = ()

    def step_at(self, unix: float) -> int | None:
        """The last step it had reported by then."""
        before = [step for at, step in self.steps if at <= unix]
        return before[-1] if before else None

    @property
    def failed(self) -> bool:
        return self.reason.startswith("failed")


class Departure(msgspec.Struct, frozen=True):
    """How an attempt was ended from outside. A notice has a grace; `catches_term` is None where nobody could look;
    `writing`: unfinished entries of the checkpoint directory at the end."""

    attempt: int
    unix: float
    grace_s: float | None = None
    catches_term: bool | None = None
    writing: tuple[str, ...] = ()


class Play(msgspec.Struct, frozen=True):
    """One run of the job. `outcome` is empty if it was not waited for; `published` is None if nothing could be fetched."""

    attempts: tuple[Attempt, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()
    noticed: Departure | None = None
    sudden: Departure | None = None
    outcome: str = ""
    detail: str = ""
    exit_code: int | None = None
    published: dict[str, str] | None = None
    torn: tuple[str, ...] = ()  # entries that changed after they had looked complete

    @property
    def done(self) -> bool:
        return self.outcome == "done"

    @property
    def ended_in_grace(self) -> bool:
        """Whether it worked on to its end while its notice ran, and had nothing left to do elsewhere."""
        left = self.attempt(self.noticed.attempt) if self.noticed is not None else None
        return left is not None and left.exit_code == 0 and self.done and self.sudden is None and not self.moved

    @property
    def ran_s(self) -> float:
        """How long its guests ran, all attempts together."""
        return sum(attempt.ended_unix - attempt.running_unix for attempt in self.attempts if attempt.ended_unix)

    @property
    def last_line(self) -> str:
        lines = [line for attempt in self.attempts for line in attempt.output if line.strip()]
        return lines[-1] if lines else ""

    @property
    def moved(self) -> list[Checkpoint]:
        """Checkpoints that it wrote after its first departure."""
        return [c for c in self.checkpoints if self.noticed is not None and c.attempt > self.noticed.attempt]

    def attempt(self, number: int) -> Attempt | None:
        return next((attempt for attempt in self.attempts if attempt.number == number), None)

    def of_attempt(self, number: int) -> list[Checkpoint]:
        """The checkpoints that were committed in it."""
        return [checkpoint for checkpoint in self.checkpoints if checkpoint.attempt == number]

    def resumed_by(self, number: int) -> Checkpoint | None:
        """What an attempt was given to go on from."""
        before = [checkpoint for checkpoint in self.checkpoints if checkpoint.attempt < number]
        return before[-1] if before else None


class Entry(msgspec.Struct, frozen=True):
    """Something in the checkpoint directory, as the mesh looks at it. `age_s`: since anything in it last changed."""

    name: str
    final: bool
    marked: bool
    age_s: float


class Sight(msgspec.Struct, frozen=True):
    """What there was to see while no checkpoint came. `strays`: files outside the directory, and their bytes."""

    entries: tuple[Entry, ...] = ()
    open: bool = False  # whether somebody has a file of the directory open for writing
    strays: tuple[tuple[str, int], ...] = ()
    trouble: str = ""  # why one could not be stored


class Facts(msgspec.Struct, frozen=True):
    """All of it: the play with departures, up to two without, what was asked for."""

    directory: str
    mode: str
    disturbed: Play
    undisturbed: tuple[Play, ...] = ()
    sight: Sight = Sight()
    limit_s: float = 0.0
    limit_hit: bool = False

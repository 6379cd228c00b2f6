"""Observations of a rehearsed job. Times are Unix seconds of this machine's clock."""

import msgspec


class Checkpoint(msgspec.Struct, frozen=True):
    """A committed checkpoint. `written_unix`: when the job wrote its last byte; `files`: a digest of each file, by path."""

    seq: int
    attempt: int
    committed_unix: float
    written_unix: float
    bytes: int
    resume: str
    files: dict[str, str] = {}


class Attempt(msgspec.Struct, frozen=True):
    """An attempt. `steps`: reported steps with times; `written`: its own entries of the checkpoint directory, in order."""

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
        """Return the last step that it had reported by then."""
        before = [step for at, step in self.steps if at <= unix]
        return before[-1] if before else None

    @property
    def failed(self) -> bool:
        return self.reason.startswith("failed")


class Departure(msgspec.Struct, frozen=True):
    """A departure of the host. A notice has a grace. `catches_term` is None if unknown; `writing`: unfinished entries of the
    checkpoint directory at the end."""

    attempt: int
    unix: float
    grace_s: float | None = None
    catches_term: bool | None = None
    writing: tuple[str, ...] = ()


class Run(msgspec.Struct, frozen=True):
    """One run of the job. `outcome` is empty if the rehearsal did not wait for it; `published` is None if unavailable."""

    attempts: tuple[Attempt, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()
    noticed: Departure | None = None
    sudden: Departure | None = None
    outcome: str = ""
    detail: str = ""
    exit_code: int | None = None
    published: dict[str, str] | None = None
    torn: tuple[str, ...] = ()  # entries that changed after they looked complete

    @property
    def done(self) -> bool:
        return self.outcome == "done"

    @property
    def ended_in_grace(self) -> bool:
        """Return whether it ended by itself during its notice, so that nothing was left to do elsewhere."""
        left = self.attempt(self.noticed.attempt) if self.noticed is not None else None
        return left is not None and left.exit_code == 0 and self.done and self.sudden is None and not self.moved

    @property
    def ran_s(self) -> float:
        """Return the running time of all attempts together."""
        return sum(attempt.ended_unix - attempt.running_unix for attempt in self.attempts if attempt.ended_unix)

    @property
    def last_line(self) -> str:
        lines = [line for attempt in self.attempts for line in attempt.output if line.strip()]
        return lines[-1] if lines else ""

    @property
    def moved(self) -> list[Checkpoint]:
        """Return the checkpoints that it wrote after its first departure."""
        return [c for c in self.checkpoints if self.noticed is not None and c.attempt > self.noticed.attempt]

    def attempt(self, number: int) -> Attempt | None:
        return next((attempt for attempt in self.attempts if attempt.number == number), None)

    def of_attempt(self, number: int) -> list[Checkpoint]:
        """Return the checkpoints that were committed in an attempt."""
        return [checkpoint for checkpoint in self.checkpoints if checkpoint.attempt == number]

    def resumed_by(self, number: int) -> Checkpoint | None:
        """Return the checkpoint that an attempt resumed from."""
        before = [checkpoint for checkpoint in self.checkpoints if checkpoint.attempt < number]
        return before[-1] if before else None


class Entry(msgspec.Struct, frozen=True):
    """An entry of the checkpoint directory. `age_s`: time since its last change."""

    name: str
    final: bool
    marked: bool
    age_s: float


class DirectoryState(msgspec.Struct, frozen=True):
    """The checkpoint directory while no checkpoint is committed. `outside`: files outside of it, with sizes."""

    entries: tuple[Entry, ...] = ()
    open: bool = False  # whether a file of the directory is open for writing
    outside: tuple[tuple[str, int], ...] = ()
    trouble: str = ""  # why a checkpoint could not be stored


class Observations(msgspec.Struct, frozen=True):
    """All observations: the run with departures, up to two runs without, and the request. `load`: programs that wanted each CPU
    of this machine (the kernel's average over a minute, per CPU).
    """

    directory: str
    mode: str
    disturbed: Run
    undisturbed: tuple[Run, ...] = ()
    directory_state: DirectoryState = DirectoryState()
    limit_s: float = 0.0
    limit_hit: bool = False
    load: float = 0.0

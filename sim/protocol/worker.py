"""The worker of a simulated node's job service: one queue of inputs to the cores, and their effects in the durable order.

While a save is under way, inputs wait, as in `mesh.jobs.service`; then all that have arrived are worked off together.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from mesh.consensus.durable_order import SaveRecords, Step, in_durable_order
from mesh.consensus.effects import WitnessRecord
from mesh.consensus.participant import Directed, Participant
from mesh.consensus.view import Instant

Input = Callable[[Instant], Sequence[Directed]]


class Shell(Protocol):
    """What a node does for its worker."""

    participant: Participant

    @property
    def up(self) -> bool: ...

    @property
    def instant(self) -> Instant: ...

    def wanted(self, outputs: Sequence[Directed]) -> None:
        """Called with what the cores want after each input, while they are as they were when they decided it."""

    def save_records(self, records: Sequence[WitnessRecord], saved: Callable[[], None]) -> None:
        """Call `saved` once the records are on disk; never, if the process ends before."""

    def perform_job(self, output: Directed) -> None: ...


class Worker:
    """The worker of one run of a process."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self._inputs: list[Input] = []
        self.busy = False  # perhaps with a save under way

    def take(self, item: Input) -> None:
        """Work off an input, after those that came before it."""
        self._inputs.append(item)
        if not self.busy:
            self._work()

    def _work(self) -> None:
        self.busy = bool(self._inputs)
        if self.busy:
            batch, self._inputs = self._inputs, []
            outputs = list(self._shell.participant.look_at_clocks(self._shell.instant))
            for item in batch:
                wanted = item(self._shell.instant)
                self._shell.wanted(wanted)
                outputs += wanted
            self._perform(deque(in_durable_order(outputs)))

    def _perform(self, steps: deque[Step]) -> None:
        while steps:
            step = steps.popleft()
            if isinstance(step, SaveRecords):
                self._shell.save_records(step.records, lambda: self._perform(steps))
                return
            self._shell.perform_job(step)
            if not self._shell.up:
                return
        self._work()

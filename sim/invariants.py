"""What must hold at every moment of every run, whatever the faults; checked apart from what causes them.

J1: at most one valid lease a job, by each holder's own clock. J2: committed checkpoints form one chain. J5: one end a job.
J10: no guest takes a step outside its lease.
"""

from typing import TYPE_CHECKING

from mesh.jobs.effects import Cell
from mesh.jobs.ledger import Commit
from mesh.jobs.runner import Runner
from sim.kernel import Kernel

if TYPE_CHECKING:
    from sim.world import Node


class Violation(AssertionError):
    """An invariant does not hold; the text names it, the job and the virtual time."""


class Invariants:
    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._parents: dict[bytes, bytes | None] = {}
        self._last: dict[bytes, Commit] = {}
        self._outcomes: dict[bytes, object] = {}
        self.leases_checked = 0
        self.commits = 0

    def check_leases(self, job: bytes, nodes: "list[Node]") -> None:
        self.leases_checked += 1
        holders = []
        for node in nodes:
            runner = node.participant.runners.get(job) if node.up else None
            if runner is not None and runner.holds_lease(node.now):
                holders.append((node.name, runner.term))
        if len(holders) > 1:
            self._violated("J1", job, f"leases held by {holders}")

    def proposed(self, manifest: bytes, parent: bytes | None) -> None:
        self._parents[manifest] = parent

    def committed(self, job: bytes, commit: Commit) -> None:
        """Every earlier committed checkpoint must be an ancestor, and terms must not fall."""
        self.commits += 1
        last = self._last.get(job)
        self._last[job] = commit
        if last is None:
            return
        if commit.term < last.term or commit.seq <= last.seq:
            self._violated("J3", job, f"({commit.term}, {commit.seq}) after ({last.term}, {last.seq})")
        ancestor = commit.parent
        while ancestor is not None and ancestor != last.manifest:
            ancestor = self._parents.get(ancestor)
        if ancestor is None:
            self._violated("J2", job, f"checkpoint {commit.seq} of term {commit.term} forks the history")

    def cell_saved(self, cell: Cell) -> None:
        outcome = cell.ledger.outcome
        if outcome is not None:
            known = self._outcomes.setdefault(cell.job, outcome)
            if known != outcome:
                self._violated("J5", cell.job, f"two ends: {known} and {outcome}")

    def step_taken(self, job: bytes, runner: Runner, now: float) -> None:
        if not runner.holds_lease(now) and runner.state in {"running", "frozen"}:
            self._violated("J10", job, f"a step outside the lease in state {runner.state}")

    def _violated(self, name: str, job: bytes, text: str) -> None:
        raise Violation(f"{name} at {self._kernel.now:.3f} s, job {job.hex()[:8]}: {text}")

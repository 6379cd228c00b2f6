"""Checkers of what becomes of guests that fail and of jobs with limits, from what guests do and what disks hold.

They share no code with the rules that they check: they count failures, running times and majorities themselves.
"""

from collections import defaultdict

import msgspec

from mesh.consensus.effects import WitnessRecord
from mesh.consensus.reports import GuestExited, GuestFailed
from mesh.model.record import Voter
from mesh.model.spec import JobSpec
from sim.protocol.guests import Guest
from sim.protocol.jobs import STEP_S, JobChecker, JobNode, JobsWorld, decides

NOT_RETRIED = {126, 127}  # no such command
NOT_FAILED = {0, 75, 85}
STOPPED = {137, 143}  # at a notice
SAVE_S = 30.0  # counts as running time, too: the last save, with peers that do not answer


class Run(msgspec.Struct):
    """One guest: the times of its start, its last step and the end of its attempt there, as its machine counts them."""

    term: int
    node: JobNode
    life: int
    started: float
    stepped: float
    until: float | None = None


class Retries(JobChecker):
    """A job is not tried again once its guests have failed more often than its spec allows, or in a way that it excludes. Only
    failures count that a majority of disks has, in terms before that of the attempt: one that is cut off, or whose clock stood
    still, cannot know of later ones.

    Found by: runners that forget failures.
    """

    name = "retries"

    def __init__(self) -> None:
        self._failed: dict[bytes, dict[int, int]] = defaultdict(dict)  # exit code by term
        self._have_end: dict[tuple[bytes, int], set[Voter]] = defaultdict(set)
        self._known: dict[bytes, set[int]] = defaultdict(set)  # terms whose end a majority has

    def exited(self, world: JobsWorld, node: JobNode, job: bytes, guest: Guest, end: GuestExited | GuestFailed) -> None:
        if _failed(guest, end) and world.specs[job].most_nodes == 1:  # gangs may blame a member that is lost
            self._failed[job][guest.term] = _code_of(end)

    def saved(self, world: JobsWorld, node: JobNode, witness_record: WitnessRecord) -> None:
        job, term = witness_record.job, witness_record.accepted_term
        if term not in self._failed[job]:
            return
        attempts = [attempt for attempt in witness_record.record.attempts if attempt.term == term]
        # A guest may fail as it is about to be stopped, with a code that a stop gives.
        stopped = attempts and attempts[0].reason.startswith("vacated") and attempts[0].exit_code in STOPPED
        if attempts and attempts[0].reason and not stopped and attempts[0].exit_code == self._failed[job][term]:
            voters = self._have_end[job, term]
            voters.add(Voter(node.id, witness_record.disk))
            if decides(witness_record.config, voters):
                self._known[job].add(term)

    def launched(self, world: JobsWorld, node: JobNode, job: bytes, spec: bytes) -> None:
        runner = node.participant.runners.get(job)
        if job not in world.specs or job in world.recovered or runner is None:
            return
        stated, before = world.specs[job], [term for term in self._known[job] if term < runner.term]
        codes = [self._failed[job][term] for term in sorted(before)]
        if len(codes) > stated.error_budget:
            raise self.violated(world, job, f"{node.name} tries it again after {len(codes)} failures")
        if excluded := [code for code in codes if not _may_retry(stated, code)]:
            raise self.violated(world, job, f"{node.name} tries it again after exit code {excluded[0]}")


class JustEnds(JobChecker):
    """A job ends as failed only if its guests failed too often, its time is over by some node's clock, or a job that it comes
    after did not succeed; as done only if the guests of an attempt did all their steps, each node's of a gang; and as cancelled
    only if its user cancelled it.

    Found by: runners without an error budget, deadlines that come early, and gangs that are done when their first guest is.
    """

    name = "end"

    def __init__(self) -> None:
        self._failed: dict[bytes, dict[int, set[int]]] = defaultdict(dict)  # exit codes of a gang's members by term
        # By job and term, the nodes whose guest has steps left.
        self._working: dict[tuple[bytes, int], set[bytes]] = defaultdict(set)
        self._done: dict[bytes, set[int]] = defaultdict(set)  # terms in which a guest did all its steps
        self._runs: dict[bytes, list[Run]] = defaultdict(list)
        self._unsuccessful: set[bytes] = set()

    def exited(self, world: JobsWorld, node: JobNode, job: bytes, guest: Guest, end: GuestExited | GuestFailed) -> None:
        if _failed(guest, end):
            self._failed[job].setdefault(guest.term, set()).add(_code_of(end))
        if guest.done and isinstance(end, GuestExited) and end.code == 0:
            self._done[job].add(guest.term)
            self._working[job, guest.term].discard(node.id)

    def resumed(self, world: JobsWorld, node: JobNode, job: bytes, term: int, step: int) -> None:
        self._runs[job].append(Run(term, node, node.life, world.kernel.now, world.kernel.now))
        self._working[job, term].add(node.id)

    def ended(self, world: JobsWorld, node: JobNode, job: bytes, reason: str) -> None:
        for run in self._runs[job]:
            if run.node is node and run.until is None:
                run.until = world.kernel.now

    def saved(self, world: JobsWorld, node: JobNode, witness_record: WitnessRecord) -> None:
        job, outcome = witness_record.job, witness_record.record.outcome
        if outcome is None or not witness_record.final or job not in world.specs:
            return
        done = any(not self._working[job, term] for term in self._done[job])
        just = {"done": done, "cancelled": job in world.cancelled, "failed": self._may_fail(world, job)}
        if not just[outcome.kind]:
            raise self.violated(world, job, f"it ended as {outcome.kind} ({outcome.detail}) without cause")
        if outcome.kind != "done":
            self._unsuccessful.add(job)

    def _may_fail(self, world: JobsWorld, job: bytes) -> bool:
        spec, codes = world.specs[job], self._failed[job].values()
        if self._unsuccessful & set(spec.after):
            return True
        if len(codes) > spec.error_budget or any(not _may_retry(spec, code) for code in set().union(*codes)):
            return True
        latest_ms = 1000 * max(node.unix() for node in world.nodes)
        if spec.deadline_unix_ms is not None and latest_ms >= spec.deadline_unix_ms:
            return True
        if spec.max_time_s is None:
            return False
        now = world.kernel.now
        ran_s = sum((run.until or now) - run.started + SAVE_S for run in self._runs[job])
        return ran_s * 1.02 >= spec.max_time_s


class Limits(JobChecker):
    """No guest takes a step long after its job's time is over: after its notice there is the grace, and what a stalled process
    does not see ends with the lease.

    Found by: runners that ignore deadlines, or forget how long earlier attempts ran.
    """

    name = "limits"

    def __init__(self) -> None:
        self._runs: dict[bytes, list[Run]] = defaultdict(list)

    def resumed(self, world: JobsWorld, node: JobNode, job: bytes, term: int, step: int) -> None:
        self._runs[job].append(Run(term, node, node.life, node.awake_s, node.awake_s))

    def ended(self, world: JobsWorld, node: JobNode, job: bytes, reason: str) -> None:
        for run in self._runs[job]:
            if run.node is node and run.until is None and not reason.startswith("fenced"):
                run.until = node.awake_s

    def stepped(self, world: JobsWorld, node: JobNode, job: bytes) -> None:
        spec = world.specs[job]
        if spec.on_partition != "freeze" or job in world.recovered:
            return
        now, runs = node.awake_s, self._runs[job]
        mine = next(run for run in reversed(runs) if run.node is node)
        mine.stepped = now
        late_s = spec.grace_s + 2 * spec.lease_s + STEP_S
        # The process of the runner's node must run and save, or the guest gets its notice later.
        gang = {run.node for run in runs if run.term == mine.term}
        awake = max(max(one.last_stall_end, one.disk.faults.slow_until) for one in gang)
        if now - max(mine.started, awake) <= late_s:
            return
        if spec.deadline_unix_ms is not None:
            over_s = min(one.unix() for one in gang) - spec.deadline_unix_ms / 1000  # its clock decides
            if over_s > late_s:
                raise self.violated(world, job, f"a guest on {node.name} runs {over_s:.0f} s after its deadline")
        if spec.max_time_s is not None:
            # What an attempt that was lost did after its last word to its witnesses does not count.
            before = {
                run.term: run.stepped - run.started - 2 * spec.lease_s * (run.until is None)
                for run in runs
                if run.term < mine.term
            }
            ran_s = sum(max(0.0, ran) for ran in before.values()) + now - mine.started
            if ran_s > spec.max_time_s * 1.02 + late_s:
                raise self.violated(world, job, f"it has run for {ran_s:.0f} s, and may for {spec.max_time_s:.0f} s")


def _failed(guest: Guest, end: GuestExited | GuestFailed) -> bool:
    if isinstance(end, GuestFailed):
        return not end.elsewhere
    return end.code not in NOT_FAILED and not end.fault and not (guest.vacating and end.code in STOPPED)


def _code_of(end: GuestExited | GuestFailed) -> int:
    return end.code if isinstance(end, GuestExited) else end.exit_code


def _may_retry(spec: JobSpec, code: int) -> bool:
    return code in spec.retry_codes if spec.retry_codes else code not in NOT_RETRIED


def all_guest_checkers() -> list[JobChecker]:
    return [Retries(), JustEnds(), Limits()]

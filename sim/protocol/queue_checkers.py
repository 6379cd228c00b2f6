"""Checkers of jobs that wait for others: `--after`, arrays with a limit, and jobs that make room. That such jobs end is J4.

They share no code with the rules that they check: they see what disks call final, when guests start, and their notices.
"""

from collections import defaultdict

from mesh.consensus.effects import WitnessRecord
from mesh.consensus.messages import Start
from mesh.model.spec import format_job
from sim.protocol.jobs import JobChecker, JobNode, JobsWorld

MAKES_ROOM = "it makes room for "  # begins the reason of a notice for another job's sake
MARGIN = 20  # points of priority, as docs/explanation/queue.md says
STAY_S = 120.0 - 3.0  # that a job stays on its nodes before it makes room; clocks drift, and records have whole seconds


class InOrder(JobChecker):
    """A job starts only after all jobs that it comes after have succeeded, or are over where that is enough.

    Found by: leaders that do not wait.
    """

    name = "after"

    def __init__(self) -> None:
        self._done: set[bytes] = set()
        self._over: set[bytes] = set()

    def saved(self, world: JobsWorld, node: JobNode, witness_record: WitnessRecord) -> None:
        outcome = witness_record.record.outcome
        if witness_record.final and outcome is not None:
            self._over.add(witness_record.job)
            if outcome.kind == "done":
                self._done.add(witness_record.job)

    def launched(self, world: JobsWorld, node: JobNode, job: bytes, spec: bytes) -> None:
        stated = world.specs.get(job)
        if stated is None:
            return
        missing = (set(stated.after) - self._done) | (set(stated.after_any) - self._over)
        if missing:
            names = ", ".join(format_job(other)[:8] for other in missing)
            raise self.violated(world, job, f"{node.name} starts it before {names} ended as it has to")


class ArrayLimit(JobChecker):
    """No more jobs of an array have started and not ended than its limit allows.

    Found by: leaders that ignore the limit.
    """

    name = "array"

    def __init__(self) -> None:
        self._ended: set[bytes] = set()
        self._started: dict[bytes, set[bytes]] = defaultdict(set)

    def saved(self, world: JobsWorld, node: JobNode, witness_record: WitnessRecord) -> None:
        if witness_record.final:
            self._ended.add(witness_record.job)

    def launched(self, world: JobsWorld, node: JobNode, job: bytes, spec: bytes) -> None:
        stated = world.specs.get(job)
        if stated is None or stated.array is None or not stated.array.limit or job in world.recovered:
            return
        started = self._started[stated.array.array]
        started.add(job)
        if len(started - self._ended) > stated.array.limit:
            raise self.violated(
                world, job, f"{len(started - self._ended)} of an array run, and {stated.array.limit} may at a time"
            )


class JustPreemption(JobChecker):
    """A guest gets notice for another job's sake only if that job is much more important and the guest's has been there for two
    minutes, and none is killed for it. What it has computed is not lost, as at any notice.

    Found by: runners that make room for any job, or soon after their start, or without notice.
    """

    name = "preemption"

    def __init__(self) -> None:
        # By job and term, the host, and when the job was given to it by the host's own wall clock, which can be set.
        self._placed: dict[tuple[bytes, int], tuple[JobNode, float]] = {}
        self.notices = 0

    def placed(self, world: JobsWorld, node: JobNode, start: Start, to: bytes) -> None:
        host = world.by_id[to]
        assert isinstance(host, JobNode)
        self._placed[start.job, start.term] = host, host.unix()

    def noticed(self, world: JobsWorld, node: JobNode, job: bytes, reason: str) -> None:
        if not reason.startswith(MAKES_ROOM) or job not in world.specs:
            return
        self.notices += 1
        name = reason.removeprefix(MAKES_ROOM).split()[0]
        wanted = [spec for other, spec in world.specs.items() if format_job(other).startswith(name)]
        if not any(spec.priority >= world.specs[job].priority + MARGIN for spec in wanted):
            raise self.violated(world, job, f"on {node.name} {reason}, and has {world.specs[job].priority}")
        host, since = self._placed[job, node.guests[job].term]  # another node may have a later term by now
        stayed_s = host.unix() - since
        if stayed_s < STAY_S:
            raise self.violated(world, job, f"on {node.name} {reason}, after {stayed_s:.0f} s")

    def killed(self, world: JobsWorld, node: JobNode, job: bytes, reason: str) -> None:
        if reason.startswith(MAKES_ROOM) and job in node.guests:
            raise self.violated(world, job, f"its guest on {node.name} is killed: {reason}")


def all_queue_checkers() -> list[JobChecker]:
    return [InOrder(), ArrayLimit(), JustPreemption()]

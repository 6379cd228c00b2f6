"""Checkpoints of running jobs: schedule, holders, copies to the standby in advance, and new copies after a lost holder."""

from collections.abc import Callable
from functools import partial

from sim.campus.forecast import Forecast
from sim.campus.metrics import Counters
from sim.campus.network import Network
from sim.campus.placement import Placement
from sim.campus.policies import Policy
from sim.campus.schedules import Never, Outlook
from sim.campus.state import Host, Job, fitting
from sim.campus.topology import Topology, machine_numbers
from sim.campus.world import Costs
from sim.kernel import Kernel

GIB = float(1 << 30)


class Checkpointer:
    """Takes and stores the checkpoints of all jobs, and owns the counters of the run.

    `lossy` is the estimated share of departures that no notice covers. `on_reachable` is called with a job whose checkpoint
    can be read again.
    """

    def __init__(
        self,
        policy: Policy,
        kernel: Kernel,
        costs: Costs,
        topology: Topology,
        network: Network,
        placement: Placement,
        forecast: Forecast,
        slowest_bps: float,
        on_reachable: Callable[[Job], None],
    ) -> None:
        self._policy, self._kernel, self._costs = policy, kernel, costs
        self._topology, self._network, self._placement, self._forecast = topology, network, placement, forecast
        self._slowest_bps = slowest_bps
        self._on_reachable = on_reachable
        self._never = isinstance(policy.schedule, Never)
        self.rate = 1 / (1 + policy.redundancy.overhead) if policy.redundancy else 1.0
        self.lossy = 1.0
        self.counters = Counters()

    def schedule(self, job: Job) -> None:
        if self._never:
            return
        now, host = self._kernel.now, job.host
        assert host is not None
        outlook = self._outlook(job, host)
        due = self._policy.schedule.next_checkpoint(now, max(job.since, job.resumes), outlook)
        if due + outlook.stall_s < job.resumes + (job.submission.work_s - job.base) / self.rate:
            self._kernel.post(max(0.0, due - now), self.checkpoint, job, job.epoch)

    def _outlook(self, job: Job, host: Host) -> Outlook:
        forecast, number = self._forecast, host.number
        whole_s = job.submission.state_bytes / self._slowest_bps * self._policy.copies
        return Outlook(
            self.stall_s(job),
            job.upload_s or whole_s,
            max(job.upload_s, whole_s) * len(host.guests),
            self.lossy if self._policy.notice != "ignore" else 1.0,
            partial(forecast.rates, number),
            forecast.mean_rate,
            host.departs_at,
        )

    def stall_s(self, job: Job) -> float:
        costs = self._costs
        return costs.stall_s + job.submission.state_bytes / GIB / costs.copy_gib_s

    def checkpoint(self, job: Job, epoch: int) -> None:
        if epoch != job.epoch or job.state != "running":
            return
        if job.upload is not None or job.copying:
            job.due_late = True  # one at a time: start when the running one is stored
            return
        now = self._kernel.now
        stall_s = self.stall_s(job)
        done = job.done(now, self.rate)
        job.base = done
        job.resumes = max(now, job.resumes) + stall_s
        job.since = job.resumes
        job.copying = True
        self.counters.stalled += stall_s * job.submission.gpus
        self._kernel.post(job.resumes - now, self._send_copy, job, epoch, done)
        self.schedule(job)

    def _send_copy(self, job: Job, epoch: int, done: float) -> None:
        """Send a checkpoint to its holders after the copy; the training continues."""
        if epoch != job.epoch:
            return
        job.copying = False
        host = job.host
        assert host is not None
        targets = self._targets(job, host)
        if targets is None:
            return
        there = machine_numbers(targets)
        path = self._topology.path(host.number, there)
        count = job.submission.state_bytes * (job.submission.changed if job.sent_to == there else 1.0)
        arrived = partial(self._stored, job, epoch, done, targets, there, self._kernel.now)
        job.upload = self._network.start(path, count, arrived, self._policy.yields, job)

    def _targets(self, job: Job, host: Host) -> tuple[Host, ...] | None:
        """Return the holders of the next checkpoint: present ones first, then in the product's order; None if there are none."""
        if self._policy.keeps == "server":
            return ()
        copies = self._policy.copies
        kept = tuple([holder for holder in job.holders if holder.reachable and holder is not host][:copies])
        if len(kept) == copies:
            return kept
        return (*kept, *self._placement.holders(job, (*kept, host), copies - len(kept))) or None

    def _stored(
        self, job: Job, epoch: int, done: float, targets: tuple[Host, ...], there: tuple[int, ...], since: float
    ) -> None:
        job.upload = None
        if epoch != job.epoch:
            return
        self.counters.checkpoints += 1
        job.safe = done
        job.upload_s = self._kernel.now - since
        self.set_holders(job, targets)
        job.sent_to = there
        self._warm_standby(job)
        if job.due_late:
            job.due_late = False
            self.checkpoint(job, epoch)

    def _warm_standby(self, job: Job) -> None:
        """Send the last checkpoint in the background to the machine where the job would go next, one at a time."""
        host = job.host
        if self._policy.notice != "migrate" or self._policy.keeps != "peers" or job.warming is not None or host is None:
            return
        before = None if job.warm is None else job.warm[0]
        still = before is not None and fitting([before], job.submission)
        standby = before if still else self._placement.next_host(job, host)
        if standby is None:
            return
        if standby in job.holders:
            job.warm = standby, job.safe
            return
        count = job.submission.state_bytes * (job.submission.changed if standby is before else 1.0)
        path = self._topology.path(host.number, (standby.number,))
        job.warming = self._network.start(path, count, partial(self._warmed, job, standby, job.safe), True, job)

    def _warmed(self, job: Job, standby: Host, safe: float) -> None:
        job.warming = None
        job.warm = standby, safe

    def set_holders(self, job: Job, holders: tuple[Host, ...]) -> None:
        if holders != job.holders:
            for host in job.holders:
                host.keeps.pop(job, None)
            for host in holders:
                host.keeps[job] = None
            job.holders = holders

    def replace_holder(self, lost: Host, stay: int) -> None:
        """Copy the checkpoints of a lost machine from their other holders to new ones."""
        if lost.reachable or lost.stay != stay:
            return
        for job in list(lost.keeps):
            others = tuple(holder for holder in job.holders if holder.reachable)
            more = self._placement.holders(job, job.holders, 1) if others else []
            if not more:
                continue
            holders = (*others, more[0])
            path = self._topology.path(others[0].number, (more[0].number,))
            done = partial(self._replaced, job, job.holders, holders)
            self._network.start(path, job.submission.state_bytes, done, True, job)

    def _replaced(self, job: Job, before: tuple[Host, ...], holders: tuple[Host, ...]) -> None:
        if job.state != "done" and job.holders == before and all(host.reachable for host in holders):
            self.set_holders(job, holders)
            job.sent_to = machine_numbers(holders)
            self._on_reachable(job)

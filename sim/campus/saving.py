"""Checkpoints while a job runs: when, to whom, and copied again when a holder is lost."""

from collections.abc import Callable
from functools import partial

from sim.campus.carrier import Carrier, numbers
from sim.campus.fabric import Fabric
from sim.campus.forecast import Forecast
from sim.campus.guest import Host, Job, fitting
from sim.campus.placing import Placing
from sim.campus.policies import Policy
from sim.campus.schedules import Never, Outlook
from sim.campus.tally import Tally
from sim.campus.world import Costs
from sim.kernel import Kernel

GIB = float(1 << 30)


class Saver:
    """`lossy`: the part of the departures that a notice does not cover, as far as is known; `mended_for` is told of a job whose
    checkpoint can be reached again."""

    def __init__(
        self,
        policy: Policy,
        kernel: Kernel,
        costs: Costs,
        fabric: Fabric,
        carrier: Carrier,
        placing: Placing,
        forecast: Forecast,
        slowest_bps: float,
        mended_for: Callable[[Job], None],
    ) -> None:
        self._policy, self._kernel, self._costs = policy, kernel, costs
        self._fabric, self._carrier, self._placing, self._forecast = fabric, carrier, placing, forecast
        self._slowest_bps = slowest_bps
        self._mended_for = mended_for
        self._never = isinstance(policy.schedule, Never)
        self.rate = 1 / (1 + policy.redundancy.overhead) if policy.redundancy else 1.0
        self.lossy = 1.0
        self.tally = Tally()

    def schedule(self, job: Job) -> None:
        if self._never:
            return
        now, host = self._kernel.now, job.host
        assert host is not None
        outlook = self._outlook(job, host)
        due = self._policy.schedule.next_checkpoint(now, max(job.since, job.resumes), outlook)
        if due + outlook.stall_s < job.resumes + (job.order.work_s - job.base) / self.rate:
            self._kernel.post(max(0.0, due - now), self.checkpoint, job, job.epoch)

    def _outlook(self, job: Job, host: Host) -> Outlook:
        forecast, number = self._forecast, host.number
        whole_s = job.order.state_bytes / self._slowest_bps * self._policy.copies
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
        return costs.stall_s + job.order.state_bytes / GIB / costs.copy_gib_s

    def checkpoint(self, job: Job, epoch: int) -> None:
        if epoch != job.epoch or job.state != "running":
            return
        if job.upload is not None or job.copying:
            job.due_late = True  # one at a time: as soon as that one is there
            return
        now = self._kernel.now
        stall_s = self.stall_s(job)
        done = job.done(now, self.rate)
        job.base = done
        job.resumes = max(now, job.resumes) + stall_s
        job.since = job.resumes
        job.copying = True
        self.tally.stalled += stall_s * job.order.gpus
        self._kernel.post(job.resumes - now, self._upload, job, epoch, done)
        self.schedule(job)

    def _upload(self, job: Job, epoch: int, done: float) -> None:
        """The copy is made, the training goes on: send it."""
        if epoch != job.epoch:
            return
        job.copying = False
        host = job.host
        assert host is not None
        targets = self._targets(job, host)
        if targets is None:
            return
        there = numbers(targets)
        path = self._fabric.path(host.number, there)
        count = job.order.state_bytes * (job.order.changed if job.sent_to == there else 1.0)
        arrived = partial(self._saved, job, epoch, done, targets, there, self._kernel.now)
        job.upload = self._carrier.send(job, path, count, arrived, self._policy.yields)

    def _targets(self, job: Job, host: Host) -> tuple[Host, ...] | None:
        """Who is to hold it: those who do while they are there, filled up by the product's order; None if nobody can."""
        if self._policy.keeps == "server":
            return ()
        copies = self._policy.copies
        kept = tuple([holder for holder in job.holders if holder.reachable and holder is not host][:copies])
        if len(kept) == copies:
            return kept
        return (*kept, *self._placing.holders(job, (*kept, host), copies - len(kept))) or None

    def _saved(
        self, job: Job, epoch: int, done: float, targets: tuple[Host, ...], there: tuple[int, ...], since: float
    ) -> None:
        job.upload = None
        if epoch != job.epoch:
            return
        self.tally.checkpoints += 1
        job.safe = done
        job.upload_s = self._kernel.now - since
        self.hold(job, targets)
        job.sent_to = there
        self._bring(job)
        if job.due_late:
            job.due_late = False
            self.checkpoint(job, epoch)

    def _bring(self, job: Job) -> None:
        """Its last checkpoint to where it would go next, in the background, as the product's warming does: one at a time."""
        host = job.host
        if self._policy.notice != "migrate" or self._policy.keeps != "peers" or job.warming is not None or host is None:
            return
        before = None if job.warm is None else job.warm[0]
        still = before is not None and fitting([before], job.order)
        heir = before if still else self._placing.next_place(job, host)
        if heir is None:
            return
        if heir in job.holders:
            job.warm = heir, job.safe
            return
        count = job.order.state_bytes * (job.order.changed if heir is before else 1.0)
        path = self._fabric.path(host.number, (heir.number,))
        job.warming = self._carrier.send(job, path, count, partial(self._brought, job, heir, job.safe), True)

    def _brought(self, job: Job, heir: Host, safe: float) -> None:
        job.warming = None
        job.warm = heir, safe

    def hold(self, job: Job, holders: tuple[Host, ...]) -> None:
        if holders != job.holders:
            for host in job.holders:
                host.keeps.pop(job, None)
            for host in holders:
                host.keeps[job] = None
            job.holders = holders

    def mend(self, lost: Host, stay: int) -> None:
        """Checkpoints that it held are copied again from those who have them too, now that it is known to be gone."""
        if lost.reachable or lost.stay != stay:
            return
        for job in list(lost.keeps):
            others = tuple(holder for holder in job.holders if holder.reachable)
            more = self._placing.holders(job, job.holders, 1) if others else []
            if not more:
                continue
            holders = (*others, more[0])
            path = self._fabric.path(others[0].number, (more[0].number,))
            done = partial(self._mended, job, job.holders, holders)
            self._carrier.send(job, path, job.order.state_bytes, done, True)

    def _mended(self, job: Job, before: tuple[Host, ...], holders: tuple[Host, ...]) -> None:
        if job.state != "done" and job.holders == before and all(host.reachable for host in holders):
            self.hold(job, holders)
            job.sent_to = numbers(holders)
            self._mended_for(job)

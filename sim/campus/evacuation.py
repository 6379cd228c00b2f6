"""Evacuation of a machine under notice: the destinations of its jobs and the order of their last checkpoints.

The product's joint plan decides, or, for comparison, each job alone.
"""

from collections.abc import Sequence
from math import fsum

from ckptstore.bandwidth import PRIOR_SPREAD
from ckptstore.deadline import Upload, feasible, plan
from ckptstore.pacing import AIM
from placement.advert import WHOLE, horizon_of
from placement.destination import HORIZON_S, LeavingJob, Target, stranding, survival, worth
from placement.destination import plan as plan_destinations
from sim.campus.checkpoints import GIB, Checkpointer
from sim.campus.placement import Placement
from sim.campus.policies import Policy
from sim.campus.state import Host, Job
from sim.campus.topology import Topology
from sim.campus.world import Costs
from sim.kernel import Kernel

AT_HOME = 2.0  # preference for the first machine, as `mesh.consensus.next_placement.MUCH_BETTER`
FIRST_HOLDERS = 2  # candidates to receive a state that no machine holds yet


class Evacuation:
    def __init__(
        self,
        policy: Policy,
        kernel: Kernel,
        costs: Costs,
        topology: Topology,
        placement: Placement,
        checkpointer: Checkpointer,
    ) -> None:
        self._policy, self._kernel, self._costs = policy, kernel, costs
        self._topology, self._placement, self._checkpointer = topology, placement, checkpointer

    def plan(self, host: Host, jobs: list[Job], deadline: float) -> list[Job]:
        """Choose a standby and a first receiver for each job; return the jobs in the order of their uploads."""
        if self._policy.notice == "migrate" and self._policy.destinations == "joint":
            return self._together(host, jobs, deadline - self._kernel.now)
        for job in jobs:
            job.standby = job.first_holder = None
        return self._in_order(host, jobs, deadline)

    def save_s(self, job: Job) -> float:
        """Return the time from the job's stop until its state can be sent."""
        return self._checkpointer.stall_s(job) + job.submission.state_bytes / GIB / self._costs.write_gib_s

    def final_bytes(self, job: Job) -> float:
        there = any(holder.reachable for holder in job.holders) or (self._policy.keeps == "server" and job.safe > 0)
        return job.submission.state_bytes * (job.submission.changed if there else 1.0)

    def targets(self, job: Job, host: Host) -> tuple[Host, ...]:
        """Return the receivers of the final state: standby and holders, or only one if time is short."""
        kept = [holder for holder in job.holders if holder.reachable and holder is not host]
        standby = [job.standby] if job.standby is not None and job.standby.reachable else []
        if not kept and not standby:
            standby = self._placement.holders(job, (host,), 1)
        window_s = host.departs_at - self._kernel.now
        count = int(self.final_bytes(job))
        first_holder = job.first_holder
        if first_holder is None or not first_holder.reachable:
            targets = tuple(dict.fromkeys([*kept, *standby]))
            late = host.leaving and not feasible(count * len(targets), host.machine.edge_bps, window_s)
            return targets[:1] if late else targets
        targets = tuple(dict.fromkeys([first_holder, *kept, *standby]))
        behind_s = fsum(self._alone_s(other, host) for other in host.line if other is not job)
        sends_s = max(count * len(targets) / host.machine.edge_bps, *(count / self._bps(host, one) for one in targets))
        return targets if not host.leaving or sends_s + behind_s <= AIM * window_s else (first_holder,)

    def _alone_s(self, job: Job, host: Host) -> float:
        return 0.0 if job.first_holder is None else self.final_bytes(job) / self._bps(host, job.first_holder)

    def _bps(self, host: Host, other: Host) -> float:
        return self._topology.available_bps(host.number, other.number)

    def _in_order(self, host: Host, jobs: list[Job], deadline: float) -> list[Job]:
        if len(jobs) < 2:
            return jobs
        uploads = [
            Upload(self._at_risk(job), int(self.final_bytes(job)), deadline, host.machine.edge_bps) for job in jobs
        ]
        return [jobs[place] for place in plan(uploads, self._kernel.now).order]

    def _at_risk(self, job: Job) -> float:
        done_s = job.done(self._kernel.now, self._checkpointer.rate) - job.safe
        return worth(done_s, job.submission.gpus * WHOLE)

    def _together(self, host: Host, jobs: Sequence[Job], window_s: float) -> list[Job]:
        leavers = []
        for job in jobs:
            left_s = job.submission.work_s - job.done(self._kernel.now, self._checkpointer.rate)
            horizon_s = min(HORIZON_S, left_s)
            targets = self._targets_of(job, host, horizon_s)
            leavers.append(LeavingJob(job.request(), self._at_risk(job), targets, self.save_s(job), horizon_s))
        adverts = {other.id: other.advert() for other in self._placement.staying if other is not host}
        found = plan_destinations(leavers, adverts, window_s)
        for job, destination in zip(jobs, found.destinations, strict=True):
            job.standby = self._placement.host(destination.place)
            job.first_holder = self._placement.host(destination.to)
        return [jobs[place] for place in found.order]

    def _targets_of(self, job: Job, host: Host, horizon_s: float) -> tuple[Target, ...]:
        """Return the targets for a job: machines that could run it, best first, and holders of its checkpoint."""
        kept = [holder for holder in job.holders if holder.reachable and holder is not host]
        places = self._placement.ranked(job, [other for other in self._placement.staying if other is not host])
        others = kept or self._placement.holders(job, (host,), FIRST_HOLDERS)
        there, request = self.final_bytes(job), job.request()
        able = set(places)
        takers = list(dict.fromkeys([*places, *others]))
        targets = []
        for other, advert in zip(takers, self._placement.adverts(takers, horizon_of(horizon_s)), strict=True):
            count = there if other in kept or job.is_warm(other) else job.submission.state_bytes
            stays = survival(advert, horizon_s)
            favour = stranding(request, advert)
            if self._policy.migrates_back and other is job.origin:
                favour = AT_HOME
            targets.append(Target(other.id, count, self._bps(host, other), PRIOR_SPREAD, stays, other in able, favour))
        return tuple(targets)

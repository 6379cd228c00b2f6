"""Where the jobs of a machine that has notice go, and in which order their last checkpoints leave.

By the product's joint plan; or, to see what that is worth, each job by itself.
"""

from collections.abc import Sequence
from math import fsum

from ckptstore.bandwidth import PRIOR_SPREAD
from ckptstore.deadline import Upload, feasible, plan
from ckptstore.pacing import AIM
from placement.advert import WHOLE, horizon_of
from placement.destination import HORIZON_S, Leaver, Way, stranding, survival, worth
from placement.destination import plan as plan_destinations
from sim.campus.fabric import Fabric
from sim.campus.guest import Host, Job
from sim.campus.placing import Placing
from sim.campus.policies import Policy
from sim.campus.saving import GIB, Saver
from sim.campus.world import Costs
from sim.kernel import Kernel

AT_HOME = 2.0  # times as good as elsewhere: as `onward.MUCH_BETTER`
KEEPERS = 2  # asked for, of a job whose checkpoint nobody has yet


class Leaving:
    def __init__(
        self, policy: Policy, kernel: Kernel, costs: Costs, fabric: Fabric, placing: Placing, saver: Saver
    ) -> None:
        self._policy, self._kernel, self._costs = policy, kernel, costs
        self._fabric, self._placing, self._saver = fabric, placing, saver

    def settle(self, host: Host, jobs: list[Job], deadline: float) -> list[Job]:
        """Name each its heir and who gets its state; in which order their states leave."""
        if self._policy.notice == "migrate" and self._policy.destinations == "joint":
            return self._together(host, jobs, deadline - self._kernel.now)
        for job in jobs:
            job.heir = job.keeper = None
        return self._in_order(host, jobs, deadline)

    def save_s(self, job: Job) -> float:
        """From its stop until its state can be sent."""
        return self._saver.stall_s(job) + job.order.state_bytes / GIB / self._costs.write_gib_s

    def final_bytes(self, job: Job) -> float:
        there = any(holder.reachable for holder in job.holders) or (self._policy.keeps == "server" and job.safe > 0)
        return job.order.state_bytes * (job.order.changed if there else 1.0)

    def targets(self, job: Job, host: Host) -> tuple[Host, ...]:
        """Who is sent its state: heir and holders; only one of them, if there is no time for more."""
        kept = [holder for holder in job.holders if holder.reachable and holder is not host]
        heir = [job.heir] if job.heir is not None and job.heir.reachable else []
        if not kept and not heir:
            heir = self._placing.holders(job, (host,), 1)
        window_s = host.departs_at - self._kernel.now
        count = int(self.final_bytes(job))
        keeper = job.keeper
        if keeper is None or not keeper.reachable:
            targets = tuple(dict.fromkeys([*kept, *heir]))
            late = host.leaving and not feasible(count * len(targets), host.machine.edge_bps, window_s)
            return targets[:1] if late else targets
        targets = tuple(dict.fromkeys([keeper, *kept, *heir]))
        behind_s = fsum(self._alone_s(other, host) for other in host.line if other is not job)
        sends_s = max(count * len(targets) / host.machine.edge_bps, *(count / self._bps(host, one) for one in targets))
        return targets if not host.leaving or sends_s + behind_s <= AIM * window_s else (keeper,)

    def _alone_s(self, job: Job, host: Host) -> float:
        return 0.0 if job.keeper is None else self.final_bytes(job) / self._bps(host, job.keeper)

    def _bps(self, host: Host, other: Host) -> float:
        return self._fabric.left_bps(host.number, other.number)

    def _in_order(self, host: Host, jobs: list[Job], deadline: float) -> list[Job]:
        if len(jobs) < 2:
            return jobs
        uploads = [
            Upload(self._at_risk(job), int(self.final_bytes(job)), deadline, host.machine.edge_bps) for job in jobs
        ]
        return [jobs[place] for place in plan(uploads, self._kernel.now).order]

    def _at_risk(self, job: Job) -> float:
        done_s = job.done(self._kernel.now, self._saver.rate) - job.safe
        return worth(done_s, job.order.gpus * WHOLE)

    def _together(self, host: Host, jobs: Sequence[Job], window_s: float) -> list[Job]:
        leavers = []
        for job in jobs:
            left_s = job.order.work_s - job.done(self._kernel.now, self._saver.rate)
            horizon_s = min(HORIZON_S, left_s)
            ways = self._ways(job, host, horizon_s)
            leavers.append(Leaver(job.request(), self._at_risk(job), ways, self.save_s(job), horizon_s))
        adverts = {other.id: other.advert() for other in self._placing.staying if other is not host}
        found = plan_destinations(leavers, adverts, window_s)
        for job, destination in zip(jobs, found.destinations, strict=True):
            job.heir = self._placing.host(destination.place)
            job.keeper = self._placing.host(destination.to)
        return [jobs[place] for place in found.order]

    def _ways(self, job: Job, host: Host, horizon_s: float) -> tuple[Way, ...]:
        """To all who could run it, in the order of its ranking, and to those who hold its last checkpoint."""
        kept = [holder for holder in job.holders if holder.reachable and holder is not host]
        places = self._placing.ranked(job, [other for other in self._placing.staying if other is not host])
        others = kept or self._placing.holders(job, (host,), KEEPERS)
        there, request = self.final_bytes(job), job.request()
        able = set(places)
        takers = list(dict.fromkeys([*places, *others]))
        ways = []
        for other, advert in zip(takers, self._placing.adverts(takers, horizon_of(horizon_s)), strict=True):
            count = there if other in kept or job.is_warm(other) else job.order.state_bytes
            stays = survival(advert, horizon_s)
            favour = stranding(request, advert)
            if self._policy.goes_home and other is job.origin:
                favour = AT_HOME
            ways.append(Way(other.id, count, self._bps(host, other), PRIOR_SPREAD, stays, other in able, favour))
        return tuple(ways)

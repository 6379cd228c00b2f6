"""Placement of jobs and checkpoints, and the order of the queue: by the product's cores, or as a baseline does it."""

from collections.abc import Iterable, Sequence

from placement.advert import HORIZONS_S, HOUR, Advert, horizon_of
from placement.decision import replica_order
from placement.queue import DEFAULT_PRIORITY, Queue, Waiting
from placement.ranking import rank_nodes
from placement.request import Request
from placement.zones import TWO_LEVEL_PAST, homes, zones
from sim.campus.forecast import Forecast
from sim.campus.policies import Policy
from sim.campus.state import ALL_HORIZONS, STORE_MIB, UNLIKELY, WEIGHT_EPOCH_S, Host, Job, fitting
from sim.campus.workload import Submission
from sim.kernel import Kernel

ANY_USER = ""  # every machine accepts all users, so requests without a user share the matches cached in adverts


class Placement:
    """Placement by a policy, with adverts kept up to date."""

    def __init__(self, policy: Policy, kernel: Kernel, hosts: Sequence[Host], forecast: Forecast) -> None:
        self._policy, self._kernel, self._hosts, self._forecast = policy, kernel, hosts, forecast
        self._by_id = {host.id: host for host in hosts}
        self._usage: dict[str, int] = {}
        self._shapes: dict[tuple[int, int], bytes] = {}  # request shapes by (GPUs, MiB on each)
        many = len(hosts) > TWO_LEVEL_PAST
        self._homes = homes(zones([host.advert() for host in hosts], {})) if many else None

    def charge(self, user: str, gpu_s: int) -> None:
        self._usage[user] = self._usage.get(user, 0) + gpu_s

    def queue_order(self, waiting: Iterable[Job]) -> list[Job]:
        """Return the waiting jobs that fit on some machine, in queue order (the product's queue, or first come first served)."""
        asked = {job.submission.shape: job.submission for job in waiting}
        able = {shape for shape, submission in asked.items() if fitting(self._hosts, submission)}
        waiting = [job for job in waiting if job.submission.shape in able]
        if self._policy.place != "rendezvous":
            return sorted(waiting, key=lambda job: (job.submission.at, job.submission.number))
        key = Queue((), self._usage, (), int(self._kernel.now)).key
        return sorted(
            waiting,
            key=lambda job: key(
                Waiting(Request(job.submission.id, 0, job.submission.user), DEFAULT_PRIORITY, int(job.submission.at))
            ),
        )

    def choose(self, job: Job, able: Sequence[Host]) -> Host:
        """Choose one of the machines that can start the job."""
        match self._policy.place:
            case "first fit":
                return job.prefer if job.prefer is not None and job.prefer in able else able[0]
            case "longest":
                return max(able, key=lambda host: (host.departs_at, -host.number))
        request = self._request(job)
        horizon = horizon_of(request.remaining_s)
        return self._by_id[next(iter(rank_nodes(request, self.adverts(able, horizon), self._homes))).node]

    def ranked(self, job: Job, able: Sequence[Host]) -> list[Host]:
        """Return the machines in the order of the product's ranking."""
        request = self._request(job)
        horizon = horizon_of(request.remaining_s)
        ranking = rank_nodes(request, self.adverts(able, horizon), self._homes)
        return [self._by_id[candidate.node] for candidate in ranking]

    def _request(self, job: Job) -> Request:
        """Return the job's request without a user, with the cached shape of its kind."""
        request, asks = job.request(ANY_USER), job.submission.shape
        if asks in self._shapes:
            vars(request)["shape"] = self._shapes[asks]
        else:
            self._shapes[asks] = request.shape
        return request

    @property
    def staying(self) -> list[Host]:
        """The machines that are lent and have no notice."""
        return [host for host in self._hosts if host.lent and not host.leaving]

    def host(self, node: bytes | None) -> Host | None:
        return None if node is None else self._by_id[node]

    def next_host(self, job: Job, host: Host) -> Host | None:
        """Return where the job would go if it had to leave its host now: its first machine, or the best ranked one."""
        able = self.candidates(job.submission, host)
        if self._policy.migrates_back and job.origin in able:
            return job.origin
        return self.choose(job, able) if able else None

    def candidates(self, submission: Submission, but: Host | None = None) -> list[Host]:
        """Return the machines that can start the job now, without `but`."""
        able = fitting(self._hosts, submission)
        if but in able:
            able.remove(but)
        return able

    def choose_standby(self, job: Job, host: Host) -> Host | None:
        """Return where a leaving job goes; its first machine is preferred from then on."""
        found = self.next_host(job, host)
        if self._policy.migrates_back and found is not None and found is job.origin:
            job.prefer = found
        return found

    def holders(self, job: Job, not_these: Sequence[Host], count: int) -> list[Host]:
        """Return up to `count` more machines for its checkpoints, best first."""
        adverts = self.adverts([host for host in self._hosts if host.reachable and not host.leaving])
        there = {host.id for host in not_these}
        need_mib = min(STORE_MIB - 1, int(job.submission.state_bytes / (1 << 20)))
        order = replica_order(job.submission.id, adverts, there, need_mib, there, count)
        return [self._by_id[node] for node in order]

    def adverts(self, hosts: Sequence[Host], *horizons: int) -> list[Advert]:
        """Return present adverts, with up-to-date weights for one hour and for these horizons (by index)."""
        now = self._kernel.now
        epoch, wanted = int(now // WEIGHT_EPOCH_S), 1 << HOUR
        for horizon in horizons:
            wanted |= 1 << horizon
        stale = [host for host in hosts if host.weight_epoch != epoch or host.weighed & wanted != wanted]
        if stale:
            self._refresh_weights(
                stale, epoch, [horizon for horizon in range(len(HORIZONS_S)) if wanted >> horizon & 1]
            )
        return [
            last if (last := host.adverts[host.free]) is not None and last.weights is host.weights else host.advert()
            for host in hosts
        ]

    def _refresh_weights(self, hosts: Sequence[Host], epoch: int, horizons: Iterable[int]) -> None:
        """Recompute the weights that are not from this epoch, as of its beginning, as the product does."""
        for host in hosts:
            if host.weight_epoch != epoch:
                host.weight_epoch = epoch
                host.weighed = 0
                if not host.lent:
                    host.weights, host.weighed = UNLIKELY, ALL_HORIZONS
        for horizon in horizons:
            some = [host for host in hosts if not host.weighed >> horizon & 1]
            fresh = self._forecast.weights([host.number for host in some], epoch * WEIGHT_EPOCH_S, horizon)
            for host, weight in zip(some, fresh, strict=True):
                host.weighed |= 1 << horizon
                if host.weights[horizon] != weight:
                    host.weights = (*host.weights[:horizon], weight, *host.weights[horizon + 1 :])

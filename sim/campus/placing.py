"""Who gets a job, who holds its checkpoints, who is next in line: by the product's cores, or as a baseline would."""

from collections.abc import Iterable, Sequence

from placement.advert import HORIZONS_S, HOUR, Advert, horizon_of
from placement.decision import replica_order
from placement.queue import DEFAULT_PRIORITY, Queue, Waiting
from placement.ranking import rank_nodes
from placement.request import Request
from placement.zones import TWO_LEVEL_PAST, homes, zones
from sim.campus.demand import Order
from sim.campus.forecast import Forecast
from sim.campus.guest import ALL_HORIZONS, STORE_MIB, UNLIKELY, WEIGHT_EPOCH_S, Host, Job, fitting
from sim.campus.policies import Policy
from sim.kernel import Kernel

ANYBODY = (
    ""  # in the place of a user where every machine takes everybody's jobs: adverts remember fewer kinds of request
)


class Placing:
    def __init__(self, policy: Policy, kernel: Kernel, hosts: Sequence[Host], forecast: Forecast) -> None:
        self._policy, self._kernel, self._hosts, self._forecast = policy, kernel, hosts, forecast
        self._by_id = {host.id: host for host in hosts}
        self._usage: dict[str, int] = {}
        self._shapes: dict[tuple[int, int], bytes] = {}  # of requests, by what they ask of a machine
        many = len(hosts) > TWO_LEVEL_PAST
        self._homes = homes(zones([host.advert() for host in hosts], {})) if many else None

    def used(self, user: str, gpu_s: int) -> None:
        self._usage[user] = self._usage.get(user, 0) + gpu_s

    def line(self, waiting: Iterable[Job]) -> list[Job]:
        """Those for whom there is room, in the order in which they are served: the product's queue, or first come first."""
        asked = {job.order.shape: job.order for job in waiting}
        able = {shape for shape, order in asked.items() if fitting(self._hosts, order)}
        waiting = [job for job in waiting if job.order.shape in able]
        if self._policy.place != "rendezvous":
            return sorted(waiting, key=lambda job: (job.order.at, job.order.number))
        key = Queue((), self._usage, (), int(self._kernel.now)).key
        return sorted(
            waiting,
            key=lambda job: key(Waiting(Request(job.order.id, 0, job.order.user), DEFAULT_PRIORITY, int(job.order.at))),
        )

    def choose(self, job: Job, able: Sequence[Host]) -> Host:
        """One of those who can take it."""
        match self._policy.place:
            case "first fit":
                return job.prefer if job.prefer is not None and job.prefer in able else able[0]
            case "longest":
                return max(able, key=lambda host: (host.departs_at, -host.number))
        request = self._request(job)
        horizon = horizon_of(request.remaining_s)
        return self._by_id[next(iter(rank_nodes(request, self.adverts(able, horizon), self._homes))).node]

    def ranked(self, job: Job, able: Sequence[Host]) -> list[Host]:
        """Those of them that can take it, best first, by the product's ranking."""
        request = self._request(job)
        horizon = horizon_of(request.remaining_s)
        ranking = rank_nodes(request, self.adverts(able, horizon), self._homes)
        return [self._by_id[candidate.node] for candidate in ranking]

    def _request(self, job: Job) -> Request:
        """In nobody's name; its shape is worked out once for all that ask the same of a machine."""
        request, asks = job.request(ANYBODY), job.order.shape
        if asks in self._shapes:
            vars(request)["shape"] = self._shapes[asks]
        else:
            self._shapes[asks] = request.shape
        return request

    @property
    def staying(self) -> list[Host]:
        """Those that are lent and have no notice."""
        return [host for host in self._hosts if host.lent and not host.leaving]

    def host(self, node: bytes | None) -> Host | None:
        return None if node is None else self._by_id[node]

    def next_place(self, job: Job, host: Host) -> Host | None:
        """Who would get it if it had to leave this one now: its home, or the first in rank."""
        able = self.able(job.order, host)
        if self._policy.goes_home and job.origin in able:
            return job.origin
        return self.choose(job, able) if able else None

    def able(self, order: Order, but: Host | None = None) -> list[Host]:
        """Those who can take it now."""
        able = fitting(self._hosts, order)
        if but in able:
            able.remove(but)
        return able

    def heir(self, job: Job, host: Host) -> Host | None:
        """Who would get it now that it has to leave this one; its home counts from then on as preferred."""
        found = self.next_place(job, host)
        if self._policy.goes_home and found is not None and found is job.origin:
            job.prefer = found
        return found

    def holders(self, job: Job, not_these: Sequence[Host], count: int) -> list[Host]:
        """More machines for its checkpoints, best first."""
        adverts = self.adverts([host for host in self._hosts if host.reachable and not host.leaving])
        there = {host.id for host in not_these}
        need_mib = min(STORE_MIB - 1, int(job.order.state_bytes / (1 << 20)))
        order = replica_order(job.order.id, adverts, there, need_mib, there, count)
        return [self._by_id[node] for node in order]

    def adverts(self, hosts: Sequence[Host], *horizons: int) -> list[Advert]:
        """As they are now. Their stays are those of an hour and of these horizons (by place); others are left as they were."""
        now = self._kernel.now
        epoch, wanted = int(now // WEIGHT_EPOCH_S), 1 << HOUR
        for horizon in horizons:
            wanted |= 1 << horizon
        stale = [host for host in hosts if host.weight_epoch != epoch or host.weighed & wanted != wanted]
        if stale:
            self._weigh(stale, epoch, [horizon for horizon in range(len(HORIZONS_S)) if wanted >> horizon & 1])
        return [
            last if (last := host.adverts[host.free]) is not None and last.stays is host.weights else host.advert()
            for host in hosts
        ]

    def _weigh(self, hosts: Sequence[Host], epoch: int, horizons: Iterable[int]) -> None:
        """Foretell anew what has not been in this epoch: as of its beginning, as the product does."""
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

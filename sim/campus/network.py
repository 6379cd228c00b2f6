"""Flows over the campus network with max-min fair shares of edge, uplink and core links, as in SimGrid's flow model.

A flow sends a checkpoint to all of its holders at once and uses the sender's edge once for each copy. The `demand` of a link is
other campus traffic. A flow that `yields` (background pacing) gets only what that traffic and other flows leave; other flows
compete with it.
"""

from collections.abc import Callable, Iterable, Sequence
from math import inf

import msgspec

from sim.kernel import Kernel

BACKGROUND_FLOWS = 8.0  # streams of other traffic on a link, for its fair share against flows (own choice)
HOUR_S = 3600.0
NEARLY = 1 - 1e-9  # a share of this size counts as all, against rounding errors


class Demand(msgspec.Struct, frozen=True):
    """One flow in the fair-share computation: (link, copies that cross it), weight, and maximum rate."""

    path: tuple[tuple[int, float], ...]
    weight: float = 1.0
    limit: float = inf


def max_min(demands: Sequence[Demand], capacities: Sequence[float]) -> list[float]:
    """Return the max-min fair rate of each demand, by progressive filling (Bertsekas and Gallager 1992, 6.5.2).

    All rates rise together, in proportion to their weights, until a link is full or a demand reaches its limit.
    """
    rates = [0.0] * len(demands)
    rising = [place for place, demand in enumerate(demands) if demand.limit > 0]
    left = list(capacities)
    level = 0.0
    while rising:
        pull: dict[int, float] = {}
        for place in rising:
            for link, uses in demands[place].path:
                pull[link] = pull.get(link, 0.0) + uses * demands[place].weight
        step = min([left[link] / pulled for link, pulled in pull.items()], default=inf)
        step = max(0.0, min(step, min([demands[place].limit / demands[place].weight for place in rising]) - level))
        if step == inf:
            raise ValueError("a flow without links and without a limit has no rate")
        level += step
        full = set()
        for link, pulled in pull.items():
            left[link] = max(0.0, left[link] - step * pulled)
            if left[link] <= capacities[link] * (1 - NEARLY):
                full.add(link)
        still = []
        for place in rising:
            demand = demands[place]
            rates[place] = min(demand.limit, demand.weight * level)
            if rates[place] < demand.limit * NEARLY and full.isdisjoint([link for link, _ in demand.path]):
                still.append(place)
        rising = still
    return rates


class Link:
    """One direction of a link. `capacity` and `demand` (other traffic) are in bytes a second; `spare` is the rest.

    `carried` counts the bytes of flows by hour; several links can share one counter.
    """

    __slots__ = (
        "_short_since",
        "capacity",
        "carried",
        "demand",
        "flows",
        "limit",
        "lost",
        "name",
        "potential",
        "short",
        "spare",
    )

    def __init__(self, name: str, capacity: float, carried: dict[int, float] | None = None) -> None:
        self.name, self.capacity, self.carried = name, capacity, carried
        self.limit = self.spare = capacity * (1 + 1e-9)
        self.demand = 0.0
        self.potential = 0.0  # sum of the peak rates of its flows
        self.flows: dict[Flow, float] = {}
        self.short = 0.0  # rate that flows take from other traffic
        self.lost = 0.0  # bytes of other traffic that were not sent in time
        self._short_since = 0.0

    @property
    def contended(self) -> bool:
        """Tell whether its flows and other traffic could fill it at their peak rates. A single flow alone cannot."""
        return self.potential > self.spare and (self.demand > 0 or len(self.flows) > 1)

    def fall_short(self, short: float, now: float) -> None:
        self.lost += self.short * (now - self._short_since)
        self._short_since, self.short = now, short


class Path:
    """The links of a path with the copies that cross each; `peak` is the rate to each holder if idle, bytes a second."""

    __slots__ = ("links", "peak")

    def __init__(self, links: Iterable[tuple[Link, float]]) -> None:
        self.links = tuple(links)
        self.peak = min([link.capacity / uses for link, uses in self.links], default=inf)


class Flow:
    """A transfer of some bytes to each holder along a path; `done` is called when all have them.

    `remaining` bytes are left at time `at`. `owner` is the job; the flow is `over` when it has arrived or was cancelled.
    """

    __slots__ = ("at", "bytes", "done", "number", "over", "owner", "path", "peak", "rate", "remaining", "yields")

    def __init__(
        self,
        path: Path,
        count: float,
        done: Callable[[], None],
        yields: bool,
        owner: object = None,
    ) -> None:
        self.path = path.links
        self.peak = path.peak
        self.bytes = self.remaining = count
        self.done = done
        self.yields = yields
        self.owner = owner
        self.over = False
        self.rate = self.at = 0.0
        self.number = 0  # of its timer


class Network:
    """All flows; rates are recomputed when a flow starts or ends and when other traffic changes."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self.shared = 0  # number of fair-share computations

    def start(
        self,
        path: Path,
        count: float,
        done: Callable[[], None],
        yields: bool,
        owner: object = None,
    ) -> Flow:
        flow = Flow(path, max(1.0, count), done, yields, owner)
        flow.at = self._kernel.now
        alone, peak = True, flow.peak
        for link, uses in path.links:
            flows = link.flows
            flows[flow] = uses
            link.potential = potential = link.potential + uses * peak
            if potential > link.spare and (link.demand > 0 or len(flows) > 1):  # `contended`, inlined for speed
                alone = False
        if alone:
            flow.rate, flow.number = peak, 1
            self._kernel.post(flow.bytes / peak, self._arrive, flow, 1)
        else:
            self._share([flow])
        return flow

    def stop(self, flow: Flow) -> None:
        """Cancel the transfer, unless it is over."""
        if not flow.over:
            self._settle(flow)
            self._leave(flow)

    def set_demand(self, link: Link, demand: float) -> None:
        """Change the other traffic on a link."""
        contended = link.contended
        link.demand, link.spare = demand, link.limit - demand
        if link.flows and (contended or link.contended):
            self._share(list(link.flows))
        if link.short and (not link.flows or not link.contended):
            link.fall_short(0.0, self._kernel.now)

    # --- inside

    def _leave(self, flow: Flow) -> None:
        flow.number += 1
        flow.over = True
        near: list[Link] = []
        sent, peak = flow.bytes - flow.remaining, flow.peak
        hour = int(self._kernel.now // HOUR_S)
        for link, uses in flow.path:
            flows, potential, carried = link.flows, link.potential, link.carried
            if potential > link.spare and (link.demand > 0 or len(flows) > 1):
                near.append(link)
            del flows[flow]
            link.potential = potential - uses * peak if flows else 0.0
            if carried is not None:
                carried[hour] = carried.get(hour, 0.0) + uses * sent
        if near:
            others = dict.fromkeys(other for link in near for other in link.flows)
            for link in near:
                if link.short and (not link.flows or not link.contended):
                    link.fall_short(0.0, self._kernel.now)
            if others:
                self._share(list(others))

    def _share(self, seeds: Iterable[Flow]) -> None:
        """Give new rates to these flows and to all flows that they meet, directly or not, on contended links."""
        found: dict[Flow, None] = dict.fromkeys(seeds)
        links: dict[Link, int] = {}
        queue = list(found)
        while queue:
            for link, _ in queue.pop().path:
                if link.potential > link.spare and link not in links and link.contended:
                    links[link] = len(links)
                    for other in link.flows:
                        if other not in found:
                            found[other] = None
                            queue.append(other)
        if not links:
            for flow in found:
                self._run_at(flow, flow.peak)
            return
        self.shared += 1
        pressing = [flow for flow in found if not flow.yields]
        left = self._left_by(pressing, links) if pressing else self._left_by_own(links)
        yielding = [flow for flow in found if flow.yields]
        if len(yielding) == 1:
            flow = yielding[0]
            most = min([left[links[link]] / uses for link, uses in flow.path if link in links], default=inf)
            self._run_at(flow, min(flow.peak, most))
            return
        for flow, rate in zip(yielding, max_min([self._demand(f, links) for f in yielding], left), strict=True):
            self._run_at(flow, rate)

    def _left_by_own(self, links: Iterable[Link]) -> list[float]:
        """Return what other traffic leaves on links where no flow competes with it."""
        left = []
        for link in links:
            if link.short:
                link.fall_short(0.0, self._kernel.now)
            left.append(max(0.0, link.capacity - link.demand))
        return left

    def _left_by(self, pressing: Sequence[Flow], links: dict[Link, int]) -> list[float]:
        """Give competing flows their rates; return what they and other traffic leave to yielding flows."""
        capacities = [link.capacity for link in links]
        demands = [self._demand(flow, links) for flow in pressing]
        own = [Demand(((number, 1.0),), BACKGROUND_FLOWS, link.demand) for link, number in links.items()]
        rates = max_min([*demands, *own], capacities)
        for (link, number), got in zip(links.items(), rates[len(pressing) :], strict=True):
            link.fall_short(max(0.0, min(link.demand, link.capacity) - got), self._kernel.now)
            capacities[number] -= got
        for demand, rate in zip(demands, rates, strict=False):
            for number, uses in demand.path:
                capacities[number] -= uses * rate
        for flow, rate in zip(pressing, rates, strict=False):
            self._run_at(flow, rate)
        return [max(0.0, capacity) for capacity in capacities]

    @staticmethod
    def _demand(flow: Flow, links: dict[Link, int]) -> Demand:
        return Demand(tuple([(links[link], uses) for link, uses in flow.path if link in links]), 1.0, flow.peak)

    def _run_at(self, flow: Flow, rate: float) -> None:
        if rate == flow.rate and rate > 0:
            return
        self._settle(flow)
        flow.rate = rate
        flow.number += 1
        if rate > 0:
            self._kernel.post(flow.remaining / rate, self._arrive, flow, flow.number)

    def _settle(self, flow: Flow) -> None:
        now = self._kernel.now
        flow.remaining = max(0.0, flow.remaining - flow.rate * (now - flow.at))
        flow.at = now

    def _arrive(self, flow: Flow, number: int) -> None:
        if number == flow.number:
            flow.at, flow.remaining = self._kernel.now, 0.0
            self._leave(flow)
            flow.done()

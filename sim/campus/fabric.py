"""The links of a campus: an edge for each machine, an uplink for each building, the core between them, a file server."""

from collections.abc import Sequence
from math import cos, pi

from sim.campus.churn import DAY_S, Machine
from sim.campus.network import Link, Network, Path
from sim.campus.world import World
from sim.streams import Streams

SERVER = -1  # in the place of a machine's number
BUSIEST_S = 14 * 3600.0
UNEVEN = 0.3  # that an hour's own traffic may be above or below the day's shape; ours
MOST_PATHS = 10_000  # that are remembered; ours
FULLEST = 0.95  # of an uplink, at most, is its own traffic; ours


class Fabric:
    def __init__(self, world: World, machines: Sequence[Machine], network: Network, streams: Streams) -> None:
        wire = world.wire
        self._network, self._streams, self._wire = network, streams, wire
        self._buildings = [machine.building for machine in machines]
        self.sent: dict[int, float] = {}  # by machines, in bytes by hour
        self.crossed: dict[int, float] = {}  # the uplinks, likewise
        self.up = [Link(f"{machine.name} up", machine.edge_bps, self.sent) for machine in machines]
        self.down = [Link(f"{machine.name} down", machine.edge_bps) for machine in machines]
        uplink_bps = wire.uplink_gbps * 1e9 / 8
        names = sorted(set(self._buildings))
        self._uplinks = {
            name: (Link(f"{name} up", uplink_bps, self.crossed), Link(f"{name} down", uplink_bps, self.crossed))
            for name in names
        }
        self._core = Link("core", wire.core_gbps * 1e9 / 8)
        self._server = (Link("server up", wire.server_gbps * 1e9 / 8), Link("server down", wire.server_gbps * 1e9 / 8))
        self._paths: dict[tuple[int, tuple[int, ...]], Path] = {}
        self.asked = 0.0  # bytes of the uplinks' own traffic

    @property
    def uplinks(self) -> list[Link]:
        return [link for pair in self._uplinks.values() for link in pair]

    def path(self, source: int, targets: tuple[int, ...]) -> Path:
        """From one machine, or the server, to all of these: each link with the number of copies that cross it."""
        found = self._paths.get((source, targets))
        if found is None:
            uses: dict[Link, float] = {}
            for target in targets:
                for link in self._way(source, target):
                    uses[link] = uses.get(link, 0.0) + 1.0
            if len(self._paths) >= MOST_PATHS:
                self._paths.clear()
            found = self._paths[source, targets] = Path(uses.items())
        return found

    def left_bps(self, source: int, target: int) -> float:
        """What the campus's own traffic leaves of a path, a tenth at least: as one who has sent there lately knows."""
        return min([max(link.capacity - link.demand, link.capacity / 10) for link in self._way(source, target)])

    def _way(self, source: int, target: int) -> list[Link]:
        if SERVER not in (source, target) and self._buildings[source] == self._buildings[target]:
            return [self.up[source], self.down[target]]
        out = [self._server[0]] if source == SERVER else [self.up[source], self._uplinks[self._buildings[source]][0]]
        into = [self._server[1]] if target == SERVER else [self._uplinks[self._buildings[target]][1], self.down[target]]
        return [*out, self._core, *into]

    def hour(self, now: float, length_s: float) -> None:
        """The campus's own traffic for the next so many seconds."""
        wire = self._wire
        shape = (1 + cos(2 * pi * (now + 1800 - BUSIEST_S) / DAY_S)) / 2
        for name, pair in self._uplinks.items():
            stream = self._streams.get(name, "traffic")
            for link in pair:
                level = (wire.night + (wire.noon - wire.night) * shape) * (1 + UNEVEN * (2 * stream.random() - 1))
                demand = min(FULLEST, level) * link.capacity
                self.asked += demand * length_s
                self._network.set_demand(link, demand)

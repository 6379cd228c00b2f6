"""Links of a campus: an edge for each machine, an uplink for each building, a core, and a file server."""

from collections.abc import Sequence
from math import cos, pi

from sim.campus.churn import DAY_S, Machine
from sim.campus.network import Link, Network, Path
from sim.campus.state import Host
from sim.campus.world import World
from sim.kernel import Streams

SERVER = -1  # the file server, in place of a machine's number
BUSIEST_S = 14 * 3600.0
LOAD_NOISE = 0.3  # hourly deviation of other traffic from the daily curve (own choice)
PATHS_CACHED = 10_000
MAX_OWN_LOAD = 0.95  # of an uplink's capacity, for other traffic (own choice)


class Topology:
    def __init__(self, world: World, machines: Sequence[Machine], network: Network, streams: Streams) -> None:
        spec = world.network
        self._network, self._streams, self._spec = network, streams, spec
        self._buildings = [machine.building for machine in machines]
        self.edge_bytes: dict[int, float] = {}  # bytes sent by machines, by hour
        self.uplink_bytes: dict[int, float] = {}  # bytes over uplinks, by hour
        self.up = [Link(f"{machine.name} up", machine.edge_bps, self.edge_bytes) for machine in machines]
        self.down = [Link(f"{machine.name} down", machine.edge_bps) for machine in machines]
        uplink_bps = spec.uplink_gbps * 1e9 / 8
        names = sorted(set(self._buildings))
        self._uplinks = {
            name: (
                Link(f"{name} up", uplink_bps, self.uplink_bytes),
                Link(f"{name} down", uplink_bps, self.uplink_bytes),
            )
            for name in names
        }
        self._core = Link("core", spec.core_gbps * 1e9 / 8)
        self._server = (
            Link("server up", spec.server_gbps * 1e9 / 8),
            Link("server down", spec.server_gbps * 1e9 / 8),
        )
        self._paths: dict[tuple[int, tuple[int, ...]], Path] = {}
        self.offered_bytes = 0.0  # of other traffic on the uplinks

    @property
    def uplinks(self) -> list[Link]:
        return [link for pair in self._uplinks.values() for link in pair]

    def path(self, source: int, targets: tuple[int, ...]) -> Path:
        """Return the path from a machine or the server to all targets: each link with the number of copies that cross it."""
        found = self._paths.get((source, targets))
        if found is None:
            uses: dict[Link, float] = {}
            for target in targets:
                for link in self._links_between(source, target):
                    uses[link] = uses.get(link, 0.0) + 1.0
            if len(self._paths) >= PATHS_CACHED:
                self._paths.clear()
            found = self._paths[source, targets] = Path(uses.items())
        return found

    def available_bps(self, source: int, target: int) -> float:
        """Return the bandwidth that other traffic leaves on a path, at least a tenth, as a recent transfer would measure it."""
        return min(
            [max(link.capacity - link.demand, link.capacity / 10) for link in self._links_between(source, target)]
        )

    def _links_between(self, source: int, target: int) -> list[Link]:
        if SERVER not in (source, target) and self._buildings[source] == self._buildings[target]:
            return [self.up[source], self.down[target]]
        out = [self._server[0]] if source == SERVER else [self.up[source], self._uplinks[self._buildings[source]][0]]
        into = [self._server[1]] if target == SERVER else [self._uplinks[self._buildings[target]][1], self.down[target]]
        return [*out, self._core, *into]

    def set_background(self, now: float, length_s: float) -> None:
        """Draw the other traffic on the uplinks for the next `length_s` seconds."""
        spec = self._spec
        shape = (1 + cos(2 * pi * (now + 1800 - BUSIEST_S) / DAY_S)) / 2
        for name, pair in self._uplinks.items():
            stream = self._streams.get(name, "traffic")
            for link in pair:
                level = (spec.night_load + (spec.noon_load - spec.night_load) * shape) * (
                    1 + LOAD_NOISE * (2 * stream.random() - 1)
                )
                demand = min(MAX_OWN_LOAD, level) * link.capacity
                self.offered_bytes += demand * length_s
                self._network.set_demand(link, demand)


def machine_numbers(targets: Sequence[Host]) -> tuple[int, ...]:
    """Return where a path leads: to these machines, or to the file server if there are none."""
    return tuple([host.number for host in targets]) or (SERVER,)

"""Zones: groups of nodes on one subnet, the coordinator of each, and two-level ranking by zone, then by node.

Above 200 nodes a job is placed in two steps, so that a change in one zone moves few jobs of another. A coordinator only searches
for a place; any other node may search too, so no decision depends on it. The same adverts and hosts give the same zones on every
node.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from ipaddress import AddressValueError, IPv4Address, IPv6Address, ip_network

import msgspec

from placement.advert import Advert
from placement.ranking import Ranking, rank_nodes, zone_order
from placement.rendezvous import rank
from placement.request import Request

TWO_LEVEL_PAST, FLAT_BELOW = 200, 180  # nodes; apart, so that one node that comes and goes does not switch (own choice)
STABLE_SHARE, STABLE_LEAST = (
    4,
    3,
)  # a coordinator comes from the heaviest quarter of its zone, at least 3 nodes (own choice)
V4_PREFIX, V6_PREFIX = 24, 64  # typical prefix of a room or a floor in campus networks


class Zone(msgspec.Struct, frozen=True):
    """A zone. `line`: candidates for coordinator, best first; `weight`: the sum of its nodes' weights."""

    name: str
    nodes: tuple[bytes, ...]
    weight: int
    line: tuple[bytes, ...]

    @property
    def coordinator(self) -> bytes | None:
        return self.line[0] if self.line else None


@lru_cache(maxsize=4096)
def subnet(host: str) -> str:
    """Return the host's network; an empty text if the host is not an IP address."""
    text = host.partition("%")[0].strip("[]")
    try:
        return str(ip_network((IPv4Address(text), V4_PREFIX), strict=False))
    except AddressValueError:
        pass
    try:
        address = IPv6Address(text)
    except AddressValueError:
        return ""
    if address.ipv4_mapped is not None:
        return str(ip_network((address.ipv4_mapped, V4_PREFIX), strict=False))
    return str(ip_network((address, V6_PREFIX), strict=False))


def zone_name(advert: Advert, hosts: Mapping[bytes, str]) -> str:
    """Return the zone that the node's owner configured, else its subnet."""
    return advert.zone or subnet(hosts.get(advert.node, ""))


def zones(adverts: Iterable[Advert], hosts: Mapping[bytes, str], leaving: Collection[bytes] = ()) -> tuple[Zone, ...]:
    """Return the zones of these nodes, sorted by name. A node that is leaving is never coordinator."""
    found: dict[str, dict[bytes, Advert]] = {}
    for advert in adverts:
        found.setdefault(zone_name(advert, hosts), {})[advert.node] = advert
    return tuple(_zone(name, nodes, leaving) for name, nodes in sorted(found.items()))


def _zone(name: str, adverts: Mapping[bytes, Advert], leaving: Collection[bytes]) -> Zone:
    staying = sorted((advert for advert in adverts.values() if advert.node not in leaving), key=lambda ad: -ad.weight)
    stable: list[Advert] = []
    if staying:
        count = min(len(staying), max(STABLE_LEAST, -(-len(staying) // STABLE_SHARE)))
        least = staying[count - 1].weight
        stable = [advert for advert in staying if advert.weight >= least]
    # Equal weights among the stable nodes: a weight that grows by one must not change the coordinator.
    line = tuple(node for node, _ in rank(_key(name), [(advert.node, 1) for advert in stable]))
    return Zone(name, tuple(sorted(adverts)), sum(advert.weight for advert in adverts.values()), line)


def _key(name: str) -> bytes:
    return b"zone" + name.encode()[:60]


def zone_of(node: bytes, among: Sequence[Zone]) -> Zone | None:
    return next((zone for zone in among if node in zone.nodes), None)


def homes(among: Iterable[Zone]) -> dict[bytes, str]:
    """Return each node's zone name."""
    return {node: zone.name for zone in among for node in zone.nodes}


def stand_in_order(
    job: bytes,
    adverts: Iterable[Advert],
    among: Sequence[Zone],
    exclude: Collection[bytes],
    need_mib: int,
    home: str | None,
) -> list[bytes]:
    """Return the nodes that can hold checkpoints in place of the holders that the user chose, best first.

    Only nodes with `need_mib` of free space. Each zone comes once before any comes twice: first the zone `home`, then the others
    by the weight of their nodes with free space. Within a zone, nodes are ordered by survival.
    """
    fitting = {ad.node: ad for ad in adverts if ad.node not in exclude and ad.store_free_mib > need_mib}
    where = homes(among)
    weights: dict[str, int] = {}
    for node, advert in fitting.items():
        weights[where.get(node, "")] = weights.get(where.get(node, ""), 0) + advert.weight
    order = sorted(zone_order(job, weights), key=lambda name: name != home)
    places = {name: place for place, name in enumerate(order)}
    turns: dict[str, int] = {}
    keys: dict[bytes, tuple[int, int]] = {}
    for node, _ in rank(job + b"replica", [(ad.node, ad.weight) for ad in fitting.values()]):
        name = where.get(node, "")
        turns[name] = turns.get(name, -1) + 1
        keys[node] = (turns[name], places[name])
    return sorted(keys, key=lambda node: keys[node])


class Hierarchy(msgspec.Struct, frozen=True, dict=True):
    """The ranking mode. `since`: the number of nodes at which two-level ranking began; 0 while ranking is flat."""

    since: int = 0
    adverts: tuple[Advert, ...] = ()
    hosts: Mapping[bytes, str] = {}
    leaving: frozenset[bytes] = frozenset()

    @cached_property
    def zones(self) -> tuple[Zone, ...]:
        return zones(self.adverts, self.hosts, self.leaving)

    @cached_property
    def homes(self) -> dict[bytes, str]:
        return homes(self.zones)

    def rank(self, request: Request, adverts: Collection[Advert]) -> Ranking:
        """Rank nodes; leaders, runners, queues and `mesh why` all use this ranking."""
        return rank_nodes(request, adverts, self.homes if self.since else None)


def two_level_since(since: int, members: int) -> int:
    """Return the next `Hierarchy.since` for this number of members."""
    if since:
        return since if members >= FLAT_BELOW else 0
    return members if members > TWO_LEVEL_PAST else 0

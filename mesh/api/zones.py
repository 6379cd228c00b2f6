"""`mesh nodes --zones`, and what `mesh why` says of zones and of who submits a job."""

from typing import TYPE_CHECKING

from membership.identity import short_id
from placement.ranking import Ranking
from placement.zones import Hierarchy, zone_of

if TYPE_CHECKING:
    from mesh.api import answers
    from mesh.daemon import Daemon


def zone_list(daemon: "Daemon") -> "answers.mesh.Zones":
    """Every zone with its nodes, who coordinates it and what is done there now."""
    hierarchy, nicks, told = daemon.jobs.outlook.hierarchy(), _nicks(daemon), daemon.deputy.told()
    rows: list[answers.mesh.Zone] = []
    for zone in hierarchy.zones:
        submits = {nicks[node]: told[node].count for node in zone.nodes if node in told}
        rows.append(
            {
                "zone": zone.name,
                "nodes": sorted(nicks[node] for node in zone.nodes),
                "weight": zone.weight,
                "coordinator": nicks[zone.coordinator] if zone.coordinator is not None else None,
                "line": [nicks[node] for node in zone.line],
                "submits_for_others": submits,
                "doing": "; ".join([_mode(hierarchy), *(_submits(nick, n) for nick, n in sorted(submits.items()))]),
            }
        )
    return {"placement": _mode(hierarchy), "two_level_since": hierarchy.since, "zones": rows}


def placing(daemon: "Daemon", hierarchy: Hierarchy, ranking: Ranking) -> "answers.jobs.Placing":
    """How `ranking` came about: flat, or by zone first, and then which zone and who coordinates it."""
    zone = zone_of(ranking.candidates[0].node, hierarchy.zones) if hierarchy.since and ranking.candidates else None
    coordinator = zone.coordinator if zone is not None else None
    return {
        "mode": "two-level" if hierarchy.since else "flat",
        "two_level_since": hierarchy.since,
        "zone": zone.name if zone is not None else None,
        "coordinator": _nicks(daemon).get(coordinator, short_id(coordinator)) if coordinator is not None else None,
    }


def _mode(hierarchy: Hierarchy) -> str:
    return f"two-level since {hierarchy.since} nodes" if hierarchy.since else "flat"


def _submits(nick: str, count: int) -> str:
    return f"{nick} submits {count} job{'' if count == 1 else 's'} for others"


def _nicks(daemon: "Daemon") -> dict[bytes, str]:
    nicks = {member.node_id: member.nick for member in daemon.membership.members()}
    return {advert.node: advert.nick for advert in daemon.jobs.outlook.adverts()} | nicks

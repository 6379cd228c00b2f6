"""One replication: a world and a policy under one seed, and the figures of it. docs/simulator.md has the formulas."""

from collections.abc import Mapping, Sequence
from math import fsum

from sim.campus.campus import Campus
from sim.campus.guest import Host
from sim.campus.network import Link
from sim.campus.policies import Policy, find_policy
from sim.campus.tally import SCHEMA, Result, percentile, share
from sim.campus.world import World


def replicate(world: World, policy: Policy, seed: int) -> Result:
    campus = Campus(world, policy, seed)
    campus.run()
    return result_of(campus)


def result_of(campus: Campus) -> Result:
    """Of a run that is over."""
    figures = figures_of(campus)
    for name, value in figures.items():
        campus.log.add(campus.end, name, value.hex())
    return Result(
        SCHEMA,
        campus.world.name,
        campus.policy.name,
        campus.seed,
        figures,
        campus.kernel.executed,
        campus.log.digest,
    )


def replicate_named(world: World, policy: str, seed: int) -> Result:
    """As `replicate`, with what another process can be sent."""
    return replicate(world, find_policy(policy), seed)


def figures_of(campus: Campus) -> dict[str, float]:
    tally, start, end = campus.tally, campus.counts_from, campus.end
    lent_s, owners_s, total_s = _gpu_seconds(campus.hosts, campus.world, start, end)
    per_hundred = 100 / tally.useful if tally.useful else 0.0
    overhead = tally.stalled + tally.restoring + tally.redundant
    down = sorted(tally.downtimes)
    uplinks = campus.fabric.uplinks
    edge_peak, edge_mean = _used(campus.fabric.sent, campus.fabric.up, start, end)
    uplink_peak, uplink_mean = _used(campus.fabric.crossed, uplinks, start, end)
    return {
        "work_loss": tally.lost * per_hundred,
        "overhead": overhead * per_hundred,
        "loss_and_overhead": (tally.lost + overhead) * per_hundred,
        "downtime_mean": share(fsum(down), len(down)),
        "downtime_p50": percentile(down, 0.5),
        "downtime_p95": percentile(down, 0.95),
        "migration_success": share(tally.migrated, tally.noticed),
        "saved_in_time": share(tally.saved_in_time, tally.noticed),
        "migrate_back": share(tally.returned, tally.could_return),
        "makespan_inflation": share(tally.interrupted_s, tally.interrupted_work_s) - 1
        if tally.interrupted_jobs
        else 0.0,
        "goodput": share(tally.useful, lent_s),
        "utilisation": share(tally.held + owners_s, total_s),
        "owner_use": share(owners_s, total_s),
        "background_loss": share(fsum(link.lost for link in uplinks), campus.fabric.asked),
        "backup_peak": edge_peak,
        "backup_mean": edge_mean,
        "uplink_peak": uplink_peak,
        "uplink_mean": uplink_mean,
        "wait_mean": share(tally.waited_s, tally.started),
        "departures": float(tally.departures),
        "checkpoints": float(tally.checkpoints),
        "finished": float(tally.finished),
        "delivered": tally.useful / 3600,
        "lost": tally.lost / 3600,
        "overhead_h": overhead / 3600,
    }


def _used(carried: Mapping[int, float], links: Sequence[Link], start: float, end: float) -> tuple[float, float]:
    """Of these links' capacity together: in the busiest hour, and on average."""
    hours = [count for hour, count in carried.items() if hour * 3600 >= start]
    capacity = fsum(link.capacity for link in links)
    return share(max(hours, default=0.0), capacity * 3600), share(fsum(hours), capacity * (end - start))


def _gpu_seconds(hosts: Sequence[Host], world: World, start: float, end: float) -> tuple[float, float, float]:
    """Lent, used by owners, and all there are."""
    lent = owners = 0.0
    for host in hosts:
        away = fsum(max(0.0, min(one.end, end) - max(one.start, start)) for one in host.absences)
        lent += (end - start - away) * host.machine.gpus
        owners += away * host.machine.gpus * world.owners[host.machine.owners].busy
    return lent, owners, (end - start) * sum(host.machine.gpus for host in hosts)

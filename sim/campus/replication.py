"""Replications: one run of a world and a policy under one seed, and its metrics (docs/reference/campus-worlds.md)."""

from collections.abc import Mapping, Sequence
from math import fsum

from sim.campus.campus import Campus
from sim.campus.metrics import SCHEMA, Result, percentile, share
from sim.campus.network import Link
from sim.campus.policies import Policy, find_policy
from sim.campus.state import Host
from sim.campus.world import World


def replicate(world: World, policy: Policy, seed: int) -> Result:
    campus = Campus(world, policy, seed)
    campus.run()
    return result_of(campus)


def result_of(campus: Campus) -> Result:
    """Return the result of a finished run; the metrics enter the digest."""
    metrics = metrics_of(campus)
    for name, value in metrics.items():
        campus.log.add(campus.end, name, value.hex())
    return Result(
        SCHEMA,
        campus.world.name,
        campus.policy.name,
        campus.seed,
        metrics,
        campus.kernel.executed,
        campus.log.digest,
    )


def replicate_named(world: World, policy: str, seed: int) -> Result:
    """Run a replication with arguments that can be sent to another process."""
    return replicate(world, find_policy(policy), seed)


def metrics_of(campus: Campus) -> dict[str, float]:
    counters, start, end = campus.counters, campus.counts_from, campus.end
    lent_s, owners_s, total_s = _gpu_seconds(campus.hosts, campus.world, start, end)
    per_hundred = 100 / counters.useful if counters.useful else 0.0
    overhead = counters.stalled + counters.restoring + counters.redundant
    down = sorted(counters.downtimes)
    uplinks = campus.topology.uplinks
    edge_peak, edge_mean = _used(campus.topology.edge_bytes, campus.topology.up, start, end)
    uplink_peak, uplink_mean = _used(campus.topology.uplink_bytes, uplinks, start, end)
    return {
        "work_loss": counters.lost * per_hundred,
        "overhead": overhead * per_hundred,
        "loss_and_overhead": (counters.lost + overhead) * per_hundred,
        "downtime_mean": share(fsum(down), len(down)),
        "downtime_p50": percentile(down, 0.5),
        "downtime_p95": percentile(down, 0.95),
        "migration_success": share(counters.migrated, counters.noticed),
        "saved_in_time": share(counters.saved_in_time, counters.noticed),
        "migrate_back": share(counters.returned, counters.could_return),
        "makespan_inflation": share(counters.interrupted_s, counters.interrupted_work_s) - 1
        if counters.interrupted_jobs
        else 0.0,
        "goodput": share(counters.useful, lent_s),
        "utilisation": share(counters.held + owners_s, total_s),
        "owner_use": share(owners_s, total_s),
        "background_loss": share(fsum(link.lost for link in uplinks), campus.topology.offered_bytes),
        "backup_peak": edge_peak,
        "backup_mean": edge_mean,
        "uplink_peak": uplink_peak,
        "uplink_mean": uplink_mean,
        "wait_mean": share(counters.waited_s, counters.started),
        "departures": float(counters.departures),
        "checkpoints": float(counters.checkpoints),
        "finished": float(counters.finished),
        "delivered": counters.useful / 3600,
        "lost": counters.lost / 3600,
        "overhead_h": overhead / 3600,
    }


def _used(carried: Mapping[int, float], links: Sequence[Link], start: float, end: float) -> tuple[float, float]:
    """Return the used share of the links' total capacity: in the busiest hour, and on average."""
    hours = [count for hour, count in carried.items() if hour * 3600 >= start]
    capacity = fsum(link.capacity for link in links)
    return share(max(hours, default=0.0), capacity * 3600), share(fsum(hours), capacity * (end - start))


def _gpu_seconds(hosts: Sequence[Host], world: World, start: float, end: float) -> tuple[float, float, float]:
    """Return the GPU-seconds that were lent, used by owners, and existing."""
    lent = owners = 0.0
    for host in hosts:
        away = fsum(max(0.0, min(one.end, end) - max(one.start, start)) for one in host.absences)
        lent += (end - start - away) * host.machine.gpus
        owners += away * host.machine.gpus * world.owners[host.machine.owners].busy
    return lent, owners, (end - start) * sum(host.machine.gpus for host in hosts)

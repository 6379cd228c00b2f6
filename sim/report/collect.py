"""Collection of the runs for a report: observed runs of the drawn policies, and plain replications of the others."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, as_completed
from concurrent.futures.process import BrokenProcessPool
from math import ceil

import click
import msgspec

from sim.campus import claims
from sim.campus.executors import executor
from sim.campus.observation import Observation, availability, observe
from sim.campus.policies import find_policy
from sim.campus.sensitivity import tornado, variants
from sim.campus.study import Replication, Sample, common_seeds, replications
from sim.campus.world import World
from sim.campus.world_files import find_world
from sim.options import Options, Progress, run_samples
from sim.report.page import Chapter

DRAWN = ("mesh", "slurm-s60", "slurm-s60-fast", "gpunion", "redundant", "young-daly", "oracle")
INTERVALS = tuple(f"periodic-{minutes}" for minutes in (5, 10, 15, 30, 60, 120))
ENOUGH_DEPARTURES = 300  # for a distribution (own choice)
MAX_WORLDS = 4  # each takes about 0.3 MB
Key = tuple[str, str]  # the digest of a world, and a policy
METRIC, POLICY = "work_loss", "mesh"  # of the sensitivity figure


class WorldPlan(msgspec.Struct, frozen=True):
    """The runs of one world. `drawn` are the policies of the distributions; figures over time show the first of them."""

    world: World
    drawn: tuple[str, ...]
    replicated: tuple[str, ...]
    tornado: bool

    @property
    def saving(self) -> list[str]:
        """Return the policies that keep checkpoints on peers, whose overheads are comparable."""
        return [policy for policy in self.replicated if find_policy(policy).keeps == "peers"]


def plans(names: Sequence[str], drawn: Sequence[str], options: Options, with_tornado: bool) -> list[WorldPlan]:
    """Return the plan of each world; ValueError for unknown worlds and policies, and for too many worlds."""
    if len(set(names)) > MAX_WORLDS:
        raise ValueError(f"{len(set(names))} worlds; a report has at most {MAX_WORLDS}")
    chosen = tuple(dict.fromkeys(drawn))
    for policy in chosen:
        find_policy(policy)
    found = []
    for name in dict.fromkeys(names):
        claimed = claims.policies_of((name, ())) if (name, ()) in claims.setups() else []
        replicated = tuple(dict.fromkeys([*chosen, *claimed, "young-daly", "oracle", *INTERVALS]))
        found.append(WorldPlan(find_world(name, options.settings), chosen, replicated, with_tornado))
    return found


def collect(
    names: Sequence[str], planned: Sequence[WorldPlan], options: Options
) -> tuple[list[Chapter], list[claims.ClaimResult], bool]:
    """Return the chapters, the claims on these worlds, and whether no run is missing. Ctrl-C leaves out unfinished runs."""
    observed, samples, complete = _observe_all(planned, options)
    claimed: dict[str, claims.Setup] = {}
    wanted: list[Replication] = []
    for plan in planned:
        wanted += replications([plan.world], plan.replicated, options.seed_range)
        if plan.tornado:
            wanted += replications(variants(plan.world), [POLICY], options.seed_range)
    for place in claims.setups():
        if place[0] in names:
            world = find_world(place[0], [*place[1], *options.settings])
            claimed[world.digest] = place
            wanted += replications([world], claims.policies_of(place), options.seed_range)
    unique = {(replication.world.digest, replication.policy, replication.seed): replication for replication in wanted}
    missing = [
        replication
        for (digest, policy, seed), replication in unique.items()
        if (digest, policy) not in samples or seed not in samples[digest, policy].by_seed
    ]
    if complete and missing:
        found, complete = run_samples(sorted(missing, key=lambda replication: replication.seed), options)
        for key, sample in found.items():
            samples.setdefault(key, Sample(sample.name)).by_seed |= sample.by_seed
    chapters = [chapter for plan in planned if (chapter := _chapter(plan, observed, samples)) is not None]
    rows = claims.evaluate({(claimed[key[0]], key[1]): sample for key, sample in samples.items() if key[0] in claimed})
    return chapters, rows, complete


def _chapter(
    plan: WorldPlan, observed: Mapping[Key, list[Observation]], samples: Mapping[Key, Sample]
) -> Chapter | None:
    """Return the chapter of a world, or None if too few runs are finished."""
    digest = plan.world.digest
    own = {policy: samples.get((digest, policy), Sample(policy)) for policy in plan.replicated}
    seen = {policy: observed[digest, policy] for policy in plan.drawn if (digest, policy) in observed}
    seeds = common_seeds(*own.values())
    if not seeds or len(seen) < len(plan.drawn):
        return None
    sensitivity = None
    if plan.tornado:
        ends = {one.digest: samples.get((one.digest, POLICY), Sample(POLICY)) for one in variants(plan.world)}
        if common_seeds(*ends.values()):
            sensitivity = tornado(plan.world, POLICY, METRIC, ends)
    return Chapter(plan.world, own, seen, plan.saving, availability(plan.world, seeds), sensitivity)


def _observe_all(
    planned: Sequence[WorldPlan], options: Options
) -> tuple[dict[Key, list[Observation]], dict[Key, Sample], bool]:
    """Observe the first seed of each drawn policy, and more seeds in worlds with few departures."""
    observed: dict[Key, list[Observation]] = {}
    samples: dict[Key, Sample] = {}
    first, *others = options.seed_range
    complete = _observe([(plan, policy, first) for plan in planned for policy in plan.drawn], options, observed)
    more = [
        (plan, policy, seed)
        for plan in planned
        if (there := observed.get((plan.world.digest, plan.drawn[0])))
        for seed in others[: ceil(ENOUGH_DEPARTURES / max(1.0, there[0].result.metrics["departures"])) - 1]
        for policy in plan.drawn
    ]
    complete = complete and _observe(more, options, observed)
    for (digest, policy), runs in observed.items():
        runs.sort(key=lambda run: run.result.seed)
        sample = samples[digest, policy] = Sample(policy)
        sample.by_seed |= {run.result.seed: run.result for run in runs}
    return observed, samples, complete


def _observe(
    jobs: Sequence[tuple[WorldPlan, str, int]], options: Options, observed: dict[Key, list[Observation]]
) -> bool:
    """Observe these runs; return False if interrupted.

    Only one run of each world records forecasts, because they do not depend on the policy.
    """
    if not jobs:
        return True
    tasks = [
        (plan.world, policy, seed, policy == plan.drawn[0] and seed == options.first_seed)
        for plan, policy, seed in jobs
    ]
    with Progress(len(tasks)) as progress:
        try:
            with executor(options.executor, options.workers, options.dask, len(tasks)) as found:
                for world, observation in _observations(tasks, found):
                    observed.setdefault((world.digest, observation.result.policy), []).append(observation)
                    progress.step()
            return True
        except (KeyboardInterrupt, BrokenProcessPool):
            click.echo(f"\nmesh: interrupted; {progress.done} of {len(tasks)} observed runs finished", err=True)
            return False


def _observations(
    tasks: Sequence[tuple[World, str, int, bool]], executor: Executor | None
) -> Iterator[tuple[World, Observation]]:
    if executor is None:
        for task in tasks:
            yield task[0], observe(*task)
        return
    futures = {executor.submit(observe, *task): task[0] for task in tasks}
    for future in as_completed(futures):
        yield futures[future], future.result()

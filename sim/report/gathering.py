"""The runs that a report needs: one of each policy that is looked at while it goes on, and replications without that."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, as_completed
from concurrent.futures.process import BrokenProcessPool
from math import ceil

import click
import msgspec

from sim.campus import headline
from sim.campus.executors import executor
from sim.campus.observation import Observation, availability, observe
from sim.campus.policies import find_policy
from sim.campus.sensitivity import tornado, variants
from sim.campus.study import Cell, Side, cells, shared
from sim.campus.world import World, find_world
from sim.options import Options, sides_of
from sim.progress import Progress
from sim.report.page import Chapter

DRAWN = ("mesh", "slurm-s60", "slurm-s60-fast", "gpunion", "redundant", "young-daly", "oracle")
INTERVALS = tuple(f"periodic-{minutes}" for minutes in (5, 10, 15, 30, 60, 120))
ENOUGH = 300  # departures that a distribution is drawn of, if there are so many; ours
MOST_WORLDS = 4  # of about 0.3 MB each
Key = tuple[str, str]  # a world's digest, and a policy
FIGURE, POLICY = "work_loss", "mesh"  # of the sensitivity


class Plan(msgspec.Struct, frozen=True):
    """What to run in one world. `drawn`: the policies of its distributions, the first of which is told of in detail."""

    world: World
    drawn: tuple[str, ...]
    replicated: tuple[str, ...]
    tornado: bool

    @property
    def saving(self) -> list[str]:
        """Policies that keep checkpoints alike, on peers, so that their overhead can be held against each other."""
        return [policy for policy in self.replicated if find_policy(policy).keeps == "peers"]


def plans(names: Sequence[str], drawn: Sequence[str], options: Options, with_tornado: bool) -> list[Plan]:
    """ValueError for worlds and policies that do not exist, and for more than a page has room for."""
    if len(set(names)) > MOST_WORLDS:
        raise ValueError(f"{len(set(names))} worlds; a page has room for {MOST_WORLDS}")
    chosen = tuple(dict.fromkeys(drawn))
    for policy in chosen:
        find_policy(policy)
    found = []
    for name in dict.fromkeys(names):
        claimed = headline.policies_of((name, ())) if (name, ()) in headline.places() else []
        replicated = tuple(dict.fromkeys([*chosen, *claimed, "young-daly", "oracle", *INTERVALS]))
        found.append(Plan(find_world(name, options.settings), chosen, replicated, with_tornado))
    return found


def gather(
    names: Sequence[str], planned: Sequence[Plan], options: Options
) -> tuple[list[Chapter], list[headline.Row], bool]:
    """The chapters, the claims on these worlds, and whether nothing is missing. Ctrl-C leaves out what is not finished."""
    looked, sides, whole = _looked_at(planned, options)
    claimed: dict[str, headline.Place] = {}
    wanted: list[Cell] = []
    for plan in planned:
        wanted += cells([plan.world], plan.replicated, options.numbers)
        if plan.tornado:
            wanted += cells(variants(plan.world), [POLICY], options.numbers)
    for place in headline.places():
        if place[0] in names:
            world = find_world(place[0], [*place[1], *options.settings])
            claimed[world.digest] = place
            wanted += cells([world], headline.policies_of(place), options.numbers)
    unique = {(cell.world.digest, cell.policy, cell.seed): cell for cell in wanted}
    missing = [
        cell
        for (digest, policy, seed), cell in unique.items()
        if (digest, policy) not in sides or seed not in sides[digest, policy].by_seed
    ]
    if whole and missing:
        found, whole = sides_of(sorted(missing, key=lambda cell: cell.seed), options)
        for key, side in found.items():
            sides.setdefault(key, Side(side.name)).by_seed |= side.by_seed
    chapters = [chapter for plan in planned if (chapter := _chapter(plan, looked, sides)) is not None]
    rows = headline.rows({(claimed[key[0]], key[1]): side for key, side in sides.items() if key[0] in claimed})
    return chapters, rows, whole


def _chapter(plan: Plan, looked: Mapping[Key, list[Observation]], sides: Mapping[Key, Side]) -> Chapter | None:
    """None if too little is finished."""
    digest = plan.world.digest
    own = {policy: sides.get((digest, policy), Side(policy)) for policy in plan.replicated}
    seen = {policy: looked[digest, policy] for policy in plan.drawn if (digest, policy) in looked}
    seeds = shared(*own.values())
    if not seeds or len(seen) < len(plan.drawn):
        return None
    turned = None
    if plan.tornado:
        ends = {one.digest: sides.get((one.digest, POLICY), Side(POLICY)) for one in variants(plan.world)}
        if shared(*ends.values()):
            turned = tornado(plan.world, POLICY, FIGURE, ends)
    return Chapter(plan.world, own, seen, plan.saving, availability(plan.world, seeds), turned)


def _looked_at(planned: Sequence[Plan], options: Options) -> tuple[dict[Key, list[Observation]], dict[Key, Side], bool]:
    """Of each world and policy that is drawn: the first seed, and more of them where departures are few."""
    looked: dict[Key, list[Observation]] = {}
    sides: dict[Key, Side] = {}
    first, *others = options.numbers
    whole = _look([(plan, policy, first) for plan in planned for policy in plan.drawn], options, looked)
    more = [
        (plan, policy, seed)
        for plan in planned
        if (there := looked.get((plan.world.digest, plan.drawn[0])))
        for seed in others[: ceil(ENOUGH / max(1.0, there[0].result.figures["departures"])) - 1]
        for policy in plan.drawn
    ]
    whole = whole and _look(more, options, looked)
    for (digest, policy), runs in looked.items():
        runs.sort(key=lambda run: run.result.seed)
        side = sides[digest, policy] = Side(policy)
        side.by_seed |= {run.result.seed: run.result for run in runs}
    return looked, sides, whole


def _look(jobs: Sequence[tuple[Plan, str, int]], options: Options, looked: dict[Key, list[Observation]]) -> bool:
    """Forecasts are asked for in one run of each world: under any policy they are the same."""
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
                    looked.setdefault((world.digest, observation.result.policy), []).append(observation)
                    progress.step()
            return True
        except (KeyboardInterrupt, BrokenProcessPool):
            click.echo(f"\nmesh: interrupted; {progress.done} of {len(tasks)} first runs are finished", err=True)
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

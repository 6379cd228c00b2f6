"""Many replications: paired seeds for each policy, on any `concurrent.futures.Executor` or none; what is finished is kept.

Every policy meets the departures, jobs and traffic of a seed: common random numbers. A file of results makes a study resumable:
a line is used again only for the very same world, policy, seed and code.
"""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, as_completed
from functools import cache, cached_property
from hashlib import blake2b
from pathlib import Path

import msgspec

from sim.campus.policies import find_policy
from sim.campus.replication import replicate_named
from sim.campus.statistics import ENOUGH, reduction
from sim.campus.tally import SCHEMA, Result
from sim.campus.world import World

ROOM = Path(__file__).parents[1]
LEAST_SEEDS = 5  # before the stop rule is asked


class Cell(msgspec.Struct, frozen=True, dict=True):
    """One replication that is wanted."""

    world: World
    policy: str
    seed: int

    @cached_property
    def key(self) -> str:
        """What its result depends on."""
        facts = (SCHEMA, self.world.digest, self.policy, self.seed, code_digest())
        return blake2b(msgspec.json.encode(facts), digest_size=16).hexdigest()


class Line(msgspec.Struct, frozen=True):
    key: str
    result: Result


@cache
def code_digest() -> str:
    """Of everything that a replication runs through: not of how it is drawn."""
    digest = blake2b(digest_size=16)
    rooms = [ROOM, *(ROOM.parent / name for name in ("placement", "ckptstore")), ROOM.parent / "mesh" / "jobs"]
    for room in rooms:
        for path in sorted([*room.rglob("*.py"), *room.rglob("*.json")]):
            if path.is_relative_to(ROOM / "report"):
                continue
            digest.update(path.relative_to(ROOM.parent).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


class Kept:
    """Results in a file, a line each; lines that cannot be read count as not there."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._results: dict[str, Result] = {}
        if path is not None and path.exists():
            for line in path.read_bytes().splitlines():
                try:
                    found = msgspec.json.decode(line, type=Line)
                except (msgspec.MsgspecError, UnicodeDecodeError):
                    continue  # the last line of a run that was killed
                self._results[found.key] = found.result
            if path.stat().st_size and not path.read_bytes().endswith(b"\n"):
                with path.open("ab") as file:
                    file.write(b"\n")

    def get(self, cell: Cell) -> Result | None:
        return self._results.get(cell.key)

    def add(self, cell: Cell, result: Result) -> None:
        self._results[cell.key] = result
        if self._path is not None:
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode(Line(cell.key, result)) + b"\n")


def cells(worlds: Sequence[World], policies: Sequence[str], seeds: Iterable[int]) -> list[Cell]:
    """Seed by seed, so that what is finished early is whole pairs."""
    for policy in policies:
        find_policy(policy)
    return [Cell(world, policy, seed) for seed in seeds for world in worlds for policy in policies]


def perform(
    wanted: Sequence[Cell], executor: Executor | None = None, kept: Kept | None = None
) -> Iterator[tuple[Cell, Result, bool]]:
    """Each cell with its result and whether that was there already, as they come; the order depends on the executor, the results
    do not."""
    kept = kept or Kept(None)
    missing = []
    for cell in wanted:
        result = kept.get(cell)
        if result is None:
            missing.append(cell)
        else:
            yield cell, result, True
    for cell, result in _run(missing, executor):
        kept.add(cell, result)
        yield cell, result, False


def compute(cell: Cell, code: str) -> Result:
    """As whoever asks would compute it himself; ValueError from a machine whose code is another."""
    if code_digest() != code:
        raise ValueError(
            "a machine of the cluster runs another version of campus-mesh: install the same one everywhere"
        )
    return replicate_named(cell.world, cell.policy, cell.seed)


def _run(missing: Sequence[Cell], executor: Executor | None) -> Iterator[tuple[Cell, Result]]:
    if executor is None:
        for cell in missing:
            yield cell, replicate_named(cell.world, cell.policy, cell.seed)
        return
    code = code_digest()
    futures: dict[Future[Result], Cell] = {executor.submit(compute, cell, code): cell for cell in missing}
    # What is not wanted any more is cancelled by the executor's shutdown: to cancel a future of a pool whose processes
    # have been killed makes its thread raise (CPython 3.11).
    for future in as_completed(futures):
        yield futures[future], future.result()


class Side:
    """The results of one world and policy, by seed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.by_seed: dict[int, Result] = {}

    def values(self, figure: str, seeds: Iterable[int]) -> list[float]:
        return [self.by_seed[seed].figures[figure] for seed in seeds]


def shared(*sides: Side) -> list[int]:
    """The seeds that all of them have."""
    return sorted(set.intersection(*(set(side.by_seed) for side in sides)))


def precise(first: Side, second: Side, figure: str, half: float = ENOUGH) -> bool:
    """The stop rule: the interval of the reduction is narrow enough."""
    seeds = shared(first, second)
    if len(seeds) < LEAST_SEEDS:
        return False
    return reduction(first.values(figure, seeds), second.values(figure, seeds)).half <= half

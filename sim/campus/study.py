"""Studies: paired replications of each policy, on any `concurrent.futures.Executor` or in this process.

All policies meet the same departures, jobs and traffic under one seed (common random numbers). A result file makes a study
resumable: a line is reused only for the same world, policy, seed and code.
"""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, as_completed
from functools import cache, cached_property
from hashlib import blake2b
from pathlib import Path

import msgspec

from sim.campus.metrics import SCHEMA, Result
from sim.campus.policies import find_policy
from sim.campus.replication import replicate_named
from sim.campus.statistics import ENOUGH, reduction
from sim.campus.world import World

PACKAGE = Path(__file__).parents[1]
MIN_SEEDS = 5  # before the stopping rule applies


class Replication(msgspec.Struct, frozen=True, dict=True):
    """One run of a study: a world and a policy under one seed."""

    world: World
    policy: str
    seed: int

    @cached_property
    def key(self) -> str:
        """Return a hash of everything that the result depends on."""
        facts = (SCHEMA, self.world.digest, self.policy, self.seed, code_digest())
        return blake2b(msgspec.json.encode(facts), digest_size=16).hexdigest()


class StoredResult(msgspec.Struct, frozen=True):
    key: str
    result: Result


@cache
def code_digest() -> str:
    """Return a hash of the code that a replication runs. The report's code does not count."""
    digest = blake2b(digest_size=16)
    folders = [
        PACKAGE,
        *(PACKAGE.parent / name for name in ("placement", "ckptstore")),
        PACKAGE.parent / "mesh" / "jobs",
    ]
    for folder in folders:
        for path in sorted([*folder.rglob("*.py"), *folder.rglob("*.json")]):
            if path.is_relative_to(PACKAGE / "report"):
                continue
            digest.update(path.relative_to(PACKAGE.parent).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


class ResultStore:
    """A file with one result a line. Unreadable lines are ignored, and their replications computed again."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._results: dict[str, Result] = {}
        if path is not None and path.exists():
            for line in path.read_bytes().splitlines():
                try:
                    found = msgspec.json.decode(line, type=StoredResult)
                except (msgspec.MsgspecError, UnicodeDecodeError):
                    continue  # a killed run can leave half a line at the end
                self._results[found.key] = found.result
            if path.stat().st_size and not path.read_bytes().endswith(b"\n"):
                with path.open("ab") as file:
                    file.write(b"\n")

    def get(self, replication: Replication) -> Result | None:
        return self._results.get(replication.key)

    def add(self, replication: Replication, result: Result) -> None:
        self._results[replication.key] = result
        if self._path is not None:
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode(StoredResult(replication.key, result)) + b"\n")


def replications(worlds: Sequence[World], policies: Sequence[str], seeds: Iterable[int]) -> list[Replication]:
    """Return all replications, ordered by seed, so that an interrupted study has complete pairs."""
    for policy in policies:
        find_policy(policy)
    return [Replication(world, policy, seed) for seed in seeds for world in worlds for policy in policies]


def perform(
    wanted: Sequence[Replication], executor: Executor | None = None, kept: ResultStore | None = None
) -> Iterator[tuple[Replication, Result, bool]]:
    """Yield each replication with its result and whether the store already had it, in order of completion.

    The order depends on the executor; the results do not.
    """
    kept = kept or ResultStore(None)
    missing = []
    for replication in wanted:
        result = kept.get(replication)
        if result is None:
            missing.append(replication)
        else:
            yield replication, result, True
    for replication, result in _run(missing, executor):
        kept.add(replication, result)
        yield replication, result, False


def compute(replication: Replication, code: str) -> Result:
    """Run a replication on a worker; ValueError if the worker's code differs from the `code` digest of the caller."""
    if code_digest() != code:
        raise ValueError(
            "a machine of the cluster runs another version of campus-mesh: install the same version on all of them"
        )
    return replicate_named(replication.world, replication.policy, replication.seed)


def _run(missing: Sequence[Replication], executor: Executor | None) -> Iterator[tuple[Replication, Result]]:
    if executor is None:
        for replication in missing:
            yield replication, replicate_named(replication.world, replication.policy, replication.seed)
        return
    code = code_digest()
    futures: dict[Future[Result], Replication] = {
        executor.submit(compute, replication, code): replication for replication in missing
    }
    # Shutting the executor down cancels the other futures. Cancelling a future of a pool whose processes were killed
    # makes the pool's thread raise (CPython 3.11).
    for future in as_completed(futures):
        yield futures[future], future.result()


class Sample:
    """The results of one world and policy, by seed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.by_seed: dict[int, Result] = {}

    def values(self, metric: str, seeds: Iterable[int]) -> list[float]:
        return [self.by_seed[seed].metrics[metric] for seed in seeds]


def common_seeds(*samples: Sample) -> list[int]:
    """Return the seeds that all samples have, in order."""
    return sorted(set.intersection(*(set(sample.by_seed) for sample in samples)))


def is_precise(first: Sample, second: Sample, metric: str, half: float = ENOUGH) -> bool:
    """Tell whether the interval of the reduction is at most 2 x `half` wide (the stopping rule)."""
    seeds = common_seeds(first, second)
    if len(seeds) < MIN_SEEDS:
        return False
    return reduction(first.values(metric, seeds), second.values(metric, seeds)).half <= half

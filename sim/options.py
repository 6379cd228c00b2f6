"""Options, progress and execution that the `mesh debug sim` commands share."""

import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import click
import msgspec

from mesh.cli.progress import AGAIN_S, progress
from mesh.cli.terminal import json_option
from mesh.util.duration import lasting
from mesh.util.errors import ExitCode, MeshError
from sim.campus.executors import KINDS, Kind, executor

if TYPE_CHECKING:
    from sim.campus.metrics import Result
    from sim.campus.study import Replication, Sample

INTERRUPTED = 130


class Computing(msgspec.Struct, frozen=True):
    """Options of all commands that compute: the executor and the file of results."""

    executor: Kind
    dask: str | None
    workers: int | None
    keep: Path | None
    as_json: bool


class Options(Computing, frozen=True):
    """Options of commands on one or two worlds: the seeds, and changes to the world."""

    seeds: int
    first_seed: int
    days: float | None
    changes: tuple[str, ...]

    @property
    def settings(self) -> list[str]:
        return [*self.changes, *([] if self.days is None else [f"days={self.days!r}"])]

    @property
    def seed_range(self) -> range:
        return range(self.first_seed, self.first_seed + self.seeds)


_COMPUTING: list[Callable[[Any], Any]] = [
    click.option(
        "--executor",
        type=click.Choice(KINDS),
        default="process",
        show_default=True,
        help="Where to compute; the results are the same.",
    ),
    click.option("--dask", metavar="ADDRESS", help="Address of a Dask scheduler (default: Dask on this machine)."),
    click.option("--workers", type=click.IntRange(1, 256), help="Number of processes (default: one for each core)."),
    click.option(
        "--keep",
        type=click.Path(dir_okay=False, path_type=Path),
        help="Store each result in this file, and reuse the results in it.",
    ),
    json_option,
]
_STUDY: list[Callable[[Any], Any]] = [
    click.option(
        "--seeds", type=click.IntRange(1, 10_000), default=10, show_default=True, help="Number of replications."
    ),
    click.option("--first-seed", type=click.IntRange(0), default=1, show_default=True, help="Seed of the first one."),
    click.option(
        "--days", type=click.FloatRange(0, 3650, min_open=True), help="Simulated days (default: the world's)."
    ),
    click.option(
        "--set", "changes", multiple=True, metavar="PATH=VALUE", help="Change a value of the world: jobs.per_day=200."
    ),
]


def computing_options(function: Callable[..., None]) -> Any:
    """Add the options of `Computing` to a command, which receives them as `options`."""
    return _with_options(function, Computing, _COMPUTING)


def study_options(function: Callable[..., None]) -> Any:
    """Add the options of `Options` to a command, which receives them as `options`."""
    return _with_options(function, Options, [*_STUDY, *_COMPUTING])


def _with_options(function: Callable[..., None], kind: type[Computing], options: Sequence[Callable[[Any], Any]]) -> Any:
    @functools.wraps(function)
    def command(**values: Any) -> None:
        function(options=kind(**{name: values.pop(name) for name in kind.__struct_fields__}), **values)

    for option in reversed(options):
        command = option(command)
    return command


class Progress:
    """The number of replications that are done, reported on standard error. Stored ones do not count for the time left."""

    def __init__(self, count: int) -> None:
        self.count, self.done, self.stored = count, 0, 0
        self._begun = time.monotonic()
        self._reporter = progress(self._words, AGAIN_S)

    def __enter__(self) -> "Progress":
        self._reporter.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reporter.__exit__(kind, error, trace)

    def step(self, stored: bool = False) -> None:
        self.done += 1
        self.stored += stored

    def _words(self) -> str:
        computed = max(1, self.done - self.stored)
        left_s = (time.monotonic() - self._begun) / computed * (self.count - self.done)
        left = f", {lasting(left_s)} left" if self.done else ""
        return f"{self.done} of {self.count} replications{left} ..."


def perform(
    wanted: "Sequence[Replication]",
    options: Computing,
    each: "Callable[[Replication, Result], bool | None]",
) -> bool:
    """Run the replications and pass each result to `each` until it returns True; return whether none is missing.

    Ctrl-C ends the study; finished results are kept.
    """
    from sim.campus.study import ResultStore
    from sim.campus.study import perform as computed

    store = ResultStore(options.keep)
    with Progress(len(wanted)) as progress:
        try:
            with executor(options.executor, options.workers, options.dask, len(wanted)) as found:
                for replication, result, stored in computed(wanted, found, store):
                    progress.step(stored)
                    if each(replication, result):
                        break
            return True
        except BrokenProcessPool:
            why = "interrupted, or a worker process was killed (out of memory?)"
        except KeyboardInterrupt:
            why = "interrupted"
    resume = f"; the same command continues from {options.keep}" if options.keep is not None else ""
    click.echo(f"\nmesh: {why}; {progress.done} of {len(wanted)} replications finished{resume}", err=True)
    return False


def run_samples(
    wanted: "Sequence[Replication]",
    options: Computing,
    stop: "Callable[[dict[tuple[str, str], Sample]], bool] | None" = None,
) -> "tuple[dict[tuple[str, str], Sample], bool]":
    """Return the sample of each (world digest, policy), and whether no replication is missing."""
    from sim.campus.study import Sample

    samples: dict[tuple[str, str], Sample] = {}
    for replication in wanted:
        samples.setdefault((replication.world.digest, replication.policy), Sample(replication.policy))

    def each(replication: "Replication", result: "Result") -> bool:
        samples[replication.world.digest, replication.policy].by_seed[replication.seed] = result
        return stop is not None and stop(samples)

    return samples, perform(wanted, options, each)


@contextmanager
def usage_errors() -> Iterator[None]:
    """Report errors of worlds, policies, studies and executors in one line."""
    try:
        yield
    except ValueError as error:
        raise MeshError(str(error), ExitCode.USAGE) from error
    except OSError as error:
        raise MeshError(f"{error.filename or 'a file'}: {error.strerror or error}") from error


def end(complete: bool, any_result: bool) -> None:
    """Exit with the code of an interrupted command unless the study is complete."""
    if not complete:
        if not any_result:
            click.echo("mesh: interrupted before the first pair of replications finished", err=True)
        sys.exit(INTERRUPTED)

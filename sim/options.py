"""What all commands on studies share: their options, in one struct, and how they are carried out."""

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from mesh.api.errors import ExitCode, MeshError
from mesh.cli.terminal import json_option
from sim.campus.executors import KINDS, Kind, executor
from sim.progress import Progress

if TYPE_CHECKING:
    from sim.campus.study import Cell, Side
    from sim.campus.tally import Result

INTERRUPTED = 130


class Computing(msgspec.Struct, frozen=True):
    """Who computes, and where results are kept."""

    executor: Kind
    dask: str | None
    workers: int | None
    keep: Path | None
    as_json: bool


class Options(Computing, frozen=True):
    seeds: int
    first_seed: int
    days: float | None
    changes: tuple[str, ...]

    @property
    def settings(self) -> list[str]:
        return [*self.changes, *([] if self.days is None else [f"days={self.days!r}"])]

    @property
    def numbers(self) -> range:
        return range(self.first_seed, self.first_seed + self.seeds)


_COMPUTING: list[Callable[[Any], Any]] = [
    click.option(
        "--executor",
        type=click.Choice(KINDS),
        default="process",
        show_default=True,
        help="Who computes; the results are the same.",
    ),
    click.option("--dask", metavar="ADDRESS", help="Of a Dask scheduler (default: Dask on this machine)."),
    click.option("--workers", type=click.IntRange(1, 256), help="Processes (default: one for each core)."),
    click.option(
        "--keep",
        type=click.Path(dir_okay=False, path_type=Path),
        help="Keep each result in this file, and use those that are there.",
    ),
    json_option,
]
_STUDY: list[Callable[[Any], Any]] = [
    click.option("--seeds", type=click.IntRange(1, 10_000), default=10, show_default=True, help="Replications."),
    click.option("--first-seed", type=click.IntRange(0), default=1, show_default=True, help="Of the seeds."),
    click.option("--days", type=click.FloatRange(0, 3650, min_open=True), help="Instead of the world's own."),
    click.option("--set", "changes", multiple=True, metavar="PLACE=VALUE", help="Change the world: jobs.per_day=200."),
]


def computing_options(function: Callable[..., None]) -> Any:
    """The command gets one `Computing`."""
    return _together(function, Computing, _COMPUTING)


def study_options(function: Callable[..., None]) -> Any:
    """The command gets one `Options`."""
    return _together(function, Options, [*_STUDY, *_COMPUTING])


def _together(function: Callable[..., None], kind: type[Computing], options: Sequence[Callable[[Any], Any]]) -> Any:
    @functools.wraps(function)
    def command(**values: Any) -> None:
        function(options=kind(**{name: values.pop(name) for name in kind.__struct_fields__}), **values)

    for option in reversed(options):
        command = option(command)
    return command


def perform(
    wanted: "Sequence[Cell]",
    options: Computing,
    each: "Callable[[Cell, Result], bool | None]",
) -> bool:
    """Tell `each` cell's result as it comes, until it says True; whether nothing is missing. Ctrl-C keeps what is finished."""
    from sim.campus.study import Kept
    from sim.campus.study import perform as computed

    store = Kept(options.keep)
    with Progress(len(wanted)) as progress:
        try:
            with executor(options.executor, options.workers, options.dask, len(wanted)) as found:
                for cell, result, kept in computed(wanted, found, store):
                    progress.step(kept)
                    if each(cell, result):
                        break
            return True
        except BrokenProcessPool:
            why = "interrupted, or a process was ended (out of memory?)"
        except KeyboardInterrupt:
            why = "interrupted"
    again = f"; the same command goes on from {options.keep}" if options.keep is not None else ""
    click.echo(f"\nmesh: {why}; {progress.done} of {len(wanted)} replications are finished{again}", err=True)
    return False


def sides_of(
    wanted: "Sequence[Cell]",
    options: Computing,
    stop: "Callable[[dict[tuple[str, str], Side]], bool] | None" = None,
) -> "tuple[dict[tuple[str, str], Side], bool]":
    """What came of each world (by digest) and policy, and whether nothing is missing."""
    from sim.campus.study import Side

    sides: dict[tuple[str, str], Side] = {}
    for cell in wanted:
        sides.setdefault((cell.world.digest, cell.policy), Side(cell.policy))

    def each(cell: "Cell", result: "Result") -> bool:
        sides[cell.world.digest, cell.policy].by_seed[cell.seed] = result
        return stop is not None and stop(sides)

    return sides, perform(wanted, options, each)


@contextmanager
def told() -> Iterator[None]:
    """Errors of worlds, policies, studies and executors in one line."""
    try:
        yield
    except ValueError as error:
        raise MeshError(str(error), ExitCode.USAGE) from error
    except OSError as error:
        raise MeshError(f"{error.filename or 'a file'}: {error.strerror or error}") from error


def end(whole: bool, any_result: bool) -> None:
    if not whole:
        if not any_result:
            click.echo("mesh: no pair of replications is finished yet", err=True)
        sys.exit(INTERRUPTED)

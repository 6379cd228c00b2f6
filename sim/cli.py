"""`mesh sim`: what a campus's churn does to its jobs, under one policy or another, found out before anybody is asked to lend."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mesh.api.errors import ExitCode, MeshError
from mesh.cli.terminal import json_option, lasting, print_json, table

if TYPE_CHECKING:
    from sim.campus.headline import Row
    from sim.campus.statistics import Interval
    from sim.campus.study import Cell, Side

INTERRUPTED = 130
QUIET_S, EVERY_S = 2.0, 5.0
SHOWN = (
    "work_loss",
    "overhead",
    "loss_and_overhead",
    "downtime_mean",
    "downtime_p95",
    "migration_success",
    "migrate_back",
    "makespan_inflation",
    "goodput",
    "utilisation",
    "background_loss",
    "backup_peak",
    "wait_mean",
)
NARROW = (
    "work_loss",
    "overhead",
    "downtime_mean",
    "migration_success",
    "migrate_back",
    "makespan_inflation",
    "goodput",
)
COMPARED = ("work_loss", "overhead", "loss_and_overhead", "downtime_mean", "makespan_inflation", "goodput", "wait_mean")


@click.group()
def sim() -> None:
    """Study what a campus's churn does to jobs, in virtual time. Needs no mesh and no daemon.

    A world (a preset, or a TOML file of your own) says which machines there are, how their owners come and go, and what is
    submitted; a policy says what is done about it. docs/simulator.md has a study from a question to a decision.
    """


def study_options(function: Any) -> Any:
    options: list[Callable[[Any], Any]] = [
        click.option("--seeds", type=click.IntRange(1, 10_000), default=10, show_default=True, help="Replications."),
        click.option("--first-seed", type=click.IntRange(0), default=1, show_default=True, help="Of the seeds."),
        click.option("--days", type=click.FloatRange(0, 3650, min_open=True), help="Instead of the world's own."),
        click.option(
            "--set", "changes", multiple=True, metavar="PLACE=VALUE", help="Change the world: jobs.per_day=200."
        ),
        click.option("--workers", type=click.IntRange(1, 256), help="Processes (default: one for each core)."),
        click.option(
            "--keep",
            type=click.Path(dir_okay=False, path_type=Path),
            help="Keep each result in this file, and use those that are there.",
        ),
        json_option,
    ]
    for option in reversed(options):
        function = option(function)
    return function


@sim.command()
@json_option
def worlds(as_json: bool) -> None:
    """List the worlds that come with the simulator."""
    from sim.campus.world import find_world, presets

    found = [find_world(name) for name in presets()]
    if as_json:
        rows = [{"name": w.name, "machines": w.machines, "days": w.days, "says": w.says} for w in found]
        print_json({"schema": 1, "worlds": rows})
        return
    table(["WORLD", "MACHINES", "DAYS", ""], [[w.name, str(w.machines), f"{w.days:g}", w.says] for w in found])


@sim.command(short_help="Print a world's file, to change it")
@click.argument("world")
def show(world: str) -> None:
    """Print a world's file, to be changed and saved under another name."""
    with _told():
        from sim.campus.world import find_world, world_file

        find_world(world)
        click.echo(world_file(world).read_text(), nl=False)


@sim.command()
@json_option
def policies(as_json: bool) -> None:
    """List the policies that can be compared."""
    from sim.campus.policies import POLICIES

    if as_json:
        print_json({"schema": 1, "policies": [{"name": p.name, "says": p.says} for p in POLICIES.values()]})
        return
    table(["POLICY", ""], [[policy.name, policy.says] for policy in POLICIES.values()])


@sim.command(short_help="Run a world, once for each seed")
@click.argument("world")
@click.option(
    "--policy", "names", multiple=True, default=["mesh"], show_default=True, help="Or `all`; may be repeated."
)
@study_options
def run(
    world: str,
    names: tuple[str, ...],
    seeds: int,
    first_seed: int,
    days: float | None,
    changes: tuple[str, ...],
    workers: int | None,
    keep: Path | None,
    as_json: bool,
) -> None:
    """Run WORLD under a policy, once for each seed, and print the figures with their 95 % intervals."""
    with _told():
        from sim.campus.policies import POLICIES
        from sim.campus.statistics import mean_of
        from sim.campus.study import cells, shared
        from sim.campus.tally import FIGURES
        from sim.campus.world import find_world

        chosen = list(POLICIES) if "all" in names else list(dict.fromkeys(names))
        place = find_world(world, _changed(changes, days))
        wanted = cells([place], chosen, range(first_seed, first_seed + seeds))
        sides, whole = _perform(wanted, workers, keep)
    found = [side for side in sides.values() if side.by_seed]
    common = shared(*found) if found else []
    told = [(side, {figure: mean_of(side.values(figure, common)) for figure in FIGURES}) for side in found if common]
    if as_json:
        rows = [
            {
                "policy": side.name,
                "n": len(common),
                "figures": {name: _numbers(interval) for name, interval in figures.items()},
                "replications": [
                    {"seed": seed, "digest": side.by_seed[seed].digest, "figures": side.by_seed[seed].figures}
                    for seed in common
                ],
            }
            for side, figures in told
        ]
        print_json({"schema": 1, "world": place.name, "days": place.days, "complete": whole, "policies": rows})
    elif told:
        click.echo(
            f"{place.name}: {place.machines} machines, {place.days:g} days, {len(common)} replications; 95 % intervals"
        )
        if len(told) > 3:
            header = ["POLICY", *(name.replace("_", " ").upper() for name in NARROW)]
            table(header, [[side.name, *(_text(figures[name]) for name in NARROW)] for side, figures in told])
        else:
            header = ["", *(side.name for side, _ in told), "UNIT"]
            table(header, [[name, *(_text(f[name]) for _, f in told), FIGURES[name][0]] for name in SHOWN])
    _end(whole, bool(told))


@sim.command(short_help="Hold two policies or two worlds against each other")
@click.argument("first")
@click.argument("second")
@click.option("--world", "where", default="reclaimnet-54", show_default=True, help="For two policies.")
@click.option("--policy", default="mesh", show_default=True, help="For two worlds.")
@click.option("--until-precise", is_flag=True, help="Stop early, once work_loss is known within 2 points.")
@study_options
def compare(
    first: str,
    second: str,
    where: str,
    policy: str,
    until_precise: bool,
    seeds: int,
    first_seed: int,
    days: float | None,
    changes: tuple[str, ...],
    workers: int | None,
    keep: Path | None,
    as_json: bool,
) -> None:
    """Hold two policies of one world, or two worlds under one policy, against each other, seed by seed.

    Both meet the same luck. Prints by how much the second differs from the first, with a 95 % interval and a p-value that is
    corrected for the number of rows (Holm).
    """
    with _told():
        from sim.campus.policies import POLICIES
        from sim.campus.statistics import difference, holm, p_value, reduction
        from sim.campus.study import cells, precise, shared
        from sim.campus.tally import FIGURES
        from sim.campus.world import find_world

        both = [name in POLICIES for name in (first, second)]
        settings = _changed(changes, days)
        numbers = range(first_seed, first_seed + seeds)
        if all(both):
            places = [find_world(where, settings)] * 2
            wanted = cells(places[:1], [first, second], numbers)
        elif any(both):
            raise ValueError(f"compare two policies or two worlds, not {first!r} with {second!r}")
        else:
            places = [find_world(name, settings) for name in (first, second)]
            wanted = cells(places, [policy], numbers)
        one, other = (place.digest for place in places)
        keys = [(one, first), (other, second)] if all(both) else [(one, policy), (other, policy)]
        if keys[0] == keys[1]:
            raise ValueError("the two are the same")
        stop = (lambda sides: precise(sides[keys[0]], sides[keys[1]], "work_loss")) if until_precise else None
        sides, whole = _perform(wanted, workers, keep, stop)
    a, b = sides[keys[0]], sides[keys[1]]
    common = shared(a, b)
    rows = []
    if common:
        pairs = {name: (a.values(name, common), b.values(name, common)) for name in COMPARED}
        adjusted = holm([p_value([y - x for x, y in zip(*pair, strict=True)]) for pair in pairs.values()])
        for (name, (xs, ys)), p in zip(pairs.items(), adjusted, strict=True):
            rows.append((name, sum(xs) / len(xs), sum(ys) / len(ys), difference(xs, ys), reduction(xs, ys), p))
    if as_json:
        print_json(
            {
                "schema": 1,
                "first": first,
                "second": second,
                "worlds": [place.name for place in places],
                "n": len(common),
                "complete": whole,
                "rows": [
                    {
                        "figure": name,
                        "unit": FIGURES[name][0],
                        "first": x,
                        "second": y,
                        "difference": _numbers(d),
                        "less_by": _numbers(r),
                        "p_holm": p,
                    }
                    for name, x, y, d, r, p in rows
                ],
            }
        )
    elif rows:
        click.echo(f"{second} against {first}, {len(common)} paired replications; 95 % intervals, p by Holm")
        table(
            ["", first[:24], second[:24], "LESS BY", "P", "UNIT"],
            [[n, f"{x:.4g}", f"{y:.4g}", _percent(r), f"{p:.3f}", FIGURES[n][0]] for n, x, y, _, r, p in rows],
        )
    _end(whole, bool(rows))


@sim.command(short_help="What two papers claim, beside what comes out here")
@study_options
def headline(
    seeds: int,
    first_seed: int,
    days: float | None,
    changes: tuple[str, ...],
    workers: int | None,
    keep: Path | None,
    as_json: bool,
) -> None:
    """What ReclaimNet and GPUnion claim, beside what comes out here; nothing is tuned to match."""
    with _told():
        from sim.campus import headline as claims
        from sim.campus.study import Cell, cells
        from sim.campus.world import find_world

        wanted: list[Cell] = []
        names: dict[str, str] = {}
        for name in claims.worlds():
            place = find_world(name, _changed(changes, days))
            names[place.digest] = name
            wanted += cells([place], claims.policies_of(name), range(first_seed, first_seed + seeds))
        sides, whole = _perform(sorted(wanted, key=lambda cell: cell.seed), workers, keep)
    rows = claims.rows({(names[digest], policy): side for (digest, policy), side in sides.items()})
    if as_json:
        import msgspec

        print_json({"schema": 1, "complete": whole, "rows": msgspec.to_builtins(rows)})
    elif rows:
        table(["PAPER", "CLAIM", "OURS (95 % INTERVAL)", "N", "VERDICT"], [_claim(row) for row in rows])
    _end(whole, bool(rows))


# --- running


def _changed(changes: Sequence[str], days: float | None) -> list[str]:
    return [*changes, *([] if days is None else [f"days={days!r}"])]


def _perform(
    wanted: "list[Cell]",
    workers: int | None,
    keep: Path | None,
    stop: "Callable[[dict[tuple[str, str], Side]], bool] | None" = None,
) -> "tuple[dict[tuple[str, str], Side], bool]":
    """What came of each world and policy, and whether nothing is missing. Ctrl-C keeps what is finished."""
    from sim.campus.study import Kept, Side, perform

    sides: dict[tuple[str, str], Side] = {}
    for cell in wanted:
        sides.setdefault((cell.world.digest, cell.policy), Side(cell.policy))
    count = min(workers or os.cpu_count() or 1, len(wanted))
    progress = _Progress(len(wanted))
    try:
        with _executor(count) as executor:
            for cell, result in perform(wanted, executor, Kept(keep)):
                sides[cell.world.digest, cell.policy].by_seed[cell.seed] = result
                progress.step()
                if stop is not None and stop(sides):
                    return sides, True
    except (KeyboardInterrupt, BrokenProcessPool):
        click.echo(f"\nmesh: interrupted; {progress.done} of {len(wanted)} replications are finished", err=True)
        return sides, False
    return sides, True


@contextmanager
def _executor(count: int) -> Iterator[ProcessPoolExecutor | None]:
    if count < 2:
        yield None
        return
    executor = ProcessPoolExecutor(count, initializer=_end_at_once)
    try:
        yield executor
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _end_at_once() -> None:
    """A worker says nothing of Ctrl-C: the process that reads its results does."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class _Progress:
    """A line to standard error after two seconds, and every five from then on."""

    def __init__(self, count: int) -> None:
        self.count, self.done = count, 0
        self._begun = time.monotonic()
        self._next = self._begun + QUIET_S

    def step(self) -> None:
        self.done += 1
        now = time.monotonic()
        if now < self._next or self.done == self.count:
            return
        self._next = now + EVERY_S
        spent = now - self._begun
        left = spent / self.done * (self.count - self.done)
        click.echo(f"mesh: {self.done} of {self.count} replications, {lasting(left)} left ...", err=True)


@contextmanager
def _told() -> Iterator[None]:
    """Errors of worlds and policies in one line."""
    try:
        yield
    except ValueError as error:
        raise MeshError(str(error), ExitCode.USAGE) from error
    except OSError as error:
        raise MeshError(f"{error.filename or 'a file'}: {error.strerror or error}") from error


def _end(whole: bool, any_result: bool) -> None:
    if not whole:
        if not any_result:
            click.echo("mesh: no pair of replications is finished yet", err=True)
        sys.exit(INTERRUPTED)


# --- telling


def _numbers(interval: "Interval") -> dict[str, float]:
    return {"value": interval.value, "low": interval.low, "high": interval.high, "n": interval.n}


def _text(interval: "Interval") -> str:
    return f"{interval.value:.4g} ±{interval.half:.2g}" if interval.n > 1 else f"{interval.value:.4g}"


def _percent(interval: "Interval") -> str:
    value = f"{100 * interval.value:.1f} %"
    return value if interval.n < 2 else f"{value} ({100 * interval.low:.1f} to {100 * interval.high:.1f})"


def _claim(row: "Row") -> list[str]:
    ours = f"{100 * row.ours:.1f} % ({100 * row.low:.1f} to {100 * row.high:.1f})"
    return [row.source, row.claim, ours, str(row.n), row.verdict + (f"; {row.differs}" if row.differs else "")]

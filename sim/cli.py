"""`mesh sim`: what a campus's churn does to its jobs, under one policy or another, found out before anybody is asked to lend."""

import json
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mesh.api.errors import MeshError
from mesh.cli.terminal import client, json_option, print_json, quote, table
from sim.options import Computing, Options, computing_options, end, perform, sides_of, study_options, told
from sim.report.command import report, sensitivity

if TYPE_CHECKING:
    from sim.campus.headline import Row
    from sim.campus.statistics import Interval
    from sim.campus.sweep import Point
    from sim.campus.tally import Result

COUNTED_S = 7 * 86_400.0  # jobs of so long count for how many there are a day; ours
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
SWEPT = ("work_loss", "overhead", "downtime_mean", "makespan_inflation")
COMPARED = ("work_loss", "overhead", "loss_and_overhead", "downtime_mean", "makespan_inflation", "goodput", "wait_mean")


@click.group()
def sim() -> None:
    """Study what a campus's churn does to jobs, in virtual time. Needs no mesh and no daemon.

    A world (a preset, or a TOML file of your own) says which machines there are, how their owners come and go, and what is
    submitted; a policy says what is done about it. docs/simulator.md has a study from a question to a decision.
    """


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
    with told():
        from sim.campus.world import find_world, world_file

        find_world(world)
        click.echo(world_file(world).read_text(), nl=False)


@sim.command(short_help="Print a world made from this mesh's own history")
@click.argument("journal", required=False, type=click.Path(path_type=Path))
@click.pass_context
def history(ctx: click.Context, journal: Path | None) -> None:
    """Print a world made from this mesh's own history, to be changed and saved: "what if lab 4 joined" is one group more.

    Asks the daemon which nodes there are, and what they tell of their stays. JOURNAL, a node's journal.sqlite or a directory with
    one of each node (NICK.sqlite), is read instead: then machines come and go at the very times that are written there.
    """
    with told():
        from sim.campus.history import of_journals, of_mesh

        if journal is not None:
            click.echo(of_journals(journal), nl=False)
            return
        daemon = client(ctx)
        nodes = daemon.get("/v1/nodes")["nodes"]
        heard = {}
        for node in nodes:
            with suppress(MeshError):  # who has only just come has told nothing yet
                heard[node["node"]] = daemon.get(f"/v1/survival/{quote(node['node'])}")
        since_ms = (time.time() - COUNTED_S) * 1000
        jobs = [job for job in daemon.get("/v1/jobs")["jobs"] if job["created_unix_ms"] >= since_ms]
        name = daemon.get("/v1/status")["mesh"]
        click.echo(of_mesh(name, nodes, heard, max(1.0, len(jobs) * 86_400 / COUNTED_S)), nl=False)


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
def run(world: str, names: tuple[str, ...], options: Options) -> None:
    """Run WORLD under a policy, once for each seed, and print the figures with their 95 % intervals."""
    with told():
        from sim.campus.policies import POLICIES
        from sim.campus.statistics import mean_of
        from sim.campus.study import cells, shared
        from sim.campus.tally import FIGURES
        from sim.campus.world import find_world

        chosen = list(POLICIES) if "all" in names else list(dict.fromkeys(names))
        place = find_world(world, options.settings)
        wanted = cells([place], chosen, options.numbers)
        sides, whole = sides_of(wanted, options)
    found = [side for side in sides.values() if side.by_seed]
    common = shared(*found) if found else []
    summed = [(side, {figure: mean_of(side.values(figure, common)) for figure in FIGURES}) for side in found if common]
    if options.as_json:
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
            for side, figures in summed
        ]
        print_json({"schema": 1, "world": place.name, "days": place.days, "complete": whole, "policies": rows})
    elif summed:
        click.echo(
            f"{place.name}: {place.machines} machines, {place.days:g} days, {len(common)} replications; 95 % intervals"
        )
        if len(summed) > 3:
            header = ["POLICY", *(name.replace("_", " ").upper() for name in NARROW)]
            table(header, [[side.name, *(_text(figures[name]) for name in NARROW)] for side, figures in summed])
        else:
            header = ["", *(side.name for side, _ in summed), "UNIT"]
            table(header, [[name, *(_text(f[name]) for _, f in summed), FIGURES[name][0]] for name in SHOWN])
    end(whole, bool(summed))


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
    options: Options,
) -> None:
    """Hold two policies of one world, or two worlds under one policy, against each other, seed by seed.

    Both meet the same luck. Prints by how much the second differs from the first, with a 95 % interval and a p-value that is
    corrected for the number of rows (Holm).
    """
    with told():
        from sim.campus.policies import is_policy
        from sim.campus.statistics import difference, holm, p_value, reduction
        from sim.campus.study import cells, precise, shared
        from sim.campus.tally import FIGURES
        from sim.campus.world import find_world

        both = [is_policy(name) for name in (first, second)]
        settings = options.settings
        numbers = options.numbers
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
        sides, whole = sides_of(wanted, options, stop)
    a, b = sides[keys[0]], sides[keys[1]]
    common = shared(a, b)
    rows = []
    if common:
        pairs = {name: (a.values(name, common), b.values(name, common)) for name in COMPARED}
        adjusted = holm([p_value([y - x for x, y in zip(*pair, strict=True)]) for pair in pairs.values()])
        for (name, (xs, ys)), p in zip(pairs.items(), adjusted, strict=True):
            rows.append((name, sum(xs) / len(xs), sum(ys) / len(ys), difference(xs, ys), reduction(xs, ys), p))
    if options.as_json:
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
    end(whole, bool(rows))


@sim.command(short_help="What two papers claim, beside what comes out here")
@study_options
def headline(options: Options) -> None:
    """What ReclaimNet and GPUnion claim, beside what comes out here; nothing is tuned to match."""
    with told():
        from sim.campus import headline as claims
        from sim.campus.study import Cell, cells
        from sim.campus.world import find_world

        wanted: list[Cell] = []
        places: dict[str, claims.Place] = {}
        for place in claims.places():
            world = find_world(place[0], [*place[1], *options.settings])
            places[world.digest] = place
            wanted += cells([world], claims.policies_of(place), options.numbers)
        sides, whole = sides_of(sorted(wanted, key=lambda cell: cell.seed), options)
    rows = claims.rows({(places[digest], policy): side for (digest, policy), side in sides.items()})
    if options.as_json:
        import msgspec

        print_json({"schema": 1, "complete": whole, "rows": msgspec.to_builtins(rows)})
    elif rows:
        table(["PAPER", "CLAIM", "OURS (95 % INTERVAL)", "N", "VERDICT"], [_claim(row) for row in rows], whole=True)
    end(whole, bool(rows))


@sim.command(short_help="Run a study's whole grid, here or on a cluster")
@click.argument("study", type=click.Path(path_type=Path))
@computing_options
def sweep(study: Path, options: Computing) -> None:
    """Run all worlds, settings, policies and seeds that STUDY, a TOML file, names; docs/simulator.md has an example.

    Results are kept beside it (STUDY.results.jsonl, or --keep), each under a hash of all that it depends on: a sweep that was
    interrupted goes on where it was, and one that is changed computes only what is new.
    """
    with told():
        import msgspec

        from sim.campus.sweep import read_study

        plan, places = read_study(study)
        if options.keep is None:
            options = msgspec.structs.replace(options, keep=study.with_suffix(".results.jsonl"))
        wanted = [point.cell(seed) for seed in plan.numbers for point in places]
        results: dict[str, Result] = {}
        whole = perform(wanted, options, lambda cell, result: results.update({cell.key: result}))
    if options.as_json:
        rows = [_point(point, plan.numbers, results) for point in places]
        print_json({"schema": 1, "study": plan.name, "complete": whole, "points": rows})
    elif results:
        _points(places, plan.numbers, results)
    end(whole, bool(results))


def _found(point: "Point", seeds: range, results: "dict[str, Result]") -> "list[Result]":
    keys = [point.cell(seed).key for seed in seeds]
    return [results[key] for key in keys if key in results]


def _point(point: "Point", seeds: range, results: "dict[str, Result]") -> dict[str, object]:
    found = _found(point, seeds, results)
    return {
        "world": point.world.name,
        "settings": point.settings,
        "policy": point.policy,
        "n": len(found),
        "figures": {name: _numbers(interval) for name, interval in point.summed(found).items()},
        "replications": [{"seed": one.seed, "digest": one.digest, "figures": one.figures} for one in found],
    }


def _points(places: "list[Point]", seeds: range, results: "dict[str, Result]") -> None:
    columns = list(dict.fromkeys(name for point in places for name in point.settings))
    rows = []
    for point in places:
        found = _found(point, seeds, results)
        if found:
            figures = point.summed(found)
            settings = [json.dumps(point.settings[name]) if name in point.settings else "" for name in columns]
            rows.append(
                [point.named, *settings, point.policy, str(len(found)), *(_text(figures[name]) for name in SWEPT)]
            )
    last = Counter(name.rpartition(".")[2] for name in columns)
    short = [name if last[name.rpartition(".")[2]] > 1 else name.rpartition(".")[2] for name in columns]
    header = ["WORLD", *short, "POLICY", "N", *SWEPT]
    table([name.replace("_", " ").upper() for name in header], rows)


sim.add_command(report)
sim.add_command(sensitivity)


# --- telling


def _numbers(interval: "Interval") -> dict[str, float]:
    return {"value": interval.value, "low": interval.low, "high": interval.high, "n": interval.n}


def _text(interval: "Interval") -> str:
    return f"{interval.value:.4g} ±{interval.half:.2g}" if interval.n > 1 else f"{interval.value:.4g}"


def _percent(interval: "Interval") -> str:
    value = f"{100 * interval.value:.1f} %"
    return value if interval.n < 2 else f"{value} ({100 * interval.low:.1f} to {100 * interval.high:.1f})"


def _claim(row: "Row") -> list[str]:
    ours = f"{100 * row.ours:.1f} %" + (f" ({100 * row.low:.1f} to {100 * row.high:.1f})" if row.n > 1 else "")
    differs = f"; the definition differs: {row.differs}" if row.differs else ""
    return [row.source, row.claim, ours, str(row.n), row.verdict + differs]

"""`mesh debug sim`: simulate a campus whose machines come and go, and compare policies on it."""

import json
import os
import shlex
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mesh.cli.output import print_json, print_text, table
from mesh.cli.terminal import client, json_option, quote
from mesh.util.errors import MeshError
from sim.options import Computing, Options, computing_options, end, perform, run_samples, study_options, usage_errors

if TYPE_CHECKING:
    from sim.campus.claims import ClaimResult
    from sim.campus.metrics import Result
    from sim.campus.sensitivity import Tornado
    from sim.campus.statistics import Interval
    from sim.campus.sweep import Point

RECENT_S = 7 * 86_400.0  # jobs submitted in this time give the jobs per day of `mesh debug sim history` (own choice)
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
    """Simulate how jobs fare on a campus whose machines come and go. Needs no mesh and no daemon.

    A world (a preset or your own TOML file) describes the machines, how their owners reclaim them, and the submitted jobs. A
    policy decides where jobs run and when they are checkpointed. docs/how-to/campus-study.md walks through a study.
    """


@sim.command()
@json_option
def worlds(as_json: bool) -> None:
    """List the worlds that come with the simulator."""
    from sim.campus.world_files import find_world, presets

    found = [find_world(name) for name in presets()]
    if as_json:
        rows = [{"name": w.name, "machines": w.machines, "days": w.days, "description": w.description} for w in found]
        print_json({"schema": 1, "worlds": rows})
        return
    table(
        ["WORLD", "MACHINES", "DAYS", "DESCRIPTION"],
        [[w.name, str(w.machines), f"{w.days:g}", w.description] for w in found],
    )


@sim.command(short_help="Print the file of a world")
@click.argument("world")
def show(world: str) -> None:
    """Print the file of a world. Save it under another name to change it."""
    with usage_errors():
        from sim.campus.world_files import find_world, world_file

        find_world(world)
        print_text(world_file(world).read_text())


@sim.command(short_help="Make a world from this mesh's history")
@click.argument("journal", required=False, type=click.Path(path_type=Path))
@click.pass_context
def history(ctx: click.Context, journal: Path | None) -> None:
    """Print a world made from this mesh's history. To study "what if lab 4 joined", save it and add a group.

    Asks the daemon for the nodes and their availability. With JOURNAL, a node's journal.sqlite or a directory with one file for
    each node (NICK.sqlite), machines come and go at the recorded times.
    """
    with usage_errors():
        from sim.campus.history import world_of_journals, world_of_mesh

        if journal is not None:
            print_text(world_of_journals(journal))
            return
        daemon = client(ctx)
        nodes = daemon.get("/v1/nodes")["nodes"]
        heard = {}
        for node in nodes:
            with suppress(MeshError):  # a new node has no availability record yet
                heard[node["node"]] = daemon.get(f"/v1/survival/{quote(node['node'])}")
        since_ms = (time.time() - RECENT_S) * 1000
        jobs = [job for job in daemon.get("/v1/jobs")["jobs"] if job["created_unix_ms"] >= since_ms]
        name = daemon.get("/v1/status")["mesh"]
        print_text(world_of_mesh(name, nodes, heard, max(1.0, len(jobs) * 86_400 / RECENT_S)))


@sim.command()
@json_option
def policies(as_json: bool) -> None:
    """List the policies that can be compared."""
    from sim.campus.policies import POLICIES

    if as_json:
        print_json(
            {"schema": 1, "policies": [{"name": p.name, "description": p.description} for p in POLICIES.values()]}
        )
        return
    table(["POLICY", "DESCRIPTION"], [[policy.name, policy.description] for policy in POLICIES.values()])


@sim.command(short_help="Simulate a world once for each seed")
@click.argument("world")
@click.option(
    "--policy", "names", multiple=True, default=["mesh"], show_default=True, help="Policy, or `all`; repeatable."
)
@study_options
def run(world: str, names: tuple[str, ...], options: Options) -> None:
    """Simulate WORLD under each policy, once for each seed, and print the metrics with 95 % intervals."""
    with usage_errors():
        from sim.campus.metrics import METRICS
        from sim.campus.policies import POLICIES
        from sim.campus.statistics import mean_of
        from sim.campus.study import common_seeds, replications
        from sim.campus.world_files import find_world

        chosen = list(POLICIES) if "all" in names else list(dict.fromkeys(names))
        place = find_world(world, options.settings)
        wanted = replications([place], chosen, options.seed_range)
        samples, complete = run_samples(wanted, options)
    found = [sample for sample in samples.values() if sample.by_seed]
    common = common_seeds(*found) if found else []
    summed = [
        (sample, {metric: mean_of(sample.values(metric, common)) for metric in METRICS}) for sample in found if common
    ]
    if options.as_json:
        rows = [
            {
                "policy": sample.name,
                "n": len(common),
                "metrics": {name: _numbers(interval) for name, interval in metrics.items()},
                "replications": [
                    {"seed": seed, "digest": sample.by_seed[seed].digest, "metrics": sample.by_seed[seed].metrics}
                    for seed in common
                ],
            }
            for sample, metrics in summed
        ]
        print_json({"schema": 1, "world": place.name, "days": place.days, "complete": complete, "policies": rows})
    elif summed:
        click.echo(
            f"{place.name}: {place.machines} machines, {place.days:g} days, {len(common)} replications; 95 % intervals"
        )
        if len(summed) > 3:
            header = ["POLICY", *(name.replace("_", " ").upper() for name in NARROW)]
            table(header, [[sample.name, *(_text(metrics[name]) for name in NARROW)] for sample, metrics in summed])
        else:
            header = ["", *(sample.name for sample, _ in summed), "UNIT"]
            table(header, [[name, *(_text(f[name]) for _, f in summed), METRICS[name][0]] for name in SHOWN])
    end(complete, bool(summed))


@sim.command(short_help="Compare two policies or two worlds")
@click.argument("first")
@click.argument("second")
@click.option(
    "--world", "where", default="reclaimnet-54", show_default=True, help="World in which to compare policies."
)
@click.option("--policy", default="mesh", show_default=True, help="Policy under which to compare worlds.")
@click.option("--until-precise", is_flag=True, help="Stop once the change of work_loss is known within 2 points.")
@study_options
def compare(
    first: str,
    second: str,
    where: str,
    policy: str,
    until_precise: bool,
    options: Options,
) -> None:
    """Compare two policies in one world, or two worlds under one policy, seed by seed.

    Both sides meet the same departures and jobs. Prints by how much the second is below the first, with a 95 % interval and a
    p-value corrected for the number of rows (Holm).
    """
    with usage_errors():
        from sim.campus.metrics import METRICS
        from sim.campus.policies import is_policy
        from sim.campus.statistics import difference, holm, p_value, reduction
        from sim.campus.study import common_seeds, is_precise, replications
        from sim.campus.world_files import find_world

        both = [is_policy(name) for name in (first, second)]
        settings = options.settings
        numbers = options.seed_range
        if all(both):
            places = [find_world(where, settings)] * 2
            wanted = replications(places[:1], [first, second], numbers)
        elif any(both):
            raise ValueError(f"compare two policies or two worlds, not a policy and a world: {first!r}, {second!r}")
        else:
            places = [find_world(name, settings) for name in (first, second)]
            wanted = replications(places, [policy], numbers)
        one, other = (place.digest for place in places)
        keys = [(one, first), (other, second)] if all(both) else [(one, policy), (other, policy)]
        if keys[0] == keys[1]:
            raise ValueError("both sides are the same; name two different policies or worlds")
        stop = (lambda samples: is_precise(samples[keys[0]], samples[keys[1]], "work_loss")) if until_precise else None
        samples, complete = run_samples(wanted, options, stop)
    a, b = samples[keys[0]], samples[keys[1]]
    common = common_seeds(a, b)
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
                "complete": complete,
                "rows": [
                    {
                        "metric": name,
                        "unit": METRICS[name][0],
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
            [[n, f"{x:.4g}", f"{y:.4g}", _percent(r), f"{p:.3f}", METRICS[n][0]] for n, x, y, _, r, p in rows],
        )
    end(complete, bool(rows))


@sim.command(short_help="Check the claims of two papers")
@study_options
def claims(options: Options) -> None:
    """Compare the claims of ReclaimNet and GPUnion with the results of this simulator. No parameter is tuned to match."""
    with usage_errors():
        from sim.campus import claims
        from sim.campus.study import Replication, replications
        from sim.campus.world_files import find_world

        wanted: list[Replication] = []
        places: dict[str, claims.Setup] = {}
        for place in claims.setups():
            world = find_world(place[0], [*place[1], *options.settings])
            places[world.digest] = place
            wanted += replications([world], claims.policies_of(place), options.seed_range)
        samples, complete = run_samples(sorted(wanted, key=lambda replication: replication.seed), options)
    rows = claims.evaluate({(places[digest], policy): sample for (digest, policy), sample in samples.items()})
    if options.as_json:
        import msgspec

        print_json({"schema": 1, "complete": complete, "rows": msgspec.to_builtins(rows)})
    elif rows:
        table(["PAPER", "CLAIM", "HERE (95 % INTERVAL)", "N", "VERDICT"], [_claim(row) for row in rows], whole=True)
    end(complete, bool(rows))


@sim.command(short_help="Run the grid of a study file")
@click.argument("study", type=click.Path(path_type=Path))
@computing_options
def sweep(study: Path, options: Computing) -> None:
    """Run every combination of worlds, settings, policies and seeds in STUDY, a TOML file (docs/how-to/campus-study.md).

    Results are stored in STUDY.results.jsonl (or --keep), each under a hash of everything it depends on. An interrupted sweep
    continues where it stopped, and a changed study computes only what is new.
    """
    with usage_errors():
        import msgspec

        from sim.campus.sweep import read_study

        plan, places = read_study(study)
        if options.keep is None:
            options = msgspec.structs.replace(options, keep=study.with_suffix(".results.jsonl"))
        wanted = [point.replication(seed) for seed in plan.seed_range for point in places]
        results: dict[str, Result] = {}
        complete = perform(wanted, options, lambda replication, result: results.update({replication.key: result}))
    if options.as_json:
        rows = [_point(point, plan.seed_range, results) for point in places]
        print_json({"schema": 1, "study": plan.name, "complete": complete, "points": rows})
    elif results:
        _points(places, plan.seed_range, results)
    end(complete, bool(results))


def _found(point: "Point", seeds: range, results: "dict[str, Result]") -> "list[Result]":
    keys = [point.replication(seed).key for seed in seeds]
    return [results[key] for key in keys if key in results]


def _point(point: "Point", seeds: range, results: "dict[str, Result]") -> dict[str, object]:
    found = _found(point, seeds, results)
    return {
        "world": point.world.name,
        "settings": point.settings,
        "policy": point.policy,
        "n": len(found),
        "metrics": {name: _numbers(interval) for name, interval in point.summarize(found).items()},
        "replications": [{"seed": one.seed, "digest": one.digest, "metrics": one.metrics} for one in found],
    }


def _points(places: "list[Point]", seeds: range, results: "dict[str, Result]") -> None:
    columns = list(dict.fromkeys(name for point in places for name in point.settings))
    rows = []
    for point in places:
        found = _found(point, seeds, results)
        if found:
            metrics = point.summarize(found)
            settings = [json.dumps(point.settings[name]) if name in point.settings else "" for name in columns]
            rows.append(
                [point.world_name, *settings, point.policy, str(len(found)), *(_text(metrics[name]) for name in SWEPT)]
            )
    last = Counter(name.rpartition(".")[2] for name in columns)
    short = [name if last[name.rpartition(".")[2]] > 1 else name.rpartition(".")[2] for name in columns]
    header = ["WORLD", *short, "POLICY", "N", *SWEPT]
    table([name.replace("_", " ").upper() for name in header], rows)


@sim.command(short_help="Write a study as one HTML page")
@click.argument("worlds", nargs=-1, metavar="[WORLD]...")
@click.option("--policy", "names", multiple=True, help="Policy to draw; repeatable (default: seven of them).")
@click.option("--sensitivity", is_flag=True, help="Add a sensitivity analysis: ten more runs for each seed.")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("report.html"),
    show_default=True,
    help="File to write.",
)
@click.option(
    "--data",
    type=click.Path(file_okay=False, path_type=Path),
    help="Also write the data of each figure into this directory, as CSV and JSON.",
)
@study_options
def report(
    worlds: tuple[str, ...],
    names: tuple[str, ...],
    sensitivity: bool,
    output: Path,
    data: Path | None,
    options: Options,
) -> None:
    """Simulate each WORLD under several policies and write the results as one HTML file with figures.

    The page needs no network and no script. Without WORLD, it covers the testbeds of ReclaimNet and GPUnion and their claims.
    """
    with usage_errors():
        from sim.campus import claims
        from sim.report.collect import DRAWN, collect, plans
        from sim.report.page import page, write_data

        chosen = worlds or tuple(dict.fromkeys(name for name, _ in claims.setups()))
        planned = plans(chosen, names or DRAWN, options, sensitivity)
        _check_writable(output)
        chapters, rows, complete = collect(chosen, planned, options)
        if chapters:
            made = page(chapters, rows, _command(chosen, names, sensitivity, options))
            beside = output.with_name(f".{output.name}.{os.getpid()}")
            beside.write_text(made, "utf-8")
            beside.replace(output)
            files = write_data(chapters, rows, data) if data is not None else []
    if chapters:
        seeds = [len(chapter.seeds) for chapter in chapters]
        if options.as_json:
            print_json(
                {
                    "schema": 1,
                    "complete": complete,
                    "report": str(output),
                    "bytes": output.stat().st_size,
                    "data": [str(file) for file in files],
                    "worlds": [
                        {"name": one.world.name, "digest": one.world.digest, "n": n}
                        for one, n in zip(chapters, seeds, strict=True)
                    ],
                }
            )
        else:
            click.echo(f"{output}: {output.stat().st_size / 1024:.0f} KiB, {min(seeds)} replications")
    end(complete, bool(chapters))


def _check_writable(output: Path) -> None:
    """Fail before the runs if the report cannot be written."""
    folder = output.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"{folder} is not a writable directory; choose another with --output")


def _command(worlds: tuple[str, ...], names: tuple[str, ...], sensitivity: bool, options: Options) -> str:
    words = ["mesh", "sim", "report", *worlds]
    for name in names:
        words += ["--policy", name]
    words += ["--sensitivity"] if sensitivity else []
    words += ["--seeds", str(options.seeds)]
    words += ["--first-seed", str(options.first_seed)] if options.first_seed != 1 else []
    words += ["--days", f"{options.days:g}"] if options.days is not None else []
    for change in options.changes:
        words += ["--set", change]
    return shlex.join(words)


@sim.command(short_help="Find the inputs that a result depends on")
@click.argument("world")
@click.option("--metric", default="work_loss", show_default=True, help="Metric, as in `mesh debug sim run --json`.")
@click.option("--policy", default="mesh", show_default=True)
@study_options
def sensitivity(world: str, metric: str, policy: str, options: Options) -> None:
    """Change the uncertain inputs of WORLD down and up, one at a time, and print how much the metric changes.

    The inputs are the share and length of notices, the size of checkpoints, the uplinks, and how often machines leave together.
    All runs of a seed meet the same departures and jobs. The widest swing comes first.
    """
    with usage_errors():
        from sim.campus.metrics import METRICS
        from sim.campus.sensitivity import tornado, variants
        from sim.campus.study import Sample, common_seeds, replications
        from sim.campus.world_files import find_world

        if metric not in METRICS:
            raise ValueError(f"unknown metric {metric!r}; choose from: {', '.join(METRICS)}")
        place = find_world(world, options.settings)
        ends = variants(place)
        samples, complete = run_samples(replications(ends, [policy], options.seed_range), options)
        by_digest = {one.digest: samples.get((one.digest, policy), Sample(policy)) for one in ends}
        found = tornado(place, policy, metric, by_digest) if common_seeds(*by_digest.values()) else None
    if found is not None:
        _show(found, METRICS[metric][0], complete, options.as_json)
    end(complete, found is not None)


def _show(found: "Tornado", unit: str, complete: bool, as_json: bool) -> None:
    if as_json:
        import msgspec

        print_json({"schema": 1, "complete": complete, "unit": unit, **msgspec.to_builtins(found)})
        return
    click.echo(
        f"{found.world} under {found.policy}: {found.metric} {found.base.value:.4g} {unit}, {found.base.n} paired replications; "
        "95 % intervals"
    )
    rows = [
        [
            bar.name,
            bar.label,
            f"{bar.value.value:.4g}",
            f"{bar.change.value:+.3g} ({bar.change.low:+.3g} to {bar.change.high:+.3g})",
        ]
        for bar in found.bars
    ]
    table(["INPUT", "CHANGED TO", "VALUE", "CHANGE"], rows)


# --- formatting


def _numbers(interval: "Interval") -> dict[str, float]:
    return {"value": interval.value, "low": interval.low, "high": interval.high, "n": interval.n}


def _text(interval: "Interval") -> str:
    return f"{interval.value:.4g} ±{interval.half:.2g}" if interval.n > 1 else f"{interval.value:.4g}"


def _percent(interval: "Interval") -> str:
    value = f"{100 * interval.value:.1f} %"
    return value if interval.n < 2 else f"{value} ({100 * interval.low:.1f} to {100 * interval.high:.1f})"


def _claim(row: "ClaimResult") -> list[str]:
    here = f"{100 * row.value:.1f} %" + (f" ({100 * row.low:.1f} to {100 * row.high:.1f})" if row.n > 1 else "")
    caveat = f"; the definition differs: {row.caveat}" if row.caveat else ""
    return [row.source, row.claim, here, str(row.n), row.verdict + caveat]

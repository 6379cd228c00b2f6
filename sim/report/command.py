"""`mesh sim report` and `mesh sim sensitivity`."""

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mesh.cli.terminal import print_json, table
from sim.options import Options, end, sides_of, study_options, told

if TYPE_CHECKING:
    from sim.campus.sensitivity import Tornado


@click.command(short_help="Write a study as one page with figures")
@click.argument("worlds", nargs=-1, metavar="[WORLD]...")
@click.option("--policy", "names", multiple=True, help="To be drawn; may be repeated (default: seven of them).")
@click.option("--sensitivity", is_flag=True, help="Also what the answer hangs on: ten more runs for each seed.")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("report.html"),
    show_default=True,
    help="The page.",
)
@click.option(
    "--data",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write each figure's numbers there, as CSV and JSON.",
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
    """Run each WORLD under several policies, and write what came out as one HTML file with figures.

    It needs no network and no script to be read. Without WORLD: the two papers' testbeds, with all that they claim.
    """
    with told():
        from sim.campus import headline
        from sim.report.gathering import DRAWN, gather, plans
        from sim.report.page import page, write_data

        chosen = worlds or tuple(dict.fromkeys(name for name, _ in headline.places()))
        planned = plans(chosen, names or DRAWN, options, sensitivity)
        _writable(output)
        chapters, rows, whole = gather(chosen, planned, options)
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
                    "complete": whole,
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
    end(whole, bool(chapters))


def _writable(output: Path) -> None:
    """An error now, and not after the runs."""
    folder = output.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"{folder}: not a folder that can be written to")


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


@click.command(short_help="What a world's answer hangs on")
@click.argument("world")
@click.option("--figure", default="work_loss", show_default=True, help="As `mesh sim run --json` names it.")
@click.option("--policy", default="mesh", show_default=True)
@study_options
def sensitivity(world: str, figure: str, policy: str, options: Options) -> None:
    """Move what is doubtful of WORLD down and up, one at a time, under the same luck: how much the figure changes.

    Notices, their length, the size of jobs' state, uplinks, and whether machines go together; the widest swing first.
    """
    with told():
        from sim.campus.sensitivity import tornado, variants
        from sim.campus.study import Side, cells, shared
        from sim.campus.tally import FIGURES
        from sim.campus.world import find_world

        if figure not in FIGURES:
            raise ValueError(f"there is no figure {figure!r}; there are: {', '.join(FIGURES)}")
        place = find_world(world, options.settings)
        ends = variants(place)
        sides, whole = sides_of(cells(ends, [policy], options.numbers), options)
        by_digest = {one.digest: sides.get((one.digest, policy), Side(policy)) for one in ends}
        found = tornado(place, policy, figure, by_digest) if shared(*by_digest.values()) else None
    if found is not None:
        _show(found, FIGURES[figure][0], whole, options.as_json)
    end(whole, found is not None)


def _show(found: "Tornado", unit: str, whole: bool, as_json: bool) -> None:
    if as_json:
        import msgspec

        print_json({"schema": 1, "complete": whole, "unit": unit, **msgspec.to_builtins(found)})
        return
    click.echo(
        f"{found.world} under {found.policy}: {found.figure} {found.base.value:.4g} {unit}, {found.base.n} paired replications; "
        "95 % intervals"
    )
    rows = [
        [
            bar.knob,
            bar.says,
            f"{bar.value.value:.4g}",
            f"{bar.more.value:+.3g} ({bar.more.low:+.3g} to {bar.more.high:+.3g})",
        ]
        for bar in found.bars
    ]
    table(["INPUT", "MOVED TO", "FIGURE", "MORE THAN BASE"], rows)

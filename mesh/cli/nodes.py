"""`mesh up`, `down`, `status`, `nodes`: a machine's own place in the mesh."""

import os
import select
from typing import Any

import click

from mesh.api.errors import ConfigError, ExitCode, MeshError
from mesh.cli.edge import edge_words
from mesh.cli.listing import listing, show, show_answer, watch_option
from mesh.cli.terminal import DURATION, ago, client, json_option, layout, print_json, system_words, table
from mesh.engine.descent import process_of
from mesh.launcher import daemon_command, start_daemon, wait_ready
from mesh.words import lend_lines, when

ZONE_NODES_SHOWN = 6


@click.command()
@click.option(
    "--join", multiple=True, metavar="HOST:PORT", help="Where another node is, if mDNS cannot find it. Repeatable."
)
@click.option("--lend", is_flag=True, help="Lend this machine: its GPUs, and --slots for jobs without one.")
@click.option("--slots", type=click.IntRange(0, 1024), help="Jobs without a GPU at a time (default 1).")
@click.option("--bind", metavar="ADDRESS", help="Address to listen on (default: all).")
@click.option("--port", type=click.IntRange(0, 65535), help="Gossip port, UDP and TCP (default 7373).")
@click.option("--api-port", type=click.IntRange(0, 65535), help="Port for direct calls, TLS (default 7374).")
@click.option("--zone", help="Building or room, for placement.")
@click.option("--no-mdns", is_flag=True, help="Do not announce or look for nodes by multicast.")
@click.option("--engine", "engines", multiple=True, type=click.Choice(["process", "docker"]), help="Engines to offer.")
@click.option(
    "--allow-process-guests", is_flag=True, help="Run others' jobs without a container. They could read your files."
)
@click.option("--advertise", metavar="ADDRESS", help="The address others should use, where the right one is not found.")
@click.option("--open", "open_", is_flag=True, help="Let in everybody who knocks. For a closed network, for a while.")
@click.option(
    "--profile", type=click.Choice(["lan", "local"]), help="Timings: lan, or local for many daemons on one machine."
)
@click.option("--foreground", is_flag=True, help="Stay in the foreground; Ctrl-C leaves in order.")
@json_option
@click.pass_context
def up(ctx: click.Context, /, as_json: bool, foreground: bool, **options: Any) -> None:
    """Start this node. It finds the others by itself (mDNS, remembered peers, --join)."""
    where = layout(ctx)
    if client(ctx).alive():
        raise MeshError("a daemon runs here already: `mesh status` shows it, `mesh down` stops it")
    overrides = {
        key: value for key, value in options.items() if value is not None and value is not False and value != ()
    }
    if overrides.pop("no_mdns", False):
        overrides["mdns"] = False
    if overrides.pop("open_", False):
        overrides["open"] = True
    if overrides.pop("allow_process_guests", False):
        overrides["process_engine_for"] = "all"
        click.echo(
            "mesh: guests of the process engine run as you, without a sandbox: they can read and change your files",
            err=True,
        )
    try:
        where.make()
        if foreground:
            command = daemon_command(where, overrides)
            os.execv(command[0], command)
        status = wait_ready(where, start_daemon(where, overrides))
    except ConfigError as error:
        raise MeshError(str(error)) from error
    except OSError as error:
        raise MeshError(f"cannot write {where.root}: {error.strerror}. Name another place with --state DIR.") from error
    if as_json:
        print_json(status)
        return
    click.echo(f"{status['nick']} is up in mesh {status['mesh']!r} at {status['address']}, {lending_words(status)}")
    _banner(status)
    for problem in status["problems"].values():
        click.echo(f"mesh: {problem}", err=True)
    click.echo("next: `mesh nodes` lists the others; `mesh run -- COMMAND` runs something", err=True)


def _banner(status: dict[str, Any]) -> None:
    if status["open"]:
        click.echo(
            "mesh: OPEN MESH: this node lets in everybody who knocks; each can run programs on the lenders' machines. "
            "`mesh down`, and `mesh up` without --open, end that",
            err=True,
        )
        if not status["may_admit"]:
            click.echo("mesh: but it may not admit anybody, so --open does nothing here", err=True)


def lending_words(status: dict[str, Any]) -> str:
    if status["paused"]:
        return "lending paused (`mesh resume`)"
    if not status["lending"]:
        return "not lending"
    return "lending" if status["lend"]["now"] else "not lent now (`mesh lend`)"


@click.command()
@click.option("--grace", type=DURATION, help="How long guests may take to save (default 30s).")
@click.option("--now", is_flag=True, help="Kill guests at once.")
@click.pass_context
def down(ctx: click.Context, grace: float | None, now: bool) -> None:
    """Leave the mesh: guests save, their state is shipped, the node says farewell, the daemon ends.

    Where a daemon was killed, takes away what it has left on this machine: containers, their networks and rules, the network
    edge.
    """
    try:
        answer = client(ctx).post("/v1/down", {"grace_s": grace, "now": now})
    except MeshError as error:
        if error.code != ExitCode.NO_DAEMON or not _took_away(ctx):
            raise
        return
    pid, guests = answer["pid"], answer["guests"]
    if guests:
        click.echo(f"{guests} guests {'are killed' if now else 'save and move on'} ...", err=True)
    try:
        process = process_of(pid)
        descriptor = process.open() if process is not None else None
        if descriptor is not None:
            select.select([descriptor], [], [])
    except KeyboardInterrupt:
        raise MeshError("it goes on leaving in the background; `mesh down --now` hurries it") from None
    click.echo("down")


def _took_away(ctx: click.Context) -> bool:
    """Whether there was anything that a killed daemon had left."""
    from mesh.engine.leftovers import remove

    where = layout(ctx)
    if not where.genesis.exists():
        return False
    before, still = remove(where)
    if not before.words:
        return False
    if still.words:
        raise MeshError(f"a daemon that was killed has left {before.words}; still there: {still.words} (as root?)")
    click.echo(f"no daemon ran here; what a killed one had left is gone: {before.words}", err=True)
    return True


@click.command()
@watch_option
@json_option
@click.option("--log", is_flag=True, help="Show the end of the daemon's log instead.")
@click.pass_context
def status(ctx: click.Context, watch: bool, as_json: bool, log: bool) -> None:
    """This node: who it is, what it lends, whom it has refused."""
    if log:
        if watch:
            raise click.UsageError("-w shows this node's state again and again, --log what was logged: choose one")
        path = layout(ctx).log
        if not path.exists():
            raise MeshError(f"there is no log yet at {path}")
        click.echo("\n".join(path.read_text(errors="replace").splitlines()[-50:]))
        return
    daemon = client(ctx)
    show_answer(lambda: daemon.get("/v1/status"), _tell, watch, as_json)


def _tell(answer: dict[str, Any]) -> None:
    click.echo(f"{answer['nick']} ({answer['node']})")
    click.echo(f"  user {answer['user']}, mesh {answer['mesh']!r}, {answer['address']}, {lending_words(answer)}")
    click.echo(f"  {answer['alive']} nodes alive, {len(answer['guests'])} guests here")
    refused = {key: count for key, count in answer["counters"].items() if key.startswith("refused") and count}
    if refused:
        click.echo(
            "  refused messages: " + ", ".join(f"{key.removeprefix('refused_')} {n}" for key, n in refused.items())
        )
    for name, engine in answer["engines"].items():
        click.echo(f"  engine {name}: {engine['detail']}" + (f"; {engine['isolation']}" if engine["ok"] else ""))
        if engine["ok"] and name == "docker":
            click.echo(f"  system checkpoints: {system_words(engine['system'])}")
    as_said = answer["lend"]["machine"]["level"] == "lend"
    for line in lend_lines(answer["lend"])[1 if as_said else 0 :]:
        click.echo(f"  {line.strip()}")
    for warning in answer["lend"]["warnings"]:
        click.echo(f"  warning: {warning}")
    click.echo(f"  network edge: {edge_words(answer['edge'])}")
    if answer["waiting"]:
        click.echo(f"  {answer['waiting']} wait to be let in: `mesh pending`")
    for problem in answer["problems"].values():
        click.echo(f"  problem: {problem}")
    if answer["problems"]:
        click.echo("  `mesh doctor` looks closer")
    _banner(answer)


@click.command()
@click.option("--zones", "by_zone", is_flag=True, help="The zones instead, with who coordinates each.")
@listing
@click.pass_context
def nodes(ctx: click.Context, /, by_zone: bool, **form: bool) -> None:
    """List the nodes of the mesh and what they lend."""
    daemon = client(ctx)
    if by_zone:
        show(
            form, lambda: daemon.get("/v1/zones"), lambda answer: [row["zone"] for row in answer["zones"]], _draw_zones
        )
        return
    show(form, lambda: daemon.get("/v1/nodes"), lambda answer: [row["node"] for row in answer["nodes"]], _draw_nodes)


def _draw_nodes(answer: dict[str, Any]) -> None:
    rows = []
    for node in answer["nodes"]:
        lends = _held(node)
        if node["lending"]:
            parts = [f"{_gpus_left(node):g}/{len(node['gpus'])} GPUs"] if node["gpus"] else []
            parts += [f"{node['slots_free']}/{node['slots']} slots"] if node["slots"] else []
            lends = ", ".join(parts)
        rows.append(
            [
                node["nick"] + (" *" if node["me"] else ""),
                node["state"],
                ago(node["since_unix"] * 1000),
                lends,
                str(node["jobs"]),
                (",".join(node["engines"]) or "-") + ("" if node["interactive"] else " (no sessions)"),
                node["user"],
                node["address"],
            ]
        )
    header = ["NODE", "STATE", "SINCE", "LENDS (free)", "JOBS", "ENGINES", "USER", "ADDRESS"]
    table(header, rows, spare=["ENGINES", "SINCE", "USER", "JOBS"])


def _held(node: dict[str, Any]) -> str:
    """Why it lends nothing now."""
    if not node.get("paused"):
        return "-"
    if node["back_unix"]:
        return f"from {when(node['back_unix'])}"
    return {"owner": "its owner is there", "hours": "other hours"}.get(node["held_by"], "paused")


def _gpus_left(node: dict[str, Any]) -> float:
    """How many GPUs' time is free; time without memory is of no use."""
    return sum(int(left["share"]) for left in node["gpu_room"] if left["vram_mib"]) / 100


def _draw_zones(answer: dict[str, Any]) -> None:
    rows = [
        [
            row["zone"] or "(none)",
            f"{len(row['nodes'])}: {', '.join(row['nodes'][:ZONE_NODES_SHOWN])}"
            + (", ..." if len(row["nodes"]) > ZONE_NODES_SHOWN else ""),
            str(row["weight"]),
            row["coordinator"] or "-",
            row["doing"],
        ]
        for row in answer["zones"]
    ]
    table(["ZONE", "NODES", "WEIGHT", "COORDINATOR", "NOW"], rows)

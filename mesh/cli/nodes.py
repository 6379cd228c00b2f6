"""`mesh up`, `down`, `status` and `nodes`: this node, and the list of all nodes."""

import os
import select
from typing import Any

import click

from mesh.api.no_daemon import NoDaemon
from mesh.cli.listing import listing, show, show_answer, watch_option
from mesh.cli.output import print_json, say, table
from mesh.cli.progress import waiting_for
from mesh.cli.terminal import DURATION, ago, client, engines_option, json_option, layout
from mesh.daemon.launcher import daemon_command, log_tail, start_daemon, wait_ready
from mesh.util.errors import ConfigError, MeshError
from mesh.util.processes import process_of
from mesh.util.text import lend_lines, plural, when
from placement.bounds import MAX_SLOTS

ZONE_NODES_SHOWN = 6
LOG_LINES = 50


@click.command()
@click.option(
    "--join", multiple=True, metavar="HOST:PORT", help="Address of another node, if mDNS cannot find one. Repeatable."
)
@click.option(
    "--lend",
    is_flag=True,
    help="Lend this machine, also after later starts: its GPUs, and --slots for jobs without a GPU.",
)
@click.option(
    "--slots", type=click.IntRange(0, MAX_SLOTS), help="Number of jobs without a GPU that run at a time (default 1)."
)
@click.option("--bind", metavar="ADDRESS", help="Address to listen on (default: all).")
@click.option("--port", type=click.IntRange(0, 65535), help="Port, UDP and TCP (default 7373).")
@click.option(
    "--api-port", type=click.IntRange(0, 65535), help="TCP port of its own for calls between nodes (default: none)."
)
@click.option("--zone", help="Building or room of this machine, for placement.")
@click.option("--no-mdns", is_flag=True, help="Do not use multicast to announce this node or find others.")
@engines_option
@click.option(
    "--allow-process-guests", is_flag=True, help="Run other users' jobs without a container. They can read your files."
)
@click.option(
    "--advertise", metavar="ADDRESS", help="Address that other nodes should use, if the detected one is wrong."
)
@click.option(
    "--open", "open_", is_flag=True, help="Admit every node that asks. For closed networks, for a short time."
)
@click.option(
    "--profile", type=click.Choice(["lan", "local"]), help="Timings: lan, or local for several daemons on one machine."
)
@click.option("--foreground", is_flag=True, help="Stay in the foreground; Ctrl-C shuts down cleanly.")
@json_option
@click.pass_context
def up(ctx: click.Context, /, as_json: bool, foreground: bool, **options: Any) -> None:
    """Start this node. It finds the others by mDNS, remembered addresses and --join."""
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
        say(
            "mesh: guests of the process engine run as your user without a sandbox: they can read and change your files",
            err=True,
        )
    _warn_of_unknown(options["join"])
    try:
        where.make()
        if foreground:
            command = daemon_command(where, overrides)
            os.execv(command[0], command)
        with waiting_for("waiting for the daemon to answer"):
            status = wait_ready(where, start_daemon(where, overrides))
    except ConfigError as error:
        raise MeshError(str(error)) from error
    except OSError as error:
        raise MeshError(
            f"cannot write {where.root}: {error.strerror}. Choose another directory with --state"
        ) from error
    if as_json:
        print_json(status)
        return
    say(f"{status['nick']} is up in mesh {status['mesh']!r} at {status['address']}, {lend_lines(status['lend'])[0]}")
    _banner(status)
    for problem in status["problems"].values():
        say(f"mesh: {problem}", err=True)
    say("next: `mesh nodes` lists all nodes; `mesh run -- COMMAND` runs a command", err=True)


def _warn_of_unknown(addresses: tuple[str, ...]) -> None:
    """Warn of hosts that have no address."""
    if not addresses:
        return
    import socket

    from membership.addresses import parse_seed
    from mesh.daemon.config import GOSSIP_PORT

    for text in addresses:
        try:
            host, port = parse_seed(text, GOSSIP_PORT)
            with waiting_for(f"asking for the address of {host}"):
                socket.getaddrinfo(host, port)
        except ValueError:
            continue  # the daemon says what is wrong
        except OSError as error:
            say(f"mesh: --join {text}: {host} has no address now ({error.strerror}): check its name", err=True)


def _banner(status: dict[str, Any]) -> None:
    if status["open"]:
        say(
            "mesh: OPEN MESH: this node admits every node that asks, and each can run programs on the machines that are lent. "
            "`mesh down` and `mesh up` without --open end that",
            err=True,
        )
        if not status["may_admit"]:
            say("mesh: this node may not admit others, so --open has no effect here", err=True)


grace_option = click.option("--grace", type=DURATION, help="Time for guests to save (default 30s).")
now_option = click.option("--now", is_flag=True, help="Kill guests at once.")


@click.command()
@grace_option
@now_option
@json_option
@click.pass_context
def down(ctx: click.Context, grace: float | None, now: bool, as_json: bool) -> None:
    """Stop this node: guests save and move on, the node leaves the mesh, the daemon ends.

    After a daemon was killed, remove what it left on this machine: containers, their networks and rules, the network edge.
    """
    answer = stop(ctx, grace, now)
    removed = answer.get("removed")
    if as_json:
        print_json(answer)
    elif removed:
        say(f"no daemon ran here; removed what a killed daemon had left: {removed}", err=True)
    else:
        say("down" if removed is None else "this node is not running")


def stop(ctx: click.Context, grace: float | None, now: bool) -> dict[str, Any]:
    """Stop the daemon and wait for its end; return its answer. If none runs, return what a killed one left (`removed`)."""
    try:
        answer: dict[str, Any] = client(ctx).post("/v1/down", {"grace_s": grace, "now": now})
    except NoDaemon as error:
        if error.runs or not layout(ctx).genesis.exists():
            raise
        return {"removed": _remove_leftovers(ctx)}
    if guests := answer["guests"]:
        verb = "is killed" if now else "saves and moves on"
        verbs = "are killed" if now else "save and move on"
        say(f"{plural(guests, 'guest')} {verb if guests == 1 else verbs} ...", err=True)
    try:
        process = process_of(answer["pid"])
        descriptor = process.open() if process is not None else None
        if descriptor is not None:
            select.select([descriptor], [], [])
    except KeyboardInterrupt:
        raise MeshError("it shuts down in the background: `mesh down --now` kills its guests") from None
    return answer


def _remove_leftovers(ctx: click.Context) -> str:
    """Remove what a killed daemon left; return it in words, empty if there was nothing."""
    from mesh.daemon.leftovers import remove

    before, still = remove(layout(ctx))
    if still.words:
        raise MeshError(f"a killed daemon left {before.words}; not removed: {still.words}. Run `mesh down` as root")
    return before.words


@click.command()
@watch_option
@json_option
@click.option("--log", is_flag=True, help="Show the end of the daemon's log instead.")
@click.pass_context
def status(ctx: click.Context, watch: bool, as_json: bool, log: bool) -> None:
    """Show this node: its name, what it lends and why not, its engines, its problems."""
    if log:
        if watch:
            raise click.UsageError("-w repeats the state and --log shows the log: use one of them")
        path = layout(ctx).log
        if not path.exists():
            raise MeshError(f"there is no log yet at {path}: `mesh up` starts a daemon")
        for line in log_tail(path, LOG_LINES):
            say(line)
        return
    daemon = client(ctx)
    show_answer(lambda: daemon.get("/v1/status"), _draw_status, watch, as_json)


def _draw_status(answer: dict[str, Any]) -> None:
    lent, *more = lend_lines(answer["lend"])
    say(f"{answer['nick']} ({answer['node']})")
    say(f"  user {answer['user']}, mesh {answer['mesh']!r}, {answer['address']}, {lent}")
    say(f"  {plural(answer['alive'], 'node')} alive, {plural(len(answer['guests']), 'guest')} here")
    refused = {key: count for key, count in answer["counters"].items() if key.startswith("refused") and count}
    if refused:
        say("  refused messages: " + ", ".join(f"{key.removeprefix('refused_')} {n}" for key, n in refused.items()))
    for name, engine in answer["engines"].items():
        say(f"  engine {name}: {engine['detail']}" + (f"; {engine['isolation']}" if engine["ok"] else ""))
        if engine["ok"] and name == "docker":
            say(f"  system checkpoints: {system_text(engine['system'])}")
    for line in more:
        say(f"  {line.strip()}")
    for warning in answer["lend"]["warnings"]:
        say(f"  warning: {warning}")
    say(f"  network edge: {edge_text(answer['edge'])}")
    if answer["waiting"]:
        say(f"  {plural(answer['waiting'], 'join request')} pending: `mesh member pending`")
    for problem in answer["problems"].values():
        say(f"  problem: {problem}")
    if answer["problems"]:
        say("  next: `mesh doctor`")
    _banner(answer)


@click.command()
@click.option("--zones", "by_zone", is_flag=True, help="List zones and their coordinators instead.")
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
        lends = _not_lent(node)
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
                node["address"] or "-",
            ]
        )
    header = ["NODE", "STATE", "SINCE", "LENDS (free)", "JOBS", "ENGINES", "USER", "ADDRESS"]
    table(header, rows, spare=["ENGINES", "SINCE", "USER", "JOBS"])
    if any("apptainer" in node["engines"] for node in answer["nodes"]):
        from mesh.execution.apptainer.engine import WEAKER

        say(f"mesh: engine apptainer is {WEAKER}", err=True)


def _not_lent(node: dict[str, Any]) -> str:
    """Return why it lends nothing now."""
    if not node.get("paused"):
        return "-"
    if node["back_unix"]:
        return f"from {when(node['back_unix'])}"
    return {"owner": "owner present", "hours": "outside hours"}.get(node["held_by"], "paused")


def _gpus_left(node: dict[str, Any]) -> float:
    """Return the free GPU time, in GPUs; a GPU without free memory has none."""
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


def system_text(system: dict[str, str]) -> str:
    """Describe a node's system checkpoints, for its owner."""
    if not system["platform"]:
        off = system["problem"].startswith("its owner has not allowed them")
        return "off (system_checkpoints = true enables them)" if off else f"none: {system['problem']}"
    gpus = f"not of GPU jobs: {system['gpu_problem']}" if system["gpu_problem"] else "also of GPU jobs"
    return f"on and from nodes that are {system['platform']}; {gpus}"


def edge_text(edge: dict[str, Any]) -> str:
    """Describe a node's network edge (`mesh.network.edge.EdgeState`), for its owner."""
    if edge["off"]:
        return "off (`edge` in config.toml)"
    if not edge["guests"]:
        return str(edge["problem"])
    attached = f" ({plural(len(edge['attached']), 'interface')} now)" if edge["attached"] else ""
    parts = [f"can cut off guests that have a network of their own{attached}"]
    if edge["shaped_mbps"]:
        given = f", {edge['reserved_mbps']:g} of them for checkpoints with a deadline" if edge["reserved_mbps"] else ""
        parts.append(f"shapes {edge['device']} to {edge['shaped_mbps']:g} Mbit/s{given}")
    elif edge["device"]:
        parts.append(f"can cut off checkpoints that leave by {edge['device']}")
    elif not edge["problem"]:
        parts.append("leaves the machine's own interfaces alone (`edge_device` in config.toml names one to shape)")
    if edge["problem"]:
        parts.append(edge["problem"])
    if edge["cut"]:
        parts.append(f"CUT OFF NOW: {' and '.join(edge['cut'])}")
    return "; ".join(parts)

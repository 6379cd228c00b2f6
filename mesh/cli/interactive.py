"""`mesh exec`, `attach`, `forward` and `jupyter`: into a job that runs somewhere, from here. docs/interactive.md."""

import asyncio
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

import click

from mesh.api.errors import ExitCode, MeshError
from mesh.cli.jobs import OVER, exit_code, follow_log, submit_job
from mesh.cli.names import JOB
from mesh.cli.order import job_settings
from mesh.cli.terminal import DURATION, client, job_path, json_option, layout, print_json
from mesh.client import Client

LOOK_S = 0.5  # at the state of a job that is followed; ours
FIRST_PORT = 8888  # as JupyterLab itself has it
TOKEN_PIECES = re.compile(r"[A-Za-z0-9_-]{20,200}")
FORWARD = re.compile(r"(?:(\d{1,5}):)?(?:(\d{1,5})|([A-Za-z0-9][A-Za-z0-9._-]{0,63}))")
NOTEBOOKS = "notebooks"
PROGRAM = "MESH_JUPYTER_PROGRAM"
START = f"import os; exec(os.environ['{PROGRAM}'])"


@click.command("exec", context_settings={"allow_interspersed_args": False})
@click.option("-T", "--no-terminal", is_flag=True, help="Plain pipes, also on a terminal.")
@click.argument("job", type=JOB)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_context
def exec_(ctx: click.Context, no_terminal: bool, job: str, command: tuple[str, ...]) -> None:
    """Run COMMAND beside JOB, in its container or namespaces, with its files and variables: mesh exec JOB -- nvidia-smi.

    On a terminal it has one too (`~.` at the beginning of a line leaves it); else its streams are pipes. Exits as COMMAND does.
    """
    from mesh.cli.tunnel import is_terminal, run_command

    argv = command[1:] if command[0] == "--" else command
    if not argv:
        raise click.UsageError("no COMMAND is named: mesh exec JOB -- COMMAND")
    daemon = client(ctx)
    found = _going(daemon, job)
    terminal = is_terminal() and not no_terminal
    code = asyncio.run(run_command(layout(ctx).socket, found["job"], argv, terminal, _say))
    # The thread that reads the input may stand in a read for ever.
    sys.stdout.flush()
    ctx.exit(code)


exec = exec_


@click.command()
@click.argument("job", type=JOB)
@click.pass_context
def attach(ctx: click.Context, job: str) -> None:
    """Follow JOB: its output, and beside it its state. Ctrl-C leaves it running. What it reads is nothing: use `mesh exec`."""
    daemon = client(ctx)
    found = daemon.get(job_path(job))["job"]
    name = found["job"][:8]
    _say(_state(found))
    watching = threading.Thread(target=_tell_states, args=(daemon, found), name="states", daemon=True)
    watching.start()
    try:
        follow_log(daemon, found["job"], lambda words: None)
    except KeyboardInterrupt:
        click.echo(
            f"\nmesh: detached; job {name} goes on. `mesh attach {name}` comes back, `mesh cancel {name}` ends it",
            err=True,
        )
        ctx.exit(0)
    state = daemon.get(f"/v1/jobs/{found['job']}")["job"]
    _say(_state(state))
    ctx.exit(exit_code(state))


@click.command()
@click.argument("job", type=JOB)
@click.argument("ports", metavar="[LOCAL:]PORT", nargs=-1, required=True)
@click.pass_context
def forward(ctx: click.Context, job: str, ports: tuple[str, ...]) -> None:
    """Reach a PORT on JOB's own loopback (or a socket NAME in its $MESH_CTL_DIR) at a port of 127.0.0.1 here, until Ctrl-C.

    It goes through the mesh's own connection; the job needs no network. If the job moves, the tunnel goes after it.
    """
    wanted = [_parse_forward(text) for text in ports]
    daemon = client(ctx)
    found = _going(daemon, job)
    _until_interrupted(
        _forward(layout(ctx).socket, daemon, found, wanted), ctx, lambda: f"job {found['job'][:8]} goes on"
    )


@click.command()
@job_settings
@click.option(
    "--idle", type=DURATION, default=3600.0, help="End it when nothing in it was used this long (default 1h; 0: never)."
)
@click.option("--port", type=click.IntRange(0, 65_535), help=f"Port here (default: {FIRST_PORT}, or any that is free).")
@click.option("--job", "back", type=JOB, metavar="JOB", help="Come back to one that runs.")
@json_option
@click.pass_context
def jupyter(
    ctx: click.Context, /, idle: float, port: int | None, back: str | None, as_json: bool, **options: Any
) -> None:
    """JupyterLab on a node of the mesh, for the browser here: prints its address. Ctrl-C leaves it running.

    What is in its folder `notebooks` is kept as a checkpoint, and comes along if it has to move; kernels start anew there.
    """
    if options["array"] or options["nodes"] != (1, 1):
        raise click.UsageError("JupyterLab is one job on one node: without --array and --nodes")
    daemon = client(ctx)
    if back is not None:
        job = _going(daemon, back)["job"]
    else:
        job = _start(daemon, idle, options)
        _say(f"job {job[:8]} submitted")
    seat = _jupyter(layout(ctx).socket, daemon, job, port, as_json)

    def left() -> str:
        name = job[:8]
        ends = f", until it was idle for {idle / 60:g} min" if idle and back is None else ""
        return f"the session goes on as job {name}{ends}. `mesh jupyter --job {name}` comes back, `mesh cancel {name}` ends it"

    _until_interrupted(seat, ctx, left)


# --- jupyter


def _start(daemon: Client, idle_s: float, options: dict[str, Any]) -> str:
    import mesh.notebook

    program = Path(mesh.notebook.__file__).read_text(encoding="utf-8")
    options["name"] = options["name"] or "jupyter"
    options["ckpt"] = options["ckpt"] or NOTEBOOKS
    options["env"] = (*options["env"], f"{PROGRAM}={program}")
    order = ("python3", "-c", START, "--idle", f"{idle_s:g}", "--folder", options["ckpt"])
    return str(submit_job(daemon, order, options, interactive=True)["job"])


async def _jupyter(socket_path: Path, daemon: Client, job: str, port: int | None, as_json: bool) -> int:
    """Wait for it, say where it is, and keep the way open; again after each move. Its end as an exit code."""
    from mesh.cli.tunnel import Dialler, Forwarder
    from mesh.notebook import SAYS, SOCKET, base_url

    way = f"socket-{SOCKET}"
    async with Dialler(socket_path) as dialler:
        forwarder = Forwarder(dialler, job, way, _say)
        notes = threading.Thread(target=_tell_notes, args=(daemon, job, SAYS), name="notes", daemon=True)
        notes.start()
        at, told, shown = 0, "", ""
        try:
            while True:
                state = await asyncio.to_thread(_look, daemon, job)
                if state["state"] in OVER:
                    notes.join(LOOK_S)
                    _say(_state(state))
                    return exit_code(state)
                token = await _token(daemon, job, state) if state["state"] == "running" else ""
                if token and token != shown and await _answers(dialler, job, way):
                    at = at or await _listen(forwarder, port)
                    again = "it started anew there: the page has a new address" if shown else ""
                    shown = token
                    url = f"http://127.0.0.1:{at}{base_url(job)}lab?token={token}"
                    _announce(job, state["node"], url, again, as_json)
                words = _state(state)
                if words != told and (not shown or state["state"] != "running"):
                    _say(words)
                told = words
                await asyncio.sleep(LOOK_S)
        finally:
            forwarder.close()


async def _listen(forwarder: Any, port: int | None) -> int:
    if port is not None:
        return int(await forwarder.listen(port))
    try:
        return int(await forwarder.listen(FIRST_PORT))
    except MeshError:
        return int(await forwarder.listen(0))


async def _token(daemon: Client, job: str, state: dict[str, Any]) -> str:
    """Of the server that runs now; empty while there is none. MeshError if its node lets nobody in."""
    from mesh.notebook import TOKEN

    try:
        text = (await asyncio.to_thread(daemon.get, f"/v1/jobs/{job}/control/{TOKEN}"))["text"].strip()
    except MeshError as error:
        if error.code == ExitCode.REFUSED:
            raise
        return ""
    return text if TOKEN_PIECES.fullmatch(text) else ""


async def _answers(dialler: Any, job: str, way: str) -> bool:
    try:
        async with dialler.opened(job, way):
            return True
    except MeshError:
        return False


def _announce(job: str, node: str, url: str, again: str, as_json: bool) -> None:
    if as_json:
        print_json({"job": job, "node": node, "url": url})
    else:
        _say(f"JupyterLab runs on {node}" + (f"; {again}" if again else ""))
        click.echo(url)
    sys.stdout.flush()
    _say("Ctrl-C closes the way there; the session goes on")


def _tell_notes(daemon: Client, job: str, marked: str) -> None:
    """Lines of the job's output that are meant for who sits before it."""
    rest = ""
    while True:
        try:
            for piece in daemon.stream(f"/v1/jobs/{job}/log?follow=1"):
                *lines, rest = (rest + piece.decode(errors="replace")).split("\n")
                for line in lines:
                    if line.startswith(marked):
                        _say(line.removeprefix(marked))
            if daemon.get(f"/v1/jobs/{job}")["job"]["outcome"] is not None:
                return
        except MeshError:
            return
        time.sleep(LOOK_S)


# --- forward


def _parse_forward(text: str) -> tuple[int, str]:
    """`8080:80`, `80`, `8080:app.sock` or `app.sock`: the port here (0 for any), and the way there."""
    found = FORWARD.fullmatch(text)
    if found is None or any(number and not 1 <= int(number) <= 65_535 for number in found.groups()[:2]):
        raise click.BadParameter(f"{text!r} is neither [LOCAL:]PORT nor [LOCAL:]NAME of a socket", param_hint="PORT")
    local, port, name = found.groups()
    if port is not None:
        return int(local or port), f"port-{int(port)}"
    return int(local or 0), f"socket-{name}"


async def _forward(socket_path: Path, daemon: Client, found: dict[str, Any], wanted: list[tuple[int, str]]) -> int:
    from mesh.cli.tunnel import Dialler, Forwarder

    job = found["job"]
    async with Dialler(socket_path) as dialler:
        forwarders = [(Forwarder(dialler, job, way, _say), local, way) for local, way in wanted]
        try:
            for forwarder, local, way in forwarders:
                await forwarder.try_it()
                at = await forwarder.listen(local)
                click.echo(f"127.0.0.1:{at} leads to {way.replace('-', ' ', 1)} of job {job[:8]} on {found['node']}")
            sys.stdout.flush()
            return await _follow_moves(daemon, found)
        finally:
            for forwarder, _, _ in forwarders:
                forwarder.close()


async def _follow_moves(daemon: Client, found: dict[str, Any]) -> int:
    """Until the job is over; says where it goes."""
    node, waits = found["node"], False
    while True:
        state = await asyncio.to_thread(_look, daemon, found["job"])
        if state["state"] in OVER:
            _say(_state(state))
            return 0
        if state["state"] == "running" and (state["node"] != node or waits):
            _say(f"job {state['job'][:8]} runs on {state['node']} now; the tunnel leads there")
            node, waits = state["node"], False
        elif state["state"] != "running" and not waits:
            _say(f"{_state(state)}; new connections wait for it")
            waits = True
        await asyncio.sleep(LOOK_S)


# --- all of them


def _going(daemon: Client, job: str) -> dict[str, Any]:
    """The job, unless it is over."""
    found: dict[str, Any] = daemon.get(job_path(job))["job"]
    if found["outcome"] is not None:
        name = found["job"][:8]
        raise MeshError(
            f"job {name} is over ({found['state']}): `mesh logs {name}` shows its output", ExitCode.NOT_FOUND
        )
    return found


def _look(daemon: Client, job: str) -> dict[str, Any]:
    state: dict[str, Any] = daemon.get(f"/v1/jobs/{job}")["job"]
    return state


def _state(state: dict[str, Any]) -> str:
    where = f" on {state['node']}" if state["node"] and state["state"] not in OVER else ""
    return f"job {state['job'][:8]} is {state['state']}{where}" + (f": {state['detail']}" if state["detail"] else "")


def _say(text: str) -> None:
    click.echo(f"mesh: {text}", err=True)


def _tell_states(daemon: Client, state: dict[str, Any]) -> None:
    told = _state(state)
    while state["state"] not in OVER:
        time.sleep(LOOK_S)
        try:
            state = _look(daemon, state["job"])
        except MeshError:
            return
        if (words := _state(state)) != told and state["state"] not in OVER:
            _say(words)
            told = words


def _until_interrupted(work: Any, ctx: click.Context, left: Any) -> None:
    try:
        code = asyncio.run(work)
    except KeyboardInterrupt:
        click.echo("", err=True)
        _say(left())
        code = 0
    ctx.exit(code)

"""`mesh exec`, and `mesh job attach`, `forward` and `jupyter`: access to a running job (docs/how-to/interactive.md)."""

import asyncio
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

import click

from mesh.api.client import Client
from mesh.cli.job_options import job_settings
from mesh.cli.jobs import exit_code, follow_log, goes_on, raw_option, submit_job
from mesh.cli.names import JOB
from mesh.cli.output import print_json, say
from mesh.cli.terminal import DURATION, client, job_path, json_option, layout
from mesh.util.errors import ExitCode, MeshError
from mesh.util.text import OVER, job_text, short_id

POLL_S = 0.5  # of the state of a job that is followed (own choice)
NOTE_LIMIT = 4096  # characters of a line for the user (own choice)
FIRST_PORT = 8888  # JupyterLab's default
TOKEN_PIECES = re.compile(r"[A-Za-z0-9_-]{20,200}")
FORWARD = re.compile(r"(?:(\d{1,5}):)?(?:(\d{1,5})|([A-Za-z0-9][A-Za-z0-9._-]{0,63}))")
NOTEBOOKS = "notebooks"
PROGRAM = "MESH_JUPYTER_PROGRAM"
START = f"import os; exec(os.environ['{PROGRAM}'])"


@click.command("exec", context_settings={"allow_interspersed_args": False})
@click.option("-T", "--no-terminal", is_flag=True, help="Use pipes, also on a terminal.")
@click.argument("job", type=JOB)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_context
def exec_(ctx: click.Context, no_terminal: bool, job: str, command: tuple[str, ...]) -> None:
    """Run COMMAND next to JOB, in its container or namespaces, with its files and variables: mesh exec JOB -- nvidia-smi.

    On a terminal COMMAND gets a terminal (`~.` at the beginning of a line detaches), otherwise pipes. Exits with its exit code.
    """
    from mesh.cli.tunnel import is_terminal, run_command

    argv = command[1:] if command[0] == "--" else command
    if not argv:
        raise click.UsageError("COMMAND is missing: mesh exec JOB -- COMMAND")
    daemon = client(ctx)
    found = _unfinished(daemon, job)
    terminal = is_terminal() and not no_terminal
    code = asyncio.run(run_command(layout(ctx).socket, found["job"], argv, terminal, _report))
    # The thread that reads the input may be blocked in a read.
    sys.stdout.flush()
    ctx.exit(code)


exec = exec_


@click.command()
@click.argument("job", type=JOB)
@raw_option
@click.pass_context
def attach(ctx: click.Context, job: str, raw: bool) -> None:
    """Follow the output and state of JOB, and exit with its exit code. Ctrl-C leaves it running. For input use `mesh exec`."""
    daemon = client(ctx)
    found = daemon.get(job_path(job))["job"]
    name = short_id(found)
    _report(job_text(found))
    watching = threading.Thread(target=_report_states, args=(daemon, found), name="states", daemon=True)
    watching.start()
    try:
        follow_log(daemon, found["job"], lambda words: None, raw=raw)
    except KeyboardInterrupt:
        say(err=True)
        say(
            f"mesh: detached; job {name} continues. `mesh job attach {name}` returns, `mesh cancel {name}` ends it",
            err=True,
        )
        ctx.exit(0)
    except BrokenPipeError:
        goes_on(name)
        raise
    state = daemon.get(f"/v1/jobs/{found['job']}")["job"]
    _report(job_text(state))
    ctx.exit(exit_code(state))


@click.command()
@click.argument("job", type=JOB)
@click.argument("ports", metavar="[LOCAL:]PORT", nargs=-1, required=True)
@json_option
@click.pass_context
def forward(ctx: click.Context, job: str, ports: tuple[str, ...], as_json: bool) -> None:
    """Forward a port of 127.0.0.1 here to PORT on JOB's loopback, or to socket NAME in its $MESH_CTL_DIR, until Ctrl-C.

    The tunnel uses the mesh's connection, so the job needs no network. It follows the job when that moves.
    """
    wanted = [_parse_forward(text) for text in ports]
    daemon = client(ctx)
    found = _unfinished(daemon, job)
    _until_interrupted(
        _forward(layout(ctx).socket, daemon, found, wanted, as_json), ctx, lambda: f"job {short_id(found)} continues"
    )


@click.command()
@job_settings
@click.option(
    "--idle", type=DURATION, default=3600.0, help="End the session after this idle time (default 1h; 0: never)."
)
@click.option("--port", type=click.IntRange(0, 65_535), help=f"Local port (default: {FIRST_PORT}, or any free one).")
@click.option("--job", "back", type=JOB, metavar="JOB", help="Return to a running session.")
@json_option
@click.pass_context
def jupyter(
    ctx: click.Context, /, idle: float, port: int | None, back: str | None, as_json: bool, **options: Any
) -> None:
    """Start JupyterLab on a node of the mesh and print its address for a browser here. Ctrl-C leaves it running.

    Its folder `notebooks` is saved as a checkpoint and moves along with the session; kernels restart after a move.
    """
    if options["array"] or options["nodes"] != (1, 1):
        raise click.UsageError("JupyterLab is one job on one node: leave out --array and --nodes")
    daemon = client(ctx)
    if back is not None:
        job = _unfinished(daemon, back)["job"]
    else:
        job = _start(daemon, idle, options)
        _report(f"job {job[:8]} submitted")
    session = _jupyter(layout(ctx).socket, daemon, job, port, as_json)

    def left() -> str:
        name = job[:8]
        ends = f", until it has been idle for {idle / 60:g} min" if idle and back is None else ""
        return f"the session continues as job {name}{ends}. `mesh job jupyter --job {name}` returns, `mesh cancel {name}` ends it"

    _until_interrupted(session, ctx, left)


# --- jupyter


def _start(daemon: Client, idle_s: float, options: dict[str, Any]) -> str:
    import mesh.sdk.jupyter

    program = Path(mesh.sdk.jupyter.__file__).read_text(encoding="utf-8")
    options["name"] = options["name"] or "jupyter"
    options["ckpt"] = options["ckpt"] or NOTEBOOKS
    options["env"] = (*options["env"], f"{PROGRAM}={program}")
    order = ("python3", "-c", START, "--idle", f"{idle_s:g}", "--folder", options["ckpt"])
    return str(submit_job(daemon, order, options, interactive=True)["job"])


async def _jupyter(socket_path: Path, daemon: Client, job: str, port: int | None, as_json: bool) -> int:
    """Wait for the server, print its address, and forward the port; again after each move. Return the exit code."""
    from mesh.cli.tunnel import Dialler, Forwarder
    from mesh.sdk.jupyter import SAYS, SOCKET, base_url

    target = f"socket-{SOCKET}"
    async with Dialler(socket_path) as dialler:
        forwarder = Forwarder(dialler, job, target, _report)
        notes = threading.Thread(target=_report_notes, args=(daemon, job, SAYS), name="notes", daemon=True)
        notes.start()
        at, reported, shown = 0, "", ""
        try:
            while True:
                state = await asyncio.to_thread(_look, daemon, job)
                if state["state"] in OVER:
                    notes.join(POLL_S)
                    _report(job_text(state))
                    return exit_code(state)
                token = await _token(daemon, job, state) if state["state"] == "running" else ""
                if token and token != shown and await _answers(dialler, job, target):
                    at = at or await _listen(forwarder, port)
                    again = "it has restarted: the page has a new address" if shown else ""
                    shown = token
                    url = f"http://127.0.0.1:{at}{base_url(job)}lab?token={token}"
                    _announce(job, state["node"], url, again, as_json)
                words = job_text(state)
                if words != reported and (not shown or state["state"] != "running"):
                    _report(words)
                reported = words
                await asyncio.sleep(POLL_S)
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
    """Return the token of the running server; empty if there is none. MeshError if its node forbids sessions."""
    from mesh.sdk.jupyter import TOKEN

    try:
        text = (await asyncio.to_thread(daemon.get, f"/v1/jobs/{job}/control/{TOKEN}"))["text"].strip()
    except MeshError as error:
        if error.code == ExitCode.REFUSED:
            raise
        return ""
    return text if TOKEN_PIECES.fullmatch(text) else ""


async def _answers(dialler: Any, job: str, target: str) -> bool:
    try:
        async with dialler.opened(job, target):
            return True
    except MeshError:
        return False


def _announce(job: str, node: str, url: str, again: str, as_json: bool) -> None:
    if as_json:
        print_json({"job": job, "node": node, "url": url})
    else:
        _report(f"JupyterLab runs on {node}" + (f"; {again}" if again else ""))
        say(url)
    sys.stdout.flush()
    _report("Ctrl-C closes the tunnel; the session continues")


def _report_notes(daemon: Client, job: str, marked: str) -> None:
    """Report marked lines of the job's output, which are meant for its user."""
    rest = ""
    while True:
        try:
            for piece in daemon.stream(f"/v1/jobs/{job}/log?follow=1"):
                *lines, rest = (rest + piece.decode(errors="replace")).split("\n")
                rest = rest[:NOTE_LIMIT]
                for line in lines:
                    if line.startswith(marked):
                        _report(line.removeprefix(marked))
            if daemon.get(f"/v1/jobs/{job}")["job"]["outcome"] is not None:
                return
        except MeshError:
            return
        time.sleep(POLL_S)


# --- forward


def _parse_forward(text: str) -> tuple[int, str]:
    """Parse `8080:80`, `80`, `8080:app.sock` or `app.sock`: the local port (0 for any), and the target in the job."""
    found = FORWARD.fullmatch(text)
    if found is None or any(number and not 1 <= int(number) <= 65_535 for number in found.groups()[:2]):
        raise click.BadParameter(f"{text!r} is neither [LOCAL:]PORT nor [LOCAL:]NAME of a socket", param_hint="PORT")
    local, port, name = found.groups()
    if port is not None:
        return int(local or port), f"port-{int(port)}"
    return int(local or 0), f"socket-{name}"


async def _forward(
    socket_path: Path, daemon: Client, found: dict[str, Any], wanted: list[tuple[int, str]], as_json: bool
) -> int:
    from mesh.cli.tunnel import Dialler, Forwarder

    job = found["job"]
    async with Dialler(socket_path) as dialler:
        forwarders = [(Forwarder(dialler, job, target, _report), local, target) for local, target in wanted]
        try:
            ports, problems = [], []
            for forwarder, local, target in forwarders:
                problems.append(await forwarder.problem())
                ports.append({"local": await forwarder.listen(local), "target": target.replace("-", " ", 1)})
            if as_json:
                print_json({"job": job, "node": found["node"], "ports": ports})
            else:
                for port in ports:
                    say(
                        f"127.0.0.1:{port['local']} leads to {port['target']} of job {short_id(found)} on {found['node']}"
                    )
            sys.stdout.flush()
            for problem in filter(None, problems):
                _report(problem)
            return await _follow_moves(daemon, found)
        finally:
            for forwarder, _, _ in forwarders:
                forwarder.close()


async def _follow_moves(daemon: Client, found: dict[str, Any]) -> int:
    """Report the job's moves until it has ended."""
    node, waits = found["node"], False
    while True:
        state = await asyncio.to_thread(_look, daemon, found["job"])
        if state["state"] in OVER:
            _report(job_text(state))
            return 0
        if state["state"] == "running" and (state["node"] != node or waits):
            _report(f"job {short_id(state)} runs on {state['node']} now; the tunnel follows it")
            node, waits = state["node"], False
        elif state["state"] != "running" and not waits:
            _report(f"{job_text(state)}; new connections wait")
            waits = True
        await asyncio.sleep(POLL_S)


# --- shared


def _unfinished(daemon: Client, job: str) -> dict[str, Any]:
    """Return the job; MeshError if it has ended."""
    found: dict[str, Any] = daemon.get(job_path(job))["job"]
    if found["outcome"] is not None:
        name = short_id(found)
        raise MeshError(
            f"job {name} has ended ({found['state']}): `mesh logs {name}` shows its output", ExitCode.NOT_FOUND
        )
    return found


def _look(daemon: Client, job: str) -> dict[str, Any]:
    state: dict[str, Any] = daemon.get(f"/v1/jobs/{job}")["job"]
    return state


def _report(text: str) -> None:
    say(f"mesh: {text}", err=True)


def _report_states(daemon: Client, state: dict[str, Any]) -> None:
    reported = job_text(state)
    while state["state"] not in OVER:
        time.sleep(POLL_S)
        try:
            state = _look(daemon, state["job"])
        except MeshError:
            return
        if (words := job_text(state)) != reported and state["state"] not in OVER:
            _report(words)
            reported = words


def _until_interrupted(work: Any, ctx: click.Context, left: Any) -> None:
    try:
        code = asyncio.run(work)
    except KeyboardInterrupt:
        say(err=True)
        _report(left())
        code = 0
    ctx.exit(code)

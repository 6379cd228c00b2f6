"""`mesh run`, `submit`, `ps`, `logs`, `why`, `cancel`, `pull`, `events`: what a user does with jobs."""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from mesh.api.errors import ExitCode, MeshError
from mesh.cli.terminal import DURATION, SIZE, ago, client, job_path, json_option, patience, print_json, quote, table
from mesh.client import Client

OVER = {"done", "failed", "cancelled"}
POLL_S = 0.3
MOVE_S = 90.0  # the usual grace, a restore, and some

_OPTIONS: list[Callable[[Any], Any]] = [
    click.option("--gpus", type=click.IntRange(0, 4096), default=0, show_default=True, help="GPUs the job needs."),
    click.option("--vram", type=SIZE, default=0, help="Memory each GPU must have, as 20g."),
    click.option("--memory", type=SIZE, help="Memory limit, as 8g."),
    click.option("--cpus", type=click.FloatRange(0.1, 1024), help="CPU limit (docker engine)."),
    click.option("--image", help="Container image; without one the job is a plain process."),
    click.option("--engine", type=click.Choice(["process", "docker"]), help="Insist on an engine."),
    click.option("--name", default="", help="A name to call the job by."),
    click.option("--env", multiple=True, metavar="KEY=VALUE", help="Environment variable. Repeatable."),
    click.option("--ckpt", metavar="DIR", help="Directory, inside the working directory, that holds checkpoints."),
    click.option(
        "--ckpt-mode",
        type=click.Choice(["rename", "marker", "stable"]),
        default="stable",
        show_default=True,
        help="How a checkpoint shows that it is complete (docs/job-contract.md).",
    ),
    click.option("--ckpt-to", metavar="NODE,NODE", help="Nodes that are to hold the checkpoints."),
    click.option("--replicas", type=click.IntRange(0, 16), default=2, show_default=True, help="Copies on other nodes."),
    click.option("--grace", type=DURATION, help="What the job needs to save at a notice (default 30s)."),
    click.option(
        "--retries",
        type=click.IntRange(0, 1000),
        default=0,
        show_default=True,
        help="Errors to forgive. Departures never count.",
    ),
    click.option(
        "--priority",
        type=click.IntRange(0, 100),
        default=50,
        show_default=True,
        help="Higher goes first; ten minutes of waiting are worth a point.",
    ),
    click.option("--after", multiple=True, metavar="JOB", help="Wait until this job is done. Repeatable."),
    click.option("--max-time", type=DURATION, help="End it, with notice, when it has run this long in all."),
    click.option(
        "--on-partition",
        type=click.Choice(["freeze", "compute_uncommitted"]),
        default="freeze",
        show_default=True,
        help="While cut off from its witnesses: stand still, or go on at the risk of doing it twice.",
    ),
    click.option("--zone", help="Only nodes of this zone."),
    click.option(
        "--workdir", type=click.Path(file_okay=False), default=".", help="Directory to take along (default: here)."
    ),
    click.option("--no-workdir", is_flag=True, help="Take nothing along."),
]


def _job_options(function: Any) -> Any:
    for option in reversed(_OPTIONS):
        function = option(function)
    return click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)(function)


def make_order(command: tuple[str, ...], options: dict[str, Any]) -> dict[str, Any]:
    """The body of a submission from the command line's values."""
    env = {}
    for pair in options["env"]:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise click.BadParameter(f"{pair!r} is not KEY=VALUE", param_hint="--env")
        env[key] = value
    return {
        "argv": list(command),
        "name": options["name"],
        "env": env,
        "workdir": None if options["no_workdir"] else str(Path(options["workdir"]).resolve()),
        "image": options["image"],
        "engine": options["engine"],
        "gpus": options["gpus"],
        "vram_mib": options["vram"],
        "memory_mib": options["memory"],
        "cpus": options["cpus"],
        "zone": options["zone"],
        "ckpt": options["ckpt"],
        "ckpt_mode": options["ckpt_mode"],
        "ckpt_to": [name for name in (options["ckpt_to"] or "").split(",") if name],
        "replicas": options["replicas"],
        "grace_s": options["grace"],
        "retries": options["retries"],
        "on_partition": options["on_partition"],
        "max_time_s": options["max_time"],
        "priority": options["priority"],
        "after": list(options["after"]),
    }


def _submit(daemon: Client, command: tuple[str, ...], options: dict[str, Any]) -> dict[str, Any]:
    order = make_order(command, options)
    with patience("packing the working directory and copying it to other nodes"):
        answer: dict[str, Any] = daemon.post("/v1/jobs", order, timeout_s=600)
    if answer["warning"]:
        click.echo(f"mesh: {answer['warning']}", err=True)
    return answer


@click.command(context_settings={"ignore_unknown_options": False})
@_job_options
@json_option
@click.pass_context
def submit(ctx: click.Context, /, command: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Submit COMMAND to the mesh. Prints the job's id; the rest goes to standard error."""
    answer = _submit(client(ctx), command, options)
    if as_json:
        print_json(answer)
        return
    click.echo(answer["job"])
    short = answer["job"][:8]
    size = f" with {answer['workdir_bytes'] / 2**20:.1f} MiB of files" if answer["workdir_bytes"] else ""
    click.echo(f"submitted{size}; {answer['witnesses']} nodes keep its record. Next:", err=True)
    for line in (f"mesh logs -f {short}", f"mesh why {short}", f"mesh cancel {short}"):
        click.echo(f"  {line}", err=True)


@click.command()
@_job_options
@click.option("--out", metavar="DIR", help="Fetch the job's published files into DIR when it is done.")
@click.pass_context
def run(ctx: click.Context, /, command: tuple[str, ...], out: str | None, **options: Any) -> None:
    """Run COMMAND on the mesh and follow its output. Ctrl-C once: leave it running; twice: cancel it."""
    daemon = client(ctx)
    job = _submit(daemon, command, options)["job"]
    click.echo(f"job {job[:8]} submitted", err=True)
    try:
        _follow(daemon, job)
    except KeyboardInterrupt:
        try:
            click.echo(
                f"\nstill running; `mesh logs -f {job[:8]}` follows it again. Ctrl-C once more cancels it.", err=True
            )
            time.sleep(2.0)
        except KeyboardInterrupt:
            daemon.post(f"/v1/jobs/{job}/cancel")
            click.echo("cancelled", err=True)
            ctx.exit(int(ExitCode.JOB_CANCELLED))
        ctx.exit(0)
    state = daemon.get(f"/v1/jobs/{job}")["job"]
    outcome = state["outcome"]
    if out is not None and outcome is not None:
        answer = _pull(daemon, f"/v1/jobs/{job}", out)
        click.echo(f"{answer['files']} files in {answer['destination']}", err=True)
    ctx.exit(exit_code(state))


def exit_code(state: dict[str, Any]) -> int:
    """What `run` exits with: the job's own code, or 103 if it was cancelled."""
    outcome = state["outcome"]
    if outcome is None:
        return int(ExitCode.ERROR)
    if outcome["kind"] == "cancelled":
        return int(ExitCode.JOB_CANCELLED)
    if outcome["kind"] == "failed":
        return int(outcome["exit_code"] or ExitCode.JOB_FAILED)
    return 0


def _follow(daemon: Client, job: str) -> None:
    """Output to stdout; moves and waits to stderr."""
    told = ""
    while True:
        for piece in daemon.stream(f"/v1/jobs/{job}/log?follow=1"):
            sys.stdout.buffer.write(piece)
            sys.stdout.buffer.flush()
        state = daemon.get(f"/v1/jobs/{job}")["job"]
        words = f"{state['state']}: {state['detail']}" if state["detail"] else state["state"]
        if words != told:
            click.echo(f"mesh: {words}", err=True)
            told = words
        if state["state"] in OVER:
            return
        time.sleep(POLL_S)


@click.command()
@click.option("-a", "--all", "everything", is_flag=True, help="Ended jobs too.")
@json_option
@click.pass_context
def ps(ctx: click.Context, everything: bool, as_json: bool) -> None:
    """List jobs, as this node knows them."""
    answer = client(ctx).get("/v1/jobs")
    shown = [job for job in answer["jobs"] if everything or job["state"] not in OVER]
    if as_json:
        print_json({**answer, "jobs": shown})
        return
    rows = []
    for job in shown:
        progress = "-"
        if job["step"] is not None:
            progress = f"{job['step']}/{job['of']}" if job["of"] else str(job["step"])
        kept = "-"
        if job["checkpoint"] is not None:
            kept = f"{ago(job['checkpoint']['created_unix_ms'])} ago on {len(job['checkpoint']['holders'])}"
        rows.append(
            [
                job["job"][:8],
                job["name"] or "-",
                job["user"],
                job["state"],
                job["node"] or "-",
                str(max(0, len(job["attempts"]) - 1)),
                progress,
                kept,
                job["detail"] or job["command"],
            ]
        )
    table(["JOB", "NAME", "USER", "STATE", "NODE", "MOVES", "STEP", "CHECKPOINT", "COMMAND"], rows)


@click.command()
@click.argument("job")
@click.option("-f", "--follow", is_flag=True, help="Go on until the job ends.")
@click.pass_context
def logs(ctx: click.Context, job: str, follow: bool) -> None:
    """Show a job's output, over all its attempts, wherever it ran."""
    daemon = client(ctx)
    if follow:
        _follow(daemon, daemon.get(job_path(job))["job"]["job"])
        return
    for piece in daemon.stream(f"{job_path(job)}/log"):
        sys.stdout.buffer.write(piece)
    sys.stdout.buffer.flush()


@click.command()
@click.argument("job")
@json_option
@click.pass_context
def why(ctx: click.Context, job: str, as_json: bool) -> None:
    """Explain where a job runs or why it waits: the ranking of all nodes, with reasons."""
    answer = client(ctx).get(f"{job_path(job)}/why")
    if as_json:
        print_json(answer)
        return
    where = f" on {answer['node']}" if answer["node"] else ""
    click.echo(
        f"job {answer['job'][:8]} is {answer['state']}{where}" + (f": {answer['detail']}" if answer["detail"] else "")
    )
    click.echo(f"  its record is kept by {', '.join(answer['witnesses'])}")
    for attempt in answer["attempts"]:
        click.echo(f"  attempt {attempt['number']} on {attempt['node']}: {attempt['reason'] or 'under way'}")
    click.echo("for its next attempt: " + answer["explanation"][0])
    rows = [
        [str(place), candidate["nick"], str(candidate["weight"]), f"advert {candidate['advert_version']}"]
        for place, candidate in enumerate(answer["candidates"], 1)
    ]
    rows += [["-", refusal["nick"], "-", "; ".join(refusal["reasons"])] for refusal in answer["refused"]]
    if rows:
        table(["RANK", "NODE", "SURVIVAL/64", "WHY"], rows)


@click.command()
@click.argument("job")
@click.pass_context
def cancel(ctx: click.Context, job: str) -> None:
    """End a job. What it has published or saved so far stays readable."""
    daemon = client(ctx)
    answer = daemon.post(f"{job_path(job)}/cancel")
    if answer["already"]:
        click.echo(f"job {answer['job'][:8]} is {answer['state']} already")
        return
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline:
        if daemon.get(f"/v1/jobs/{answer['job']}")["job"]["state"] in OVER:
            click.echo(f"job {answer['job'][:8]} cancelled")
            return
        time.sleep(0.1)
    click.echo(f"job {answer['job'][:8]} is asked to end; it will when a majority of its witnesses can be reached")


@click.command()
@click.argument("jobs", nargs=-1, required=True)
@click.option("--timeout", type=DURATION, help="Give up after this long (exit 124); the jobs go on.")
@json_option
@click.pass_context
def wait(ctx: click.Context, jobs: tuple[str, ...], timeout: float | None, as_json: bool) -> None:
    """Wait until all JOBS are over. Exits with the code of the first that did not end well."""
    daemon = client(ctx)
    paths = [job_path(job) for job in jobs]
    states = [daemon.get(path)["job"] for path in paths]
    deadline = time.monotonic() + (timeout if timeout is not None else float("inf"))
    with patience(f"waiting for {len(paths)} job{'' if len(paths) == 1 else 's'}"):
        while any(state["outcome"] is None for state in states) and time.monotonic() < deadline:
            time.sleep(min(POLL_S, max(0.0, deadline - time.monotonic())))
            states = [daemon.get(f"/v1/jobs/{state['job']}")["job"] for state in states]
    if as_json:
        print_json({"jobs": states})
    else:
        for state in states:
            click.echo(f"{state['job'][:8]} {state['state']}" + (f": {state['detail']}" if state["detail"] else ""))
    if any(state["outcome"] is None for state in states):
        ctx.exit(int(ExitCode.TIMED_OUT))
    ctx.exit(next((code for state in states if (code := exit_code(state))), 0))


@click.command()
@click.argument("job")
@click.option("--to", metavar="NODE", default="", help="Where to; without it, the best other node.")
@click.option("--force", is_flag=True, help="Even if it has no checkpoints and starts over.")
@json_option
@click.pass_context
def migrate(ctx: click.Context, job: str, to: str, force: bool, as_json: bool) -> None:
    """Move a running JOB: it gets notice, saves, and goes on elsewhere."""
    daemon = client(ctx)
    answer = daemon.post(f"{job_path(job)}/migrate", {"to": to, "force": force})
    with patience("waiting for it to save and to go on"):
        state = _moved(daemon, answer)
    attempts = state["attempts"]
    if as_json:
        print_json({**answer, "moved": attempts[-1]["number"] > answer["attempt"], "state": state})
    elif state["outcome"] is not None:
        click.echo(f"job {answer['job'][:8]} was {state['state']} before it moved")
    elif attempts[-1]["number"] > answer["attempt"]:
        resumed = attempts[-1]["resumed_step"]
        step = f", from step {resumed}" if resumed is not None else ""
        click.echo(f"job {answer['job'][:8]} left {answer['from']} and goes on on {attempts[-1]['node']}{step}")
    else:
        click.echo(f"job {answer['job'][:8]} has notice on {answer['from']}; `mesh events {answer['job'][:8]}` tells")


def _moved(daemon: Client, answer: dict[str, Any]) -> dict[str, Any]:
    """The job once it runs elsewhere, or is over, or a minute after its grace."""
    deadline = time.monotonic() + MOVE_S
    while True:
        state: dict[str, Any] = daemon.get(f"/v1/jobs/{answer['job']}")["job"]
        last = state["attempts"][-1]
        runs_elsewhere = last["number"] > answer["attempt"] and last["running_unix_ms"]
        if runs_elsewhere or state["outcome"] is not None or time.monotonic() > deadline:
            return state
        time.sleep(0.1)


@click.command()
@click.argument("job")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
@click.pass_context
def recover(ctx: click.Context, job: str, yes: bool, as_json: bool) -> None:
    """Go on with a JOB although most of the nodes that keep its record are gone for good.

    Without --yes, it says what is known first. If the lost nodes come back later, what only they knew is forgotten.
    """
    daemon = client(ctx)
    with patience("asking the nodes for what they know of it"):
        plan = daemon.post(f"{job_path(job)}/recover", {"go": False}, timeout_s=60)
    if not yes and as_json:
        print_json(plan)
        return
    if not yes:
        click.echo(_what_is_left(plan), err=True)
        click.confirm("go on from there?", abort=True, err=True)
    answer = daemon.post(f"{job_path(job)}/recover", {"go": True}, timeout_s=60)
    if as_json:
        print_json(answer)
        return
    click.echo(f"job {answer['job'][:8]} goes on; its record is kept by {', '.join(answer['witnesses'])}")


def _what_is_left(plan: dict[str, Any]) -> str:
    commit = plan["checkpoint"]
    where = "the beginning: no checkpoint is known"
    if commit is not None:
        step = f" at step {commit['step']}" if commit["step"] is not None else ""
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(plan["checkpoint_unix_ms"] / 1000))
        where = f"checkpoint {commit['seq']}{step}, of {when}"
    return (
        f"{', '.join(plan['lost'])} of the nodes that keep its record cannot be reached; left is the record of "
        f"{', '.join(plan['kept'])}.\nit would go on from {where}. A newer one may have been committed by the lost "
        "nodes: then the job's history forks here, and theirs is forgotten, should they come back."
    )


@click.command()
@click.argument("job")
@click.argument("directory", type=click.Path(file_okay=False))
@json_option
@click.pass_context
def pull(ctx: click.Context, job: str, directory: str, as_json: bool) -> None:
    """Fetch what a finished JOB published ($MESH_OUT_DIR) into DIRECTORY."""
    answer = _pull(client(ctx), job_path(job), directory)
    if as_json:
        print_json(answer)
        return
    click.echo(f"{answer['files']} files, {answer['bytes']} bytes in {answer['destination']}")


def _pull(daemon: Client, path: str, directory: str) -> dict[str, Any]:
    with patience("fetching its files"):
        answer: dict[str, Any] = daemon.post(
            f"{path}/pull", {"destination": str(Path(directory).resolve())}, timeout_s=3600
        )
    return answer


@click.command()
@click.argument("job", required=False)
@json_option
@click.pass_context
def events(ctx: click.Context, job: str | None, as_json: bool) -> None:
    """What this node saw happen, to one JOB or to all."""
    answer = client(ctx).get("/v1/events" + (f"?job={quote(job)}" if job else ""))
    if as_json:
        print_json(answer)
        return
    for event in answer["events"]:
        at = time.strftime("%H:%M:%S", time.localtime(event["unix_ms"] / 1000))
        click.echo(f"{at}  {event['actor']:<12} {(event['job'] or '-')[:8]:<8}  {event['text']}")
    if not answer["events"] and job:
        raise MeshError("this node saw nothing of it", ExitCode.NOT_FOUND)

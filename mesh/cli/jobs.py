"""`mesh run`, `submit`, `ps`, `logs`, `cancel`, `pull`, `events`: what a user does with jobs."""

import json
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import click

from mesh.api.errors import ExitCode
from mesh.cli.terminal import (
    ARRAY,
    DEADLINE,
    DURATION,
    EVERY,
    NODES,
    SIZE,
    VERSION,
    ago,
    client,
    job_path,
    json_option,
    patience,
    print_json,
    quote,
    table,
)
from mesh.client import Client
from mesh.duration import lasting

OVER = {"done", "failed", "cancelled"}
POLL_S = 0.3
WATCH_S = 0.5
UNHEARD_LOOKS = 10  # at the events of a job that is over, for the word of whoever ended it
CANCEL_S = 15.0
MOVE_S = 90.0  # the usual grace, a restore, and some

_OPTIONS: list[Callable[[Any], Any]] = [
    click.option("--gpus", type=click.IntRange(0, 4096), help="GPUs the job needs (default 0; 1 with --gpu-share)."),
    click.option(
        "--gpu-share",
        type=click.IntRange(1, 100),
        help="Per cent of each GPU's time that the job is guaranteed (default 100: it has the GPU alone).",
    ),
    click.option(
        "--gpu-share-limit",
        type=click.IntRange(1, 100),
        help="Per cent that it may use while others leave it idle (default: as --gpu-share).",
    ),
    click.option(
        "--vram", type=SIZE, default=0, help="Memory each GPU must have, as 20g; of a share, the memory the job gets."
    ),
    click.option(
        "--vram-limit",
        type=SIZE,
        default=0,
        help="Memory that it may have of each GPU while no other job's share needs it (default: as --vram).",
    ),
    click.option("--gpu-model", default="", metavar="NAME", help="A part of the GPUs' name, as A6000 (`mesh gpus`)."),
    click.option("--compute-capability", type=VERSION, help="The least that each GPU must have, as 8.0."),
    click.option("--driver", type=VERSION, help="The least version of NVIDIA's driver, as 550.54."),
    click.option("--memory", type=SIZE, help="Memory limit, as 8g."),
    click.option("--cpus", type=click.FloatRange(0.1, 1024), help="CPU limit (docker engine)."),
    click.option("--image", help="Container image; without one the job is a plain process."),
    click.option("--engine", type=click.Choice(["process", "docker"]), help="Insist on an engine."),
    click.option("--name", default="", help="A name to call the job by."),
    click.option("--env", multiple=True, metavar="KEY=VALUE", help="Environment variable. Repeatable."),
    click.option("--ckpt", metavar="DIR", help="Directory, inside the working directory, that holds checkpoints."),
    click.option(
        "--ckpt-mode",
        type=click.Choice(["rename", "marker", "stable", "system"]),
        default="stable",
        show_default=True,
        help="How a checkpoint shows that it is complete; `system`: the program saves nothing, all of its container is saved "
        "(docs/job-contract.md).",
    ),
    click.option(
        "--ckpt-every",
        type=EVERY,
        metavar="auto|TIME",
        help="Give the job a notice when it is to save: by the mesh's rule, or as 30m (docs/schedule.md). With --ckpt-mode "
        "system it is saved then, by that rule if nothing is said.",
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
    click.option(
        "--retry-on",
        multiple=True,
        type=click.IntRange(1, 255),
        metavar="CODE",
        help="Forgive errors with this exit code only. Repeatable.",
    ),
    click.option("--deadline", type=DEADLINE, help="Fail it when it is not done by then: 6h, or 2026-12-01T08:00."),
    click.option(
        "--array", type=ARRAY, metavar="1-100%10", help="A job for each index ($MESH_ARRAY_INDEX), 10 at a time."
    ),
    click.option("--max-time", type=DURATION, help="End it, with notice, when it has run this long in all."),
    click.option(
        "--on-partition",
        type=click.Choice(["freeze", "compute_uncommitted"]),
        default="freeze",
        show_default=True,
        help="While cut off from its witnesses: stand still, or go on at the risk of doing it twice.",
    ),
    click.option(
        "--nodes",
        type=NODES,
        default=(1, 1),
        metavar="K|K..M",
        help="Run on so many nodes at once, all or nothing, as torchrun expects it.",
    ),
    click.option(
        "--home",
        metavar="NODE|first|none",
        help="Where it goes back to when that is free: a node, or where it ran first (default: your own, if it had to leave it).",
    ),
    click.option("--zone", help="Only nodes of this zone."),
    click.option(
        "--workdir", type=click.Path(file_okay=False), default=".", help="Directory to take along (default: here)."
    ),
    click.option("--no-workdir", is_flag=True, help="Take nothing along."),
]


def job_settings(function: Any) -> Any:
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def job_options(function: Any) -> Any:
    return click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)(job_settings(function))


def make_order(command: tuple[str, ...], options: dict[str, Any]) -> dict[str, Any]:
    """The body of a submission from the command line's values."""
    env = {}
    for pair in options["env"]:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise click.BadParameter(f"{pair!r} is not KEY=VALUE", param_hint="--env")
        env[key] = value
    share = options["gpu_share"]
    return {
        "argv": list(command),
        "name": options["name"],
        "env": env,
        "workdir": None if options["no_workdir"] else str(Path(options["workdir"]).resolve()),
        "image": options["image"],
        "engine": options["engine"],
        "gpus": int(share is not None) if options["gpus"] is None else options["gpus"],
        "gpu_share": 100 if share is None else share,
        "gpu_share_limit": options["gpu_share_limit"],
        "vram_mib": options["vram"],
        "vram_limit_mib": options["vram_limit"],
        "gpu_model": options["gpu_model"],
        "capability": (*(options["compute_capability"] or ()), 0, 0)[:2],
        "driver": options["driver"] or (),
        "memory_mib": options["memory"],
        "cpus": options["cpus"],
        "zone": options["zone"],
        "least_nodes": options["nodes"][0],
        "most_nodes": options["nodes"][1],
        "ckpt": options["ckpt"],
        "ckpt_mode": options["ckpt_mode"],
        "ckpt_every": options["ckpt_every"],
        "ckpt_to": [name for name in (options["ckpt_to"] or "").split(",") if name],
        "replicas": options["replicas"],
        "grace_s": options["grace"],
        "retries": options["retries"],
        "retry_on": list(options["retry_on"]),
        "deadline_unix": options["deadline"],
        "array": list(options["array"][0]) if options["array"] else [],
        "array_limit": options["array"][1] if options["array"] else 0,
        "on_partition": options["on_partition"],
        "max_time_s": options["max_time"],
        "priority": options["priority"],
        "after": list(options["after"]),
        "home": options["home"],
    }


def submit_job(daemon: Client, command: tuple[str, ...], options: dict[str, Any], **more: Any) -> dict[str, Any]:
    order = {**make_order(command, options), **more}
    with patience("packing the working directory and copying it to other nodes"):
        answer: dict[str, Any] = daemon.post("/v1/jobs", order, timeout_s=600)
    if answer["warning"]:
        click.echo(f"mesh: {answer['warning']}", err=True)
    return answer


@click.command(context_settings={"ignore_unknown_options": False})
@job_options
@click.option("--out", metavar="DIR", help="Bring the job's published files to DIR when it is over.")
@json_option
@click.pass_context
def submit(ctx: click.Context, /, command: tuple[str, ...], out: str | None, as_json: bool, **options: Any) -> None:
    """Submit COMMAND to the mesh. Prints the job's id; the rest goes to standard error."""
    home = {"out": str(Path(out).resolve())} if out is not None else {}
    answer = submit_job(client(ctx), command, options, **home)
    if as_json:
        print_json(answer)
        return
    click.echo(answer["job"])
    short = answer["job"][:8]
    size = f" with {answer['workdir_bytes'] / 2**20:.1f} MiB of files" if answer["workdir_bytes"] else ""
    what = f"submitted {len(answer['jobs'])} jobs" if options["array"] else "submitted"
    click.echo(
        f"{what}{size}; {answer['witnesses']} nodes keep {'each' if options['array'] else 'its'} record. Next:",
        err=True,
    )
    if options["array"]:
        first = f"{short}_{options['array'][0][0]}"
        for line in (f"mesh ps {short}", f"mesh logs -f {first}", f"mesh wait {short}", f"mesh cancel {short}"):
            click.echo(f"  {line}", err=True)
        return
    for line in (f"mesh logs -f {short}", f"mesh why {short}", f"mesh cancel {short}"):
        click.echo(f"  {line}", err=True)


@click.command()
@job_options
@click.option("--out", metavar="DIR", help="Fetch the job's published files into DIR when it is done.")
@click.pass_context
def run(ctx: click.Context, /, command: tuple[str, ...], out: str | None, **options: Any) -> None:
    """Run COMMAND on the mesh and follow its output. Ctrl-C once: leave it running; twice: cancel it."""
    if options["array"]:
        raise click.UsageError("an array has many outputs to follow: use `mesh submit --array`, then `mesh logs`")
    daemon = client(ctx)
    job = submit_job(daemon, command, options)["job"]
    click.echo(f"job {job[:8]} submitted", err=True)
    try:
        with _images(daemon, job, options):
            follow_log(daemon, job)
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


def _images(daemon: Client, job: str, options: dict[str, Any]) -> AbstractContextManager[None]:
    """Tells how far the job's image is, if it has one."""
    if options["image"] is None:
        return nullcontext()
    from mesh.cli.image import arriving

    return arriving(daemon, job)


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


def follow_log(
    daemon: Client, job: str, tell: Callable[[str], None] = lambda words: click.echo(f"mesh: {words}", err=True)
) -> None:
    """Output to stdout; moves and waits to stderr."""
    told = ""
    while True:
        for piece in daemon.stream(f"/v1/jobs/{job}/log?follow=1"):
            sys.stdout.buffer.write(piece)
            sys.stdout.buffer.flush()
        state = daemon.get(f"/v1/jobs/{job}")["job"]
        words = f"{state['state']}: {state['detail']}" if state["detail"] else state["state"]
        if words != told:
            tell(words)
            told = words
        if state["state"] in OVER:
            return
        time.sleep(POLL_S)


@click.command()
@click.argument("job", required=False)
@click.option("-a", "--all", "everything", is_flag=True, help="Ended jobs too.")
@json_option
@click.pass_context
def ps(ctx: click.Context, job: str | None, everything: bool, as_json: bool) -> None:
    """List jobs, as this node knows them; or only JOB, or the jobs of an array, ended or not."""
    answer = client(ctx).get("/v1/jobs" + (f"?fits={quote(job)}" if job else ""))
    shown = [row for row in answer["jobs"] if everything or job or row["state"] not in OVER]
    if as_json:
        print_json({**answer, "jobs": shown})
        return
    rows = []
    for row in shown:
        progress = "-"
        if row["step"] is not None:
            progress = f"{row['step']}/{row['of']}" if row["of"] else str(row["step"])
        kept = "-"
        if row["checkpoint"] is not None:
            kept = f"{ago(row['checkpoint']['created_unix_ms'])} ago on {len(row['checkpoint']['holders'])}"
        array = row["array"]
        rows.append(
            [
                row["job"][:8] if array is None else f"{array['array'][:8]}_{array['index']}",
                row["name"] or "-",
                row["user"],
                row["state"],
                (row["node"] or "-") + (f" +{len(row['mates'])}" if row["mates"] else ""),
                str(max(0, len(row["attempts"]) - 1)),
                progress,
                kept,
                lasting(row["at_risk_s"]) if row["at_risk_s"] else "-",
                row["detail"] or row["command"],
            ]
        )
    table(["JOB", "NAME", "USER", "STATE", "NODE", "MOVES", "STEP", "CHECKPOINT", "AT RISK", "COMMAND"], rows)


@click.command()
@click.argument("job")
@click.option("-f", "--follow", is_flag=True, help="Go on until the job ends.")
@click.pass_context
def logs(ctx: click.Context, job: str, follow: bool) -> None:
    """Show a job's output, over all its attempts, wherever it ran."""
    daemon = client(ctx)
    if follow:
        follow_log(daemon, daemon.get(job_path(job))["job"]["job"])
        return
    for piece in daemon.stream(f"{job_path(job)}/log"):
        sys.stdout.buffer.write(piece)
    sys.stdout.buffer.flush()


@click.command()
@click.argument("job")
@click.pass_context
def cancel(ctx: click.Context, job: str) -> None:
    """End a job, or all jobs of an array. What it has published or saved so far stays readable."""
    daemon = client(ctx)
    rows = daemon.post(f"{job_path(job)}/cancel")["jobs"]
    asked = {row["job"] for row in rows if not row["already"]}
    if not asked:
        for row in rows:
            click.echo(f"job {row['job'][:8]} is {row['state']} already")
        return
    deadline = time.monotonic() + CANCEL_S
    left = asked
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        states = {row["job"]: row["state"] for row in daemon.get(f"/v1/jobs?fits={quote(job)}")["jobs"]}
        left = {asked_for for asked_for in asked if states.get(asked_for) not in OVER}
    for ended in sorted(asked - left):
        click.echo(f"job {ended[:8]} cancelled")
    for still in sorted(left):
        click.echo(f"job {still[:8]} is asked to end; it will when a majority of its witnesses can be reached")


@click.command()
@click.argument("jobs", nargs=-1, required=True)
@click.option("--timeout", type=DURATION, help="Give up after this long (exit 124); the jobs go on.")
@json_option
@click.pass_context
def wait(ctx: click.Context, jobs: tuple[str, ...], timeout: float | None, as_json: bool) -> None:
    """Wait until all JOBS, or arrays, are over. Exits with the code of the first that did not end well."""
    daemon = client(ctx)

    def look() -> list[dict[str, Any]]:
        return [state for job in jobs for state in daemon.get(f"/v1/jobs?fits={quote(job)}")["jobs"]]

    states = look()
    deadline = time.monotonic() + (timeout if timeout is not None else float("inf"))
    with patience(f"waiting for {len(states)} job{'' if len(states) == 1 else 's'}"):
        while any(state["outcome"] is None for state in states) and time.monotonic() < deadline:
            time.sleep(min(POLL_S, max(0.0, deadline - time.monotonic())))
            states = look()
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
    if plan["locked_out"]:
        where += f" (which nobody could open now: {plan['locked_out']})"
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
@click.option("-w", "--watch", is_flag=True, help="Go on until the job is over, or Ctrl-C.")
@json_option
@click.pass_context
def events(ctx: click.Context, job: str | None, watch: bool, as_json: bool) -> None:
    """What happened to JOB, by the signed word of each node that had a part in it; or what this node saw, of any job."""
    daemon, seen, unheard = client(ctx), set(), 0
    path = "/v1/events" + (f"?job={quote(job)}" if job else "")
    while True:
        answer = daemon.get(path)
        if as_json and not watch:
            print_json(answer)
            return
        fresh = [event for event in answer["events"] if (event["node"], event["job"], event["seq"]) not in seen]
        seen |= {(event["node"], event["job"], event["seq"]) for event in fresh}
        for event in fresh:
            click.echo(json.dumps(event) if as_json else _event_line(event))
        if not watch or (job and any(event["kind"] == "end" for event in answer["events"])):
            return
        # Whoever ended it may be gone, and its last word with it.
        unheard += bool(job and daemon.get(job_path(job))["job"]["outcome"])
        if unheard > UNHEARD_LOOKS:
            return
        time.sleep(WATCH_S)


def _event_line(event: dict[str, Any]) -> str:
    at = time.strftime("%H:%M:%S", time.localtime(event["unix_ms"] / 1000))
    gap = "  (what it said before this is missing)" if event.get("gap") else ""
    return f"{at}  {event['actor']:<12} {(event['job'] or '-')[:8]:<8}  {event['text']}{gap}"

"""`mesh run`, `submit`, `ps`, `logs`, `cancel`, `pull`, `events`: what a user does with jobs."""

import json
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import click

from mesh.amount import amount, part
from mesh.api.errors import ExitCode, MeshError
from mesh.cli.jobfile import JobCommand, job_file, printed_file
from mesh.cli.listing import listing, show
from mesh.cli.names import JOB, NODE
from mesh.cli.order import job_options, make_order
from mesh.cli.telling import patience, telling
from mesh.cli.terminal import (
    DURATION,
    ago,
    client,
    job_path,
    json_option,
    print_json,
    quote,
    table,
)
from mesh.client import Client
from mesh.duration import lasting
from mesh.words import doing, saving_words

OVER = {"done", "failed", "cancelled"}
POLL_S = 0.3
WATCH_S = 0.5
UNHEARD_LOOKS = 10  # at the events of a job that is over, for the word of whoever ended it
CANCEL_S = 15.0
ARRIVING_S = 2.0  # between two looks at how far files are; ours
MOVE_S = 90.0  # the usual grace, a restore, and some


def submit_job(daemon: Client, command: tuple[str, ...], options: dict[str, Any], **more: Any) -> dict[str, Any]:
    order = {**make_order(command, options), **more}
    with packing(daemon):
        answer: dict[str, Any] = daemon.post("/v1/jobs", order, timeout_s=600)
    if answer["warning"]:
        click.echo(f"mesh: {answer['warning']}", err=True)
    return answer


@click.command(cls=JobCommand)
@job_file
@job_options
@click.option("--out", metavar="DIR", help="Bring the job's published files to DIR when it is over.")
@json_option
@click.pass_context
def submit(
    ctx: click.Context, /, command: tuple[str, ...], out: str | None, as_json: bool, print_file: bool, **options: Any
) -> None:
    """Submit COMMAND to the mesh. Prints the job's id; the rest goes to standard error."""
    if print_file:
        click.echo(printed_file(ctx), nl=False)
        return
    home = {"out": str(Path(out).resolve())} if out is not None else {}
    answer = submit_job(client(ctx), command, options, **home)
    if as_json:
        print_json(answer)
        return
    click.echo(answer["job"])
    short = answer["job"][:8]
    size = f" with {amount(answer['workdir_bytes'])} of files" if answer["workdir_bytes"] else ""
    what = f"submitted {len(answer['jobs'])} jobs" if options["array"] else "submitted"
    who = f"{answer['witnesses']} nodes keep" if answer["witnesses"] != 1 else "one node keeps"
    click.echo(f"{what}{size}; {who} {'each' if options['array'] else 'its'} record. Next:", err=True)
    if options["array"]:
        first = f"{short}_{options['array'][0][0]}"
        for line in (f"mesh ps {short}", f"mesh logs -f {first}", f"mesh wait {short}", f"mesh cancel {short}"):
            click.echo(f"  {line}", err=True)
        return
    for line in (f"mesh logs -f {short}", f"mesh why {short}", f"mesh cancel {short}"):
        click.echo(f"  {line}", err=True)


@click.command(cls=JobCommand)
@job_file
@job_options
@click.option("--out", metavar="DIR", help="Fetch the job's published files into DIR when it is done.")
@click.pass_context
def run(ctx: click.Context, /, command: tuple[str, ...], out: str | None, print_file: bool, **options: Any) -> None:
    """Run COMMAND on the mesh and follow its output. Ctrl-C once: leave it running; twice: cancel it."""
    if print_file:
        click.echo(printed_file(ctx), nl=False)
        return
    if options["array"]:
        raise click.UsageError("an array has many outputs to follow: use `mesh submit --array`, then `mesh logs`")
    daemon = client(ctx)
    job = submit_job(daemon, command, options)["job"]
    click.echo(f"job {job[:8]} submitted", err=True)
    try:
        with under_way(daemon, job):
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
        click.echo(f"{_files(answer)} in {answer['destination']}", err=True)
    ctx.exit(exit_code(state))


def _files(answer: dict[str, Any]) -> str:
    return f"{answer['files']} file{'' if answer['files'] == 1 else 's'}"


def packing(daemon: Client) -> AbstractContextManager[None]:
    """Tells how far the working directory is that is being submitted."""
    begun = time.monotonic()

    def look() -> str:
        passed_s = time.monotonic() - begun
        try:
            rows = daemon.get("/v1/transfers")["transfers"]
        except MeshError:
            rows = []
        copies = [
            f"{part(row['sent'], row['bytes'])} to {row['to']}"
            for row in rows
            if row["kind"] == "workdir" and row["bytes"] and row["seconds"] <= passed_s
        ]
        if copies:
            return f"copying the working directory to other nodes: {', '.join(copies)}"
        return f"packing the working directory ... {passed_s:.0f} s"

    return telling(look, ARRIVING_S)


def under_way(daemon: Client, job: str) -> AbstractContextManager[None]:
    """Tells how far it is with what the job waits for: its image, its files, its checkpoint before it starts; what it has saved
    when it ends or has to leave."""

    def look() -> str:
        try:
            state = daemon.get(f"/v1/jobs/{job}")["job"]
        except MeshError:
            return ""
        if state["state"] == "starting" and state["detail"].startswith("preparing:"):
            return str(state["detail"])
        return "" if state["state"] == "running" else saving_words(state["saving"])

    return telling(look, ARRIVING_S)


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
@click.argument("job", type=JOB, required=False)
@click.option("-a", "--all", "everything", is_flag=True, help="Ended jobs too, but for those that are put away.")
@click.option(
    "--since", type=DURATION, help="Ended jobs too: all that this node remembers and that ended so lately (30d)."
)
@listing
@click.pass_context
def ps(ctx: click.Context, /, job: str | None, everything: bool, since: float | None, **form: bool) -> None:
    """List jobs, as this node knows them; or only JOB, or the jobs of an array, ended or not.

    What is over for a day is put away when there are over a thousand such jobs. By its id or name it is found all the same.
    """
    daemon = client(ctx)
    path = f"/v1/jobs?over={'true' if everything or job or since else 'false'}"
    path += f"&fits={quote(job)}" if job else ""
    path += f"&since_s={since:.3f}" if since else ""

    def draw(answer: dict[str, Any]) -> None:
        _draw_jobs(answer)
        if everything and not since and answer["put_away"]:
            click.echo(f"and {answer['put_away']} that were over before: `mesh ps --since 30d`", err=True)

    show(form, lambda: daemon.get(path), lambda answer: [row["job"] for row in answer["jobs"]], draw)


def _draw_jobs(answer: dict[str, Any]) -> None:
    rows = []
    for row in answer["jobs"]:
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
                str(row["attempts"][-1]["number"] if row["attempts"] else 0),
                progress,
                kept,
                lasting(row["at_risk_s"]) if row["at_risk_s"] else "-",
                doing(row["detail"], row["saving"]) or row["command"],
            ]
        )
    header = ["JOB", "NAME", "USER", "STATE", "NODE", "MOVES", "STEP", "CHECKPOINT", "AT RISK", "COMMAND"]
    table(header, rows, spare=["MOVES", "USER", "STEP", "CHECKPOINT", "NODE"])


@click.command()
@click.argument("job", type=JOB)
@click.option("-f", "--follow", is_flag=True, help="Go on until the job, or that attempt, ends.")
@click.option(
    "--attempt", type=click.IntRange(0, 2**31 - 1), metavar="N", help="Of that attempt only (`mesh describe`)."
)
@click.pass_context
def logs(ctx: click.Context, job: str, follow: bool, attempt: int | None) -> None:
    """Show a job's output, over all its attempts, wherever it ran."""
    daemon = client(ctx)
    if follow and attempt is None:
        whole = daemon.get(job_path(job))["job"]["job"]
        with under_way(daemon, whole):
            follow_log(daemon, whole)
        return
    asked = "?" + "&".join(["follow=1"] * follow + [f"attempt={attempt}"] * (attempt is not None))
    for piece in daemon.stream(f"{job_path(job)}/log{asked.removesuffix('?')}"):
        sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()


@click.command()
@click.argument("job", type=JOB)
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
@click.argument("jobs", type=JOB, nargs=-1, required=True)
@click.option("--timeout", type=DURATION, help="Give up after this long (exit 124); the jobs go on.")
@json_option
@click.pass_context
def wait(ctx: click.Context, jobs: tuple[str, ...], timeout: float | None, as_json: bool) -> None:
    """Wait until all JOBS, or arrays, are over. Exits with the code of the first that did not end well."""
    daemon = client(ctx)
    for job in jobs:
        job_path(job)  # an empty one would fit all

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
@click.argument("job", type=JOB)
@click.option("--to", type=NODE, metavar="NODE", default="", help="Where to; without it, the best other node.")
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
@click.argument("job", type=JOB)
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
@click.argument("job", type=JOB)
@click.argument("directory", type=click.Path(file_okay=False))
@json_option
@click.pass_context
def pull(ctx: click.Context, job: str, directory: str, as_json: bool) -> None:
    """Fetch what a finished JOB published ($MESH_OUT_DIR) into DIRECTORY."""
    answer = _pull(client(ctx), job_path(job), directory)
    if as_json:
        print_json(answer)
        return
    click.echo(f"{_files(answer)}, {amount(answer['bytes'])} in {answer['destination']}")


def _pull(daemon: Client, path: str, directory: str) -> dict[str, Any]:
    with patience("fetching its files"):
        answer: dict[str, Any] = daemon.post(
            f"{path}/pull", {"destination": str(Path(directory).resolve())}, timeout_s=3600
        )
    return answer


@click.command()
@click.argument("job", type=JOB, required=False)
@click.option("-w", "--watch", is_flag=True, help="Go on until the job is over, or Ctrl-C.")
@click.option("--audit", is_flag=True, help="Of this node itself: who ordered what, whom it refused, its owner.")
@json_option
@click.pass_context
def events(ctx: click.Context, job: str | None, watch: bool, audit: bool, as_json: bool) -> None:
    """What happened to JOB, by the signed word of each node that had a part in it; or what this node saw, of any job."""
    daemon, seen, unheard = client(ctx), set(), 0
    if job and audit:
        raise click.UsageError("--audit is about this node, not about a job: choose one")
    path = "/v1/events" + (f"?job={quote(job)}" if job else "?audit=true" if audit else "")
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
    form = "%H:%M:%S" if event["job"] else "%Y-%m-%d %H:%M:%S"
    at = time.strftime(form, time.localtime(event["unix_ms"] / 1000))
    gap = "  (what it said before this is missing)" if event.get("gap") else ""
    return f"{at}  {event['actor']:<12} {(event['job'] or '-')[:8]:<8}  {event['text']}{gap}"

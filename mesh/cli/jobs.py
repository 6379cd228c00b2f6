"""`mesh run`, `submit`, `ps`, `logs`, `wait`, `cancel`, and `mesh job migrate`, `events` and `recover`."""

import json
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import click

from mesh.api.client import Client
from mesh.cli.job_file import JobCommand, job_file, printed_file
from mesh.cli.job_options import job_options, make_order
from mesh.cli.listing import listing, show
from mesh.cli.names import JOB, NODE
from mesh.cli.output import Output, confirm, leave_or_stop, print_json, print_text, say, table, to_copy
from mesh.cli.progress import progress, report, waiting_for
from mesh.cli.terminal import DURATION, ago, client, input_waits, job_path, json_option, quote
from mesh.model.bounds import MAX_NODES
from mesh.util.byte_text import amount, part
from mesh.util.duration import lasting, parse_duration
from mesh.util.errors import ExitCode, MeshError
from mesh.util.text import OVER, doing, plural, saving_words, short_id, state_text, waiting_text

_BEFORE = ("pending", "starting", "running", "suspended", "vacating", "saving", "releasing", "frozen", "stranded")
STATES = (*_BEFORE, "cancelling", "ending", *sorted(OVER))
SPAN = re.compile(r"_[0-9]+-[0-9]+$")  # several jobs of an array
WAITING = {"pending", "frozen", "stranded"}
POLL_S = 0.3
WATCH_S = 0.5
LAST_LOOKS = 10  # at the events of an ended job, for the last event of the node that ended it
TAIL_BYTES, TAIL_LINE_BYTES = 64 << 20, 1 << 20  # of `--tail`, which keeps them in memory (own choice)
CANCEL_S = 15.0
PROGRESS_S = 2.0  # between two reports of a transfer (own choice)
DELIVERY_S = 60.0  # after the end; failed tries take half a minute until the daemon reports them (`mesh job events`)
MOVE_S = 90.0  # the usual grace, a restore, and a margin

raw_option = click.option(
    "--raw", is_flag=True, help="Print the output to a terminal as it is, with all that controls the terminal."
)


def submit_job(daemon: Client, command: tuple[str, ...], options: dict[str, Any], **more: Any) -> dict[str, Any]:
    if options["build"]:
        if options["image"]:
            raise click.UsageError("--build makes the image: leave out --image")
        from mesh.cli.image_build import built

        options = {**options, "image": built(daemon, Path(options["build"]))}
    if options["conda"] and not options["no_workdir"]:
        from mesh.cli.conda_lock import locked

        options = {**options, "conda": locked(Path(options["workdir"]), options["conda"])}
    order = {**make_order(command, options), **more}
    try:
        with packing_progress(daemon):
            answer: dict[str, Any] = daemon.post("/v1/jobs", order, timeout_s=600)
    except KeyboardInterrupt:
        say(err=True)
        say("mesh: the job may have been submitted: `mesh ps` lists it, `mesh cancel` ends it", err=True)
        raise
    if answer["warning"]:
        say(f"mesh: {answer['warning']}", err=True)
    return answer


@click.command(cls=JobCommand)
@job_file
@job_options
@click.option("--out", metavar="DIR", help="Write the job's published files to DIR when it has ended.")
@json_option
@click.pass_context
def submit(
    ctx: click.Context, /, command: tuple[str, ...], out: str | None, as_json: bool, print_file: bool, **options: Any
) -> None:
    """Submit COMMAND to the mesh and print the job's id."""
    if print_file:
        print_text(printed_file(ctx))
        return
    more = {"out": str(Path(out).resolve())} if out is not None else {}
    answer = submit_job(client(ctx), command, options, **more)
    if as_json:
        print_json(answer)
        return
    say(answer["job"])
    short = answer["job"][:8]
    size = f" with {amount(answer['workdir_bytes'])} of files" if answer["workdir_bytes"] else ""
    what = f"submitted {plural(len(answer['jobs']), 'job')}" if options["array"] else "submitted"
    keep = f"{plural(answer['witnesses'], 'node')} keep{'s' if answer['witnesses'] == 1 else ''}"
    say(f"{what}{size}; {keep} {'each' if options['array'] else 'its'} record. Next:", err=True)
    follow = f"{short}_{options['array'][0][0]}" if options["array"] else short
    show_state = (f"mesh ps {short}", f"mesh wait {short}") if options["array"] else (f"mesh why {short}",)
    for line in (f"mesh logs -f {follow}", *show_state, f"mesh cancel {short}"):
        say(f"  {to_copy(line)}", err=True)


@click.command(cls=JobCommand)
@job_file
@job_options
@click.option("--out", metavar="DIR", help="Write the job's published files to DIR when it has ended.")
@raw_option
@click.pass_context
def run(
    ctx: click.Context, /, command: tuple[str, ...], out: str | None, raw: bool, print_file: bool, **options: Any
) -> None:
    """Run COMMAND on the mesh, follow its output and exit with its exit code.

    Ctrl-C leaves it running, and twice cancels it; the exit code is then 130.

    As with `docker run`, exit code 125 means that mesh failed or the job ended without an exit code, 126 that COMMAND cannot be
    executed, and 127 that it was not found.
    """
    if print_file:
        print_text(printed_file(ctx))
        return
    if options["array"]:
        raise click.UsageError("an array has several outputs: use `mesh submit --array`, then `mesh logs`")
    daemon = client(ctx)
    job = submit_job(daemon, command, options)["job"]
    say(f"job {job[:8]} submitted", err=True)
    if input_waits():
        say("mesh: a job has no standard input: put what it reads into a file, or use `mesh exec`", err=True)
    try:
        with job_progress(daemon, job):
            follow_log(daemon, job, raw=raw)
    except KeyboardInterrupt:
        told = f"the job goes on: `mesh logs -f {job[:8]}` follows it again. Press Ctrl-C once more to cancel it."
        leave_or_stop(told, lambda: daemon.post(f"/v1/jobs/{job}/cancel"), "cancelled")
        ctx.exit(int(ExitCode.INTERRUPTED))
    except BrokenPipeError:
        goes_on(job[:8])
        raise
    state = daemon.get(f"/v1/jobs/{job}")["job"]
    if out is not None and state["outcome"] is not None:
        with waiting_for("fetching its files"):
            answer = daemon.post(f"/v1/jobs/{job}/pull", {"destination": str(Path(out).resolve())}, timeout_s=3600)
        say(f"{plural(answer['files'], 'file')} in {answer['destination']}", err=True)
    if options["cache"]:
        with waiting_for("adding to its caches"):
            late = _undelivered(daemon, [state], time.monotonic() + DELIVERY_S)
        for row in late:
            say(f"mesh: {_late(row)}", err=True)
    ctx.exit(exit_code(state))


def goes_on(job: str) -> None:
    """Say how to follow a job again whose output nobody reads any more."""
    say(f"mesh: the job goes on: `mesh logs -f {job}` follows it again, `mesh wait {job}` tells how it ends", err=True)


def packing_progress(daemon: Client) -> AbstractContextManager[None]:
    """Report how far the working directory of a submission is."""
    begun = time.monotonic()

    def read() -> str:
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

    return progress(read, PROGRESS_S)


def job_progress(daemon: Client, job: str) -> AbstractContextManager[None]:
    """Report what a job waits for: a node, its image, files or checkpoint before it starts; what it saves at its end."""
    hinted = ""

    def read() -> str:
        nonlocal hinted
        try:
            state = daemon.get(f"/v1/jobs/{job}")["job"]
        except MeshError:
            return ""
        if state["state"] == "starting" and state["detail"].startswith("preparing:"):
            return str(state["detail"])
        if state["state"] in WAITING:
            words = waiting_text(state)
            hinted = hinted or words
            return f"{words} (`mesh why {job[:8]}` says more)" if words == hinted else words
        return "" if state["state"] == "running" else saving_words(state["saving"])

    return progress(read, PROGRESS_S)


class Since(click.ParamType[int]):
    """A time in the past: `10m` ago, or a date with or without a time; converted to Unix milliseconds."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        from datetime import datetime

        with suppress(ValueError):
            return max(0, int(1000 * (time.time() - parse_duration(value))))
        try:
            return max(0, int(1000 * datetime.fromisoformat(value).timestamp()))
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is neither a duration (10m) nor a time (2026-12-01T08:00)", param, ctx)


def exit_code(state: dict[str, Any]) -> int:
    """Return the exit code of `run`: the job's own, or 125 if it has none (cancelled, never started, out of time)."""
    outcome = state["outcome"]
    if outcome is not None and outcome["kind"] == "done":
        return 0
    code = outcome["exit_code"] if outcome is not None and outcome["kind"] == "failed" else None
    return int(code or ExitCode.NO_EXIT_CODE)


def follow_log(
    daemon: Client,
    job: str,
    show: Callable[[str], None] = report,
    query: str = "",
    skip: int = 0,
    raw: bool = False,
) -> None:
    """Copy a job's output after `skip` bytes to standard output until it ends; pass its moves and waits to `show`."""
    shown = ""
    while True:
        open_line = _print_output(daemon.stream(f"/v1/jobs/{job}/log?follow=1{query}"), skip, raw)
        state = daemon.get(f"/v1/jobs/{job}")["job"]
        text = state_text(state)
        if text != shown:
            if open_line and sys.stdout.isatty():
                say()
            show(text)
            shown = text
        if state["state"] in OVER:
            return
        time.sleep(POLL_S)


@click.command()
@click.argument("job", type=JOB, required=False)
@click.option("-a", "--all", "everything", is_flag=True, help="Also list ended jobs, except archived ones.")
@click.option("--since", type=DURATION, help="Also list all jobs that ended within this time (30d), archived ones too.")
@click.option("--user", help="Only jobs of this user.")
@click.option(
    "--state", "states", multiple=True, type=click.Choice(STATES), help="Only jobs in this state. Repeatable."
)
@listing
@click.pass_context
def ps(
    ctx: click.Context,
    /,
    job: str | None,
    everything: bool,
    since: float | None,
    user: str | None,
    states: tuple[str, ...],
    **form: bool,
) -> None:
    """List jobs that this node knows; or JOB, or the jobs of an array, or some (ARRAY_16-30), ended or not.

    Jobs of an array that wait in a row are one line, with the details of the first; --json and -q list each. Jobs that ended more
    than a day ago are archived once there are over a thousand. Every command finds them by id or name.
    """
    daemon = client(ctx)
    over = everything or job or since or OVER & {*states}
    path = f"/v1/jobs?over={'true' if over else 'false'}"
    path += f"&fits={quote(job)}" if job else ""
    path += f"&since_s={since:.3f}" if since else ""

    def ask() -> dict[str, Any]:
        answer = daemon.get(path)
        rows = [
            row
            for row in answer["jobs"]
            if (user is None or row["user"] == user) and (not states or row["state"] in states)
        ]
        return {**answer, "jobs": rows}

    def draw(answer: dict[str, Any]) -> None:
        _draw_jobs(answer)
        if everything and not since and answer["archived"]:
            say(f"and {plural(answer['archived'], 'archived job')}: `mesh ps --since 30d`", err=True)

    show(form, ask, lambda answer: [row["job"] for row in answer["jobs"]], draw)


def moves(attempts: list[dict[str, Any]]) -> int:
    """Return how often a job has moved. Attempts that never ran do not count; only the last ones are listed."""
    return max(0, attempts[-1]["number"] - sum(not one["running_unix_ms"] for one in attempts)) if attempts else 0


def _draw_jobs(answer: dict[str, Any]) -> None:
    rows = []
    for row, label in _folded(answer["jobs"]):
        progress = "-"
        if row["step"] is not None:
            progress = f"{row['step']}/{row['of']}" if row["of"] else str(row["step"])
        kept = "-"
        if row["checkpoint"] is not None:
            last = row["checkpoint"]
            kept = f"{ago(last['created_unix_ms'])} ago on {len(last['holders'])}" + (
                " (at risk)" if last["at_risk"] else ""
            )
        node = row["node"] or (row["attempts"][-1]["node"] if row["outcome"] and row["attempts"] else "-")
        rows.append(
            [
                label,
                row["name"] or "-",
                row["user"],
                row["state"],
                lasting(_time_s(row)),
                node + (f" +{len(row['gang'])}" if row["gang"] else ""),
                str(moves(row["attempts"])),
                progress,
                kept,
                lasting(row["at_risk_s"]) if row["at_risk_s"] else "-",
                row["command"],
                doing(row["detail"], row["saving"]),
            ]
        )
    header = [
        "JOB",
        "NAME",
        "USER",
        "STATE",
        "TIME",
        "NODE",
        "MOVES",
        "STEP",
        "CHECKPOINT",
        "AT RISK",
        "COMMAND",
        "DETAIL",
    ]
    if not any(row[-1] for row in rows):
        header, rows = header[:-1], [row[:-1] for row in rows]
    spare = ["MOVES", "USER", "STEP", "CHECKPOINT", "NODE", "TIME", "AT RISK", "COMMAND", "NAME"]
    table(header, rows, spare=[name for name in spare if name != header[-1]], cut={"COMMAND": 24, "NAME": 20})


def _folded(jobs: Iterable[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield each job with its short id; of jobs of an array that wait in a row, the first, with a span that names all."""
    spans: list[list[dict[str, Any]]] = []
    for job in jobs:
        if spans and _waits(job) and _waits(spans[-1][0]) and _follows(spans[-1][-1]["array"], job["array"]):
            spans[-1].append(job)
        else:
            spans.append([job])
    for first, *others in spans:
        label = short_id(first)
        if others:
            last = others[-1]["array"]
            label = f"{label.partition('_')[0]}_{first['array']['index']}-{last['index'] + last['batch'] - 1}"
        yield first, label


def _waits(job: dict[str, Any]) -> bool:
    return job["array"] is not None and job["state"] == "pending" and not job["attempts"]


def _follows(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Tell whether the second place in an array is the one after the first."""
    return bool(one["array"] == other["array"] and one["index"] + one["batch"] == other["index"])


def _time_s(row: dict[str, Any]) -> float:
    """Return how long a job has run, over all attempts that are listed; of one that has not, its age."""
    now_ms, ran_ms = time.time() * 1000, 0.0
    for attempt in row["attempts"]:
        if attempt["running_unix_ms"]:
            end_ms = attempt["ended_unix_ms"] or (now_ms if row["node"] else attempt["seen_unix_ms"])
            ran_ms += max(0, end_ms - attempt["running_unix_ms"])
    waits = not ran_ms and row["outcome"] is None
    return max(0.0, now_ms - row["created_unix_ms"] if waits else ran_ms) / 1000


@click.command()
@click.argument("job", type=JOB)
@click.option("-f", "--follow", is_flag=True, help="Follow the output until the job, or that attempt, ends.")
@click.option("--attempt", type=click.IntRange(0, 2**31 - 1), metavar="N", help="Only attempt N (`mesh describe`).")
@click.option(
    "--rank",
    type=click.IntRange(0, MAX_NODES - 1),
    metavar="N",
    help="The output of rank N of a job on several nodes, instead of rank 0.",
)
@click.option("-n", "--tail", type=click.IntRange(min=0), metavar="N", help="Only the last N lines so far.")
@click.option(
    "--since",
    type=Since(),
    help="Only lines printed from this time on: 10m ago, or 2026-12-01T08:00 (local time, unless it names a zone).",
)
@click.option("-t", "--timestamps", is_flag=True, help="Put the time (UTC) before each line, to within a second.")
@raw_option
@click.pass_context
def logs(
    ctx: click.Context,
    job: str,
    follow: bool,
    attempt: int | None,
    rank: int | None,
    tail: int | None,
    since: int | None,
    timestamps: bool,
    raw: bool,
) -> None:
    """Show a job's output from all its attempts, wherever they ran."""
    daemon = client(ctx)
    chosen = {"attempt": attempt, "rank": rank, "since_unix_ms": since, "timestamps": "1" if timestamps else None}
    query = "".join(f"&{name}={value}" for name, value in chosen.items() if value is not None)
    path, shown = f"{job_path(job)}/log", 0
    if tail is not None:
        shown = _print_tail(daemon.stream(f"{path}?follow=0{query}"), tail, raw)
        if not follow:
            return
    if follow and attempt is None:
        whole = daemon.get(job_path(job))["job"]["job"]
        with job_progress(daemon, whole):
            follow_log(daemon, whole, query=query, skip=shown, raw=raw)
        return
    _print_output(daemon.stream(f"{path}?follow={int(follow)}{query}"), shown, raw)


def _print_tail(pieces: Iterator[bytes], count: int, raw: bool = False) -> int:
    """Print the last lines of an output, at most TAIL_BYTES; return how many bytes it has."""
    lines: deque[bytes] = deque()
    size, kept, rest = 0, 0, b""
    for piece in pieces:
        size += len(piece)
        *whole, rest = (rest + piece).split(b"\n")
        rest = rest[-TAIL_LINE_BYTES:]
        for line in whole:
            lines.append(line + b"\n")
            kept += len(line) + 1
            while len(lines) > count + 1 or kept > TAIL_BYTES:  # one more: the last one may still grow
                kept -= len(lines.popleft())
    lines.extend([rest] if rest else [])
    _print_output(iter([b"".join([*lines][-count:] if count else [])]), 0, raw)
    return size


def _print_output(pieces: Iterator[bytes], skip: int, raw: bool = False) -> bool:
    """Print the output after `skip` bytes; return whether its last line has no end."""
    output, last = Output(raw), b"\n"
    try:
        for piece in pieces:
            output.write(data := piece[skip:])
            last = data[-1:] or last
            skip = max(0, skip - len(piece))
    finally:
        output.close()
    return last != b"\n"


@click.command()
@click.argument("jobs", type=JOB, nargs=-1, required=True)
@json_option
@click.pass_context
def cancel(ctx: click.Context, jobs: tuple[str, ...], as_json: bool) -> None:
    """End JOBS, or all jobs of arrays, or some: ARRAY_7, ARRAY_16-30. What they have published or saved stays readable.

    Each is tried. Exits with 1 if a job has not ended yet, or with the code of the first that could not be cancelled.
    """
    daemon, answers, problems = client(ctx), [], []
    for path in [job_path(job) for job in jobs]:
        try:
            answers.append(daemon.post(f"{path}/cancel")["jobs"])
        except MeshError as error:
            if error.code == ExitCode.NO_DAEMON:
                raise
            problems.append(error)
    rows = {row["job"]: row for answer in answers for row in answer}
    deadline = time.monotonic() + CANCEL_S
    waiting = [answer for answer in answers if not all(row["already"] for row in answer)]
    while waiting and time.monotonic() < deadline:
        time.sleep(0.1)
        for state in _states(daemon, [_lasting_name("", answer) for answer in waiting]):
            if state["job"] in rows:
                rows[state["job"]]["state"] = state["state"]
        waiting = [answer for answer in waiting if not all(rows[row["job"]]["state"] in OVER for row in answer)]
    if as_json:
        print_json({"jobs": [*rows.values()]})
    else:
        for row in rows.values():
            say(f"job {short_id(row)} {_cancelled(row)}")
    for problem in problems:
        say(f"mesh: {problem}", err=True)
    if problems:
        ctx.exit(int(problems[0].code))
    if not all(row["already"] or row["state"] in OVER for row in rows.values()):
        ctx.exit(int(ExitCode.ERROR))


def _cancelled(row: dict[str, Any]) -> str:
    if row["already"]:
        return f"is {row['state']} already"
    if row["state"] == "cancelled":
        return "cancelled"
    if row["state"] in OVER:  # meanwhile, by itself
        return f"had ended already: {row['state']}"
    return f"will end when a majority of its witnesses can be reached: `mesh describe {short_id(row)}`"


def _states(daemon: Client, ids: list[str]) -> list[dict[str, Any]]:
    """Return the states of jobs, whole arrays and parts of them."""
    return [*{state["job"]: state for one in ids for state in daemon.get(f"/v1/jobs?fits={one}")["jobs"]}.values()]


def _lasting_name(text: str, group: list[dict[str, Any]]) -> str:
    """Return the id, with the indices that were asked for: a name may mean another job later."""
    if len(group) == 1:
        return str(group[0]["job"])
    indices = SPAN.search(text)
    return str(group[0]["array"]["array"]) + (indices[0] if indices and not group[0]["name"].startswith(text) else "")


@click.command()
@click.argument("jobs", type=JOB, nargs=-1, required=True)
@click.option("--timeout", type=DURATION, help="Stop waiting after this time (exit code 124); the jobs go on.")
@json_option
@click.pass_context
def wait(ctx: click.Context, jobs: tuple[str, ...], timeout: float | None, as_json: bool) -> None:
    """Wait until JOBS, or arrays, have ended; exit with the code of the first that did not succeed.

    Files that `submit --out DIR` asked this node for are in DIR then, and what they added to caches is in these.
    """
    daemon = client(ctx)
    for job in jobs:
        job_path(job)  # an empty name would fit all jobs
    groups = [daemon.get(f"/v1/jobs?fits={quote(job)}")["jobs"] for job in jobs]
    states = [state for group in groups for state in group]
    ids = [_lasting_name(job, group) for job, group in zip(jobs, groups, strict=True)]
    deadline = time.monotonic() + (timeout if timeout is not None else float("inf"))
    with waiting_for(f"waiting for {plural(len(states), 'job')}"):
        while any(state["outcome"] is None for state in states) and time.monotonic() < deadline:
            time.sleep(min(POLL_S, max(0.0, deadline - time.monotonic())))
            states = _states(daemon, ids)
        late = _undelivered(daemon, states, min(deadline, time.monotonic() + DELIVERY_S))
    if as_json:
        print_json({"jobs": states})
    else:
        for state in states:
            say(f"{short_id(state)} {state_text(state)}")
    if any(state["outcome"] is None for state in states):
        ctx.exit(int(ExitCode.TIMED_OUT))
    for row in late:
        say(f"mesh: {_late(row)}", err=True)
    ctx.exit(next((code for state in states if (code := exit_code(state))), int(ExitCode.ERROR) if late else 0))


def _undelivered(daemon: Client, states: list[dict[str, Any]], deadline: float) -> list[dict[str, Any]]:
    """Wait until this node has brought the files of ended jobs home; return what it could not bring by then."""
    ended = {state["job"] for state in states if state["outcome"] is not None}
    while True:
        rows = [row for row in daemon.get("/v1/deliveries")["deliveries"] if row["job"] in ended]
        if all(row["over"] for row in rows) or time.monotonic() >= deadline:
            return rows
        time.sleep(POLL_S)


def _late(row: dict[str, Any]) -> str:
    """Return why a job's files are not in their directory or caches, and what to do."""
    job, why = row["job"][:8], f": {row['problem']}" if row["problem"] else ""
    if row["caches"]:
        what = f"what job {job} has added to cache {', '.join(row['caches'])}"
        if row["over"]:
            return f"{what} was not written back{why}. `mesh data ls` lists what there is"
        return f"{what} is not written back yet{why}. It is tried again: `mesh job events {job}`"
    if row["over"]:
        return (
            f"the files of job {job} were not brought to {row['directory']}{why}. `mesh cp {job}:out/ DIR` copies them"
        )
    return f"the files of job {job} are not in {row['directory']} yet{why}. It is tried again: `mesh job events {job}`"


@click.command()
@click.argument("job", type=JOB)
@click.option("--to", type=NODE, metavar="NODE", default="", help="Destination (default: the best other node).")
@click.option("--force", is_flag=True, help="Also move a job without checkpoints, which starts over.")
@json_option
@click.pass_context
def migrate(ctx: click.Context, job: str, to: str, force: bool, as_json: bool) -> None:
    """Move a running JOB: it gets a notice, saves, and resumes on another node."""
    daemon = client(ctx)
    answer = daemon.post(f"{job_path(job)}/migrate", {"to": to, "force": force})
    with waiting_for("waiting for the job to save and resume"):
        state = _moved(daemon, answer)
    attempts, short = state["attempts"], short_id(state)
    if as_json:
        print_json({**answer, "moved": attempts[-1]["number"] > answer["attempt"], "state": state})
    elif state["outcome"] is not None:
        say(f"job {short} was {state['state']} before it moved")
    elif attempts[-1]["number"] > answer["attempt"]:
        resumed = attempts[-1]["resumed_step"]
        step = f" from step {resumed}" if resumed is not None else ""
        say(f"job {short} left {answer['from']} and runs on {attempts[-1]['node']}{step}")
    else:
        say(f"job {short} has a notice on {answer['from']}; next: `mesh job events {short}`")


def _moved(daemon: Client, answer: dict[str, Any]) -> dict[str, Any]:
    """Return the job's state once it runs elsewhere or has ended; at the latest a minute after its grace."""
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
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@json_option
@click.pass_context
def recover(ctx: click.Context, job: str, yes: bool, as_json: bool) -> None:
    """Recover a JOB that lost its quorum: most nodes that keep its record are gone for good.

    Without --yes, show what is known of it first. If the lost nodes return, what only they knew is discarded.
    """
    daemon, path = client(ctx), f"{job_path(job)}/recover"
    with waiting_for("asking the nodes for its record"):
        plan = daemon.post(path, {"go": False}, timeout_s=60)
    if not yes and as_json:
        print_json(plan)
        return
    if not yes:
        for line in _recovery(plan):
            say(line, err=True)
        confirm("recover it from there?", err=True)
    answer = daemon.post(path, {"go": True}, timeout_s=60)
    if as_json:
        print_json(answer)
        return
    say(f"job {answer['job'][:8]} recovered; its record is kept by {', '.join(answer['witnesses'])}")


def _recovery(plan: dict[str, Any]) -> tuple[str, str]:
    commit = plan["checkpoint"]
    start = "the beginning, because no checkpoint is known"
    if commit is not None:
        step = f" at step {commit['step']}" if commit["step"] is not None else ""
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(plan["checkpoint_unix_ms"] / 1000))
        start = f"checkpoint {commit['seq']}{step} of {when}"
    if plan["key_problem"]:
        start += f" (which no node can decrypt now: {plan['key_problem']})"
    return (
        f"nodes that keep its record and cannot be reached: {', '.join(plan['lost'])}; that can: "
        f"{', '.join(plan['kept'])}.",
        f"It would resume from {start}. The lost nodes may have committed a newer checkpoint: "
        "recovery forks the job's history here, and discards theirs if they return.",
    )


@click.command()
@click.argument("job", type=JOB, required=False)
@click.option("-w", "--watch", is_flag=True, help="Show new events until the job ends, or Ctrl-C.")
@click.option("--audit", is_flag=True, help="Show orders to this node, refusals and its owner's policy instead.")
@click.option("-n", "--tail", type=click.IntRange(min=0), metavar="N", help="Only the last N events so far.")
@click.option("--since", type=Since(), help="Only events from this time on: 10m ago, or 2026-12-01T08:00.")
@json_option
@click.pass_context
def events(
    ctx: click.Context, job: str | None, watch: bool, audit: bool, tail: int | None, since: int | None, as_json: bool
) -> None:
    """Show what happened to JOB, as signed by each node involved; without JOB, what this node saw of all jobs."""
    daemon, seen, looks = client(ctx), set(), 0
    if job and audit:
        raise click.UsageError("--audit is about this node: leave out JOB")
    job = daemon.get(job_path(job))["job"]["job"] if job and watch else job  # a name may mean another job later
    path = "/v1/events" + (f"?job={quote(job)}" if job else f"?audit={str(audit).lower()}&after=")
    last = 0
    while True:
        answer = daemon.get(path if job else f"{path}{last}")
        fresh = [event for event in answer["events"] if (event["node"], event["job"], event["seq"]) not in seen]
        chosen = [event for event in fresh if since is None or event["unix_ms"] >= since]
        if tail is not None:
            chosen, tail = chosen[max(0, len(chosen) - tail) :], None
        if as_json and not watch:
            print_json({**answer, "events": chosen})
            return
        seen |= {(event["node"], event["job"], event["seq"]) for event in fresh}
        last = max((event["id"] for event in fresh if not job), default=last)
        for event in chosen:
            say(json.dumps(event) if as_json else _event_line(event))
        if not watch or (job and any(event["kind"] == "end" for event in answer["events"])):
            return
        # The node that ended the job may be gone, and its last event with it.
        looks += bool(job and daemon.get(job_path(job))["job"]["outcome"])
        if looks > LAST_LOOKS:
            return
        time.sleep(WATCH_S)


def _event_line(event: dict[str, Any]) -> str:
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["unix_ms"] / 1000))
    gap = "  (earlier events of this node are missing)" if event.get("gap") else ""
    return f"{at}  {event['actor']:<12} {(event['job'] or '-')[:8]:<8}  {event['text']}{gap}"

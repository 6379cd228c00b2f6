"""`mesh describe`, `why` and `cp`: one job in detail."""

import shlex
import time
from pathlib import Path, PurePosixPath
from typing import Any

import click

from mesh.cli.asked import asked_words
from mesh.cli.listing import show_answer, watch_option
from mesh.cli.names import JOB
from mesh.cli.output import Output, print_json, quote_line, say, table
from mesh.cli.progress import waiting_for
from mesh.cli.terminal import SIZE, client, job_path, json_option, quote
from mesh.util.duration import lasting
from mesh.util.errors import ExitCode, MeshError
from mesh.util.text import HEEDS, OVER, WHY, job_text, plural, saving_words, standby_text, state_text


@click.command()
@click.argument("job", type=JOB)
@watch_option
@json_option
@click.pass_context
def describe(ctx: click.Context, job: str, watch: bool, as_json: bool) -> None:
    """Show one JOB in detail: its request, attempts, checkpoints and events."""
    daemon = client(ctx)
    show_answer(lambda: daemon.get(f"{job_path(job)}/describe"), _draw, watch, as_json)


def _draw(answer: dict[str, Any]) -> None:
    state, asked = answer["job"], answer["asked"]
    rows = [
        ("job", state["job"] + (f"  ({state['name']})" if state["name"] else "")),
        ("user", f"{state['user']}, from {state['submitter']}"),
        ("submitted", _clock(state["created_unix_ms"])),
        ("command", shlex.join(asked["argv"])),
        ("state", state_text(state)),
        ("GPUs", _gpus(state)),
        ("runs on", ", ".join([state["node"], *state["gang"]]) if state["node"] else "-"),
        ("record", f"kept by {', '.join(state['witnesses'])} (group {answer['group']})"),
        ("checkpoint", _checkpoint(state)),
        ("saving", saving_words(state["saving"]) or "-"),
        ("next", _next(state)),
        ("notice", HEEDS[state["heeds_notice"]]),
        ("at risk", lasting(state["at_risk_s"]) if state["at_risk_s"] else "-"),
        ("asks for", asked_words(asked)),
    ]
    for name, text in rows:
        (quote_line if name == "command" else say)(f"{name:<11} {text}")
    say()
    table(
        ["ATTEMPT", "NODE", "BEGAN", "RAN", "FROM STEP", "TO STEP", "ENDED"],
        [_attempt(row) for row in state["attempts"]],
        spare=["FROM STEP", "TO STEP"],
    )
    say()
    for event in answer["events"]:
        say(f"{_clock(event['unix_ms'])}  {event['actor']:<12} {event['text']}")


def _checkpoint(state: dict[str, Any]) -> str:
    kept = state["checkpoint"]
    if kept is None:
        return "-"
    step = f" at step {kept['step']}" if kept["step"] is not None else ""
    risk = f" (at risk: {kept['wanted']} wanted)" if kept["at_risk"] else ""
    holders = ", ".join(kept["holders"]) or "its host only"
    return f"number {kept['seq']}{step}, {_clock(kept['created_unix_ms'])}, on {holders}{risk}"


def _next(state: dict[str, Any]) -> str:
    due = state["next_checkpoint"]
    if due is None:
        return "-"
    why = WHY.get(due["why"], due["why"])
    return f"due {_clock(due['due_unix'] * 1000)}, {why}; expected loss until then {due['loss_s']:.1f} s of work"


def _gpus(state: dict[str, Any]) -> str:
    """Return the GPUs it asks for, and those it has."""
    count, share, limit, vram = state["gpus"], state["gpu_share"], state["gpu_share_limit"], state["vram_mib"]
    if not count:
        return "-"
    text = f"{count} whole" + (f", of {vram} MiB at least" if vram else "")
    if share < 100:
        idle = f", up to {limit} % while others leave it idle" if limit > share else ""
        more = state["vram_limit_mib"]
        lent = f", up to {more} MiB while no other job needs it" if more > vram else ""
        text = f"{share} % and {vram} MiB of {count}{idle}{lent}"
    has = ", ".join(portion["uuid"] for portion in state["gpu_portions"])
    return text + (f": {has}" if has else "")


def _attempt(row: dict[str, Any]) -> list[str]:
    end = row["ended_unix_ms"] or row["seen_unix_ms"]
    ran = lasting(max(0, end - row["running_unix_ms"]) / 1000) if row["running_unix_ms"] else "-"
    steps = ["-" if step is None else str(step) for step in (row["resumed_step"], row["last_step"])]
    return [str(row["number"]), row["node"], _clock(row["started_unix_ms"]), ran, *steps, row["reason"] or "running"]


def _clock(unix_ms: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_ms / 1000))


@click.command()
@click.argument("job", type=JOB)
@click.option("--would", is_flag=True, help="Show the smallest changes that would let it start.")
@json_option
@click.pass_context
def why(ctx: click.Context, job: str, would: bool, as_json: bool) -> None:
    """Explain where JOB runs or why it waits: the ranking of all nodes, with reasons."""
    answer = client(ctx).get(f"{job_path(job)}/why" + ("?would=1" if would else ""))
    if as_json:
        print_json(answer)
        return
    say(job_text(answer))
    say(f"  its record is kept by {', '.join(answer['witnesses'])}")
    for attempt in answer["attempts"]:
        say(f"  attempt {attempt['number']} on {attempt['node']}: {attempt['reason'] or 'running'}")
    if answer["state"] in OVER:
        return
    if answer["standby"] is not None:
        say(f"  standby: {standby_text(answer['standby'], answer['warm'])}")
    if answer["submitted_by"]:
        say(f"  {answer['submitted_by']}")
    placement = answer["placement"]
    if placement["zone"] is not None:
        say(
            f"  placed by zone first (the mesh has had {placement['two_level_since']} nodes): zone "
            f"{placement['zone'] or '(none)'}, coordinator {placement['coordinator'] or 'none'}"
        )
    if answer["decision"] is not None:
        say("  " + _decision(answer["decision"]))
    say("for its next attempt: " + answer["explanation"][0])
    rows = [
        [str(place), candidate["nick"], str(candidate["weight"]), f"advert {candidate['advert_version']}"]
        for place, candidate in enumerate(answer["candidates"], 1)
    ]
    rows += [["-", refusal["nick"], "-", "; ".join(refusal["reasons"])] for refusal in answer["refused"]]
    if rows:
        table(["RANK", "NODE", "SURVIVAL/64", "WHY"], rows)
    if answer["would"] is None:
        return
    if answer["would"]:
        say("it could start:")
    elif answer["candidates"]:
        say("it could start now: a node has room for it")
    else:
        say("no single change of its request, or of one node, would let it start now")
    for change in answer["would"]:
        say(f"  {'with ' if change['of'] == 'request' else ''}{change['text']}")


def _decision(decision: dict[str, Any]) -> str:
    """Say who placed the attempt, on which node, and whether that can still be recomputed (old adverts are not kept)."""
    first, *after = decision["order"]
    rank = (
        f" (ranked first of {len(decision['order'])}: then {', '.join(row['nick'] for row in after)})" if after else ""
    )
    text = f"{decision['by']} placed attempt {decision['attempt']} on {first['nick']}{rank}"
    changed = [row["nick"] for row in decision["order"] if row["advert_now"] != row["advert_version"]]
    if not changed:
        return f"{text}; no advert has changed since, so any node can recompute it"
    adverts = f"the advert{'' if len(changed) == 1 else 's'} of {', '.join(changed)}"
    return f"{text}; signed, but it cannot be recomputed: {adverts} changed since"


@click.command()
@click.argument("source", type=JOB, metavar="JOB:PATH")
@click.argument("destination", type=click.Path())
@click.option("--limit", type=SIZE, help="Most that is copied, holes of files included (default 64g).")
@json_option
@click.pass_context
def cp(ctx: click.Context, source: str, destination: str, limit: int | None, as_json: bool) -> None:
    """Copy a file or directory of a job to this machine.

    PATH is relative to its working directory while the job runs. out/... (published files) and ckpt/... (the last checkpoint) can
    be copied at any time. DESTINATION is the new name, or an existing directory, or - for standard output. Links that lead out of
    the copied tree are left out.
    """
    from mesh.api.file_stream import COPY_LIMIT, unpack, unpack_file

    job, colon, path = source.partition(":")
    if not colon or not path:
        raise click.UsageError(f"{source!r} is not JOB:PATH, as 7kq2ab:logs/train.txt or 7kq2ab:out/")
    target, name = Path(destination), PurePosixPath(path).name or "work"
    most, shown = COPY_LIMIT if limit is None else limit << 20, destination == "-"
    if shown and as_json:
        raise click.UsageError("- writes the file to standard output: leave out --json")
    with waiting_for("copying"):
        pieces = client(ctx).stream(f"{job_path(job)}/files?path={quote(path)}")
        copied = unpack_file(pieces, Output().write, most) if shown else unpack(pieces, target, name, most)
    if not copied.files:
        raise MeshError(f"{source} has no files", ExitCode.ERROR)
    if as_json:
        print_json({**copied._asdict(), "destination": str(target.resolve())})
        return
    say(f"{plural(copied.files, 'file')}, {copied.bytes} bytes", err=True)
    if copied.left_out:
        say(f"left out {plural(copied.left_out, 'link')} that would lead out of {destination}", err=True)

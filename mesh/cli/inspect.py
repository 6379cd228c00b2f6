"""`mesh describe` and `mesh cp`: one job, looked at closely."""

import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from mesh.api.errors import ExitCode, MeshError
from mesh.cli.listing import show_answer, watch_option
from mesh.cli.names import JOB
from mesh.cli.telling import patience
from mesh.cli.terminal import client, job_path, json_option, quote, table
from mesh.duration import lasting
from mesh.words import HEEDS, WHY, saving_words


@click.command()
@click.argument("job", type=JOB)
@watch_option
@json_option
@click.pass_context
def describe(ctx: click.Context, job: str, watch: bool, as_json: bool) -> None:
    """All about one JOB: what it asks for, where it was, what it saved, what happened."""
    daemon = client(ctx)
    show_answer(lambda: daemon.get(f"{job_path(job)}/describe"), _tell, watch, as_json)


def _tell(answer: dict[str, Any]) -> None:
    state, asked = answer["job"], answer["asked"]
    rows = [
        ("job", state["job"] + (f"  ({state['name']})" if state["name"] else "")),
        ("user", f"{state['user']}, from {state['submitter']}"),
        ("submitted", _clock(state["created_unix_ms"])),
        ("command", " ".join(asked["argv"])),
        ("state", state["state"] + (f": {state['detail']}" if state["detail"] else "")),
        ("GPUs", _gpus(state, asked)),
        ("runs on", ", ".join([state["node"], *state["mates"]]) if state["node"] else "-"),
        ("record", f"kept by {', '.join(state['witnesses'])} (group {answer['group']})"),
        ("checkpoint", _checkpoint(state)),
        ("saving", saving_words(state["saving"]) or "-"),
        ("next", _next(state)),
        ("notice", HEEDS[state["heeds_notice"]]),
        ("at risk", lasting(state["at_risk_s"]) if state["at_risk_s"] else "-"),
        ("asks for", _asked(asked)),
    ]
    for name, text in rows:
        click.echo(f"{name:<11} {text}")
    click.echo()
    table(
        ["ATTEMPT", "NODE", "BEGAN", "RAN", "FROM STEP", "TO STEP", "ENDED"],
        [_attempt(row) for row in state["attempts"]],
        spare=["FROM STEP", "TO STEP"],
    )
    click.echo()
    for event in answer["events"]:
        click.echo(f"{_clock(event['unix_ms'])}  {event['actor']:<12} {event['text']}")


def _checkpoint(state: dict[str, Any]) -> str:
    kept = state["checkpoint"]
    if kept is None:
        return "-"
    step = f" at step {kept['step']}" if kept["step"] is not None else ""
    return f"number {kept['seq']}{step}, {_clock(kept['created_unix_ms'])}, on {', '.join(kept['holders']) or 'its host alone'}"


def _next(state: dict[str, Any]) -> str:
    due = state["next_checkpoint"]
    if due is None:
        return "-"
    why = WHY.get(due["why"], due["why"])
    return f"due {_clock(due['due_unix'] * 1000)}, {why}; {due['loss_s']:.1f} s of work expected to be lost until then"


LONGEST = 60  # characters of one value; ours
SHOWN_ELSEWHERE = {
    "argv",
    "user",
    "name",
    "created_unix_ms",
    "gpus",
    "gpu_share",
    "gpu_share_limit",
    "vram_mib",
    "vram_limit_mib",
    "lock",  # for those who hold its keys
}


def _gpus(state: dict[str, Any], asked: dict[str, Any]) -> str:
    """What it asks for, and what it has of which GPUs."""
    count, share, limit, vram = state["gpus"], state["gpu_share"], state["gpu_share_limit"], asked["vram_mib"]
    if not count:
        return "-"
    words = f"{count} whole" + (f", of {vram} MiB at least" if vram else "")
    if share < 100:
        idle = f", up to {limit} % while others leave it idle" if limit > share else ""
        more = asked["vram_limit_mib"]
        lent = f", up to {more} MiB while no other's share needs it" if more > vram else ""
        words = f"{share} % and {vram} MiB of {count}{idle}{lent}"
    has = ", ".join(portion["uuid"] for portion in state["gpu_portions"])
    return words + (f": {has}" if has else "")


def _asked(asked: dict[str, Any]) -> str:
    words = []
    for name, value in asked.items():
        if name in SHOWN_ELSEWHERE or value in (0, [], {}, [0, 0]) or (name.endswith("_nodes") and value == 1):
            continue
        inner = ", ".join(f"{key} {_short(part)}" for key, part in value.items()) if isinstance(value, dict) else value
        words.append(f"{name.replace('_', ' ')} {inner}")
    return "; ".join(words)


def _short(value: Any) -> str:
    """As much as fits into a line: a variable may hold a program (`mesh jupyter`)."""
    text = " ".join(str(value).split())
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def _attempt(row: dict[str, Any]) -> list[str]:
    end = row["ended_unix_ms"] or row["seen_unix_ms"]
    ran = lasting(max(0, end - row["running_unix_ms"]) / 1000) if row["running_unix_ms"] else "-"
    steps = ["-" if step is None else str(step) for step in (row["resumed_step"], row["last_step"])]
    return [str(row["number"]), row["node"], _clock(row["started_unix_ms"]), ran, *steps, row["reason"] or "under way"]


def _clock(unix_ms: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_ms / 1000))


@click.command()
@click.argument("source", type=JOB, metavar="JOB:PATH")
@click.argument("destination", type=click.Path())
@click.pass_context
def cp(ctx: click.Context, source: str, destination: str) -> None:
    """Copy a file or directory of a job here: out of its working directory while it runs; ckpt/... and out/... at any time.

    DESTINATION is the new name, or a directory that exists.
    """
    job, colon, path = source.partition(":")
    if not colon or not path:
        raise click.UsageError(f"{source!r} is not JOB:PATH, as 7kq2ab:logs/train.txt or 7kq2ab:ckpt/")
    target = Path(destination)
    with patience("copying"):
        pieces = client(ctx).stream(f"{job_path(job)}/files?path={quote(path)}")
        files, size = _unpack(pieces, target)
    if not files:
        raise MeshError(f"nothing came of {source}", ExitCode.ERROR)
    click.echo(f"{files} file{'' if files == 1 else 's'}, {size} bytes", err=True)


def _unpack(pieces: Iterator[bytes], target: Path) -> tuple[int, int]:
    """Files and bytes. The daemon is trusted with the content, not with where it goes: nothing leaves the target."""
    into = target if target.is_dir() else target.parent
    files = size = 0
    with tarfile.open(fileobj=_Stream(pieces), mode="r|") as tar:  # type: ignore[call-overload]
        for member in tar:
            first, _, rest = member.name.partition("/")
            top = first if target.is_dir() else target.name
            member.name = f"{top}/{rest}" if rest else top
            try:
                tar.extract(member, into, filter="data")
            except (OSError, tarfile.TarError) as error:
                raise MeshError(f"{into / member.name} could not be written: {error}") from error
            files += member.isreg()
            size += member.size
    return files, size


class _Stream:
    """Pieces as a file to read from."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces, self._left = pieces, b""

    def read(self, size: int = -1) -> bytes:
        while size < 0 or len(self._left) < size:
            piece = next(self._pieces, None)
            if piece is None:
                break
            self._left += piece
        size = len(self._left) if size < 0 else size
        out, self._left = self._left[:size], self._left[size:]
        return out

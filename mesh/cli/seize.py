"""The owner's last word: `mesh reclaim --now` and `mesh killall`. Neither waits for an engine, the network or the daemon's loop.

The daemon's kill-switch is asked by its own socket. Where it does not answer in a moment, and always for `killall`, this command
ends the guests itself, by the register in the state directory (`mesh/engine/register.py`).
"""

import json
import socket
import time
from contextlib import suppress
from typing import Any

import click
import msgspec

from mesh.api.errors import ExitCode, MeshError
from mesh.cli.terminal import json_option, layout, print_json
from mesh.engine.descent import stat_of
from mesh.engine.hunt import Struck, run
from mesh.engine.register import Register
from mesh.layout import Layout

ANSWER_S = 0.1  # for a switch to have ended every guest; it takes it some 10 ms; ours
MAY_STAND_STILL = "tT"  # states of a process that answers nobody


@click.command()
@json_option
@click.pass_context
def killall(ctx: click.Context, as_json: bool) -> None:
    """End every guest of this node at once, without its daemon: for one that hangs, is stopped or is gone.

    Lending is paused until `mesh resume`. Guests go on elsewhere from their last checkpoint.
    """
    where = layout(ctx)
    if not where.root.is_dir():
        raise MeshError(f"no node has its state in {where.root}: name its directory with --state", ExitCode.NO_DAEMON)
    begun = time.monotonic()
    struck, problems = _end_guests(where)
    told = _press(where, ANSWER_S)  # what the daemon has begun since, and that nothing is to begin
    if told is None:
        problems += _pause(where)
    jobs = {one.job for one in struck if one.processes}
    struck += [one for one in told or () if one.job not in jobs]
    _tell(ctx, struck, problems, "the daemon was not needed", begun, as_json)


def take_back(ctx: click.Context, as_json: bool) -> None:
    """`mesh reclaim --now`."""
    begun = time.monotonic()
    struck, problems, by = strike(layout(ctx))
    _tell(ctx, struck, problems, by, begun, as_json)


def strike(where: Layout) -> tuple[list[Struck], list[str], str]:
    """End every guest at once, by the daemon's switch or, where that does not answer, from here: who was struck, what went wrong,
    and by whom, in words."""
    problems: list[str] = []
    struck, by = _press(where, ANSWER_S), "by the daemon"
    if struck is None:
        if not where.kill_socket.exists() and not where.guests.is_dir():
            raise MeshError(f"no daemon runs here ({where.root}): start it with `mesh up`", ExitCode.NO_DAEMON)
        struck, problems = _end_guests(where)
        problems += _pause(where)
        by = "without the daemon, which did not answer"
    return struck, problems, by


def _press(where: Layout, answer_s: float) -> list[Struck] | None:
    """Press the daemon's switch. None if it does not answer; one that stands still is not waited for, but will read it."""
    with suppress(OSError, ValueError, TypeError, KeyError), socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(answer_s)
        connection.connect(str(where.kill_socket))
        connection.send(b"kill\n")
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        found = stat_of(int.from_bytes(peer[:4], "little"))
        if found is None or found.state in MAY_STAND_STILL:
            return None
        deadline, heard = time.monotonic() + answer_s, b""
        while not heard.endswith(b"\n"):
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            piece = connection.recv(1 << 16)
            if not piece:
                return None
            heard += piece
        return [Struck(**{**one, "left": tuple(one["left"])}) for one in json.loads(heard)["killed"]]
    return None


def _end_guests(where: Layout) -> tuple[list[Struck], list[str]]:
    register = Register(where.guests)
    try:
        entries, problems = register.entries()
    except PermissionError as error:
        raise MeshError(
            f"{error.filename} belongs to another user: run this as the daemon's", ExitCode.REFUSED
        ) from error
    for key in entries:
        register.strike(key)
    _cut(where)
    return run(entries.values()), problems


def _cut(where: Layout) -> None:
    """Off the network first, where the daemon has an edge (docs/edge.md); `mesh resume` ends that, and so does its next start."""
    from mesh.edge.switch import GUESTS, Switch

    with suppress(OSError):
        switch = Switch.pinned(where.edge)
        switch.cut(GUESTS)
        switch.close()


def _pause(where: Layout) -> list[str]:
    from membership.durable import write_durably
    from mesh.provider.inventory import Lending, load_lending

    try:
        said = load_lending(where.lending, False)
    except (OSError, ValueError):
        said = Lending(False)
    try:
        write_durably(where.lending, msgspec.json.encode(msgspec.structs.replace(said, paused=True)))
    except OSError as error:
        return [f"lending is not paused for the next `mesh up` ({error.strerror}): `mesh pause` then"]
    return []


def _tell(ctx: click.Context, struck: list[Struck], problems: list[str], by: str, begun: float, as_json: bool) -> None:
    struck = [one for one in struck if one.processes]
    left = [one for one in struck if one.left]
    seconds = time.monotonic() - begun
    if as_json:
        answer: dict[str, Any] = {
            "schema": 1,
            "reclaimed": sorted({one.job for one in struck}),
            "seconds": round(seconds, 3),
            "by": by,
            "killed": [one.plain() for one in struck],
            "problems": problems,
        }
        print_json(answer)
    else:
        for one in struck:
            click.echo(str(one), err=bool(one.left))
        count = len(struck) - len(left)
        words = f"{count} guests have gone, {by}" if count else "no guest was alive here"
        click.echo(
            f"yours again after {seconds:.2f} s; {words}" if not left else f"{len(left)} guests are left; {words}"
        )
        for problem in problems:
            click.echo(f"mesh: {problem}", err=True)
    if left:
        denied = any("permitted" in one.problem for one in left)
        advice = (
            "run this as the daemon's user, or as root"
            if denied
            else "a process hangs in the kernel; `mesh killall` again"
        )
        click.echo(f"mesh: next: {advice}", err=True)
        ctx.exit(int(ExitCode.ERROR))

"""The owner's last word: `mesh reclaim --now` and `mesh killall`. Neither waits for an engine, the network or the daemon's loop.

The daemon's kill-switch is asked by its own socket. Where it does not answer in a moment, and always for `killall`, this command
ends the guests itself, by the register in the state directory (`mesh/engine/register.py`).
"""

import json
import socket
import time
from contextlib import closing, suppress
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
LATE_S = 2.0  # for one that is only slow to say whom it ended, when nobody is left to be ended from here; ours
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
    with closing(Pressed(where)) as switch:  # what the daemon has begun since, and that nothing is to begin
        told = switch.told(ANSWER_S)
    if told is None:
        problems += _pause(where)
    _tell(ctx, _together(struck, told or []), problems, "the daemon was not needed", begun, as_json)


def take_back(ctx: click.Context, as_json: bool) -> None:
    """`mesh reclaim --now`."""
    begun = time.monotonic()
    struck, problems, by = strike(layout(ctx))
    _tell(ctx, struck, problems, by, begun, as_json)


def strike(where: Layout) -> tuple[list[Struck], list[str], str]:
    """End every guest at once, by the daemon's switch or, where that does not answer, from here: who was struck, what went wrong,
    and by whom, in words."""
    with closing(Pressed(where)) as switch:
        struck = switch.told(ANSWER_S)
        if struck is not None:
            return struck, [], "by the daemon"
        if not where.kill_socket.exists() and not where.guests.is_dir():
            raise MeshError(f"no daemon runs here ({where.root}): start it with `mesh up`", ExitCode.NO_DAEMON)
        struck, problems = _end_guests(where)
        problems += _pause(where)
        own = any(one.processes for one in struck)
        late = switch.told(ANSWER_S if own else LATE_S) or []
    by = "without the daemon, which did not answer" if own or not late else "by the daemon"
    return _together(struck, late), problems, by


def _together(struck: list[Struck], told: list[Struck]) -> list[Struck]:
    """Who was ended from here and who by the switch, each once."""
    jobs = {one.job for one in struck if one.processes}
    return [*struck, *(one for one in told if one.job not in jobs)]


class Pressed:
    """The daemon's switch, pressed. One that stands still is not waited for, but will read it."""

    def __init__(self, where: Layout) -> None:
        self._connection = socket.socket(socket.AF_UNIX)
        self._heard = b""
        self._there = False
        with suppress(OSError):
            self._connection.settimeout(ANSWER_S)
            self._connection.connect(str(where.kill_socket))
            self._connection.send(b"kill\n")
            peer = self._connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            found = stat_of(int.from_bytes(peer[:4], "little"))
            self._there = found is not None and found.state not in MAY_STAND_STILL

    def told(self, within_s: float) -> list[Struck] | None:
        """Whom it has ended; None if it does not say so in this time. It may be asked again."""
        deadline = time.monotonic() + within_s
        with suppress(OSError, ValueError, TypeError, KeyError):
            while self._there and not self._heard.endswith(b"\n"):
                self._connection.settimeout(max(0.001, deadline - time.monotonic()))
                piece = self._connection.recv(1 << 16)
                self._there = bool(piece)
                self._heard += piece
            if self._there:
                killed = json.loads(self._heard)["killed"]
                return [Struck(**{**one, "left": tuple(one["left"])}) for one in killed]
        return None

    def close(self) -> None:
        self._connection.close()


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

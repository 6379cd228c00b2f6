"""`mesh killall` and `mesh reclaim --now`: the kill switch from the command line. It needs no engine, network or event loop.

The daemon's kill switch listens on a socket of its own. If it does not answer at once, and always for `killall`, this command
kills the guests itself, by the register in the state directory (`mesh/execution/guest_registry.py`).
"""

import json
import socket
import time
from contextlib import closing, suppress

import click
import msgspec

from mesh.api import no_daemon
from mesh.cli.output import print_json, say
from mesh.cli.terminal import json_option, layout
from mesh.daemon.layout import Layout
from mesh.execution.guest_registry import KILLED, GuestRegistry
from mesh.execution.process_killer import KillResult, run
from mesh.util.errors import ExitCode, MeshError
from mesh.util.processes import peer_of, stat_of
from mesh.util.text import plural

ANSWER_S = 0.1  # for the switch to kill every guest; it takes about 10 ms (own choice)
LATE_S = 2.0  # for a slow switch to list the guests it killed, when none is left to kill from here (own choice)
STOPPED = "tT"  # process states in which nobody answers


@click.command()
@json_option
@click.pass_context
def killall(ctx: click.Context, as_json: bool) -> None:
    """Kill every guest of this node at once without its daemon, which may hang, be stopped or be dead.

    Lending is paused until `mesh lend`. Guests resume elsewhere from their last checkpoint.
    """
    where = layout(ctx)
    if not where.root.is_dir():
        raise no_daemon.no_state(where.root)
    begun = time.monotonic()
    killed, problems = _kill_guests(where)
    with closing(
        KillSwitchClient(where)
    ) as switch:  # kills what the daemon has started since, and keeps it from starting more
        answered = switch.killed(ANSWER_S)
    if answered is None:
        problems += _pause(where)
    _report(ctx, _merged(killed, answered or []), problems, "without the daemon", begun, as_json)


def reclaim_now(ctx: click.Context, as_json: bool) -> None:
    """Run `mesh reclaim --now`."""
    begun = time.monotonic()
    killed, problems, by = kill_guests(layout(ctx))
    _report(ctx, killed, problems, by, begun, as_json)


def kill_guests(where: Layout) -> tuple[list[KillResult], list[str], str]:
    """Kill every guest by the daemon's switch or, if that does not answer, from here.

    Returns the killed guests, problems, and who killed them ("by the daemon", "without the daemon ...").
    """
    with closing(KillSwitchClient(where)) as switch:
        killed = switch.killed(ANSWER_S)
        if killed is not None:
            return killed, [], "by the daemon"
        if not where.kill_socket.exists() and not where.guests.is_dir():
            raise no_daemon.none_runs(where.root)
        killed, problems = _kill_guests(where)
        problems += _pause(where)
        own = any(one.processes for one in killed)
        late = switch.killed(ANSWER_S if own else LATE_S) or []
    by = "without the daemon, which did not answer" if own or not late else "by the daemon"
    return _merged(killed, late), problems, by


def _merged(killed: list[KillResult], by_switch: list[KillResult]) -> list[KillResult]:
    jobs = {one.job for one in killed if one.processes}
    return [*killed, *(one for one in by_switch if one.job not in jobs)]


class KillSwitchClient:
    """The daemon's kill switch, pressed. A stopped daemon is not waited for; it reads the order when it continues."""

    def __init__(self, where: Layout) -> None:
        self._connection = socket.socket(socket.AF_UNIX)
        self._answer = b""
        self._open = False
        with suppress(OSError):
            self._connection.settimeout(ANSWER_S)
            self._connection.connect(str(where.kill_socket))
            self._connection.send(b"kill\n")
            found = stat_of(peer_of(self._connection)[0])
            self._open = found is not None and found.state not in STOPPED

    def killed(self, within_s: float) -> list[KillResult] | None:
        """Return the guests it killed; None if it does not answer in time. May be asked again."""
        deadline = time.monotonic() + within_s
        with suppress(OSError, ValueError, TypeError, KeyError):
            while self._open and not self._answer.endswith(b"\n"):
                self._connection.settimeout(max(0.001, deadline - time.monotonic()))
                piece = self._connection.recv(1 << 16)
                self._open = bool(piece)
                self._answer += piece
            if self._open:
                return [KillResult(**{**one, "left": tuple(one["left"])}) for one in json.loads(self._answer)["killed"]]
        return None

    def close(self) -> None:
        self._connection.close()


def _kill_guests(where: Layout) -> tuple[list[KillResult], list[str]]:
    register = GuestRegistry(where.guests)
    try:
        entries, problems = register.entries()
    except PermissionError as error:
        raise MeshError(
            f"{error.filename} belongs to another user: run this as the daemon's user", ExitCode.REFUSED
        ) from error
    for key in entries:
        register.mark(key, KILLED)
    _cut_network(where)
    return run(entries.values()), problems


def _cut_network(where: Layout) -> None:
    """Cut guests off the network if the daemon has an edge (docs/explanation/edge.md), until `mesh lend` or its next start."""
    from mesh.network.switch import GUESTS, Switch

    with suppress(OSError):
        switch = Switch.pinned(where.edge)
        switch.cut(GUESTS)
        switch.close()


def _pause(where: Layout) -> list[str]:
    from membership.durable import write_durably
    from mesh.gpus.inventory import Lending, load_lending

    try:
        lending = load_lending(where.lending, False)
    except (OSError, ValueError):
        lending = Lending(False)
    try:
        write_durably(where.lending, msgspec.json.encode(msgspec.structs.replace(lending, paused=True)))
    except OSError as error:
        return [f"the pause is not stored ({error.strerror}): run `mesh pause` after the next `mesh up`"]
    return []


def _report(
    ctx: click.Context, killed: list[KillResult], problems: list[str], by: str, begun: float, as_json: bool
) -> None:
    killed = [one for one in killed if one.processes]
    left = [one for one in killed if one.problem]
    seconds = time.monotonic() - begun
    if as_json:
        print_json(
            {
                "reclaimed": sorted({one.job for one in killed}),
                "seconds": round(seconds, 3),
                "by": by,
                "killed": [one.plain() for one in killed],
                "problems": problems,
            }
        )
    else:
        for one in killed:
            say(str(one), err=bool(one.problem))
        say(outcome(killed, by, seconds))
        for problem in problems:
            say(f"mesh: {problem}", err=True)
    if left:
        denied = any("permitted" in one.problem for one in left)
        advice = (
            "run this as the daemon's user, or as root"
            if denied
            else "a process hangs in the kernel; run `mesh killall` again"
        )
        say(f"mesh: next: {advice}", err=True)
        ctx.exit(int(ExitCode.ERROR))


def outcome(killed: list[KillResult], by: str, seconds: float) -> str:
    """Return the result in one sentence, for people. Guests without a live process do not count."""
    killed = [one for one in killed if one.processes]
    left = sum(bool(one.problem) for one in killed)
    gone = f"{plural(len(killed) - left, 'guest')} killed {by}" if len(killed) > left else "no guest was running"
    if left:
        return f"{plural(left, 'guest')} could not be killed; {gone}"
    return f"yours again after {seconds:.2f} s; {gone}"

"""The commands that change and show the kernel's queues and interfaces: tc(8), ip(8), nsenter(1), each a process of its own.

Whatever they say against it becomes an EdgeError. They block for some milliseconds: not for the loop.
"""

import os
import shutil
import subprocess
from collections.abc import Iterable

import msgspec

from mesh.edge.shaping import Command, Filter, Qdisc, ReportError, read_filters, read_qdiscs
from mesh.privileges import BPF, NET_ADMIN, SYS_ADMIN, lent

HOOKS = ("ingress", "egress")
NEEDED = ("tc", "ip", "nsenter")
CALL_S = 10.0


class EdgeError(RuntimeError):
    """The edge cannot do that; the text says why."""


class Link(msgspec.Struct, frozen=True):
    """An interface. `link_index`: of the other end of a pair."""

    ifindex: int
    ifname: str
    link_index: int = 0


def missing() -> str:
    """The first of the programs that is not installed; empty if all are."""
    return next((name for name in NEEDED if shutil.which(name) is None), "")


def do(commands: Iterable[Command]) -> None:
    for command in commands:
        try:
            _run("tc", *command.words)
        except EdgeError:
            if command.must:
                raise


def qdiscs() -> list[Qdisc]:
    try:
        return read_qdiscs(_run("tc", "-json", "qdisc", "show"))
    except ReportError as error:
        raise EdgeError(str(error)) from error


def filters(device: str) -> list[Filter]:
    """Those at both hooks of a device that has them."""
    try:
        return [
            found
            for hook in HOOKS
            for found in read_filters(_run("tc", "-json", "filter", "show", "dev", device, hook), hook)
        ]
    except ReportError as error:
        raise EdgeError(str(error)) from error


def any_filter(device: str) -> bool:
    """Whether anybody has a filter of any kind at its hooks."""
    return any(_run("tc", "filter", "show", "dev", device, hook).strip() for hook in HOOKS)


def links(pid: int | None = None) -> list[Link]:
    """The interfaces here, or those that a process sees."""
    within = () if pid is None else ("nsenter", f"--net=/proc/{pid}/ns/net")
    try:
        return msgspec.json.decode(_run(*within, "ip", "-json", "link", "show"), type=list[Link])
    except msgspec.MsgspecError as error:
        raise EdgeError(f"ip lists interfaces in a way that is not known: {error}") from error


def _run(*words: str) -> str:
    try:
        with lent(NET_ADMIN, SYS_ADMIN, BPF):
            done = subprocess.run(
                words,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
                timeout=CALL_S,
                env={**os.environ, "LC_ALL": "C"},
            )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EdgeError(f"`{' '.join(words)}`: {error}") from error
    if done.returncode != 0:
        raise EdgeError(f"`{' '.join(words)}`: {' '.join(done.stderr.split())[:300]}")
    return done.stdout

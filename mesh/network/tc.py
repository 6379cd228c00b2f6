"""Runs tc(8), ip(8) and nsenter(1), which show and change the kernel's queues and interfaces.

Their failures become an EdgeError. Calls block for some milliseconds: never call them on the event loop.
"""

import os
import shutil
import subprocess
from collections.abc import Iterable

import msgspec

from mesh.network.shaping import Command, Filter, Qdisc, ReportError, read_filters, read_qdiscs
from mesh.util.capabilities import BPF, NET_ADMIN, SYS_ADMIN, lent

HOOKS = ("ingress", "egress")
NEEDED = ("tc", "ip", "nsenter")
CALL_S = 10.0


class EdgeError(RuntimeError):
    """The edge cannot do something; the text says why."""


class Link(msgspec.Struct, frozen=True):
    """A network interface. `link_index`: the index of the other end of a veth pair."""

    ifindex: int
    ifname: str
    link_index: int = 0


def missing() -> str:
    """Return the first needed program that is not installed; empty if all are."""
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
    """Return the BPF filters at both hooks of a device."""
    try:
        return [
            found
            for hook in HOOKS
            for found in read_filters(_run("tc", "-json", "filter", "show", "dev", device, hook), hook)
        ]
    except ReportError as error:
        raise EdgeError(str(error)) from error


def any_filter(device: str) -> bool:
    """Return whether the hooks have a filter of any kind."""
    return any(_run("tc", "filter", "show", "dev", device, hook).strip() for hook in HOOKS)


def links(pid: int | None = None) -> list[Link]:
    """Return the interfaces of this network namespace, or of a process's."""
    within = () if pid is None else ("nsenter", f"--net=/proc/{pid}/ns/net")
    try:
        return msgspec.json.decode(_run(*within, "ip", "-json", "link", "show"), type=list[Link])
    except msgspec.MsgspecError as error:
        raise EdgeError(f"the output of `ip link` is not understood: {error}") from error


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

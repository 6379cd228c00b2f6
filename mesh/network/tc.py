"""Runs tc(8), which shows and changes the kernel's queues.

Their failures become an EdgeError. Calls block for some milliseconds: never call them on the event loop.
"""

import os
import shutil
import subprocess
from collections.abc import Iterable

from mesh.network.shaping import Command, Filter, Qdisc, ReportError, read_filters, read_qdiscs
from mesh.util.capabilities import BPF, NET_ADMIN, SYS_ADMIN, lent

HOOKS = ("ingress", "egress")
CALL_S = 10.0


class EdgeError(RuntimeError):
    """The edge cannot do something; the text says why."""


def is_installed() -> bool:
    return shutil.which("tc") is not None


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

"""The daemon's process: its command line, its lock, and the code and words it ends with.

SIGTERM and SIGINT leave in order (guests get their notice, their state is shipped, the node says farewell); a second signal
leaves at once.
"""

import argparse
import asyncio
import errno
import fcntl
import json
import logging
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from ckptstore.errors import StoreError
from membership.identity import IdentityError
from membership.node import PortInUse
from membership.trust import TrustError
from mesh.daemon.config import Settings, load_settings
from mesh.daemon.daemon import Daemon
from mesh.daemon.layout import Layout
from mesh.daemon.systemd import LEAVING_S, notify, raise_file_limit
from mesh.execution.process import subtree
from mesh.gpus.inventory import keep_lending
from mesh.journal import JournalError
from mesh.util import capabilities
from mesh.util.errors import ConfigError, MeshError
from mesh.util.sanitize import fit

MAX_LOG_BYTES = 16 << 20  # of `daemon.log`, and as much of the one before it (own choice)
EXPECTED = (MeshError, IdentityError, TrustError, ConfigError, JournalError, PortInUse, StoreError)
FULL = {errno.ENOSPC, errno.EDQUOT}  # errors of a write, which name no file

log = logging.getLogger("mesh.daemon.daemon")


class LogFormatter(logging.Formatter):
    """Formats a log line that may hold text of others: it moves no cursor, and its further lines are indented."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n    ".join(fit(super().format(record)).splitlines())


class LogFile(logging.StreamHandler[TextIO]):
    """Writes to standard error. If that is the log file at `path`, a large one is moved aside, over the one before it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        with suppress(OSError):
            now = os.fstat(2)
            if now.st_size > MAX_LOG_BYTES and os.path.samestat(now, self._path.lstat()):
                self._path.rename(self._path.with_suffix(".log.old"))
                _write_to(self._path)


def main() -> None:
    """Exit codes as the command line's; the last line of stderr says what was wrong."""
    parser = argparse.ArgumentParser(prog="mesh.daemon.entry")
    parser.add_argument("--state", required=True)
    parser.add_argument("--config", help="directory of config.toml and policy.toml (default: the state directory)")
    parser.add_argument("--overrides", default="{}", help="settings as JSON, over those of config.toml")
    parser.add_argument("--log", action="store_true", help="write all output to the state directory's log")
    options = parser.parse_args()
    layout = Layout(Path(options.state).resolve(), Path(options.config).resolve() if options.config else None)
    output = LogFile(layout.log)
    output.setFormatter(LogFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[output])
    logging.getLogger("aiohttp").setLevel(logging.WARNING)
    try:
        if options.log:
            _write_to(layout.log)
        capabilities.keep()
        raise_file_limit()
        layout.make()
        lock = layout.lock.open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit(f"mesh: another daemon runs with {layout.root}: `mesh status`, or `mesh down` to stop it")
        overrides = json.loads(options.overrides)
        settings = load_settings(layout.config, overrides)
        if overrides.get("lend"):
            with suppress(OSError, ValueError):  # the daemon reports it
                keep_lending(layout.lending)
        subtree.claim(settings.grace_s + LEAVING_S)
        asyncio.run(_run(layout, settings))
    except BaseExceptionGroup as group:
        sys.exit(f"mesh: {_words(_first(group), layout)}")
    except (*EXPECTED, OSError) as error:
        sys.exit(f"mesh: {_words(error, layout)}")


def _write_to(path: Path) -> None:
    """Write output to a file. The daemon opens it itself: systemd would do so as root, which the file's user could misuse."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    for output in (1, 2):
        os.dup2(descriptor, output)
    os.close(descriptor)


async def _run(layout: Layout, settings: Settings) -> None:
    daemon = Daemon(layout, settings)
    try:
        await daemon.start()
    except BaseException:
        daemon.edge.close()  # all else ends with the process
        raise
    notify(f"READY=1\nSTATUS={daemon.membership.credentials.nick} in mesh {daemon.trust.genesis.name}")
    try:
        await daemon.run()
    finally:
        await daemon.stop()


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first error of a failed part; log the traceback of an unexpected one."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if not isinstance(error, (*EXPECTED, OSError)):
        log.error("a part of the daemon failed", exc_info=error)
    return error


def _words(error: BaseException, layout: Layout) -> str:
    if isinstance(error, OSError) and error.strerror:
        place = error.filename or (layout.root if error.errno in FULL else None)
        if place is None:
            log.error("the daemon failed", exc_info=error)
            return error.strerror
        here = Path(str(place)).is_relative_to(layout.root) or layout.root.is_relative_to(str(place))
        return f"{place}: {error.strerror}." + (" Name another place with --state." if here else "")
    return str(error) if isinstance(error, EXPECTED) else f"the daemon failed: {error!r}"

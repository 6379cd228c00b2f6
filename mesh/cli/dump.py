"""`mesh debug dump`: logs, state and settings of this node in one file without secrets, for a diagnosis."""

import gzip
import io
import json
import os
import platform
import shutil
import sqlite3
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import click

from membership.identity import Identity, IdentityError
from mesh.cli.output import print_json, say
from mesh.cli.progress import waiting_for
from mesh.cli.terminal import client, json_option, layout
from mesh.daemon.layout import Layout
from mesh.util.errors import ExitCode, MeshError
from mesh.util.redaction import redacted, spellings
from mesh.util.text import plural

ANSWERS = {
    "status": "/v1/status",
    "nodes": "/v1/nodes",
    "network": "/v1/network",
    "zones": "/v1/zones",
    "jobs": "/v1/jobs",
    "events": "/v1/events",
    "audit": "/v1/events?audit=true",
    "lend": "/v1/lend",
    "gpus": "/v1/gpus",
    "usage": "/v1/usage?here=true",
    "checkpoints": "/v1/checkpoints",
    "images": "/v1/images",
    "trust": "/v1/trust",
}
FILES = ("lending.json", "presence.json", "version", "seeds")
MOST_LOG = 4 << 20  # bytes at the end of the log (own choice)
KERNEL_LINES = 400
KERNEL_WORDS = (
    "nvrm",
    "xid",
    "oom",
    "out of memory",
    "killed process",
    "segfault",
    "i/o error",
    "hung",
    "cgroup",
    "nvidia",
)
PROC = ("meminfo", "loadavg", "uptime", "version", "cmdline", "pressure/memory", "pressure/io", "pressure/cpu")
PACKAGES = ("aiohttp", "click", "cryptography", "docker", "msgspec", "nvidia-ml-py", "pynacl", "zeroconf")


@click.command()
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False), help="File to write (default: mesh-dump-TIME.tar.gz here)."
)
@json_option
@click.pass_context
def dump(ctx: click.Context, output: str | None, as_json: bool) -> None:
    """Collect logs, state and settings of this node in one .tar.gz without secrets.

    Keys, invites, tokens and passwords are removed in every spelling. Names of users, nodes, jobs and files stay, and so do the
    commands of jobs: read it before you give it away.
    """
    where = layout(ctx)
    if not where.root.is_dir():
        raise MeshError(f"there is no node at {where.root}: `mesh --state DIR debug dump`", ExitCode.NOT_FOUND)
    target = Path(output or time.strftime("mesh-dump-%Y%m%d-%H%M%S.tar.gz")).absolute()
    if target.exists():
        raise MeshError(f"{target} exists already: name another file with -o")
    with waiting_for("collecting"):
        secrets, unread = secrets_of(where)
        bundle = {name: redacted(data, secrets) for name, data in collected(where, lambda path: client(ctx).get(path))}
        left_out = [name for name, data in bundle.items() if any(one in data for s in secrets for one in spellings(s))]
        for name in left_out:  # removing one may have joined the halves of another
            del bundle[name]
        summary = {"files": sorted(bundle), "left_out": left_out, "unread_secrets": unread}
        bundle["README.txt"] = redacted(_readme(summary).encode(), secrets)
        size = _write(target, bundle)
    if as_json:
        print_json({"file": str(target), "bytes": size, **summary})
        return
    say(str(target))
    say(f"{plural(len(bundle), 'file')}, {size} bytes; it has names and commands: read it before you send it", err=True)
    for problem in unread:
        say(f"mesh: some secrets could not be read, and so not removed: {problem}", err=True)


def secrets_of(where: Layout) -> tuple[list[bytes], list[str]]:
    """Return every secret in this state directory, as bytes, and why some could not be read."""
    from mesh.model.secrets import SecretError

    found: list[bytes] = []
    problems: list[str] = []
    try:
        if where.key.exists():
            found.append(where.key.read_bytes())
        if where.journal.exists():
            found += _journal_secrets(where.journal)
        found += _job_secrets(where)
    except (OSError, sqlite3.Error, IdentityError, SecretError) as error:
        problems.append(str(error))
    return list(dict.fromkeys(found)), problems


def _journal_secrets(path: Path) -> list[bytes]:
    from mesh.checkpoints.key_shares import decode_share

    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=5)) as journal:
        keys = [bytes(row[0]) for row in journal.execute("SELECT key FROM keys")]
        tables = [row[0] for row in journal.execute("SELECT name FROM sqlite_master WHERE name GLOB '*shares'")]
        rows = [bytes(row[0]) for table in tables for row in journal.execute(f"SELECT shares FROM {table}")]
    import msgspec

    shares = []
    for row in rows:
        with suppress(msgspec.MsgspecError, ValueError):
            shares += [decode_share(share).value for share in msgspec.msgpack.decode(row, type=list[bytes])]
    return keys + shares


def _job_secrets(where: Layout) -> list[bytes]:
    """Return the values of `mesh secret`, should a job have printed one."""
    if not where.secrets.is_dir():
        return []
    from mesh.jobs.secret_vault import SecretVault

    vault = SecretVault(where.secrets, Identity.load(where.key))
    return vault.values([(kept.name, "/") for kept in vault.all()])


def collected(where: Layout, get: Callable[[str], Any]) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the content of each file, before secrets are removed."""
    from mesh.cli.doctor import diagnose, examine

    yield "versions.json", _json(_versions())
    yield "doctor.json", _answer(lambda: [_plain(finding) for finding in diagnose(examine(where, get))])
    for name, path in ANSWERS.items():
        yield f"{name}.json", _answer(lambda path=path: get(path))  # type: ignore[misc]
    for file in (where.config, where.policy, *(where.root / name for name in FILES)):
        with suppress(OSError):
            yield file.name, file.read_bytes()
    with suppress(OSError), where.log.open("rb") as log:
        log.seek(max(0, where.log.stat().st_size - MOST_LOG))
        yield "daemon.log", log.read()
    yield "state.txt", "\n".join(_listing(where.root)).encode()
    for name in PROC:
        with suppress(OSError):
            yield f"proc/{name.replace('/', '-')}", Path("/proc", name).read_bytes()
    yield "disks.json", _json(_disks(where))
    yield "kernel.txt", _kernel()


def _answer(ask: Callable[[], Any]) -> bytes:
    try:
        return _json(ask())
    except (MeshError, OSError, ValueError, KeyError) as error:
        return _json({"problem": str(error)})


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=1, default=str).encode()


def _plain(value: Any) -> Any:
    import msgspec

    return msgspec.to_builtins(value)


def _versions() -> dict[str, Any]:
    from importlib.metadata import PackageNotFoundError, version

    from mesh.util.version import VERSION
    from mesh.util.versions import STATE, WIRE

    packages = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            packages[name] = version(name)
    return {
        "campus-mesh": VERSION,
        "wire": WIRE,
        "state": STATE,
        "python": platform.python_version(),
        "system": platform.platform(),
        "at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "packages": packages,
    }


def _listing(root: Path, depth: int = 2) -> Iterator[str]:
    """Yield names, sizes and modes; open no file."""
    for path in sorted(root.iterdir()):
        with suppress(OSError):
            seen = path.lstat()
            changed = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seen.st_mtime))
            yield f"{seen.st_mode:06o} {seen.st_size:>12} {changed} {path.relative_to(root.parent)}"
            if depth > 1 and path.is_dir() and not path.is_symlink():
                yield from _listing(path, depth - 1)


def _disks(where: Layout) -> dict[str, Any]:
    found = {}
    for path in (where.root, Path("/tmp"), Path("/dev/shm")):
        with suppress(OSError):
            found[str(path)] = shutil.disk_usage(path)._asdict()
    return found


def _kernel() -> bytes:
    """Return kernel messages about GPUs, memory and disks, if this user may read them."""
    try:
        done = subprocess.run(["dmesg", "--time-format", "iso"], capture_output=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"dmesg: {error}".encode()
    if done.returncode:
        return done.stderr
    lines = [line for line in done.stdout.splitlines() if any(word.encode() in line.lower() for word in KERNEL_WORDS)]
    return b"\n".join(lines[-KERNEL_LINES:])


def _readme(summary: dict[str, Any]) -> str:
    lines = [
        "Collected by `mesh debug dump` on a node of campus-mesh. Secrets are replaced by [removed].",
        "Names of users, nodes, jobs and files, and the commands of jobs, are unchanged.",
        *(f"left out, because a secret could not be removed from it: {name}" for name in summary["left_out"]),
        *(f"some secrets could not be read, and so not removed: {problem}" for problem in summary["unread_secrets"]),
    ]
    return "\n".join(lines) + "\n"


def _write(target: Path, bundle: dict[str, bytes]) -> int:
    """Write the whole archive or nothing, readable by its owner only."""
    whole = io.BytesIO()
    now = int(time.time())
    with gzip.GzipFile(fileobj=whole, mode="wb", filename="") as packed, tarfile.open(fileobj=packed, mode="w") as tar:
        for name, data in bundle.items():
            entry = tarfile.TarInfo(f"mesh-dump/{name}")
            entry.size, entry.mtime, entry.mode = len(data), now, 0o600
            tar.addfile(entry, io.BytesIO(data))
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(whole.getvalue())
        os.link(temporary, target)
    except OSError as error:
        raise MeshError(f"cannot write {target}: {error.strerror}. Name another file with -o") from error
    finally:
        temporary.unlink(missing_ok=True)
    return len(whole.getvalue())

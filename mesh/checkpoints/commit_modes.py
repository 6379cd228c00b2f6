"""Commit modes: when a checkpoint is complete, judged from the directory alone (docs/reference/job-contract.md).

- `rename`: an entry under its final name is complete, because it was written elsewhere and renamed.
- `marker`: a directory is complete once it holds a file COMMITTED.
- `stable`: nothing in the tree was written for a while and no process has it open for writing; for programs that know nothing
   of checkpoints.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

import msgspec

from mesh.model.spec import Checkpointing
from mesh.util import trees

MARKER = "COMMITTED"
DONE_MARKER = ".mesh-done"
MOST_WRITTEN = 64  # unfinished names that are followed (own choice)
# Names that training frameworks give to unfinished files, and Hugging Face's sentinel.
_UNFINISHED_SUFFIXES = (".tmp", ".part", ".partial", ".incomplete")
_SENTINELS = {"checkpoint-is-incomplete.txt"}


class CommittedTree(msgspec.Struct, frozen=True):
    """A complete state: `roots` for the store, `resume` is the entry below the checkpoint directory, and `key` tells it from
    others.
    """

    roots: dict[str, Path]
    resume: str
    key: tuple[tuple[str, int, int], ...]


def committed_tree(
    directory: Path, rules: Checkpointing, now_unix: float, *, ended: bool = False
) -> CommittedTree | None:
    """Return the newest complete state, or None. `ended`: the guest has exited by itself, so nothing is written any more."""
    if rules.mode == "stable":
        return _stable(directory, rules, now_unix, ended)
    entries = []
    for path in directory.iterdir():
        if unfinished(path.name) or (rules.mode == "marker" and not (path / MARKER).is_file()):
            continue
        with suppress(FileNotFoundError):  # the guest may delete old entries meanwhile
            info = path.stat()
            entries.append((info.st_mtime_ns, path.name, info.st_ino))
    if not entries:
        return None
    newest = sorted(entries)[-rules.keep :]
    return CommittedTree(
        roots={f"ckpt/{name}": directory / name for _, name, _ in newest},
        resume=newest[-1][1],
        key=tuple((name, mtime, inode) for mtime, name, inode in newest),
    )


def _stable(directory: Path, rules: Checkpointing, now_unix: float, ended: bool) -> CommittedTree | None:
    key: list[tuple[str, int, int]] = []
    newest = 0.0
    with suppress(FileNotFoundError):
        for path in _walk(directory):
            if unfinished(path.name):
                return None
            info = path.lstat()
            newest = max(newest, info.st_mtime, info.st_ctime)
            key.append((str(path.relative_to(directory)), info.st_mtime_ns, info.st_size))
        settled = ended or now_unix - newest >= rules.stable_s
        if key and settled and (ended or not open_for_writing(directory)):
            return CommittedTree(roots={"ckpt": directory}, resume="", key=tuple(key))
    return None


def _walk(directory: Path) -> Iterator[Path]:
    for parent, _, files in trees.walk(directory):
        for name in files:
            yield Path(parent) / name


def being_written(directory: Path) -> frozenset[str]:
    """Return the names of some entries that are not complete."""
    with suppress(FileNotFoundError):
        return frozenset(islice((path.name for path in directory.iterdir() if unfinished(path.name)), MOST_WRITTEN))
    return frozenset()


def unfinished(name: str) -> bool:
    return name.startswith(".") or name.endswith(_UNFINISHED_SUFFIXES) or name in _SENTINELS


def open_for_writing(directory: Path) -> bool:
    """Tell whether a process that we may inspect has a file below `directory` open for writing."""
    prefix = f"{directory}/"
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        with suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                if str(descriptor.readlink()).startswith(prefix):
                    flags = (process / "fdinfo" / descriptor.name).read_text().split("flags:")[1].split()[0]
                    if int(flags, 8) & (os.O_WRONLY | os.O_RDWR):
                        return True
    return False


def link_checkpoints(base: Path, directory: str) -> None:
    """Link the checkpoint directory to its name in the working directory."""
    link = base / "work" / directory
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.parent.resolve().is_relative_to((base / "work").resolve()):
        raise OSError(f"{directory} leads out of the working directory")
    if link.is_dir() and not link.is_symlink():
        trees.remove(link)  # checkpoints in the submitted directory are not the job's state
    link.symlink_to(os.path.relpath(base / "ckpt", link.parent))

"""When is a checkpoint complete? The three commit modes of the job contract, judged from the directory alone.

`rename`: an entry under its final name is whole, because it was made elsewhere and renamed. `marker`: a directory is whole once
it holds a file COMMITTED. `stable`: nothing in the tree was written for a while and nobody has it open for writing; for programs
that know nothing of any of this.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

import msgspec

from mesh import trees
from mesh.jobs.spec import Checkpointing

MARKER = "COMMITTED"
DONE_MARKER = ".mesh-done"
MOST_WRITTEN = 64  # names that are followed while they are written; ours
# Names that training frameworks give to what is not finished (Hugging Face's sentinel among them).
_UNFINISHED_SUFFIXES = (".tmp", ".part", ".partial", ".incomplete")
_SENTINELS = {"checkpoint-is-incomplete.txt"}


class CommittedTree(msgspec.Struct, frozen=True):
    """What to save: `roots` for the store, `resume` below the checkpoint directory, `key` to tell it from earlier ones."""

    roots: dict[str, Path]
    resume: str
    key: tuple[tuple[str, int, int], ...]


def committed_tree(
    directory: Path, rules: Checkpointing, now_unix: float, *, ended: bool = False
) -> CommittedTree | None:
    """The newest complete state, or None. `ended`: the guest has exited by itself, so nothing will be written any more."""
    if rules.mode == "stable":
        return _stable(directory, rules, now_unix, ended)
    entries = []
    for path in directory.iterdir():
        if unfinished(path.name) or (rules.mode == "marker" and not (path / MARKER).is_file()):
            continue
        with suppress(FileNotFoundError):  # the guest prunes old ones while we look
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
    """Names of what in it is not final yet, or never will be: some of them."""
    with suppress(FileNotFoundError):
        return frozenset(islice((path.name for path in directory.iterdir() if unfinished(path.name)), MOST_WRITTEN))
    return frozenset()


def unfinished(name: str) -> bool:
    return name.startswith(".") or name.endswith(_UNFINISHED_SUFFIXES) or name in _SENTINELS


def open_for_writing(directory: Path) -> bool:
    """Whether any process we may look into has a file below `directory` open for writing."""
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
    """Let the job find its checkpoint directory under the name it has in the working directory."""
    link = base / "work" / directory
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.parent.resolve().is_relative_to((base / "work").resolve()):
        raise OSError(f"{directory} leads out of the working directory")
    if link.is_dir() and not link.is_symlink():
        trees.remove(link)  # a copy of old checkpoints in the working directory is not the job's state
    link.symlink_to(os.path.relpath(base / "ckpt", link.parent))

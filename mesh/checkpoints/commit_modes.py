"""Commit modes: when a checkpoint is complete, judged from the directory alone (docs/reference/job-contract.md).

- `rename`: an entry under its final name is complete, because it was written elsewhere and renamed. Numbered entries are
   checkpoints, the highest number last; without one, directories; without one, files.
- `marker`: a directory is complete once it holds a file COMMITTED.
- `stable`: nothing in the tree was written for a while and no process has it open for writing; for programs that know nothing
   of checkpoints.
"""

import errno
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import msgspec

from ckptstore.errors import BadManifest
from ckptstore.mappings import Processes, every_process, mapped_for_writing
from ckptstore.tree_scan import Look, Scan, scan
from mesh.model.spec import Checkpointing
from mesh.util import trees
from mesh.util.mounts import device_of, numbers_on

MARKER = "COMMITTED"
DONE_MARKER = ".mesh-done"
MOST_WRITTEN = 64  # unfinished names that are followed (own choice)
MOST_ENTRIES = 20_000  # of a checkpoint directory that is looked at every 0.25 s (own choice)
MOST_BESIDE = 16  # files and links that are saved with the checkpoints (own choice)
FDINFO_CHARS = 256  # position, flags, mount and inode: proc_pid_fdinfo(5)
_DIGITS, _FRACTION = re.compile(r"[0-9]+"), re.compile(r"[0-9]+\.[0-9]+")  # `val_loss=0.25` counts nothing
# Names that training frameworks give to unfinished files, and Hugging Face's sentinel.
_UNFINISHED_SUFFIXES = (".tmp", ".part", ".partial", ".incomplete")
_SENTINELS = {"checkpoint-is-incomplete.txt"}


class CommittedTree(msgspec.Struct, frozen=True):
    """A complete state: `roots` for the store, `resume` is the entry below the checkpoint directory, and `key` tells it from
    others. `scans`: by root, what it must still look like when it is saved.
    """

    roots: dict[str, Path]
    resume: str
    key: tuple[tuple[str, int, int], ...]
    scans: dict[str, Scan] = {}


class _Entry(NamedTuple):
    name: str
    mode: int
    mtime_ns: int
    inode: int

    @property
    def place(self) -> tuple[str, tuple[int, ...]]:
        """Return the name without its numbers, and the numbers."""
        name = _FRACTION.sub(".", self.name)
        return _DIGITS.sub("#", name), tuple(int(digits) for digits in _DIGITS.findall(name))


def committed_tree(
    directory: Path,
    rules: Checkpointing,
    now_unix: float,
    *,
    ended: bool = False,
    beside: bool = True,
    known: object = None,
    processes: Processes = every_process,
) -> CommittedTree | None:
    """Return the newest complete state, or None. `ended`: the guest has exited by itself, so nothing is written any more.

    `beside`: also earlier checkpoints, which the guest may be removing, and what lies beside them, which it may be writing.
    `known`: the key of a state that was complete before, so that open files need not be looked for again. `processes`: those
    that may write to the directory. OSError if it has more than MOST_ENTRIES entries.
    """
    if rules.mode == "stable":
        return _stable(directory, rules, now_unix, ended, known, processes)
    entries = []
    for count, path in enumerate(directory.iterdir()):
        if count == MOST_ENTRIES:
            raise _too_many()
        if not unfinished(path.name):
            with suppress(OSError):  # the guest may delete old entries meanwhile, or close them
                info = path.lstat()
                entries.append(_Entry(path.name, info.st_mode, info.st_mtime_ns, info.st_ino))
    checkpoints = _checkpoints(directory, entries, rules.mode)
    newest = _oldest_first(checkpoints)[-rules.keep :]
    if not newest:
        return None
    taken = set(checkpoints)
    others = [entry for entry in entries if entry not in taken]
    unnumbered = [entry for entry in others if stat.S_ISDIR(entry.mode) and rules.mode == "rename"]
    unnumbered = _oldest_first(unnumbered)[-rules.keep :]
    files = [entry for entry in others if stat.S_ISREG(entry.mode) or stat.S_ISLNK(entry.mode)]
    files = sorted(files, key=lambda entry: entry.mtime_ns)[-MOST_BESIDE:]
    saved = [*newest, *unnumbered, *files] if beside else newest[-1:]
    return CommittedTree(
        roots={f"ckpt/{entry.name}": directory / entry.name for entry in saved},
        resume=newest[-1].name,
        key=tuple((entry.name, entry.mtime_ns, entry.inode) for entry in (*newest, *unnumbered)),
    )


def _checkpoints(directory: Path, entries: Sequence[_Entry], mode: str) -> Sequence[_Entry]:
    """Return the entries that are checkpoints: directories before files, and those with numbers before others; never a link."""
    directories = [entry for entry in entries if stat.S_ISDIR(entry.mode)]
    if mode == "marker":
        return [entry for entry in directories if _is_marked(directory / entry.name)]
    files = [entry for entry in entries if stat.S_ISREG(entry.mode)]
    kinds = ([entry for entry in kind if entry.place[1]] for kind in (directories, files))
    return next(filter(None, kinds), directories or files)


def _is_marked(path: Path) -> bool:
    return _is_file(path / MARKER)


def is_done(directory: Path) -> bool:
    """Tell whether the program has left word that it is done, whatever else runs on."""
    return _is_file(directory / DONE_MARKER)


def _is_file(path: Path) -> bool:
    """Tell whether it is a file, and no link: a guest's may lead to any file of the host, and to a mount that hangs."""
    with suppress(OSError):  # a directory that is closed to us is not complete
        return stat.S_ISREG(path.lstat().st_mode)
    return False


def _oldest_first(entries: Sequence[_Entry]) -> list[_Entry]:
    """Sort by number where names differ only in numbers, since copying or adding to an old entry makes its time new.

    Other names are sorted by time: an entry counts as at least as new as those of its name with lower numbers.
    """
    reached: dict[str, int] = {}
    ranks = {}
    for entry in sorted(entries, key=lambda entry: (entry.place, entry.mtime_ns)):
        shape, numbers = entry.place
        reached[shape] = max(reached.get(shape, 0), entry.mtime_ns)
        ranks[entry] = (reached[shape], numbers, entry.mtime_ns, entry.name)
    return sorted(entries, key=ranks.__getitem__)


def _stable(
    directory: Path, rules: Checkpointing, now_unix: float, ended: bool, known: object, processes: Processes
) -> CommittedTree | None:
    with suppress(FileNotFoundError):
        found = look_at(directory)
        files = {name: look for name, look in found.items() if not stat.S_ISDIR(look.mode)}
        if any(unfinished(name.rpartition("/")[2]) for name in files):
            return None
        newest = max((max(look.mtime_ns, look.ctime_ns) for look in files.values()), default=0) / 1e9
        settled = ended or now_unix - newest >= rules.stable_s
        key = tuple((name, look.mtime_ns, look.size) for name, look in files.items())
        if files and settled and (ended or key == known or not open_for_writing(directory, files.values(), processes)):
            return CommittedTree(roots={"ckpt": directory}, resume="", key=key, scans={"ckpt": found})
    return None


def look_at(directory: Path) -> Scan:
    """Scan a checkpoint directory. OSError if it has too many entries, or one is removed meanwhile."""
    try:
        return scan(directory, MOST_ENTRIES)
    except BadManifest as error:
        raise _too_many() from error


def _too_many() -> OSError:
    return OSError(errno.E2BIG, f"the checkpoint directory has more than {MOST_ENTRIES} files and directories")


def being_written(directory: Path) -> frozenset[str]:
    """Return the names of some entries that are not complete."""
    with suppress(FileNotFoundError):
        return frozenset(islice((path.name for path in directory.iterdir() if unfinished(path.name)), MOST_WRITTEN))
    return frozenset()


def unfinished(name: str) -> bool:
    return name.startswith(".") or name.endswith(_UNFINISHED_SUFFIXES) or name in _SENTINELS


def open_for_writing(directory: Path, files: Iterable[Look], processes: Processes = every_process) -> bool:
    """Tell whether one of these processes, as far as we may inspect them, has one of these files of `directory` open for writing,
    or mapped shared and writable.

    Files are compared by inode: a container has other paths for them. Only files on the same device are read: a file system
    that a guest serves could block the reader for ever.
    """
    inodes = {(look.device, look.inode) for look in files if stat.S_ISREG(look.mode)}
    device, numbers = device_of(directory), {number for _, number in inodes}
    for pid in processes():
        process = Path(f"/proc/{pid}")
        with suppress(OSError, ValueError, KeyError):
            here: set[str] | None = None
            for info in (process / "fdinfo").iterdir():
                with suppress(OSError):  # it was closed meanwhile
                    told = _head(info)
                    if int(told["flags"], 8) & (os.O_WRONLY | os.O_RDWR):
                        here = numbers_on(pid, device) if here is None else here
                        if told["mnt_id"].strip() in here and _number(process, info.name, told) in numbers:
                            return True
    return not inodes.isdisjoint(mapped_for_writing(processes))


def _head(info: Path) -> dict[str, str]:
    """Return what /proc tells of every open file. More follows for some, as much as a guest likes."""
    with info.open() as file:
        return dict(line.split(":", 1) for line in file.read(FDINFO_CHARS).splitlines() if ":" in line)


def _number(process: Path, descriptor: str, told: Mapping[str, str]) -> int:
    """Return the number of the inode of an open file: as the kernel tells it from Linux 5.14 on, else its file system."""
    return int(told["ino"]) if "ino" in told else (process / "fd" / descriptor).stat().st_ino


def link_checkpoints(base: Path, directory: str) -> None:
    """Link the checkpoint directory to its name in the working directory."""
    link = base / "work" / directory
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.parent.resolve().is_relative_to((base / "work").resolve()):
        raise OSError(f"{directory} leads out of the working directory")
    if link.is_dir() and not link.is_symlink():
        trees.remove(link)  # checkpoints in the submitted directory are not the job's state
    link.symlink_to(os.path.relpath(base / "ckpt", link.parent))

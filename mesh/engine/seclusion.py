"""What a guest of the `process` engine does not see: its owner's home, the daemon's state, other jobs. Standard library only.

In the guest's own mount namespace an empty directory lies over each of them, and over the home one of the attempt's own. Kept
within are the attempt's directories, and for reading the programs that it is started with: what PATH leads to, interpreters by
every link of theirs. Nothing is moved or copied, and all of it goes with the namespace. Other files are seen as before.
"""

import ctypes
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_NOATIME, MS_NODIRATIME, MS_BIND, MS_REC, MS_RELATIME = 1024, 2048, 4096, 1 << 14, 1 << 21
# As statvfs(3) tells them; a user who made his own namespace may not take them away (mount_namespaces(7)).
STAYING = {2: MS_NOSUID, 4: MS_NODEV, 8: MS_NOEXEC, 1024: MS_NOATIME, 2048: MS_NODIRATIME, 4096: MS_RELATIME}
LINKS = 40  # one after the other, as the kernel's own limit (path_resolution(7))
TOOLS = {"bin", "sbin", "shims", "condabin"}
INTERPRETERS = ("python3", "python")

libc = ctypes.CDLL(None, use_errno=True)


class Seclusion:
    """`home` and `hidden`, directories and sockets, are what no guest sees; instead of the home it gets an empty one of its own.
    `sees`: what its owner lets every guest read all the same."""

    def __init__(self, home: Path, hidden: Iterable[Path], sees: Iterable[Path] = ()) -> None:
        self.home = home.resolve()
        self._hidden = {self.home, *(path.resolve() for path in hidden)} - {Path("/")}
        self._sees = tuple(path.expanduser() for path in sees)

    def plain(
        self, private: Path, own: Iterable[Path], programs: Iterable[Path], env: Mapping[str, str]
    ) -> dict[str, object]:
        """What `enter` is to be given. `private`: for its home; `own`: what it may write; `programs`: what it runs."""
        reads = {*self._sees, *tools(env, self.home)}
        for program in programs:
            reads |= set(prefixes(program, self.home))
        kept = {str(path): False for path in (read.resolve() for read in reads) if self._hides(path)}
        kept |= {str(path): True for path in (each.resolve() for each in own) if self._hides(path)}
        return {
            "home": str(self.home),
            "private": str(private.resolve()),
            "hidden": sorted(map(str, self._hidden), key=len),
            "kept": kept,
        }

    def _hides(self, path: Path) -> bool:
        """It lies within what is hidden, and nothing that is hidden within it."""
        return any(place in path.parents for place in self._hidden) and not any(
            path in (place, *place.parents) for place in self._hidden
        )


def tools(env: Mapping[str, str], home: Path) -> Iterator[Path]:
    """Where programs and their libraries lie, by these variables."""
    for directory in map(Path, env.get("PATH", "").split(":")):
        if directory.is_absolute():
            yield from around(directory, home)
            for name in INTERPRETERS:
                yield from prefixes(directory / name, home)
    yield from (path for path in map(Path, env.get("LD_LIBRARY_PATH", "").split(":")) if path.is_absolute())


def prefixes(program: Path, home: Path) -> Iterator[Path]:
    """The trees to which a program belongs, link by link: an environment, then the interpreter that it was made from."""
    for _ in range(LINKS):
        if not (program.is_symlink() or program.exists()):
            return
        yield from around(program.parent, home)
        yield from around(program.parent.resolve(), home)
        if not program.is_symlink():
            return
        program = program.parent.resolve() / program.readlink()


def around(directory: Path, home: Path) -> tuple[Path, ...]:
    """`x/bin` belongs to `x`, but not the whole home to `~/bin`, nor `~/.local`, which has keyrings too."""
    parent = directory.parent
    if directory.name not in TOOLS or parent == home:
        return (directory,)
    if parent == home / ".local":
        return (directory, parent / "lib")
    return (parent,)


def enter(home: str, private: str, hidden: list[str], kept: dict[str, bool]) -> None:
    """In a mount namespace of its own. OSError if anything cannot be done: then nothing may be run."""
    places = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in (*kept, private) if Path(path).exists()}
    for place in hidden:
        if not Path(place).exists():
            continue
        if place == home:
            _mount(f"/proc/self/fd/{places[private]}", place, None, MS_BIND)
        elif Path(place).is_dir():
            _mount("none", place, "tmpfs", MS_NOSUID | MS_NODEV, "mode=0700,size=1m")
        else:
            _mount("/dev/null", place, None, MS_BIND)
    for path, writable in sorted(kept.items(), key=lambda item: len(item[0])):
        if path not in places or _is_seen(Path(path), places[path]):
            continue
        _make_place(Path(path), places[path])
        _mount(f"/proc/self/fd/{places[path]}", path, None, MS_BIND | MS_REC)
        if not writable:
            found = os.statvfs(path).f_flag
            flags = sum(flag for told, flag in STAYING.items() if found & told)
            _mount(None, path, None, MS_REMOUNT | MS_BIND | MS_RDONLY | flags)
    for descriptor in places.values():
        os.close(descriptor)


def _is_seen(path: Path, descriptor: int) -> bool:
    """Within something that is kept already."""
    return path.exists() and os.path.samestat(path.stat(), os.fstat(descriptor))


def _make_place(path: Path, descriptor: int) -> None:
    is_directory = stat.S_ISDIR(os.fstat(descriptor).st_mode)
    (path if is_directory else path.parent).mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_directory:
        path.touch(0o600)


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind, data)]
    if libc.mount(texts[0], texts[1], texts[2], flags, texts[3]) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), target)

"""Places hidden from process guests: the owner's home, temporary files and sockets, the daemon's state, other jobs.

In the guest's mount namespace an empty directory covers each of them; directories of the attempt stand for the home and for /tmp.
The attempt's directories stay visible, and read-only the daemon's programs: its interpreter, the directories on its PATH, and
interpreters there through all their links. Nothing that a job sends makes a path visible. Nothing is moved or copied, and the
mounts end with the namespace. All other files stay visible. Where there are no mount namespaces, Landlock hides the same places
(`confinement`). Standard library only.
"""

import contextlib
import ctypes
import os
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mesh.util.mounts import mounts

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_NOATIME, MS_NODIRATIME, MS_BIND, MS_REC, MS_RELATIME = 1024, 2048, 4096, 1 << 14, 1 << 21
# Flags of statvfs(3) that a user namespace may not clear (mount_namespaces(7)).
STAYING = {2: MS_NOSUID, 4: MS_NODEV, 8: MS_NOEXEC, 1024: MS_NOATIME, 2048: MS_NODIRATIME, 4096: MS_RELATIME}
LINKS = 40  # in a row: the kernel's limit (path_resolution(7))
TOOLS = {"bin", "sbin", "shims", "condabin"}
INTERPRETERS = ("python3", "python")

HOME, TEMPORARY = "home", "tmp"  # the guest's own, in its attempt's directory and removed with it
TEMPORARY_PLACES = ("/tmp", "/var/tmp")
SECRETS = "/run/secrets"  # read-only
SHARED_MEMORY, TERMINALS, GROUPS = "/dev/shm", "/dev/pts", "/sys/fs/cgroup"
# Sockets of sessions and services stand in /run: agents, buses, container engines; message queues are files of the owner's too.
# A guest that serves a file system can block whoever looks at it.
IN_DEV = (SHARED_MEMORY, "/dev/mqueue", "/dev/fuse")
PLACES = (*TEMPORARY_PLACES, *IN_DEV, "/run")
# What programs need of /run: name services, the driver's daemon, and the programs of NixOS.
SERVICES = ("nscd", "nslcd", "systemd/userdb", "nvidia-persistenced", "opengl-driver", "current-system")
RESOLVER = "/etc/resolv.conf"  # often a link into /run

libc = ctypes.CDLL(None, use_errno=True)


class Sandbox:
    """Paths hidden from every guest: `home`, `hidden` directories and sockets, and those that `PLACES` names.

    `env` is the daemon's environment; sockets that it names are hidden too. `sees`: paths that the owner lets every guest read.
    """

    def __init__(self, home: Path, hidden: Iterable[Path], env: Mapping[str, str], sees: Iterable[Path] = ()) -> None:
        self.home, self._env = home.resolve(), dict(env)
        places = (*hidden, *map(Path, PLACES), *named_sockets(env))
        self._hidden = {self.home, *(path.resolve() for path in places)} - {Path("/")}
        services = (Path("/run", name) for name in SERVICES)
        self._sees = (*(path.expanduser() for path in sees), *services, Path(RESOLVER))

    def plain(
        self,
        attempt: Path,
        own: Iterable[Path],
        shm_mib: int,
        reads: Iterable[Path] = (),
        secrets: str | None = None,
        environment: str | None = None,
    ) -> dict[str, Any]:
        """Return the arguments of `enter`. `attempt`: its directory; `own`: paths that the guest may write; `reads`: that it may
        read; `secrets`: the directory that stands for SECRETS; `environment`: its Python environment, which it may read.
        """
        seen = [*reads]
        if environment is not None:
            seen += [Path(environment), *prefixes(Path(environment) / "bin" / "python", self.home)]
        kept = dict.fromkeys(map(str, self._programs()), False)
        kept |= {str(path): False for path in (each.resolve() for each in seen) if self._can_keep(path)}
        kept |= {str(path): True for path in (each.resolve() for each in own) if self._can_keep(path)}
        home, temporary = attempt.resolve() / HOME, attempt.resolve() / TEMPORARY
        home.mkdir(mode=0o700, exist_ok=True)
        temporary.mkdir(exist_ok=True)
        temporary.chmod(0o1777)
        stands_for = {str(Path(place).resolve()): str(temporary) for place in TEMPORARY_PLACES}
        covered = {str(path) for path in self._hidden if path.exists()}
        if secrets is not None:
            covered.add(SECRETS)
            stands_for[SECRETS] = secrets
        return {
            "hidden": sorted(covered, key=len),
            "stands_for": {str(self.home): str(home), **stands_for},
            "kept": kept,
            "shm_mib": shm_mib,
        }

    def hides(self, path: Path, seen: Iterable[Path]) -> bool:
        """Return whether a guest that sees these of the hidden places cannot see a path.

        It decides by the path alone: guests must not learn what else exists.
        """
        path = Path(os.path.normpath(path))
        return self._can_keep(path) and not any(path.is_relative_to(each) for each in seen)

    def _programs(self) -> set[Path]:
        programs = [Path(sys.executable), *(path / "bin" / name for path in self._sees for name in INTERPRETERS)]
        reads = {*self._sees, *tools(self._env, self.home)}.union(*(prefixes(each, self.home) for each in programs))
        return {path for path in (read.resolve() for read in reads) if self._can_keep(path) and os.path.lexists(path)}

    def _can_keep(self, path: Path) -> bool:
        """Return whether `path` lies within a hidden path and contains none."""
        return any(place in path.parents for place in self._hidden) and not any(
            path in (place, *place.parents) for place in self._hidden
        )


def tools(env: Mapping[str, str], home: Path) -> Iterator[Path]:
    """Yield the directories of programs and libraries that PATH and LD_LIBRARY_PATH name."""
    for directory in map(Path, env.get("PATH", "").split(":")):
        if directory.is_absolute():
            yield from around(directory, home)
            for name in INTERPRETERS:
                yield from prefixes(directory / name, home)
    yield from (path for path in map(Path, env.get("LD_LIBRARY_PATH", "").split(":")) if path.is_absolute())


def prefixes(program: Path, home: Path) -> Iterator[Path]:
    """Yield the trees that a program belongs to, link by link: an environment, then the interpreter it was made from."""
    for _ in range(LINKS):
        if not os.path.lexists(program):  # also in a directory that the daemon may not search
            return
        yield from around(program.parent, home)
        yield from around(program.parent.resolve(), home)
        if not program.is_symlink():
            return
        program = program.parent.resolve() / program.readlink()


def around(directory: Path, home: Path) -> tuple[Path, ...]:
    """Return the tree of a program directory: `x` for `x/bin`, but neither the whole home nor ~/.local, which holds keyrings."""
    parent = directory.parent
    if directory.name not in TOOLS or parent == home:
        return (directory,)
    if parent == home / ".local":
        return (directory, parent / "lib")
    return (parent,)


def named_sockets(env: Mapping[str, str]) -> Iterator[Path]:
    """Yield the sockets that variables name: SSH_AUTH_SOCK, DBUS_SESSION_BUS_ADDRESS, DOCKER_HOST and others."""
    for value in env.values():
        path = Path(value.rpartition("unix:path=")[2].removeprefix("unix://").partition(",")[0])
        with contextlib.suppress(OSError, ValueError):
            if path.is_absolute() and path.is_socket():
                yield path


def enter(hidden: list[str], stands_for: dict[str, str], kept: dict[str, bool], shm_mib: int) -> None:
    """Mount the covers, in a new mount namespace. OSError if any step fails: then nothing may run."""
    sources = (*kept, *stands_for.values())
    places = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in sources if Path(path).exists()}
    for place in hidden:
        if place in stands_for:
            Path(place).mkdir(mode=0o700, parents=True, exist_ok=True)  # it may lie in one that is covered already
            _mount(f"/proc/self/fd/{places[stands_for[place]]}", place, None, MS_BIND)
            if place == SECRETS:
                _make_read_only(place)
        elif place == SHARED_MEMORY:
            _mount("none", place, "tmpfs", MS_NOSUID | MS_NODEV, f"mode=1777,size={shm_mib}m")
        elif Path(place).is_dir():
            _mount("none", place, "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755,size=1m")
        elif Path(place).exists():
            _mount("/dev/null", place, None, MS_BIND)
    for path, writable in sorted(kept.items(), key=lambda item: len(item[0])):
        if path not in places or _is_seen(Path(path), places[path]):
            continue
        _make_place(Path(path), places[path])
        _mount(f"/proc/self/fd/{places[path]}", path, None, MS_BIND | MS_REC)
        if not writable:
            _make_read_only(path)
    for descriptor in places.values():
        os.close(descriptor)
    if Path(TERMINALS).is_dir():  # the owner's could be read and written
        _mount("devpts", TERMINALS, "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620")
    for mount in mounts():
        if Path(mount.place).is_relative_to(GROUPS) and os.path.ismount(mount.place):  # another mount may cover it
            _make_read_only(mount.place)  # or the guest could leave its own


def show_read_only(paths: Iterable[str]) -> None:
    """Mount directories read-only over themselves, in a new mount namespace. OSError if that fails."""
    for path in paths:
        _mount(path, path, None, MS_BIND | MS_REC)
        _make_read_only(path)


def _make_read_only(path: str) -> None:
    found = os.statvfs(path).f_flag
    flags = sum(flag for told, flag in STAYING.items() if found & told)
    _mount(None, path, None, MS_REMOUNT | MS_BIND | MS_RDONLY | flags)


def _is_seen(path: Path, descriptor: int) -> bool:
    """Return whether a path is visible already, within another one that stays."""
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

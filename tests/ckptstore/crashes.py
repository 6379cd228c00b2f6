"""Every state that a crash can leave of a store: its writes, syncs, renames and removals are recorded, then replayed in part.

The rules are POSIX's, not those of one file system. Written bytes survive a crash for certain only if the file was synced
afterwards; else they may be missing, partial, or zeros. A new name, a rename or a removal survives for certain only if its
directory was synced afterwards; those that were not may each have happened or not, independent of the others.
"""

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec
import pytest


class Write(msgspec.Struct, frozen=True):
    file: int
    offset: int
    data: bytes


class Link(msgspec.Struct, frozen=True):
    """`name` refers to this file from now on; `old` is its previous name."""

    name: str
    file: int
    old: str = ""


class Unlink(msgspec.Struct, frozen=True):
    name: str


class Sync(msgspec.Struct, frozen=True):
    """An fsync of a file or a directory."""

    file: int | None
    directory: str = ""


class Mark(msgspec.Struct, frozen=True):
    """A promise made to the caller at this step."""

    what: str
    value: Any


Step = Write | Link | Unlink | Sync | Mark
State = tuple[tuple[str, bytes], ...]


class Recorder:
    """Records file operations below `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.steps: list[Step] = []
        self._names: dict[str, int] = {}
        self._open: dict[int, int | str] = {}
        self._count = itertools.count()

    def mark(self, what: str, value: Any = None) -> None:
        self.steps.append(Mark(what, value))

    @contextmanager
    def recording(self) -> Iterator[None]:
        real_open, real_pwrite, real_fsync = os.open, os.pwrite, os.fsync
        real_rename, real_unlink, real_close = os.rename, os.unlink, os.close

        def open_(path: Any, flags: int, mode: int = 0o777, **options: Any) -> int:
            descriptor = real_open(path, flags, mode, **options)
            name = self._name(path)
            if name is not None and flags & os.O_DIRECTORY == 0 and flags & os.O_CREAT:
                self._open[descriptor] = self._names[name] = next(self._count)
                self.steps.append(Link(name, self._names[name]))
            elif name is not None:
                self._open[descriptor] = self._names.get(name, name)
            return descriptor

        def pwrite(descriptor: int, data: Any, offset: int) -> int:
            written = real_pwrite(descriptor, data, offset)
            file = self._open.get(descriptor)
            if isinstance(file, int):
                self.steps.append(Write(file, offset, bytes(data[:written])))
            return written

        def fsync(descriptor: int) -> None:
            real_fsync(descriptor)
            found = self._open.get(descriptor)
            if isinstance(found, int):
                self.steps.append(Sync(found))
            elif found is not None:
                self.steps.append(Sync(None, found))

        def rename(source: Any, target: Any, **options: Any) -> None:
            real_rename(source, target, **options)
            before, after = self._name(source), self._name(target)
            if before is not None and after is not None:
                self._names[after] = self._names.pop(before)
                self.steps.append(Link(after, self._names[after], before))

        def unlink(path: Any, **options: Any) -> None:
            real_unlink(path, **options)
            name = self._name(path)
            if name is not None and self._names.pop(name, None) is not None:
                self.steps.append(Unlink(name))

        def close(descriptor: int) -> None:
            self._open.pop(descriptor, None)
            real_close(descriptor)

        with pytest.MonkeyPatch.context() as patch:
            for name, function in [
                ("open", open_), ("pwrite", pwrite), ("fsync", fsync), ("rename", rename), ("unlink", unlink), ("close", close),
            ]:  # fmt: skip
                patch.setattr(os, name, function)
            yield

    def _name(self, path: Any) -> str | None:
        """Return the name below the root; None elsewhere and for the index, which is a cache."""
        if not isinstance(path, str | os.PathLike):
            return None
        found = Path(os.fspath(path))
        if not found.is_relative_to(self.root) or found.name.startswith("index.sqlite"):
            return None
        return found.relative_to(self.root).as_posix()


def crash_states(steps: list[Step]) -> Iterator[tuple[State, list[Mark]]]:
    """Yield every possible state with the promises made before it."""
    seen: set[tuple[State, int]] = set()
    marks: list[Mark] = []
    for count in range(len(steps) + 1):
        done = steps[:count]
        if done and isinstance(done[-1], Mark):
            marks = [*marks, done[-1]]
        for state in _states(done):
            if (state, len(marks)) not in seen:
                seen.add((state, len(marks)))
                yield state, marks


def _states(done: list[Step]) -> Iterator[State]:
    synced = {
        step.directory: number for number, step in enumerate(done) if isinstance(step, Sync) and step.file is None
    }
    names = [(number, step) for number, step in enumerate(done) if isinstance(step, Link | Unlink)]
    loose = [number for number, step in names if number > synced.get(str(Path(step.name).parent), -1)]
    contents_of = cache(partial(_contents, done))
    for happened in itertools.product((True, False), repeat=len(loose)):
        missing = {number for number, there in zip(loose, happened, strict=True) if not there}
        table: dict[str, int] = {}
        for number, step in names:
            if number in missing:
                continue
            if isinstance(step, Unlink):
                table.pop(step.name, None)
            else:
                table.pop(step.old, None)
                table[step.name] = step.file
        files = {name: contents_of(file) for name, file in table.items()}
        for contents in itertools.product(*files.values()):
            yield tuple(sorted(zip(files, contents, strict=True)))


def _contents(done: list[Step], file: int) -> list[bytes]:
    """Return the possible contents of a file: complete if it was synced, else also empty, half of it, or zeros."""
    data = bytearray()
    unsynced = False
    for step in done:
        if isinstance(step, Write) and step.file == file:
            data[step.offset : step.offset + len(step.data)] = step.data
            unsynced = True
        elif isinstance(step, Sync) and step.file == file:
            unsynced = False
    whole = bytes(data)
    return [whole, b"", whole[: len(whole) // 2], bytes(len(whole))] if unsynced else [whole]

"""A tree of files as a stream: what `mesh cp` brings from the node that has it.

The sender is a lender, so the reader bounds everything before it spends anything: each frame has a short header, a file tells its
size before its data, and holes are not sent but count. Tar has no such bounds: its extended headers may have any size.

A frame is the length of its header (4 bytes, big-endian), the header (msgpack), and for `Data` as many bytes as that says.
"""

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from ckptstore.errors import BadPath
from ckptstore.manifest import MAX_DEPTH, MAX_FILES, MAX_PATH_BYTES
from ckptstore.tree_writer import TreeWriter
from membership.malformed import MALFORMED
from mesh.util.errors import ExitCode, MeshError

LENGTH_BYTES = 4
HEADER_LIMIT = 3 * MAX_PATH_BYTES  # of a header: a path, the target of a link and numbers
SLICE_BYTES = 1 << 20  # of one frame: what the sender holds of a file
COPY_LIMIT = 64 << 30  # bytes of one copy, holes included, unless its user asks for more (own choice)
NOT_A_STREAM = "the answer is not a stream of files; its node may be damaged or hostile"
TOO_MANY = f"the copy has more than {MAX_FILES} entries: copy its directories one by one"

_Size = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class Entry(msgspec.Struct, frozen=True, tag="entry"):
    """A file, a directory or a link; `size` is that of a file with its holes."""

    path: Annotated[bytes, msgspec.Meta(max_length=MAX_PATH_BYTES)]
    mode: Annotated[int, msgspec.Meta(ge=0, lt=2**16)]
    mtime_s: Annotated[int, msgspec.Meta(ge=0, lt=2**33)] = 0
    size: _Size = 0
    target: Annotated[bytes, msgspec.Meta(max_length=MAX_PATH_BYTES)] = b""


class Data(msgspec.Struct, frozen=True, tag="data"):
    """The `length` bytes at `offset` of the last entry, which follow."""

    offset: _Size
    length: Annotated[int, msgspec.Meta(ge=1, le=SLICE_BYTES)]


class End(msgspec.Struct, frozen=True, tag="end"):
    """The end of the stream: complete, or `problem` says why not."""

    problem: Annotated[str, msgspec.Meta(max_length=1000)] = ""


_decoder = msgspec.msgpack.Decoder(Entry | Data | End)


def frame(header: Entry | Data | End, data: bytes = b"") -> bytes:
    encoded = msgspec.msgpack.encode(header)
    return len(encoded).to_bytes(LENGTH_BYTES, "big") + encoded + data


# --- sending


def packed(top: Path) -> Iterator[bytes]:
    """Yield the stream of a file or directory, with one top entry of its name. Files that change are taken as they are when read.

    What vanishes meanwhile is left out, and so is all but files, directories and links. No list of files is kept.
    """
    ready, end = bytearray(), End()
    try:
        for piece in _frames(top):
            ready += piece
            if len(ready) >= SLICE_BYTES:
                yield bytes(ready)
                ready.clear()
    except MeshError as error:
        end = End(str(error))
    yield bytes(ready) + frame(end)


def _frames(top: Path) -> Iterator[bytes]:
    with suppress(OSError):  # it was there a moment ago
        yield from _packed_directory(top) if top.is_dir() else _packed_file(top, os.fsencode(top.name))


def _packed_directory(top: Path) -> Iterator[bytes]:
    """Yield the frames of a directory. Only names of directories that are still to be entered are kept; MeshError if it has more
    entries than a reader takes.
    """
    levels, count = [(top.parent, b"", [top.name])], 0
    while levels:
        parent, above, names = levels[-1]
        if not names:
            levels.pop()
            continue
        inner = names.pop()
        directory, path, waiting = parent / inner, above + os.fsencode(inner), list[str]()
        try:
            descriptor = _opened_itself(directory, os.O_DIRECTORY)
        except OSError:
            continue
        try:
            yield frame(_entry(path, os.fstat(descriptor)))
            with os.scandir(descriptor) as entries:
                for entry in entries:
                    count += 1
                    if count > MAX_FILES:
                        raise MeshError(TOO_MANY)
                    below = path + b"/" + os.fsencode(entry.name)
                    try:
                        info = os.stat(entry.name, dir_fd=descriptor, follow_symlinks=False)
                        if stat.S_ISDIR(info.st_mode) and len(levels) < MAX_DEPTH:
                            waiting.append(entry.name)
                        elif stat.S_ISLNK(info.st_mode):
                            target = os.fsencode(os.readlink(entry.name, dir_fd=descriptor))
                            yield frame(msgspec.structs.replace(_entry(below, info), target=target))
                        elif stat.S_ISREG(info.st_mode):
                            yield from _packed_file(directory / entry.name, below)
                    except OSError:
                        continue
        finally:
            os.close(descriptor)
        levels.append((directory, path + b"/", waiting))


def _packed_file(file: Path, path: bytes) -> Iterator[bytes]:
    descriptor = _opened_itself(file, os.O_NONBLOCK)
    try:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            return
        yield frame(_entry(path, info))
        end = 0
        while (start := _next_data(descriptor, end)) < info.st_size:
            end = min(os.lseek(descriptor, start, os.SEEK_HOLE), info.st_size)
            while start < end and (data := os.pread(descriptor, min(SLICE_BYTES, end - start), start)):
                yield frame(Data(start, len(data)), data)
                start += len(data)
            if start < end:  # it became shorter
                return
    finally:
        os.close(descriptor)


def _next_data(descriptor: int, offset: int) -> int:
    """Return where data begins from an offset on; past the end if only a hole is left (lseek(2))."""
    try:
        return os.lseek(descriptor, offset, os.SEEK_DATA)
    except OSError:
        return 2**63


def _opened_itself(path: Path, flags: int) -> int:
    """Open a file; OSError if a link has replaced it or a parent since the check: the job may be hostile."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | flags)
    if os.readlink(f"/proc/self/fd/{descriptor}") != str(path):  # noqa: PTH115
        os.close(descriptor)
        raise OSError(f"{path} has moved")
    return descriptor


def _entry(path: bytes, info: os.stat_result) -> Entry:
    size = info.st_size if stat.S_ISREG(info.st_mode) else 0
    return Entry(path, info.st_mode, min(max(int(info.st_mtime), 0), 2**33 - 1), size)


# --- receiving


class Copied(NamedTuple):
    """`left_out`: links that lead out of the tree."""

    files: int
    bytes: int
    left_out: int


def unpack(pieces: Iterator[bytes], target: Path, name: str, limit_bytes: int = COPY_LIMIT) -> Copied:
    """Write a stream to `target`, a new name, or under `name` in an existing directory. Files with the same names are replaced.

    MeshError if the stream breaks its bounds or has a second top entry; what was written before that stays.
    """
    inside = target.is_dir()
    root, top = (target, name) if inside else (target.parent, target.name)
    sent, files, size, left_out = "", 0, 0, 0
    if not root.is_dir():
        raise MeshError(f"{root} is no directory: make it, or name another place", ExitCode.USAGE)
    try:
        with TreeWriter(root, replaces=True) as tree:
            for entry, data in entries(pieces, limit_bytes):
                first, _, rest = os.fsdecode(entry.path).partition("/")
                sent = sent or first
                if first != sent:
                    raise MeshError("the copy has ended: its node sent more than was asked for")
                path = f"{top}/{rest}" if rest else top
                if stat.S_ISDIR(entry.mode):
                    tree.directory(path, entry.mode & 0o755)
                elif stat.S_ISLNK(entry.mode):
                    try:
                        tree.link(path, os.fsdecode(entry.target))
                    except BadPath:
                        left_out += 1
                elif stat.S_ISREG(entry.mode):
                    _write_file(tree.file(path, entry.mode & 0o755 | 0o600), entry, data)
                    files, size = files + 1, size + entry.size
                else:
                    raise MeshError(NOT_A_STREAM)
                if tree.directories > MAX_FILES:  # a path can imply directories that are no entries
                    raise MeshError(TOO_MANY)
    except BadPath as error:
        raise MeshError(f"the copy has ended: its node sent a path that does not stay below {root}: {error}") from error
    except OSError as error:
        raise MeshError(f"cannot write below {root}: {error}") from error
    return Copied(files, size, left_out)


def unpack_file(pieces: Iterator[bytes], write: Callable[[bytes], None], limit_bytes: int = COPY_LIMIT) -> Copied:
    """Give `write` the bytes of the only file of a stream; MeshError if it has more, or a directory."""
    files = size = 0
    for entry, data in entries(pieces, limit_bytes):
        if files or not stat.S_ISREG(entry.mode):
            raise MeshError("it is no single file: name a directory of this machine to copy it to", ExitCode.USAGE)
        at, files, size = 0, 1, entry.size
        for offset, piece in chain(data, [(entry.size, memoryview(b""))]):
            while at < offset:  # a hole
                write(bytes(hole := min(offset - at, SLICE_BYTES)))
                at += hole
            write(bytes(piece))
            at += len(piece)
    return Copied(files, size, 0)


def _write_file(descriptor: int, entry: Entry, data: Iterator[tuple[int, memoryview]]) -> None:
    try:
        os.ftruncate(descriptor, entry.size)
        for offset, piece in data:
            os.pwrite(descriptor, piece, offset)
        os.utime(descriptor, (entry.mtime_s, entry.mtime_s))
    finally:
        os.close(descriptor)


def entries(pieces: Iterator[bytes], limit_bytes: int) -> Iterator[tuple[Entry, Iterator[tuple[int, memoryview]]]]:
    """Yield each entry with its data, as (offset, bytes). MeshError if the stream is malformed, incomplete or over its limits."""
    source = _Source(pieces)
    left, count = limit_bytes, 0
    source.advance()
    while isinstance(entry := source.header, Entry):
        left, count = left - entry.size, count + 1
        if count > MAX_FILES:
            raise MeshError(TOO_MANY)
        if left < 0:
            raise MeshError(
                f"the copy holds more than {limit_bytes >> 20} MiB (holes count): copy less at a time, "
                "or raise the limit, as `mesh cp --limit 200g`"
            )
        data = source.data(entry.size)
        yield entry, data
        for _ in data:  # what the caller did not read
            pass
    if not isinstance(source.header, End):
        raise MeshError(NOT_A_STREAM)
    if source.header.problem:
        raise MeshError(f"the copy is not complete: {source.header.problem}")


class _Source:
    """Frames from pieces of any size. At most one header and one piece are in memory."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces, self._piece = pieces, memoryview(b"")
        self.header: Entry | Data | End = End()

    def advance(self) -> None:
        length = int.from_bytes(b"".join(self._bytes(LENGTH_BYTES)), "big")
        if length > HEADER_LIMIT:
            raise MeshError(NOT_A_STREAM)
        try:
            self.header = _decoder.decode(b"".join(self._bytes(length)))
        except MALFORMED as error:
            raise MeshError(NOT_A_STREAM) from error

    def data(self, size: int) -> Iterator[tuple[int, memoryview]]:
        """Yield the data of a file of this size, and advance to the next entry."""
        end = 0
        self.advance()
        while isinstance(header := self.header, Data):
            if header.offset < end or header.offset + header.length > size:
                raise MeshError(NOT_A_STREAM)
            end = header.offset
            for piece in self._bytes(header.length):
                yield end, piece
                end += len(piece)
            self.advance()

    def _bytes(self, count: int) -> Iterator[memoryview]:
        while count:
            if not self._piece:
                self._piece = memoryview(next(self._pieces, b""))
                if not self._piece:
                    raise MeshError("the copy is not complete: its node stopped sending")
            taken, self._piece = self._piece[:count], self._piece[count:]
            count -= len(taken)
            yield taken

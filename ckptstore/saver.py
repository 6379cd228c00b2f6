"""Reading a tree of files into a pack: cut by tensors, hashed, and encoded, on a few threads.

Files may be written, cut or removed by a guest at any moment, so they are read and never mapped (a mapped file that is cut short
kills its reader), and a file that was not the same before and after is not saved.
"""

import os
import re
import stat
from collections import Counter, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from pathlib import Path

from ckptstore.codec import choose, encode
from ckptstore.coding import WIDTHS, Base, Bytes, Coding
from ckptstore.errors import BadPath, SaveTorn
from ckptstore.heap import room
from ckptstore.layout import Piece, label, pieces
from ckptstore.manifest import Chunk, FileEntry, check_link, check_path
from ckptstore.pack import Location, PackWriter, chunk_name, read_at, wrap
from ckptstore.vault import Vault

DIGITS = re.compile(r"\d+")  # of a path: the step, most often


class Saver:
    """`bases` are an earlier checkpoint's chunks by label; `encoding` is whether time is spent on fewer bytes; what is written is
    sealed in `vault`."""

    def __init__(
        self,
        writer: PackWriter,
        pool: Executor,
        threads: int,
        hold: Callable[[bytes, set[str]], Location | None],
        read_chunk: Callable[[bytes], Bytes],
        bases: Mapping[bytes, Base],
        encoding: bool,
        vault: Vault | None,
    ) -> None:
        self._writer, self._pool, self._threads, self._vault = writer, pool, threads, vault
        self._hold, self._read_chunk, self._bases, self._encoding = hold, read_chunk, bases, encoding
        self._held: set[str] = set()
        self._codings: dict[str, Coding] = {}
        self._alike: Counter[str] = Counter()
        self._numbers: dict[bytes, int] = {}
        self.lengths: list[int] = []
        self.files: list[FileEntry] = []

    @property
    def ids(self) -> bytes:
        return b"".join(self._numbers)

    def add(self, prefix: str, path: Path, real: str = "") -> None:
        """Save a file, a link, or a directory with all that is in it. `real` is where it lies, links and all; without it, where
        its parent says."""
        real = real or f"{os.path.realpath(path.parent)}/{path.name}"
        try:
            info = path.lstat()
        except FileNotFoundError as error:
            raise SaveTorn(f"{path} went away while it was being saved") from error
        check_path(prefix)
        if stat.S_ISLNK(info.st_mode):
            target = str(path.readlink())
            check_link(prefix, target)
            self.files.append(FileEntry(prefix, info.st_mode, 0, (), target))
        elif stat.S_ISDIR(info.st_mode):
            self.files.append(FileEntry(prefix, info.st_mode, 0))
            for child in sorted(path.iterdir()):
                self.add(f"{prefix}/{child.name}", child, f"{real}/{child.name}")
        elif stat.S_ISREG(info.st_mode):
            self._add_file(prefix, path, real)
        else:
            raise BadPath(f"{path} is a socket, pipe or device: only files, directories and links can be saved")

    def _add_file(self, prefix: str, path: Path, real: str) -> None:
        # The second file of this shape in this checkpoint is compared with the second of the last one.
        shape = DIGITS.sub("#", prefix)
        self._alike[shape] += 1
        key = f"{shape}\0{self._alike[shape]}"
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError as error:
            raise SaveTorn(f"{path} went away while it was being saved") from error
        try:
            # A directory on the way may have become a link since it was listed, to files that are not this program's to read.
            if os.readlink(f"/proc/self/fd/{descriptor}") != real:  # noqa: PTH115
                raise SaveTorn(f"{path} moved while it was being saved")
            before = os.fstat(descriptor)
            found = pieces(lambda length, offset: os.pread(descriptor, length, offset), before.st_size)
            chunks = self._add_pieces(descriptor, key, found, path)
            after = path.lstat()
        except FileNotFoundError as error:
            raise SaveTorn(f"{path} went away while it was being saved") from error
        finally:
            os.close(descriptor)
        if _fingerprint(before) != _fingerprint(after):
            raise SaveTorn(f"{path} changed while it was being saved")
        self.files.append(FileEntry(prefix, after.st_mode, after.st_size, tuple(chunks)))

    def _add_pieces(self, descriptor: int, key: str, found: list[Piece], path: Path) -> list[Chunk]:
        chunks: list[Chunk] = []
        running: deque[tuple[Piece, bytes, Future[bytes]]] = deque()

        def take() -> None:
            piece, name, future = running.popleft()
            number = self._numbers.setdefault(future.result(), len(self._numbers))
            if number == len(self.lengths):
                self.lengths.append(piece.length)
            chunks.append(Chunk(number, name))

        try:
            for piece in found:
                name = label((key, piece.name, piece.number))
                if len(running) >= 2 * self._threads:
                    take()
                running.append((piece, name, self._pool.submit(self._add_piece, descriptor, key, piece, name, path)))
            while running:
                take()
        finally:
            for _, _, future in running:  # nobody may use the descriptor, or write, once this has returned
                future.cancel()
            for _, _, future in running:
                future.cancelled() or future.exception()
        return chunks

    def _add_piece(self, descriptor: int, key: str, piece: Piece, name: bytes, path: Path) -> bytes:
        data = room(piece.length)
        if read_at(descriptor, data, piece.offset) < piece.length:
            raise SaveTorn(f"{path} became shorter while it was being saved")
        chunk = chunk_name(data, self._vault)
        if self._hold(chunk.id, self._held) is not None:
            return chunk.id
        base = self._bases.get(name)
        if base is not None and (base.length != piece.length or self._hold(base.id, self._held) is None):
            base = None
        coding, former = Coding(), None
        if self._encoding:
            former = self._read_chunk(base.id) if base is not None else None
            coding = self._coding(f"{key}\0{piece.name}\0{base is None}", data, former, piece)
        encoded = encode(data, coding, former)
        against = base.id if base is not None and coding.delta else None
        if len(encoded) >= len(data):
            encoded, coding, against = data, Coding(), None
        self._writer.add(*wrap(chunk, encoded, len(data), coding.codec, coding.width, against, self._vault))
        return chunk.id

    def _coding(self, tensor: str, data: Bytes, former: Bytes | None, piece: Piece) -> Coding:
        """As the first chunk of its tensor was found to be best."""
        known = self._codings.get(tensor)
        if known is None:
            widths = (piece.width,) if piece.width else WIDTHS
            known = self._codings[tensor] = choose(data, former, widths)
        return known


def _fingerprint(info: os.stat_result) -> tuple[int, int, int, int]:
    # Size and time alone may lie within one clock tick, so the inode and the change time count too.
    return (info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)

"""Saver: reads a tree of files into a pack, split into chunks, hashed and encoded on a few threads.

A guest may write, truncate or remove files at any time. So files are read, never mapped (truncating a mapped file kills its
reader). A tree is saved as it was at one moment: each file must look the same from before that until it has been read. What the
guest does with a file that has been read, or removes while it is open, harms nothing.
"""

import contextlib
import errno
import logging
import os
import re
import stat
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future
from pathlib import Path

from ckptstore.buffers import allocate
from ckptstore.chunker import Piece, label, split
from ckptstore.cipher import StateCipher
from ckptstore.codec import choose, encode
from ckptstore.encoding import WIDTHS, Base, Bytes, Encoding
from ckptstore.errors import BadManifest, BadPath, FileChanged, StoreError
from ckptstore.manifest import MAX_BYTES, MAX_FILES, Chunk, FileEntry, check_link, check_path, check_text
from ckptstore.mappings import Processes, every_process, mapped_for_writing
from ckptstore.pack import Location, PackWriter, chunk_name, next_data, read_at, wrap
from ckptstore.tree_scan import TICK_NS, Look, Scan, settled

log = logging.getLogger(__name__)

RACES = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}  # of opening a path that the guest removes or replaces meanwhile
DIGITS = re.compile(r"\d+")  # digits of a path are usually the step


class Saver:
    """Saves one checkpoint. `bases` are an earlier checkpoint's chunks by label.

    `hold` keeps an existing chunk from being collected, and returns None if it is not in the store. `places` maps directories,
    as the program that made the links sees them, to prefixes: an absolute link below one becomes relative, and a link that still
    leads out of its tree is left out. Without `places` it is refused. `processes`: those that may write to the trees.
    """

    def __init__(
        self,
        writer: PackWriter,
        pool: Executor,
        threads: int,
        hold: Callable[[bytes, set[str]], Location | None],
        read_chunk: Callable[[bytes], Bytes],
        bases: Mapping[bytes, Base],
        compress: bool,
        cipher: StateCipher | None,
        places: Mapping[str, str] | None = None,
        processes: Processes = every_process,
    ) -> None:
        self._writer, self._pool, self._threads, self._cipher = writer, pool, threads, cipher
        self._hold, self._read_chunk, self._bases, self._compress = hold, read_chunk, bases, compress
        self._processes = processes
        # Inner directories first.
        self._places = None if places is None else sorted(places.items(), key=lambda place: -len(place[0]))
        self._held: set[str] = set()
        self._encodings: dict[str, Encoding] = {}
        self._same_shape: Counter[str] = Counter()
        self._numbers: dict[bytes, int] = {}
        self._zeros: dict[int, Future[bytes]] = {}  # the chunk of a hole by its length
        self._bytes = 0
        self._mapped: set[tuple[int, int]] = set()
        self._mapped_ns = 0
        self.lengths: list[int] = []
        self.files: list[FileEntry] = []
        self.left_out: list[str] = []

    @property
    def ids(self) -> bytes:
        return b"".join(self._numbers)

    def add(
        self, prefix: str, path: Path, whole: bool = True, before: Scan | None = None, known: Scan | None = None
    ) -> None:
        """Save a file, a link, or a directory, if `whole` with its contents, as they are at one moment.

        Files and links that are as in the scan `known` are left out. FileChanged if anything changes before it has been read, or
        has changed since the scan `before`.
        """
        if not self._mapped_ns:  # it takes long, and a guest that saves often soon removes what is scanned
            self._find_mapped()
        real = Path(os.path.realpath(path.parent), path.name)
        if len(self.files) + len(self.left_out) >= MAX_FILES:
            raise BadManifest(f"there are more than {MAX_FILES} files: pack small files into few large ones")
        with _reading(path):
            found = settled(path, MAX_FILES - len(self.files) - len(self.left_out), whole)
        if before is not None and found != before:
            raise FileChanged(f"{path} changed before it could be saved")
        self._clean(path, real, found)
        for name, look in found.items():
            if known is None or stat.S_ISDIR(look.mode) or not look.is_of_same_file(known.get(name)):
                self._add(f"{prefix}/{name}" if name else prefix, path / name, real / name, look)

    def _add(self, prefix: str, path: Path, real: Path, look: Look) -> None:
        """Save one entry of a tree. `real` is its path with links resolved."""
        check_path(prefix)
        check_text(prefix)
        if stat.S_ISLNK(look.mode):
            with _reading(path):
                target = str(path.readlink())
                if Look.of(path.lstat()) != look:
                    raise FileChanged(f"{path} changed while it was being saved")
            self._add_link(prefix, look.mode, target)
        elif stat.S_ISDIR(look.mode):
            self.files.append(FileEntry(prefix, look.mode, 0))
        elif stat.S_ISREG(look.mode):
            self._add_file(prefix, path, real, look)
        elif self._places is not None:  # of a program that has ended, or will open it again
            self.left_out.append(prefix)
        else:
            raise BadPath(f"{path} is a socket, pipe or device: only files, directories and links can be saved")

    def _add_link(self, prefix: str, mode: int, target: str) -> None:
        check_text(target)
        for place, saved_as in self._places or ():
            below = target.removeprefix(place)
            if below != target and below[:1] in {"", "/"} and ".." not in below.split("/"):
                target = os.path.relpath(f"/{saved_as}{below}", f"/{prefix}/..")
                break
        try:
            check_link(prefix, target)
        except BadPath:
            if self._places is None:
                raise
            self.left_out.append(prefix)
        else:
            self.files.append(FileEntry(prefix, mode, 0, (), target))

    def _add_file(self, prefix: str, path: Path, real: Path, look: Look) -> None:
        # The n-th file with this path, digits aside, is compared with the n-th one of the parent checkpoint.
        shape = DIGITS.sub("#", prefix)
        self._same_shape[shape] += 1
        key = f"{shape}\0{self._same_shape[shape]}"
        self._bytes += look.size
        if self._bytes > MAX_BYTES:
            raise BadManifest(f"the files hold more than {MAX_BYTES >> 40} TiB (holes count) with {path}")
        with _opened(path, real, look) as descriptor:
            pieces = split(lambda length, offset: os.pread(descriptor, length, offset), look.size)
            chunks = self._add_pieces(descriptor, key, pieces, path)
            if not look.holds(os.fstat(descriptor)):
                raise FileChanged(f"{path} changed while it was being saved")
        self.files.append(FileEntry(prefix, look.mode, look.size, tuple(chunks)))

    def _find_mapped(self) -> None:
        self._mapped_ns = time.time_ns()
        self._mapped = mapped_for_writing(self._processes)

    def _clean(self, path: Path, real: Path, found: Scan) -> None:
        """Write back the pages of files that are mapped for writing, so that each later write changes their times.

        Other files are not written back, which takes as long as their bytes take to the disk (1 GiB: 0.5 s, a save of it 1.3 s).
        """
        newest_ns = max(look.ctime_ns for look in found.values())
        if newest_ns > self._mapped_ns - TICK_NS:  # one may have been mapped and written since
            self._find_mapped()
        for name, look in found.items() if self._mapped else ():
            if (look.device, look.inode) in self._mapped and stat.S_ISREG(look.mode):
                with _opened(path / name, real / name, look) as descriptor:
                    os.fsync(descriptor)

    def _add_pieces(self, descriptor: int, key: str, pieces: list[Piece], path: Path) -> list[Chunk]:
        chunks: list[Chunk] = []
        running: deque[tuple[Piece, bytes, Future[bytes]]] = deque()
        data_at = 0

        def take() -> None:
            piece, name, future = running.popleft()
            number = self._numbers.setdefault(future.result(), len(self._numbers))
            if number == len(self.lengths):
                self.lengths.append(piece.length)
            chunks.append(Chunk(number, name))

        try:
            for piece in pieces:
                name = label((key, piece.name, piece.number))
                if len(running) >= 2 * self._threads:
                    take()
                end = piece.offset + piece.length
                if data_at <= piece.offset:
                    data_at = next_data(descriptor, piece.offset, end)
                hole = data_at >= end  # a guest's holes cost it nothing, so they are read and hashed once
                future = self._zeros.get(piece.length) if hole else None
                if future is None:
                    future = self._pool.submit(self._add_piece, descriptor, key, piece, name, path)
                if hole:
                    self._zeros[piece.length] = future
                running.append((piece, name, future))
            while running:
                take()
        finally:
            for _, _, future in running:  # no thread may use the descriptor after this returns
                future.cancel()
            for _, _, future in running:
                future.cancelled() or future.exception()
        return chunks

    def _add_piece(self, descriptor: int, key: str, piece: Piece, name: bytes, path: Path) -> bytes:
        data = allocate(piece.length)
        if read_at(descriptor, data, piece.offset) < piece.length:
            raise FileChanged(f"{path} was truncated while it was being saved")
        chunk = chunk_name(data, self._cipher)
        if self._hold(chunk.id, self._held) is not None:
            return chunk.id
        base = self._bases.get(name)
        if base is not None and (base.length != piece.length or self._hold(base.id, self._held) is None):
            base = None
        encoding, base_data = Encoding(), None
        if self._compress:
            base_data = self._read_base(base.id) if base is not None else None
            base = base if base_data is not None else None
            encoding = self._encoding(f"{key}\0{piece.name}\0{base is None}", data, base_data, piece)
        encoded = encode(data, encoding, base_data)
        base_id = base.id if base is not None and encoding.delta else None
        if len(encoded) >= len(data):
            encoded, encoding, base_id = data, Encoding(), None
        self._writer.add(*wrap(chunk, encoded, len(data), encoding.codec, encoding.width, base_id, self._cipher))
        return chunk.id

    def _read_base(self, identity: bytes) -> Bytes | None:
        """Return a base; None if it cannot be read, since it only makes chunks shorter."""
        try:
            return self._read_chunk(identity)
        except StoreError as error:
            log.warning("a chunk is stored whole, since an earlier one cannot be read: %s", error)
            return None

    def _encoding(self, tensor: str, data: Bytes, base_data: Bytes | None, piece: Piece) -> Encoding:
        """Return the encoding of a tensor, chosen for its first chunk."""
        known = self._encodings.get(tensor)
        if known is None:
            widths = (piece.width,) if piece.width else WIDTHS
            known = self._encodings[tensor] = choose(data, base_data, widths)
        return known


@contextlib.contextmanager
def _opened(path: Path, real: Path, look: Look) -> Iterator[int]:
    """Open a file of the guest for reading. FileChanged unless it is the one that had this look."""
    with _reading(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        # Since it was listed, a parent directory may have become a link to files that the guest may not read.
        if os.readlink(f"/proc/self/fd/{descriptor}") != str(real):  # noqa: PTH115
            raise FileChanged(f"{path} was moved while it was being saved")
        if Look.of(os.fstat(descriptor)) != look:
            raise FileChanged(f"{path} changed while it was being saved")
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn errors of the guest's own tree into FileChanged or StoreError, lest they are taken for errors of the store."""
    try:
        yield
    except OSError as error:
        if error.errno in RACES:
            raise FileChanged(f"{error.filename or path} was removed while it was being saved") from error
        raise StoreError(f"{error.filename or path} cannot be read: {error.strerror}") from error

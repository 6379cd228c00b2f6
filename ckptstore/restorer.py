"""Writing a checkpoint's files back: all of them, every chunk verified, or none."""

import os
import shutil
import stat
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path

from ckptstore.coding import Bytes
from ckptstore.errors import CorruptChunk
from ckptstore.failpoints import failpoint
from ckptstore.manifest import FileEntry, Manifest
from ckptstore.pack import write_at


def restore(
    manifest: Manifest,
    entries: Sequence[FileEntry],
    cut: str,
    destination: Path,
    read_chunk: Callable[[bytes], Bytes],
    pool: Executor,
    threads: int,
) -> None:
    """These entries, without the `cut` that their paths begin with, in `destination`, which must not exist or be empty."""
    temporary = destination.with_name(f"{destination.name}.restoring-{os.urandom(4).hex()}")
    destination.parent.mkdir(parents=True, exist_ok=True)
    temporary.mkdir()
    try:
        for entry in sorted(entries, key=lambda entry: (stat.S_ISLNK(entry.mode), entry.path)):
            path = temporary / entry.path.removeprefix(cut)
            path.parent.mkdir(parents=True, exist_ok=True)
            if stat.S_ISDIR(entry.mode):
                path.mkdir(exist_ok=True)
            elif stat.S_ISLNK(entry.mode):
                assert entry.target is not None
                path.symlink_to(entry.target)
            else:
                _restore_file(manifest, entry, path, read_chunk, pool, threads)
        for entry in reversed(entries):
            if stat.S_ISDIR(entry.mode):
                (temporary / entry.path.removeprefix(cut)).chmod(stat.S_IMODE(entry.mode) & 0o777 | 0o700)
        failpoint("restore-before-rename")
        if destination.exists():
            destination.rmdir()
        temporary.rename(destination)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _restore_file(
    manifest: Manifest,
    entry: FileEntry,
    path: Path,
    read_chunk: Callable[[bytes], Bytes],
    pool: Executor,
    threads: int,
) -> None:
    with path.open("xb", buffering=0) as file:
        running: deque[Future[None]] = deque()
        offset = 0
        try:
            for chunk in entry.chunks:
                identity, length = manifest.chunks[chunk.number], manifest.lengths[chunk.number]
                if len(running) >= 2 * threads:
                    running.popleft().result()
                running.append(pool.submit(_write_chunk, file.fileno(), read_chunk, identity, length, offset))
                offset += length
            while running:
                running.popleft().result()
        finally:
            for future in running:  # nobody may use the descriptor once this has returned
                future.cancel()
            for future in running:
                future.cancelled() or future.exception()
        os.fchmod(file.fileno(), stat.S_IMODE(entry.mode) & 0o777)


def _write_chunk(
    descriptor: int, read_chunk: Callable[[bytes], Bytes], identity: bytes, length: int, offset: int
) -> None:
    data = read_chunk(identity)
    if len(data) != length:
        raise CorruptChunk("a chunk does not have the length its manifest says")
    write_at(descriptor, data, offset)

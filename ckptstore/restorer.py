"""Restorer: writes the files of a checkpoint, all of them with every chunk verified, or none."""

import os
import shutil
import stat
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path

from ckptstore.chunker import CHUNK_BYTES
from ckptstore.encoding import Bytes
from ckptstore.errors import CorruptChunk
from ckptstore.manifest import FileEntry, Manifest
from ckptstore.pack import write_at
from ckptstore.tree_writer import TreeWriter

ZEROS = bytes(CHUNK_BYTES)


def restore(
    manifest: Manifest,
    entries: Sequence[FileEntry],
    cut: str,
    destination: Path,
    read_chunk: Callable[[bytes], Bytes],
    pool: Executor,
    threads: int,
) -> None:
    """Write these entries to `destination`, which must not exist or be empty; `cut` is removed from the front of their paths."""
    temporary = destination.with_name(f"{destination.name}.restoring-{os.urandom(4).hex()}")
    destination.parent.mkdir(parents=True, exist_ok=True)
    temporary.mkdir()
    try:
        with TreeWriter(temporary, cut) as tree:
            for entry in sorted(entries, key=lambda entry: entry.path):
                if stat.S_ISDIR(entry.mode):
                    tree.directory(entry.path, entry.mode)
                elif stat.S_ISLNK(entry.mode):
                    assert entry.target is not None
                    tree.link(entry.path, entry.target)
                else:
                    descriptor = tree.file(entry.path, entry.mode)
                    try:
                        _restore_file(manifest, entry, descriptor, read_chunk, pool, threads)
                    finally:
                        os.close(descriptor)
        if destination.exists():
            destination.rmdir()
        temporary.rename(destination)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _restore_file(
    manifest: Manifest,
    entry: FileEntry,
    descriptor: int,
    read_chunk: Callable[[bytes], Bytes],
    pool: Executor,
    threads: int,
) -> None:
    os.ftruncate(descriptor, entry.size)
    running: deque[Future[None]] = deque()
    offset = 0
    try:
        for chunk in entry.chunks:
            identity, length = manifest.chunks[chunk.number], manifest.lengths[chunk.number]
            if len(running) >= 2 * threads:
                running.popleft().result()
            running.append(pool.submit(_write_chunk, descriptor, read_chunk, identity, length, offset))
            offset += length
        while running:
            running.popleft().result()
    finally:
        for future in running:  # no thread may use the descriptor after this returns
            future.cancel()
        for future in running:
            future.cancelled() or future.exception()


def _write_chunk(
    descriptor: int, read_chunk: Callable[[bytes], Bytes], identity: bytes, length: int, offset: int
) -> None:
    """Write a chunk; one of zeros stays a hole."""
    data = read_chunk(identity)
    if len(data) != length:
        raise CorruptChunk("a chunk does not have the length its manifest says")
    if data[0] or bytes(data) != ZEROS[:length]:
        write_at(descriptor, data, offset)

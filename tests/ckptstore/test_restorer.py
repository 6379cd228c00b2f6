"""Restores that fail: no thread writes on, and no file is left."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckptstore.errors import CorruptChunk, StoreError
from ckptstore.restorer import _restore_file
from tests.ckptstore.worlds import damage, open_store, save, write_tree

THREADS = 2
CHUNKS = 5 * THREADS  # more than are read ahead


@pytest.mark.parametrize("bad", [0, CHUNKS - 1])
def test_damaged_chunk_fails_the_file_once_no_thread_writes_to_it(tmp_path: Path, bad: int) -> None:
    manifest: Any = SimpleNamespace(chunks=[bytes([n]) for n in range(CHUNKS)], lengths=[1] * CHUNKS)
    entry: Any = SimpleNamespace(size=CHUNKS, chunks=[SimpleNamespace(number=number) for number in range(CHUNKS)])
    reading, never = set[bytes](), threading.Event()

    def read_chunk(identity: bytes) -> bytes:
        if identity[0] == bad:
            raise CorruptChunk("damaged")
        reading.add(identity)
        never.wait(0.05)  # a slow disk
        reading.discard(identity)
        return identity

    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    with ThreadPoolExecutor(THREADS) as pool, pytest.raises(CorruptChunk):
        try:
            _restore_file(manifest, entry, descriptor, read_chunk, pool, THREADS)
        finally:
            assert not reading
            os.close(descriptor)


def test_failed_restore_leaves_nothing(tmp_path: Path) -> None:
    write_tree(tmp_path / "in", {"a": b"first", "b": os.urandom(1000)})
    store = open_store(tmp_path / "store")
    saved = save(store, tmp_path / "in")
    (pack,) = (tmp_path / "store" / "packs").iterdir()
    damage(pack, -1)
    (tmp_path / "out").mkdir()
    with pytest.raises(StoreError):
        store.restore(saved.id, tmp_path / "out" / "here", prefix="ckpt")
    assert not list((tmp_path / "out").iterdir())

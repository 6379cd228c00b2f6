"""Chunks arriving from a peer: decoded and checked one by one as they come, durable all together."""

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckptstore.coding import Bytes
from ckptstore.errors import CorruptChunk
from ckptstore.pack import HEADER_BYTES, MAX_STORED, ObjectHeader, ObjectStream, PackWriter, open_chunk

if TYPE_CHECKING:
    from ckptstore.store import Store


class Receiver:
    """Nothing is kept unless `finish` or `keep` returns. Each call waits for the one before, and after an end they do nothing."""

    def __init__(self, store: "Store", max_bytes: int, foreign: bool = False) -> None:
        self._store = store
        self._left = max_bytes
        self._stream = ObjectStream()
        self._held: set[str] = set()
        self._lock = threading.Lock()
        self._over = False
        self._writer = PackWriter(store.tmp, store.packs, foreign)
        self.arrived: set[bytes] = set()  # chunks, whole, whether they were here already or not

    def feed(self, data: Bytes) -> int:
        """Take some bytes; how many chunks they completed. CorruptChunk ends the receipt."""
        self._left -= len(data)
        if self._left < 0:
            raise CorruptChunk("the peer sends more than was asked for")
        count = 0
        with self._lock, self._store.disk_errors():
            for header, stored in self._stream.feed(data) if not self._over else ():
                self._take(header, stored)
                self.arrived.add(header.id)
                count += 1
        return count

    def finish(self) -> int:
        """Make what arrived durable; how many chunks were new. CorruptChunk if the stream ended inside one."""
        if not self._stream.clean:
            self.abort()
            raise CorruptChunk("the stream ended inside a chunk")
        return self.keep()

    def keep(self) -> int:
        """Make the chunks that arrived whole durable, although the stream broke: they need not be sent again."""
        with self._lock:
            if self._over:
                return 0
            self._over = True
            try:
                with self._store.disk_errors():
                    self._store.check_quota(self._writer.bytes_written, self._writer.foreign)
                    self._store.publish_pack(self._writer)
            except BaseException:
                self._writer.abort()
                raise
            return len(self._writer.locations)

    def abort(self) -> None:
        with self._lock:
            if not self._over:
                self._over = True
                self._writer.abort()

    def _take(self, header: ObjectHeader, stored: Bytes) -> None:
        where = self._store.hold(header.id, self._held)
        if where is not None and (where.base is None or header.base is not None):
            return
        base = None
        if header.base is not None:
            base = self._read(header.base, sealed=header.sealed)
        if not header.sealed:  # what is, has been checked as far as it can be without its key
            open_chunk(header, stored, base)
        self._writer.add(header, stored)

    def _read(self, identity: bytes, *, sealed: bool) -> Bytes | None:
        """A chunk that another may lean on, here or just arrived; not looked into if it is sealed."""
        arrived = self._writer.locations.get(identity)
        where = arrived or self._store.hold(identity, self._held)
        if where is None:
            raise CorruptChunk("a chunk came before the one it is the difference to")
        if where.base is not None:
            # So that no loss can spread further than from one chunk to those on it.
            raise CorruptChunk("a chunk leans on one that leans on another")
        if sealed:
            return None
        if arrived is None:
            return self._store.chunk(identity)
        header, stored = self._writer.read(identity)
        return open_chunk(header, stored, None)


def stream_bytes(ids: Sequence[bytes]) -> int:
    """The most that a stream of these objects, and of one base for each, can be."""
    return 2 * len(ids) * (MAX_STORED + HEADER_BYTES)

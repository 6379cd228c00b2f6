"""Receiver: takes chunks from a peer, decodes and verifies each as it arrives, and makes them durable together."""

import threading
from collections.abc import Iterable, Sequence

from ckptstore.encoding import Bytes
from ckptstore.errors import CorruptChunk
from ckptstore.messages import MAX_IDS
from ckptstore.objects import ObjectStore
from ckptstore.pack import (
    HEADER_BYTES,
    MAX_STORED,
    ObjectHeader,
    ObjectStream,
    PackWriter,
    StoredObject,
    check_stored,
    open_chunk,
    realm_of,
)

MOST_OBJECTS = 2 * MAX_IDS  # of a stream: the chunks of a message, each with a base


class Receiver:
    """Receives one stream. Nothing is kept unless `finish` or `keep` returns. `realm`: of all its chunks; None: of any.

    Calls are serialized; after `finish`, `keep` or `abort` they have no effect. A receiver owns nothing before its first chunk.
    """

    def __init__(self, store: ObjectStore, max_bytes: int, foreign: bool = False, realm: bytes | None = None) -> None:
        self._store, self._realm = store, realm
        self._remaining = max_bytes
        self.objects = ObjectStream()
        self._held: set[str] = set()
        self._lock = threading.Lock()
        self._ended = False
        self._writer = PackWriter(store.tmp, store.packs, foreign, lambda: store.check_incoming(foreign))
        self.arrived: set[bytes] = set()  # complete chunks, including those that the store had already

    def expect(self, count: int) -> None:
        """Count bytes that come, or will come. CorruptChunk if they are too many."""
        self._remaining -= count
        if self._remaining < 0:
            raise CorruptChunk("the peer sends more than was requested")

    def take(self, objects: Iterable[StoredObject]) -> int:
        """Take complete objects whose bytes were expected; return their number. CorruptChunk ends the stream."""
        count = 0
        with self._lock, self._store.disk_errors():
            for header, stored in objects if not self._ended else ():
                self._take(header, stored)
                self.arrived.add(header.id)
                count += 1
                if len(self.arrived) > MOST_OBJECTS:
                    raise CorruptChunk(f"the peer sends more than {MOST_OBJECTS} chunks")
        return count

    def finish(self) -> int:
        """Make the chunks durable; return the number of new ones. CorruptChunk if the stream ended inside a chunk."""
        if not self.objects.clean:
            self.abort()
            raise CorruptChunk("the stream ended inside a chunk")
        return self.keep()

    def keep(self) -> int:
        """Make the complete chunks of a broken stream durable, so that they need not be sent again."""
        with self._lock:
            if self._ended:
                return 0
            try:
                with self._store.disk_errors(), self._store.keeping:  # of two that fit only alone, one is kept
                    self._store.incoming.discard(self._writer)  # else other streams would count it twice
                    self._store.check_quota(self._writer.bytes_written, self._writer.foreign)
                    self._store.publish_pack(self._writer)
            finally:
                self._end()
            return len(self._writer.locations)

    def abort(self) -> None:
        with self._lock:
            if not self._ended:
                self._end()

    def _end(self) -> None:
        self._ended = True
        self._store.incoming.discard(self._writer)
        self._writer.abort()

    def _take(self, header: ObjectHeader, stored: Bytes) -> None:
        if not header.plain:  # else the stored bytes are the chunk, which is compared with its id
            check_stored(header, stored)
        if self._realm is not None and realm_of(header, stored) != self._realm:
            raise CorruptChunk("a chunk is encrypted with another key than what it belongs to, or only one of them is")
        where = self._store.hold(header.id, self._held)
        if where is not None and (where.base is None or header.base is not None):
            return
        base = None
        if header.base is not None:
            base = self._base(header.base, encrypted=header.encrypted)
        if not header.encrypted:  # an encrypted one was verified as far as possible without its key
            open_chunk(header, stored, base)
        self._store.incoming.add(self._writer)
        self._writer.add(header, stored)

    def _base(self, identity: bytes, *, encrypted: bool) -> Bytes | None:
        """Return the base of a delta, from this store or this stream; None, after the same checks, if it is encrypted."""
        arrived = self._writer.locations.get(identity)
        where = arrived or self._store.hold(identity, self._held)
        if where is None:
            raise CorruptChunk("a delta arrived before its base")
        if where.base is not None:
            # Chains are refused, so that a lost chunk affects only the deltas directly on it.
            raise CorruptChunk("the base of a delta is a delta itself")
        if encrypted:
            return None
        if arrived is None:
            return self._store.chunk(identity)
        header, stored = self._writer.read(identity)
        return open_chunk(header, stored, None)


def max_stream_bytes(ids: Sequence[bytes]) -> int:
    """Return the largest possible size of a stream of these chunks with one base for each."""
    return 2 * len(ids) * (MAX_STORED + HEADER_BYTES)

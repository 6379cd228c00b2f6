"""Chunks arriving from a peer: checked one by one as they come, durable all together or not at all."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckptstore.errors import CorruptChunk
from ckptstore.pack import CHUNK_BYTES, HEADER_BYTES, ObjectStream, PackWriter

if TYPE_CHECKING:
    from ckptstore.store import Store


class Receiver:
    """Chunks arriving from a peer. Nothing is kept unless `finish` returns."""

    def __init__(self, store: "Store", max_bytes: int) -> None:
        self._store = store
        self._left = max_bytes
        self._stream = ObjectStream()
        self._writing = store.writing()
        self._writing.__enter__()
        self._open = True
        self._writer = PackWriter(store.tmp, store.packs)

    def feed(self, data: bytes) -> int:
        """Take some bytes; how many chunks they completed. CorruptChunk ends the receipt."""
        self._left -= len(data)
        if self._left < 0:
            raise CorruptChunk("the peer sends more than was asked for")
        count = 0
        with self._store.disk_errors():
            for identity, payload in self._stream.feed(data):
                count += 1
                if self._store.index.find(identity) is None:
                    self._writer.add(identity, payload)
        return count

    def finish(self) -> int:
        """Make what arrived durable; how many chunks were new. CorruptChunk if the stream ended inside one."""
        if not self._stream.clean:
            self.abort()
            raise CorruptChunk("the stream ended inside a chunk")
        try:
            with self._store.disk_errors():
                self._store.check_quota(self._writer.bytes_written)
                self._store.publish_pack(self._writer)
        except BaseException:
            self.abort()
            raise
        self._close()
        return len(self._writer.locations)

    def abort(self) -> None:
        if self._open:
            self._writer.abort()
            self._close()

    def _close(self) -> None:
        if self._open:
            self._open = False
            self._writing.__exit__(None, None, None)


def stream_bytes(ids: Sequence[bytes]) -> int:
    """The most that a stream of these objects can be."""
    return len(ids) * (CHUNK_BYTES + HEADER_BYTES)

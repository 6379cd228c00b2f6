"""Message sender: carries job messages to other nodes, with one bounded queue and one task per peer.

A lost message is allowed, since every core sends again, but waiting is not: a full queue drops its oldest message and counts
it.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from itertools import islice

import msgspec

from membership.identity import NodeId, short_id
from mesh.rpc.client import PeerError

QUEUE_LIMIT = 256  # messages for one peer: a lease of renewals for 80 jobs
BATCH_LIMIT, BATCH_BYTES = 32, 4 << 20  # of one call; a single message may be longer
IDLE_S = 30.0  # until the task of an idle peer ends

log = logging.getLogger(__name__)


class MessageSender:
    """`deliver(node, body)` makes one call; `body` is a msgpack array of encoded messages."""

    def __init__(self, deliver: Callable[[NodeId, bytes], Awaitable[object]]) -> None:
        self._deliver = deliver
        self._queues: dict[NodeId, deque[bytes]] = {}
        self._wake: dict[NodeId, asyncio.Event] = {}
        self._empty: dict[NodeId, asyncio.Event] = {}
        self._tasks: dict[NodeId, asyncio.Task[None]] = {}
        self.dropped = 0

    def post(self, to: NodeId, message: bytes) -> None:
        queue = self._queues.setdefault(to, deque())
        if len(queue) >= QUEUE_LIMIT:
            queue.popleft()
            self.dropped += 1
        queue.append(message)
        self._wake.setdefault(to, asyncio.Event()).set()
        self._empty.setdefault(to, asyncio.Event()).clear()
        if to not in self._tasks or self._tasks[to].done():
            self._tasks[to] = asyncio.create_task(self._carry(to), name=f"message sender {short_id(to)}")

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def flush(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` until every message is delivered or lost."""
        try:
            async with asyncio.timeout(timeout_s):
                for empty in list(self._empty.values()):
                    await empty.wait()
        except TimeoutError:
            log.info("some messages were not delivered before leaving")

    async def _carry(self, to: NodeId) -> None:
        queue, wake = self._queues[to], self._wake[to]
        while True:
            try:
                async with asyncio.timeout(IDLE_S):
                    await wake.wait()
            except TimeoutError:
                if not queue:
                    del self._queues[to], self._wake[to], self._empty[to], self._tasks[to]
                    return  # else a message has come just now, whose `post` has found this task
            batch = next_batch(queue)
            if batch:
                for _ in batch:  # before the call: others may be dropped while it lasts
                    queue.popleft()
                try:
                    await self._deliver(to, msgspec.msgpack.encode(batch))
                except PeerError as error:
                    log.debug("messages to %s lost: %s", short_id(to), error)
            if not queue:
                wake.clear()
                self._empty[to].set()


def next_batch(queue: Iterable[bytes]) -> list[bytes]:
    """Return the first messages, as many as one call carries: at least one."""
    batch: list[bytes] = []
    size = 0
    for message in islice(queue, BATCH_LIMIT):
        size += len(message)
        if batch and size > BATCH_BYTES:
            break
        batch.append(message)
    return batch


_batch_decoder = msgspec.msgpack.Decoder(list[bytes])


def decode_batch(body: bytes) -> list[bytes]:
    """Decode the messages of one call; MsgspecError if malformed."""
    return _batch_decoder.decode(body)

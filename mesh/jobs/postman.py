"""Carries job messages to other nodes: one bounded queue and one task a peer, several messages a call.

Losing a message is allowed (every core resends), waiting is not: a full queue drops its oldest.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable

import msgspec

from membership.identity import NodeId, short_id
from mesh.api.peer import PeerError

QUEUE_LIMIT = 256  # messages for one peer; a lease's worth of renewals for 80 jobs
BATCH_LIMIT = 32
IDLE_S = 30.0  # a peer without mail needs no task

log = logging.getLogger(__name__)


class Postman:
    """`deliver(node, body)` performs one call; `body` is a msgpack array of encoded messages."""

    def __init__(self, deliver: Callable[[NodeId, bytes], Awaitable[object]]) -> None:
        self._deliver = deliver
        self._mail: dict[NodeId, deque[bytes]] = {}
        self._wake: dict[NodeId, asyncio.Event] = {}
        self._empty: dict[NodeId, asyncio.Event] = {}
        self._tasks: dict[NodeId, asyncio.Task[None]] = {}
        self.dropped = 0

    def post(self, to: NodeId, message: bytes) -> None:
        mail = self._mail.setdefault(to, deque())
        if len(mail) >= QUEUE_LIMIT:
            mail.popleft()
            self.dropped += 1
        mail.append(message)
        self._wake.setdefault(to, asyncio.Event()).set()
        self._empty.setdefault(to, asyncio.Event()).clear()
        if to not in self._tasks or self._tasks[to].done():
            self._tasks[to] = asyncio.create_task(self._carry(to), name=f"postman {short_id(to)}")

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def flush(self, timeout_s: float) -> None:
        """Wait until everything posted so far is delivered or lost, at most this long."""
        try:
            async with asyncio.timeout(timeout_s):
                for empty in list(self._empty.values()):
                    await empty.wait()
        except TimeoutError:
            log.info("some messages were not delivered before leaving")

    async def _carry(self, to: NodeId) -> None:
        mail, wake = self._mail[to], self._wake[to]
        while True:
            try:
                async with asyncio.timeout(IDLE_S):
                    await wake.wait()
            except TimeoutError:
                return
            batch = [mail[index] for index in range(min(len(mail), BATCH_LIMIT))]
            if batch:
                try:
                    await self._deliver(to, msgspec.msgpack.encode(batch))
                except PeerError as error:
                    log.debug("messages to %s lost: %s", short_id(to), error)
                for _ in batch:
                    if mail:
                        mail.popleft()
            if not mail:
                wake.clear()
                self._empty[to].set()


_batch_decoder = msgspec.msgpack.Decoder(list[bytes])


def open_mail(body: bytes) -> list[bytes]:
    """The messages of one call; MsgspecError on anything else."""
    return _batch_decoder.decode(body)

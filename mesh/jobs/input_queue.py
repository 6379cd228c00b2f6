"""Input queue of the job cores: messages, timers, reports and views, worked off one at a time in the order of arrival.

The queue is bounded, and no input is dropped silently. Peers are turned away early, so that inputs of this node find room, and
few inputs of one peer wait at a time, so that it holds up no other; a report of this node waits for room; a timer fires again; a
request of the user fails with `Overloaded`.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable

from membership.identity import NodeId
from mesh.consensus.participant import Directed
from mesh.consensus.view import Instant
from mesh.util.errors import MeshError

LIMIT = 10_000  # inputs (own choice)
PEER_LIMIT = LIMIT // 2  # from here on peers get a 503 and slow down
OF_PEER = 512  # what waits of one peer may cost (`messages.cost_of`): 35 ms of checking signatures (own choice)
ROOM_S = 2.0  # that a peer waits for room; less than for its call (`service.MESSAGE_TIMEOUT_S`)
BATCH = 256  # inputs worked off together, so that their witness records share one fsync (own choice)
TIMER_RETRY_S = 0.1  # until a timer that found the queue full fires again (own choice)

Input = Callable[[Instant], list[Directed]]
TimerKey = tuple[bytes, str, str]  # job, role, name

log = logging.getLogger(__name__)


class Overloaded(MeshError):
    """The input queue is full."""


class InputQueue:
    def __init__(self) -> None:
        self._queue: asyncio.Queue[Input] = asyncio.Queue(LIMIT)
        self._overflow: list[Input] = []  # messages of the worker to itself that found no room
        self._timers: dict[TimerKey, asyncio.TimerHandle] = {}
        self._of_peer: Counter[NodeId] = Counter()  # the cost of what waits
        self._next = asyncio.Event()  # set when the worker takes the next batch

    @property
    def has_room_for_peers(self) -> bool:
        return self._queue.qsize() < PEER_LIMIT

    async def room_for(self, peer: NodeId) -> bool:
        """Wait until few inputs of a peer wait; False if they still do after ROOM_S."""
        try:
            async with asyncio.timeout(ROOM_S):
                while self._of_peer[peer] >= OF_PEER:
                    await self._next.wait()
        except TimeoutError:
            return False
        return True

    def put_of_peer(self, peer: NodeId, cost: int, item: Input) -> None:
        """Add an input that a peer causes; Overloaded if the queue is full."""

        def work(at: Instant) -> list[Directed]:
            self._of_peer[peer] -= cost
            if not self._of_peer[peer]:
                del self._of_peer[peer]
            return item(at)

        self.put_now(work)
        self._of_peer[peer] += cost

    async def put(self, item: Input) -> None:
        """Add an input; wait while the queue is full."""
        await self._queue.put(item)

    def put_now(self, item: Input) -> None:
        """Add an input; Overloaded if the queue is full."""
        try:
            self._queue.put_nowait(item)
        except asyncio.QueueFull:
            raise Overloaded("this node has too much to do: try again in a few seconds") from None

    def put_own(self, item: Input) -> None:
        """Add an input that the worker itself causes: it must not wait for room that only it can make."""
        try:
            self._queue.put_nowait(item)
        except asyncio.QueueFull:
            self._overflow.append(item)

    async def batch(self) -> list[Input]:
        """Wait for inputs and return up to BATCH of them, or more if the worker caused more itself."""
        self._next.set()
        self._next = asyncio.Event()
        await asyncio.sleep(0)  # all else has its turn, however many inputs wait
        items, self._overflow = self._overflow, []
        if not items:
            items.append(await self._queue.get())
        while len(items) < BATCH and not self._queue.empty():
            items.append(self._queue.get_nowait())
        return items

    def set_timer(self, key: TimerKey, delay_s: float, item: Input) -> None:
        """Add the input after a delay; a newer timer with the same key replaces this one."""
        self.stop_timers([key])
        self._timers[key] = asyncio.get_running_loop().call_later(max(0.0, delay_s), self._on_timer, key, item)

    def stop_timers(self, keys: Iterable[TimerKey] | None = None) -> None:
        """Cancel these timers, or all."""
        for key in list(self._timers) if keys is None else keys:
            timer = self._timers.pop(key, None)
            if timer is not None:
                timer.cancel()

    def _on_timer(self, key: TimerKey, item: Input) -> None:
        try:
            self._queue.put_nowait(item)
        except asyncio.QueueFull:
            log.warning("the timer %r of a %s waits: the input queue is full", key[2], key[1])
            self.set_timer(key, TIMER_RETRY_S, item)

"""What a node's users are shown: members as they are now, and events as they come, each subscriber in a bounded queue."""

import asyncio
from collections import deque

import msgspec

from membership.effects import MemberChanged, RecordChanged

EVENT_QUEUE = 1024  # events a slow subscriber may be behind; then it gets EventsLost


class MemberView(msgspec.Struct, frozen=True):
    """`state`: alive, suspect, unreachable, dead, left or revoked. One who was revoked has no address any more."""

    node_id: bytes
    nick: str
    user: str
    roles: tuple[str, ...]
    state: str
    since_unix: float
    draining: bool = False
    host: str = ""
    port: int = 0
    epoch: int = 0
    incarnation: int = 0

    @property
    def present(self) -> bool:
        return self.state in {"alive", "suspect", "unreachable"}


class EventsLost(msgspec.Struct, frozen=True):
    count: int


MembershipEvent = MemberChanged | RecordChanged | EventsLost


class Subscription:
    """A bounded queue of events; what does not fit is dropped and told as EventsLost."""

    def __init__(self) -> None:
        self._events: deque[MembershipEvent] = deque()
        self._lost = 0
        self._wake = asyncio.Event()

    def put(self, event: MembershipEvent) -> None:
        if len(self._events) >= EVENT_QUEUE:
            self._lost += 1
        else:
            self._events.append(event)
        self._wake.set()

    async def get(self) -> MembershipEvent:
        while not self._events:
            if self._lost:
                lost, self._lost = self._lost, 0
                return EventsLost(lost)
            self._wake.clear()
            await self._wake.wait()
        return self._events.popleft()

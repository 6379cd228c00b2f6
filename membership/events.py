"""Views and events for users of a membership node; each subscriber has a bounded queue."""

import asyncio
from collections import deque

import msgspec

from membership.effects import MemberChanged, RecordChanged

EVENT_QUEUE = 1024  # a subscriber further behind than this gets EventsLost


class MemberView(msgspec.Struct, frozen=True):
    """`state`: alive, suspect, unreachable, dead, left or revoked. A revoked member has no address."""

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
    user_key: bytes = b""

    @property
    def present(self) -> bool:
        return self.state in {"alive", "suspect", "unreachable"}


class EventsLost(msgspec.Struct, frozen=True):
    count: int


MembershipEvent = MemberChanged | RecordChanged | EventsLost


class Subscription:
    """A bounded queue of events; those that do not fit are dropped and reported as EventsLost."""

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

"""What a job core knows of the mesh when it decides: who is alive, who stays, what they offer."""

from collections.abc import Mapping, Sequence, Set
from functools import cached_property

import msgspec

from mesh.jobs.ledger import OutcomeKind
from placement.advert import Advert
from placement.allotment import served
from placement.decision import witness_order
from placement.preemption import Stay
from placement.queue import Queue
from placement.request import Request
from placement.zones import Hierarchy


class Instant(msgspec.Struct, frozen=True):
    """`now` is seconds of CLOCK_BOOTTIME and decides; `unix_ms` is wall time and is only written down."""

    now: float
    unix_ms: int


class View(msgspec.Struct, frozen=True, dict=True):
    """What a node sees around it: the members there are, those about to leave, those who left in order, what they offer."""

    me: bytes
    alive: frozenset[bytes] = frozenset()
    leaving: frozenset[bytes] = frozenset()
    left: frozenset[bytes] = frozenset()
    adverts: Sequence[Advert] = ()
    disks: Mapping[bytes, bytes] = {}  # whose journal is on which disk, as far as it is known
    queue: Queue | None = None
    ends: Mapping[bytes, OutcomeKind] = {}  # of jobs that are over
    array_ends: Mapping[bytes, Set[int]] = {}  # the places, in each array, of the jobs that are over
    stays: Sequence[Stay] = ()  # the jobs that run
    hierarchy: Hierarchy = Hierarchy()  # by which nodes are ranked

    @cached_property
    def staying(self) -> frozenset[bytes]:
        return self.alive - self.leaving

    @cached_property
    def offers(self) -> tuple[Advert, ...]:
        """The adverts of those who stay."""
        return tuple(advert for advert in self.adverts if advert.node in self.staying)

    def serving(self, promised: Sequence[tuple[bytes, Request]]) -> "View":
        """The same, once these have their places."""
        if not promised:
            return self
        adverts = {advert.node: advert for advert in self.adverts}
        for node, request in promised:
            if node in adverts:
                adverts[node] = served(adverts[node], request)
        return msgspec.structs.replace(self, adverts=tuple(adverts.values()))

    def witnesses(self, job: bytes) -> tuple[bytes, ...]:
        """All who stay, best witness of this job first."""
        return witness_order(job, self.adverts, self.staying)

    def absence(self, node: bytes) -> str:
        """Why an attempt on `node` ended without its own word for it."""
        if node in self.left:
            return "node left"
        return "lease expired" if node in self.alive else "node lost"


class Timer(msgspec.Struct, frozen=True):
    """A timer that a core asked for has come; one with an old token is stale and ignored."""

    name: str
    token: int


class TimerTokens:
    """Hands out a token for each timer set, and knows whether one that fired is the latest of its name.

    `life` tells apart those who bear one name one after the other: a timer of the former means nothing to the latter.
    """

    def __init__(self, life: int = 0) -> None:
        self._latest: dict[str, int] = {}
        self._count = life << 32

    def fresh(self, name: str) -> int:
        self._count += 1
        self._latest[name] = self._count
        return self._count

    def is_current(self, timer: Timer) -> bool:
        return self._latest.get(timer.name) == timer.token

    def cancel(self, name: str) -> None:
        self._latest.pop(name, None)

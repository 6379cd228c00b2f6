"""View: what a job core knows of the mesh when it decides, and its clocks and timers."""

from collections.abc import Mapping, Sequence
from functools import cached_property

import msgspec

from mesh.model.record import OutcomeKind
from placement.advert import Advert
from placement.allocation import reserve
from placement.decision import witness_order
from placement.preemption import RunningJob
from placement.queue import Queue
from placement.request import Request
from placement.zones import Hierarchy

UsersArray = tuple[str, bytes]  # a user, and the id of an array, which another user may give to their own
STOOD_S = 0.2  # the margin of a lease of 4 s, the shortest in use; NTP slews by less than a hundredth of this in 2 s


class Instant(msgspec.Struct, frozen=True):
    """`now` is seconds of CLOCK_BOOTTIME, by which cores decide; `unix_ms` is wall time, which is written down and may end a
    lease early (`ClockWatch`), but never prolongs one.
    """

    now: float
    unix_ms: int


class ClockWatch:
    """Notices when CLOCK_BOOTTIME has stood still, as in a paused virtual machine: the wall clock gains on it.

    A wall clock that is set forward looks the same, and costs no more than an early renewal.
    """

    def __init__(self) -> None:
        self._ahead_s: float | None = None

    def stood(self, at: Instant) -> bool:
        """Tell whether it has stood still since the last look."""
        ahead_s = at.unix_ms / 1000 - at.now
        gained_s = 0.0 if self._ahead_s is None else ahead_s - self._ahead_s
        self._ahead_s = ahead_s
        return gained_s > STOOD_S


class View(msgspec.Struct, frozen=True, dict=True):
    """The mesh as one node sees it: live members, those about to leave, those that left cleanly, and their offers."""

    me: bytes
    alive: frozenset[bytes] = frozenset()
    leaving: frozenset[bytes] = frozenset()
    left: frozenset[bytes] = frozenset()
    adverts: Sequence[Advert] = ()
    disks: Mapping[bytes, bytes] = {}  # the name of each node's journal, where known
    queue: Queue | None = None
    ends: Mapping[bytes, OutcomeKind] = {}  # outcomes of finished jobs
    array_ends: Mapping[UsersArray, int] = {}  # finished places of arrays with a limit, as bits
    running: Sequence[RunningJob] = ()
    hierarchy: Hierarchy = Hierarchy()  # ranks nodes
    recoveries: Mapping[bytes, Sequence[bytes]] = {}  # orders of users to recover a job, by job

    @cached_property
    def staying(self) -> frozenset[bytes]:
        return self.alive - self.leaving

    @cached_property
    def offers(self) -> tuple[Advert, ...]:
        """Return the adverts of nodes that stay."""
        return tuple(advert for advert in self.adverts if advert.node in self.staying)

    def serving(self, promised: Sequence[tuple[bytes, Request]]) -> "View":
        """Return the view after these requests have been served by these nodes."""
        if not promised:
            return self
        adverts = {advert.node: advert for advert in self.adverts}
        for node, request in promised:
            if node in adverts:
                adverts[node] = reserve(adverts[node], request)
        return msgspec.structs.replace(self, adverts=tuple(adverts.values()))

    def witnesses(self, job: bytes) -> tuple[bytes, ...]:
        """Return all nodes that stay, best witness of this job first."""
        return witness_order(job, self.adverts, self.staying)

    def absence(self, node: bytes) -> str:
        """Return why an attempt on `node` ended without a report."""
        if node in self.left:
            return "node left"
        return "lease expired" if node in self.alive else "node lost"


class Timer(msgspec.Struct, frozen=True):
    """A timer that a core has set and that has fired; one with an outdated token is ignored."""

    name: str
    token: int


class TimerTokens:
    """Gives each timer a token, and tells whether a timer that fired is the latest of its name.

    `life` separates objects that use the same names one after the other, such as the attempts of a job.
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

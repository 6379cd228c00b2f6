"""The queue of waiting jobs, ordered by priority, the user's recent usage and waiting time, in whole points.

Every node forms the same queue from the same view, so leaders respect each other's turn without communication. A job that fits
no free place blocks nobody behind it. A job that waits long enough comes first, whatever its priority.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Annotated

import msgspec

from placement.advert import Advert, Count
from placement.allocation import reserve
from placement.ranking import Ranking, rank_nodes
from placement.request import Request

MAX_PRIORITY, DEFAULT_PRIORITY = 100, 50
Priority = Annotated[int, msgspec.Meta(ge=0, le=MAX_PRIORITY)]
AGE_POINT_S = (
    600  # seconds of waiting per point: the lowest priority overtakes the highest within 17 hours (own choice)
)
FAIR_POINTS = 20  # lead of a user without usage over a user with all of it (own choice)
LET_PASS_S = 20.0  # a free place is reserved this long for the first job in the queue; several rounds of a leader
IDLE_S = 120.0  # nothing is reserved this long for a job that did not take its place, doubled each time (own choice)
IDLE_MAX_S = 86_400.0  # so that jobs without witnesses, whose users have gone, do not keep the places of others in turn
NEVER = 2**62
HALF_LIFE_S = 7 * 86_400  # of recorded usage; Slurm's PriorityDecayHalfLife


class Waiting(msgspec.Struct, frozen=True):
    """A job that waits for a place. `since_unix` is its submission: a job that had to leave a node keeps its position."""

    request: Request
    priority: Priority
    since_unix: Count
    deadline_unix: Count | None = None

    @property
    def job(self) -> bytes:
        return self.request.job


Key = tuple[int, int, int, bytes]


class Queue:
    """The queue over one view. Lower keys go first. `usage`: each user's recent usage (`decayed`). `idle`: jobs that did not
    take a place reserved for them (`Patience`); nothing more is reserved for them, and they take what is left."""

    def __init__(
        self,
        waiting: Iterable[Waiting],
        usage: Mapping[str, int],
        adverts: Sequence[Advert],
        now_unix: int,
        idle: Collection[bytes] = (),
        ranked: Callable[[Request, Collection[Advert]], Ranking] = rank_nodes,
    ) -> None:
        self._ranked = ranked
        self._waiting = [job for job in waiting if job.job not in idle]
        self._adverts = adverts
        self._usage = usage
        self._mean = mean_of(usage)
        self._now_unix = now_unix

    def key(self, waiting: Waiting) -> Key:
        age = max(0, self._now_unix - waiting.since_unix) // AGE_POINT_S
        fair = fair_points(self._usage.get(waiting.request.user, 0), self._mean)
        deadline = NEVER if waiting.deadline_unix is None else waiting.deadline_unix
        return (-(waiting.priority + age + fair), deadline, waiting.since_unix, waiting.job)

    def left_for(self, mine: Waiting, adverts: Sequence[Advert]) -> list[Advert]:
        """Return the adverts as they are after every job ahead of this one has taken its place."""
        left = {advert.node: advert for advert in adverts}
        key = self.key(mine)
        for before, node, request in self._allotted:
            if before < key and request.job != mine.job and node in left:
                left[node] = reserve(left[node], request)
        return list(left.values())

    @cached_property
    def _allotted(self) -> list[tuple[Key, bytes, Request]]:
        """Assign the free places to the waiting jobs in the order of the queue."""
        free = {ad.node: ad for ad in self._adverts if ad.slots_free or ad.free_portions}
        allotted: list[tuple[Key, bytes, Request]] = []
        # Shapes that fit on too few nodes; free capacity only shrinks.
        hopeless: set[tuple[bytes, tuple[bytes, ...], int]] = set()
        for waiting in sorted(self._waiting, key=self.key) if free else ():
            shape = (waiting.request.shape, waiting.request.exclude, waiting.request.nodes)
            if shape in hopeless:
                continue
            ranking = self._ranked(waiting.request, free.values())
            if len(ranking) < waiting.request.nodes:
                hopeless.add(shape)
                continue
            for candidate in ranking.first(waiting.request.nodes):
                node = candidate.node
                free[node] = reserve(free[node], waiting.request)
                allotted.append((self.key(waiting), node, waiting.request))
                if not (free[node].slots_free or free[node].free_portions):
                    del free[node]
            if not free:
                break
        return allotted

    @property
    def kept(self) -> set[tuple[bytes, bytes]]:
        """Return the reserved free places: (job, node)."""
        return {(request.job, node) for _, node, request in self._allotted}


class Patience:
    """Detects jobs that do not take a place reserved for them: their leader may be unable to act, and others want the place."""

    def __init__(self) -> None:
        self._since: dict[tuple[bytes, bytes], float] = {}
        self._idle: dict[bytes, tuple[float, float]] = {}  # until when, and for how long that was

    def idle(self, now: float) -> frozenset[bytes]:
        """Return the jobs for which nothing is reserved now; `now` is seconds of a monotonic clock."""
        self._idle = {job: (until, for_s) for job, (until, for_s) in self._idle.items() if until + IDLE_MAX_S > now}
        return frozenset(job for job, (until, _) in self._idle.items() if until > now)

    def saw(self, kept: Iterable[tuple[bytes, bytes]], now: float) -> None:
        """Record the places that are reserved now."""
        self._since = {place: self._since.get(place, now) for place in kept}
        for (job, _), since in self._since.items():
            until, before_s = self._idle.get(job, (now, IDLE_S / 2))
            if now - since > LET_PASS_S and until <= now:
                for_s = min(IDLE_MAX_S, 2 * before_s)
                self._idle[job] = now + for_s, for_s


def mean_of(usage: Mapping[str, int]) -> int:
    """Return the mean recent usage of a user, at least 1."""
    return max(1, sum(usage.values()) // max(1, len(usage)))


def fair_points(used: int, mean: int) -> int:
    """Return the points that a user with this usage is ahead by: 0 to FAIR_POINTS."""
    return FAIR_POINTS * mean // (mean + used)


def decayed(used_s: float, percent: int, ago_s: float) -> int:
    """Return the usage that still counts of a run that ended `ago_s` ago: GPU-seconds times 100, halved every HALF_LIFE_S."""
    return int(used_s) * percent >> int(max(0.0, ago_s) // HALF_LIFE_S)

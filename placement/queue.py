"""Who goes first when not all can: priority, the share a user has had, and how long a job has waited, in whole points.

Every node forms the same queue from the same view, so stewards that never speak to each other let each other pass. A job that
nothing free fits takes nothing from those behind it, and whoever waits long enough comes first, whatever its priority.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property

import msgspec

from placement.advert import Advert
from placement.allotment import served
from placement.ranking import Ranking, rank_nodes
from placement.request import Request

MAX_PRIORITY, DEFAULT_PRIORITY = 100, 50
AGE_POINT_S = 600  # of waiting are worth a point: the lowest priority overtakes the highest within 17 hours; ours
FAIR_POINTS = 20  # that a user who has used nothing is ahead of one who has used everything; ours
LET_PASS_S = 20.0  # that a free place is kept for who goes first; several turns of a steward
IDLE_S = 120.0  # that nothing is kept for one who let his place go; ours
NEVER = 2**62
HALF_LIFE_S = 7 * 86_400  # of what was used; Slurm's PriorityDecayHalfLife


class Waiting(msgspec.Struct, frozen=True):
    """A job that nobody runs. `since_unix` is when it was submitted: who had to leave a node keeps its place."""

    request: Request
    priority: int
    since_unix: int
    deadline_unix: int | None = None

    @property
    def job(self) -> bytes:
        return self.request.job


Key = tuple[int, int, int, bytes]


class Queue:
    """`usage` is what each user has had lately (`decayed`). Lower keys go first. `idle` jobs have let a place go that was kept
    for them (`Patience`): nothing is kept for them any more, and they take what is left."""

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
        """What is free once everybody ahead has what it can have."""
        left = {advert.node: advert for advert in adverts}
        key = self.key(mine)
        for before, node, request in self._allotted:
            if before < key and request.job != mine.job and node in left:
                left[node] = served(left[node], request)
        return list(left.values())

    @cached_property
    def _allotted(self) -> list[tuple[Key, bytes, Request]]:
        """Whom the free places go to, first come first; no more than there are places."""
        free = {ad.node: ad for ad in self._adverts if ad.slots_free or ad.room}
        allotted: list[tuple[Key, bytes, Request]] = []
        hopeless: set[tuple[bytes, tuple[bytes, ...]]] = set()  # what nothing left fits; and what is left only shrinks
        for waiting in sorted(self._waiting, key=self.key) if free else ():
            shape = (waiting.request.shape, waiting.request.exclude)
            if shape in hopeless:
                continue
            ranking = self._ranked(waiting.request, free.values())
            if len(ranking) < waiting.request.nodes:
                hopeless.add(shape)
                continue
            for candidate in ranking.first(waiting.request.nodes):
                node = candidate.node
                free[node] = served(free[node], waiting.request)
                allotted.append((self.key(waiting), node, waiting.request))
                if not (free[node].slots_free or free[node].room):
                    del free[node]
            if not free:
                break
        return allotted

    @property
    def kept(self) -> set[tuple[bytes, bytes]]:
        """The free places that are kept: job and node."""
        return {(request.job, node) for _, node, request in self._allotted}


class Patience:
    """Notices who does not take a place that is kept for him: he may be unable to act, and others want it."""

    def __init__(self) -> None:
        self._since: dict[tuple[bytes, bytes], float] = {}
        self._idle_until: dict[bytes, float] = {}

    def idle(self, now: float) -> frozenset[bytes]:
        """The jobs for which nothing is to be kept now; `now` is seconds of any clock that does not jump."""
        self._idle_until = {job: until for job, until in self._idle_until.items() if until > now}
        return frozenset(self._idle_until)

    def saw(self, kept: Iterable[tuple[bytes, bytes]], now: float) -> None:
        """These places are kept now."""
        self._since = {place: self._since.get(place, now) for place in kept}
        for (job, _), since in self._since.items():
            if now - since > LET_PASS_S:
                self._idle_until[job] = now + IDLE_S


def mean_of(usage: Mapping[str, int]) -> int:
    """What a user has had lately, on average."""
    return max(1, sum(usage.values()) // max(1, len(usage)))


def fair_points(used: int, mean: int) -> int:
    """By which somebody who has had so much is put ahead."""
    return FAIR_POINTS * mean // (mean + used)


def decayed(used_s: float, percent: int, ago_s: float) -> int:
    """What a stay that ended so long ago still counts: seconds times per cent of a GPU, halved every HALF_LIFE_S."""
    return int(used_s) * percent >> int(max(0.0, ago_s) // HALF_LIFE_S)

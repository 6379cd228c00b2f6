"""Who goes first when not all can: priority, the share a user has had, and how long a job has waited, in whole points.

Every node forms the same queue from the same view, so stewards that never speak to each other let each other pass. A job that
nothing free fits takes nothing from those behind it, and whoever waits long enough comes first, whatever its priority.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

import msgspec

from placement.advert import Advert
from placement.decision import rank_nodes
from placement.request import Request

MAX_PRIORITY, DEFAULT_PRIORITY = 100, 50
AGE_POINT_S = 600  # of waiting are worth a point: the lowest priority overtakes the highest within 17 hours; ours
FAIR_POINTS = 20  # that a user who has used nothing is ahead of one who has used everything; ours
HALF_LIFE_S = 7 * 86_400  # of what was used; Slurm's PriorityDecayHalfLife


class Waiting(msgspec.Struct, frozen=True):
    """A job that nobody runs. `since_unix` is when it was submitted: who had to leave a node keeps its place."""

    request: Request
    priority: int
    since_unix: int

    @property
    def job(self) -> bytes:
        return self.request.job


Key = tuple[int, int, bytes]


class Queue:
    """`usage` is what each user has had lately (`decayed`). Lower keys go first."""

    def __init__(
        self, waiting: Iterable[Waiting], usage: Mapping[str, int], adverts: Sequence[Advert], now_unix: int
    ) -> None:
        self._waiting = waiting
        self._adverts = adverts
        self._usage = usage
        self._mean = max(1, sum(usage.values()) // max(1, len(usage)))
        self._now_unix = now_unix

    def key(self, waiting: Waiting) -> Key:
        age = max(0, self._now_unix - waiting.since_unix) // AGE_POINT_S
        fair = FAIR_POINTS * self._mean // (self._mean + self._usage.get(waiting.request.user, 0))
        return (-(waiting.priority + age + fair), waiting.since_unix, waiting.job)

    def left_for(self, mine: Waiting, adverts: Sequence[Advert]) -> tuple[list[Advert], int]:
        """What is free once everybody ahead has what it can have, and how many those are."""
        left = {advert.node: advert for advert in adverts}
        key, ahead = self.key(mine), 0
        for before, node, request in self._allotted:
            if before < key and request.job != mine.job:
                ahead += 1
                if node in left:
                    left[node] = _taken(left[node], request)
        return list(left.values()), ahead

    @cached_property
    def _allotted(self) -> list[tuple[Key, bytes, Request]]:
        """Whom the free places go to, first come first; no more than there are places."""
        free = {advert.node: advert for advert in self._adverts}
        allotted: list[tuple[Key, bytes, Request]] = []
        for waiting in sorted(self._waiting, key=self.key):
            if not any(advert.slots_free or advert.gpus_free for advert in free.values()):
                break
            candidates = rank_nodes(waiting.request, free.values()).candidates
            if candidates:
                node = candidates[0].node
                free[node] = _taken(free[node], waiting.request)
                allotted.append((self.key(waiting), node, waiting.request))
        return allotted


def _taken(advert: Advert, request: Request) -> Advert:
    """The advert once this request is served there."""
    if not request.gpus:
        return msgspec.structs.replace(advert, slots_free=max(0, advert.slots_free - 1))
    fitting = [
        gpu.uuid
        for gpu in advert.gpus
        if gpu.uuid in advert.gpus_free and gpu.vram_mib >= request.vram_mib and gpu.capability >= request.capability
    ]
    gone = set(fitting[: request.gpus])
    return msgspec.structs.replace(advert, gpus_free=tuple(uuid for uuid in advert.gpus_free if uuid not in gone))


def decayed(used_s: float, gpus: int, ago_s: float) -> int:
    """What a stay that ended so long ago still counts: seconds times GPUs (or one slot), halved every HALF_LIFE_S."""
    return int(used_s) * max(1, gpus) >> int(max(0.0, ago_s) // HALF_LIFE_S)

"""Every job this node has heard of, each by the most advanced of the views that nodes tell each other; kept as news comes in."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set

from mesh.jobs.ledger import OutcomeKind
from mesh.jobs.spec import ArrayPlace
from mesh.jobs.status import JobStatus, PastJob, best_of
from placement.advert import Advert
from placement.preemption import Stay
from placement.queue import Queue, Waiting, decayed
from placement.ranking import Ranking, rank_nodes
from placement.request import Request

Teller = bytes  # a node's id; this node's own view has b""
OWN: Teller = b""
DAY_S = 86_400


class Board:
    """`changed` is called with each job that is another than before."""

    def __init__(self) -> None:
        self.changed: Callable[[bytes], None] = lambda job: None
        self._views: dict[bytes, dict[Teller, JobStatus]] = {}
        self._best: dict[bytes, JobStatus] = {}
        self._waiting: dict[bytes, Waiting] = {}
        self._ends: dict[bytes, OutcomeKind] = {}
        self._array_ends: dict[bytes, set[int]] = {}
        self._put_away: set[bytes] = set()
        self._used_before: Counter[tuple[str, int]] = Counter()  # of these: by user and day of their end

    def tell(self, teller: Teller, job: bytes, view: JobStatus | None) -> bool:
        """`teller` says this of a job, or nothing any more; whether others may have waited for it: it is over, or queues."""
        views = self._views.setdefault(job, {})
        if view is None:
            views.pop(teller, None)
        else:
            views[teller] = view
        before = self._best.get(job)
        if not views:
            self._forget(job)
            self.changed(job)
            return False
        best = self._best[job] = best_of(views.values())
        if best != before:
            self.changed(job)
        self._waiting.pop(job, None)
        if best.outcome is not None:
            self._over(job, best.outcome.kind, best.array)
        elif best.waiting is not None and best.waiting.job == job:
            self._waiting[job] = best.waiting
        return best.outcome is not None and (before is None or before.outcome is None)

    def put_away(self, past: PastJob) -> None:
        """Nothing but this is known of it at hand any more; the same when it has been taken out for a while."""
        if past.job not in self._put_away:
            self._put_away.add(past.job)
            self._used_before[past.user, past.ended_unix_ms // 1000 // DAY_S] += past.used
        self._over(past.job, past.kind, past.array)
        if past.job in self._views:
            self.tell(OWN, past.job, None)

    def get(self, job: bytes) -> JobStatus | None:
        return self._best.get(job)

    def all(self) -> dict[bytes, JobStatus]:
        return dict(self._best)

    @property
    def ends(self) -> Mapping[bytes, OutcomeKind]:
        """How each job ended that is over. What was once heard stays, so that nobody waits for what has been forgotten."""
        return self._ends

    @property
    def array_ends(self) -> Mapping[bytes, Set[int]]:
        """The same for arrays: the places of those that are over."""
        return self._array_ends

    @property
    def stays(self) -> Iterator[Stay]:
        """Who runs where; but those of whom it is not known which GPUs they have."""
        for status in self._best.values():
            known = len(status.portions) == status.gpus
            if status.state == "running" and status.runner is not None and known:
                since = status.attempts[-1].running_unix_ms // 1000
                yield Stay(status.job, status.runner, status.priority, since, status.saves, status.portions)

    def keep_only(self, tellers: Mapping[bytes, Iterable[Teller]]) -> None:
        """Forget what nobody says any more."""
        for job, views in list(self._views.items()):
            still = {OWN, *tellers.get(job, ())}
            for teller in [teller for teller in views if teller not in still]:
                self.tell(teller, job, None)

    def own(self, job: bytes) -> JobStatus | None:
        """This node's own view of it."""
        return self._views.get(job, {}).get(OWN)

    @property
    def waiting(self) -> bool:
        """Whether any job queues."""
        return bool(self._waiting)

    def queue(
        self,
        adverts: Sequence[Advert],
        now_unix: float,
        idle: Collection[bytes] = (),
        ranked: Callable[[Request, Collection[Advert]], Ranking] = rank_nodes,
    ) -> Queue:
        """Who waits, and what each user has had lately."""
        return Queue(self._waiting.values(), self.usage(now_unix), adverts, int(now_unix), idle, ranked)

    def usage(self, now_unix: float) -> Mapping[str, int]:
        """What each user has had lately (`placement.queue.decayed`), also of those who only wait."""
        usage: Counter[str] = Counter()
        for status in self._best.values():
            if status.job in self._waiting:
                usage[status.user] += 0
            for attempt in () if status.job in self._put_away else status.attempts:
                if attempt.running_unix_ms:
                    ago_s = now_unix - (attempt.ended_unix_ms or attempt.seen_unix_ms) / 1000
                    usage[status.user] += decayed(attempt.ran_s, status.gpu_percent, ago_s)
        for (user, day), used in self._used_before.items():
            if left := decayed(used, 1, now_unix - day * DAY_S):
                usage[user] += left
        return usage

    def _over(self, job: bytes, kind: OutcomeKind, array: ArrayPlace | None) -> None:
        self._ends[job] = kind
        if array is not None:
            self._array_ends.setdefault(array.array, set()).add(array.place)

    def _forget(self, job: bytes) -> None:
        del self._views[job]
        self._best.pop(job, None)
        self._waiting.pop(job, None)

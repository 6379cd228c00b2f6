"""Job table: every job that this node has heard of, each by its most advanced view."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from weakref import WeakValueDictionary

from mesh.consensus.status import ArchivedJob, JobStatus, best_of
from mesh.consensus.view import UsersArray
from mesh.model.record import OutcomeKind
from mesh.model.spec import ArrayPlace
from placement.advert import Advert
from placement.preemption import RunningJob
from placement.queue import Queue, Waiting, decayed
from placement.ranking import Ranking, rank_nodes
from placement.request import Request

Source = bytes  # a node id; this node's own view has b""
OWN: Source = b""
DAY_S = 86_400
LEAVING = {"vacating", "saving", "releasing"}  # states of a job that still has its place, and soon has not


class JobTable:
    def __init__(self) -> None:
        self._changes = WeakValueDictionary[bytes, asyncio.Event]()  # of jobs that are being followed
        self._views: dict[bytes, dict[Source, JobStatus]] = {}
        self._best: dict[bytes, JobStatus] = {}
        self._waiting: dict[bytes, Waiting] = {}
        self._ends: dict[bytes, OutcomeKind] = {}
        self._array_ends: dict[UsersArray, int] = {}
        self._of_array = defaultdict[bytes, set[bytes]](set)  # the jobs of each array with a limit, as views name them
        self._archived: set[bytes] = set()
        self._used_before: Counter[tuple[str, int]] = Counter()  # of archived jobs, by user and day of the end

    def update(self, source: Source, job: bytes, view: JobStatus | None) -> bool:
        """Set a node's view of a job, or remove it with None; return whether it is now said to have ended, for which others may
        wait.
        """
        views = self._views.setdefault(job, {})
        replaced = views.pop(source, None)
        if view is not None:
            views[source] = view
        self._index(job, replaced, view)
        before = self._best.get(job)
        if not views:
            self._forget(job)
            self._announce(job)
            return False
        best = self._best[job] = best_of(views.values())
        if best != before:
            self._announce(job)
        self._waiting.pop(job, None)
        if source == OWN and view is not None and view.outcome is not None:
            self.end(job, view.outcome.kind, view.user, view.array)
        if best.outcome is None and best.waiting is not None and best.waiting.job == job:
            self._waiting[job] = best.waiting
        return best.outcome is not None and (before is None or before.outcome is None)

    def archive(self, archived: ArchivedJob) -> None:
        """Keep only the summary of an archived job. Archiving it again after a look changes nothing."""
        if archived.job not in self._archived:
            self._archived.add(archived.job)
            self._used_before[archived.user, archived.ended_unix_ms // 1000 // DAY_S] += archived.used
        self.end(archived.job, archived.kind, archived.user, archived.array)
        if archived.job in self._views:
            self.update(OWN, archived.job, None)

    def end(self, job: bytes, kind: OutcomeKind, user: str, array: ArrayPlace | None) -> None:
        """Record the end of a user's job, as this node or the job's witnesses know it. Another user's array may have this id."""
        self._ends[job] = kind
        if array is not None and array.limit:
            whole = (user, array.array)
            self._array_ends[whole] = self._array_ends.get(whole, 0) | 1 << array.place

    def jobs_of(self, array: bytes) -> Set[bytes]:
        """Return the jobs that views put into this array, if they give it a limit."""
        return self._of_array.get(array, frozenset())

    def goes_on(self, place: ArrayPlace | None) -> bool:
        """Tell whether other jobs of a place's array may still wait for its end: a view says that one is not over."""
        jobs = self.jobs_of(place.array) if place is not None and place.limit else ()
        return any(view.outcome is None for job in jobs for view in self._views[job].values())

    def may_be_over(self, job: bytes) -> bool:
        """Tell whether a job may be over whose end is not known: a status says so, or there is none."""
        views = self.views_of(job)
        return job not in self._ends and (not views or any(view.outcome is not None for view in views))

    def next_change(self, job: bytes) -> asyncio.Event:
        """Return an event that is set when the job's status changes."""
        return self._changes.setdefault(job, asyncio.Event())

    def get(self, job: bytes) -> JobStatus | None:
        return self._best.get(job)

    def all(self) -> dict[bytes, JobStatus]:
        return dict(self._best)

    def by_own_view(self, mine: Collection[bytes]) -> dict[bytes, JobStatus]:
        """Return the status of each job, as this node itself sees those in `mine`: what others publish of them may be false."""
        own = {job: self.own(job) for job in mine}
        return self._best | {job: view for job, view in own.items() if view is not None}

    def views(self) -> dict[bytes, list[JobStatus]]:
        """Return what this and other nodes say of each job."""
        return {job: list(views.values()) for job, views in self._views.items()}

    def every_view(self) -> Iterator[JobStatus]:
        """Yield what this and other nodes say of jobs, one view after the other."""
        for views in self._views.values():
            yield from views.values()

    def views_by_node(self, job: bytes) -> Mapping[Source, JobStatus]:
        """Return what each node says of a job."""
        return dict(self._views.get(job, {}))

    def views_of(self, job: bytes) -> list[JobStatus]:
        """Return what this and other nodes say of a job."""
        return list(self.views_by_node(job).values())

    @property
    def ends(self) -> Mapping[bytes, OutcomeKind]:
        """Return the outcome of each finished job (`end`). Entries stay, so that no job waits for a forgotten one."""
        return self._ends

    @property
    def array_ends(self) -> Mapping[UsersArray, int]:
        """Return the finished places of each user's arrays with a limit, as bits."""
        return self._array_ends

    @property
    def running(self) -> Iterator[RunningJob]:
        """Yield the running and leaving jobs whose GPUs are known, with their nodes."""
        for status in self._best.values():
            known, leaves = len(status.portions) == status.gpus, status.state in LEAVING
            if (leaves or status.state == "running") and status.runner is not None and known:
                job, node, since = status.job, status.runner, status.attempts[-1].running_unix_ms // 1000
                yield RunningJob(job, node, status.priority, since, status.saves, status.portions, leaves)

    def keep_only(self, sources: Mapping[bytes, Iterable[Source]]) -> None:
        """Remove views that no node publishes any more."""
        for job, views in list(self._views.items()):
            still = {OWN, *sources.get(job, ())}
            for source in [source for source in views if source not in still]:
                self.update(source, job, None)

    def told_over_by(self, job: bytes) -> Sequence[Source]:
        """Return the other nodes that say that a job is over."""
        views = self._views.get(job, {})
        return [source for source, view in views.items() if source != OWN and view.outcome is not None]

    def own(self, job: bytes) -> JobStatus | None:
        """Return this node's own view of a job."""
        return self._views.get(job, {}).get(OWN)

    @property
    def waiting(self) -> int:
        """Return how many jobs queue."""
        return len(self._waiting)

    def queue(
        self,
        adverts: Sequence[Advert],
        now_unix: float,
        idle: Collection[bytes] = (),
        ranked: Callable[[Request, Collection[Advert]], Ranking] = rank_nodes,
    ) -> Queue:
        """Return the queue: the waiting jobs, and each user's recent usage."""
        return Queue(self._waiting.values(), self.usage(now_unix), adverts, int(now_unix), idle, ranked)

    def usage(self, now_unix: float) -> Mapping[str, int]:
        """Return each user's recent usage (`placement.queue.decayed`), including users that only wait."""
        usage: Counter[str] = Counter()
        for status in self._best.values():
            if status.job in self._waiting:
                usage[status.user] += 0
            for attempt, ran_s in () if status.job in self._archived else status.counted:
                ago_s = now_unix - (attempt.ended_unix_ms or attempt.seen_unix_ms) / 1000
                if attempt.running_unix_ms:
                    usage[status.user] += decayed(ran_s, status.held_percent(attempt), ago_s)
        for (user, day), used in self._used_before.items():
            if left := decayed(used, 1, now_unix - day * DAY_S):
                usage[user] += left
        return usage

    def _announce(self, job: bytes) -> None:
        change = self._changes.pop(job, None)
        if change is not None:
            change.set()

    def _index(self, job: bytes, replaced: JobStatus | None, view: JobStatus | None) -> None:
        before, now = _limited_array(replaced), _limited_array(view)
        if now is not None:
            self._of_array[now].add(job)
        if before is not None and before not in {now, *map(_limited_array, self._views[job].values())}:
            self._of_array[before].discard(job)
            if not self._of_array[before]:
                del self._of_array[before]

    def _forget(self, job: bytes) -> None:
        del self._views[job]
        self._best.pop(job, None)
        self._waiting.pop(job, None)


def _limited_array(view: JobStatus | None) -> bytes | None:
    return view.array.array if view is not None and view.array is not None and view.array.limit else None

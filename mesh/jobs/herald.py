"""Tells the mesh how jobs are, as lane-2 sections: each from one node, and no oftener than anybody needs."""

import time
from collections.abc import Callable, Set

from mesh.jobs.spec import format_job
from mesh.jobs.status import JobStatus, encode_status

TTL_S = 3600.0
REPEAT_S = 600.0
NEWS_S = 30.0  # that an end is told at once; later it is history, as after a restart
ENDED_TOLD_S = 86_400.0  # for which the mesh is told of a job that is over; its witnesses know it for ever (`past.py`)
SAME_S, COMMITS_S = 5.0, 0.5  # between two tellings of a job whose state, or checkpoint, is as it was; ours
PASSING = {"pending", "starting", "saving", "releasing"}  # states that soon become another

Publish = Callable[[str, bytes, float, bool], None]  # section, body, seconds it holds, urgent


class Herald:
    def __init__(self, publish: Publish) -> None:
        self._publish = publish
        self._told: dict[bytes, tuple[JobStatus, float]] = {}

    def tell(self, status: JobStatus) -> None:
        """The mesh hears of it now, or with a later call."""
        outcome = status.outcome
        ended_s = time.time() - outcome.ended_unix_ms / 1000 if outcome is not None else 0.0
        if ended_s > ENDED_TOLD_S:
            return
        before, at = self._told.get(status.job, (None, 0.0))
        now = time.monotonic()
        if before is not None and now - at < (REPEAT_S if before == status else _may_wait_s(before, status)):
            return
        self._told[status.job] = (status, now)
        news = outcome is not None and ended_s < NEWS_S and (before is None or before.outcome is None)
        self._publish(f"jobs/{format_job(status.job)}", encode_status(status), TTL_S, news)

    def forget(self, job: bytes) -> None:
        """There is nothing to tell of it any more."""
        self._told.pop(job, None)


def _may_wait_s(told: JobStatus, status: JobStatus) -> float:
    """How long after it was last told of a job the mesh can do without what is new."""
    outdated = status.rank[1] != told.rank[1] or status.rank[3] != told.rank[3]  # to those who are in its group
    if outdated or status.outcome != told.outcome or (status.state != told.state and status.state not in PASSING):
        return 0.0
    return SAME_S if status.commit == told.commit else COMMITS_S


def speaks_for(status: JobStatus, me: bytes, runs: bool, acting: bool, alive: Set[bytes]) -> bool:
    """One node tells the mesh of a job: who runs it, or its acting steward, or the first of its group that is there. `runs`,
    `acting`: this node does, or has a steward who will."""
    if runs or status.rank[3]:
        return True
    if acting or (status.outcome is None and status.runner in alive):
        return False
    first = next((node for node in status.witnesses if node in alive), None)
    return first in {None, me}

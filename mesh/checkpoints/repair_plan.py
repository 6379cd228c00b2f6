"""Repair plan: which saved checkpoints and results lack holders, and which node has to copy them. Pure.

For a running job its runner does so, and the job record names the new holders. For a waiting or finished job the first
remaining holder does; readers find the new copies at the nodes that placement names first.

Others cannot see that a holder has lost its disk and is back. So each node brings back what the records of jobs say it has.
"""

import math
from collections.abc import Collection, Iterable, Sequence, Set

import msgspec

from mesh.consensus.status import JobStatus

LOST_S, LOCAL_LOST_S = 30.0, 5.0  # that a holder must be away: longer than a restart (own choice)
RETRY_S = 60.0  # after no node could take a copy (own choice)
MOST_COPIES = 64  # of a checkpoint or result, whatever a status wants (own choice)


class Kept(msgspec.Struct, frozen=True):
    """A saved checkpoint or result, and the nodes known to have it: first the node that made it or runs the job from it."""

    manifest: bytes
    nodes: tuple[bytes, ...]
    others: int  # wanted holders besides the node that made it


def kept(status: JobStatus) -> Kept | None:
    """Return the job's last checkpoint, or its result when it is over."""
    outcome, commit = status.outcome, status.commit
    if outcome is not None:
        if outcome.manifest is None or not outcome.holders:
            return None
        made = status.attempts[-1].node if status.attempts else None
        nodes = dict.fromkeys([*([made] if made is not None else []), *outcome.holders])
        return Kept(outcome.manifest, tuple(nodes), min(len(outcome.holders), MOST_COPIES))
    others = min(max(commit.wanted, len(commit.holders)), MOST_COPIES) if commit is not None else 0
    if commit is None or not others:
        return None
    makers = [attempt.node for attempt in status.attempts if attempt.term == commit.term]
    runs = [status.runner] if status.runner is not None and status.state == "running" else []
    return Kept(commit.manifest, tuple(dict.fromkeys([*runs, *makers, *commit.holders])), others)


Saved = tuple[bytes, bytes]  # job, manifest


class Shortage(msgspec.Struct, frozen=True):
    """A manifest of a job that lacks holders; `there` are the nodes that have it and stay. `at_risk`: it never had enough."""

    job: bytes
    manifest: bytes
    lacking: int
    there: tuple[bytes, ...]
    at_risk: bool = False


class RepairPlan:
    """What this node has to copy. Times are seconds of any clock.

    It goes by job and manifest: the status of one job may name what another has saved.
    """

    def __init__(self, me: bytes, lost_s: float) -> None:
        self._me, self._lost_s = me, lost_s
        self._more: dict[Saved, tuple[bytes, ...]] = {}  # holders that the job record does not name
        self._short_since: dict[Saved, float] = {}
        self._check_at: dict[Saved, float] = {}  # when to make sure that what this node should have is here

    def look(
        self, statuses: Iterable[JobStatus], staying: Set[bytes], runs_here: Collection[bytes], now: float
    ) -> list[Shortage]:
        """Return what this node has to copy now, what is at risk first, then what the fewest nodes have."""
        short: dict[Saved, Shortage] = {}
        more, self._more = self._more, {}
        for status in statuses:
            found = kept(status)
            if found is None:
                continue
            saved = (status.job, found.manifest)
            if saved in more:
                self._more[saved] = more[saved]
            known = dict.fromkeys([*found.nodes, *self._more.get(saved, ())])
            there = tuple(node for node in known if node in staying)
            if len(there) <= found.others and self._is_mine(status, there, runs_here):
                lacking, at_risk = found.others + 1 - len(there), len(known) <= found.others
                short[saved] = Shortage(status.job, found.manifest, lacking, there, at_risk)
        # A checkpoint that never had enough holders is due at once: none of them may come back from a restart.
        since = {saved: now - self._lost_s if one.at_risk else now for saved, one in short.items()}
        self._short_since = {saved: self._short_since.get(saved, since[saved]) for saved in short}
        due = [one for saved, one in short.items() if now - self._short_since[saved] >= self._lost_s]
        return sorted(due, key=lambda one: (not one.at_risk, len(one.there)))

    def _is_mine(self, status: JobStatus, there: Sequence[bytes], runs_here: Collection[bytes]) -> bool:
        if status.outcome is None and status.runner is not None:
            return status.job in runs_here and status.state == "running"
        return bool(there) and there[0] == self._me

    def began(self, shortage: Shortage, now: float) -> None:
        """Record that a copy was started: the next one starts later."""
        self._short_since[shortage.job, shortage.manifest] = now + RETRY_S - self._lost_s

    def copied(self, shortage: Shortage, holders: Sequence[bytes]) -> tuple[bytes, ...]:
        """Record new holders; return all that the job record should name."""
        saved = (shortage.job, shortage.manifest)
        self._more[saved] = (*self._more.get(saved, ()), *holders)
        return tuple(node for node in (*shortage.there, *holders) if node != self._me)

    def unsure(self, views: Iterable[JobStatus], now: float) -> list[tuple[bytes, Kept]]:
        """Return what jobs that are not over rely on this node to have, as any view of them says, each once until it is known
        whether it is here.
        """
        relied = [(view.job, kept(view)) for view in views if view.outcome is None]
        mine = {(job, found.manifest): found for job, found in relied if found is not None and self._me in found.nodes}
        self._check_at = {saved: self._check_at.get(saved, now) for saved in mine}
        return [(saved[0], found) for saved, found in mine.items() if self._check_at[saved] <= now]

    def checked(self, job: bytes, found: Kept, here: bool, now: float) -> None:
        """Record whether it is here now; if not, it is tried again later."""
        self._check_at[job, found.manifest] = math.inf if here else now + RETRY_S

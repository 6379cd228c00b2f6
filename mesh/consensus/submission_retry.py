"""Submission retry: jobs whose witnesses have not taken them yet, retried by the submitter and by a coordinator in its place.

Safety depends on neither: a job id is a hash, and a witness takes a job once, whichever node brings it. No I/O.
"""

from collections.abc import Collection, Sequence

import msgspec

from membership.lengths import Id, Ids, Text
from mesh.consensus.messages import Sealed
from mesh.model.spec import MAX_ARRAY, JobSpec
from mesh.util.backoff import Backoff
from placement.ranking import zone_order
from placement.zones import Zone, zone_of

LIFE_S = 86_400  # from the submission, then it is given up (own choice)
RETRY_S = 5.0  # between tries while a majority of witnesses is visible (own choice)
BLIND_RETRY_S = 30.0  # while none is: the view may be wrong (own choice)
ASK_AGAIN_S, ASK_AGAIN_MAX_S = (
    5.0,
    300.0,
)  # until others are asked again to retry a job that none has taken (own choice)
# That one node keeps for others, and for one other user: an array; its descriptions have 2 to 4 kB each (own choice).
KEPT_FOR_OTHERS, KEPT_FOR_ONE = 4 * MAX_ARRAY, MAX_ARRAY
BYTES_FOR_OTHERS, BYTES_FOR_ONE = 64 << 20, 16 << 20
ASKED_IN_ZONE = 3  # nodes of the own zone asked before other zones (own choice)


class PendingSubmission(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A job for its witnesses. `spec` is sealed by its submitter; `keeper`, in `zone`, retries it too, as only the submitter
    records.
    """

    job: Id
    spec: Sealed
    submitter: Id
    witnesses: Ids
    ends_unix_ms: int
    keeper: Id = b""
    zone: Text = ""
    user: Text = ""


class HeldSubmissions(msgspec.Struct, frozen=True):
    """The number of jobs that a node retries for other nodes, and the first of them, as it publishes them."""

    count: int
    jobs: Ids


class Try(msgspec.Struct, frozen=True):
    """Bring the job to its witnesses."""

    submission: PendingSubmission


class Entrust(msgspec.Struct, frozen=True):
    """Ask these nodes, best first, to retry the job too."""

    submission: PendingSubmission
    line: tuple[tuple[bytes, str], ...]  # node, zone


class GiveUp(msgspec.Struct, frozen=True):
    submission: PendingSubmission


class Around(msgspec.Struct, frozen=True):
    """The nodes that can be reached, those that also stay, and the zones."""

    reached: frozenset[bytes]
    staying: frozenset[bytes]
    zones: Sequence[Zone]


def pending_submission(job: bytes, sealed: bytes, spec: JobSpec) -> PendingSubmission:
    nodes = tuple(voter.node for voter in spec.witnesses)
    ends_unix_ms = spec.created_unix_ms + LIFE_S * 1000
    return PendingSubmission(job, sealed, spec.submitter, nodes, ends_unix_ms, user=spec.user)


def line(
    submission: PendingSubmission, me: bytes, around: Around, but: Collection[bytes] = ()
) -> tuple[tuple[bytes, str], ...]:
    """Return the nodes that `me` asks to retry a job, best first: its own zone's, then the coordinators of other zones.

    Witnesses of the job are left out: one that can be reached has the job already.
    """
    not_these = {me, submission.submitter, *submission.witnesses, *but}
    lines = {zone.name: [n for n in zone.line if n in around.staying and n not in not_these] for zone in around.zones}
    own = zone_of(me, around.zones)
    weights = {zone.name: zone.weight for zone in around.zones}
    found = [(node, own.name) for node in lines[own.name][:ASKED_IN_ZONE]] if own is not None else []
    for name in zone_order(submission.job, weights):
        if own is None or name != own.name:
            found += [(node, name) for node in lines[name][:1]]
    return tuple(found)


class PendingSubmissions:
    """The submissions that one node retries. `due` returns the actions; the shell performs them and reports back."""

    def __init__(self, me: bytes) -> None:
        self._me = me
        self._kept: dict[bytes, PendingSubmission] = {}
        self._tried: dict[bytes, float] = {}
        self._asking = Backoff[bytes](ASK_AGAIN_S, ASK_AGAIN_MAX_S)

    def get(self, job: bytes) -> PendingSubmission | None:
        return self._kept.get(job)

    @property
    def any(self) -> bool:
        return bool(self._kept)

    @property
    def for_others(self) -> list[PendingSubmission]:
        return [submission for submission in self._kept.values() if submission.submitter != self._me]

    def for_gossip(self, limit: int) -> HeldSubmissions:
        others = self.for_others
        return HeldSubmissions(len(others), tuple(submission.job for submission in others[:limit]))

    def is_full_for(self, user: str) -> bool:
        others = self.for_others
        theirs = [one for one in others if one.user == user]
        return _full(others, KEPT_FOR_OTHERS, BYTES_FOR_OTHERS) or _full(theirs, KEPT_FOR_ONE, BYTES_FOR_ONE)

    def keep(self, submission: PendingSubmission) -> PendingSubmission:
        """Add a submission; an existing entry is kept."""
        return self._kept.setdefault(submission.job, submission)

    def entrusted(self, job: bytes, keeper: bytes, zone: str) -> PendingSubmission | None:
        """Record that `keeper` retries it too."""
        submission = self._kept.get(job)
        if submission is None:
            return None
        assert keeper != self._me, "a keeper is somebody else"
        self._asking.forget(job)
        self._kept[job] = submission = msgspec.structs.replace(submission, keeper=keeper, zone=zone)
        return submission

    def drop(self, job: bytes) -> PendingSubmission | None:
        """Remove a submission: its witnesses have it, or it is no longer wanted."""
        self._tried.pop(job, None)
        self._asking.forget(job)
        return self._kept.pop(job, None)

    def due(self, around: Around, now: float, unix_ms: int) -> list[Try | Entrust | GiveUp]:
        """Return the actions that are due; each counts as begun."""
        actions: list[Try | Entrust | GiveUp] = []
        for submission in list(self._kept.values()):
            if unix_ms >= submission.ends_unix_ms:
                actions.append(GiveUp(submission))
                continue
            job = submission.job
            here = sum(node in around.reached for node in submission.witnesses)
            pause = RETRY_S if 2 * here > len(submission.witnesses) else BLIND_RETRY_S
            if now - self._tried.get(job, -BLIND_RETRY_S) >= pause:
                self._tried[job] = now
                actions.append(Try(submission))
            alone = submission.submitter == self._me and submission.keeper not in around.staying
            due = alone and self._asking.is_due(job, now)
            if whom := line(submission, self._me, around, but=(submission.keeper,)) if due else ():
                self._asking.failed(job, now)  # unless one of them takes it (`entrusted`)
                actions.append(Entrust(submission, whom))
        return actions


def _full(kept: Sequence[PendingSubmission], most: int, most_bytes: int) -> bool:
    return len(kept) >= most or sum(len(submission.spec) for submission in kept) >= most_bytes

"""Next placement of a running job: its standby, and its return to its home node. No I/O.

The *standby* is the node that would get the next attempt, by the ranking that the leader will use. It receives checkpoints in
advance, and a notice names it as the preferred node. *Home* is the node to which the job belongs (`spec.HomePolicy`): the job
returns once home has been free for a while without a break, and the job has run elsewhere for as long.
"""

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from mesh.consensus.contract import VACATED
from mesh.consensus.view import Instant, View
from mesh.model.record import Attempt, JobRecord
from mesh.model.spec import JobSpec, attempt_request, waiting_place
from placement.advert import Advert
from placement.filters import refusals
from placement.request import Request

USER_MOVES = "moved by its user"
GOES_HOME = "its home node is free again"
MOVED, WENT_HOME = VACATED + USER_MOVES, VACATED + GOES_HOME  # reasons of attempts that ended so
HOME_MAX_S = 3600.0  # limit of that time (own choice)


class NextPlacement:
    """The next placement of one running job. A gang has neither standby nor home: it goes where places are free at once."""

    def __init__(self, me: bytes, job: bytes, spec: JobSpec) -> None:
        self._me, self._job, self._spec = me, job, spec
        self.standby: bytes | None = None
        self.home: bytes | None = None
        self._free_since: float | None = None
        self._runs_since: float | None = None

    def began(self, now: float) -> None:
        """The guest runs here from now on."""
        self._runs_since = now

    def look(self, view: View, record: JobRecord, at: Instant) -> None:
        """Take a new view of the mesh, or a new record."""
        if self._spec.most_nodes > 1:
            return
        home, before = self._home(record.attempts, view), self.home
        self.home = home if home != self._me else None
        request = self.request(record, at)
        offers: Sequence[Advert] = view.offers
        if view.queue is not None:  # a place reserved for another job is not free
            offers = view.queue.left_for(waiting_place(self._spec, request), offers)
        standby = view.hierarchy.rank(request, offers).settle(self.standby, but=(self._me,))
        self.standby = None if standby is None else standby.node
        free = any(advert.node == self.home and not refusals(request, advert) for advert in offers)
        if not free:
            self._free_since = None
        elif self._free_since is None or self.home != before:
            self._free_since = at.now

    def others(self, view: View, attempts: Sequence[Attempt], at: Instant) -> list[tuple[bytes, str]]:
        """Return the other nodes that could take part in this attempt, best first, with their nicks."""
        request = attempt_request(self._job, self._spec, attempts[-1].number, attempts, at.unix_ms)
        ranking = view.hierarchy.rank(request, view.offers)
        return [(candidate.node, candidate.nick) for candidate in ranking if candidate.node != self._me]

    def due(self, record: JobRecord) -> float | None:
        """Return when the job goes home if home stays free until then; None while it cannot."""
        if self._free_since is None or self._runs_since is None or self.home is None:
            return None
        wait_s = home_wait_s(self._spec.home.settle_s, self.home, record.attempts)
        return max(self._free_since, self._runs_since) + wait_s

    def request(self, record: JobRecord, at: Instant) -> Request:
        """Return what the next attempt asks for.

        Nearness to the last checkpoint does not count: the standby holds it, and would stay the standby for that alone.
        """
        number, attempts = record.next_attempt, record.attempts
        asked = attempt_request(self._job, self._spec, number, attempts, at.unix_ms, self.home, record.commit)
        return msgspec.structs.replace(asked, near=())

    def _home(self, attempts: Sequence[Attempt], view: View) -> bytes | None:
        """Return the node where the job belongs, if any. A job that its user has moved stays until it has to leave."""
        home = self._spec.home
        if self._spec.checkpointing is None or (len(attempts) > 1 and attempts[-2].reason == MOVED):
            return None
        match home.rule:
            case "node":
                return home.node
            case "first":
                first = attempts[0] if attempts else None
                return first.node if first is not None and first.number == 0 else None
            case "own":
                own = {
                    advert.node
                    for advert in view.adverts
                    if (advert.user_key, advert.user) == (self._spec.user_key, self._spec.user)
                }
                return next((attempt.node for attempt in attempts if attempt.node in own and _displaced(attempt)), None)
        return None


def home_wait_s(settle_s: float, home: bytes, attempts: Sequence[Attempt]) -> float:
    """Return how long home must have been free.

    The time doubles with each return that failed or lasted less than the wait, and resets after a return that lasted.
    """
    wait_s = settle_s
    for left, came in pairwise(attempts):
        if left.reason != WENT_HOME or (came.node == home and came.reason in {"", "checkpointed"}):
            continue
        lasted = came.node == home and came.ran_s >= wait_s
        wait_s = settle_s if lasted else min(HOME_MAX_S, 2 * wait_s)
    return wait_s


def _displaced(attempt: Attempt) -> bool:
    """Tell whether the node sent the job away."""
    return attempt.reason.startswith(VACATED) and attempt.reason not in {MOVED, WENT_HOME}

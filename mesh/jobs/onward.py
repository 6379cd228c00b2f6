"""Where a running job would go next, and when it goes home by itself. No I/O.

The *heir* is the node that would get the next attempt, by the ranking its steward will use: it can be given the checkpoints
beforehand, and a notice names it as the one to prefer. *Home* is where the job belongs (`spec.Homing`): once that could take it
without a break for a while, and the job has been where it is for as long, it goes back.
"""

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from mesh.jobs.contract import VACATED
from mesh.jobs.ledger import Attempt, Ledger
from mesh.jobs.spec import JobSpec, attempt_request, waiting_place
from mesh.jobs.view import Instant, View
from placement.advert import Advert
from placement.filters import refusals
from placement.request import Request

USER_MOVES = "its user moves it"
GOES_HOME = "its home is free again"
MOVED, WENT_HOME = VACATED + USER_MOVES, VACATED + GOES_HOME  # how such an attempt ends
HOME_MAX_S = 3600.0  # for which a home has to be free, however often it was left at once; ours


class Onward:
    """A gang has neither heir nor home: it goes to whoever has places at once."""

    def __init__(self, me: bytes, job: bytes, spec: JobSpec) -> None:
        self._me, self._job, self._spec = me, job, spec
        self.heir: bytes | None = None
        self.home: bytes | None = None
        self._free_since: float | None = None
        self._runs_since: float | None = None

    def began(self, now: float) -> None:
        """Its guest runs here from now on."""
        self._runs_since = now

    def look(self, view: View, ledger: Ledger, at: Instant) -> None:
        """The mesh changed, or the ledger did."""
        if self._spec.most_nodes > 1:
            return
        home, before = self._home(ledger.attempts, view), self.home
        self.home = home if home != self._me else None
        request = self.request(ledger, at)
        offers: Sequence[Advert] = view.offers
        if view.queue is not None:  # a place that is kept for another is not free
            offers = view.queue.left_for(waiting_place(self._spec, request), offers)
        heir = view.hierarchy.rank(request, offers).settle(self.heir, but=(self._me,))
        self.heir = None if heir is None else heir.node
        free = any(advert.node == self.home and not refusals(request, advert) for advert in offers)
        if not free:
            self._free_since = None
        elif self._free_since is None or self.home != before:
            self._free_since = at.now

    def others(self, view: View, attempts: Sequence[Attempt], at: Instant) -> list[tuple[bytes, str]]:
        """Who else could take part in the present attempt, best first, with their nicks."""
        request = attempt_request(self._job, self._spec, attempts[-1].number, attempts, at.unix_ms)
        ranking = view.hierarchy.rank(request, view.offers)
        return [(candidate.node, candidate.nick) for candidate in ranking if candidate.node != self._me]

    def due(self, ledger: Ledger) -> float | None:
        """When it goes home, if that stays free until then; None while it cannot."""
        if self._free_since is None or self._runs_since is None or self.home is None:
            return None
        wait_s = home_wait_s(self._spec.homing.settle_s, self.home, ledger.attempts)
        return max(self._free_since, self._runs_since) + wait_s

    def request(self, ledger: Ledger, at: Instant) -> Request:
        """What its next attempt asks for. Not near whoever has the last checkpoint: the heir is given it, and would stay the heir
        for that alone."""
        number, attempts = ledger.next_attempt, ledger.attempts
        asked = attempt_request(self._job, self._spec, number, attempts, at.unix_ms, self.home, ledger.commit)
        return msgspec.structs.replace(asked, near=())

    def _home(self, attempts: Sequence[Attempt], view: View) -> bytes | None:
        """Where it belongs, if anywhere. Where its user has moved it, it stays until it has to leave."""
        homing = self._spec.homing
        if self._spec.checkpointing is None or (len(attempts) > 1 and attempts[-2].reason == MOVED):
            return None
        match homing.rule:
            case "node":
                return homing.node
            case "first":
                first = attempts[0] if attempts else None
                return first.node if first is not None and first.number == 0 else None
            case "own":
                own = {advert.node for advert in view.adverts if advert.user == self._spec.user}
                return next((attempt.node for attempt in attempts if attempt.node in own and _displaced(attempt)), None)
        return None


def home_wait_s(settle_s: float, home: bytes, attempts: Sequence[Attempt]) -> float:
    """How long home must have been free: doubled by each return after which the job had to leave sooner than it had waited, or
    that did not get there; as at first after one that lasted."""
    wait_s = settle_s
    for left, came in pairwise(attempts):
        if left.reason != WENT_HOME or (came.node == home and came.reason in {"", "checkpointed"}):
            continue
        lasted = came.node == home and came.ran_s >= wait_s
        wait_s = settle_s if lasted else min(HOME_MAX_S, 2 * wait_s)
    return wait_s


def _displaced(attempt: Attempt) -> bool:
    """Whether its node sent it away."""
    return attempt.reason.startswith(VACATED) and attempt.reason not in {MOVED, WENT_HOME}

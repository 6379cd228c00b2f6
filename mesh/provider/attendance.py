"""When this node is lent, kept on disk; and how long it and the others are likely to stay (`placement/survival.py`).

Its own stays teach the estimator, and go out as a summary. What other nodes tell of theirs becomes the campus's prior. Machines
of this node's own zone are watched by their adverts: those of a room leave together.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import inf

from mesh.jobs.journal import Journal, OwnStay
from placement.advert import HORIZONS_S, Advert
from placement.observed import Caps, Observed
from placement.summary import Summary, SummaryError, adopt, decode_summary, encode_summary, introduce, summarise
from placement.survival import Estimator, weights, windows
from placement.week import week_of

SECTION = "stays"
SUMMARY_TTL_S = 7 * 86_400.0  # a node that is off for the weekend still says what the campus is like; ours
LOOK_S = 60.0  # between two looks at who is lent; ours
KEEP_S = 300.0  # until a stay that goes on is written again: a crash loses no more of it; ours
TELL_S = 3600.0
ADOPT_S = 900.0
SLEPT_S = 600.0  # nothing heard of ourselves for this long: the machine slept, and no guest ran; ours
EPOCH_S = 900  # an advert's weights change at most so often, ...
BIG = 8  # ... or when one of them does by so many 64ths: an eighth; both ours

log = logging.getLogger(__name__)


class Attendance:
    """`until_unix`: when the owner takes the machine back, if he has said so (0 if not); set by whoever knows his calendar."""

    def __init__(
        self,
        me: bytes,
        journal: Journal,
        publish: Callable[[bytes], None],
        adverts: Callable[[], Iterable[Advert]],
        zones: Callable[[], Mapping[bytes, str]],
        told: Callable[[], Mapping[bytes, bytes]],
    ) -> None:
        self.me, self.zone = me, ""
        self.until_unix = 0.0
        self.foretold = (1,) * len(HORIZONS_S)
        self.caps: dict[bytes, Caps] = {}  # what is believed of the others' words at most
        self._observed = Observed()
        self._epoch = 0
        self.stays: list[OwnStay] = []
        self.estimator = Estimator(0.0)
        self._journal, self._publish = journal, publish
        self._adverts, self._zones, self._told = adverts, zones, told
        self._since: float | None = None
        self._seen = self._first = 0.0
        self._looked = self._kept = self._published = self._adopted = 0.0
        self._watched: set[bytes] = set()

    async def open(self, now: float) -> None:
        """Learn from the stays that are on disk; one that a crash left open ended when it was last heard of."""
        for stay in await self._journal.stays():
            kept = stay if stay.cause else OwnStay(stay.start_ms, stay.end_ms, "lost")
            if not stay.cause:
                self._journal.note_stay(kept)
            if 0 <= kept.start_ms <= kept.end_ms <= now * 1000:
                self.stays.append(kept)
        self._first = self.stays[0].start_ms / 1000 if self.stays else now
        self.estimator = Estimator(self._first, local_offset_s(now))
        self.estimator.know(self.me, self.estimator.room(self.zone, self._first), self._first)
        for stay in self.stays:
            start, end = stay.start_ms / 1000, stay.end_ms / 1000
            self.estimator.lent(self.me, start, start, self.zone)
            self.estimator.left(self.me, end, reclaimed=stay.cause != "planned")

    def close(self, now: float) -> None:
        if self._since is not None:
            self._end(now)

    @property
    def since_unix(self) -> float | None:
        """Lent since then; None while it is not."""
        return self._since

    def tick(self, now: float, lent: bool) -> tuple[int, ...]:
        """Called every second or so; gives the advert's weights, for each of its horizons."""
        changed = lent != (self._since is not None)
        if self._since is not None and now - self._seen > SLEPT_S:
            self._end(self._seen, "lost")
            changed = lent
        elif now < self._seen - SLEPT_S:  # the clock was wrong, and so is what it said of this stay
            self.estimator.turn_back(now)
            self._since = now if self._since is not None else None
        if not changed and 0 <= now - self._looked < LOOK_S:
            self._seen = now
            return self.foretold
        self._looked = now
        self.estimator.utc_offset_s = local_offset_s(now)
        if lent:
            if self._since is None:
                self._since = self._kept = now
            self.estimator.lent(self.me, now, self._since, self.zone)
        elif self._since is not None:
            self._end(now)
        self._seen = now
        if self._since is not None and not 0 <= now - self._kept < KEEP_S:
            self._kept = now
            self._journal.note_stay(OwnStay(_ms(self._since), _ms(now), ""))
        self._look_around(now)
        if not 0 <= now - self._adopted < ADOPT_S:
            self._adopted = now
            self._adopt(now)
        lends = self._since is not None or bool(self.stays)
        if lends and (changed or not 0 <= now - self._published < TELL_S):
            self._published = now
            self._publish(encode_summary(self.summary(now)))
        self._foretell(now, changed)
        return self.foretold

    def _foretell(self, now: float, changed: bool) -> None:
        """At once when much has changed, else with the quarter of an hour: others need not hear of every flutter."""
        fresh = weights(self.estimator, self.me, windows(self.estimator, now), self.until_unix or inf)
        epoch = int(now // EPOCH_S)
        much = max(abs(new - old) for new, old in zip(fresh, self.foretold, strict=True)) >= BIG
        if changed or much or epoch != self._epoch:
            self.foretold, self._epoch = fresh, epoch

    def rates(self, start: float) -> Iterator[tuple[float, float]]:
        """Departures of this machine a second, from a Unix time on, each with until when it holds."""
        return self.estimator.rates(self.me, start)

    def summary(self, now: float) -> Summary:
        spans = [(stay.start_ms / 1000, stay.end_ms / 1000) for stay in self.stays]
        if self._since is not None:
            spans.append((self._since, now))
        week = week_of(spans, self._first, now, self.estimator.utc_offset_s)
        return summarise(self.estimator, self.me, now, self.until_unix, week)

    def told_by(self, node: bytes) -> Summary | None:
        """What another node says of its stays; None if nothing, or nothing that can be so."""
        data = self._told().get(node)
        if data is None:
            return None
        try:
            return decode_summary(data)
        except SummaryError as error:
            log.debug("node %s: %s", node.hex()[:8], error)
            return None

    def meet(self, node: bytes, summary: Summary, now: float) -> None:
        """Foretell that node's stay by what it told."""
        introduce(self.estimator, node, summary, self.estimator.room(self._zones().get(node, ""), now), now)

    def _end(self, now: float, cause: str = "") -> None:
        assert self._since is not None
        if not cause:
            cause = "planned" if 0 < self.until_unix <= now + LOOK_S else "reclaimed"
        now = max(now, self._since)
        self.estimator.left(self.me, now, reclaimed=cause != "planned")
        stay = OwnStay(_ms(self._since), _ms(now), cause)
        self._journal.note_stay(stay)
        self.stays.append(stay)
        self._since = None

    def _look_around(self, now: float) -> None:
        """Who of this zone is lent."""
        zones = self._zones()
        self.zone = zones.get(self.me, self.zone)
        room = self.estimator.room(self.zone, now)
        self.estimator.know(self.me, room, now)
        adverts = list(self._adverts())
        self._observed.see({ad.node for ad in adverts if ad.lending and not ad.paused and ad.node != self.me}, now)
        self.caps = self._observed.caps(now)
        mates = {advert.node: advert for advert in adverts if zones.get(advert.node) == self.zone}
        mates.pop(self.me, None)
        lent = {node for node, advert in mates.items() if advert.lending and not advert.paused}
        for node in self._watched - lent:
            self.estimator.left(node, now)
        for node in lent:
            self.estimator.know(node, room, now).campus = False
            self.estimator.lent(node, now, float(mates[node].up_since_unix))
        self._watched = lent
        room.see(len(lent) + (self._since is not None), len(mates) + 1, now)

    def _adopt(self, now: float) -> None:
        others: list[Summary] = []
        zones = self._zones()
        told = self._told()
        for node in told:
            if node != self.me and (summary := self.told_by(node)) is not None:
                others.append(summary)
                introduce(self.estimator, node, summary, self.estimator.room(zones.get(node, ""), now), now)
        for node in self.estimator.nodes.keys() - told.keys() - self._watched - {self.me}:
            self.estimator.forget(node)
        self._observed.forget(told.keys() | zones.keys())
        self.estimator.tidy()
        adopt(self.estimator, others, now)


def spans_of(stays: Sequence[OwnStay]) -> list[tuple[float, bool]]:
    """Of each stay that is over: its length, and whether its end was a departure."""
    return [((stay.end_ms - stay.start_ms) / 1000, stay.cause != "planned") for stay in stays if stay.cause]


def local_offset_s(now: float) -> float:
    return float(time.localtime(now).tm_gmtoff)


def _ms(unix: float) -> int:
    return int(unix * 1000)

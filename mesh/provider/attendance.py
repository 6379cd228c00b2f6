"""This node's stays (times in which it is lent), kept on disk, and estimates of nodes' future stays (`placement/survival.py`).

Its own stays train the estimator and are published as a summary. Summaries of other nodes become the campus-wide prior. Machines
of this node's own zone are observed through their adverts, since machines of one room leave together.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import inf

from mesh.journal import Journal, OwnStay
from placement.advert import HORIZONS_S, Advert
from placement.observed import Caps, Observed
from placement.summary import (
    Summary,
    SummaryError,
    adopt,
    decode_summary,
    encode_summary,
    introduce,
    summarise,
    week_of,
)
from placement.survival import Estimator

SECTION = "stays"
SUMMARY_TTL_S = 7 * 86_400.0  # so that a node that is off for the weekend still contributes (own choice)
LOOK_S = 60.0  # between two observations of the zone (own choice)
KEEP_S = 300.0  # between two writes of a stay that continues; a crash loses at most this (own choice)
TELL_S = 3600.0
ADOPT_S = 900.0
SLEPT_S = 600.0  # without a tick for this long, the machine slept and no guest ran (own choice)
EPOCH_S = 900  # an advert's weights change at most this often, ...
BIG = 8  # ... or when one of them changes by an eighth (8 of 64); both own choices

log = logging.getLogger(__name__)


class Attendance:
    """The stays of this node and the estimator. `until_unix`: when the owner's calendar takes the machine back, 0 if unknown."""

    def __init__(
        self,
        me: bytes,
        journal: Journal,
        publish: Callable[[bytes], object],
        adverts: Callable[[], Iterable[Advert]],
        zones: Callable[[], Mapping[bytes, str]],
        summaries: Callable[[], Mapping[bytes, bytes]],
    ) -> None:
        self.me, self.zone = me, ""
        self.until_unix = 0.0
        self.foretold = (1,) * len(HORIZONS_S)
        self.caps: dict[bytes, Caps] = {}  # upper limits on other nodes' claims, from observation
        self._observed = Observed()
        self._epoch = 0
        self.stays: list[OwnStay] = []
        self.estimator = Estimator(0.0)
        self._journal, self._publish = journal, publish
        self._adverts, self._zones, self._summaries = adverts, zones, summaries
        self._since: float | None = None
        self._seen = self._first = 0.0
        self._looked = self._kept = self._published = self._adopted = 0.0
        self._watched: set[bytes] = set()

    async def open(self, now: float) -> None:
        """Train on the stays on disk; a stay left open by a crash ended at its last write."""
        for stay in await self._journal.stays():
            kept = stay if stay.cause else OwnStay(stay.start_ms, stay.end_ms, "lost")
            if not stay.cause:
                self._journal.note_stay(kept)
            if 0 <= kept.start_ms <= kept.end_ms <= now * 1000:
                self.stays.append(kept)
        self._first = self.stays[0].start_ms / 1000 if self.stays else now
        self.estimator = Estimator(self._first, local_offset_s(now))
        self.estimator.add_node(self.me, self.estimator.zone(self.zone, self._first), self._first)
        for stay in self.stays:
            start, end = stay.start_ms / 1000, stay.end_ms / 1000
            self.estimator.record_lent(self.me, start, start, self.zone)
            self.estimator.record_end(self.me, end, reclaimed=stay.cause != "planned")

    def close(self, now: float) -> None:
        if self._since is not None:
            self._end(now)

    @property
    def since_unix(self) -> float | None:
        """Return since when the node is lent, in Unix seconds; None while it is not."""
        return self._since

    def tick(self, now: float, lent: bool) -> tuple[int, ...]:
        """Update at `now`, about once a second; return the advert's weight for each horizon."""
        changed = lent != (self._since is not None)
        if self._since is not None and now - self._seen > SLEPT_S:
            self._end(self._seen, "lost")
            changed = lent
        elif now < self._seen - SLEPT_S:  # the clock was wrong, and so is the length of this stay
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
            self.estimator.record_lent(self.me, now, self._since, self.zone)
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
        """Update the weights at once after a big change, else every EPOCH_S seconds, so that adverts do not change constantly."""
        fresh = self.estimator.advert_weights(self.me, now, self.until_unix or inf)
        epoch = int(now // EPOCH_S)
        much = max(abs(new - old) for new, old in zip(fresh, self.foretold, strict=True)) >= BIG
        if changed or much or epoch != self._epoch:
            self.foretold, self._epoch = fresh, epoch

    def rates(self, start: float) -> Iterator[tuple[float, float]]:
        """Yield this machine's departure rates per second from `start` on, each with the end of its interval."""
        return self.estimator.rates(self.me, start)

    def summary(self, now: float) -> Summary:
        spans = [(stay.start_ms / 1000, stay.end_ms / 1000) for stay in self.stays]
        if self._since is not None:
            spans.append((self._since, now))
        week = week_of(spans, self._first, now, self.estimator.utc_offset_s)
        return summarise(self.estimator, self.me, now, self.until_unix, week)

    def told_by(self, node: bytes) -> Summary | None:
        """Return another node's summary; None if there is none or it is invalid."""
        data = self._summaries().get(node)
        if data is None:
            return None
        try:
            return decode_summary(data)
        except SummaryError as error:
            log.debug("node %s: %s", node.hex()[:8], error)
            return None

    def meet(self, node: bytes, summary: Summary, now: float) -> None:
        """Add another node to the estimator by its summary."""
        introduce(self.estimator, node, summary, self.estimator.zone(self._zones().get(node, ""), now), now)

    def _end(self, now: float, cause: str = "") -> None:
        assert self._since is not None
        if not cause:
            cause = "planned" if 0 < self.until_unix <= now + LOOK_S else "reclaimed"
        now = max(now, self._since)
        self.estimator.record_end(self.me, now, reclaimed=cause != "planned")
        stay = OwnStay(_ms(self._since), _ms(now), cause)
        self._journal.note_stay(stay)
        self.stays.append(stay)
        self._since = None

    def _look_around(self, now: float) -> None:
        """Observe which nodes of this zone are lent."""
        zones = self._zones()
        self.zone = zones.get(self.me, self.zone)
        zone = self.estimator.zone(self.zone, now)
        self.estimator.add_node(self.me, zone, now)
        adverts = list(self._adverts())
        self._observed.observe({ad.node for ad in adverts if ad.lending and not ad.paused and ad.node != self.me}, now)
        self.caps = self._observed.caps(now)
        neighbours = {advert.node: advert for advert in adverts if zones.get(advert.node) == self.zone}
        neighbours.pop(self.me, None)
        lent = {node for node, advert in neighbours.items() if advert.lending and not advert.paused}
        for node in self._watched - lent:
            self.estimator.record_end(node, now)
        for node in lent:
            self.estimator.add_node(node, zone, now).campus = False
            self.estimator.record_lent(node, now, float(neighbours[node].up_since_unix))
        self._watched = lent
        zone.observe(len(lent) + (self._since is not None), len(neighbours) + 1, now)

    def _adopt(self, now: float) -> None:
        others: list[Summary] = []
        zones = self._zones()
        summaries = self._summaries()
        for node in summaries:
            if node != self.me and (summary := self.told_by(node)) is not None:
                others.append(summary)
                introduce(self.estimator, node, summary, self.estimator.zone(zones.get(node, ""), now), now)
        for node in self.estimator.nodes.keys() - summaries.keys() - self._watched - {self.me}:
            self.estimator.forget(node)
        self._observed.keep_only(summaries.keys() | zones.keys())
        self.estimator.drop_empty_zones()
        adopt(self.estimator, others, now)


def spans_of(stays: Sequence[OwnStay]) -> list[tuple[float, bool]]:
    """Return each finished stay's length in seconds, and whether it ended in an unplanned departure."""
    return [((stay.end_ms - stay.start_ms) / 1000, stay.cause != "planned") for stay in stays if stay.cause]


def local_offset_s(now: float) -> float:
    return float(time.localtime(now).tm_gmtoff)


def _ms(unix: float) -> int:
    return int(unix * 1000)

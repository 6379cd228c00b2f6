"""Ranking of nodes for a job: first by requirements and preferences, then by weighted rendezvous with survival as the weight.

The weight counts by a high power, so most jobs go to nodes that stay. Load stays bounded because a crowded node comes after the
others. A node's grade and score depend on that node alone: a node that leaves does not change the order of the others.

Each advert caches its grade for each shape of request, so requirements are checked once per shape.
"""

from collections.abc import Collection, Iterator, Mapping
from functools import cached_property
from itertools import islice

import msgspec

from placement.advert import LOAD_BITS, MAX_WEIGHT, WHOLE, Advert, horizon_of
from placement.allocation import allocate
from placement.filters import lacks_image, missing_mib, refusals
from placement.rendezvous import best_first, draws, rank, weighed
from placement.request import Request

STEEP = 16  # exponent of the weight in a score: of 3, 5, 8 and 16 fewest departures (docs/decisions/0011)
STICKY = 13  # 64ths of survival by which another node must be better: a fifth (docs/explanation/placement.md)
FETCH_MIB_S = 100  # expected speed of a fetch of data sets to a node that has not measured it: 1 GbE
MOST_LOST = 8  # a node that lacks data sets loses at most one part in so many of its weight (docs/explanation/data.md)
CROWD = 2  # times the mean load; a node above it comes after the others (Mirrokni et al. 2018, with epsilon 1)
MAX_SHAPES = 64  # grades cached in an advert (own choice)

# The parts of a grade, most significant first: the node is to be avoided, lacks the image, lacks the last checkpoint; the rank of
# its zone; it is crowded; the number of GPUs that would be stranded.
_REFUSED, _PREFERRED = -1, -2
_AVOIDED, _LACKS, _FAR, _ZONE, _CROWDED = 1 << 42, 1 << 41, 1 << 40, 1 << 17, 1 << 16

_WEIGHED = tuple(weighed(weight**STEEP) for weight in range(MAX_WEIGHT + 1))
Tiers = dict[int, list[Advert]]


class Candidate(msgspec.Struct, frozen=True):
    node: bytes
    nick: str
    score: int
    weight: int
    advert_version: int


class Refusal(msgspec.Struct, frozen=True):
    node: bytes
    nick: str
    reasons: tuple[str, ...]


class Ranking:
    """The nodes for a request: `candidates`, best first, and all others in `refused`. Iteration is lazy."""

    def __init__(self, request: Request, tiers: Mapping[int, list[Advert]], refused: list[Advert]) -> None:
        self._request, self._tiers, self._refused = request, tiers, refused
        self._horizon = horizon_of(request.remaining_s)

    def __len__(self) -> int:
        return sum(len(tier) for tier in self._tiers.values())

    def __iter__(self) -> Iterator[Candidate]:
        for grade in sorted(self._tiers):
            yield from self._ordered(self._tiers[grade])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ranking) and (self.candidates, self.refused) == (other.candidates, other.refused)

    __hash__ = None  # type: ignore[assignment]

    def first(self, count: int, but: Collection[bytes] = ()) -> list[Candidate]:
        return list(islice((candidate for candidate in self if candidate.node not in but), count))

    @cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        return tuple(self)

    @cached_property
    def refused(self) -> tuple[Refusal, ...]:
        found = (Refusal(ad.node, ad.nick, tuple(refusals(self._request, ad))) for ad in self._refused)
        return tuple(sorted(found, key=lambda refusal: refusal.node))

    def settle(self, incumbent: bytes | None, but: Collection[bytes] = ()) -> Candidate | None:
        """Return the candidate to use if the job is at `incumbent` now.

        The incumbent stays unless it can no longer take the job, is to be avoided, or the first candidate is preferred or better
        by at least `STICKY`.
        """
        best = next((candidate for candidate in self if candidate.node not in but), None)
        if best is None or best.node == incumbent or incumbent is None or incumbent in but:
            return best
        request, offers = self._request, (ad for tier in self._tiers.values() for ad in tier)
        now = next((ad for ad in offers if ad.node == incumbent), None)
        if now is None or best.node == request.prefer or (now.node in request.avoid and best.node not in request.avoid):
            return best
        weight = with_data(now.weight_for(self._horizon), request, now)
        if best.weight >= weight + STICKY:
            return best
        return next(candidate for candidate in self._ordered([now]))

    def _ordered(self, tier: list[Advert]) -> Iterator[Candidate]:
        """Yield the candidates of one grade by score."""
        horizon = self._horizon
        found = draws(self._request.key, [advert.lane for advert in tier])
        weights = [advert.weights[horizon] if advert.weights else advert.weight for advert in tier]
        if self._request.data:
            weights = [with_data(weight, self._request, ad) for weight, ad in zip(weights, tier, strict=True)]
        for place, score in best_first(found, weights, [advert.node for advert in tier], _WEIGHED):
            advert = tier[place]
            yield Candidate(advert.node, advert.nick, score, weights[place], advert.version)


def rank_nodes(request: Request, adverts: Collection[Advert], homes: Mapping[bytes, str] | None = None) -> Ranking:
    """Rank the nodes for a request. The same adverts, one per node and in any order, give the same ranking on every node.

    With `homes` (each node's zone), the ranking has two levels: zones by rendezvous with the summed weights of their nodes that
    fit, then nodes.
    """
    shape, exclude = request.shape, request.exclude
    tiers: Tiers = {}
    for advert in adverts:
        grade = advert.grades.get(shape) or _grade(request, advert)
        if grade in tiers:
            tiers[grade].append(advert)
        else:
            tiers[grade] = [advert]
    refused = tiers.pop(_REFUSED, [])
    if exclude:
        refused += [advert for tier in tiers.values() for advert in tier if advert.node in exclude]
        tiers = {grade: [advert for advert in tier if advert.node not in exclude] for grade, tier in tiers.items()}
    if not request.gpus:
        tiers = _uncrowded(tiers, adverts)
    if homes is not None:
        tiers = _zoned(request, tiers, homes)
    if request.prefer is not None or request.avoid or request.near:
        tiers = _wished(request, tiers)
    return Ranking(request, tiers, refused)


def with_data(weight: int, request: Request, advert: Advert) -> int:
    """Return a node's weight less the part of the job's time that goes into fetching data sets, at most 1 / MOST_LOST of it.

    The bound keeps a fast node from being starved of jobs: a node with the data comes first, and if it is taken the other runs
    them, has the data from then on, and is equal.
    """
    takes_s = fetch_s(request, advert) if request.data else 0
    return max(1, weight - min(-(-weight // MOST_LOST), weight * takes_s // max(1, takes_s + request.remaining_s)))


def fetch_s(request: Request, advert: Advert) -> int:
    """Return the seconds for which the node would fetch data sets."""
    return missing_mib(request, advert) // (advert.fetch_mib_s or FETCH_MIB_S)


def zone_order(key: bytes, weights: Mapping[str, int]) -> list[str]:
    """Return the zones, best first for this key."""
    by_id = {name.encode(): name for name in weights}
    return [by_id[found] for found, _ in rank(key + b"zone", [(name.encode(), w) for name, w in weights.items()])]


def _grade(request: Request, advert: Advert) -> int:
    """Return the grade of the advert for all requests of this shape: lower is better, never 0. Cached in the advert."""
    if refusals(request if not request.exclude else msgspec.structs.replace(request, exclude=()), advert):
        grade = _REFUSED
    else:
        grade = _FAR | (_LACKS if lacks_image(request, advert) else 0) | _stranded(request, advert)
    if len(advert.grades) >= MAX_SHAPES:
        advert.grades.clear()
    advert.grades[request.shape] = grade
    return grade


def _stranded(request: Request, advert: Advert) -> int:
    """Return the number of whole free GPUs that wider jobs could no longer use: those a share would split, or those left over."""
    if not request.is_share:
        return advert.whole_gpus_free - request.gpus if request.gpus else 0
    given = {portion.uuid for portion in allocate(request, advert.gpus, advert.free_portions)}
    return sum(left.uuid in given and left.share == WHOLE for left in advert.free_portions)


def _uncrowded(tiers: Tiers, offers: Collection[Advert]) -> Tiers:
    """Put nodes with more than `CROWD` times the mean load after the others. A node without jobs is never crowded."""
    slots = sum([advert.slots for advert in offers])
    taken = slots - sum([advert.slots_free for advert in offers])
    most = (CROWD * (1 + taken) << LOAD_BITS) // max(1, slots)
    split: Tiers = {}
    for grade, tier in tiers.items():
        crowded = [advert for advert in tier if advert.load > most]
        split[grade] = [advert for advert in tier if advert.load <= most] if crowded else tier
        if crowded:
            split[grade | _CROWDED] = crowded
    return split


def _zoned(request: Request, tiers: Tiers, homes: Mapping[bytes, str]) -> Tiers:
    """Split each grade by zone."""
    weights: dict[str, int] = {}
    split: list[tuple[int, dict[str, list[Advert]]]] = []
    for grade, tier in tiers.items():
        by_zone: dict[str, list[Advert]] = {}
        for advert in tier:
            name = homes.get(advert.node, "")
            if name in by_zone:
                by_zone[name].append(advert)
            else:
                by_zone[name] = [advert]
        for name, some in by_zone.items():
            weights[name] = weights.get(name, 0) + sum([advert.weight for advert in some])
        split.append((grade, by_zone))
    places = {name: place * _ZONE for place, name in enumerate(zone_order(request.key, weights))}
    return {grade + places[name]: some for grade, by_zone in split for name, some in by_zone.items()}


def _wished(request: Request, tiers: Tiers) -> Tiers:
    """Move the nodes that the request names (`prefer`, `near`, `avoid`) to their own grades."""
    named = (
        {*request.avoid, *request.near} if request.prefer is None else {request.prefer, *request.avoid, *request.near}
    )
    changed: Tiers = {}
    moved: list[tuple[int, Advert]] = []
    for grade, tier in tiers.items():
        some = [(grade, advert) for advert in tier if advert.node in named]
        moved += some
        changed[grade] = [advert for advert in tier if advert.node not in named] if some else tier
    for grade, advert in moved:
        if advert.node == request.prefer:
            wished = _PREFERRED
        else:
            wished = grade & ~_FAR if advert.node in request.near else grade
            if advert.node in request.avoid:
                wished |= _AVOIDED
        changed[wished] = [*changed.get(wished, ()), advert]
    return changed

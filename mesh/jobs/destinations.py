"""What a node knows of the jobs that leave it, as `placement.destination` wants it: who could take each, what he lacks.

No I/O.
"""

from collections.abc import Callable, Iterable, Sequence

import msgspec

from ckptstore.bandwidth import Path
from mesh.jobs.spec import JobSpec, waiting_place
from mesh.jobs.view import View
from placement.advert import MAX_WEIGHT, WHOLE, Advert
from placement.allotment import served
from placement.destination import Assignment, Leaver, Way, plan, stranding, survival
from placement.images import lacks
from placement.ranking import STICKY
from placement.request import Request

AT_HOME = 2.0  # times as good as elsewhere: the job would go there by itself soon; ours
EXPECTED = 1 + STICKY / MAX_WEIGHT  # the heir: what was brought there is of use, unless another is much better
FAILED_THERE, FETCHES_IMAGE = 0.25, 0.5  # times as good as elsewhere; ours
KEEPERS = 4  # asked for besides the places: more than any job wants copies; ours

Paths = Callable[[bytes, Sequence[bytes]], Path]
"""To a node, or as far as its zone's others tell."""


class Guest(msgspec.Struct, frozen=True):
    """A job that has to leave. `request`: for its next attempt; `value`: GPU-seconds at risk; `ready_s`: until its state can be
    sent. `difference`: bytes that its last save added, which `holders` of its last checkpoint lack; `state`: all there is, which
    others lack; None as long as it has saved nothing. `horizon_s`: from one of its checkpoints to the next. `keepers` could hold
    its state without running it, best first. `heir`: who was to have it next, before there was notice."""

    spec: JobSpec
    request: Request
    value: float
    ready_s: float
    difference: int | None
    state: int | None
    holders: frozenset[bytes]
    horizon_s: float
    keepers: tuple[bytes, ...]
    heir: bytes | None = None


def assignment(
    guests: Sequence[Guest], view: View, paths: Paths, window_s: float, taken: Iterable[tuple[bytes, Request]] = ()
) -> Assignment:
    """Where they all go, if they have so long. `taken`: places that were promised to others who leave."""
    offers = {advert.node: advert for advert in view.offers if advert.node != view.me}
    for node, request in taken:
        if node in offers:
            offers[node] = served(offers[node], request)
    known: dict[bytes, Path] = {}
    near = {node: zone.nodes for zone in view.hierarchy.zones for node in zone.nodes}

    def path_to(node: bytes) -> Path:
        if node not in known:
            known[node] = paths(node, near.get(node, ()))
        return known[node]

    leavers, least = [], dict(offers)
    for guest in guests:
        able: Sequence[Advert] = list(offers.values())
        if view.queue is not None:  # a place that is kept for another is not free
            able = view.queue.left_for(waiting_place(guest.spec, guest.request), able)
            least |= {advert.node: min(advert, least[advert.node], key=_room) for advert in able}
        leavers.append(_leaver(guest, able, view, path_to))
    return plan(leavers, least, window_s)


def _leaver(guest: Guest, able: Sequence[Advert], view: View, path_to: Callable[[bytes], Path]) -> Leaver:
    request = guest.request
    horizon_s = min(guest.horizon_s, float(request.remaining_s))
    adverts = {advert.node: advert for advert in able}
    ranked = dict.fromkeys(candidate.node for candidate in view.hierarchy.rank(request, able))
    staying = [node for node in (*sorted(guest.holders), *guest.keepers[:KEEPERS]) if node in view.staying]
    known = {advert.node: advert for advert in view.adverts} | adverts
    ways = []
    for node in dict.fromkeys([*ranked, *staying]):
        if node == view.me:
            continue
        path = path_to(node)
        missing = guest.difference if node in guest.holders else guest.state
        stays = survival(known[node], horizon_s) if node in known else 0.5
        favour = _favour(guest, adverts[node]) if node in adverts else 1.0
        ways.append(Way(node, float(missing or 0), path.bps, path.spread, stays, node in ranked, favour))
    return Leaver(request, guest.value, tuple(ways), guest.ready_s, horizon_s)


def _favour(guest: Guest, advert: Advert) -> float:
    request = guest.request
    if advert.node == request.prefer:
        return AT_HOME
    known = EXPECTED if advert.node == guest.heir else FAILED_THERE if advert.node in request.avoid else 1.0
    return known * (FETCHES_IMAGE if lacks(request, advert) else 1.0) * stranding(request, advert)


def _room(advert: Advert) -> tuple[int, int, int]:
    whole = sum(left.share == WHOLE for left in advert.room)
    return whole, sum(left.share for left in advert.room), advert.slots_free

"""Destinations of departing jobs: what this node knows of them, in the terms of `placement.destination`. No I/O."""

from collections.abc import Callable, Iterable, Sequence

import msgspec

from ckptstore.bandwidth import PathEstimate
from mesh.consensus.view import View
from mesh.model.spec import JobSpec, waiting_place
from placement.advert import MAX_WEIGHT, WHOLE, Advert
from placement.allocation import reserve
from placement.destination import LeavingJob, Plan, Target, plan, stranding, survival
from placement.filters import lacks_image
from placement.ranking import STICKY, with_data
from placement.request import Request

AT_HOME = 2.0  # factor: the job would return there soon anyway (own choice)
EXPECTED = (
    1 + STICKY / MAX_WEIGHT
)  # factor of the standby: what was copied there is of use, unless another node is much better
FAILED_THERE, FETCHES_IMAGE = 0.25, 0.5  # factors (own choice)
KEEPERS = 4  # nodes considered besides the places: more than any job wants copies (own choice)

Paths = Callable[[bytes, Sequence[bytes]], PathEstimate]
"""To a node, or as far as its zone's others tell."""


class Guest(msgspec.Struct, frozen=True):
    """A job that has to leave.

    `request` is that of its next attempt; `value` is the GPU-seconds at risk; `ready_s` the time until its state can be sent.
    `difference` is the bytes that its last save added, which the `holders` of its last checkpoint lack; `state` is all of its
    bytes, which other nodes lack; both are None until it has saved. `horizon_s` is the time between its checkpoints.
    `keepers` could hold its state without running it, best first. `standby` was its next node before the notice.
    """

    spec: JobSpec
    request: Request
    value: float
    ready_s: float
    difference: int | None
    state: int | None
    holders: frozenset[bytes]
    horizon_s: float
    keepers: tuple[bytes, ...]
    standby: bytes | None = None


def assignment(
    guests: Sequence[Guest], view: View, paths: Paths, window_s: float, taken: Iterable[tuple[bytes, Request]] = ()
) -> Plan:
    """Assign a destination to each guest within `window_s`. `taken`: places promised to jobs that leave already."""
    offers = {advert.node: advert for advert in view.offers if advert.node != view.me}
    for node, request in taken:
        if node in offers:
            offers[node] = reserve(offers[node], request)
    known: dict[bytes, PathEstimate] = {}
    near = {node: zone.nodes for zone in view.hierarchy.zones for node in zone.nodes}

    def path_to(node: bytes) -> PathEstimate:
        if node not in known:
            known[node] = paths(node, near.get(node, ()))
        return known[node]

    leavers, least = [], dict(offers)
    for guest in guests:
        able: Sequence[Advert] = list(offers.values())
        if view.queue is not None:  # a place reserved for another job is not free
            able = view.queue.left_for(waiting_place(guest.spec, guest.request), able)
            least |= {advert.node: min(advert, least[advert.node], key=_room) for advert in able}
        leavers.append(_leaver(guest, able, view, path_to))
    return plan(leavers, least, window_s)


def _leaver(guest: Guest, able: Sequence[Advert], view: View, path_to: Callable[[bytes], PathEstimate]) -> LeavingJob:
    request = guest.request
    horizon_s = min(guest.horizon_s, float(request.remaining_s))
    adverts = {advert.node: advert for advert in able}
    ranked = dict.fromkeys(candidate.node for candidate in view.hierarchy.rank(request, able))
    staying = [node for node in (*sorted(guest.holders), *guest.keepers[:KEEPERS]) if node in view.staying]
    known = {advert.node: advert for advert in view.adverts} | adverts
    targets = []
    for node in dict.fromkeys([*ranked, *staying]):
        if node == view.me:
            continue
        path = path_to(node)
        missing = guest.difference if node in guest.holders else guest.state
        stays = survival(known[node], horizon_s) if node in known else 0.5
        favour = _favour(guest, adverts[node]) if node in adverts else 1.0
        targets.append(Target(node, float(missing or 0), path.bps, path.spread, stays, node in ranked, favour))
    return LeavingJob(request, guest.value, tuple(targets), guest.ready_s, horizon_s)


def _favour(guest: Guest, advert: Advert) -> float:
    request = guest.request
    if advert.node == request.prefer:
        return AT_HOME
    known = EXPECTED if advert.node == guest.standby else FAILED_THERE if advert.node in request.avoid else 1.0
    data = with_data(MAX_WEIGHT, request, advert) / MAX_WEIGHT
    return known * data * (FETCHES_IMAGE if lacks_image(request, advert) else 1.0) * stranding(request, advert)


def _room(advert: Advert) -> tuple[int, int, int]:
    whole = sum(left.share == WHOLE for left in advert.free_portions)
    return whole, sum(left.share for left in advert.free_portions), advert.slots_free

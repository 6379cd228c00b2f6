"""Who makes room for a job that matters more: the least important that is enough, and only what loses nothing by it.

Nobody is evicted for a small difference, nor right after it came; and a job without checkpoints never is.
"""

from collections.abc import Iterable, Sequence

import msgspec

from placement.advert import Advert, Portion
from placement.allotment import returned
from placement.filters import refusals
from placement.request import Request

MARGIN = 20  # points of priority by which a job must matter more: two steps of the usual low, normal, high; ours
MIN_STAY_S = 120  # a job that has only just come is left in peace; ours


class Stay(msgspec.Struct, frozen=True):
    """A job that runs. `saves`: it has checkpoints; `portions`: what it has of the node's GPUs, nothing if it has a slot."""

    job: bytes
    node: bytes
    priority: int
    since_unix: int
    saves: bool
    portions: tuple[Portion, ...] = ()


def must_yield(priority: int, stay: Stay, now_unix: float) -> bool:
    """Whether it has to make room for a job of this priority."""
    return stay.saves and priority >= stay.priority + MARGIN and now_unix - stay.since_unix >= MIN_STAY_S


def victim(
    request: Request, priority: int, adverts: Iterable[Advert], stays: Sequence[Stay], now_unix: float
) -> Stay | None:
    """Whom to send away so that the request fits: the least important, then the youngest. None if no single one would do."""
    offers = {advert.node: advert for advert in adverts}
    fitting = [
        stay
        for stay in stays
        if must_yield(priority, stay, now_unix)
        and stay.node in offers
        and not refusals(request, vacated(offers[stay.node], stay))
    ]
    return min(fitting, key=lambda stay: (stay.priority, -stay.since_unix, stay.job), default=None)


def vacated(advert: Advert, stay: Stay) -> Advert:
    """The advert as it would be without this job."""
    if not stay.portions:
        return msgspec.structs.replace(advert, slots_free=min(advert.slots, advert.slots_free + 1))
    return msgspec.structs.replace(advert, room=returned(advert.gpus, advert.room, stay.portions))

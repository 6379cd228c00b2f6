"""What a request gets of a node's GPUs: the one rule that filters, ranking, queue, preemption and the inventory share.

Best fit: of the GPUs that it fits on, those with the least room left. So shares go beside shares, and whole GPUs stay whole. A
request for all of a GPU's time gets all of its memory too, and fits only where nobody else is.
"""

from collections.abc import Sequence

import msgspec

from placement.advert import WHOLE, Advert, Gpu, Portion
from placement.request import Request

Room = tuple[Portion, ...]  # what is left of each GPU; none that has nothing left


def untouched(gpus: Sequence[Gpu]) -> Room:
    """The room on GPUs that nobody uses."""
    return tuple(Portion(gpu.uuid, WHOLE, gpu.vram_mib) for gpu in gpus)


def suits(request: Request, gpu: Gpu) -> bool:
    """Whether it is of the kind that is asked for, whoever is on it."""
    return gpu.capability >= request.capability and request.gpu_model.casefold() in gpu.model.casefold()


def fitting(request: Request, gpus: Sequence[Gpu], room: Room) -> Room:
    """Where the request could have what it asks of one GPU."""
    able = {gpu.uuid for gpu in gpus if suits(request, gpu)}
    return tuple(
        left
        for left in room
        if left.uuid in able and left.share >= request.gpu_share and left.vram_mib >= request.vram_mib
    )


def allot(request: Request, gpus: Sequence[Gpu], room: Room) -> tuple[Portion, ...]:
    """A portion of each of as many GPUs as it asks for; none if it does not fit."""
    found = sorted(fitting(request, gpus, room), key=lambda left: (left.share, left.vram_mib, left.uuid))
    if len(found) < request.gpus:
        return ()
    if request.is_share:
        return tuple(Portion(left.uuid, request.gpu_share, request.vram_mib) for left in found[: request.gpus])
    return tuple(found[: request.gpus])


def without(room: Room, taken: Sequence[Portion]) -> Room:
    """What is left once these are taken."""
    gone = {portion.uuid: portion for portion in taken}
    rest = (_difference(left, gone[left.uuid]) if left.uuid in gone else left for left in room)
    return tuple(left for left in rest if left.share or left.vram_mib)


def served(advert: Advert, request: Request) -> Advert:
    """The advert once this request is served there."""
    if not request.gpus:
        return msgspec.structs.replace(advert, slots_free=max(0, advert.slots_free - 1))
    return msgspec.structs.replace(advert, room=without(advert.room, allot(request, advert.gpus, advert.room)))


def returned(gpus: Sequence[Gpu], room: Room, given_back: Sequence[Portion]) -> Room:
    """The room once these are given back; never more than there is of a GPU, whatever was said of it."""
    parts = [{portion.uuid: portion for portion in portions} for portions in (room, given_back)]
    found = []
    for gpu in gpus:
        here = [part[gpu.uuid] for part in parts if gpu.uuid in part]
        if here:
            share, vram_mib = sum(portion.share for portion in here), sum(portion.vram_mib for portion in here)
            found.append(Portion(gpu.uuid, min(WHOLE, share), min(gpu.vram_mib, vram_mib)))
    return tuple(found)


def percent(gpus: int, share: int) -> int:
    """What a job counts for, in per cent of one GPU; a slot counts as a whole one."""
    return gpus * share or WHOLE


def _difference(left: Portion, gone: Portion) -> Portion:
    return Portion(left.uuid, left.share - gone.share, left.vram_mib - gone.vram_mib)

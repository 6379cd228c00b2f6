"""Allocation of a node's GPUs to a request: the one rule for filters, ranking, queue, preemption and the inventory.

Best fit: of the GPUs that fit, those with the least capacity left. So shares are packed, and whole GPUs stay whole. A request for
all of a GPU's time gets all of its memory too, and fits only on an unused GPU.
"""

from collections.abc import Sequence

import msgspec

from placement.advert import WHOLE, Advert, Gpu, Portion
from placement.request import Request

FreeGpus = tuple[Portion, ...]  # the free part of each GPU; fully used GPUs are left out


def all_free(gpus: Sequence[Gpu]) -> FreeGpus:
    """Return these GPUs as entirely free."""
    return tuple(Portion(gpu.uuid, WHOLE, gpu.vram_mib) for gpu in gpus)


def matches(request: Request, gpu: Gpu) -> bool:
    """Return True if the GPU is of the requested kind, used or not."""
    return gpu.capability >= request.capability and request.gpu_model.casefold() in gpu.model.casefold()


def fitting_gpus(request: Request, gpus: Sequence[Gpu], free: FreeGpus) -> FreeGpus:
    """Return the free parts that are large enough for the request, for one GPU each."""
    able = {gpu.uuid for gpu in gpus if matches(request, gpu)}
    return tuple(
        left
        for left in free
        if left.uuid in able and left.share >= request.gpu_share and left.vram_mib >= request.vram_mib
    )


def allocate(request: Request, gpus: Sequence[Gpu], free: FreeGpus) -> tuple[Portion, ...]:
    """Return a portion of each of the requested number of GPUs; none if the request does not fit."""
    found = sorted(fitting_gpus(request, gpus, free), key=lambda left: (left.share, left.vram_mib, left.uuid))
    if len(found) < request.gpus:
        return ()
    if request.is_share:
        return tuple(Portion(left.uuid, request.gpu_share, request.vram_mib) for left in found[: request.gpus])
    return tuple(found[: request.gpus])


def subtract(free: FreeGpus, taken: Sequence[Portion]) -> FreeGpus:
    """Return what is free without these portions."""
    gone = {portion.uuid: portion for portion in taken}
    rest = (_difference(left, gone[left.uuid]) if left.uuid in gone else left for left in free)
    return tuple(left for left in rest if left.share or left.vram_mib)


def reserve(advert: Advert, request: Request) -> Advert:
    """Return the advert as it is once the request has its place on the node."""
    if not request.gpus:
        return msgspec.structs.replace(advert, slots_free=max(0, advert.slots_free - 1))
    taken = allocate(request, advert.gpus, advert.free_portions)
    return msgspec.structs.replace(advert, free_portions=subtract(advert.free_portions, taken))


def release(gpus: Sequence[Gpu], free: FreeGpus, given_back: Sequence[Portion]) -> FreeGpus:
    """Return what is free with these portions given back; never more than the whole of a GPU."""
    parts = [{portion.uuid: portion for portion in portions} for portions in (free, given_back)]
    found = []
    for gpu in gpus:
        here = [part[gpu.uuid] for part in parts if gpu.uuid in part]
        if here:
            share, vram_mib = sum(portion.share for portion in here), sum(portion.vram_mib for portion in here)
            found.append(Portion(gpu.uuid, min(WHOLE, share), min(gpu.vram_mib, vram_mib)))
    return tuple(found)


def gpu_percent(gpus: int, share: int) -> int:
    """Return a job's size in per cent of one GPU; a slot counts as a whole GPU."""
    return gpus * share or WHOLE


def _difference(left: Portion, gone: Portion) -> Portion:
    return Portion(left.uuid, left.share - gone.share, left.vram_mib - gone.vram_mib)

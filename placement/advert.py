"""A node's own description of what it lends: integers only, so that every node ranks it alike.

The advert travels as a signed lane-2 section; `version` grows with each change and stands in every decision.
"""

from bisect import bisect_left
from functools import cached_property
from typing import Annotated, Literal

import msgspec

from placement.likeness import SystemCheckpoints
from placement.rendezvous import lane

MAX_WEIGHT = 64
MAX_DRIVER_PARTS = 4
MAX_IMAGES = 256  # of each kind; a section holds 16 KiB
HORIZONS_S = tuple(
    900 << doubling for doubling in range(7)
)  # 15 min to 16 h: most jobs, and what survival can foresee; ours
WHOLE = 100  # per cent of a GPU's time

HeldBy = Literal["", "owner", "hours"]

Count = Annotated[int, msgspec.Meta(ge=0)]
Percent = Annotated[int, msgspec.Meta(ge=0, le=WHOLE)]
Mebibytes = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


HOUR = 2  # its place in HORIZONS_S: an advert's `weight` is for so long


def horizon_of(seconds: float) -> int:
    """The place in `HORIZONS_S` of the shortest that is not shorter, or the longest."""
    return min(bisect_left(HORIZONS_S, seconds), len(HORIZONS_S) - 1)


LOAD_BITS = 20


class AdvertError(ValueError):
    """Bytes that are no possible advert."""


class Gpu(msgspec.Struct, frozen=True):
    uuid: str
    model: str
    vram_mib: Mebibytes
    capability: tuple[int, int] = (0, 0)


class Portion(msgspec.Struct, frozen=True, array_like=True):
    """So much of one GPU: what is left of it in an advert, or what a job was given. `share` is of its time, guaranteed."""

    uuid: str
    share: Percent
    vram_mib: Mebibytes


class Advert(msgspec.Struct, frozen=True, dict=True):
    """`weight` is the node's own survival estimate for an hour, 1 to 64; `stays` the same for each of `HORIZONS_S`, none if it
    does not say; `driver` its GPUs' driver, as `(550, 54, 14)`; `room` (of GPUs with any left) and `slots_free` are what nobody
    has now.

    A job without GPUs takes a slot. `guards`: it can keep a job to its share of a GPU; `gpu_sharing`: its owner allows shares;
    `gpu_pauses`: its driver can free a guest's memory with the guest alive, so an owner's short visit costs no departure.
    `held_by`: why it is paused if nobody has paused it: its `owner` is there, or it is lent at other `hours`, from `back_unix`
    on if that is known.
    `images` are the names that may be asked for by name alone; if the mesh has a list (`image_list`), those that its owner allows
    himself. `image_ids` begin the hashes of the images that it has and may run, `image_fetches` of those that it can get from
    others; `image_denials` are names, and beginnings of hashes in hex, that its owner denies.
    `interactive`: its owner lets guests' users into them (exec, forward, Jupyter).
    `system` says whether containers can be saved and restored as a whole, and by which nodes.
    `accepts` names the users whose jobs may come, `*` for everybody; `own_only` the engines that run only the owner's own jobs.
    """

    version: int
    node: bytes
    nick: str
    user: str
    zone: str
    weight: int
    up_since_unix: int
    lending: bool
    paused: bool
    gpus: tuple[Gpu, ...]
    room: tuple[Portion, ...]
    guards: bool
    gpu_sharing: bool
    slots: int
    slots_free: int
    cpus: int
    memory_mib: int
    engines: tuple[str, ...]
    own_only: tuple[str, ...]
    images: tuple[str, ...]
    accepts: tuple[str, ...]
    store_free_mib: int
    held_by: HeldBy = ""
    back_unix: int = 0
    gpu_pauses: bool = False
    interactive: bool = True
    image_list: bool = False
    image_ids: tuple[bytes, ...] = ()
    image_fetches: tuple[bytes, ...] = ()
    image_denials: tuple[str, ...] = ()
    stays: tuple[int, ...] = ()
    driver: tuple[int, ...] = ()
    system: SystemCheckpoints = SystemCheckpoints()

    @cached_property
    def lane(self) -> bytes:
        return lane(self.node)

    @cached_property
    def load(self) -> int:
        """What part of its slots would be taken with one more, in units of 2**-20; 0 if that is the first."""
        taken = self.slots - self.slots_free
        return (taken + 1 << LOAD_BITS) // self.slots if taken > 0 else 0

    @cached_property
    def grades(self) -> dict[bytes, int]:
        """What `ranking` has found out about this advert, by the shape of the request."""
        return {}

    def weight_for(self, horizon: int) -> int:
        """For a stay as long as that horizon, by its place in `HORIZONS_S`."""
        return self.stays[horizon] if self.stays else self.weight

    @cached_property
    def whole_gpus_free(self) -> int:
        return sum(left.share == WHOLE for left in self.room)


_decoder = msgspec.msgpack.Decoder(Advert)


def encode_advert(advert: Advert) -> bytes:
    return msgspec.msgpack.encode(advert)


def decode_advert(node: bytes, data: bytes) -> Advert:
    """The advert, if it can be one and speaks of its own author."""
    try:
        advert = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise AdvertError(f"not an advert: {error}") from error
    if advert.node != node:
        raise AdvertError("an advert must speak of its own author")
    if not 1 <= advert.weight <= MAX_WEIGHT:
        raise AdvertError(f"weight must be 1 to {MAX_WEIGHT}")
    if advert.stays and len(advert.stays) != len(HORIZONS_S):
        raise AdvertError(f"an advert foretells its stay for {len(HORIZONS_S)} horizons, or for none")
    if any(not 1 <= stay <= MAX_WEIGHT for stay in advert.stays):
        raise AdvertError(f"a stay must be 1 to {MAX_WEIGHT}")
    if len(advert.driver) > MAX_DRIVER_PARTS or any(part < 0 for part in advert.driver):
        raise AdvertError("a driver's version has up to four numbers from 0")
    numbers = (advert.version, advert.slots, advert.slots_free, advert.cpus, advert.memory_mib, advert.store_free_mib)
    named = (advert.images, advert.image_ids, advert.image_fetches, advert.image_denials)
    if min(*numbers, advert.back_unix) < 0 or len(advert.gpus) > 64 or max(map(len, named)) > MAX_IMAGES:
        raise AdvertError("an advert's numbers are impossible")
    if not advert.system.possible:
        raise AdvertError("an advert's words on system checkpoints are no plain line")
    _check_room(advert)
    return advert


def _check_room(advert: Advert) -> None:
    sizes = {gpu.uuid: gpu.vram_mib for gpu in advert.gpus}
    offered = {left.uuid for left in advert.room}
    if len(sizes) < len(advert.gpus) or len(offered) < len(advert.room) or not offered <= sizes.keys():
        raise AdvertError("an advert offers GPUs that it does not have, or one twice")
    for left in advert.room:
        untouched, all_memory = left.share == WHOLE, left.vram_mib == sizes[left.uuid]
        if untouched != all_memory or left.vram_mib > sizes[left.uuid] or not (left.share or left.vram_mib):
            raise AdvertError("an advert's room on a GPU is impossible: who takes of its time takes of its memory")

"""A node's own description of what it lends: integers only, so that every node ranks it alike.

The advert travels as a signed lane-2 section; `version` grows with each change and stands in every decision.
"""

import msgspec

MAX_WEIGHT = 64


class AdvertError(ValueError):
    """Bytes that are no possible advert."""


class Gpu(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    uuid: str
    model: str
    vram_mib: int
    capability: tuple[int, int] = (0, 0)


class Advert(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`weight` is the node's own survival estimate, 1 to 64; `gpus_free` and `slots_free` are what nobody uses now.

    A job without GPUs takes a slot. `accepts` names the users whose jobs may come, `*` for everybody; `own_only` the
    engines that run only the owner's own jobs.
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
    gpus_free: tuple[str, ...]
    slots: int
    slots_free: int
    cpus: int
    memory_mib: int
    engines: tuple[str, ...]
    own_only: tuple[str, ...]
    images: tuple[str, ...]
    accepts: tuple[str, ...]
    store_free_mib: int


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
    numbers = (advert.version, advert.slots, advert.slots_free, advert.cpus, advert.memory_mib, advert.store_free_mib)
    if min(numbers) < 0 or len(advert.gpus) > 64 or len(advert.images) > 256:
        raise AdvertError("an advert's numbers are impossible")
    if not set(advert.gpus_free) <= {gpu.uuid for gpu in advert.gpus}:
        raise AdvertError("an advert offers GPUs that it does not have")
    return advert

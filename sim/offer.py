"""What a simulated node offers: the same at all times, so that whoever is sent away may soon come back."""

from placement.advert import Advert

SLOTS = 2


def offer_of(node: bytes, nick: str) -> Advert:
    return Advert(
        version=1,
        node=node,
        nick=nick,
        user="sim",
        zone="",
        weight=32,
        up_since_unix=0,
        lending=True,
        paused=False,
        gpus=(),
        room=(),
        guards=False,
        gpu_sharing=True,
        slots=SLOTS,
        slots_free=SLOTS,
        cpus=8,
        memory_mib=1 << 16,
        engines=("process",),
        own_only=(),
        images=(),
        accepts=("*",),
        store_free_mib=1 << 20,
    )

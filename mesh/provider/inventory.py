"""What this node lends and what of it is taken; the source of its advert.

Reservations are made when a job is admitted and undone when its attempt has ended, so two stewards can never be promised the
same GPU. The owner's word comes first: paused or draining admits nothing.
"""

import os

import msgspec

from placement.advert import Advert, Gpu
from placement.filters import refusals
from placement.request import Request


class Lending(msgspec.Struct, frozen=True):
    """The owner's present decision; kept on disk so that a restart does not lend what was paused."""

    lending: bool
    paused: bool = False
    reason: str = ""


class Inventory:
    def __init__(
        self,
        node: bytes,
        nick: str,
        user: str,
        zone: str,
        gpus: tuple[Gpu, ...],
        slots: int,
        accepts: tuple[str, ...],
        own_only: tuple[str, ...],
        lending: Lending,
        up_since_unix: int,
    ) -> None:
        self.lending = lending
        self.gpus = gpus
        self.engines: tuple[str, ...] = ()
        self.images: tuple[str, ...] = ()
        self.weight = 1
        self.draining = False
        self.store_free_mib = 0
        self._node, self._nick, self._user, self._zone = node, nick, user, zone
        self._slots, self._accepts, self._own_only = slots, accepts, own_only
        self._up_since_unix = up_since_unix
        self._taken: dict[bytes, tuple[str, ...]] = {}
        self._version = 0
        self._previous: Advert | None = None

    def admit(self, request: Request) -> str | None:
        """Reserve what the job needs, or say why not."""
        if self.draining:
            return "it is leaving the mesh"
        if request.job in self._taken:
            return None
        reasons = refusals(request, self.advert())
        if reasons:
            return "; ".join(reasons)
        fitting = [gpu for gpu in self.gpus if gpu.vram_mib >= request.vram_mib and gpu.uuid in self._free_gpus()]
        # The smallest that fits, so that large ones stay for those who need them.
        fitting.sort(key=lambda gpu: (gpu.vram_mib, gpu.uuid))
        self._taken[request.job] = tuple(gpu.uuid for gpu in fitting[: request.gpus])
        return None

    def release(self, job: bytes) -> None:
        self._taken.pop(job, None)

    def gpus_of(self, job: bytes) -> tuple[str, ...]:
        return self._taken.get(job, ())

    def advert(self) -> Advert:
        """The present offer; its version grows only when something in it changed."""
        fresh = Advert(
            version=self._version,
            node=self._node,
            nick=self._nick,
            user=self._user,
            zone=self._zone,
            weight=self.weight,
            up_since_unix=self._up_since_unix,
            lending=self.lending.lending,
            paused=self.lending.paused or self.draining,
            gpus=self.gpus,
            gpus_free=self._free_gpus(),
            slots=self._slots,
            slots_free=max(0, self._slots - sum(not uuids for uuids in self._taken.values())),
            cpus=os.cpu_count() or 1,
            memory_mib=_memory_mib(),
            engines=self.engines,
            own_only=self._own_only,
            images=self.images,
            accepts=self._accepts,
            store_free_mib=self.store_free_mib,
        )
        previous = self._previous
        if previous is None or msgspec.structs.replace(previous, version=0) != msgspec.structs.replace(
            fresh, version=0
        ):
            self._version += 1
            fresh = msgspec.structs.replace(fresh, version=self._version)
            self._previous = fresh
            return fresh
        return previous

    def _free_gpus(self) -> tuple[str, ...]:
        taken = {uuid for uuids in self._taken.values() for uuid in uuids}
        return tuple(gpu.uuid for gpu in self.gpus if gpu.uuid not in taken)


def _memory_mib() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20

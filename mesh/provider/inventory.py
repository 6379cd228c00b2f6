"""What this node lends and what of it is taken; the source of its advert.

Portions of GPUs are given when a job is admitted and taken back when its attempt has ended, so two stewards can never be promised
the same. The owner's word comes first: paused or draining admits nothing.
"""

import os
from functools import reduce
from pathlib import Path

import msgspec

from placement.advert import HORIZONS_S, HOUR, Advert, Gpu, HeldBy, Portion
from placement.allotment import Room, allot, untouched, without
from placement.filters import refusals
from placement.images import ImageOffer
from placement.likeness import SystemCheckpoints
from placement.request import Request


class Lending(msgspec.Struct, frozen=True):
    """The owner's present decision; kept on disk (`lending.json`) so that a restart does not lend what was paused. `withheld`:
    GPUs that he has taken back one by one; `until_unix`: when a pause ends by itself, 0 if it does not."""

    lending: bool
    paused: bool = False
    withheld: tuple[str, ...] = ()
    until_unix: int = 0


class Presence(msgspec.Struct, frozen=True):
    """What is not lent because the owner is there, and until when that is, if it is known from his calendar."""

    held_by: HeldBy = ""
    back_unix: int = 0
    gpus: frozenset[str] = frozenset()


def load_lending(path: Path, lends: bool) -> Lending:
    """What the owner said last, if he said anything; `lends`: what he said when he started the node. OSError or ValueError if it
    cannot be read: then nothing is lent that he may have taken back."""
    if not path.exists():
        return Lending(lends)
    kept = msgspec.json.decode(path.read_bytes(), type=Lending)
    return msgspec.structs.replace(kept, lending=kept.lending or lends)


class Inventory:
    """`guards`: this node can keep a job to its share of a GPU, now; `gpu_sharing`: its owner allows that there are shares;
    `interactive`: he lets users into their guests.
    `memory_mib` and `cpus` are what one job may have of the machine; without them, all."""

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
        gpu_sharing: bool = True,
        interactive: bool = True,
        memory_mib: int | None = None,
        cpus: int | None = None,
        driver: tuple[int, ...] = (),
    ) -> None:
        self.lending = lending
        self.presence = Presence()
        self.gpus = gpus
        self.engines: tuple[str, ...] = ()
        self.image_offer = ImageOffer()
        self.system = SystemCheckpoints()
        self.stays = (1,) * len(HORIZONS_S)
        self._driver = driver
        self.draining = False
        self.guards = self.gpu_pauses = False
        self.store_free_mib = 0
        self._node, self._nick, self._user, self._zone = node, nick, user, zone
        self.slots, self._accepts, self._own_only = slots, accepts, own_only
        self.up_since_unix = up_since_unix
        self._gpu_sharing, self._interactive = gpu_sharing, interactive
        self._memory_mib = machine_mib() if memory_mib is None else memory_mib
        self._cpus = cpus or os.cpu_count() or 1
        self._given: dict[bytes, tuple[Portion, ...]] = {}
        self._version = 0
        self._previous: Advert | None = None

    def admit(self, request: Request) -> str | None:
        """Give the job what it needs, or say why not."""
        if self.draining:
            return "it is leaving the mesh"
        if request.job in self._given and self.lends:  # its last attempt is still being cleared away
            return None
        reasons = refusals(request, self.advert())
        if reasons:
            return "; ".join(reasons)
        self._given[request.job] = allot(request, self.gpus, self._room())
        assert len(self._given[request.job]) == request.gpus, "what the filters let in fits"
        return None

    def change(self, job: bytes, share: int, vram_mib: int) -> str | None:
        """Give a job that has shares other ones of the same GPUs, or say why not."""
        others = (portions for other, portions in self._given.items() if other != job)
        room = {left.uuid: left for left in reduce(without, others, untouched(self.gpus))}
        had = self._given[job]
        for left in (room[portion.uuid] for portion in had):
            if share > left.share or vram_mib > left.vram_mib:
                return f"{left.uuid} has {left.share} % and {left.vram_mib} MiB beside its other jobs"
        self._given[job] = tuple(Portion(portion.uuid, share, vram_mib) for portion in had)
        return None

    @property
    def lends(self) -> bool:
        """Guests may come, and stay."""
        return self.lending.lending and not self.lending.paused and not self.draining and not self.presence.held_by

    def release(self, job: bytes) -> None:
        self._given.pop(job, None)

    def portions_of(self, job: bytes) -> tuple[Portion, ...]:
        """What it has of each of its GPUs."""
        return self._given.get(job, ())

    def _back_unix(self) -> int:
        """When it is lent again, if that is known: after its owner's pause, and in his hours."""
        ends = [self.lending.until_unix] if self.lending.paused else []
        ends += [self.presence.back_unix] if self.presence.held_by else []
        return 0 if self.draining else max(ends) if ends and all(ends) else 0

    def advert(self) -> Advert:
        """The present offer; its version grows only when something in it changed."""
        fresh = Advert(
            version=self._version,
            node=self._node,
            nick=self._nick,
            user=self._user,
            zone=self._zone,
            weight=self.stays[HOUR],
            stays=self.stays,
            driver=self._driver,
            up_since_unix=self.up_since_unix,
            lending=self.lending.lending,
            paused=self.lending.paused or self.draining or bool(self.presence.held_by),
            held_by="" if self.lending.paused else self.presence.held_by,
            back_unix=self._back_unix(),
            gpus=self.gpus,
            room=self._room(),
            guards=self.guards,
            gpu_pauses=self.gpu_pauses,
            gpu_sharing=self._gpu_sharing,
            interactive=self._interactive,
            slots=self.slots,
            slots_free=max(0, self.slots - sum(not portions for portions in self._given.values())),
            cpus=self._cpus,
            memory_mib=self._memory_mib,
            engines=self.engines,
            own_only=self._own_only,
            accepts=self._accepts,
            store_free_mib=self.store_free_mib,
            system=self.system,
            **msgspec.structs.asdict(self.image_offer),
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

    def _room(self) -> Room:
        room = reduce(without, self._given.values(), untouched(self.gpus))
        return tuple(left for left in room if left.uuid not in self.withheld)

    @property
    def withheld(self) -> frozenset[str]:
        """GPUs that are not lent now."""
        return self.presence.gpus | frozenset(self.lending.withheld)


def machine_mib() -> int:
    """The machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20

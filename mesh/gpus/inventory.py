"""The resources that this node lends and what is taken; the source of its advert.

Portions of GPUs are assigned when a job is admitted and returned when its attempt has ended, so two leaders can never be promised
the same portion. The owner's decision comes first: a paused or draining node admits nothing.
"""

import os
from collections.abc import Mapping
from functools import reduce
from pathlib import Path

import msgspec

from membership.durable import write_durably
from placement.advert import HORIZONS_S, HOUR, Advert, Gpu, HeldBy, Portion, SystemCheckpoints
from placement.allocation import FreeGpus, all_free, allocate, subtract
from placement.filters import DataOffer, ImageOffer, refusals
from placement.request import Request


class Lending(msgspec.Struct, frozen=True):
    """The owner's decision, kept on disk (`lending.json`) so that a restart does not lend what was paused.

    `withheld`: GPUs that the owner has taken back; `until_unix`: when a pause ends by itself, 0 if it does not.
    """

    lending: bool
    paused: bool = False
    withheld: tuple[str, ...] = ()
    until_unix: int = 0


class Presence(msgspec.Struct, frozen=True):
    """The resources not lent while the owner is present, and the end of that time if the calendar gives one."""

    held_by: HeldBy = ""
    back_unix: int = 0
    gpus: frozenset[str] = frozenset()


def load_lending(path: Path, lends: bool) -> Lending:
    """Return the owner's last decision; `lends` is the choice at the start of the node.

    OSError or ValueError if it cannot be read: then nothing may be lent, since the owner may have taken it back.
    """
    if not path.exists():
        return Lending(lends)
    kept = msgspec.json.decode(path.read_bytes(), type=Lending)
    return msgspec.structs.replace(kept, lending=kept.lending or lends)


def keep_lending(path: Path) -> None:
    """Keep `mesh up --lend` as the owner's decision, as `mesh lend` does. A pause and what was taken back stay.

    OSError or ValueError if the last decision cannot be read or written.
    """
    kept = load_lending(path, False)
    if not kept.lending:
        write_durably(path, msgspec.json.encode(msgspec.structs.replace(kept, lending=True)))


class Inventory:
    """The resources of one node.

    `guards`: the node can enforce GPU shares now; `gpu_sharing`: the owner allows shares; `interactive`: the owner allows
    sessions; `network`: hosts that jobs may reach by a proxy. `memory_mib` and `cpus`: what one job may have of the machine; by
    default all.
    """

    def __init__(
        self,
        node: bytes,
        nick: str,
        user: str,
        user_key: bytes,
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
        network: tuple[str, ...] = (),
    ) -> None:
        self.lending = lending
        self.presence = Presence()
        self.gpus = gpus
        self.engines: tuple[str, ...] = ()
        self.proxies: tuple[str, ...] = ()
        self.uv, self.conda = True, False
        self.image_offer, self.data_offer = ImageOffer(), DataOffer()
        self.system = SystemCheckpoints()
        self.weights = (1,) * len(HORIZONS_S)
        self._driver = driver
        self.draining = False
        self.guards = self.gpu_pauses = False
        self.store_free_mib = 0
        self._node, self._nick, self._user, self._zone = node, nick, user, zone
        self._user_key = user_key
        self.slots, self._accepts, self._own_only = slots, accepts, own_only
        self.up_since_unix = up_since_unix
        self._gpu_sharing, self._interactive, self._network = gpu_sharing, interactive, network
        self._memory_mib = machine_mib() if memory_mib is None else memory_mib
        self._cpus = cpus or os.cpu_count() or 1
        self._given: dict[bytes, tuple[Portion, ...]] = {}
        self._version = 0
        self._previous: Advert | None = None

    def admit(self, request: Request) -> str | None:
        """Assign the job what it needs; return why that is refused, None if it is not."""
        if self.draining:
            return "it is leaving the mesh"
        if request.job in self._given and self.lends:  # its last attempt is still being removed
            return None
        reasons = refusals(request, self.advert())
        if reasons:
            return "; ".join(reasons)
        self._given[request.job] = allocate(request, self.gpus, self._room(self._given))
        assert len(self._given[request.job]) == request.gpus, "what the filters let in fits"
        return None

    def fits_without(self, job: bytes, request: Request) -> bool:
        """Tell whether a request would be admitted once this job has left."""
        others = {other: portions for other, portions in self._given.items() if other != job}
        room, slots_free = self._room(others), self._slots_free(others)
        advert = msgspec.structs.replace(self.advert(), free_portions=room, slots_free=slots_free)
        return not refusals(request, advert)

    def change(self, job: bytes, share: int, vram_mib: int) -> str | None:
        """Change a job's shares of its GPUs; return why that is refused, None if it is not."""
        others = (portions for other, portions in self._given.items() if other != job)
        room = {left.uuid: left for left in reduce(subtract, others, all_free(self.gpus))}
        had = self._given[job]
        for left in (room[portion.uuid] for portion in had):
            if share > left.share or vram_mib > left.vram_mib:
                return f"{left.uuid} has {left.share} % and {left.vram_mib} MiB beside its other jobs"
        self._given[job] = tuple(Portion(portion.uuid, share, vram_mib) for portion in had)
        return None

    @property
    def lends(self) -> bool:
        """Return whether the node takes guests."""
        return self.lending.lending and not self.lending.paused and not self.draining and not self.presence.held_by

    def release(self, job: bytes) -> None:
        self._given.pop(job, None)

    def portions_of(self, job: bytes) -> tuple[Portion, ...]:
        """Return a job's portion of each of its GPUs."""
        return self._given.get(job, ())

    def _back_unix(self) -> int:
        """Return when the node lends again, in Unix seconds; 0 if unknown."""
        ends = [self.lending.until_unix] if self.lending.paused else []
        ends += [self.presence.back_unix] if self.presence.held_by else []
        return 0 if self.draining else max(ends) if ends and all(ends) else 0

    def advert(self) -> Advert:
        """Return the current advert; its version grows only when its content changes."""
        fresh = Advert(
            version=self._version,
            node=self._node,
            nick=self._nick,
            user=self._user,
            user_key=self._user_key,
            zone=self._zone,
            weight=self.weights[HOUR],
            weights=self.weights,
            driver=self._driver,
            up_since_unix=self.up_since_unix,
            lending=self.lending.lending,
            paused=self.lending.paused or self.draining or bool(self.presence.held_by),
            held_by="" if self.lending.paused else self.presence.held_by,
            back_unix=self._back_unix(),
            gpus=self.gpus,
            free_portions=self._room(self._given),
            guards=self.guards,
            gpu_pauses=self.gpu_pauses,
            gpu_sharing=self._gpu_sharing,
            interactive=self._interactive,
            slots=self.slots,
            slots_free=self._slots_free(self._given),
            cpus=self._cpus,
            memory_mib=self._memory_mib,
            engines=self.engines,
            own_only=self._own_only,
            accepts=self._accepts,
            store_free_mib=self.store_free_mib,
            system=self.system,
            network=self._network,
            proxies=self.proxies,
            uv=self.uv,
            conda=self.conda,
            **msgspec.structs.asdict(self.image_offer),
            **msgspec.structs.asdict(self.data_offer),
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

    def _room(self, given: Mapping[bytes, tuple[Portion, ...]]) -> FreeGpus:
        room = reduce(subtract, given.values(), all_free(self.gpus))
        return tuple(left for left in room if left.uuid not in self.withheld)

    def _slots_free(self, given: Mapping[bytes, tuple[Portion, ...]]) -> int:
        return max(0, self.slots - sum(not portions for portions in given.values()))

    @property
    def withheld(self) -> frozenset[str]:
        """Return the GPUs that are not lent now."""
        return self.presence.gpus | frozenset(self.lending.withheld)


def machine_mib() -> int:
    """Return the machine's memory in MiB."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20

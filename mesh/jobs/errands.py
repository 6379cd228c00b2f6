"""Jobs whose witnesses have not taken them in yet, and who goes on trying: the submitter, and a coordinator in its stead.

Correctness needs neither: a job is its hash, and a witness takes it in once, whoever brings it. No I/O.
"""

from collections.abc import Collection, Sequence

import msgspec

from mesh.jobs.spec import JobSpec
from placement.ranking import zone_order
from placement.zones import Zone, zone_of

LIFE_S = 86_400  # from the submission; then nobody tries any more; ours
RETRY_S = 5.0  # between two tries while a majority of the witnesses can be seen; ours
BLIND_RETRY_S = 30.0  # while none can: what is seen may be wrong; ours
KEPT_FOR_OTHERS = 1024  # jobs that one node keeps for others; ours
ASKED_IN_ZONE = 3  # of the zone's line, before other zones are asked; ours


class Errand(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A job to be brought to its witnesses, as `spec`, which its submitter has sealed. `deputy`, of `zone`, keeps it too; the
    submitter alone says so."""

    job: bytes
    spec: bytes
    submitter: bytes
    witnesses: tuple[bytes, ...]
    ends_unix_ms: int
    deputy: bytes = b""
    zone: str = ""


class Told(msgspec.Struct, frozen=True):
    """What a node tells the mesh: the jobs that it brings to their witnesses for others (the first of them)."""

    count: int
    jobs: tuple[bytes, ...]


class Try(msgspec.Struct, frozen=True):
    """Bring it to its witnesses."""

    errand: Errand


class Entrust(msgspec.Struct, frozen=True):
    """Ask these, best first, to keep it too."""

    errand: Errand
    line: tuple[tuple[bytes, str], ...]  # node, zone


class GiveUp(msgspec.Struct, frozen=True):
    errand: Errand


class Around(msgspec.Struct, frozen=True):
    """Who can be reached, who of them stays, and the zones they stand in."""

    reached: frozenset[bytes]
    staying: frozenset[bytes]
    zones: Sequence[Zone]


def errand_of(job: bytes, sealed: bytes, spec: JobSpec) -> Errand:
    nodes = tuple(seat.node for seat in spec.witnesses)
    return Errand(job, sealed, spec.submitter, nodes, spec.created_unix_ms + LIFE_S * 1000)


def line(errand: Errand, me: bytes, around: Around, but: Collection[bytes] = ()) -> tuple[tuple[bytes, str], ...]:
    """Whom `me` asks, best first: its own zone's line, then the coordinators of the others.

    Not the job's witnesses: one of them that can be reached has the job already.
    """
    not_these = {me, errand.submitter, *errand.witnesses, *but}
    lines = {zone.name: [n for n in zone.line if n in around.staying and n not in not_these] for zone in around.zones}
    own = zone_of(me, around.zones)
    weights = {zone.name: zone.weight for zone in around.zones}
    found = [(node, own.name) for node in lines[own.name][:ASKED_IN_ZONE]] if own is not None else []
    for name in zone_order(errand.job, weights):
        if own is None or name != own.name:
            found += [(node, name) for node in lines[name][:1]]
    return tuple(found)


class Errands:
    """What one node has to bring. `due` says what to do now; the shell does it and reports."""

    def __init__(self, me: bytes) -> None:
        self._me = me
        self._kept: dict[bytes, Errand] = {}
        self._tried: dict[bytes, float] = {}
        self._asked: dict[bytes, float] = {}

    def get(self, job: bytes) -> Errand | None:
        return self._kept.get(job)

    @property
    def any(self) -> bool:
        return bool(self._kept)

    @property
    def for_others(self) -> list[Errand]:
        return [errand for errand in self._kept.values() if errand.submitter != self._me]

    def told(self, limit: int) -> Told:
        others = self.for_others
        return Told(len(others), tuple(errand.job for errand in others[:limit]))

    @property
    def full(self) -> bool:
        return len(self.for_others) >= KEPT_FOR_OTHERS

    def keep(self, errand: Errand) -> Errand:
        """Take it on; what is known of it stays."""
        return self._kept.setdefault(errand.job, errand)

    def entrusted(self, job: bytes, deputy: bytes, zone: str) -> Errand | None:
        """`deputy` keeps it too."""
        errand = self._kept.get(job)
        if errand is None:
            return None
        assert deputy != self._me, "a deputy is somebody else"
        self._kept[job] = errand = msgspec.structs.replace(errand, deputy=deputy, zone=zone)
        return errand

    def drop(self, job: bytes) -> Errand | None:
        """It is over: its witnesses have it, or nobody wants it any more."""
        self._tried.pop(job, None)
        self._asked.pop(job, None)
        return self._kept.pop(job, None)

    def due(self, around: Around, now: float, unix_ms: int) -> list[Try | Entrust | GiveUp]:
        """What is due now, and taken as begun."""
        actions: list[Try | Entrust | GiveUp] = []
        for errand in list(self._kept.values()):
            if unix_ms >= errand.ends_unix_ms:
                actions.append(GiveUp(errand))
                continue
            job = errand.job
            here = sum(node in around.reached for node in errand.witnesses)
            pause = RETRY_S if 2 * here > len(errand.witnesses) else BLIND_RETRY_S
            if now - self._tried.get(job, -BLIND_RETRY_S) >= pause:
                self._tried[job] = now
                actions.append(Try(errand))
            alone = errand.submitter == self._me and errand.deputy not in around.staying
            if alone and now - self._asked.get(job, -RETRY_S) >= RETRY_S:
                self._asked[job] = now
                whom = line(errand, self._me, around, but=(errand.deputy,))
                actions += [Entrust(errand, whom)] if whom else []
        return actions

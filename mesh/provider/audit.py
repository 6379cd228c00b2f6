"""Once a second: what NVML sees of this node's tenants, judged and acted upon. The judging itself is `cuda_guard/auditor.py`."""

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from cuda_guard.auditor import Auditor, Claim, DeviceLook, Finding, Foreign, Held, Seen, Verdict
from cuda_guard.nvml import Nvml, NvmlError
from cuda_guard.trim import Pace
from mesh.provider.tenant import Tenant

log = logging.getLogger(__name__)


class Audit:
    """Without NVML it judges nothing, and what tenants charge themselves stands. `library`: NVIDIA's own, where it is not to be
    looked for. `foreign` and `strangers` are of the last look, by device; the latter are those that are not about to end."""

    def __init__(self, uuids: tuple[str, ...], library: Path | None) -> None:
        self.foreign: dict[str, Foreign] = {}
        self.strangers: dict[str, tuple[Seen, ...]] = {}
        self.problem = ""
        self._auditor = Auditor()
        self._paces: dict[tuple[str, str], Pace] = {}  # of a tenant on a device
        self._nvml: Nvml | None = None
        self._uuids, self._library = uuids, library

    async def open(self) -> None:
        try:
            self._nvml = await asyncio.to_thread(Nvml, self._uuids, self._library)
        except NvmlError as error:
            self.problem = f"GPUs are not audited: {error}"
            log.warning("%s", self.problem)

    def context_bytes(self, uuid: str) -> int:
        """What a context is known to take of a device; 0 before one was seen there."""
        return self._auditor.contexts.get(uuid, 0)

    async def look(self, tenants: Sequence[Tenant]) -> list[tuple[Tenant, Finding]]:
        """Charge and trim the tenants by what is seen, and keep their tallies; what is to be acted upon."""
        if self._nvml is None:
            for tenant in tenants:
                tenant.count(())
            return []
        before = [tenant.charges() for tenant in tenants]
        devices = await asyncio.to_thread(self._nvml.look)
        pids = await asyncio.gather(*(tenant.pids() for tenant in tenants))
        claims: dict[str, list[Claim]] = {}
        for tenant, charged, mine in zip(tenants, before, pids, strict=True):
            claims[tenant.name] = _gone(tenant, mine, devices) if tenant.released else _claims(tenant, charged, mine)
        verdict = self._auditor.judge(devices, [one for some in claims.values() for one in some], time.monotonic())
        self.foreign = verdict.foreign
        self.strangers = {
            uuid: tuple(seen for seen in some if not _is_ending(seen.pid)) for uuid, some in verdict.strangers.items()
        }
        here = {tenant.name: tenant for tenant in tenants if not tenant.released}
        self._paces = {key: pace for key, pace in self._paces.items() if key[0] in here}
        for name, tenant in here.items():
            self._apply(tenant, claims[name], verdict)
        return [(here[found.job], found) for found in verdict.findings if found.job in here]

    async def holders(self, tenant: Tenant) -> tuple[int, ...]:
        """Its processes that are on a GPU now: by NVML, else those that have asked the guard for one."""
        if self._nvml is None:
            return tuple(sorted(tenant.charges()))
        on = await asyncio.to_thread(self._nvml.holders)
        return tuple(sorted(on & (await tenant.pids() | set(tenant.charges()))))

    def _apply(self, tenant: Tenant, claims: Sequence[Claim], verdict: Verdict) -> None:
        held: list[Held | None] = []
        usage, now = tenant.usage(), time.monotonic()
        for place, claim in enumerate(claims):
            key = (claim.job, claim.uuid)
            has = verdict.held.get(key)
            held.append(has)
            if has is not None:  # else NVML did not tell about this device
                tenant.guarded.correct(place, verdict.overheads[key])
                pace = self._paces.setdefault(key, Pace())
                tenant.guarded.trim(place, pace.step(now, usage[place].gpu_s, claim.share, has.busy))
        tenant.count(tuple(held))

    async def close(self) -> None:
        if self._nvml is not None:
            await asyncio.to_thread(self._nvml.close)


def _claims(tenant: Tenant, before: dict[int, tuple[int, ...]], pids: frozenset[int]) -> list[Claim]:
    """Of each of its devices, in their order."""
    now = tenant.charges()
    ending = {pid: None for pid in pids if _is_ending(pid)}
    return [
        Claim(
            job=tenant.name,
            uuid=portion.uuid,
            pids=pids,
            charged={
                **ending,
                **{pid: charged[place] if before.get(pid) == charged else None for pid, charged in now.items()},
            },
            context=tenant.guarded.context_bytes(place),
            limit=tenant.guarded.memory_most(place),
            share=share,
            told=None if tenant.guarded.memory_most(place) is None else tenant.guarded.pages.memory_used(place),
        )
        for place, (portion, share) in enumerate(zip(tenant.portions, tenant.shares_now(), strict=True))
    ]


def _gone(tenant: Tenant, pids: frozenset[int], devices: Sequence[DeviceLook]) -> list[Claim]:
    """What ended meanwhile: it is past no guard, but its processes are not the owner's either."""
    return [Claim(tenant.name, device.uuid, pids, dict.fromkeys(pids)) for device in devices]


def _is_ending(pid: int) -> bool:
    """It has no memory any more, and lets go of its files, locks and devices in whatever order: not past the guard."""
    try:
        return Path(f"/proc/{pid}/statm").read_text().startswith("0 ")
    except OSError:
        return True

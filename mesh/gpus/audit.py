"""The GPU audit: once a second, NVML's view of this node's tenants is judged (`cuda_guard/auditor.py`) and acted on."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from cuda_guard.auditor import Auditor, AuditReport, Claim, DeviceSample, Finding, Foreign, GpuProcess, Measured
from cuda_guard.nvml import Nvml, NvmlError
from mesh.gpus.tenant import Tenant
from mesh.util.slow_calls import apart

PATIENCE_S = 5.0  # for NVML's answer, which takes milliseconds (own choice)
OPENING_S = 60.0  # for a driver that nothing has used yet (own choice)
NO_ANSWER = "GPUs are not audited: NVML does not answer"

log = logging.getLogger(__name__)


class Audit:
    """Audits tenants by NVML; without NVML, and while it does not answer, tenants' own charges stand.

    `library`: the path of NVML, if it should not be searched for. `foreign` and `strangers` are of the last check, by device;
    strangers are foreign processes that are not about to end.
    """

    def __init__(self, uuids: tuple[str, ...], library: Path | None) -> None:
        self.foreign: dict[str, Foreign] = {}
        self.strangers: dict[str, tuple[GpuProcess, ...]] = {}
        self.problem = ""
        self._auditor = Auditor()
        self._nvml: Nvml | None = None
        self._uuids, self._library = uuids, library
        self._asked: asyncio.Future[Sequence[DeviceSample]] | None = None

    async def open(self) -> None:
        try:
            async with asyncio.timeout(OPENING_S):
                self._nvml = await apart(lambda: Nvml(self._uuids, self._library), "NVML")
        except TimeoutError:
            self._has_problem(NO_ANSWER)
        except NvmlError as error:
            self._has_problem(f"GPUs are not audited: {error}")

    def _has_problem(self, text: str) -> None:
        if text != self.problem:
            log.warning("%s", text)
        self.problem = text

    def context_bytes(self, uuid: str) -> int:
        """Return the bytes that a context takes on a device; 0 before one was seen there."""
        return self._auditor.contexts.get(uuid, 0)

    async def look(self, tenants: Sequence[Tenant]) -> list[tuple[Tenant, Finding]]:
        """Charge all tenants and update their tallies; return the findings to act on."""
        before = [tenant.charges() for tenant in tenants]
        devices = None if self._nvml is None else await self._sample(self._nvml)
        if devices is None:
            for tenant in tenants:
                tenant.count(())
            return []
        pids = await asyncio.gather(*(tenant.pids() for tenant in tenants))
        claims: dict[str, list[Claim]] = {}
        for tenant, charged, mine in zip(tenants, before, pids, strict=True):
            claims[tenant.name] = _gone(tenant, mine, devices) if tenant.released else _claims(tenant, charged, mine)
        report = self._auditor.audit(devices, [one for some in claims.values() for one in some], time.monotonic())
        self.foreign = report.foreign
        self.strangers = {
            uuid: tuple(seen for seen in some if not _is_ending(seen.pid)) for uuid, some in report.outsiders.items()
        }
        here = {tenant.name: tenant for tenant in tenants if not tenant.released}
        for name, tenant in here.items():
            self._apply(tenant, claims[name], report)
        return [(here[found.job], found) for found in report.findings if found.job in here]

    async def _sample(self, nvml: Nvml) -> Sequence[DeviceSample] | None:
        """Return a sample; None if NVML does not answer. It is asked again once it has: a late answer is dropped."""
        late = self._asked is not None
        self._asked = asked = self._asked or asyncio.ensure_future(apart(nvml.sample, "NVML"))
        done, _ = await asyncio.wait([asked], timeout=PATIENCE_S)
        if not done:
            self._has_problem(NO_ANSWER)
            return None
        self._asked = None
        if late:
            return None
        self.problem = ""
        return asked.result()

    async def holders(self, tenant: Tenant) -> tuple[int, ...]:
        """Return a tenant's processes that are on a GPU now: by NVML, else those that asked the guard for one."""
        if self._nvml is None or self._asked is not None:
            return tuple(sorted(tenant.charges()))
        try:
            async with asyncio.timeout(PATIENCE_S):
                on = await apart(self._nvml.holders, "NVML")
        except TimeoutError:
            return tuple(sorted(tenant.charges()))
        return tuple(sorted(on & (await tenant.pids() | set(tenant.charges()))))

    def _apply(self, tenant: Tenant, claims: Sequence[Claim], report: AuditReport) -> None:
        held: list[Measured | None] = []
        for place, claim in enumerate(claims):
            key = (claim.job, claim.uuid)
            has = report.measured.get(key)
            held.append(has)
            if has is not None:  # else NVML did not report this device
                tenant.guarded.set_overhead(place, report.overheads[key])
        tenant.count(tuple(held))

    async def close(self) -> None:
        if self._nvml is not None and self._asked is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PATIENCE_S):
                    await apart(self._nvml.close, "NVML")


def _claims(tenant: Tenant, before: dict[int, tuple[int, ...]], pids: frozenset[int]) -> list[Claim]:
    """Return a tenant's claim on each of its devices, in order."""
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
            limit=tenant.guarded.memory_max(place),
            share=share,
            reported=None if tenant.guarded.memory_max(place) is None else tenant.guarded.pages.memory_used(place),
        )
        for place, (portion, share) in enumerate(zip(tenant.portions, tenant.shares_now(), strict=True))
    ]


def _gone(tenant: Tenant, pids: frozenset[int], devices: Sequence[DeviceSample]) -> list[Claim]:
    """Return claims for a tenant that ended meanwhile: its last processes bypass no guard and are not the owner's."""
    return [Claim(tenant.name, device.uuid, pids, dict.fromkeys(pids)) for device in devices]


def _is_ending(pid: int) -> bool:
    """Return whether a process is exiting: it has no memory, and releases its files, locks and devices in any order."""
    try:
        return Path(f"/proc/{pid}/statm").read_text().startswith("0 ")
    except OSError:
        return True

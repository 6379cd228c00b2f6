"""This node's GPUs: the jobs on them, shares, pauses and receipts."""

from base64 import b64encode
from collections.abc import Callable, Mapping

import msgspec

from membership.identity import format_id
from mesh.api import schemas
from mesh.api.handlers.lookup import JobLookup
from mesh.api.requests import ShareOrder
from mesh.gpus.guard import NodeGuard
from mesh.gpus.inventory import Inventory
from mesh.gpus.receipts import ReceiptError, open_receipt
from mesh.gpus.tenant import Tenant
from mesh.jobs.attempt import Attempt
from mesh.jobs.service import JobService
from mesh.journal import Journal
from mesh.model.spec import format_job
from mesh.util.errors import ExitCode, MeshError
from mesh.util.structs import copy_as
from placement.advert import WHOLE, Gpu, Portion


def device(gpu: Gpu) -> schemas.gpus.Device:
    return copy_as(schemas.gpus.Device, gpu)


def room(portion: Portion) -> schemas.gpus.Room:
    return copy_as(schemas.gpus.Room, portion)


class GpuHandlers:
    def __init__(
        self,
        mesh_id: bytes,
        problems: Mapping[str, str],
        journal: Journal,
        guard: NodeGuard,
        inventory: Inventory,
        jobs: JobService,
        lookup: JobLookup,
        advert_changed: Callable[[], None],
    ) -> None:
        self._mesh_id, self._problems, self._journal = mesh_id, problems, journal
        self._guard, self._inventory, self._jobs = guard, inventory, jobs
        self._lookup, self._advert_changed = lookup, advert_changed

    def gpu_list(self) -> schemas.gpus.Gpus:
        """Return every GPU with its free part and the jobs on it."""
        advert = self._inventory.advert()
        free = {left.uuid: left for left in advert.free_portions}
        rows: list[schemas.gpus.Gpu] = []
        for gpu in advert.gpus:
            left = free.get(gpu.uuid, Portion(gpu.uuid, 0, 0))
            jobs = [
                _on_gpu(attempt, self._guard.tenant(format_job(job)), place)
                for job, attempt in self._jobs.attempts.items()
                for place, portion in enumerate(attempt.portions)
                if portion.uuid == gpu.uuid
            ]
            rows.append(
                copy_as(
                    schemas.gpus.Gpu,
                    gpu,
                    share_free=left.share,
                    vram_free_mib=left.vram_mib,
                    foreign=self._guard.foreign.get(gpu.uuid),
                    jobs=jobs,
                )
            )
        problem = self._problems.get("guard", "")
        return schemas.gpus.Gpus(
            guards=advert.guards,
            gpu_sharing=advert.gpu_sharing,
            problem=problem,
            audit_problem=self._guard.audit_problem,
            pause_problem=self._guard.pause_problem,
            gpus=rows,
        )

    async def receipt_list(self, text: str | None) -> schemas.gpus.Receipts:
        """Return the receipts of this job's attempts here, or of all, oldest first, with their signed bytes."""
        job = self._lookup.find_job(text).job if text else None
        rows: list[schemas.gpus.Receipt] = []
        for sealed in await self._journal.receipts(job):
            try:
                receipt = open_receipt(sealed, self._mesh_id)
            except ReceiptError:  # of a mesh that this node belonged to before
                continue
            rows.append(
                copy_as(
                    schemas.gpus.Receipt,
                    receipt,
                    node=format_id(receipt.node),
                    submitter=format_id(receipt.submitter) if receipt.submitter else "",
                    devices=[copy_as(schemas.gpus.Use, use) for use in receipt.devices],
                    sealed=b64encode(sealed).decode(),
                )
            )
        return schemas.gpus.Receipts(receipts=rows)

    def change_share(self, text: str, order: ShareOrder) -> schemas.gpus.Shared:
        """Give a job that has shares of this node's GPUs other ones, while it runs."""
        job = self._lookup.find_job(text).job
        attempt, tenant = self._jobs.attempts.get(job), self._guard.tenant(format_job(job))
        if attempt is None or tenant is None or tenant.portions[0].share == WHOLE:
            raise MeshError(
                f"job {text!r} has no share of a GPU of this node: `mesh gpus` lists who has", ExitCode.NOT_FOUND
            )
        before = tenant.portions[0]
        share = before.share if order.share is None else order.share
        vram_mib = before.vram_mib if order.vram_mib is None else order.vram_mib
        limit = max(share, tenant.limit if order.limit is None else order.limit)
        named = tenant.vram_limit_mib if order.vram_limit_mib is None else order.vram_limit_mib
        vram_limit = max(vram_mib, named)
        for least, most, asked, unit in (
            (share, limit, order.limit, "per cent"),
            (vram_mib, vram_limit, order.vram_limit_mib, "MiB"),
        ):
            if asked is not None and most > asked:
                raise MeshError(f"it cannot be guaranteed {least} {unit} and be held to {asked}", ExitCode.USAGE)
        refusal = self._inventory.change(job, share, vram_mib)
        if refusal is not None:
            raise MeshError(refusal, ExitCode.REFUSED)
        try:
            tenant.change(self._inventory.portions_of(job), limit, named)
        except ValueError as error:
            self._inventory.change(job, before.share, before.vram_mib)
            raise MeshError(str(error), ExitCode.REFUSED) from error
        attempt.portions = tenant.portions
        self._advert_changed()
        memory = f"{vram_mib} MiB" + (f", up to {vram_limit}," if vram_limit > vram_mib else "")
        words = f"{share} per cent, up to {limit}, and {memory} of each of its GPUs, by its node's owner"
        self._jobs.event_log.add(job, "state", words, new="share")
        return schemas.gpus.Shared(
            job=format_job(job), share=share, limit=limit, vram_mib=vram_mib, vram_limit_mib=vram_limit
        )

    async def pause_job(self, text: str, paused: bool) -> schemas.gpus.GpuPaused:
        """Take a guarded job off this node's GPUs where it is, alive, or let it go on. It keeps what it was given there."""
        job = self._lookup.find_job(text).job
        tenant = self._guard.tenant(format_job(job))
        if tenant is None:
            raise MeshError(f"job {text!r} is not under guard here: `mesh gpus` lists who is", ExitCode.NOT_FOUND)
        if paused:
            problem = await self._guard.pause(tenant)
            words = "its memory there is freed" if not problem else f"its memory stays there: {problem}"
            self._jobs.event_log.add(job, "state", f"off its GPUs, by its node's owner; {words}", new="gpu paused")
        else:
            problem = await self._guard.resume(tenant)
            if problem:
                raise MeshError(f"it cannot go on: {problem}", ExitCode.REFUSED)
            self._jobs.event_log.add(job, "state", "by its node's owner", new="gpu resumed")
        return schemas.gpus.GpuPaused(job=format_job(job), paused=paused, freed=paused and not problem, problem=problem)


def _on_gpu(attempt: Attempt, tenant: Tenant | None, place: int) -> schemas.gpus.Tenant:
    portion = attempt.portions[place]
    row = schemas.gpus.Tenant(
        job=format_job(attempt.job),
        name=attempt.spec.name,
        user=attempt.spec.user,
        attempt=attempt.number,
        share=portion.share,
        limit=WHOLE if tenant is None else tenant.limit,
        vram_mib=portion.vram_mib,
        vram_limit_mib=portion.vram_mib if tenant is None else max(portion.vram_mib, tenant.vram_limit_mib),
        guarded=tenant is not None,
    )
    if tenant is None:
        return row
    use = tenant.usage()[place]
    return msgspec.structs.replace(
        row,
        share_now=round(tenant.shares_now()[place], 1),
        memory_by_nvml=tenant.held_now(place),
        gate="closed" if tenant.gate_closed else "open",
        closed_by=sorted(tenant.closed_by),
        suspended=bool(tenant.suspended),
        unguarded_calls=tenant.unguarded_calls(),
        findings=[one for one in tenant.findings if one.uuid == portion.uuid],
        gpu_s=use.gpu_s,
        launches=use.launches,
        memory=use.memory,
        peak=use.peak,
        refused=use.refused,
        processes=use.processes,
        memory_now=use.memory_now,
    )

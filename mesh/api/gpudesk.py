"""`mesh gpus`: this node's GPUs, who is on them, and what the guard knows of that."""

from base64 import b64encode
from typing import TYPE_CHECKING

from membership.identity import format_id
from mesh.api.errors import ExitCode, MeshError
from mesh.api.orders import ShareOrder
from mesh.jobs.attempt import Attempt
from mesh.jobs.spec import format_job
from mesh.provider.receipts import DeviceUse, ReceiptError, open_receipt
from mesh.provider.tenant import Tenant
from placement.advert import WHOLE, Gpu, Portion

if TYPE_CHECKING:
    from mesh.api import answers
    from mesh.daemon import Daemon


def device(gpu: Gpu) -> "answers.gpus.Device":
    return {"uuid": gpu.uuid, "model": gpu.model, "vram_mib": gpu.vram_mib, "capability": gpu.capability}


def room(portion: Portion) -> "answers.gpus.Room":
    return {"uuid": portion.uuid, "share": portion.share, "vram_mib": portion.vram_mib}


def gpu_list(daemon: "Daemon") -> "answers.gpus.Gpus":
    """Every GPU with what is left of it and the jobs on it."""
    advert = daemon.inventory.advert()
    free = {left.uuid: left for left in advert.room}
    rows: list[answers.gpus.Gpu] = []
    for gpu in advert.gpus:
        left = free.get(gpu.uuid, Portion(gpu.uuid, 0, 0))
        jobs = [
            _on_gpu(attempt, daemon.guard.tenant(format_job(job)), place)
            for job, attempt in daemon.jobs.attempts.items()
            for place, portion in enumerate(attempt.portions)
            if portion.uuid == gpu.uuid
        ]
        rows.append(
            {
                **device(gpu),
                "share_free": left.share,
                "vram_free_mib": left.vram_mib,
                "foreign": daemon.guard.foreign.get(gpu.uuid),
                "jobs": jobs,
            }
        )
    problem = daemon.membership.problems.get("guard", "")
    return {
        "guards": advert.guards,
        "gpu_sharing": advert.gpu_sharing,
        "problem": problem,
        "audit_problem": daemon.guard.audit_problem,
        "pause_problem": daemon.guard.pause_problem,
        "gpus": rows,
    }


async def receipt_list(daemon: "Daemon", text: str | None) -> "answers.gpus.Receipts":
    """What attempts of this job, or of all, have used here, oldest first; each with the bytes that this node has signed."""
    job = daemon.job_desk.find_job(text).job if text else None
    rows: list[answers.gpus.Receipt] = []
    for sealed in await daemon.journal.receipts(job):
        try:
            receipt = open_receipt(sealed, daemon.trust.mesh_id)
        except ReceiptError:  # of a mesh that this node belonged to before
            continue
        rows.append(
            {
                "job": receipt.job,
                "attempt": receipt.attempt,
                "node": format_id(receipt.node),
                "user": receipt.user,
                "from_unix_ms": receipt.from_unix_ms,
                "until_unix_ms": receipt.until_unix_ms,
                "name": receipt.name,
                "submitter": format_id(receipt.submitter) if receipt.submitter else "",
                "engine": receipt.engine,
                "gpu_percent": receipt.gpu_percent,
                "reason": receipt.reason,
                "lost_ms": receipt.lost_ms,
                "devices": [_use(use) for use in receipt.devices],
                "sealed": b64encode(sealed).decode(),
            }
        )
    return {"receipts": rows}


def _use(use: DeviceUse) -> "answers.gpus.Use":
    return {
        "uuid": use.uuid,
        "gpu_ns": use.gpu_ns,
        "byte_s": use.byte_s,
        "launches": use.launches,
        "peak": use.peak,
        "nvml_ns": use.nvml_ns,
        "nvml_byte_s": use.nvml_byte_s,
        "discrepancy": use.discrepancy,
    }


def change_share(daemon: "Daemon", text: str, order: ShareOrder) -> "answers.gpus.Shared":
    """Give a job that has shares of this node's GPUs other ones, while it runs."""
    job = daemon.job_desk.find_job(text).job
    attempt, tenant = daemon.jobs.attempts.get(job), daemon.guard.tenant(format_job(job))
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
    refusal = daemon.inventory.change(job, share, vram_mib)
    if refusal is not None:
        raise MeshError(refusal, ExitCode.REFUSED)
    try:
        tenant.change(daemon.inventory.portions_of(job), limit, named)
    except ValueError as error:
        daemon.inventory.change(job, before.share, before.vram_mib)
        raise MeshError(str(error), ExitCode.REFUSED) from error
    attempt.portions = tenant.portions
    daemon.refresh_advert(force=True)
    memory = f"{vram_mib} MiB" + (f", up to {vram_limit}," if vram_limit > vram_mib else "")
    words = f"{share} per cent, up to {limit}, and {memory} of each of its GPUs, by its node's owner"
    daemon.jobs.chronicle.say(job, "state", words, new="share")
    return {"job": format_job(job), "share": share, "limit": limit, "vram_mib": vram_mib, "vram_limit_mib": vram_limit}


async def pause_job(daemon: "Daemon", text: str, paused: bool) -> "answers.gpus.GpuPaused":
    """Take a guarded job off this node's GPUs where it is, alive, or let it go on. It keeps what it was given there."""
    job = daemon.job_desk.find_job(text).job
    tenant = daemon.guard.tenant(format_job(job))
    if tenant is None:
        raise MeshError(f"job {text!r} is not under guard here: `mesh gpus` lists who is", ExitCode.NOT_FOUND)
    if paused:
        problem = await daemon.guard.pause(tenant)
        words = "its memory there is freed" if not problem else f"its memory stays there: {problem}"
        daemon.jobs.chronicle.say(job, "state", f"off its GPUs, by its node's owner; {words}", new="gpu paused")
    else:
        problem = await daemon.guard.resume(tenant)
        if problem:
            raise MeshError(f"it cannot go on: {problem}", ExitCode.REFUSED)
        daemon.jobs.chronicle.say(job, "state", "by its node's owner", new="gpu resumed")
    return {"job": format_job(job), "paused": paused, "freed": paused and not problem, "problem": problem}


def _on_gpu(attempt: Attempt, tenant: Tenant | None, place: int) -> "answers.gpus.Tenant":
    portion = attempt.portions[place]
    row: answers.gpus.Tenant = {
        "job": format_job(attempt.job),
        "name": attempt.spec.name,
        "user": attempt.spec.user,
        "attempt": attempt.number,
        "share": portion.share,
        "limit": WHOLE if tenant is None else tenant.limit,
        "vram_mib": portion.vram_mib,
        "vram_limit_mib": portion.vram_mib if tenant is None else max(portion.vram_mib, tenant.vram_limit_mib),
        "guarded": tenant is not None,
    }
    if tenant is None:
        return row
    use = tenant.usage()[place]
    return {
        **row,
        "share_now": round(tenant.shares_now()[place], 1),
        "memory_by_nvml": tenant.held_now(place),
        "gate": "closed" if tenant.gate_closed else "open",
        "closed_by": sorted(tenant.closed_by),
        "suspended": bool(tenant.suspended),
        "unguarded_calls": tenant.unguarded_calls(),
        "findings": [one for one in tenant.findings if one.uuid == portion.uuid],
        "gpu_s": use.gpu_s,
        "launches": use.launches,
        "memory": use.memory,
        "peak": use.peak,
        "refused": use.refused,
        "processes": use.processes,
        "memory_now": use.memory_now,
    }

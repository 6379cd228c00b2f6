"""What a job that is over has needed: by the receipts of the nodes that ran it. For who asks for as much the next time."""

from typing import TYPE_CHECKING

import msgspec

from mesh.api.peer import PeerError
from mesh.api.usage import TOLD, WITHIN_S, Told
from mesh.jobs.spec import format_job
from mesh.provider.receipts import Receipt, ReceiptError, open_receipt

if TYPE_CHECKING:
    from mesh.api import answers
    from mesh.daemon import Daemon

MIB = 1 << 20


async def needs(daemon: "Daemon", text: str) -> "answers.jobs.Needs":
    """`vram_mib`: the most that it held of one GPU, None where no guard measured it; `receipts`: of how many attempts that is."""
    status = daemon.job_desk.find_job(text)
    job, since_ms = format_job(status.job), status.created_unix_ms
    receipts = [
        receipt
        for node in dict.fromkeys(attempt.node for attempt in status.attempts)
        for receipt in await _told_by(daemon, node, since_ms)
        if receipt.job == job and receipt.node == node
    ]
    peaks = [use.peak for receipt in receipts for use in receipt.devices]
    return {
        "job": job,
        "receipts": len(receipts),
        "vram_mib": -(-max(peaks) // MIB) if peaks else None,
        "ran_s": round(sum(attempt.ran_s for attempt in status.attempts), 3),
    }


async def _told_by(daemon: "Daemon", node: bytes, since_ms: int) -> list[Receipt]:
    """None if the node does not answer."""
    try:
        if node == daemon.me:
            sealed: tuple[bytes, ...] = tuple(await daemon.accounts.history(since_ms, TOLD))
        else:
            body = await daemon.peers.call(node, "GET", f"/v1/usage?since={since_ms}", timeout_s=WITHIN_S)
            sealed = msgspec.msgpack.decode(body, type=Told).receipts
        return [open_receipt(one, daemon.trust.mesh_id) for one in sealed]
    except (PeerError, ReceiptError, msgspec.MsgspecError, UnicodeDecodeError):
        return []

"""This node's accounts: one signed receipt for each attempt that ran here, from the guest's start until nothing of it was left.

Attempts that ran when a daemon was killed have no receipt.
"""

import time
from collections import Counter

from membership.envelope import seal
from membership.identity import Identity
from membership.lengths import shortened
from mesh.gpus.receipts import (
    KIND,
    MAX_RECEIPT_BYTES,
    DeviceUse,
    Receipt,
    ReceiptError,
    encode_receipt,
    in_words,
    own_receipt,
)
from mesh.gpus.tenant import Tenant
from mesh.jobs.attempt import Attempt
from mesh.jobs.service import JobService
from mesh.journal import Journal
from mesh.model.spec import format_job
from mesh.util.boottime import boot_s
from placement.advert import WHOLE
from placement.allocation import gpu_percent

ENDS = ("done", "failed", "cancelled", "checkpointed", "vacated", "fenced")
HAD_TO_LEAVE = {"vacated", "fenced"}
OTHER = "other"
NAME_CHARS = 200  # of a job, in a receipt (own choice)
REASON_CHARS = 200
PAGE = 1000  # receipts read at a time (own choice)
DAEMON_ENDS = "its daemon ended"


class Accounts:
    """Receipts and totals since this daemon started: attempts by engine and end, seconds run, GPU seconds and work lost."""

    def __init__(self, identity: Identity, mesh_id: bytes, journal: Journal, jobs: JobService) -> None:
        self._identity, self._mesh_id, self._journal, self._jobs = identity, mesh_id, journal, jobs
        self._measured: dict[tuple[str, int], tuple[int, tuple[DeviceUse, ...]]] = {}
        self.ended: Counter[tuple[str, str]] = Counter()
        self.ran_s: Counter[str] = Counter()
        self.gpu_s = self.lost_s = 0.0

    def measured(self, tenant: Tenant, used: tuple[DeviceUse, ...]) -> str:
        """Record what an attempt used under its guard; return it as text."""
        self._measured[tenant.job, tenant.attempt] = (tenant.began_unix_ms, used)
        return in_words(used)

    def running(self) -> list[Receipt]:
        """Return receipts of the running attempts so far; they have no reason, since they have not ended."""
        made = [self._receipt(job, attempt, "") for job, attempt in self._jobs.attempts.items()]
        return [receipt for receipt in made if receipt is not None]

    async def history(self, since_ms: int, most: int) -> list[bytes]:
        """Return the newest `most` sealed receipts of attempts that ended after `since_ms`, newest first.

        Running attempts come first.
        """
        sealed = [self._sealed(receipt) for receipt in self.running()]
        before: int | None = None
        while len(sealed) < most:
            page = await self._journal.receipts_before(before, PAGE)
            for number, data in page:
                before = number
                try:
                    receipt = own_receipt(data)
                except ReceiptError:
                    continue
                if receipt.until_unix_ms < since_ms:
                    return sealed[:most]
                sealed.append(data)
            if len(page) < PAGE:
                break
        return sealed[:most]

    async def close(self) -> None:
        """Write the receipts of the running attempts. Call it after the guests have ended."""
        for job, attempt in self._jobs.attempts.items():
            self.on_attempt_cleared(job, attempt, DAEMON_ENDS)

    def on_attempt_cleared(self, job: bytes, attempt: Attempt, reason: str) -> None:
        receipt = self._receipt(job, attempt, reason)
        self._measured.pop((format_job(job), attempt.number), None)
        word = reason.split(" ", 1)[0].rstrip(":;,")
        self.ended[attempt.engine.name, word if word in ENDS else OTHER] += 1
        if receipt is None:
            return
        ran_s = (receipt.until_unix_ms - receipt.from_unix_ms) / 1000
        self.ran_s[receipt.engine] += ran_s  # type: ignore[assignment]
        self.gpu_s += ran_s * receipt.gpu_percent / WHOLE
        self.lost_s += receipt.lost_ms / 1000
        self._journal.keep_receipt(job, self._sealed(receipt))

    def _receipt(self, job: bytes, attempt: Attempt, reason: str) -> Receipt | None:
        """Return a receipt; None for an attempt whose guest has not started."""
        tenant_began, devices = self._measured.get((format_job(job), attempt.number), (0, ()))
        began = attempt.began_unix_ms or tenant_began
        if not began:
            return None
        since_exit_s = max(0.0, boot_s() - attempt.stages["exited"]) if "exited" in attempt.stages else 0.0
        left = reason.split(":", 1)[0] in HAD_TO_LEAVE
        return Receipt(
            job=format_job(job),
            attempt=attempt.number,
            node=self._identity.node_id,
            user=attempt.spec.user,
            from_unix_ms=began,
            until_unix_ms=max(began, time.time_ns() // 1_000_000 - round(since_exit_s * 1000)),
            devices=devices,
            name=shortened(attempt.spec.name, NAME_CHARS),
            submitter=attempt.spec.submitter,
            engine=attempt.engine.name,
            gpu_percent=gpu_percent(attempt.spec.gpus, attempt.spec.gpu_share) if attempt.spec.gpus else 0,
            reason=shortened(reason, REASON_CHARS),
            lost_ms=round(attempt.lost().seconds * 1000) if left else 0,
        )

    def _sealed(self, receipt: Receipt) -> bytes:
        sealed = seal(self._identity, self._mesh_id, KIND, encode_receipt(receipt))
        assert len(sealed) <= MAX_RECEIPT_BYTES
        return sealed

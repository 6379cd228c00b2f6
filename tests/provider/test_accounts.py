"""One signed receipt for each attempt whose guest started, and totals that agree with the receipts."""

import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from membership.identity import Identity
from mesh.gpus.receipts import DeviceUse, own_receipt
from mesh.journal import Journal
from mesh.model.spec import format_job
from mesh.provider.accounts import DAEMON_ENDS, NAME_CHARS, REASON_CHARS, Accounts
from mesh.util.boottime import boot_s
from placement.advert import MAX_GPUS
from tests.consensus.worlds import make_spec

JOB, MESH, RAN_S, LOST_S = b"j" * 16, b"m" * 16, 60.0, 12.5


def attempt(began: bool = True, number: int = 1, **spec: object) -> Any:
    """Return what an attempt shows its accounts: it began `RAN_S` ago, and `LOST_S` of its work have no checkpoint."""
    return SimpleNamespace(
        number=number,
        engine=SimpleNamespace(name="process"),
        began_unix_ms=time.time_ns() // 1_000_000 - round(RAN_S * 1000) if began else 0,
        stages={},
        spec=make_spec(**spec),
        lost=lambda: SimpleNamespace(seconds=LOST_S, steps=None),
    )


class World:
    def __init__(self, journal: Journal) -> None:
        self.journal, self.identity = journal, Identity.generate()
        self.attempts: dict[bytes, Any] = {}
        jobs: Any = SimpleNamespace(attempts=self.attempts)
        self.accounts = Accounts(self.identity, MESH, journal, jobs)

    async def receipts(self) -> list[Any]:
        return [own_receipt(sealed) for sealed in await self.journal.receipts(JOB)]


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    journal = Journal(tmp_path / "journal.sqlite")
    await journal.open()
    yield World(journal)
    await journal.close()


@pytest.mark.parametrize(
    ("reason", "end", "lost_s"),
    [
        ("done", "done", 0.0),
        ("failed: exit code 1", "failed", 0.0),
        ("checkpointed: it moved", "checkpointed", 0.0),
        ("vacated: its owner is back", "vacated", LOST_S),
        ("fenced", "fenced", LOST_S),
        (DAEMON_ENDS, "other", 0.0),
    ],
)
async def test_only_a_job_that_had_to_leave_lost_work(world: World, reason: str, end: str, lost_s: float) -> None:
    for number in (1, 2):
        world.accounts.on_attempt_cleared(JOB, attempt(number=number), reason)
    assert [(r.reason, r.lost_ms) for r in await world.receipts()] == [(reason, lost_s * 1000)] * 2
    assert world.accounts.lost_s == 2 * lost_s
    assert world.accounts.ended == {("process", end): 2}


async def test_totals_and_receipt_count_the_run(world: World) -> None:
    ended = attempt(gpus=1, gpu_share=50)
    ended.stages["exited"] = boot_s() - 20.0  # what came after the exit is not charged
    world.accounts.on_attempt_cleared(JOB, ended, "done" + " " * REASON_CHARS)
    (receipt,) = await world.receipts()
    ran_s = (receipt.until_unix_ms - receipt.from_unix_ms) / 1000
    assert ran_s == pytest.approx(RAN_S - 20.0, abs=5.0) and len(receipt.reason) == REASON_CHARS
    assert (receipt.node, receipt.user, receipt.gpu_percent) == (world.identity.node_id, ended.spec.user, 50)
    assert world.accounts.ran_s == {"process": pytest.approx(ran_s)}
    assert world.accounts.gpu_s == pytest.approx(ran_s / 2)


async def test_receipt_of_a_job_with_a_long_name_and_all_gpus_can_be_read(world: World) -> None:
    """Regression: with more than some 40 GPUs the end of the attempt failed, and its place was never given back."""
    use = DeviceUse("GPU-" + "f" * 36, *([2**63 - 1] * 6))
    tenant: Any = SimpleNamespace(job=format_job(JOB), attempt=1, began_unix_ms=time.time_ns() // 1_000_000)
    world.accounts.measured(tenant, (use,) * MAX_GPUS)
    world.accounts.on_attempt_cleared(JOB, attempt(name="\U0001f600" * 200_000), "vacated: \ud800" + "é" * 9999)
    (receipt,) = await world.receipts()
    assert len(receipt.name) == NAME_CHARS and len(receipt.reason) == REASON_CHARS


async def test_attempt_without_guest_has_no_receipt(world: World) -> None:
    world.accounts.on_attempt_cleared(JOB, attempt(began=False), "vacated")
    assert await world.receipts() == [] and world.accounts.lost_s == 0 and not world.accounts.ran_s
    assert world.accounts.ended == {("process", "vacated"): 1}


async def test_measured_use_belongs_to_one_attempt(world: World) -> None:
    used = (DeviceUse("GPU-1", 5, 0, 1, 0),)
    tenant: Any = SimpleNamespace(job=format_job(JOB), attempt=1, began_unix_ms=time.time_ns() // 1_000_000)
    assert "GPU-1" in world.accounts.measured(tenant, used)
    world.accounts.on_attempt_cleared(JOB, attempt(number=2), "done")
    world.accounts.on_attempt_cleared(JOB, attempt(began=False), "done")
    world.accounts.on_attempt_cleared(JOB, attempt(), "done")
    assert [receipt.devices for receipt in await world.receipts()] == [(), used, ()]


async def test_daemon_that_ends_writes_receipts_of_what_ran(world: World) -> None:
    world.attempts[JOB] = attempt()
    (running,) = world.accounts.running()
    assert running.reason == ""
    await world.accounts.close()
    assert [receipt.reason for receipt in await world.receipts()] == [DAEMON_ENDS]


async def test_history_has_running_attempts_first_and_a_bound(world: World) -> None:
    for number in range(3):
        world.accounts.on_attempt_cleared(JOB, attempt(number=number), "done")
    world.attempts[JOB] = attempt(number=3)

    async def numbers(since_ms: int, most: int) -> list[int]:
        return [own_receipt(sealed).attempt for sealed in await world.accounts.history(since_ms, most)]

    assert await numbers(0, 10) == [3, 2, 1, 0] and await numbers(0, 2) == [3, 2]
    assert await numbers(time.time_ns() // 1_000_000 + 60_000, 10) == [3]

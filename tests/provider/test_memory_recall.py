"""Recall of lent GPU memory, stage by stage: real tenants of a guard, whose accounts the test writes, with a fake driver
and a fake clock."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from cuda_guard.page import UNIT
from mesh.execution.engine import Launch
from mesh.gpus.tenant import PausingHand, Tenant
from mesh.model.spec import format_job
from mesh.provider import memory_recall as stages
from mesh.provider.memory_recall import AGAIN_S, GIVE_BACK_S, REASON, Recall
from mesh.provider.reclaim import Reclaimer
from mesh.util.task_set import TaskSet
from placement.advert import Portion
from tests.guards import WAIT_S, Watched, gpu, use_driver

pytestmark = pytest.mark.cc

GIB = 1 << 30
GPU = gpu(UUID(int=1))
JOB, NEWCOMER = b"b" * 16, b"n" * 16
log = logging.getLogger(__name__)


class FakeDriver:
    """A fake of the driver's pausing: frees the memory of a tenant, or returns the reason of a refusal."""

    def __init__(self) -> None:
        self.problem, self.refusal = "", ""
        self.frees = True
        self.asked: list[str] = []

    async def pause(self, tenant: Tenant, by: PausingHand) -> str:
        self.asked.append("pause")
        tenant.set_gate(True, "test", by)
        if self.frees and not self.refusal:
            tenant.suspended = (1,)
            tenant.guarded.release_memory()
        return self.refusal

    async def resume(self, tenant: Tenant, by: PausingHand) -> str:
        self.asked.append("resume")
        if not tenant.guarded.reserve_memory():
            return "there is no room"
        tenant.suspended = ()
        tenant.set_gate(False, "test", by)
        return ""


class Jobs:
    """A fake job service with one attempt, which ends at its notice if `heeds`."""

    def __init__(self) -> None:
        self.heeds = False
        self.notices: list[tuple[float, str]] = []
        self.kills: list[str] = []
        self.said: list[str] = []
        self.left: Callable[..., None] = lambda *ended: None
        self.attempt = SimpleNamespace(
            spec=SimpleNamespace(checkpointing=None, user="ada", name=""),
            heeds_notice=None,
            stages={},
            reserve_s=0.0,
            number=0,
            portions=(),
        )
        self.attempts: dict[bytes, Any] = {JOB: self.attempt}
        self.departure_planner = SimpleNamespace(settle=lambda jobs, grace_s: None)
        self.event_log = SimpleNamespace(add=lambda job, kind, words, attempt, new: self.said.append(new))

    async def vacate(self, grace_s: float, reason: str, only: list[bytes]) -> list[bytes]:
        self.notices.append((grace_s, reason))
        if self.heeds:
            self.attempts.pop(JOB)
        return only

    async def kill(self, reason: str, only: list[bytes]) -> list[bytes]:
        self.kills.append(reason)
        return only


class Lent:
    """A GPU of 16 GiB with a borrower of 6 GiB and a newcomer with a guarantee of 14 GiB."""

    def __init__(self, watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(stages, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.guard, self.jobs, self.driver = watched.guard, Jobs(), FakeDriver()
        any_jobs: Any = self.jobs
        any_driver: Any = self.driver
        self.guard._pausing = any_driver
        self.reclaimer = Reclaimer(any_jobs, self.guard, "ada", "desk")
        self.recall = Recall(self.guard, self.reclaimer, any_jobs, lambda: 0.0)
        self.pressing = TaskSet(log)
        self.borrower = self._admit(JOB, Portion(GPU.uuid, 30, 1024), 8192)
        self.newcomer: Tenant | None = None

    def _admit(self, job: bytes, portion: Portion, most_mib: int) -> Tenant:
        fields = dict.fromkeys(("work_dir", "ckpt_dir", "out_dir", "ctl_dir", "log_path", "node"), "")
        launch = Launch(
            job=format_job(job), attempt=0, argv=("true",), env={}, grace_s=1.0, gpus=(portion,),
            vram_limit_mib=most_mib, **fields,  # type: ignore[arg-type]
        )  # fmt: skip
        tenant = self.guard.admit(launch, own_root=False)
        assert tenant is not None
        return tenant

    async def until(self, ready: Callable[[], object], what: str) -> None:
        """Wait for a change by the guard or a task, in real time."""
        async with asyncio.timeout(WAIT_S):
            while not ready():
                await asyncio.sleep(0.002)
        assert ready(), what

    def holds(self, size: int) -> None:
        """Charge this memory to the borrower, as its programs do."""
        self.borrower.guarded.pages.job.uses[0].memory = size // UNIT << 26

    async def is_needed(self) -> None:
        await self.until(lambda: self.borrower.guarded.memory_limit(0) == 8 * GIB, "the memory to be lent")
        self.holds(6 * GIB)
        newcomer = self.newcomer = self._admit(NEWCOMER, Portion(GPU.uuid, 30, 14 * 1024), 0)
        await self.until(
            lambda: newcomer.lacks() and self.borrower.owes({GPU.uuid}) == 5 * GIB, "the lent memory to be needed"
        )

    async def look(self, passed_s: float = 0.0) -> None:
        self.now += passed_s
        await self.recall.look(self.guard.tenants, self.pressing)

    async def pressed(self) -> None:
        """Wait until all tasks of the last look have ended."""
        await self.until(lambda: not self.pressing._tasks, "the recall's tasks to end")

    async def close(self) -> None:
        await self.pressing.close()
        await self.reclaimer.close()


@pytest.fixture
async def lent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    directory = tmp_path / "driver"
    directory.mkdir()
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        (directory / name).touch()
    use_driver(monkeypatch, directory)
    async with Watched(tmp_path / "pages", (GPU,)) as watched:
        found = Lent(watched, monkeypatch)
        await found.is_needed()
        yield found
        await found.close()


async def test_recall_notifies_and_spares_tenants_that_free_memory(
    lent: Lent, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    await lent.look()
    await lent.look(GIVE_BACK_S - 1)
    assert lent.jobs.said == ["memory recalled"] and "5120 MiB of GPU memory lent to it" in caplog.text
    lent.holds(GIB)
    newcomer = lent.newcomer
    assert newcomer is not None
    await lent.until(lambda: newcomer.guarded.has_guarantee, "the newcomer to have its guarantee")
    await lent.look(1.0)
    await lent.look(10.0)
    assert "5120 MiB lent to it are back after 2000 ms: it freed the memory" in caplog.text
    assert lent.driver.asked == [] and lent.jobs.notices == lent.jobs.kills == []


async def test_tenant_without_saves_is_paused_and_resumed(lent: Lent) -> None:
    await lent.look()
    await lent.look(GIVE_BACK_S)
    await lent.pressed()
    assert lent.borrower.owes({GPU.uuid}) == 0 and lent.borrower.gate_closed
    assert lent.jobs.said == ["memory recalled", "gpu paused"]
    await lent.look()
    await lent.pressed()
    assert lent.driver.asked == ["pause", "resume"] and lent.borrower.gate_closed, "the memory is not free yet"
    await lent.look(AGAIN_S - 1)
    assert lent.newcomer is not None
    lent.newcomer.release()
    await lent.look(1.0)
    await lent.pressed()
    assert lent.driver.asked == ["pause", "resume", "resume"] and not lent.borrower.gate_closed
    assert lent.jobs.said[-1] == "goes on" and lent.jobs.notices == lent.jobs.kills == []


@pytest.mark.parametrize("why", ["the driver refuses", "the driver cannot", "it saves", "a pause frees nothing"])
async def test_recall_gives_notice_to_other_tenants(lent: Lent, why: str) -> None:
    lent.jobs.heeds = True
    if why == "it saves":
        lent.jobs.attempt.spec.checkpointing = "ckpts"
    elif why == "the driver refuses":
        lent.driver.refusal = "lock of process 1: its work did not end in time"
    elif why == "a pause frees nothing":
        lent.driver.frees = False
    else:
        lent.driver.problem = "the driver is older than 570"
    await lent.look()
    await lent.look(GIVE_BACK_S)
    await lent.pressed()
    assert lent.jobs.notices == [(0.0, REASON)] and lent.jobs.said == ["memory recalled"]
    assert lent.driver.asked == (["pause"] if why in {"the driver refuses", "a pause frees nothing"} else [])
    lent.borrower.release()
    await lent.look(1.0)
    assert lent.jobs.kills == [] and not lent.recall._debts


async def test_recall_kills_tenant_ignoring_its_notice(lent: Lent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mesh.provider.reclaim.LATE_S", 0.01)
    lent.driver.refusal = "its work did not end in time"
    await lent.look()
    await lent.look(GIVE_BACK_S)
    await lent.until(lambda: lent.jobs.kills, "the borrower to be killed")
    assert lent.jobs.notices == [(0.0, REASON)] and lent.jobs.kills == [
        f"{REASON}; it had notice, and its time is over"
    ]


async def test_failed_stage_is_retried_once(
    lent: Lent, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lent.driver.problem = "the driver is older than 570"
    asked: list[asyncio.Future[None]] = []

    async def leave(jobs: list[bytes], leave: object) -> None:
        asked.append(asyncio.get_running_loop().create_future())
        await asked[-1]

    monkeypatch.setattr(lent.reclaimer, "leave", leave)
    await lent.look()
    await lent.look(GIVE_BACK_S)
    await lent.until(lambda: asked, "the borrower to be asked to go")
    await lent.look(1.0)
    await lent.look(1.0)
    assert len(asked) == 1
    asked[0].set_exception(OSError("the journal is full"))
    await lent.pressed()
    assert f"recall {format_job(JOB)[:8]} failed" in caplog.text and "the journal is full" in caplog.text
    await lent.look(1.0)
    await lent.until(lambda: len(asked) == 2, "the borrower to be asked again")
    asked[1].set_result(None)
    await lent.pressed()
    await lent.look(1.0)
    assert len(asked) == 2 and lent.jobs.said == ["memory recalled"], "the notice is not repeated"

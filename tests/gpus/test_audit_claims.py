"""The claims that the audit makes for tenants, and which processes it takes for strangers, without a GPU."""

import os
import subprocess
import sys
from collections.abc import Iterator
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from cuda_guard.auditor import UNGUARDED_SAMPLES, Claim, DeviceSample, GpuProcess
from mesh.gpus.audit import Audit, _claims, _gone, _is_ending

GPU_0, GPU_1 = "GPU-0", "GPU-1"
ALIVE, NOBODY = os.getpid(), 2**22 + 1  # the second is beyond the kernel's largest


@pytest.fixture
def zombie() -> Iterator[int]:
    """A process that has ended and is not reaped."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    yield child.pid
    child.wait()


class FakeTenant:
    """A tenant with two devices; `now` is what its processes have charged on each, and `others` have no guard."""

    name = "a job"
    portions = (SimpleNamespace(uuid=GPU_0), SimpleNamespace(uuid=GPU_1))

    def __init__(self, now: dict[int, tuple[int, ...]], released: bool = False, others: tuple[int, ...] = ()) -> None:
        self.now, self.released, self.others = now, released, others
        self.counted: list[Any] = []
        self.overheads: dict[int, int] = {}
        self.guarded = SimpleNamespace(
            context_bytes=lambda place: 10 + place,
            memory_max=lambda place: 100 if place else None,
            pages=SimpleNamespace(memory_used=lambda place: 50 + place),
            set_overhead=self.overheads.__setitem__,
        )

    def charges(self) -> dict[int, tuple[int, ...]]:
        return self.now

    def shares_now(self) -> tuple[float, ...]:
        return (20.0, 30.0)

    async def pids(self) -> frozenset[int]:
        return frozenset((*self.now, *self.others))

    def count(self, measured: tuple[Any, ...]) -> None:
        self.counted.append(measured)


def test_charge_that_changed_meanwhile_is_not_compared(zombie: int) -> None:
    tenant: Any = FakeTenant({ALIVE: (1, 2), zombie: (3, 4)})
    first, second = _claims(tenant, {ALIVE: (1, 2), zombie: (3, 5)}, frozenset({ALIVE, zombie}))
    assert first == Claim("a job", GPU_0, frozenset({ALIVE, zombie}), {ALIVE: 1, zombie: None}, 10, None, 20.0, None)
    assert second.charged == {ALIVE: 2, zombie: None} and (second.limit, second.reported) == (100, 51)
    (only, _) = _claims(tenant, {}, frozenset({ALIVE}))
    assert only.charged[ALIVE] is None, "it is new"


def test_process_that_is_ending_bypasses_nothing(zombie: int) -> None:
    assert not _is_ending(ALIVE) and _is_ending(zombie) and _is_ending(NOBODY)
    (first, _) = _claims(FakeTenant({}), {}, frozenset({ALIVE, zombie}))  # type: ignore[arg-type]
    assert first.charged == {zombie: None}, "the other one has no guard"


def test_last_processes_of_a_tenant_bypass_no_guard() -> None:
    tenant: Any = FakeTenant({ALIVE: (1, 2)})
    claims = _gone(tenant, frozenset({ALIVE}), [DeviceSample(GPU_0, 100, 0), DeviceSample(GPU_1, 100, 0)])
    assert [(claim.uuid, claim.charged) for claim in claims] == [(GPU_0, {ALIVE: None}), (GPU_1, {ALIVE: None})]


async def look(audit: Audit, *tenants: Any, processes: tuple[GpuProcess, ...] = ()) -> list[Any]:
    sample = DeviceSample(GPU_0, 1 << 30, 1 << 20, processes)
    audit._nvml = SimpleNamespace(sample=lambda: [sample])  # type: ignore[assignment]
    return await audit.look(tenants)


async def test_ending_processes_are_no_strangers(zombie: int) -> None:
    audit = Audit((GPU_0,), None)
    await look(audit, processes=(GpuProcess(ALIVE, 5), GpuProcess(zombie, 7)))
    assert [process.pid for process in audit.strangers[GPU_0]] == [ALIVE]
    assert (audit.foreign[GPU_0].processes, audit.foreign[GPU_0].memory) == (2, 12)


@pytest.mark.parametrize("released", [False, True])
async def test_tenant_that_ended_meanwhile_is_neither_charged_nor_found(released: bool) -> None:
    audit = Audit((GPU_0,), None)
    tenant = FakeTenant({}, released, others=(ALIVE,))
    for _ in range(UNGUARDED_SAMPLES):
        found = await look(audit, tenant, processes=(GpuProcess(ALIVE, 1 << 19),))
    assert [finding.kind for _, finding in found] == ([] if released else ["unguarded"])
    assert audit.strangers[GPU_0] == ()
    assert len(tenant.counted) == (0 if released else UNGUARDED_SAMPLES)
    assert set(tenant.overheads) == (set() if released else {0}), "NVML reported the first device alone"


async def test_blocked_nvml_is_asked_once_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver can block a call for ever. What it answers in the end is about another time."""
    monkeypatch.setattr("mesh.gpus.audit.PATIENCE_S", 0.05)
    audit, answers, asked, tenant = Audit((GPU_0,), None), Event(), list[int](), FakeTenant({ALIVE: (1, 2)})

    def sample() -> list[DeviceSample]:
        asked.append(1)
        assert answers.wait(60)
        return [DeviceSample(GPU_0, 100, 7)]

    audit._nvml = SimpleNamespace(sample=sample, holders=set)  # type: ignore[assignment]
    for _ in range(3):
        assert await audit.look([tenant]) == []  # type: ignore[list-item]
        assert "NVML does not answer" in audit.problem and len(asked) == 1
    assert tenant.counted == [()] * 3 and await audit.holders(tenant) == (ALIVE,)  # type: ignore[arg-type]
    answers.set()
    await audit.look([tenant])  # type: ignore[list-item]
    assert audit.problem and len(asked) == 1 and not audit.foreign
    await audit.look([tenant])  # type: ignore[list-item]
    assert not audit.problem and len(asked) == 2 and GPU_0 in audit.foreign

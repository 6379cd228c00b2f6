"""Guests that are seen by NVML, on a double of it: what they are charged with, and what becomes of those past the guard."""

import asyncio
import re
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from cuda_guard.auditor import Finding
from cuda_guard.driver import find_driver
from mesh.gpus.guard import Bypass
from mesh.gpus.tenant import Tenant
from tests.fake.build import build
from tests.fake.child import Child, Talk
from tests.fake.client import Driver
from tests.fake.world import World
from tests.gpus.test_guarded_engine import LAUNCHES, Lab
from tests.guards import WAIT_S, Watched, gpu, use_driver

MIB = 1 << 20
CONTEXT = 300 * MIB
HOLDS = "driver.out('cuMemAlloc_v2', 100 << 20); print('ready', flush=True); time.sleep(60)"
OpenLab = Callable[..., AbstractAsyncContextManager[Lab]]


@pytest.fixture
def open_lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OpenLab:
    """Its driver is its own copy, for NVML is asked by this process too, and a copy stays with its first world."""
    fakes = build()
    shutil.copytree(fakes.cuda.parent, tmp_path / "driver")
    world = World(tmp_path / "world", fakes)
    monkeypatch.setenv("FAKE_GPU_WORLD", str(world.path))
    monkeypatch.setattr("mesh.gpus.guard.LOOK_S", 0.1)
    use_driver(monkeypatch, tmp_path / "driver")
    (tmp_path / "attempt").mkdir()

    @asynccontextmanager
    async def opened(bypass: Bypass = "pause") -> AsyncIterator[Lab]:
        async with Watched(tmp_path / "pages", (gpu(world.uuids[0]),), bypass=bypass) as watched:
            assert watched.told == [""] and watched.guard.audit_problem == ""
            lab = Lab(tmp_path / "attempt", world, watched)
            yield lab
            for guest in lab.guests:
                await guest.kill()

    return opened


async def until(ready: Callable[[], object], what: str) -> None:
    async with asyncio.timeout(WAIT_S):
        while not ready():
            await asyncio.sleep(0.02)


def tenant_of(lab: Lab) -> Tenant:
    return lab.watched.guard.tenants[-1]


async def test_job_is_charged_for_contexts(open_lab: OpenLab) -> None:
    async with open_lab() as lab:
        await lab.program(HOLDS)
        await lab.until_logged("ready")
        first = tenant_of(lab)
        await until(lambda: first.usage()[0].memory == CONTEXT + 100 * MIB, "its context to be charged")
        assert first.guarded.context_bytes(0) == 0
        ((pid, charged),) = first.charges().items()
        assert charged == (100 * MIB,) and lab.world.memory(pid) == CONTEXT + 100 * MIB and pid in await first.pids()
        await asyncio.sleep(0.5)
        await lab.guests[-1].kill()
        await lab.program(HOLDS + " #again")
        later = tenant_of(lab)
        assert later.guarded.context_bytes(0) == CONTEXT
        await until(lambda: later.usage()[0].memory == CONTEXT + 100 * MIB, "it to be charged at once")
        await asyncio.sleep(0.5)
        assert later.usage()[0].memory == lab.world.used() == CONTEXT + 100 * MIB and later.findings == []


async def test_owner_programs_are_distinguished(open_lab: OpenLab) -> None:
    async with open_lab() as lab:
        await lab.program(HOLDS)
        await lab.until_logged("ready")
        await until(lambda: lab.watched.guard.foreign.get(lab.uuid) is not None, "a look")
        assert lab.watched.guard.foreign[lab.uuid].processes == 0
        with Child(lab.world, own_program, 50 * MIB) as own:
            assert own.hear() == "ready"
            await until(lambda: lab.watched.guard.foreign[lab.uuid].processes, "it to be seen")
            found = lab.watched.guard.foreign[lab.uuid]
            assert (found.processes, found.memory) == (1, CONTEXT + 50 * MIB)
        await until(lambda: not lab.watched.guard.foreign[lab.uuid].processes, "it to be gone")
        assert lab.watched.warned == []


def own_program(driver: Driver, size: int, talk: Talk) -> None:
    driver.start()
    driver.out("cuMemAlloc_v2", size)
    talk.say("ready")
    talk.hear()


def past(inner: str) -> str:
    """A program's child that starts with an environment of its own, and so without the guard."""
    found = find_driver()
    assert found is not None
    opened = f"driver = Driver({str(found.cuda)!r}); driver.start(); kernel = driver.kernel('k_1000us'); {inner}"
    return (
        f"import subprocess; inner = {opened!r}; code = 'import os, sys, time; sys.path.insert(0, sys.argv[1])\\n"
        f"from tests.fake.client import Driver\\n' + inner\n"
        "subprocess.run([sys.executable, '-c', code, sys.argv[1]], env={'FAKE_GPU_WORLD': os.environ['FAKE_GPU_WORLD']})"
    )


STEPS = "[(driver.launch(kernel), driver.cuCtxSynchronize(), print('step', flush=True), time.sleep(0.02)) for _ in range(9999)]"


async def test_bypassing_job_is_stopped_until_resumed(open_lab: OpenLab) -> None:
    async with open_lab() as lab:
        await lab.program(past(STEPS))
        await until(lambda: lab.watched.found, "it to be found")
        tenant = tenant_of(lab)
        (finding,) = tenant.findings
        assert finding.kind == "unguarded" and finding.uuid == lab.uuid and lab.world.memory(finding.pid) == CONTEXT
        words = r"it bypasses the GPU guard: process \d+ uses 300 MiB of the GPU without the guard: it is stopped"
        assert re.fullmatch(words, lab.watched.found[0]) and "it is stopped" in lab.watched.warned[0]
        assert tenant.gate_closed and tenant.keeper is not None
        await until_still(lab)
        steps = await lab.steps_when_stopped()
        lab.guests[-1].allow_until(float("inf"))  # its lease goes on, and changes nothing
        await asyncio.sleep(0.3)
        assert lab.steps == steps and tenant.gate_closed
        tenant.keeper.thaw("the owner resumes it")
        await lab.beyond(steps + 3)
        await asyncio.sleep(0.5)
        assert not tenant.gate_closed and len(tenant.findings) == len(lab.watched.found) == 1, "it is not found again"


async def until_still(lab: Lab) -> None:
    async with asyncio.timeout(WAIT_S):
        while not await lab.guests[-1].stands_still():
            await asyncio.sleep(0.02)


async def test_bypassing_job_is_killed_by_policy(open_lab: OpenLab) -> None:
    async with open_lab("kill") as lab:
        await lab.program(past(STEPS))
        async with asyncio.timeout(WAIT_S):
            assert (await lab.guests[-1].wait()).code == 137
        assert "it is killed" in lab.watched.found[0] and lab.watched.guard.tenants == []
        await until(lambda: lab.world.used() == 0, "its memory to be free")


async def test_bypassing_job_is_reported_by_policy(open_lab: OpenLab) -> None:
    async with open_lab("warn") as lab:
        await lab.program(past(STEPS))
        await until(lambda: lab.watched.found, "it to be found")
        await lab.beyond(lab.steps + 3)
        assert "its node's owner is told" in lab.watched.found[0] and not tenant_of(lab).gate_closed


async def test_utilisation_is_advice(open_lab: OpenLab) -> None:
    """NVML counts periods in which any kernel ran, so an honest job can be above its share: it is neither stopped nor accused."""
    async with open_lab() as lab:
        await lab.program(LAUNCHES)
        tenant = tenant_of(lab)
        lab.watched.guard._act(tenant, Finding("utilisation", tenant.name, lab.uuid, 1, "process 1 uses 41 %"))
        await lab.beyond(lab.steps + 3)
        assert not tenant.gate_closed and lab.watched.found == []
        assert "may use more than its share" in lab.watched.warned[0]


async def test_honest_job_is_not_disturbed(open_lab: OpenLab) -> None:
    async with open_lab() as lab:
        await lab.program(LAUNCHES)
        await lab.beyond(50)
        assert lab.watched.warned == lab.watched.found == [] and tenant_of(lab).findings == []


async def test_use_is_reported_at_end(open_lab: OpenLab) -> None:
    async with open_lab() as lab:
        await lab.program(LAUNCHES.replace("0.02", "0.002"))
        await lab.beyond(400)
        await lab.guests[-1].kill()
        (used,) = lab.watched.used
        executed = lab.world.busy_ns()
        assert used.uuid == lab.uuid and used.launches > 400 and used.peak >= CONTEXT
        assert used.gpu_ns == pytest.approx(executed, rel=0.1, abs=10_000_000)
        assert used.nvml_ns == pytest.approx(executed, rel=0.3, abs=50_000_000)
        assert used.nvml_byte_s and used.byte_s == pytest.approx(used.nvml_byte_s, rel=0.3)


SUMS = (
    "from itertools import count\n"
    "at = driver.out('cuMemAlloc_v2', 1 << 20); total = 0\n"
    "for n in count():\n"
    "    if n >= 10 and os.path.exists('end'): break\n"
    "    driver.launch(kernel); driver.cuMemcpyHtoD_v2(at, n.to_bytes(8, 'little'), 8)\n"
    "    print('step', flush=True); time.sleep(0.02)\n"
    "    back = __import__('ctypes').create_string_buffer(8); driver.cuMemcpyDtoH_v2(back, at, 8)\n"
    "    total += int.from_bytes(back.raw, 'little')\n"
    "print('total', n, total)"
)


async def test_pause_frees_memory_and_resumes(open_lab: OpenLab, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with open_lab() as lab:
        guard = lab.watched.guard
        assert guard.pause_problem == ""
        await lab.program(SUMS)
        await lab.beyond(5)
        tenant = tenant_of(lab)
        assert lab.world.used() > CONTEXT
        assert await guard.pause(tenant) == ""
        assert lab.world.used() == 0 and tenant.gate_closed and tenant.suspended
        lab.guests[-1].allow_until(float("inf"))  # its lease goes on, and opens nothing
        steps = await lab.steps_when_stopped()
        assert steps > 5 and tenant.gate_closed and not await lab.guests[-1].stands_still(), "it lives"
        assert await guard.pause(tenant) == "", "again is no error"
        assert await guard.resume(tenant) == "" and lab.world.used() > CONTEXT
        (lab.root / "work" / "end").touch()
        count, total = (await lab.end()).split()[-2:]
        assert int(count) >= steps and int(total) == sum(range(int(count)))
        assert lab.watched.found == [] and not tenant.gate_closed
    said = "\n".join(caplog.messages)
    freed = r"GPU memory of 1 process freed: lock of \d+ \d+ ms, checkpoint of \d+ \d+ ms; its gate closed \d+ ms ago"
    assert re.search(freed, said) and re.search(r"brought back: restore of \d+ \d+ ms, unlock of \d+ \d+ ms", said)


async def test_pause_without_driver_closes_gate_only(open_lab: OpenLab, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_lab() as lab:
        guard = lab.watched.guard
        await lab.program(LAUNCHES)
        await lab.beyond(3)
        tenant = tenant_of(lab)
        monkeypatch.setenv("FAKE_FAIL", "cuCheckpointProcessCheckpoint:1=801")
        assert re.fullmatch(
            r"checkpoint of process \d+: .* does not support it \(801\); they run again", await guard.pause(tenant)
        )
        assert lab.world.used() == CONTEXT and not tenant.suspended and tenant.gate_closed
        steps = await lab.steps_when_stopped()
        assert await guard.resume(tenant) == ""
        await lab.beyond(steps + 3)


async def test_resume_without_memory_stays_paused(open_lab: OpenLab) -> None:
    async with open_lab() as lab:
        guard = lab.watched.guard
        await lab.program(LAUNCHES)
        await lab.beyond(3)
        tenant = tenant_of(lab)
        assert await guard.pause(tenant) == ""
        with Child(lab.world, own_program, 16_000 * MIB) as own:
            assert own.hear() == "ready"
            assert "not enough memory" in await guard.resume(tenant)
            assert tenant.gate_closed and tenant.suspended
        await until(lambda: lab.world.used() == 0, "the owner's to end")
        assert await guard.resume(tenant) == ""
        await lab.beyond(lab.steps + 3)


async def test_stopped_or_paused_tenant_can_be_killed(open_lab: OpenLab) -> None:
    async with open_lab() as lab:
        guard = lab.watched.guard
        await lab.program(LAUNCHES)
        await lab.beyond(3)
        tenant = tenant_of(lab)
        assert tenant.keeper is not None
        tenant.keeper.freeze("for a test")
        assert "it is stopped already" in await guard.pause(tenant)
        assert await guard.resume(tenant) == "" and not tenant.gate_closed
        assert await guard.pause(tenant) == ""
        async with asyncio.timeout(WAIT_S):
            await lab.guests[-1].kill()
        assert tenant.released and await guard.pause(tenant) == ""

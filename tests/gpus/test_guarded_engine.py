"""Guests of real engines under a real guard, on a double of the CUDA driver."""

import asyncio
import math
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Collection
from pathlib import Path

import pytest

from cuda_guard.build import find_compiler
from cuda_guard.guard import Mount
from mesh.execution.apptainer import gpus
from mesh.execution.docker.engine import DockerEngine
from mesh.execution.engine import EngineError
from mesh.execution.process.engine import ProcessEngine
from mesh.execution.process.sandbox import Sandbox
from mesh.gpus.guarded_engine import GuardedEngine
from mesh.gpus.tenant import Tenant
from mesh.util.boottime import boot_s
from placement.advert import Portion
from tests.apptainer import apptainer_engine, unpacked
from tests.container_images import busybox_image
from tests.execution.bench import Bench
from tests.fake.build import build
from tests.fake.world import World
from tests.guards import WAIT_S, Watched, built, gpu, use_driver

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
PROGRAM = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
from tests.fake.client import CudaError, Driver
driver = Driver("libcuda.so.1")
driver.start()
kernel = driver.kernel("k_1000us")
exec(sys.argv[2])
"""
LAUNCHES = "while True: driver.launch(kernel); driver.cuCtxSynchronize(); print('step', flush=True); time.sleep(0.02)"


class Lab(Bench):
    """A bench with one GPU and a guard of it."""

    def __init__(self, root: Path, world: World, watched: Watched) -> None:
        super().__init__(GuardedEngine(ProcessEngine(), watched.guard), root, None)
        self.world, self.watched = world, watched
        self.uuid = f"GPU-{world.uuids[0]}"

    async def program(self, code: str, **changes: object) -> None:
        env = self.world.environment()
        changes = {"gpus": (self.portion(),), "env": env, "gpu_share_limit": 90, **changes}
        (self.root / "work" / "program.py").write_text(PROGRAM)
        await self.start(sys.executable, "program.py", str(ROOT), code, **changes)

    def portion(self, share: int = 30, vram_mib: int = 1024) -> Portion:
        return Portion(self.uuid, share, vram_mib)

    async def end(self) -> str:
        async with asyncio.timeout(WAIT_S):
            await self.guests[-1].wait()
        return self.log

    @property
    def steps(self) -> int:
        return self.log.count("step") if (self.root / "log").exists() else 0

    async def beyond(self, steps: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while self.steps <= steps:
                await asyncio.sleep(0.01)

    async def steps_when_stopped(self) -> int:
        """Return the number of steps once no more come."""
        async with asyncio.timeout(WAIT_S):
            while True:
                before = self.steps
                await asyncio.sleep(0.3)
                if self.steps == before:
                    return before


@pytest.fixture
async def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Lab]:
    fakes = build()
    world = World(tmp_path / "world", fakes)
    use_driver(monkeypatch, fakes.cuda.parent)
    (tmp_path / "attempt").mkdir()
    async with Watched(tmp_path / "pages", (gpu(world.uuids[0]),)) as watched:
        assert watched.told == [""]
        lab = Lab(tmp_path / "attempt", world, watched)
        yield lab
        for guest in lab.guests:
            await guest.kill()


async def test_share_is_limited_to_quota(lab: Lab) -> None:
    await lab.program(
        "print('total', driver.free_memory()[1])\n"
        "driver.out('cuMemAlloc_v2', 512 << 20); print('half')\n"
        "try: driver.out('cuMemAlloc_v2', 1024 << 20)\n"
        "except CudaError as error: print('refused', error.code)",
    )
    log = await lab.end()
    assert f"total {1024 * MIB}\nhalf\nrefused 2\n" in log
    assert lab.watched.guard.tenants == [] and list((lab.root.parent / "pages").iterdir()) == []


async def test_share_can_be_changed_while_running(lab: Lab) -> None:
    await lab.program(
        "driver.out('cuMemAlloc_v2', 512 << 20); print('ready', flush=True)\n"
        "while True:\n"
        "    driver.launch(kernel); driver.cuCtxSynchronize(); time.sleep(0.02)\n"
        "    try: driver.out('cuMemAlloc_v2', 600 << 20); print('more', flush=True)\n"
        "    except CudaError: pass",
    )
    await lab.until_logged("ready")
    (tenant,) = lab.watched.guard.tenants
    assert lab.watched.guard.tenant("j" * 26) is tenant and lab.watched.guard.tenant("x") is None
    (use,) = tenant.usage()
    assert use.uuid == lab.uuid and 512 * MIB <= use.memory <= 1024 * MIB and use.processes == 1
    with pytest.raises(ValueError, match="already"):
        tenant.change((lab.portion(vram_mib=100),), 90)
    assert tenant.portions == (lab.portion(),) and tenant.guarded.memory_limit(0) == 1024 * MIB
    async with asyncio.timeout(WAIT_S):
        while not tenant.usage()[0].refused or not tenant.usage()[0].gpu_s:
            await asyncio.sleep(0.02)
    tenant.change((lab.portion(50, 4096),), 60)
    await lab.until_logged("more")
    assert tenant.usage()[0].memory >= 1112 * MIB and (tenant.portions[0].share, tenant.limit) == (50, 60)
    async with asyncio.timeout(WAIT_S):
        while not 50 <= tenant.shares_now()[0] <= 60:
            await asyncio.sleep(0.02)


async def test_whole_gpu_is_guarded_without_quota(lab: Lab) -> None:
    code = (
        "print('total', driver.free_memory()[1], flush=True); driver.out('cuMemAlloc_v2', 2048 << 20); time.sleep(60)"
    )
    await lab.program(code, gpus=(Portion(lab.uuid, 100, 16_384),))
    await lab.until_logged(f"total {16_384 * MIB}")
    (tenant,) = lab.watched.guard.tenants
    assert lab.world.calls("cuMemAlloc_v2") and tenant.shares_now() == (100.0,)


async def test_gate_follows_lease(lab: Lab) -> None:
    """Also where the program is not stopped: here its own engine's stop is taken back at once."""
    await lab.program(LAUNCHES)
    await lab.beyond(3)
    guest, (tenant,) = lab.guests[-1], lab.watched.guard.tenants
    for _ in range(2):
        guest.allow_until(boot_s() + 0.2)
        async with asyncio.timeout(WAIT_S):
            while not tenant.gate_closed:
                await asyncio.sleep(0.01)
        guest._guest.allow_until(math.inf)  # type: ignore[attr-defined]
        steps = await lab.steps_when_stopped()
        guest.allow_until(math.inf)
        assert not tenant.gate_closed
        await lab.beyond(steps + 3)


async def test_kill_closes_gate_first(
    lab: Lab, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    await lab.program(LAUNCHES)
    await lab.beyond(3)
    inner, (tenant,), closed = lab.guests[-1]._guest, lab.watched.guard.tenants, list[bool]()  # type: ignore[attr-defined]
    end = inner.kill

    async def kill() -> None:
        closed.append(tenant.gate_closed)
        await end()

    monkeypatch.setattr(inner, "kill", kill)
    async with asyncio.timeout(WAIT_S):
        await lab.guests[-1].kill()
        await lab.guests[-1].kill()  # again is no error
    assert closed == [True, True]
    said = [message for message in caplog.messages if message.startswith("job jjjjjjjj: ")]
    assert re.fullmatch(r"job j{8}: GPU gate closed in \d+ µs: it is killed", said[0])
    assert (
        re.fullmatch(r"job j{8}: its processes are gone \d+ ms after its GPU gate closed", said[1]) and len(said) == 2
    )
    assert lab.watched.guard.tenants == []


async def test_memory_of_killed_process_returns_to_job(lab: Lab) -> None:
    await lab.program(
        "held = \"driver.out('cuMemAlloc_v2', 256 << 20); os.kill(os.getpid(), 9)\"\n"
        "code = os.spawnl(os.P_WAIT, sys.executable, 'python', *sys.argv[:2], held)\n"
        "print('killed' if code == -9 else code, flush=True); time.sleep(60)"
    )
    await lab.until_logged("killed")
    (tenant,) = lab.watched.guard.tenants
    assert tenant.usage()[0].peak >= 256 * MIB
    async with asyncio.timeout(WAIT_S):
        while tenant.usage()[0].memory >= 256 * MIB:
            await asyncio.sleep(0.05)


async def test_job_that_damages_page_is_stopped(lab: Lab) -> None:
    await lab.program(
        "page = os.environ['MESH_GUARD_DIR'] + '/job'\n"
        "os.truncate(page, 0); os.truncate(page, 1 << 24); print('spoilt', flush=True); time.sleep(60)"
    )
    async with asyncio.timeout(WAIT_S):
        while not lab.watched.warned:
            await asyncio.sleep(0.05)
    (tenant,) = lab.watched.guard.tenants
    assert "bypasses the guard: its programs have changed the length of the page" in lab.watched.warned[0]
    assert tenant.gate_closed and (tenant.guarded.pages.directory / "job").stat().st_size < 1 << 20
    await lab.guests[-1].kill()
    assert lab.watched.guard.tenants == [] and len(lab.watched.used) == 1


async def test_guard_precedes_job_preload(lab: Lab) -> None:
    env = {"LD_PRELOAD": "/nowhere/mine.so", "MESH_GUARD_DIR": "/nowhere"}
    await lab.start("sh", "-c", 'echo "[$LD_PRELOAD] $MESH_GUARD_DIR"', gpus=(lab.portion(),), env=env)
    log = await lab.end()
    names = ("libcuda.so.1", "libnvidia-ml.so.1", "libcuda.so", "libnvidia-ml.so")
    guard = ":".join(rf"/\S+/{name}" for name in names)
    assert re.search(rf"\[{guard}:/nowhere/mine.so\] /\S+/pages/j+-0\n", log)
    await lab.start("sh", "-c", 'echo "no GPU [$LD_PRELOAD$MESH_GUARD_DIR]"')
    assert "no GPU []" in await lab.end()


REACHES = """
for file in $(echo $LD_PRELOAD | tr : ' ') $MESH_GUARD_DIR/policy; do
  cat $file > /dev/null && echo reads
  true >> $file && echo writes
  rm -f $file && echo removes
done
true >> $MESH_GUARD_DIR/job && echo its page
grep -c /libcuda.so.1 /proc/self/maps
"""


async def test_sandboxed_guest_writes_neither_the_guard_nor_its_policy(lab: Lab) -> None:
    """The guard's libraries are preloaded by the guests of other users, too."""
    pages, libraries = lab.root.parent / "pages", built().cuda.parent
    sandbox = Sandbox(lab.root.parent / "home", [pages, libraries.parent], os.environ)
    inner = ProcessEngine(sandbox=sandbox)
    if not (await inner.availability()).isolation.startswith("its own process, mount"):
        pytest.skip("no mount namespaces here")
    lab.engine = GuardedEngine(inner, lab.watched.guard)
    before = {file: file.read_bytes() for file in libraries.iterdir()}
    (lab.root.parent / "home").mkdir()
    lines = (await lab.output(REACHES, gpus=(lab.portion(),))).splitlines()
    assert lines.count("reads") == 5 and not {"writes", "removes"} & set(lines), lines
    assert "its page" in lines and lines[-1] != "0", "it writes its own page, and has loaded the guard"
    assert before == {file: file.read_bytes() for file in libraries.iterdir()}
    await inner.close()


async def test_share_never_runs_unguarded(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    stranger = Portion("GPU-00000000-0000-0000-0000-000000000001", 30, 1024)
    with pytest.raises(EngineError, match="share of a GPU could not be enforced"):
        await lab.start("true", gpus=(stranger,))
    guest = await lab.start("true", gpus=(Portion(stranger.uuid, 100, 1024),))
    assert (await guest.wait()).code == 0 and "is not guarded" in caplog.text
    assert lab.watched.guard.tenants == []


async def test_failed_start_leaves_no_tenant(lab: Lab) -> None:
    with pytest.raises(EngineError):
        await lab.start("no-such-command", gpus=(lab.portion(),))
    assert lab.watched.guard.tenants == [] and os.listdir(lab.root.parent / "pages") == []  # noqa: PTH208


async def test_start_without_room_leaves_no_tenant(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_room(tenant: Tenant, wanted: Callable[[], bool]) -> None:
        raise EngineError("GPU memory lent to other jobs was not returned in time")

    monkeypatch.setattr(lab.watched.guard, "make_room", no_room)
    with pytest.raises(EngineError, match="not returned"):
        await lab.start("true", gpus=(lab.portion(),))
    assert lab.watched.guard.tenants == []


LOOK = """
cat /proc/self/mounts
mv /run/mesh/guard/policy /tmp/policy 2> /dev/null || echo kept
dd if=/mesh/work/nothing of=/run/mesh/guard/job conv=notrunc 2> /dev/null && echo writable
env -i FAKE_GPU_WORLD=/mesh/work/world /bin/quota
"""


@pytest.fixture
def quota(tmp_path: Path) -> Path:
    """Compile the program of the next tests."""
    program, source = tmp_path / "quota", Path(__file__).parent / "quota.c"
    subprocess.run(
        [*find_compiler(), "-std=c11", source, "-o", program, "-ldl", "-Wl,--no-as-needed", "-lm"], check=True
    )
    return program


async def until_limited(lab: Lab, mounts: Collection[Mount]) -> None:
    """Wait for what the guest says of its quota, and compare it."""
    await lab.until_logged("total")
    assert lab.log.splitlines()[-3:] == ["kept", "writable", f"total {1024 * MIB}, half 0, more 2"]
    modes = {fields[1]: fields[3][:2] for fields in map(str.split, lab.log.splitlines()) if len(fields) == 6}
    for mount in mounts:
        assert modes[str(mount.target)] == ("ro" if mount.read_only else "rw")
    (tenant,) = lab.watched.guard.tenants
    (use,) = tenant.usage()
    assert 512 * MIB <= use.memory <= 1024 * MIB and (use.processes, use.refused) == (1, 1)


@pytest.mark.docker
async def test_container_cannot_change_quota(lab: Lab, quota: Path) -> None:
    """Its programs load the guard by the loader's own file, without a variable. The engine is told of no device: there is no
    runtime of NVIDIA's here to ask for one."""
    (lab.root / "work" / "nothing").touch()
    lab.world.path.rename(lab.root / "work" / "world")
    tenant = lab.watched.guard.admit(lab.launch("true", gpus=(lab.portion(),)), own_root=True)
    assert tenant is not None
    engine = DockerEngine(f"test-{os.getpid()}")
    try:
        await engine.availability()
        image = busybox_image(quota)
        guest = await engine.start(lab.launch("sh", "-c", LOOK, image=image, injection=tenant.injection))
        await until_limited(lab, tenant.injection.mounts)
        await guest.kill()
        async with asyncio.timeout(WAIT_S):
            while tenant.usage()[0].memory:
                await asyncio.sleep(0.05)
    finally:
        await engine.close()


@pytest.mark.apptainer
async def test_apptainer_guest_cannot_change_quota(
    lab: Lab, quota: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sees the fake driver. A device file that Apptainer shows nobody stands for that of its GPU."""
    monkeypatch.setattr(gpus, "device_files", lambda uuids: [Path("/dev/full")] if uuids == (lab.uuid,) else [])
    (lab.root / "work" / "nothing").touch()
    lab.world.path.rename(lab.root / "work" / "world")
    image = unpacked(tmp_path / "images", quota)
    inner = apptainer_engine(tmp_path)
    lab.engine = GuardedEngine(inner, lab.watched.guard)
    try:
        wanted = {"image": "busybox", "image_id": image, "gpus": (lab.portion(),)}
        await lab.start("sh", "-c", f"ls /dev; echo libs $LD_LIBRARY_PATH; {LOOK}", **wanted)
        (tenant,) = lab.watched.guard.tenants
        await until_limited(lab, tenant.injection.mounts)
        seen = set(lab.log.splitlines())
        await lab.guests[-1].kill()
        assert lab.watched.guard.tenants == []
        assert {"full", "libs /.singularity.d/libs"} <= seen
    finally:
        await inner.close()

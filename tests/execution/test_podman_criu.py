"""A guest that Podman saves continues in a container of another Podman, with this container's limits."""

import asyncio
import math
import os
import shutil
from pathlib import Path

import docker
import pytest

from mesh.execution.docker.engine import DockerEngine, DockerGuest
from mesh.execution.guest_registry import GuestRegistry
from mesh.execution.killswitch import open_switch
from mesh.util.cgroups import limits_of
from tests.container_images import import_busybox
from tests.execution.bench import WAIT_S, Bench
from tests.podman import podman_service

STEPS = 150
# The number is in memory, in an open file, in /tmp and in /dev/shm.
COUNT = f"""
i=0; exec 3>trace
while [ $i -lt {STEPS} ]; do i=$((i + 1)); echo $i >&3; echo $i > /tmp/i; echo $i > /dev/shm/i; echo step $i; sleep 0.1; done
cat /tmp/i /dev/shm/i > $MESH_OUT_DIR/ends
"""


@pytest.mark.podman_criu
@pytest.mark.timeout(900)
async def test_saved_guest_continues_in_another_podman(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with podman_service(False) as one, podman_service(False) as two:
        monkeypatch.setenv("DOCKER_HOST", one.host)
        image = import_busybox()
        source, target = (docker.DockerClient(service.host, timeout=600) for service in (one, two))
        target.images.load(b"".join(source.api.get_image(image)))
        source.close()
        target.close()
        benches = []
        for name, service in (("one", one), ("two", two)):
            monkeypatch.setenv("DOCKER_HOST", service.host)
            (tmp_path / name).mkdir()
            switch = open_switch(GuestRegistry(tmp_path / f"{name}-guests"), tmp_path / f"{name}.sock")
            engine = DockerEngine(f"criu-{name}-{os.getpid()}", switch, system=True)
            async with asyncio.timeout(WAIT_S):
                while not (await engine.availability()).system.platform:
                    await asyncio.sleep(0.1)
            benches.append((Bench(engine, tmp_path / name, image), switch))
        (first, _), (second, _) = benches
        try:
            guest = await first.shell(COUNT, system=True, memory_mib=100, pids=40)
            await first.until_logged("step 5\n")
            guest.allow_until(0.0)
            async with asyncio.timeout(WAIT_S):
                while not await guest.stands_still():
                    await asyncio.sleep(0.02)
            at = int((first.root / "work" / "trace").read_text().split()[-1])
            await guest.dump(tmp_path / "dump")
            assert await guest.stands_still(), "its files must not change before they are copied"
            shutil.copytree(first.root / "work", second.root / "work", dirs_exist_ok=True)
            await guest.kill()
            assert int((first.root / "work" / "trace").read_text().split()[-1]) == at

            moved = await second.shell(COUNT, system=True, memory_mib=100, pids=40, dump=str(tmp_path / "dump"))
            assert isinstance(moved, DockerGuest) and moved._groups
            limits = limits_of(moved._groups)
            assert math.inf in limits.values() or (limits["memory.max"], limits["pids.max"]) == (100 << 20, 40)
            async with asyncio.timeout(5 * WAIT_S):
                assert (await moved.wait()).code == 0
            assert (second.root / "work" / "trace").read_text().split() == [str(step + 1) for step in range(STEPS)]
            assert (second.root / "out" / "ends").read_text() == f"{STEPS}\n{STEPS}\n"
            told = [int(line.split()[1]) for line in second.log.splitlines()]
            assert told == list(range(told[0], STEPS + 1)) and told[0] >= at, (
                "output is lost before it is attached to, not later"
            )
        finally:
            for bench, switch in benches:
                for guest in bench.guests:
                    await guest.kill()
                await bench.engine.close()
                switch.close()

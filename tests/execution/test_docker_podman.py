"""The docker engine on Podman's Docker API: the job contract, leases and kills."""

import asyncio
import math
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from mesh.execution.docker.engine import DockerEngine
from mesh.execution.engine import BadCommand, BadImage
from mesh.execution.guest_registry import GuestRegistry
from mesh.execution.killswitch import BY_OWNER, open_switch
from mesh.network.egress import policy_of
from mesh.util.cgroups import limits_of
from tests.container_images import changed_image, import_busybox
from tests.execution.bench import LOOP, WAIT_S, Bench, processes_with
from tests.execution.network_guest import CURL, see_what_it_reaches
from tests.podman import podman_service

AS_ROOT = pytest.param(False, marks=pytest.mark.podman, id="root")
ROOTLESS = pytest.param(True, marks=pytest.mark.rootless, id="rootless")


@pytest.fixture(scope="module", params=[AS_ROOT, ROOTLESS])
def podman(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """Yield the address of a service's socket, and an image."""
    with podman_service(rootless=request.param) as service, pytest.MonkeyPatch.context() as patch:
        patch.setenv("DOCKER_HOST", service.host)
        yield service.host, import_busybox()


@pytest.fixture
async def bench(podman: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    address, image = podman
    monkeypatch.setenv("DOCKER_HOST", address)
    switch = open_switch(GuestRegistry(tmp_path / "guests"), tmp_path / "kill.sock")
    engine = DockerEngine(f"podman-{os.getpid()}", switch)
    assert (await engine.availability()).detail.startswith("Podman ")
    (tmp_path / "attempt").mkdir()
    bench = Bench(engine, tmp_path / "attempt", image)
    yield bench
    for guest in bench.guests:
        await guest.kill()
    await engine.close()
    switch.close()


async def test_podman_guest_has_contract_and_few_rights(bench: Bench) -> None:
    script = (
        "env; pwd; id; cat /proc/self/status; touch /bin/x || echo read-only; ls /sys/class/net; "
        "echo kept > $MESH_OUT_DIR/file; busybox df -k /dev/shm; exit 7"
    )
    guest = await bench.shell(script, memory_mib=128, shm_mib=32)
    async with asyncio.timeout(WAIT_S):
        assert (await guest.wait()).code == 7
    said = bench.log
    assert "MESH_CKPT_DIR=/mesh/ckpt" in said and "/mesh/work\n" in said and "uid=0" not in said
    assert "CapEff:\t0000000000000000" in said and "NoNewPrivs:\t1" in said and "Seccomp:\t2" in said
    assert "read-only" in said and "eth0" not in said and (bench.root / "out" / "file").read_text() == "kept\n"
    shm = next(line.split() for line in said.splitlines() if line.endswith("/dev/shm"))
    assert int(shm[1]) == 32 << 10
    with pytest.raises(BadImage):
        await bench.start("true", image="no/such:image")


async def test_podman_guest_has_volumes_of_its_image_in_memory(bench: Bench) -> None:
    said = await bench.output("cat /proc/mounts; echo done", image=changed_image(str(bench.image), "VOLUME /data"))
    assert "done" in said and any(line.startswith("tmpfs /data tmpfs ") for line in said.splitlines())


async def test_podman_names_a_program_that_the_image_lacks(bench: Bench) -> None:
    """Podman looks for it when its output is attached to; to try again elsewhere would not help."""
    with pytest.raises(BadCommand, match="'no-such-command' cannot run in image") as failed:
        await bench.start("no-such-command")
    assert failed.value.exit_code == 127


async def test_podman_guest_reads_its_environment_alone(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "env").mkdir()
    text = await bench.output("echo $PATH; touch $VIRTUAL_ENV/new && echo written", environment=str(tmp_path / "env"))
    assert text.startswith("/mesh/env/bin:") and "written" not in text and not list((tmp_path / "env").iterdir())


async def test_podman_guest_gets_notice(bench: Bench) -> None:
    guest = await bench.shell(f"trap 'echo saved; exit 85' TERM; echo ready; {LOOP}")
    await bench.until_logged("ready")
    async with asyncio.timeout(WAIT_S):
        while not await guest.catches_term():
            await asyncio.sleep(0.02)
        assert await guest.terminate() and (await guest.wait()).code == 85


async def test_podman_guest_stops_after_lease_and_dies_for_owner(bench: Bench) -> None:
    mark = f"{time.time_ns()}"[-8:]
    guest = await bench.shell(f"(sleep 9{mark} &); echo ready; {LOOP}")
    await bench.until_logged("ready")
    guest.allow_until(0.0)
    async with asyncio.timeout(WAIT_S):
        while not await guest.stands_still():
            await asyncio.sleep(0.02)
    switch = bench.engine._switch  # type: ignore[attr-defined]
    (struck,) = switch.kill_all().result(WAIT_S)
    assert struck.left == () and struck.processes >= 1 and not processes_with(mark)
    async with asyncio.timeout(WAIT_S):
        end = await guest.wait()
    assert (end.code, end.fault) == (137, BY_OWNER)


async def test_podman_guest_is_limited_by_its_groups(bench: Bench) -> None:
    guest = await bench.shell(f"echo ready; {LOOP}", memory_mib=100, cpus=0.5, pids=40)
    await bench.until_logged("ready")
    limits = limits_of(guest._groups)  # type: ignore[attr-defined]
    if not guest._groups or math.inf in limits.values():  # type: ignore[attr-defined]
        pytest.skip("this machine has control groups of version 1")
    assert limits == {"memory.max": 100 << 20, "memory.swap.max": 0, "pids.max": 40, "cpu.max": 0.5}


async def test_podman_guest_over_memory_limit_ends(bench: Bench) -> None:
    guest = await bench.shell("tail /dev/zero; exit $?", memory_mib=64)
    async with asyncio.timeout(60):
        end = await guest.wait()
    assert end.oom or end.code == 137


async def test_podman_offers_no_network_without_enforcement(
    podman: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Podman's firewall has no chain for the rules of others, and its bridges bypass the chain of Docker."""
    monkeypatch.setenv("DOCKER_HOST", podman[0])
    engine = DockerEngine(f"podman-{os.getpid()}-n", policy=policy_of("campus", ()))
    answer = await engine.availability()
    assert not answer.ok and "could not be kept to the campus network only" in answer.detail
    await engine.close()


@pytest.mark.parametrize("podman", [AS_ROOT], indirect=True)  # only root enters a container's network
async def test_podman_guest_reaches_its_hosts_alone(bench: Bench) -> None:
    await see_what_it_reaches(bench, import_busybox(CURL))

"""The docker engine on Podman's Docker API: the job contract, leases and kills."""

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from mesh.execution.docker.engine import DockerEngine
from mesh.execution.engine import BadImage
from mesh.execution.guest_registry import GuestRegistry
from mesh.execution.killswitch import BY_OWNER, open_switch
from mesh.network.egress import policy_of
from tests.container_images import import_busybox
from tests.execution.bench import LOOP, WAIT_S, Bench, processes_with, wait_until
from tests.execution.network_guest import CURL, see_what_it_reaches

pytestmark = pytest.mark.podman
CONFIGURATION = """
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
"""


@pytest.fixture(scope="module")
def podman() -> Iterator[tuple[str, str]]:
    """Start a Podman service with its own storage; yield the address of its socket, and an image."""
    root = Path(tempfile.mkdtemp(prefix="mesh-podman-"))
    (root / "containers.conf").write_text(CONFIGURATION)
    command = ["podman", "--root", f"{root}/root", "--runroot", f"{root}/run"]
    env = {**os.environ, "CONTAINERS_CONF": f"{root}/containers.conf"}
    service = ["system", "service", "--time=0", f"unix://{root}/s"]
    with (root / "log").open("wb") as log:
        process = subprocess.Popen([*command, *service], stdout=log, stderr=log, env=env, cwd=root)
    patch = pytest.MonkeyPatch()
    try:
        wait_until(lambda: answers(root / "s"), "podman to answer")
        patch.setenv("DOCKER_HOST", f"unix://{root}/s")
        yield f"unix://{root}/s", import_busybox()
    finally:
        patch.undo()
        subprocess.run([*command, "rm", "-a", "-f", "-t", "0"], env=env, capture_output=True, check=False)
        process.terminate()
        process.wait(WAIT_S)
        for mounted in (root / "root" / "overlay", root / "root"):
            subprocess.run(["umount", "-l", mounted], capture_output=True, check=False)
        shutil.rmtree(root, ignore_errors=True)


def answers(path: Path) -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        client.sendall(b"GET /_ping HTTP/1.0\r\n\r\n")
        return b"200 OK" in client.recv(4096)
    return False


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
    assert struck.left == () and struck.processes >= 2 and not processes_with(mark)
    async with asyncio.timeout(WAIT_S):
        end = await guest.wait()
    assert (end.code, end.fault) == (137, BY_OWNER)


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


async def test_podman_guest_reaches_its_hosts_alone(bench: Bench) -> None:
    await see_what_it_reaches(bench, import_busybox(CURL))

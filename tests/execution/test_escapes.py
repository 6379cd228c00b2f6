"""Escape attempts of a hostile program in a container, on a real engine: all fail, and the host is unchanged."""

import asyncio
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import docker
import pytest

from mesh.execution.ceilings import Ceilings
from mesh.execution.docker.engine import DockerEngine
from mesh.execution.engine import EngineError
from mesh.execution.killswitch import KillSwitch
from mesh.execution.limits import BoundedEngine
from mesh.network.edge import Edge
from mesh.network.egress import Policy, policy_of, tag_of
from mesh.util.processes import user_limits
from tests.cleanup import cleanup
from tests.container_images import busybox_image, changed_image
from tests.execution.bench import WAIT_S, Bench, processes_with, wait_until

pytestmark = pytest.mark.docker
MEMORY_MIB, PIDS = 256, 64


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    engine = BoundedEngine(DockerEngine(f"escape-{os.getpid()}"), Ceilings(MEMORY_MIB, PIDS, disk_mib=64))
    assert (await engine.availability()).ok
    bench = Bench(engine, tmp_path, busybox_image())
    yield bench
    for guest in bench.guests:
        await guest.kill()
    await engine.close()


def volumes() -> set[str]:
    client = docker.from_env()
    try:
        return {volume.id for volume in client.volumes.list()}
    finally:
        client.close()


async def test_container_cannot_write_to_host(bench: Bench) -> None:
    script = """
    for path in / /bin/x /etc/x /proc/sys/kernel/core_pattern /proc/sys/kernel/hostname /proc/sysrq-trigger \
        /sys/kernel/uevent_helper /sys/fs/cgroup/memory/memory.limit_in_bytes /proc/1/root/x /dev/x /mesh/x; do
        (echo escaped > $path/x || echo escaped > $path) 2>/dev/null && echo "WROTE $path"
    done
    busybox mknod /tmp/disk b 254 0 2>/dev/null && echo "WROTE a device"
    busybox mknod $MESH_OUT_DIR/disk b 254 0 2>/dev/null && echo "WROTE a device"
    busybox chroot / true 2>/dev/null && echo "WROTE a root"
    busybox hostname escaped 2>/dev/null && echo "WROTE a name"
    echo done
    """
    said = await bench.output(script)
    assert "done" in said and "WROTE" not in said


async def test_volumes_of_an_image_are_in_memory_and_leave_nothing(bench: Bench) -> None:
    """Regression: what a guest wrote to one was counted by no limit, and stayed on the host's disk."""
    places = ("/bin/../data/", "/tmp/inner", "/mesh/out", "/tmp")
    image = changed_image(str(bench.image), *(f"VOLUME {place}" for place in places))
    before = volumes()
    said = await bench.output(
        "cat /proc/mounts; echo kept > /mesh/out/file; busybox touch /data/x && echo done", image=image
    )
    mounts = dict(line.split(" ", 2)[1::-1] for line in said.splitlines() if line.startswith(("tmpfs ", "/dev/")))
    assert {mounts[place] for place in ("/data", "/tmp", "/tmp/inner")} == {"tmpfs"} and "done" in said
    assert (bench.root / "out" / "file").read_text() == "kept\n" and volumes() == before


async def test_container_to_which_its_engine_gives_a_volume_does_not_run(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DockerEngine, "_config_of", lambda *asked: {})
    before = volumes()
    with pytest.raises(EngineError, match="gave it a volume, which no limit counts: /data"):
        await bench.shell("echo ran; sleep 600", image=changed_image(str(bench.image), "VOLUME /data"))
    assert volumes() == before


async def test_health_check_of_an_image_does_not_run(bench: Bench) -> None:
    """Its process is a child of the engine's, so it would be none of the guest's that are counted and audited."""
    image = changed_image(str(bench.image), "HEALTHCHECK --interval=1s CMD echo ran >> $MESH_OUT_DIR/ran")
    assert "done" in await bench.output("sleep 3; echo done", image=image)
    assert not (bench.root / "out" / "ran").exists()


async def test_container_cannot_gain_rights(bench: Bench) -> None:
    script = """
    busybox unshare -U true 2>/dev/null && echo "GOT a user namespace"
    busybox unshare -m true 2>/dev/null && echo "GOT a mount namespace"
    busybox unshare -n true 2>/dev/null && echo "GOT a network namespace"
    busybox nsenter -t 1 -m true 2>/dev/null && echo "GOT a namespace"
    busybox cp /bin/busybox /tmp/root && busybox chmod 6755 /tmp/root && busybox chown 0:0 /tmp/root 2>/dev/null && echo GOT
    busybox su -c true 2>/dev/null && echo "GOT root"
    busybox nice -n -20 true 2>/dev/null && echo "GOT priority"
    busybox dmesg >/dev/null 2>&1 && echo "GOT the kernel's log"
    busybox insmod /tmp/x 2>/dev/null && echo "GOT a module"
    ulimit -Hn 9999999 2>/dev/null && echo "GOT files"
    cat /proc/self/status; busybox id; busybox grep -E 'core file|pending|msgqueue' /proc/self/limits
    """
    said = await bench.output(script)
    assert "GOT" not in said and "uid=0" not in said and "gid=0" not in said
    for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert f"{name}:\t0000000000000000" in said
    assert "NoNewPrivs:\t1" in said and "Seccomp:\t2" in said
    for limit, kind in (("pending signals", resource.RLIMIT_SIGPENDING), ("msgqueue size", resource.RLIMIT_MSGQUEUE)):
        assert re.search(rf"Max {limit} +{user_limits()[kind]} ", said), (
            "the kernel counts them for all of a user's programs"
        )
    assert re.search(r"Max core file size +1 +1 ", said), "with 0, a dump could be piped to a handler of the host"


async def test_container_cannot_mount(bench: Bench) -> None:
    script = """
    busybox mount -t tmpfs none /tmp 2>/dev/null && echo MOUNTED
    busybox mount -t proc none /tmp 2>/dev/null && echo MOUNTED
    busybox mount -o remount,rw / 2>/dev/null && echo MOUNTED
    busybox mount --bind / /tmp 2>/dev/null && echo MOUNTED
    busybox umount /mesh/ctl 2>/dev/null && echo MOUNTED
    busybox umount -l /proc 2>/dev/null && echo MOUNTED
    cat /proc/self/mountinfo; echo done
    """
    said = await bench.output(script)
    assert "done" in said and "MOUNTED" not in said
    mounted = [line.split()[4] for line in said.splitlines() if " - " in line]
    assert not any(path.startswith(("/host", "/var/run", "/run", "/root", "/home")) for path in mounted)


async def test_container_cannot_reach_host_processes(bench: Bench) -> None:
    own = subprocess.Popen(["sleep", "600"])
    try:
        script = f"""
        ls /proc; kill -9 {own.pid} 2>/dev/null && echo KILLED; kill -9 {os.getpid()} 2>/dev/null && echo KILLED
        for pid in 1 {own.pid}; do
            cat /proc/$pid/mem >/dev/null 2>&1 && echo READ; cat /proc/$pid/environ 2>/dev/null
            (echo x > /proc/$pid/mem) 2>/dev/null && echo WROTE; ls /proc/$pid/fd 2>/dev/null
        done
        kill -9 -1 2>/dev/null; echo done
        """
        said = await bench.output(script)
        assert "KILLED" not in said and "READ" not in said and "WROTE" not in said and own.poll() is None
        assert sum(name.isdigit() for name in said.split()) <= 12
    finally:
        own.kill()
        own.wait()


async def test_container_finds_no_engine_socket(bench: Bench) -> None:
    said = await bench.output(
        "busybox find / -xdev -type s 2>/dev/null; busybox find /mesh /run /var -type s; echo done"
    )
    assert [line for line in said.splitlines() if line.startswith("/")] == [] and "done" in said
    assert "DOCKER" not in await bench.output("env")


async def test_fork_bomb_stays_within_pids_limit(bench: Bench) -> None:
    mark = f"{time.time_ns()}"[-8:]
    guest = await bench.shell(f"f() {{ sleep 7{mark} & f; }}; while :; do (f); done")
    async with asyncio.timeout(WAIT_S):
        while len(processes_with(f"7{mark}")) < PIDS // 2:
            await asyncio.sleep(0.05)
    for _ in range(10):
        assert len(processes_with(f"7{mark}")) <= PIDS and subprocess.run(["true"], check=False).returncode == 0
        await asyncio.sleep(0.05)
    begun = time.monotonic()
    await guest.kill()
    assert not processes_with(f"7{mark}") and time.monotonic() - begun < WAIT_S


@pytest.mark.parametrize(
    "script",
    [
        "tail /dev/zero",
        "dd if=/dev/zero of=/dev/shm/x bs=1M count=4000; dd if=/dev/zero of=/tmp/x bs=1M count=4000; tail /dev/zero",
        "for n in 1 2 3 4 5 6 7 8; do tail /dev/zero & done; wait",
    ],
)
async def test_memory_bomb_stays_within_memory_limit(bench: Bench, script: str) -> None:
    before = available_mib()
    guest = await bench.shell(f"{script}; echo $? survived")
    least = before
    end = asyncio.create_task(guest.wait())
    async with asyncio.timeout(60):
        while not end.done():
            least = min(least, available_mib())
            await asyncio.wait([end], timeout=0.05)
    assert before - least < 8 * MEMORY_MIB, "8 times the limit leaves room for other programs"


async def test_container_cannot_fill_disk(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mesh.execution.limits.LOOK_S", 0.05)
    for script in ("dd if=/dev/zero of=$MESH_CKPT_DIR/x bs=1M", "while :; do dd if=/dev/zero bs=1M count=8; done"):
        free = shutil.disk_usage(bench.root).free
        guest = await bench.shell(f"{script}; while :; do sleep 0.05; done")
        async with asyncio.timeout(60):
            end = await guest.wait()
        assert end.code == 137 and "its limit on this node" in end.detail
        assert free - shutil.disk_usage(bench.root).free < 20 << 30
        shutil.rmtree(bench.root / "ckpt")
        (bench.root / "ckpt").mkdir()
        (bench.root / "log").unlink()


async def test_job_cannot_ask_above_ceiling(bench: Bench) -> None:
    with pytest.raises(EngineError, match="its owner lends"):
        await bench.shell("true", memory_mib=MEMORY_MIB + 1)
    said = await bench.output("busybox df -k /dev/shm; cat /proc/self/limits")
    shm = next(int(line.split()[1]) for line in said.splitlines() if line.endswith("/dev/shm"))
    assert shm == MEMORY_MIB // 2 << 10


def available_mib() -> int:
    line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    return int(line.split()[1]) >> 10


# --- the network


SWEEP = """
import sys, docker
from mesh.network.egress import Firewall, Policy, tag_of
from mesh.execution.docker.sweep import sweep_containers, sweep_networks
client, node = docker.from_env(), sys.argv[1]
sweep_containers(client, node)
sweep_networks(client, node)
Firewall(Policy(), tag_of(node)).sweep()
"""


def swept(node: str) -> str:
    """Register the removal of the node's containers, bridges and rules for a killed run; return the node."""
    cleanup().undo(sys.executable, "-c", SWEEP, node)
    return node


class Elsewhere:
    """A host in a network namespace with a server on a campus address and on an outside address.

    Both are in /30 networks (the outside one is in the benchmark range of RFC 2544), so no route of another host changes.
    The namespace ends with its first process, which ends with this one, even if the run is killed.
    """

    CAMPUS, OUTSIDE, NEAR, NEAR_OUTSIDE = "10.213.7.2", "198.18.213.2", "10.213.7.1", "198.18.213.1"
    _SERVER = (
        "until busybox ip link show dev eth0 >/dev/null 2>&1; do busybox usleep 10000; done; "
        f"for address in {CAMPUS} {OUTSIDE}; do busybox ip address add $address/30 dev eth0; done; "
        f"busybox ip link set eth0 up; busybox ip route add default via {NEAR}; "
        "exec busybox nc -ll -p 8077 -e echo elsewhere"
    )

    def __init__(self) -> None:
        self.link = f"me{os.getpid()}"
        server = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "sh", "-c", self._SERVER]
        self.server = subprocess.Popen(server, start_new_session=True)
        try:
            wait_until(self._apart, "a namespace of its own")
            for words in (
                f"ip link add {self.link} type veth peer name eth0 netns {self.server.pid}",
                f"ip address add {self.NEAR}/30 dev {self.link}",
                f"ip address add {self.NEAR_OUTSIDE}/30 dev {self.link}",
                f"ip link set {self.link} up",
            ):
                subprocess.run(words.split(), check=True, capture_output=True)
            wait_until(self._answers, "the server there to answer")
        except BaseException:
            self.close()
            raise

    def _apart(self) -> bool:
        return Path(f"/proc/{self.server.pid}/ns/net").readlink() != Path("/proc/self/ns/net").readlink()

    def _answers(self) -> bool:
        with suppress(OSError), socket.create_connection((self.CAMPUS, 8077), timeout=1.0) as connection:
            return connection.recv(100) == b"elsewhere\n"
        return False

    def close(self) -> None:
        self.server.kill()
        self.server.wait()
        subprocess.run(["ip", "link", "del", self.link], check=False, capture_output=True)


@pytest.fixture
def elsewhere() -> Iterator[Elsewhere]:
    elsewhere = Elsewhere()
    yield elsewhere
    elsewhere.close()


@pytest.fixture
def host_server() -> Iterator[int]:
    """Listen on all addresses of the host; yield the port."""
    with socket.create_server(("0.0.0.0", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    client, _ = server.accept()
                except OSError:
                    return
                client.sendall(b"host\n")
                client.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield int(server.getsockname()[1])
        server.shutdown(socket.SHUT_RDWR)
    thread.join()


TRIES = """
for try in "{campus} 8077" "{outside} 8077" "{near} {port}" "$(busybox ip route | busybox awk '/default/ {{print $3}}') {port}"
do
    echo "$try: $(busybox nc -w 3 $try </dev/null 2>/dev/null)"
done
echo done
"""


@pytest.mark.netns
@pytest.mark.parametrize(
    ("policy", "reached"),
    [
        (policy_of("none", ()), set()),
        (policy_of("campus", ()), {Elsewhere.CAMPUS}),
        (policy_of("list", ("198.18.213.0/30",)), {Elsewhere.OUTSIDE}),
    ],
)
async def test_container_reaches_only_allowed_networks(
    tmp_path: Path, elsewhere: Elsewhere, host_server: int, policy: Policy, reached: set[str]
) -> None:
    node = swept(f"egress-{os.getpid()}")
    engine = DockerEngine(node, KillSwitch(), policy)
    available = await engine.availability()
    assert available.ok and policy.words in available.isolation
    bench = Bench(engine, tmp_path, busybox_image())
    try:
        script = TRIES.format(campus=elsewhere.CAMPUS, outside=elsewhere.OUTSIDE, near=elsewhere.NEAR, port=host_server)
        said = await bench.output(script)
        answers = dict(line.split(": ", 1) for line in said.splitlines() if ": " in line)
        assert len(answers) == 4 and "done" in said
        assert {place.split()[0] for place, answer in answers.items() if answer} == reached
        assert {place.split()[0] for place, answer in answers.items() if answer == "elsewhere"} == reached
    finally:
        await engine.close()
    assert firewall_rules(node) == set(), "no firewall rule remains"
    assert networks(node) == []


@pytest.mark.netns
@pytest.mark.bpf
async def test_cut_applies_to_container_bridge(tmp_path: Path, elsewhere: Elsewhere) -> None:
    edge = Edge(Path(f"/run/campus-mesh/edge-test-{os.getpid()}"), cache=tmp_path / "programs")
    cleanup().undo("sh", "-c", f"umount -l {edge.directory}; rmdir {edge.directory}")
    edge.open()
    engine = DockerEngine(swept(f"cut-{os.getpid()}"), KillSwitch(), policy_of("campus", ()), edge)
    try:
        await engine.availability()
        bench = Bench(engine, tmp_path, busybox_image())
        ask = f'[ -n "$(busybox nc -w 1 {elsewhere.CAMPUS} 8077 </dev/null 2>/dev/null)" ]'
        script = f"n=0; while :; do n=$((n+1)); {ask} && echo $n reached || echo $n missed; sleep 0.05; done"
        guest = await bench.shell(script)
        await bench.until_logged("reached")
        assert edge.state().attached and edge.cut()
        await bench.until_logged("missed")
        edge.restore()
        missed = bench.log.rindex("missed")
        async with asyncio.timeout(WAIT_S):
            while "reached" not in bench.log[missed:]:
                await asyncio.sleep(0.02)
        await guest.kill()
    finally:
        await engine.close()
        standing = edge.state()
        edge.close()
    assert standing.attached == () and not edge.directory.exists()


@pytest.mark.netns
async def test_firewall_rules_are_repaired_and_swept(tmp_path: Path) -> None:
    node = swept(f"flush-{os.getpid()}")
    engine = DockerEngine(node, KillSwitch(), policy_of("campus", ()))
    await engine.availability()
    bench = Bench(engine, tmp_path, busybox_image())
    guest = await bench.shell("while :; do sleep 0.05; done")
    kept = firewall_rules(node)
    chain = next(line.split()[1] for line in kept if line.startswith("-N MESH-"))
    subprocess.run(["iptables", "-w", "-F", chain], check=True)
    bridge = chain.removeprefix("MESH-")
    subprocess.run(["iptables", "-w", "-D", "DOCKER-USER", "-i", bridge, "-j", chain], check=True)
    assert (await engine.availability()).ok and kept == firewall_rules(node)
    standby = DockerEngine(node, KillSwitch(), policy_of("campus", ()))
    await standby.availability()
    async with asyncio.timeout(WAIT_S):
        assert (await guest.wait()).code == 137
    await engine.close()
    await standby.close()
    assert firewall_rules(node) == set()


@pytest.mark.netns
async def test_no_container_starts_without_enforcement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = busybox_image()  # before the patch, which hides every program
    monkeypatch.setattr("mesh.network.egress.shutil.which", lambda *words, **options: None)
    engine = DockerEngine(f"no-{os.getpid()}", KillSwitch(), policy_of("campus", ()))
    answer = await engine.availability()
    assert not answer.ok and "iptables, which enforces the egress policy, is not installed" in answer.detail
    with pytest.raises(EngineError):
        await Bench(engine, tmp_path, image).shell("true")
    await engine.close()


def networks(node: str) -> list[object]:
    import docker

    client = docker.from_env()
    try:
        return list(client.networks.list(filters={"label": f"campus-mesh.node={node}"}))
    finally:
        client.close()


def firewall_rules(node: str) -> set[str]:
    """Return the rules of this node's bridges; other nodes use the same engine."""
    done = subprocess.run(["iptables", "-w", "-S"], capture_output=True, text=True, check=True)
    return {line for line in done.stdout.splitlines() if f"m{tag_of(node)}" in line}

"""The watchdog enforces leases and ends containers with their daemon, even if their engine hangs or is down."""

import asyncio
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from mesh.execution.docker import watchdog
from mesh.execution.docker.engine import DockerEngine
from mesh.execution.docker.freeze_lock import FreezeLock
from mesh.execution.docker.watchdog import Watchdog
from mesh.execution.guest_registry import LAPSED, GuestEntry, GuestRegistry
from mesh.execution.killswitch import BY_OWNER, KillSwitch
from mesh.util.boottime import boot_s
from mesh.util.isolated import isolated
from mesh.util.processes import Process, lives
from tests.container_images import import_busybox
from tests.dockerd import Dockerd, client_of, dockerd
from tests.execution.bench import WAIT_S, Bench, containers, processes_with, wait_until
from tests.execution.place import Place, entry, fresh_mark
from tests.podman import Podman, podman_service


@pytest.fixture(scope="module")
def engine_of_its_own() -> Iterator[Dockerd]:
    with dockerd(live=True) as engine:
        yield engine


@pytest.fixture
def own_dockerd(engine_of_its_own: Dockerd, monkeypatch: pytest.MonkeyPatch) -> Dockerd:
    """Return an engine that the test may stop and start again."""
    monkeypatch.setenv("DOCKER_HOST", engine_of_its_own.host)
    return engine_of_its_own


@pytest.fixture(
    params=[
        pytest.param("dockerd", marks=pytest.mark.dockerd),
        pytest.param("podman", marks=pytest.mark.podman),
        pytest.param("rootless", marks=pytest.mark.rootless),
    ]
)
def engine_that_hangs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Dockerd | Podman]:
    """Yield an engine that the test may stop for a while."""
    if request.param == "dockerd":
        yield request.getfixturevalue("own_dockerd")
        return
    with podman_service(rootless=request.param == "rootless") as service:
        monkeypatch.setenv("DOCKER_HOST", service.host)
        yield service


async def test_guests_die_while_engine_hangs(tmp_path: Path, engine_that_hangs: Dockerd | Podman) -> None:
    place = Place(tmp_path, "docker", import_busybox())
    mark = fresh_mark()
    try:
        await place.guest(mark + "1")
        await place.guest(mark + "2")
        place.bench.guests[1].allow_until(0.0)
        async with asyncio.timeout(WAIT_S):
            while not await place.bench.guests[1].stands_still():
                await asyncio.sleep(0.01)
        with engine_that_hangs.hanging():
            killed = await asyncio.to_thread(place.press)
            assert not processes_with(f"{mark}1") and not processes_with(f"{mark}2")
            assert isinstance(killed["killed"], list) and len(killed["killed"]) == 2
            async with asyncio.timeout(WAIT_S):
                ends = [await guest.wait() for guest in place.bench.guests]
            assert {(end.code, end.fault) for end in ends} == {(137, BY_OWNER)}, (
                "the end is known while the engine hangs"
            )
        await asyncio.to_thread(wait_until, lambda: not containers(place.label), "the containers to be removed")
    finally:
        await place.bench.engine.close()
        place.switch.close()


async def test_lease_is_enforced_while_engine_hangs(tmp_path: Path, engine_that_hangs: Dockerd | Podman) -> None:
    place = Place(tmp_path, "docker", import_busybox())
    ticks = tmp_path / "attempt" / "work" / "ticks"  # its log comes through the engine
    guest = await place.bench.shell("while :; do echo >> ticks; sleep 0.02; done")

    async def until_it_runs() -> None:
        before = ticks.stat().st_size if ticks.exists() else 0
        while not ticks.exists() or ticks.stat().st_size < before + 3:
            await asyncio.sleep(0.02)

    async def until_it_stands_still() -> None:
        while not await guest.stands_still():
            await asyncio.sleep(0.02)
        before = ticks.stat().st_size
        await asyncio.sleep(0.2)
        assert ticks.stat().st_size == before

    try:
        async with asyncio.timeout(WAIT_S):
            await until_it_runs()
            with engine_that_hangs.hanging():
                for _ in range(2):
                    guest.allow_until(boot_s() + 0.1)
                    await until_it_stands_still()
                    guest.allow_until(math.inf)
                    await until_it_runs()
            guest.allow_until(0.0)
            await until_it_stands_still()
            guest.allow_until(math.inf)
            await until_it_runs()
            await guest.kill()
    finally:
        await place.bench.engine.close()
        place.switch.close()


def test_unpausable_guest_dies_with_lease(tmp_path: Path, bystander: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    """Enforce the lease without an engine and without a control group to freeze."""
    monkeypatch.setattr(watchdog, "SILENT_S", 0.2)
    register = GuestRegistry(tmp_path)
    register.keep("key", entry(engine="docker", container="c" * 64, head=bystander))
    leases = watchdog.Leases(str(tmp_path / "none"), register, FreezeLock())
    leases.read(f"until {'c' * 64} {boot_s() + 60}\n".encode())
    leases.enforce()
    assert lives(bystander), "the lease has not ended"
    leases.read(f"until {'c' * 64} 1.0\n".encode())
    leases.enforce()
    assert lives(bystander), "the engine gets some time to return"

    def ended() -> bool:
        leases.enforce()
        return not lives(bystander)

    wait_until(ended, "it to be ended")
    assert register.drop("key") == LAPSED, "the daemon learns that the job is not at fault"


class Engine:
    """An engine that answers the watchdog, or does not, and a clock that stands still."""

    def __init__(self, directory: Path, bystander: Process, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.status = 99.0, 0  # 0: no answer
        self.asked: list[tuple[str, float]] = []
        self.killed: list[GuestEntry] = []
        self.alarms: list[float] = []
        self.register = GuestRegistry(directory)
        self.register.keep("key", entry(engine="docker", container="c", head=bystander))
        self.leases = watchdog.Leases("", self.register, FreezeLock())
        monkeypatch.setattr(watchdog, "boot_s", lambda: self.now)
        monkeypatch.setattr(watchdog, "_call", self._call)
        monkeypatch.setattr(watchdog, "run", self.killed.extend)
        monkeypatch.setattr(self.leases, "alarm", SimpleNamespace(clear=lambda: None, set=self.alarms.append))

    def _call(self, place: str, method: str, path: str, timeout_s: float) -> tuple[int, bytes]:
        self.asked.append((path, timeout_s))
        if not self.status:
            raise TimeoutError
        return self.status, b""

    def enforced(self, now: float, until: float | None = None) -> int:
        """Enforce the lease at this time; return how many questions the engine got."""
        self.now, before = now, len(self.asked)
        if until is not None:
            self.leases.read(f"until c {until}\n".encode())
        self.leases.enforce()
        return len(self.asked) - before


@pytest.fixture
def silent(tmp_path: Path, bystander: Process, monkeypatch: pytest.MonkeyPatch) -> Engine:
    return Engine(tmp_path, bystander, monkeypatch)


def test_guest_is_killed_after_three_seconds_without_an_answer(silent: Engine) -> None:
    assert silent.enforced(99.9, until=100.0) == 0 and silent.alarms == [100.0]
    assert silent.enforced(100.0) == 1 and silent.asked == [("/_ping", 0.5)] and silent.alarms[-1] == 101.0
    assert silent.enforced(100.4) == 0, "it would carry out each question once it is back"
    assert [silent.enforced(now) for now in (101.0, 102.0, 102.9)] == [1, 1, 1] and not silent.killed
    assert silent.enforced(103.0) == 0 and [guest.container for guest in silent.killed] == ["c"]
    assert silent.register.drop("key") == LAPSED


def test_answer_of_an_engine_ends_its_silence(silent: Engine) -> None:
    silent.enforced(100.0, until=100.0)
    silent.status = 500
    assert silent.enforced(102.0) == 2, "it answers that it cannot"
    silent.status = 0
    assert [silent.enforced(now) for now in (104.0, 106.9)] == [1, 1] and not silent.killed
    silent.enforced(107.0)
    assert silent.killed


@pytest.mark.parametrize("status", [204, 304, 404, 409])
def test_engine_is_asked_once_if_it_answers(silent: Engine, status: int) -> None:
    silent.status = status
    assert silent.enforced(100.0, until=100.0) == 2 and silent.asked[1] == ("/containers/c/pause", 1.0)
    assert silent.enforced(101.0) == 0 and silent.alarms[-1] == math.inf
    assert silent.enforced(102.0, until=200.0) == 2 and silent.asked[3] == ("/containers/c/unpause", 1.0)
    assert silent.enforced(103.0) == 0 and silent.alarms[-1] == 200.0 and not silent.killed


def test_engine_that_fails_is_asked_again(silent: Engine) -> None:
    silent.status = 500
    assert [silent.enforced(now, until=100.0) for now in (100.0, 101.0)] == [2, 2] and silent.alarms[-1] == 102.0
    silent.status = 204
    assert [silent.enforced(now) for now in (102.0, 103.0)] == [2, 0] and not silent.killed


def test_engine_that_was_silent_is_asked_for_ten_more_seconds(silent: Engine) -> None:
    """It may carry out an old request when that is wrong."""
    silent.enforced(100.0, until=100.0)
    silent.status = 204
    assert [silent.enforced(now) for now in (101.0, 102.0, 109.9, 110.0, 111.0)] == [2, 2, 2, 2, 0]
    silent.leases.read(b"gone c\n")
    assert silent.enforced(112.0) == 0 and silent.alarms[-1] == math.inf


async def watchdog_of(watchdog: Watchdog, old: int = 0) -> int:
    """Wait for a watchdog's process, other than this one."""
    async with asyncio.timeout(WAIT_S):
        while watchdog.problem or watchdog._process.pid == old:
            await asyncio.sleep(0.01)
    return watchdog._process.pid


async def test_watchdog_that_dies_is_replaced_and_knows_the_leases(tmp_path: Path, bystander: Process) -> None:
    """Without an engine and a control group, a watchdog kills a guest whose lease is over."""
    register = GuestRegistry(tmp_path / "guests")
    register.keep("key", entry(engine="docker", container="c" * 64, head=bystander))
    keeper = await Watchdog.start(str(tmp_path / "none"), "node", register)
    engine = DockerEngine("node")
    engine._watchdog = keeper
    try:
        keeper.allow_until("c" * 64, boot_s() + 5.0)
        first = await watchdog_of(keeper)
        os.kill(first, signal.SIGKILL)
        async with asyncio.timeout(WAIT_S):
            while not keeper.problem:
                await asyncio.sleep(0)
        assert "watchdog" in engine._problem
        await watchdog_of(keeper, first)
        assert not engine._problem
        await asyncio.to_thread(wait_until, lambda: not lives(bystander), "the next watchdog to keep the lease")
    finally:
        await engine.close()


def test_new_watchdog_wakes_and_stops_what_it_does_not_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leases, asked = watchdog.Leases("", None, FreezeLock()), list[tuple[str, bool]]()
    monkeypatch.setattr(leases, "_ask", lambda container, over: asked.append((container, over)) or True)
    for container, until in (("a" * 64, 1.0), ("b" * 64, boot_s() + 600)):
        leases.read(f"doubt {container}\nuntil {container} {until}\n".encode())
    leases.read(f"until {'c' * 64} {boot_s() + 600}\n".encode())
    for _ in range(2):
        leases.enforce()
    assert asked == [("a" * 64, True), ("b" * 64, False)], "each once; of a new container nothing is in doubt"


@pytest.mark.parametrize("slow", [False, True])
def test_podman_is_not_asked_where_the_group_can_be_frozen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: bool
) -> None:
    """It saves no container that it has paused. `slow`: the kernel freezes after the lease was checked."""
    container, state = "c" * 64, tmp_path / "freezer.state"
    state.write_text("THAWED")
    leases, asked = watchdog.Leases("", None, FreezeLock(), podman=True), list[bool]()
    monkeypatch.setattr(leases, "_entry", lambda container: ("key", entry(groups=(str(tmp_path),))))
    monkeypatch.setattr(leases, "_ask", lambda container, over: asked.append(over) or True)
    if slow:
        monkeypatch.setattr(watchdog.cgroups, "are_frozen", lambda groups: False)
    for until, wanted in ((1.0, "FROZEN"), (boot_s() + 600, "THAWED"), (1.0, "FROZEN")):
        leases.read(f"until {container} {until}\n".encode())
        leases.enforce()
        assert (state.read_text(), asked) == (wanted, [])
    state.unlink()
    leases.read(f"until {container} {boot_s() + 600}\n".encode())
    monkeypatch.setattr(watchdog.cgroups, "are_frozen", lambda groups: None)
    leases.enforce()
    assert asked == [False], "the engine can do what this process may not"


def test_slow_freeze_is_undone_by_a_renewed_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine refuses to pause, and the kernel has not frozen the group when the lease is renewed."""
    container, state = "c" * 64, tmp_path / "freezer.state"
    state.write_text("THAWED")
    leases = watchdog.Leases("", None, FreezeLock())
    monkeypatch.setattr(leases, "_entry", lambda container: ("key", entry(groups=(str(tmp_path),))))
    monkeypatch.setattr(leases, "_ask", lambda container, over: False)
    monkeypatch.setattr(watchdog.cgroups, "are_frozen", lambda groups: False)
    monkeypatch.setattr(watchdog, "run", lambda guests: pytest.fail("the kernel freezes it"))
    leases._silent_since = 0.0
    for until, wanted in ((1.0, "FROZEN"), (boot_s() + 600, "THAWED")):
        leases.read(f"until {container} {until}\n".encode())
        leases.enforce()
        assert state.read_text() == wanted
    state.write_text("as it was")
    leases.enforce()
    assert state.read_text() == "as it was", "nothing is in doubt any more"


async def test_watchdog_that_cannot_start_keeps_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "isolated", lambda *asked: ["/does/not/exist"])
    before = os.listdir("/proc/self/fd")  # noqa: PTH208
    for _ in range(3):
        with pytest.raises(FileNotFoundError):
            await Watchdog.start("", "node", None)
    assert len(os.listdir("/proc/self/fd")) <= len(before) + 1, "the loop may open one to watch children"  # noqa: PTH208


DUMPS = """
lock = freeze_lock.FreezeLock(int(sys.argv[1]))
with lock.own(sys.argv[2], 60):
    print("dumps", flush=True)
    sys.stdin.read(1)
print("done", flush=True)
sys.stdin.read(1)
"""


def test_watchdog_and_dump_exclude_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bystander: Process
) -> None:
    """Enforce an ended lease without an engine or a control group: the guest is ended unless a dump is running."""
    monkeypatch.setattr(watchdog, "SILENT_S", 0.0)
    container = "c" * 64
    register = GuestRegistry(tmp_path)
    register.keep("key", entry(engine="docker", container=container, head=bystander))
    freeze_lock = FreezeLock()
    leases = watchdog.Leases(str(tmp_path / "none"), register, freeze_lock)
    leases.read(f"until {container} 1.0\n".encode())
    command = [*isolated("mesh.execution.docker", "freeze_lock", DUMPS), str(freeze_lock.descriptor), container]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=(freeze_lock.descriptor,)
    ) as daemon:
        assert daemon.stdin is not None and daemon.stdout is not None
        assert daemon.stdout.readline() == "dumps\n"
        for _ in range(3):
            leases.enforce()
        assert lives(bystander), "a guest is not ended during its dump"
        print(file=daemon.stdin, flush=True)
        assert daemon.stdout.readline() == "done\n"
        wait_until(lambda: bool(leases.enforce() or not lives(bystander)), "its lease to be kept again")
        asks = [
            *isolated(
                "mesh.execution.docker",
                "freeze_lock",
                "sys.exit(not freeze_lock.FreezeLock(int(sys.argv[1])).take(sys.argv[2]))",
            )
        ]
        asks += [str(freeze_lock.descriptor), container]
        assert subprocess.run(asks, pass_fds=(freeze_lock.descriptor,), check=False).returncode == 1, (
            "no dump starts while the end of the guest is uncertain"
        )
        leases.read(f"gone {container}\n".encode())
        assert subprocess.run(asks, pass_fds=(freeze_lock.descriptor,), check=False).returncode == 0
        daemon.stdin.close()


DAEMON = """
import asyncio, sys
from pathlib import Path
from mesh.execution.docker.engine import DockerEngine
from mesh.execution.killswitch import open_switch
from mesh.execution.guest_registry import LAPSED, GuestRegistry
from tests.dockerd import Dockerd, client_of, dockerd
from tests.execution.bench import LOOP, Bench
async def main():
    root = Path(sys.argv[1])
    switch = open_switch(GuestRegistry(root / "guests"), root / "kill.sock")
    bench = Bench(DockerEngine(sys.argv[2], switch), root, sys.argv[3])
    await bench.shell(f"trap '' TERM HUP; sleep 8{sys.argv[4]} & echo ready; {LOOP}")
    await bench.until_logged("ready")
    print("ready", flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


def test_containers_die_with_daemon_while_engine_hangs(tmp_path: Path, engine_that_hangs: Dockerd | Podman) -> None:
    mark, label = fresh_mark(), f"orphan-{os.getpid()}"
    command = [sys.executable, "-c", DAEMON, str(tmp_path), label, import_busybox(), mark]
    daemon = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    assert daemon.stdout is not None and daemon.stdout.readline() == "ready\n" and processes_with(mark)
    with engine_that_hangs.hanging():
        daemon.kill()
        daemon.wait()
        daemon.stdout.close()
        wait_until(lambda: not processes_with(mark), "the watchdog to end it")
    wait_until(lambda: not containers(label), "the watchdog to remove it")


@pytest.mark.dockerd
async def test_engine_restart_kills_no_guest(tmp_path: Path, own_dockerd: Dockerd) -> None:
    engine = DockerEngine(f"away-{os.getpid()}", KillSwitch())
    bench = Bench(engine, tmp_path, import_busybox())
    try:
        guest = await bench.shell("echo ready; while test ! -e go; do sleep 0.05; done; echo back; exit 4")
        await bench.until_logged("ready")
        followed = guest._output  # type: ignore[attr-defined]
        own_dockerd.stop()
        assert not (await engine.availability()).ok
        await asyncio.to_thread(own_dockerd.start)
        assert (await engine.availability()).ok and await guest.pids()
        async with asyncio.timeout(WAIT_S):
            while guest._output is followed:  # type: ignore[attr-defined]
                await asyncio.sleep(0.02)
            (tmp_path / "work" / "go").touch()
            assert (await guest.wait()).code == 4
        assert "back" in bench.log
    finally:
        await engine.close()


@pytest.mark.dockerd
def test_networks_are_removed_with_containers(own_dockerd: Dockerd) -> None:
    with client_of(own_dockerd.host) as client:
        for run in ("mine", "the next daemon's"):
            labels = {watchdog.LABEL_NODE: "node", watchdog.LABEL_RUN: run}
            network = client.networks.create(f"m{run.split()[0]}", labels=labels)
            client.api.create_container(
                import_busybox(),
                "true",
                labels=labels,
                host_config=client.api.create_host_config(network_mode=network.name),
            )
        watchdog.remove_containers(own_dockerd.host.removeprefix("unix://"), "mine")
        assert not client.networks.list(names=["mmine"]) and client.networks.list(names=["mthe"])
        left = [found.labels[watchdog.LABEL_RUN] for found in client.containers.list(all=True)]
        assert left == ["the next daemon's"], "a slow watchdog removes only what its own daemon started"
        watchdog.remove_containers(own_dockerd.host.removeprefix("unix://"), "the next daemon's")
        assert not client.containers.list(all=True)

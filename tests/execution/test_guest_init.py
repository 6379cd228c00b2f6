"""The first process of a guest and its watcher: no guest without seclusion, none that outlives them, nothing inherited."""

import asyncio
import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from mesh.execution.engine import EngineError, Guest
from mesh.execution.process import guest_init
from mesh.execution.process.engine import ProcessEngine
from mesh.execution.process.sandbox import Sandbox
from mesh.rpc.frames import OUTPUT, Data, Order
from mesh.util.boottime import boot_s
from mesh.util.processes import (
    USER_SHARE,
    children_of,
    core_limit,
    descendants_of,
    lives,
    process_of,
    stat_of,
    user_limits,
)
from tests.execution.bench import COUNT, LOOP, WAIT_S, Bench, beyond, processes_with, steps_taken, wait_until
from tests.execution.place import fresh_mark

NOBODY = 65_534
ROOT = Path(__file__).parents[2]


@pytest.fixture(params=["process", "session"])
async def bench(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bench]:
    engine = ProcessEngine(namespaces=request.param == "process")
    available = await engine.availability()
    if request.param == "process" and "namespaces" not in available.isolation:
        pytest.skip("this kernel gives no namespaces")
    bench = Bench(engine, tmp_path, None)
    yield bench
    for guest in bench.guests:
        await guest.kill()
    await engine.close()


async def said_in_session(guest: Guest, script: str) -> str:
    session, said = await guest.open_session(Order(("sh", "-c", script))), b""
    async with asyncio.timeout(WAIT_S):
        while (frame := await session.receive()) is not None:
            said += frame.data if isinstance(frame, Data) else b""
    await session.close()
    return said.decode()


async def test_guest_that_cannot_be_secluded_never_runs(tmp_path: Path) -> None:
    """Let the kernel refuse a mount: shared memory of a negative size."""
    (tmp_path / "home").mkdir()
    engine = ProcessEngine(sandbox=Sandbox(tmp_path / "home", [], os.environ))
    if "namespaces" not in (await engine.availability()).isolation:
        pytest.skip("this kernel gives no namespaces")
    (tmp_path / "attempt").mkdir()
    bench = Bench(engine, tmp_path / "attempt", None)
    with pytest.raises(EngineError, match="cannot be hidden"):
        await bench.shell("echo ran > $MESH_OUT_DIR/ran", shm_mib=-1)
    assert not (bench.root / "out/ran").exists()
    assert (await (await bench.shell("exit 3", shm_mib=1)).wait()).code == 3
    await engine.close()


def test_guest_whose_rights_cannot_be_limited_never_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*asked: object) -> None:
        raise OSError("the kernel has no filters")

    monkeypatch.setattr(guest_init.confinement, "confine", refuse)
    with pytest.raises(SystemExit, match="its rights cannot be limited: the kernel has no filters"):
        guest_init.confine(None)


def test_guest_that_cannot_be_kept_from_the_network_never_runs() -> None:
    """The engine has seen namespaces here, and the kernel gives none any more."""
    run = (
        f"import socket, sys; sys.path.insert(0, {str(ROOT)!r}); from mesh.execution.process import guest_init\n"
        "guest_init.read_spec = lambda daemon: {'namespaces': True, 'network': 'none'}\n"
        "guest_init.enter_namespaces = lambda *asked: 'session'\n"
        "guest_init.main(0, 1, socket.socket())"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", run], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "it cannot be kept from the network here\n")


async def test_guest_and_sessions_die_with_their_watcher(bench: Bench) -> None:
    mark = fresh_mark()
    guest = await bench.shell(f"sleep 8{mark} & echo ready; {LOOP}")
    await bench.until_logged("ready")
    session = await guest.open_session(Order(("sh", "-c", f"echo in; exec sleep 9{mark}")))
    async with asyncio.timeout(WAIT_S):
        assert await session.receive() == Data(OUTPUT, b"in\n")
    (agent,) = [process_of(pid) for pid in await guest.pids() if f"9{mark}" in command_of(pid)]
    first, watcher = min(await guest.pids()), watcher_of(await guest.pids())
    groups = [path for path in guest._groups if path.exists()]  # type: ignore[attr-defined]
    head, agents = process_of(first), [process_of(pid) for pid in children_of(watcher)]
    os.kill(watcher, signal.SIGKILL)
    async with asyncio.timeout(WAIT_S):
        await guest.wait()
    assert not any(path.exists() for path in groups), "the daemon removes them in its place"
    everything = [process for process in (head, agent, *agents) if process is not None]
    await asyncio.to_thread(wait_until, lambda: not any(map(lives, everything)), "the guest's first process to end")
    await asyncio.to_thread(wait_until, lambda: not processes_with(mark), "the guest to end")


async def test_job_and_session_die_with_their_watcher_without_groups(tmp_path: Path) -> None:
    mark = fresh_mark()
    engine = ProcessEngine(namespaces=False, groups=False)
    bench = Bench(engine, tmp_path, None)
    guest = await bench.shell(f"echo ready; exec sleep 8{mark}")
    await bench.until_logged("ready")
    session = await guest.open_session(Order(("sh", "-c", f"echo in; exec sleep 9{mark}")))
    async with asyncio.timeout(WAIT_S):
        assert await session.receive() == Data(OUTPUT, b"in\n")
    os.kill(watcher_of(await guest.pids()), signal.SIGKILL)
    async with asyncio.timeout(WAIT_S):
        await guest.wait()
    await asyncio.to_thread(wait_until, lambda: not processes_with(mark), "job and session to end")
    await engine.close()


async def test_orphans_are_reaped_while_the_job_runs(bench: Bench) -> None:
    """Leave more orphans than the node's limit of processes may have room for; sessions still report their ends."""
    guest = await bench.shell(f"for n in $(seq 50); do (true &); done; echo left; {LOOP}")
    await bench.until_logged("left")
    watcher = watcher_of(await guest.pids())
    for _ in range(3):
        assert await said_in_session(guest, "(true &); echo in") == "in\n"

    def zombies() -> int:
        found = [stat_of(pid) for pid in descendants_of(watcher)]
        return sum(stat is not None and stat.state == "Z" for stat in found)

    await asyncio.to_thread(wait_until, lambda: zombies() == 0, "all orphans to be reaped")
    assert await guest.pids()


async def test_lease_stops_every_process_without_groups_and_wakes_every_one(tmp_path: Path) -> None:
    engine = ProcessEngine(groups=False)
    bench = Bench(engine, tmp_path, None)
    guest = await bench.shell(f"sh -c '{COUNT}' & setsid sh -c '{LOOP}' & {LOOP}")
    await beyond(bench, 3)
    for _ in range(2):
        guest.allow_until(boot_s() + 0.2)
        async with asyncio.timeout(WAIT_S):
            while not await guest.stands_still():
                await asyncio.sleep(0.02)
        guest.allow_until(math.inf)
        await beyond(bench, steps_taken(bench) + 3)
        pids = await guest.pids()
        assert len(pids) >= 4
        await asyncio.to_thread(wait_until, lambda pids=pids: not any(map(is_stopped, pids)), "all to go on")
    await guest.kill()
    await engine.close()


def is_stopped(pid: int) -> bool:
    """Tell whether it is there and stopped: the programs of a loop end meanwhile."""
    found = stat_of(pid)
    return found is not None and found.state in "Tt"


def watcher_of(pids: frozenset[int]) -> int:
    """Return the parent of a guest's first process."""
    return int(Path(f"/proc/{min(pids)}/stat").read_text().rpartition(")")[2].split()[1])


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


async def test_guest_inherits_no_descriptors(bench: Bench) -> None:
    """Open many in this process, as a daemon has them, so that those of the watcher have high numbers too."""
    kept = [os.open(os.devnull, os.O_RDONLY) for _ in range(400)]
    try:
        show = "import os; print(*[each for each in os.listdir('/proc/self/fd') if os.path.exists('/proc/self/fd/' + each)])"
        script = f'{sys.executable} -I -S -c "{show}"'
        guest = await bench.shell(f"{script}; echo ready; {LOOP}")
        await bench.until_logged("ready")
        assert bench.log.split() == ["0", "1", "2", "ready"]
        assert (await said_in_session(guest, script)).split() == ["0", "1", "2"]
    finally:
        for descriptor in kept:
            os.close(descriptor)


async def test_guest_has_a_share_of_what_is_counted_per_user(bench: Bench) -> None:
    """Compare it with the limits of this process, which its owner's programs have."""
    shares = {kind: (most, most) for kind, most in user_limits().items()}
    ask = f"{sys.executable} -c 'import resource; print({{kind: resource.getrlimit(kind) for kind in {[*shares]}}})'"
    guest = await bench.shell(f"{ask}; {LOOP}")
    await bench.until_logged("\n")
    assert bench.log == f"{shares}\n" and await said_in_session(guest, ask) == f"{shares}\n" and shares


def test_guest_leaves_its_user_watches_of_files() -> None:
    """Take all that a namespace of an ordinary user gives, as that user."""
    own = Path("/proc/sys/user/max_inotify_instances")
    if not own.exists():
        pytest.skip("this kernel counts them otherwise")
    run = (
        f"import ctypes, sys; sys.path.insert(0, {str(ROOT)!r}); from mesh.execution.process import guest_init\n"
        "assert guest_init.enter_namespaces(True) == 'namespaces', 'no namespaces'\n"
        "libc, count = ctypes.CDLL(None), 0\n"
        "while libc.inotify_init() >= 0: count += 1\n"
        "print(count)"
    )
    user = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.getuid() == 0 else {}
    command = ["/usr/bin/python3", "-I", "-S", "-c", run]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/", **user)  # type: ignore[call-overload]
    if "no namespaces" in done.stderr:
        pytest.skip("this kernel gives users no namespaces")
    assert done.stdout == f"{int(own.read_text()) // USER_SHARE}\n", done


async def test_no_signal_is_ignored(bench: Bench) -> None:
    def ignored(said: str) -> list[signal.Signals]:
        """Return them, without those of the C library's own (32 and 33), which posix_spawn(3) ignores."""
        mask = int(said.split()[1], 16)
        return [number for number in signal.Signals if mask >> (number - 1) & 1]

    guest = await bench.shell(f"grep SigIgn /proc/self/status; echo ready; {LOOP}")
    await bench.until_logged("ready")
    assert ignored(bench.log) == []
    assert ignored(await said_in_session(guest, "grep SigIgn /proc/self/status")) == []


async def test_crash_leaves_no_core_file(bench: Bench) -> None:
    script = (
        "ulimit -c unlimited 2>/dev/null; (kill -SEGV $(sh -c 'echo $PPID')); grep core /proc/self/limits; echo crashed"
    )
    guest = await bench.shell(f"{script}; {LOOP}")
    await bench.until_logged("crashed")
    for said in (bench.log, await said_in_session(guest, script)):
        assert re.search(rf"core file size +{core_limit()} +{core_limit()} +bytes", said)
    assert [path for path in (bench.root / "work").iterdir() if path.name.startswith("core")] == []


ASLEEP = """
import asyncio, pathlib, sys
from mesh.execution.process.engine import ProcessEngine
from mesh.util.boottime import boot_s
from tests.execution.bench import LOOP, Bench

async def main():
    engine = ProcessEngine()
    bench = Bench(engine, pathlib.Path(sys.argv[1]), None)
    guest = await bench.shell("echo ready; " + LOOP, until=boot_s() + 2.0)
    await bench.until_logged("ready")
    async with asyncio.timeout(30):
        while not await guest.stands_still():
            await asyncio.sleep(0.02)
    print("stopped", boot_s())
    await guest.kill()
    await engine.close()

asyncio.run(main())
"""


def test_lease_counts_sleep_of_the_machine(tmp_path: Path) -> None:
    """Give a process a CLOCK_BOOTTIME that is ahead of CLOCK_MONOTONIC by a day, as after a day of sleep."""
    apart = ["unshare", "--time", "--boottime", "86400", "--fork"]
    if os.getuid() != 0:
        apart.insert(1, "--map-root-user")
    if subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this kernel gives no time namespaces")
    done = subprocess.run(
        [*apart, sys.executable, "-c", ASLEEP, str(tmp_path)], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.stdout.startswith("stopped"), done.stderr
    assert float(done.stdout.split()[1]) > 86_400, json.dumps(done.stdout)

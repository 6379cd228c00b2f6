"""Limits of the process engine for a guest as a whole, on machines that allow control groups."""

import asyncio
import math
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from mesh.execution.ceilings import Ceilings
from mesh.execution.limits import BoundedEngine
from mesh.execution.process.engine import ProcessEngine
from mesh.execution.process.guest_cgroup import INNER, GuestGroup
from mesh.execution.process.subtree import make_group
from mesh.util.cgroups import remove_groups
from mesh.util.processes import stat_of
from tests.execution.bench import COUNT, WAIT_S, Bench, beyond, processes_with, steps_when_stopped

NOBODY = 65_534
HALF = f"{sys.executable} -c 'held = bytearray(150 << 20); print(\"held\", flush=True); import time; time.sleep(60)'"


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    engine = ProcessEngine()
    answer = await engine.availability()
    if set(answer.unlimited) - {"disk rate"}:
        pytest.skip(f"this machine lets nobody make control groups: {answer.isolation}; {answer.limits_by}")
    bench = Bench(BoundedEngine(engine, Ceilings(256, pids=20, cpus=0.5), lambda: engine.bounds_memory), tmp_path, None)
    yield bench
    for guest in bench.guests:
        await guest.kill()


async def test_memory_limit_covers_all_processes(bench: Bench) -> None:
    guest = await bench.shell(f"({HALF}; kill -9 $$) & ({HALF}; kill -9 $$) & wait")
    async with asyncio.timeout(WAIT_S):
        end = await guest.wait()
    assert end.oom and end.code != 0 and bench.log.count("held") <= 1


async def test_pids_limit_is_enforced(bench: Bench) -> None:
    mark = f"7{time.time_ns()}"[-9:]
    guest = await bench.shell(
        f"for n in $(seq 60); do sleep {mark} & done 2>/dev/null; echo tried; while :; do sleep 1; done"
    )
    async with asyncio.timeout(WAIT_S):
        while len(processes_with(mark)) < 15 and (await guest.pids()):
            await asyncio.sleep(0.02)
    assert len(processes_with(mark)) <= 20


async def test_guest_groups_are_removed_with_guest(bench: Bench) -> None:
    guest = await bench.shell("cat /proc/self/cgroup; while :; do sleep 0.05; done")
    await bench.until_logged("guest-")
    names = {line.removesuffix(f"/{INNER}").rpartition("/")[2] for line in bench.log.splitlines() if "guest-" in line}
    assert len(names) == 1
    (name,) = names
    # Not `glob`: it raises if another group disappears meanwhile.
    found = [Path(directory, name) for directory, inner, _ in os.walk("/sys/fs/cgroup") if name in inner]
    quotas = [Path(path, "cpu.cfs_quota_us") for path in found if Path(path, "cpu.cfs_quota_us").exists()]
    assert found and all(quota.read_text() == "50000\n" for quota in quotas)
    await guest.kill()
    assert not any(path.exists() for path in found)


GROUPS_OF_ITS_OWN = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
NEWNS, NEWUSER, NEWCGROUP = 0x20000, 0x10000000, 0x2000000
user, place = os.getuid(), "/tmp"
if libc.unshare(NEWUSER | NEWNS | NEWCGROUP) != 0:
    sys.exit("no namespaces")
with open("/proc/self/uid_map", "w") as users:
    users.write(f"{user} {user} 1")
if libc.mount(b"none", place.encode(), b"cgroup2", 0, None) != 0:
    sys.exit("no mount")
for file, text in (("cgroup.max.descendants", "max"), ("cgroup.max.depth", "max")):
    try:
        with open(f"{place}/{file}", "w") as limit:
            limit.write(text)
    except OSError as error:
        print(error)
try:
    os.mkdir(f"{place}/more")
    print("made one")
except OSError as error:
    print("made none:", error)
"""


def test_guest_makes_no_groups_and_reaches_no_limits() -> None:
    """Mount its own groups, writable, in a user namespace: each group below would be one more to look at in each kill."""
    group = make_group()
    if group is None or "" not in group.kinds:
        pytest.skip("this machine lets nobody make control groups of version 2")
    outer = Path(group.plain()[""])
    user = NOBODY if os.getuid() == 0 else os.getuid()
    if os.getuid() == 0:  # as if that user's daemon had made them
        for path in (outer, *outer.rglob("*")):
            os.chown(path, user, user)

    def enter() -> None:
        group.enter()
        if os.getuid() == 0:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)

    command = ["/usr/bin/python3", "-c", GROUPS_OF_ITS_OWN]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/", preexec_fn=enter)
    inside = [path for path in outer.rglob("*") if path.is_dir()]
    (outer / "cgroup.max.descendants").write_text("max")
    group.remove()
    if done.stderr in {"no namespaces\n", "no mount\n"}:
        pytest.skip(f"this kernel does not let users mount control groups: {done.stderr}")
    assert "made none" in done.stdout and inside == [outer / INNER], done
    assert not outer.exists()


def test_groups_in_a_guests_group_are_removed_too() -> None:
    group = make_group()
    if group is None or "" not in group.kinds:
        pytest.skip("this machine lets nobody make control groups of version 2")
    outer = Path(group.plain()[""])
    (outer / "cgroup.max.descendants").write_text("max")
    (outer / INNER / "deeper").mkdir()
    group.remove()
    assert not outer.exists()


@pytest.mark.parametrize("groups", [True, False])
async def test_expired_lease_stops_guest_until_renewed(tmp_path: Path, groups: bool) -> None:
    """Freeze its group where there is one: no process is stopped by a signal then, which its user could undo."""
    bench = Bench(ProcessEngine(groups=groups), tmp_path, None)
    guest = await bench.shell(f"cat /proc/self/cgroup; sh -c '{COUNT}' & {COUNT}")
    await bench.until_logged("0::")
    freezes = groups and "mesh-guest-" in bench.log.partition("0::")[2]
    if groups and not freezes:
        pytest.skip(f"this machine lets nobody make control groups of version 2: {bench.log}")
    await beyond(bench, 0)  # else it is stopped before its first step, and there is none to wait for
    guest.allow_until(0.0)
    async with asyncio.timeout(WAIT_S):
        while not await guest.stands_still():
            await asyncio.sleep(0.01)
    before = await steps_when_stopped(bench)
    assert ("T" in {stat.state for pid in await guest.pids() if (stat := stat_of(pid))}) != freezes
    guest.allow_until(math.inf)
    await beyond(bench, before)
    await guest.kill()


async def test_guest_without_network_has_loopback(tmp_path: Path) -> None:
    engine = ProcessEngine(network="none")
    answer = await engine.availability()
    if not answer.ok:
        pytest.skip(f"this kernel or container lets nobody make namespaces: {answer.detail}")
    assert "no network" in answer.isolation
    said = await Bench(engine, tmp_path, None).output(
        f'cat /proc/net/dev; {sys.executable} -c \'import socket; s = socket.create_server(("127.0.0.1", 0)); '
        'socket.create_connection(s.getsockname()); print("loops")\''
    )
    assert "loops" in said and [line.split(":")[0].strip() for line in said.splitlines() if ":" in line] == ["lo"]


async def test_slow_machine_offers_the_engine_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the first probe take too long: that once ended the daemon."""
    engine = ProcessEngine()
    with monkeypatch.context() as slow:
        slow.setattr("mesh.execution.process.engine.START_S", 0.0)
        answer = await engine.availability()
    assert not answer.ok and "tried again" in answer.detail
    assert (await engine.availability()).ok


async def test_guest_does_not_start_without_network_isolation(tmp_path: Path) -> None:
    answer = await ProcessEngine(network="none", namespaces=False).availability()
    assert not answer.ok and "cannot be kept from the network" in answer.detail


def test_cpu_limit_above_parent_is_accepted() -> None:
    """Check a limit that the kernel refuses with control groups of version 1."""
    outer = make_group()
    if outer is None or "cpu" not in outer.kinds:
        pytest.skip("this machine lets nobody make control groups of processors")
    outer.limit(None, 0.5, 64)
    inner = Path(outer.plain()["cpu"], "inner")
    inner.mkdir()
    GuestGroup({"cpu": inner}).limit(None, 2.0, 64)
    inner.rmdir()
    remove_groups(outer.directories)


def test_groups_are_made_and_removed_in_parallel() -> None:
    first = make_group()
    if first is None:
        pytest.skip("this machine lets nobody make control groups")
    made = [first, *(make_group() for _ in range(20))]
    assert all(group is not None and group.kinds for group in made)
    for group in made:
        assert group is not None
        remove_groups(group.directories)
        remove_groups(group.directories)
        assert not any(Path(path).exists() for path in group.directories)

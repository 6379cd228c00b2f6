"""The kill switch ends all processes of a guest at once, even if other parts hang, and no other process."""

import asyncio
import contextlib
import json
import os
import resource
import select
import socket
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mesh.cli import kill
from mesh.daemon.layout import Layout
from mesh.execution import killswitch, process_killer
from mesh.execution.engine import EngineError
from mesh.execution.guest_registry import KILLED, GuestRegistry
from mesh.execution.killswitch import BY_OWNER, CLIENTS, WHY, KillSwitch, open_switch
from mesh.util import cgroups
from mesh.util.budget import Budget
from mesh.util.processes import Process, children_of, lives, process_of
from tests.descriptors import descriptors
from tests.execution.bench import LOOP, WAIT_S, containers, processes_with, wait_until
from tests.execution.place import Place, entry, fresh_mark

FORKS = "f() { sleep 7{mark} & sleep 0.01; f; }; f"


@pytest.fixture(params=["process", "session", pytest.param("docker", marks=pytest.mark.docker)])
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    place = Place(tmp_path, request.param)
    assert (await place.bench.engine.availability()).ok
    yield place
    place.switch.kill_all().result(WAIT_S)
    for guest in place.bench.guests:
        await guest.wait()
    await place.bench.engine.close()
    place.switch.close()


async def test_kill_works_while_event_loop_is_blocked(place: Place) -> None:
    mark = fresh_mark()
    for number in range(3):
        await place.guest(f"{mark}{number}")
    heard: list[dict[str, object]] = []
    asker = threading.Thread(target=lambda: heard.append(place.press()))
    asker.start()
    deadline = time.monotonic() + WAIT_S
    while asker.is_alive() and time.monotonic() < deadline:
        time.sleep(0.001)  # noqa: ASYNC251  (this is what blocks it)
    asker.join()
    killed = heard[0]["killed"]
    assert isinstance(killed, list) and len(killed) == 3
    assert all(one["processes"] >= 1 and one["left"] == [] and one["job"] == "j" * 26 for one in killed)
    assert not any(processes_with(f"{mark}{number}") for number in range(3))
    async with asyncio.timeout(WAIT_S):
        ends = [await guest.wait() for guest in place.bench.guests]
    assert {(end.code, end.fault) for end in ends} == {(137, BY_OWNER)}
    assert place.register.entries() == ({}, [])


async def test_no_guest_starts_until_release(place: Place) -> None:
    assert place.press() == {"killed": []}
    with pytest.raises(EngineError, match="taken this machine back"):
        await place.bench.shell("true")
    assert place.register.entries() == ({}, [])
    place.switch.release()
    guest = await place.bench.shell("exit 3")
    assert (await guest.wait()).code == 3
    if place.kind == "docker":
        await asyncio.to_thread(wait_until, lambda: not containers(place.label), "the containers to be removed")


async def test_guest_starting_during_kill_is_killed(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill while the program runs but its process is not yet in the registry."""
    mark = fresh_mark()
    started, amended = place.switch.check_started, place.switch.update

    def late(key: str) -> None:
        place.switch.kill_all().result(WAIT_S)
        started(key)

    monkeypatch.setattr(place.switch, "check_started", late)
    monkeypatch.setattr(place.switch, "update", lambda key, entry: amended(key, replace(entry, head=None, groups=())))
    with pytest.raises(EngineError, match="taken this machine back"):
        await place.bench.shell(f"sleep 8{mark} & {LOOP}")
    assert not processes_with(mark)


async def test_kill_without_daemon_is_not_job_fault(place: Place) -> None:
    mark = fresh_mark()
    await place.guest(mark)
    entries, problems = place.register.entries()
    assert problems == [] and len(entries) == 1
    for key in entries:
        place.register.mark(key, KILLED)
    (struck,) = process_killer.run(entries.values())
    assert struck.processes >= 1 and struck.left == () and not processes_with(mark)
    async with asyncio.timeout(WAIT_S):
        end = await place.bench.guests[0].wait()
    assert (end.code, end.fault) == (137, BY_OWNER) and place.register.entries() == ({}, [])


async def test_stopped_guest_is_killed(place: Place) -> None:
    mark = fresh_mark()
    await place.guest(mark)
    place.bench.guests[0].allow_until(0.0)
    async with asyncio.timeout(WAIT_S):
        while not await place.bench.guests[0].stands_still():
            await asyncio.sleep(0.01)
    place.press()
    assert not processes_with(mark)


async def test_forking_guest_is_killed(place: Place) -> None:
    mark = fresh_mark()
    await place.bench.shell(FORKS.replace("{mark}", mark))
    async with asyncio.timeout(WAIT_S):
        while len(processes_with(f"7{mark}")) < 30:
            await asyncio.sleep(0.05)
    place.press()
    assert not processes_with(f"7{mark}")


async def test_orphans_count_as_guest_processes(place: Place) -> None:
    mark = fresh_mark()
    await place.bench.shell(f"sh -c 'trap \"\" TERM; sleep 8{mark} & exit 0'; echo ready{mark}; {LOOP}")
    await place.bench.until_logged(f"ready{mark}")
    guest = place.bench.guests[0]
    found: list[list[str]] = []
    async with asyncio.timeout(WAIT_S):
        while ["sleep", f"8{mark}"] not in found:
            for pid in await guest.pids():
                with contextlib.suppress(OSError):  # the process has just ended
                    found.append(Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:2])
    assert await guest.catches_term() is False


async def test_orphans_get_notice(tmp_path: Path) -> None:
    """Check a guest without a PID namespace, whose watcher adopts orphans."""
    place = Place(tmp_path, "session")
    trap = "trap 'echo told; exit' TERM; echo ready; while :; do sleep 0.05; done"
    guest = await place.bench.shell(f'sh -c "{trap}" & exec sh -c "exec sleep 60"')
    try:
        await place.bench.until_logged("ready")
        first = await guest.pids()
        assert len(first) >= 2 and await guest.terminate()
        await place.bench.until_logged("told")
    finally:
        await guest.kill()
        place.switch.close()


def test_reused_pid_is_not_killed(bystander: Process) -> None:
    other = Process(bystander.pid, bystander.started - 1)
    assert other.open() is None
    (struck,) = process_killer.run([entry(head=other, watcher=other)])
    assert struck.left == () and lives(bystander)
    (struck,) = process_killer.run([entry(head=bystander)])
    assert struck.left == () and not lives(bystander)


def test_kill_socket_is_private_and_takes_one_order(tmp_path: Path) -> None:
    switch = open_switch(GuestRegistry(tmp_path / "guests"), tmp_path / "kill.sock")
    try:
        assert (tmp_path / "kill.sock").stat().st_mode & 0o777 == 0o600
        for said in (b"kill them\n", b"\xff\x00\n", b"x" * 5000, b"\n"):
            with socket.socket(socket.AF_UNIX) as client, contextlib.suppress(ConnectionError):
                client.settimeout(WAIT_S)
                client.connect(str(tmp_path / "kill.sock"))
                client.sendall(said)
                assert json.loads(client.makefile().readline() or '{"error": ""}').keys() == {"error"}
        assert not switch.holding
        silent = [socket.socket(socket.AF_UNIX) for _ in range(20)]
        for client in silent[:10]:
            client.connect(str(tmp_path / "kill.sock"))
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(WAIT_S)
            client.connect(str(tmp_path / "kill.sock"))
            for byte in b"kill\n":
                client.sendall(bytes([byte]))
            assert json.loads(client.makefile().readline()) == {"killed": []} and switch.holding
        for client in silent:
            client.close()
    finally:
        switch.close()
    assert not (tmp_path / "kill.sock").exists()


def test_failing_action_does_not_delay_signals(tmp_path: Path, bystander: Process) -> None:
    pressed: list[str] = []
    first = [lambda: pressed.append("gate"), lambda: 1 / 0]
    switch = KillSwitch(first=first, struck=lambda: pressed.append("told"))
    switch.add(entry(head=bystander))
    (struck,) = switch.kill_all().result(WAIT_S)
    assert pressed == ["gate", "told"] and struck.processes == 1 and not lives(bystander)
    switch.close()


def test_kill_result_survives_removal_of_guest(bystander: Process) -> None:
    left: list[str] = []
    switch = KillSwitch(struck=lambda: left.append(switch.remove(key)))
    key = switch.add(entry(head=bystander))
    (struck,) = switch.kill_all().result(WAIT_S)
    assert struck.processes == 1 and left == [BY_OWNER]
    switch.close()


def test_hanging_guest_does_not_delay_other_guests(bystander: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill a guest that does not end (its kill is a no-op here), then another one."""
    monkeypatch.setattr(process_killer, "GIVE_UP_S", 600.0)
    monkeypatch.setattr(process_killer.Grip, "kill", lambda self: None)
    switch = KillSwitch()
    own = process_of(os.getpid())
    stuck = switch.add(entry(head=own, job="stuck"))
    well = switch.add(entry(head=bystander, job="well"))
    monkeypatch.setattr(Process, "kill", lambda self: os.kill(self.pid, 9) if self != own else None)
    first, second = switch.kill(stuck), switch.kill(well)
    assert second.result(WAIT_S)[0].left == () and not first.done()
    monkeypatch.setattr(process_killer, "GIVE_UP_S", 0.0)
    (left,) = first.result(WAIT_S)
    assert left.left == (os.getpid(),) and "does not end" in str(left)
    switch.close()


@pytest.mark.parametrize("by_switch", [True, False])
def test_all_guests_are_struck_before_one_is_looked_at(
    bystander: Process, monkeypatch: pytest.MonkeyPatch, by_switch: bool
) -> None:
    """Look at a guest for as long as the next one lives."""
    ended, other = list[bool](), bystander.open()
    assert other is not None

    def slow(*asked: object) -> Iterator[Process]:
        ended.append(bool(select.select([other], [], [], 5.0)[0]))
        yield from ()

    monkeypatch.setattr(process_killer, "_family", slow)
    entries = [entry(watcher=process_of(os.getpid())), entry(head=bystander)]
    if by_switch:
        switch = KillSwitch()
        for one in entries:
            switch.add(one)
        switch.kill_all().result(WAIT_S)
        switch.close()
    else:
        process_killer.run(entries)
    assert ended[0] and not lives(bystander)
    os.close(other)


def test_guest_with_more_processes_than_one_look_takes_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_killer, "Budget", lambda seconds: Budget(WAIT_S, entries=5))
    script = "for n in $(seq 12); do sleep 1000 & done; echo ready; wait"
    with subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE) as shell:
        assert shell.stdout is not None and shell.stdout.readline() == b"ready\n"
        sleeps = [process for pid in children_of(shell.pid) if (process := process_of(pid)) is not None]
        (struck,) = process_killer.run([entry(watcher=process_of(shell.pid))])
        left = [process for process in sleeps if lives(process)]
        for process in left:
            process.kill()
    assert (struck.left, struck.problem, left, len(sleeps)) == ((), "", [], 12)


def test_look_ends_when_its_time_is_over(bystander: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_killer, "LOOK_S", 0.0)
    monkeypatch.setattr(process_killer, "GIVE_UP_S", 0.0)
    (struck,) = process_killer.run([entry(watcher=bystander)])
    assert "unknown whether it has ended" in struck.problem and struck.processes and lives(bystander)


def test_guest_that_does_not_end_stays_registered_over_a_restart(
    tmp_path: Path, bystander: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kill does nothing at first, as of a process that hangs in a driver."""
    register, where = GuestRegistry(tmp_path / "guests"), tmp_path / "kill.sock"
    with monkeypatch.context() as hanging:
        hanging.setattr(process_killer, "GIVE_UP_S", 0.0)
        hanging.setattr(process_killer.Grip, "kill", lambda self: None)
        hanging.setattr(Process, "kill", lambda self: None)
        before = open_switch(register, where)
        key = before.add(entry(head=bystander))
        (left,) = before.kill(key).result(WAIT_S)
        assert left.left == (bystander.pid,)
        before.remove(key)
        before.close()
        assert register.entries()[0].keys() == {key}
        after = open_switch(register, where)
        assert register.entries()[0].keys() == {key} and lives(bystander)
    (gone,) = after.kill_all().result(WAIT_S)
    assert not gone.problem and not lives(bystander) and register.entries() == ({}, [])
    after.close()


@contextlib.contextmanager
def no_free_descriptor() -> Iterator[None]:
    before, taken = resource.getrlimit(resource.RLIMIT_NOFILE), list[int]()
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 16, before[1]))  # noqa: PTH208
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_kill_works_without_a_free_descriptor(bystander: Process) -> None:
    switch = KillSwitch()
    switch.open()
    starting = switch.add(entry(container="c" * 64, job="starting"))  # before its first process is known
    running = switch.add(entry(head=bystander))
    with no_free_descriptor():
        first, second = switch.kill(starting).result(WAIT_S), switch.kill(running).result(WAIT_S)
        assert [one.problem for one in (*first, *second)] == ["", ""] and second[0].processes == 1
    assert not lives(bystander)
    switch.close()


def test_guest_that_cannot_be_looked_for_is_not_taken_for_dead(
    bystander: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(killswitch, "SPARES", 0)
    monkeypatch.setattr(process_killer, "GIVE_UP_S", 0.0)
    group = Path(next(iter(cgroups.groups_of(os.getpid()).values())))
    switch = KillSwitch()
    switch.open()
    keys = [switch.add(one) for one in (entry(watcher=bystander), entry(container="c" * 64))]
    with no_free_descriptor():
        for key in keys:
            (left,) = switch.kill(key).result(WAIT_S)
            assert "it is unknown whether it has ended" in str(left) and left.processes
        with pytest.raises(OSError, match="Too many open files"):
            list(cgroups.pids_in(group))
    assert lives(bystander)
    head = switch.add(entry(head=bystander))
    monkeypatch.setattr(process_killer, "GIVE_UP_S", 600.0)
    (killed,) = switch.kill(head).result(WAIT_S)
    assert killed.processes == 1 and not lives(bystander), "the thread goes on"
    switch.close()


def test_guest_is_killed_although_nobody_can_look_for_it(bystander: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    """The spare descriptors are gone, too: another thread was faster."""
    monkeypatch.setattr(killswitch, "SPARES", 0)
    monkeypatch.setattr(process_killer, "GIVE_UP_S", 0.0)
    switch = KillSwitch()
    switch.open()
    key, late = switch.add(entry(container="c" * 64)), entry(head=bystander)
    switch.update(key, late)
    with no_free_descriptor():
        (told,) = switch.kill(key).result(WAIT_S)
        assert "it is unknown whether it has ended" in str(told)
        with pytest.raises(EngineError, match="cannot be held"):
            switch.add(late)
    wait_until(lambda: not lives(bystander), "it to end")
    switch.remove(key)
    switch.close()


def test_removed_guest_leaves_no_descriptor_open(bystander: Process) -> None:
    switch, before = KillSwitch(), len(descriptors())
    key = switch.add(entry())
    for _ in range(3):
        switch.update(key, entry(head=bystander))
    assert len(descriptors()) == before + 1
    switch.remove(key)
    switch.update(key, entry(head=bystander))
    assert len(descriptors()) == before and lives(bystander)
    switch.close()


def test_slow_daemon_still_reports_kills(tmp_path: Path, bystander: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    """Delay the answer of the daemon until `mesh reclaim --now` finds no guest left to end."""
    where, looked = Layout(tmp_path), threading.Event()
    answer, end_guests = killswitch._answer, kill._kill_guests

    def late(*told: Any) -> None:
        assert looked.wait(WAIT_S)
        answer(*told)

    def look(where: Layout) -> Any:
        wait_until(lambda: not lives(bystander), "the switch to end it")
        found = end_guests(where)
        looked.set()
        return found

    monkeypatch.setattr(killswitch, "_answer", late)
    monkeypatch.setattr(kill, "_kill_guests", look)
    monkeypatch.setattr(kill, "LATE_S", WAIT_S)
    switch = open_switch(GuestRegistry(where.guests), where.kill_socket)
    switch.add(entry(head=bystander))
    struck, problems, by = kill.kill_guests(where)
    assert [one.job for one in struck if one.processes == 1] == ["j" * 26] and (problems, by) == ([], "by the daemon")
    switch.close()


@pytest.mark.skipif(os.getuid() != 0, reason="a small file system of one's own needs root")
async def test_kill_works_on_full_disk(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", small], check=True)
    try:
        place = Place(small, "session")
        mark = fresh_mark()
        await place.guest(mark)
        with contextlib.suppress(OSError), (small / "filler").open("wb", 0) as file:
            while True:
                file.write(b"x" * 4096)
        with pytest.raises(EngineError, match="cannot be registered"):
            await place.bench.shell("true")
        place.press()
        assert not processes_with(mark)
        async with asyncio.timeout(WAIT_S):
            assert (await place.bench.guests[0].wait()).fault == BY_OWNER
        place.switch.close()
    finally:
        subprocess.run(["umount", "-l", small], check=True)


def test_guest_killed_without_the_daemon_while_it_started_does_not_go_on(tmp_path: Path, bystander: Process) -> None:
    register = GuestRegistry(tmp_path)
    switch = KillSwitch(register)
    key = switch.add(entry(head=bystander))
    register.mark(key, KILLED)  # as `mesh killall` does
    with pytest.raises(EngineError, match="taken this machine back"):
        switch.check_started(key)
    assert not lives(bystander)
    switch.close()


@pytest.mark.parametrize(("mark", "why"), WHY.items())
def test_daemon_learns_why_a_guest_was_killed_without_it(
    tmp_path: Path, bystander: Process, mark: str, why: str
) -> None:
    switch = KillSwitch(GuestRegistry(tmp_path))
    keys = [switch.add(entry(head=bystander)) for _ in range(2)]
    GuestRegistry(tmp_path).mark(keys[0], mark)
    assert [switch.remove(key) for key in keys] == [why, ""]
    switch.close()


@pytest.mark.parametrize("when", ["before", "while it is written"])
def test_entry_that_was_removed_does_not_come_back(
    tmp_path: Path, bystander: Process, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    register = GuestRegistry(tmp_path)
    switch = KillSwitch(register)
    key, keep = switch.add(entry()), register.keep
    if when == "before":
        switch.remove(key)
    else:
        monkeypatch.setattr(register, "keep", lambda *asked: [switch.remove(key), keep(*asked)])
    switch.update(key, entry(head=bystander))
    assert register.entries() == ({}, []) and switch.kill_all().result(WAIT_S) == []
    switch.close()


def test_clients_beyond_the_limit_are_turned_away(tmp_path: Path) -> None:
    switch = open_switch(GuestRegistry(tmp_path / "guests"), tmp_path / "kill.sock")
    with contextlib.ExitStack() as stack:
        stack.callback(switch.close)
        for _ in range(CLIENTS):
            client = stack.enter_context(socket.socket(socket.AF_UNIX))
            client.connect(str(tmp_path / "kill.sock"))
        late = stack.enter_context(socket.socket(socket.AF_UNIX))
        late.settimeout(WAIT_S)
        late.connect(str(tmp_path / "kill.sock"))
        assert late.recv(1) == b""


@pytest.fixture
def group(tmp_path: Path, bystander: Process, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A control group of version 1 with the bystander in it, as plain files."""
    group = tmp_path / ("0" * 16)
    group.mkdir()
    (group / "cgroup.procs").write_text(f"{bystander.pid}\n")
    (group / "freezer.state").write_text("FROZEN")
    monkeypatch.setattr("mesh.util.cgroups.groups_of", lambda pid: {"freezer": group} if pid == bystander.pid else {})
    return group


def test_processes_of_a_guests_group_are_killed(group: Path, bystander: Process) -> None:
    (killed,) = process_killer.run([entry(groups=(str(group),))])
    assert (killed.processes, killed.left) == (1, ())
    assert not lives(bystander)


def test_frozen_group_is_thawed_so_that_its_processes_die(group: Path) -> None:
    process_killer.run([entry(groups=(str(group),))])
    assert (group / "freezer.state").read_text() == "THAWED"

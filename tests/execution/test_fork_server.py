"""The fork server: each watcher has only its own descriptors, and guests, leases and later starts outlive the server."""

import asyncio
import contextlib
import os
import resource
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from mesh.execution.engine import EngineError
from mesh.execution.process import watcher
from mesh.execution.process.engine import ProcessEngine
from mesh.execution.process.fork_server import DESCRIPTORS
from mesh.util.boottime import boot_s
from mesh.util.processes import Process, children_of, lives, process_of
from tests.execution.bench import (
    COUNT,
    LOOP,
    WAIT_S,
    Bench,
    processes_with,
    steps_taken,
    steps_when_stopped,
    wait_until,
)
from tests.execution.place import fresh_mark

ROOT = Path(__file__).parents[2]


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    engine = ProcessEngine(ready=lambda: True)
    await engine.availability()
    bench = Bench(engine, tmp_path, None)
    yield bench
    for server in servers():  # guests end without it
        server.kill()
    await asyncio.gather(*(guest.kill() for guest in bench.guests))
    await engine.close()


def servers() -> set[Process]:
    """Return the fork servers of this process."""
    found = filter(None, map(process_of, children_of(os.getpid())))
    return {each for each in found if lives(each) and b"fork_server.main" in command_of(each.pid)}


def command_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def only(found: set[Process]) -> Process:
    (one,) = found
    return one


def watchers() -> list[int]:
    """Return the watchers of the only server, the oldest first."""
    return sorted(children_of(only(servers()).pid))


def links(pid: int, *kinds: str) -> list[str]:
    """Return what a process holds of these kinds."""
    found = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # just closed
            found.append(str(path.readlink()))
    return [link for link in found if link.startswith(kinds)]


def channels(pid: int) -> set[str]:
    return set(links(pid, "pipe:", "socket:"))


async def comes(ready: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not ready():
            await asyncio.sleep(0.02)


async def test_watchers_are_forked_and_reaped(bench: Bench) -> None:
    server = only(servers())
    guest = await bench.shell(LOOP)
    assert only(servers()) == server
    assert len(watchers()) == 1
    await guest.kill()
    await comes(lambda: not watchers())
    assert (await (await bench.shell("exit 3")).wait()).code == 3
    assert only(servers()) == server


async def test_watcher_holds_only_its_own_descriptors(bench: Bench) -> None:
    await bench.shell(LOOP)
    await bench.shell(LOOP)
    first, second = watchers()
    server = only(servers()).pid
    log = str(Path(f"/proc/{server}/fd/2").readlink())
    assert len(channels(server) - {log}) == 1, "the server keeps the socket for orders alone"
    assert not channels(first) & channels(second)
    assert not channels(first) & channels(server)
    for pid in (first, second):  # its guest's first process alone
        await comes(lambda pid=pid: len(links(pid, "anon_inode:[pidfd]")) == 1)  # type: ignore[misc]


async def test_guests_leases_and_starts_outlive_the_server(bench: Bench) -> None:
    mark = fresh_mark()
    guest = await bench.shell(f"sleep 8{mark} & {COUNT}", until=boot_s() + 600)
    server, pid = only(servers()), watchers()[0]
    os.kill(server.pid, signal.SIGKILL)
    await comes(lambda: not lives(server))
    assert await guest.pids()
    await comes(lambda: steps_taken(bench) > 0)
    guest.allow_until(boot_s())
    await steps_when_stopped(bench)
    assert await guest.stands_still()
    other = await bench.shell("exit 3")
    assert (await other.wait()).code == 3
    assert only(servers()) != server
    before = process_of(pid)
    await guest.kill()
    assert before is not None and not lives(before)
    assert not processes_with(mark)


async def test_server_that_hangs_is_replaced(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watcher, "START_S", 2.0)
    server = only(servers())
    os.kill(server.pid, signal.SIGSTOP)
    guest = await bench.shell(LOOP)
    assert await guest.pids()
    assert only(servers()) != server


async def test_start_fails_where_no_process_can_be_forked(bench: Bench) -> None:
    assert (await (await bench.shell("exit 3")).wait()).code == 3  # it has loaded its modules
    await comes(lambda: not watchers())
    server = only(servers())
    before = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
    taken = {int(path.name) for path in Path(f"/proc/{server.pid}/fd").iterdir()}
    enough = [number for number in range(100) if number not in taken][DESCRIPTORS]  # for an order, not for a pidfd
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (enough, before[1]))
    with pytest.raises(EngineError, match="cannot start a process: Too many open files"):
        await bench.shell(LOOP)
    assert not watchers()
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, before)
    assert (await (await bench.shell("exit 3")).wait()).code == 3


async def test_node_that_lends_nothing_has_no_server(tmp_path: Path) -> None:
    engine = ProcessEngine()
    await engine.availability()
    assert not servers()
    assert (await (await Bench(engine, tmp_path, None).shell("exit 3")).wait()).code == 3
    await engine.close()
    assert not servers()


DAEMON = """
import asyncio, os, pathlib, sys
from mesh.execution.process.engine import ProcessEngine
from mesh.util.processes import children_of
from tests.execution.bench import LOOP, Bench

async def main():
    bench = Bench(ProcessEngine(), pathlib.Path(sys.argv[1]), None)
    await bench.shell(f"sleep 8{sys.argv[2]} & " + LOOP)
    print(*children_of(os.getpid()), flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


@pytest.mark.parametrize("first", ["daemon", "server"])
def test_server_and_guests_end_with_the_daemon(tmp_path: Path, first: str) -> None:
    """Kill both, in either order."""
    mark = fresh_mark()
    command = [sys.executable, "-c", DAEMON, str(tmp_path), mark]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as daemon:
        try:
            assert daemon.stdout is not None
            server = process_of(int(daemon.stdout.readline()))
            assert server is not None
            wait_until(lambda: processes_with(mark), "the guest to run")
            if first == "server":
                server.kill()
                wait_until(lambda: not lives(server), "the server to end")
                assert processes_with(mark), "the guest goes on without it"
        finally:
            daemon.kill()
    wait_until(lambda: not lives(server), "the server to end")
    wait_until(lambda: not processes_with(mark), "the guest to end")

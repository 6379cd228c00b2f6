"""The kill-switch: everything of a guest ends in a moment, whoever else stands still, and nobody else ever does."""

import asyncio
import contextlib
import json
import math
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from mesh.engine import hunt, warden
from mesh.engine.alarm import boot_s
from mesh.engine.alone import alone
from mesh.engine.descent import Process, lives, process_of
from mesh.engine.docker import DockerEngine
from mesh.engine.engine import Engine, EngineError
from mesh.engine.killswitch import BY_OWNER, KillSwitch, open_switch
from mesh.engine.process import ProcessEngine
from mesh.engine.register import Damaged, Entry, Register, boot_id, decode_entry
from mesh.engine.turns import Turns
from tests.dockerd import Dockerd, dockerd
from tests.engine.bench import LOOP, Bench, containers, processes_with, wait_until
from tests.images import busybox_image, import_busybox

WAIT_S = 30.0
FORKS = "f() { sleep 7{mark} & sleep 0.01; f; }; f"


class Place:
    """A register, its switch, and a bench on an engine that has them."""

    def __init__(self, root: Path, kind: str, image: str | None = None) -> None:
        """`image`: for containers; without it, one on the engine that all tests share."""
        self.root, self.kind = root, kind
        self.register = Register(root / "guests")
        self.socket = root / "kill.sock"
        self.switch = open_switch(self.register, self.socket)
        self.label = f"kill-{os.getpid()}-{time.monotonic_ns()}"
        engine: Engine
        if kind == "docker":
            engine = DockerEngine(self.label, self.switch)
        else:
            engine = ProcessEngine(self.switch, namespaces=kind == "process")
        (root / "attempt").mkdir()
        self.bench = Bench(engine, root / "attempt", (image or busybox_image()) if kind == "docker" else None)

    async def guest(self, mark: str) -> None:
        script = f"trap '' TERM; (sleep 9{mark} &); sh -c 'sleep 8{mark} & wait' & echo ready{mark}; {LOOP}"
        await self.bench.shell(script)
        await self.bench.until_logged(f"ready{mark}")

    def press(self, timeout_s: float = WAIT_S) -> dict[str, object]:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(timeout_s)
            client.connect(str(self.socket))
            client.sendall(b"kill\n")
            heard = b""
            while not heard.endswith(b"\n"):
                heard += client.recv(65536) or b"\n"
        answer: dict[str, object] = json.loads(heard)
        return answer


def fresh_mark() -> str:
    return f"{time.time_ns()}"[-8:]


@pytest.fixture(params=["process", "session", pytest.param("docker", marks=pytest.mark.docker)])
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    place = Place(tmp_path, request.param)
    assert (await place.bench.engine.availability()).ok
    yield place
    place.switch.strike().result(WAIT_S)
    for guest in place.bench.guests:
        await guest.wait()
    await place.bench.engine.close()
    place.switch.close()


async def test_all_guests_end_while_the_loop_is_blocked(place: Place) -> None:
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
    assert all(one["processes"] >= 3 and one["left"] == [] and one["job"] == "j" * 26 for one in killed)
    assert not any(processes_with(f"{mark}{number}") for number in range(3))
    async with asyncio.timeout(WAIT_S):
        ends = [await guest.wait() for guest in place.bench.guests]
    assert {(end.code, end.fault) for end in ends} == {(137, BY_OWNER)}
    assert place.register.entries() == ({}, [])


async def test_nothing_starts_until_its_owner_lends_again(place: Place) -> None:
    assert place.press() == {"killed": []}
    with pytest.raises(EngineError, match="taken this machine back"):
        await place.bench.shell("true")
    assert place.register.entries() == ({}, [])
    place.switch.release()
    guest = await place.bench.shell("exit 3")
    assert (await guest.wait()).code == 3
    if place.kind == "docker":
        await asyncio.to_thread(wait_until, lambda: not containers(place.label), "the containers to be removed")


async def test_it_is_ended_that_starts_meanwhile(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order comes when its program runs already, and nobody has noted which process that is."""
    mark = fresh_mark()
    started, amended = place.switch.started, place.switch.amend

    def late(key: str) -> None:
        place.switch.strike().result(WAIT_S)
        started(key)

    monkeypatch.setattr(place.switch, "started", late)
    monkeypatch.setattr(place.switch, "amend", lambda key, entry: amended(key, replace(entry, head=None, groups=())))
    with pytest.raises(EngineError, match="taken this machine back"):
        await place.bench.shell(f"sleep 8{mark} & {LOOP}")
    assert not processes_with(mark)


async def test_what_is_ended_past_the_daemon_is_not_the_jobs_fault(place: Place) -> None:
    mark = fresh_mark()
    await place.guest(mark)
    entries, problems = place.register.entries()
    assert problems == [] and len(entries) == 1
    for key in entries:
        place.register.strike(key)
    (struck,) = hunt.run(entries.values())
    assert struck.processes >= 3 and struck.left == () and not processes_with(mark)
    async with asyncio.timeout(WAIT_S):
        end = await place.bench.guests[0].wait()
    assert (end.code, end.fault) == (137, BY_OWNER) and place.register.entries() == ({}, [])


async def test_one_that_stands_still_ends(place: Place) -> None:
    mark = fresh_mark()
    await place.guest(mark)
    place.bench.guests[0].allow_until(0.0)
    async with asyncio.timeout(WAIT_S):
        while not await place.bench.guests[0].stands_still():
            await asyncio.sleep(0.01)
    place.press()
    assert not processes_with(mark)


async def test_one_that_forks_for_ever_ends(place: Place) -> None:
    mark = fresh_mark()
    await place.bench.shell(FORKS.replace("{mark}", mark))
    async with asyncio.timeout(WAIT_S):
        while len(processes_with(f"7{mark}")) < 30:
            await asyncio.sleep(0.05)
    place.press()
    assert not processes_with(f"7{mark}")


async def test_orphans_of_a_guest_are_among_its_processes(place: Place) -> None:
    mark = fresh_mark()
    await place.bench.shell(f"sh -c 'trap \"\" TERM; sleep 8{mark} & exit 0'; echo ready{mark}; {LOOP}")
    await place.bench.until_logged(f"ready{mark}")
    guest = place.bench.guests[0]
    found = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in await guest.pids()]
    assert any(f"8{mark}".encode() in line for line in found)
    assert await guest.catches_term() is False


async def test_orphans_are_told_of_a_notice(tmp_path: Path) -> None:
    """Where there is no PID namespace, the watcher adopts them."""
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


@pytest.mark.parametrize("kind", ["process", "session"])
async def test_a_process_whose_start_is_given_up_ends(tmp_path: Path, kind: str) -> None:
    """Before it is in the register, and once it is."""
    place = Place(tmp_path, kind)
    mark = fresh_mark()
    for entered in (False, True):
        starting = asyncio.create_task(place.bench.shell(f"sleep 8{mark} & {LOOP}"))
        while not starting.done():
            await asyncio.sleep(0)
            if not entered or place.register.entries()[0]:
                break
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        await place.bench.engine.close()
        assert not processes_with(mark) and place.register.entries() == ({}, [])
    place.switch.close()


@pytest.mark.docker
async def test_a_start_that_is_given_up_leaves_nothing(tmp_path: Path) -> None:
    """Whatever the engine is at: before there is a container, and once there is one that does not run yet."""
    place = Place(tmp_path, "docker")
    assert (await place.bench.engine.availability()).ok
    mark = fresh_mark()
    for made in (False, True):
        starting = asyncio.create_task(place.bench.shell(f"sleep 8{mark} & {LOOP}"))
        while not starting.done():
            await asyncio.sleep(0)
            if not made or await asyncio.to_thread(containers, place.label):
                break
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        await place.bench.engine.close()
        assert not containers(place.label) and not processes_with(mark) and place.register.entries() == ({}, [])
        place.bench.engine = DockerEngine(place.label, place.switch)
    await place.bench.engine.close()
    place.switch.close()


# --- who is not meant


@pytest.fixture
def bystander() -> Iterator[Process]:
    child = subprocess.Popen(["sleep", "600"])
    process = process_of(child.pid)
    assert process is not None
    yield process
    child.kill()
    child.wait()


def entry(**changes: object) -> Entry:
    return replace(Entry(boot_id(), "process", "j" * 26, 0), **changes)  # type: ignore[arg-type]


def test_a_number_that_was_given_again_is_somebody_else(bystander: Process) -> None:
    other = Process(bystander.pid, bystander.started - 1)
    assert other.open() is None
    (struck,) = hunt.run([entry(head=other, watcher=other)])
    assert struck.left == () and lives(bystander)
    (struck,) = hunt.run([entry(head=bystander)])
    assert struck.left == () and not lives(bystander)


def test_nobody_is_ended_by_an_entry_of_another_boot(tmp_path: Path, bystander: Process) -> None:
    register = Register(tmp_path)
    register.keep("old", replace(entry(head=bystander), boot="another"))
    assert register.entries() == ({}, [])
    open_switch(register, tmp_path / "kill.sock").close()
    assert lives(bystander) and list(tmp_path.iterdir()) == []


def test_what_an_earlier_run_left_is_ended_at_the_next_start(tmp_path: Path, bystander: Process) -> None:
    register = Register(tmp_path / "guests")
    register.keep("left", entry(head=bystander))
    open_switch(register, tmp_path / "kill.sock").close()
    assert not lives(bystander) and register.entries() == ({}, [])


def test_the_socket_is_its_owners_alone_and_takes_one_word(tmp_path: Path) -> None:
    switch = open_switch(Register(tmp_path / "guests"), tmp_path / "kill.sock")
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


def test_what_fails_before_the_signals_does_not_keep_them(tmp_path: Path, bystander: Process) -> None:
    switch = KillSwitch()
    pressed: list[str] = []
    switch.first.append(lambda: pressed.append("gate"))
    switch.first.append(lambda: 1 / 0)
    switch.struck = lambda: pressed.append("told")
    switch.enter(entry(head=bystander))
    (struck,) = switch.strike().result(WAIT_S)
    assert pressed == ["gate", "told"] and struck.processes == 1 and not lives(bystander)
    switch.close()


def test_a_guest_that_hangs_does_not_delay_another(bystander: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that the kernel does not end (here: one that nobody is told to end)."""
    monkeypatch.setattr(hunt, "GIVE_UP_S", 1.0)
    switch = KillSwitch()
    own = process_of(os.getpid())
    stuck = switch.enter(entry(head=own, job="stuck"))
    well = switch.enter(entry(head=bystander, job="well"))
    monkeypatch.setattr(Process, "kill", lambda self: os.kill(self.pid, 9) if self != own else None)
    first, second = switch.kill(stuck), switch.kill(well)
    assert second.result(WAIT_S)[0].left == () and not first.done()
    (left,) = first.result(WAIT_S)
    assert left.left == (os.getpid(),) and "does not end" in str(left)
    switch.close()


# --- an engine that hangs


@pytest.fixture(scope="module")
def engine_of_its_own() -> Iterator[Dockerd]:
    with dockerd(live=True) as engine:
        yield engine


@pytest.fixture
def own_dockerd(engine_of_its_own: Dockerd, monkeypatch: pytest.MonkeyPatch) -> Dockerd:
    """One that a test may stop, and start again."""
    monkeypatch.setenv("DOCKER_HOST", engine_of_its_own.host)
    return engine_of_its_own


@pytest.mark.dockerd
async def test_guests_end_while_their_engine_hangs(tmp_path: Path, own_dockerd: Dockerd) -> None:
    place = Place(tmp_path, "docker", import_busybox())
    mark = fresh_mark()
    try:
        await place.guest(mark + "1")
        await place.guest(mark + "2")
        place.bench.guests[1].allow_until(0.0)
        async with asyncio.timeout(WAIT_S):
            while not await place.bench.guests[1].stands_still():
                await asyncio.sleep(0.01)
        with own_dockerd.hanging():
            killed = await asyncio.to_thread(place.press)
            assert not processes_with(f"{mark}1") and not processes_with(f"{mark}2")
            assert isinstance(killed["killed"], list) and len(killed["killed"]) == 2
            async with asyncio.timeout(WAIT_S):
                ends = [await guest.wait() for guest in place.bench.guests]
            assert {(end.code, end.fault) for end in ends} == {(137, BY_OWNER)}, "also while the engine hangs"
        await asyncio.to_thread(wait_until, lambda: not containers(place.label), "the containers to be removed")
    finally:
        await place.bench.engine.close()
        place.switch.close()


@pytest.mark.dockerd
async def test_a_lease_holds_while_the_engine_hangs(tmp_path: Path, own_dockerd: Dockerd) -> None:
    place = Place(tmp_path, "docker", import_busybox())
    ticks = tmp_path / "attempt" / "work" / "ticks"  # what it prints comes by the engine
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
            with own_dockerd.hanging():
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


def test_one_that_nobody_can_pause_ends_with_its_lease(
    tmp_path: Path, bystander: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine is away, and no group of the guest's may be frozen."""
    monkeypatch.setattr(warden, "SILENT_S", 0.2)
    register = Register(tmp_path)
    register.keep("key", entry(engine="docker", container="c" * 64, head=bystander))
    ward = warden.Ward(str(tmp_path / "none"), register, Turns())
    ward.read(f"until {'c' * 64} {boot_s() + 60}\n".encode())
    ward.enforce()
    assert lives(bystander), "its lease is not over"
    ward.read(f"until {'c' * 64} 1.0\n".encode())
    ward.enforce()
    assert lives(bystander), "the engine has a moment to come back"

    def ended() -> bool:
        ward.enforce()
        return not lives(bystander)

    wait_until(ended, "it to be ended")


DUMPS = """
turns = turns.Turns(int(sys.argv[1]))
with turns.own(sys.argv[2], 60):
    print("dumps", flush=True)
    sys.stdin.read(1)
print("done", flush=True)
sys.stdin.read(1)
"""


def test_one_that_is_being_dumped_is_left_alone_and_none_is_dumped_in_doubt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bystander: Process
) -> None:
    """No engine answers: past its lease this one would be ended, for it has no group that could be frozen."""
    monkeypatch.setattr(warden, "SILENT_S", 0.0)
    container = "c" * 64
    register = Register(tmp_path)
    register.keep("key", entry(engine="docker", container=container, head=bystander))
    ward_turns = Turns()
    ward = warden.Ward(str(tmp_path / "none"), register, ward_turns)
    ward.read(f"until {container} 1.0\n".encode())
    command = [*alone("turns", DUMPS), str(ward_turns.descriptor), container]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=(ward_turns.descriptor,)
    ) as daemon:
        assert daemon.stdin is not None and daemon.stdout is not None
        assert daemon.stdout.readline() == "dumps\n"
        for _ in range(3):
            ward.enforce()
        assert lives(bystander), "it is being dumped"
        print(file=daemon.stdin, flush=True)
        assert daemon.stdout.readline() == "done\n"
        wait_until(lambda: bool(ward.enforce() or not lives(bystander)), "its lease to be kept again")
        asks = [*alone("turns", "sys.exit(not turns.Turns(int(sys.argv[1])).take(sys.argv[2]))")]
        asks += [str(ward_turns.descriptor), container]
        assert subprocess.run(asks, pass_fds=(ward_turns.descriptor,), check=False).returncode == 1, "it is in doubt"
        ward.read(f"gone {container}\n".encode())
        assert subprocess.run(asks, pass_fds=(ward_turns.descriptor,), check=False).returncode == 0
        daemon.stdin.close()


DAEMON = """
import asyncio, sys
from pathlib import Path
from mesh.engine.docker import DockerEngine
from mesh.engine.killswitch import open_switch
from mesh.engine.register import Register
from tests.dockerd import Dockerd, dockerd
from tests.engine.bench import LOOP, Bench
async def main():
    root = Path(sys.argv[1])
    switch = open_switch(Register(root / "guests"), root / "kill.sock")
    bench = Bench(DockerEngine(sys.argv[2], switch), root, sys.argv[3])
    await bench.shell(f"trap '' TERM HUP; sleep 8{sys.argv[4]} & echo ready; {LOOP}")
    await bench.until_logged("ready")
    print("ready", flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.mark.dockerd
def test_when_the_daemon_dies_while_its_engine_hangs_its_containers_end(tmp_path: Path, own_dockerd: Dockerd) -> None:
    mark, label = fresh_mark(), f"orphan-{os.getpid()}"
    command = [sys.executable, "-c", DAEMON, str(tmp_path), label, import_busybox(), mark]
    daemon = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    assert daemon.stdout is not None and daemon.stdout.readline() == "ready\n" and processes_with(mark)
    with own_dockerd.hanging():
        daemon.kill()
        daemon.wait()
        daemon.stdout.close()
        wait_until(lambda: not processes_with(mark), "the warden to end it")
    wait_until(lambda: not containers(label), "the warden to remove it")


@pytest.mark.dockerd
async def test_an_engine_that_is_away_for_a_while_ends_nobody(tmp_path: Path, own_dockerd: Dockerd) -> None:
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


# --- a disk that is full


@pytest.mark.skipif(os.getuid() != 0, reason="a small file system of one's own needs root")
async def test_guests_end_though_the_disk_is_full(tmp_path: Path) -> None:
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
        with pytest.raises(EngineError, match="cannot be noted"):
            await place.bench.shell("true")
        place.press()
        assert not processes_with(mark)
        async with asyncio.timeout(WAIT_S):
            assert (await place.bench.guests[0].wait()).fault == BY_OWNER
        place.switch.close()
    finally:
        subprocess.run(["umount", "-l", small], check=True)


def test_the_register_needs_only_the_standard_library() -> None:
    """So that whoever must outlast the daemon's troubles can read it, and `mesh killall` starts at once."""
    command = alone("hunt", "print('msgspec' in sys.modules, 'asyncio' in sys.modules)")
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"


# --- a register that is damaged

texts = some.text(max_size=20)
values = some.none() | some.booleans() | some.integers() | texts | some.lists(some.integers() | texts, max_size=3)
shaped = some.fixed_dictionaries({field.name: values for field in fields(Entry)}).map(
    lambda value: json.dumps(value).encode()
)


@given(data=some.binary(max_size=200) | shaped)
def test_what_is_no_entry_is_refused_whole(data: bytes) -> None:
    try:
        found = decode_entry(data)
    except Damaged:
        return
    assert decode_entry(json.dumps(asdict(found)).encode()) == found
    assert all(process is None or process.pid > 1 for process in (found.head, found.watcher))


@pytest.mark.parametrize(
    "changed",
    [
        {"head": [1, 5]},
        {"head": [0, 5]},
        {"watcher": [-1, 5]},
        {"head": [2**40, 5]},
        {"groups": ["/sys/fs/cgroup/unified"]},
        {"groups": ["/sys/fs/cgroup/memory/docker"]},
        {"groups": ["/sys/fs/cgroup/x/../guest-0123456789abcdef"]},
        {"groups": ["guest-0123456789abcdef"]},
        {"extra": 1},
        {"attempt": True},
    ],
)
def test_an_entry_that_could_mean_others_is_refused(changed: dict[str, object]) -> None:
    plain = {**asdict(entry(groups=("/sys/fs/cgroup/unified/campus-mesh/guest-0123456789abcdef",))), **changed}
    with pytest.raises(Damaged):
        decode_entry(json.dumps(plain).encode())


def test_a_crash_while_an_entry_is_written_leaves_the_others(tmp_path: Path, bystander: Process) -> None:
    register = Register(tmp_path)
    register.keep("whole", entry(head=bystander))
    (tmp_path / ".half").write_bytes(b'{"boot": "')
    (tmp_path / "torn.json").write_bytes(b'{"boot": "')
    entries, problems = register.entries()
    assert list(entries) == ["whole"] and len(problems) == 1 and "torn.json: not an entry" in problems[0]
    register.strike("whole")
    assert list(register.entries()[0]) == ["whole"] and register.drop("whole") and not register.drop("whole")
    register.clear()
    assert list(tmp_path.iterdir()) == []

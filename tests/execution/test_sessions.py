"""Sessions inside real guests, for every engine; `mesh exec` uses them."""

import asyncio
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mesh.execution.docker.session import DockerSession
from mesh.execution.engine import Guest
from mesh.execution.process.engine import ProcessEngine
from mesh.execution.session import Session, SessionError
from mesh.rpc.frames import (
    ERRORS,
    INPUT,
    OUTPUT,
    PIECE_BYTES,
    Data,
    Exit,
    Failed,
    Frame,
    InputEnd,
    Order,
    Resize,
    Signal,
)
from tests.execution.bench import COUNT, LOOP, WAIT_S, Bench, processes_with, steps_taken, steps_when_stopped


async def going(bench: Bench, script: str = f"echo ready; {LOOP}", **changes: object) -> Guest:
    guest = await bench.shell(script, **changes)
    await bench.until_logged("ready")
    return guest


class Told:
    """The output and the end of a session."""

    def __init__(self) -> None:
        self.out, self.errors = b"", b""
        self.end: Frame | None = None

    def take(self, frame: Frame) -> None:
        if isinstance(frame, Data):
            if frame.kind == ERRORS:
                self.errors += frame.data
            else:
                assert frame.kind == OUTPUT
                self.out += frame.data
        else:
            self.end = frame


async def to_the_end(session: Session) -> Told:
    told = Told()
    async with asyncio.timeout(WAIT_S):
        while (frame := await session.receive()) is not None:
            told.take(frame)
    return told


async def until_told(session: Session, told: Told, text: bytes) -> None:
    async with asyncio.timeout(WAIT_S):
        while text not in told.out:
            frame = await session.receive()
            assert frame is not None, f"the session ended: {told.out!r} {told.end}"
            told.take(frame)


async def run(guest: Guest, *argv: str, data: bytes | None = None, tty: bool = False) -> Told:
    session = await guest.open_session(Order(argv, tty=tty, term="xterm"))
    if data is not None:
        await session.send(Data(INPUT, data))
    await session.send(InputEnd())
    return await to_the_end(session)


async def test_session_is_part_of_guest(bench: Bench) -> None:
    guest = await going(bench, env={"SEED": "7"})
    told = await run(
        guest, "sh", "-c", 'echo "$MESH_JOB_ID $SEED"; pwd; echo err >&2; echo own > $MESH_OUT_DIR/own; exit 3'
    )
    base = "/mesh" if bench.image else str(bench.root)
    assert told.out.decode().split() == ["j" * 26, "7", f"{base}/work"]
    assert (told.errors, told.end) == (b"err\n", Exit(3))
    assert (bench.root / "out" / "own").read_text() == "own\n"
    assert await guest.pids(), "the job continues"


async def test_nvidia_variables_are_the_nodes_own(bench: Bench) -> None:
    sent = {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "all"}
    guest = await going(bench, f"env; echo ready; {LOOP}", env=sent)
    said = (await run(guest, "env")).out.decode()
    for text in (bench.log, said):
        named = {line for line in text.splitlines() if line.startswith("NVIDIA")}
        assert named == {"NVIDIA_VISIBLE_DEVICES=void", "NVIDIA_DRIVER_CAPABILITIES=compute,utility"}


async def test_session_sees_only_guest_processes(bench: Bench) -> None:
    if not bench.image and "own process" not in (await bench.engine.availability()).isolation:
        pytest.skip("here a guest has no process namespace")
    guest = await going(bench)
    told = await run(guest, "ls", "/proc")
    numbers = [int(name) for name in told.out.split() if name.isdigit()]
    assert 1 in numbers and len(numbers) <= 8, told.out


async def test_input_arrives_complete_with_end(bench: Bench) -> None:
    guest = await going(bench)
    data = os.urandom(3 << 20)
    session = await guest.open_session(Order(("cat",)))

    async def feed() -> None:
        for start in range(0, len(data), 30_000):
            await session.send(Data(INPUT, data[start : start + 30_000]))
        await session.send(InputEnd())

    feeding = asyncio.create_task(feed())
    told = await to_the_end(session)
    await feeding
    assert told.out == data and told.end == Exit(0)


async def test_slow_reader_blocks_with_bounded_memory(bench: Bench) -> None:
    guest = await going(bench)
    mark = f"7{time.time_ns()}"[-9:]
    session = await guest.open_session(Order(("sleep", mark)))
    sent = 0
    with pytest.raises(TimeoutError):
        while sent < 16 << 20:
            await asyncio.wait_for(session.send(Data(INPUT, b"x" * PIECE_BYTES)), 1.0)
            sent += PIECE_BYTES
    assert sent < 4 << 20
    await session.close()
    await until_true(lambda: not processes_with(mark))


async def test_unread_output_blocks_writer(bench: Bench) -> None:
    guest = await going(bench)
    line = "x" * 1000
    script = f"while :; do echo {line}; echo {line} >> $MESH_OUT_DIR/lines; done"
    session = await guest.open_session(Order(("sh", "-c", script)))
    lines, size = bench.root / "out" / "lines", 0
    async with asyncio.timeout(WAIT_S):
        while not size or lines.stat().st_size != size:
            size = lines.stat().st_size if lines.exists() else 0
            await asyncio.sleep(0.5)
    assert 0 < size < 4 << 20
    await session.close()


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 85", 85), ("kill -9 $$", 137)])
async def test_session_exit_is_separate_from_job(bench: Bench, script: str, code: int) -> None:
    guest = await going(bench)
    assert (await run(guest, "sh", "-c", script)).end == Exit(code)
    assert await guest.pids()


async def test_missing_command_is_reported(bench: Bench) -> None:
    guest = await going(bench)
    told = await run(guest, "no-such-command")
    assert isinstance(told.end, Exit) and told.end.code in {126, 127}
    assert b"no-such-command" in told.out + told.errors


async def test_terminal_has_size_keys_and_name(bench: Bench) -> None:
    guest = await going(bench)
    script = f"trap 'echo caught' INT; trap 'echo resized' WINCH; echo ready $TERM; test -t 0 && echo terminal; {LOOP}"
    session = await guest.open_session(Order(("sh", "-c", script), tty=True, term="xterm", rows=30, columns=100))
    told = Told()
    await until_told(session, told, b"terminal")
    assert b"ready xterm" in told.out
    await session.send(Data(INPUT, b"\x03"))
    await until_told(session, told, b"caught")
    if not bench.image:
        await session.send(Resize(40, 120))
        await until_told(session, told, b"resized")
    await session.close()


async def test_signal_reaches_session_only(bench: Bench) -> None:
    guest = await going(bench)
    session = await guest.open_session(Order(("sh", "-c", f"trap 'echo told; exit 4' INT; echo ready; {LOOP}")))
    told = Told()
    await until_told(session, told, b"ready")
    await session.send(Signal("INT"))
    told = await to_the_end(session)
    assert told.end == Exit(4) and b"told" in told.out
    assert await guest.pids()


async def test_signal_right_after_start_arrives(bench: Bench) -> None:
    guest = await going(bench)
    for _ in range(5):
        session = await guest.open_session(Order(("sleep", "1000")))
        await session.send(Signal("TERM"))
        assert (await to_the_end(session)).end == Exit(128 + signal.SIGTERM)


async def test_closed_session_is_hung_up_and_killed(bench: Bench) -> None:
    guest = await going(bench)
    mark = f"7{time.time_ns()}"[-9:]
    session = await guest.open_session(Order(("sh", "-c", f"trap '' HUP; echo ready; sleep {mark}; {LOOP}")))
    await until_told(session, Told(), b"ready")
    await until_true(lambda: bool(processes_with(mark)))
    async with asyncio.timeout(WAIT_S):
        await session.close()
    await until_true(lambda: not processes_with(mark))
    assert await guest.pids(), "the job continues"


async def test_session_processes_die_with_guest(bench: Bench) -> None:
    guest = await going(bench)
    mark = f"7{time.time_ns()}"[-9:]
    session = await guest.open_session(Order(("sh", "-c", f"trap '' HUP TERM; echo ready; sleep {mark}; {LOOP}")))
    await until_told(session, Told(), b"ready")
    sleeping: list[int] = []

    def begun() -> bool:
        """Find the sleeping process; the command line of its shell contains the mark as well."""
        lines = [line.split() for line in os.popen("ps -eo pid,args")]
        sleeping[:] = [int(words[0]) for words in lines if words[1:] == ["sleep", mark]]
        return bool(sleeping)

    await until_true(begun)
    (pid,) = sleeping
    assert pid in await guest.pids()
    async with asyncio.timeout(WAIT_S):
        await guest.kill()
    await until_true(lambda: not processes_with(mark))
    told = await to_the_end(session)
    assert isinstance(told.end, Failed | Exit)
    await session.close()


async def test_session_ends_with_job(bench: Bench) -> None:
    guest = await going(bench, "echo ready; while ! test -e $MESH_OUT_DIR/go; do sleep 0.05; done")
    mark = f"7{time.time_ns()}"[-9:]
    session = await guest.open_session(Order(("sh", "-c", f"echo ready; sleep {mark}")))
    await until_told(session, Told(), b"ready")
    (bench.root / "out" / "go").touch()
    async with asyncio.timeout(WAIT_S):
        assert (await guest.wait()).code == 0
    await until_true(lambda: not processes_with(mark))
    await to_the_end(session)
    with pytest.raises(SessionError):
        await guest.open_session(Order(("true",)))


async def test_session_stops_with_lease_and_no_new_one_starts(bench: Bench) -> None:
    guest = await going(bench)
    session = await guest.open_session(Order(("sh", "-c", COUNT)))
    async with asyncio.timeout(WAIT_S):
        while not steps_taken(bench):  # the file exists before the first step
            await asyncio.sleep(0.02)
    guest.allow_until(0.0)
    steps = await steps_when_stopped(bench)
    try:
        told = await run(guest, "true")
        assert isinstance(told.end, Failed) and "may not run now" in told.end.text
    except SessionError as error:
        assert "may not run now" in str(error)
    guest.allow_until(math.inf)
    async with asyncio.timeout(WAIT_S):
        while (bench.root / "out" / "steps").read_text().count("step\n") <= steps:
            await asyncio.sleep(0.02)
    await session.close()


async def test_many_sessions_leave_no_process(bench: Bench) -> None:
    before = zombies()
    guest = await going(bench)
    ends = await asyncio.gather(*(run(guest, "sh", "-c", f"exit {number}") for number in range(8)))
    assert [told.end for told in ends] == [Exit(number) for number in range(8)]
    async with asyncio.timeout(WAIT_S):
        while zombies() - before:
            await asyncio.sleep(0.05)


def zombies() -> set[str]:
    """Return the zombie children of this process."""
    lines = os.popen(f"ps --ppid {os.getpid()} -o pid,stat").read().splitlines()
    return {pid for pid, state in map(str.split, lines) if state.startswith("Z")}


async def test_session_has_default_signal_handlers(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    bench = Bench(ProcessEngine(), tmp_path, None)
    try:
        guest = await going(bench)
        script = (
            "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler, signal.getsignal(13))"
        )
        told = await run(guest, sys.executable, "-c", script)
        assert told.out.startswith(b"True"), told.out
        await guest.kill()
    finally:
        signal.signal(signal.SIGINT, before)


async def until_true(ready: object) -> None:
    assert callable(ready)
    async with asyncio.timeout(WAIT_S):
        while not ready():
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(("head", "found"), [(os.getpid(), {os.getpid()}), (1 << 30, set())], ids=["alive", "gone"])
async def test_process_outside_of_the_container_is_not_of_its_session(head: int, found: set[int]) -> None:
    """The engine tells a process id, which another program of this machine may have by now."""

    async def run(ask: Callable[[], object]) -> object:
        return ask()

    nothing: Any = None
    api = SimpleNamespace(exec_inspect=lambda identity: {"Running": True, "Pid": os.getpid()})
    session = DockerSession(run, api, "x", head, False, nothing, nothing)
    assert found <= await session.pids() and bool(await session.pids()) == bool(found)

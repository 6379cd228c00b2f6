"""A hostile job of the process engine, started as a real guest, reaches nothing of its host's owner."""

import asyncio
import errno
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from mesh.execution.engine import BadCommand
from mesh.execution.process.confinement import (
    CLONE3,
    FILES_FROM,
    IO_URING,
    KEPT_CAPABILITIES,
    MACHINES,
    SCOPES_FROM,
    landlock_version,
)
from mesh.execution.process.engine import ProcessEngine
from mesh.execution.process.sandbox import Sandbox
from mesh.rpc.frames import Order
from mesh.util import cgroups
from tests.adversary.guest import HostileGuest, owners_machine
from tests.execution.bench import WAIT_S, Bench


@pytest.fixture
def machine() -> Iterator[Path]:
    root = Path(tempfile.mkdtemp(prefix="mesh-guest-"))
    yield root
    shutil.rmtree(root)


@pytest.fixture
async def bench(machine: Path) -> AsyncIterator[Bench]:
    """Yield the bench of one attempt, in the state directory of a daemon that hides its owner's files."""
    owners_machine(machine)
    engine = ProcessEngine(sandbox=Sandbox(machine / "home", [machine / "state"], os.environ))
    if "namespaces" not in (await engine.availability()).isolation:
        pytest.skip("this kernel gives no namespaces")
    own = machine / "state/jobs/own/1"
    own.mkdir(parents=True)
    yield Bench(engine, own, None)
    await engine.close()


async def test_variables_of_a_job_make_nothing_visible(bench: Bench, machine: Path) -> None:
    secrets = owners_machine(machine)
    api = machine / "state/mesh.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(api))
        listener.listen()
        places = ":".join(map(str, [*secrets.values(), *{path.parent for path in secrets.values()}, api]))
        attempts = [("read", path) for path in secrets.values()] + [("connect", api)]
        for name in ("LD_LIBRARY_PATH", "PATH", "LD_PRELOAD", "PYTHONPATH"):
            env = {name: places if name != "PATH" else f"{os.environ['PATH']}:{places}"}
            assert await HostileGuest(bench).reached(sys.executable, attempts, env=env) == {}, name


async def test_hidden_command_is_refused_without_a_look(bench: Bench, machine: Path) -> None:
    tool = machine / "home/bin/tool"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    for command in (tool, machine / "home/bin/nothing"):
        with pytest.raises(BadCommand, match="process_sees"):
            await bench.start(str(command))
    for name in ("tool", "nothing"):
        with pytest.raises(BadCommand, match="not on this node's PATH"):
            await bench.start(name, env={"PATH": str(tool.parent)})


@contextmanager
def listening(*addresses: str) -> Iterator[None]:
    """Listen at Unix sockets, as their owner's programs do."""
    with ExitStack() as stack:
        for address in addresses:
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(address)
            listener.listen()
        yield


async def test_sockets_of_the_owner_are_out_of_reach(bench: Bench, machine: Path) -> None:
    """Play tmux, an agent of SSH, X and a bus, each where it listens, and a socket that a variable of the daemon names."""
    with ExitStack() as stack:
        places = [
            tempfile.mkdtemp(prefix=name, dir=top)
            for top, name in (("/tmp", "tmux-"), ("/run", "user-"), ("/var/tmp", "x-"))
        ]
        for place in places:
            stack.callback(shutil.rmtree, place)
        paths = [f"{place}/default" for place in places]
        abstract = f"/tmp/.X11-unix/X{os.getpid()}"
        stack.enter_context(listening(*paths, f"\0{abstract}"))
        attempts: list[tuple[str, object]] = [("connect", path) for path in paths] + [
            ("entries", place) for place in places
        ]
        if landlock_version() >= SCOPES_FROM:
            attempts.append(("abstract", abstract))
        assert await HostileGuest(bench).reached(sys.executable, attempts) == {}


async def test_sockets_that_the_environment_names_are_out_of_reach(machine: Path) -> None:
    outside = Path("/opt") / f"mesh-test-{os.getpid()}"
    outside.mkdir()
    try:
        named = outside / "bus"
        with listening(str(named)):
            env = {**os.environ, "DBUS_SESSION_BUS_ADDRESS": f"unix:path={named},guid=1"}
            engine = ProcessEngine(sandbox=Sandbox(machine / "home", [], env))
            await engine.availability()
            (machine / "attempt").mkdir()
            bench = Bench(engine, machine / "attempt", None)
            assert await HostileGuest(bench).reached(sys.executable, [("connect", named)]) == {}
            await engine.close()
    finally:
        shutil.rmtree(outside)


async def test_temporary_files_are_the_guests_own(bench: Bench) -> None:
    for top in ("/tmp", "/var/tmp", "/dev/shm"):
        with tempfile.NamedTemporaryFile(dir=top) as file:
            Path(file.name).write_text("secret")
            left = f"{top}/left-{os.getpid()}"
            attempts = [("read", file.name), ("write", left), ("read", left)]
            assert await HostileGuest(bench).reached(sys.executable, attempts) == {
                f"write {left}": "reached",
                f"read {left}": "reached",
            }
            assert not Path(left).exists()
    assert (bench.root / "tmp" / f"left-{os.getpid()}").exists(), "where the limit of its disk counts it"


@pytest.mark.skipif(not Path("/dev/fuse").exists(), reason="this machine has no FUSE")
async def test_guest_serves_no_file_system(bench: Bench) -> None:
    assert await bench.output("stat -c %t:%T /dev/fuse /dev/null") == "1:3\n1:3\n"


async def test_guest_cannot_regain_rights(bench: Bench, machine: Path) -> None:
    """Try what keyrings, BPF, io_uring and root without its capabilities would allow."""
    _, keyctl, denied = MACHINES[os.uname().machine]
    attempts: list[tuple[str, object]] = [("system_call", number) for number in (keyctl, *denied, *IO_URING)]
    attempts += [("unmount", machine / "home"), ("unmount", "/tmp"), ("make_device", "disk"), ("terminal", "")]
    owners_end, terminal = os.openpty()
    attempts += [("kill", os.getpid()), ("trace", 1), ("write", os.ttyname(terminal))]
    attempts += [("write", place / "cgroup.procs") for _, place in cgroups.mounts().values()]
    assert await HostileGuest(bench).reached(sys.executable, attempts) == {}
    os.close(owners_end)
    os.close(terminal)
    text = await bench.output("cat /proc/self/status")
    assert "NoNewPrivs:\t1" in text and "Seccomp:\t2" in text
    if os.geteuid() == 0:
        (bound,) = re.findall(r"CapBnd:\t([0-9a-f]+)", text)
        assert int(bound, 16) == sum(1 << capability for capability in KEPT_CAPABILITIES), "all others are given up"


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="no other machine has a second table of system calls")
async def test_guest_makes_no_call_by_the_numbers_of_x32(bench: Bench) -> None:
    """A kernel without x32 says ENOSYS by itself: the filter denies them before."""
    call = f"import ctypes; c = ctypes.CDLL(None, use_errno=True); c.syscall({1 << 30 | 39}); print(ctypes.get_errno())"
    assert (await bench.output(f"exec {sys.executable} -c '{call}'")).strip() == str(errno.EPERM)


@pytest.mark.skipif(os.uname().machine not in MACHINES, reason="there is no filter of system calls for this machine")
async def test_guest_starts_no_process_in_another_group(bench: Bench) -> None:
    """Call clone3 without arguments, which the kernel refuses for another reason than the filter does."""
    call = f"import ctypes; c = ctypes.CDLL(None, use_errno=True); c.syscall({CLONE3}, 0, 0); print(ctypes.get_errno())"
    assert (await bench.output(f"exec {sys.executable} -c '{call}'")).strip() == str(errno.ENOSYS)


@pytest.mark.skipif(landlock_version() < FILES_FROM, reason="this kernel has no Landlock")
async def test_landlock_hides_files_without_namespaces(machine: Path) -> None:
    secrets = owners_machine(machine)
    engine = ProcessEngine(namespaces=False, sandbox=Sandbox(machine / "home", [machine / "state"], os.environ))
    isolation = (await engine.availability()).isolation
    assert "except their home" in isolation and "missing here: namespaces, so the owner's sockets" in isolation
    own = machine / "state/jobs/own/1"
    own.mkdir(parents=True)
    bench = Bench(engine, own, None)
    with tempfile.NamedTemporaryFile(dir="/tmp") as file, subprocess.Popen(["sleep", "600"]) as bystander:
        file.write(b"secret")
        file.flush()
        attempts: list[tuple[str, object]] = [("read", path) for path in secrets.values()]
        attempts += [
            ("entries", machine / "home"),
            ("entries", machine / "state/jobs"),
            ("read", file.name),
            ("write", "/tmp/x"),
        ]
        attempts += [
            ("trace", os.getpid()),
            ("trace", bystander.pid),
            ("read", f"/proc/{bystander.pid}/root{file.name}"),
        ]
        if landlock_version() >= SCOPES_FROM:
            attempts += [("kill", bystander.pid), ("kill", os.getpid())]
        assert await HostileGuest(bench).reached(sys.executable, attempts) == {}
        bystander.kill()
    said = await bench.output(
        "echo mine > ~/file; mktemp; echo new > new; mv new $MESH_OUT_DIR/; cat ~/file $MESH_OUT_DIR/new"
    )
    assert f"{own}/tmp/" in said and "mine\nnew" in said, said
    guest = await bench.shell("echo $$ > ~/pid; echo ready; sleep 600")
    await bench.until_logged("ready")
    session = await guest.open_session(Order(("sh", "-c", "cat ~/file && kill -KILL $(cat ~/pid)")))
    async with asyncio.timeout(WAIT_S):
        assert (await guest.wait()).code == 137, "a session is in the domain of its job"
    await session.close()
    await engine.close()

"""Processes, their mounts and limits, and the bounds of a look at them. A user has chosen some of the bytes in /proc."""

import errno
import math
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mesh.util import budget, processes
from mesh.util.boottime import Alarm, boot_s
from mesh.util.mounts import Mount, device_of, mount_number, mounts, numbers_on
from mesh.util.processes import (
    Process,
    Stat,
    catches,
    children_of,
    descendants_of,
    keep_to_user_limits,
    lines_of,
    lives,
    name_of,
    no_core_dumps,
    process_of,
    stands_still,
    stat_of,
)
from tests.execution.bench import wait_until

LINES = b"""\
25 1 8:1 / / rw,relatime shared:1 - ext4 /dev/root rw,discard
94 25 0:52 / /mnt/M\xfcller\x0b\xc2\x85\r rw master:3 propagate_from:2 - tmpfs x rw
95 25 0:53 /a\\040b /mnt/tab\\011back\\134slash\\012 rw - cgroup  rw,memory
"""


def test_mounts_are_told_apart_whatever_bytes_their_paths_have(tmp_path: Path) -> None:
    (tmp_path / "mountinfo").write_bytes(LINES)
    assert mounts(f"..{tmp_path}") == [
        Mount("25", "8:1", "/", "/", ("shared:1",), "ext4", "rw,discard"),
        Mount(
            "94",
            "0:52",
            "/",
            os.fsdecode(b"/mnt/M\xfcller\x0b\xc2\x85\r"),
            ("master:3", "propagate_from:2"),
            "tmpfs",
            "rw",
        ),
        Mount("95", "0:53", "/a b", "/mnt/tab\tback\\slash\n", (), "cgroup", "rw,memory"),
    ]


@pytest.fixture
def renamed() -> Iterator[None]:
    """Give this process a name that is no text and looks like another line of its status."""
    comm = Path("/proc/self/comm")
    before = comm.read_bytes()
    comm.write_bytes(b"\xff\rSigCgt:\tfff")
    yield
    comm.write_bytes(before)


def test_name_of_a_program_may_hold_any_bytes(renamed: None) -> None:
    assert name_of(os.getpid()) == "�\rSigCgt:\tfff"
    assert not catches(os.getpid(), signal.SIGUSR2)
    assert len(lines_of("/proc/self/status")) == Path("/proc/self/status").read_bytes().count(b"\n")


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def test_process_is_one_start_of_its_id(child: subprocess.Popen[bytes]) -> None:
    own = process_of(child.pid)
    assert own is not None and lives(own)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    other = Process(child.pid, own.started + 1)
    assert other.open() is None and not lives(other)
    other.kill()
    assert child.poll() is None, "the id was another process's"
    assert len(os.listdir("/proc/self/fd")) == before, "no descriptor stays open"  # noqa: PTH208
    own.kill()
    assert child.wait() == -signal.SIGKILL and own.open() is None
    assert len(os.listdir("/proc/self/fd")) == before and stat_of(child.pid) is None  # noqa: PTH208


def test_zombie_does_not_live_but_stands_still(child: subprocess.Popen[bytes]) -> None:
    own = process_of(child.pid)
    assert own is not None and not stands_still(child.pid)
    os.kill(child.pid, signal.SIGSTOP)
    wait_until(lambda: stands_still(child.pid), "it to stop")
    assert lives(own)
    os.kill(child.pid, signal.SIGCONT)
    wait_until(lambda: not stands_still(child.pid), "it to run")
    child.kill()
    wait_until(lambda: (stat_of(child.pid) or Stat("", 0, 0, 0, 0)).state == "Z", "it to end")
    assert not lives(own) and stands_still(child.pid)


THREADS_OF_A_ZOMBIE = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
print(flush=True)
ctypes.CDLL(None).syscall(SYS_exit, 0)
"""


def test_process_lives_while_one_of_its_threads_does() -> None:
    code = THREADS_OF_A_ZOMBIE.replace("SYS_exit", "93" if os.uname().machine == "aarch64" else "60")
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            child.stdout.readline()
            wait_until(lambda: (stat_of(child.pid) or Stat("", 0, 0, 0, 0)).state == "Z", "it to end")
            own = process_of(child.pid)
            assert own is not None and lives(own)
        finally:
            child.kill()


def test_stop_that_is_pending_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a process that waits in the kernel, after vfork(2), for a child that is stopped."""
    states = {"state": "D"}
    monkeypatch.setattr(processes, "stat_of", lambda pid: Stat(states["state"], 1, 0, 0, 0))
    masks: list[str] = []
    monkeypatch.setattr(processes, "lines_of", lambda path: masks)
    stop = f"{1 << (signal.SIGSTOP - 1):016x}"
    for line, still in (
        ("SigPnd:\t0", False),
        (f"SigPnd:\t{stop}", True),
        (f"ShdPnd:\t{stop}", True),
        (f"SigBlk:\t{stop}", False),
    ):
        masks[:] = ["Name:\tx", line]
        states["state"] = "D"
        assert stands_still(7) is still, line
        states["state"] = "S"
        assert not stands_still(7)
    for state in "TtZX":
        states["state"] = state
        assert stands_still(7)


def test_handler_of_exactly_this_signal_is_seen() -> None:
    before = signal.signal(signal.SIGUSR1, lambda *given: None)
    try:
        assert catches(os.getpid(), signal.SIGUSR1)
        assert not catches(os.getpid(), signal.SIGUSR2) and not catches(os.getpid(), signal.SIGUSR1 - 1)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_stat_is_read_behind_the_name(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    fields = ["S", "3", "4", "5", "1025", *["0"] * 6, "10", "20", "30", "40", *["0"] * 4, "777", "0"]
    (tmp_path / "7" / "stat").write_bytes(b"7 (a) R 9 (\xff) " + " ".join(fields).encode())
    assert stat_of(7, str(tmp_path)) == Stat("S", 3, 1025, 100, 777)


def test_descendants_are_found_at_any_depth() -> None:
    code = "import subprocess; subprocess.run(['sh', '-c', 'sleep 60 & echo; wait'])"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            child.stdout.readline()
            found = descendants_of(child.pid)
            assert len(found) == 2
            parents = {pid: stat.parent for pid in found if (stat := stat_of(pid)) is not None}
            assert child.pid in parents.values() and set(parents.values()) - {child.pid} < found
            assert found < descendants_of(os.getpid())
        finally:
            os.killpg(child.pid, signal.SIGKILL)
    assert descendants_of(child.pid) == set()


def test_shortage_is_no_end_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*given: object, **more: object) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("builtins.open", short)
    for ask in (stat_of, children_of):
        with pytest.raises(OSError, match="Too many open files"):
            ask(os.getpid())


def test_limits_of_a_guest_are_a_share_and_its_memory_is_dumped_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    hard = {resource.RLIMIT_SIGPENDING: 800, resource.RLIMIT_MSGQUEUE: resource.RLIM_INFINITY}
    given = hard | {resource.RLIMIT_CORE: resource.RLIM_INFINITY}
    chosen: list[tuple[int, tuple[int, int]]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (0, given[kind]))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: chosen.append((kind, limits)))
    keep_to_user_limits()
    assert chosen == [(resource.RLIMIT_SIGPENDING, (100, 100))], "what has no bound keeps none"
    chosen.clear()
    no_core_dumps()
    given[resource.RLIMIT_CORE] = 0
    no_core_dumps()
    assert chosen == [(resource.RLIMIT_CORE, (1, 1)), (resource.RLIMIT_CORE, (0, 0))], "1 keeps handlers away, too"


def test_look_ends_at_its_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(budget, "time", SimpleNamespace(monotonic=lambda: now))
    few, short = budget.Budget(5.0, 2), budget.Budget(5.0)
    few.spend()
    few.spend()
    with pytest.raises(budget.OverBudget):
        few.spend()
    now = 105.0
    short.spend()
    now = 105.1
    with pytest.raises(budget.OverBudget):
        short.spend()


def test_alarm_fires_from_its_moment_on() -> None:
    alarm = Alarm()

    def fired(wait_s: float = 0.0) -> bool:
        return bool(select.select([alarm], [], [], wait_s)[0])

    try:
        told = Path(f"/proc/self/fdinfo/{alarm.fileno()}").read_text()
        assert f"clockid: {time.CLOCK_BOOTTIME}" in told, "it counts while the machine sleeps"
        assert not fired()
        alarm.clear()  # none has fired: it does not block
        alarm.set(boot_s() + 0.01)
        assert fired(10)
        alarm.clear()
        assert not fired()
        alarm.set(0.0)
        assert fired(10), "the past is now, and not never"
        alarm.set(math.inf)
        assert not fired()
        alarm.set(boot_s() + 1000)
        assert not fired()
    finally:
        os.close(alarm.fileno())


def test_mount_of_a_path_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its device as the table of mounts has it, which need not be that of stat(2)."""
    directory = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    number = mount_number("self", directory)
    os.close(directory)
    of_proc = next(mount for mount in mounts() if mount.place == "/proc")
    assert of_proc.number == number
    assert numbers_on("self", of_proc.device) == {mount.number for mount in mounts() if mount.device == of_proc.device}
    told = [of_proc._replace(number="0", device="0:7"), of_proc._replace(device="0:99")]
    monkeypatch.setattr("mesh.util.mounts.mounts", lambda: told)
    assert device_of(Path("/proc")) == "0:99"
    told.clear()
    status = Path("/proc").stat()
    assert device_of(Path("/proc")) == f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"

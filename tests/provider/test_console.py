"""Typing and load: with real terminals and processes, and with copies of the kernel's files on other machines."""

import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mesh.provider import load
from mesh.provider.console import Console
from mesh.provider.load import Load, memory_wait
from mesh.util.processes import descendants_of

WAIT_S = 60.0
INTERRUPTS = """           CPU0       CPU1
  1:     {0}          9   IO-APIC    1-edge      i8042
 12:        144          0   IO-APIC   12-edge      i8042
 16:    {1}          0   IO-APIC   16-fasteoi   xhci_hcd
"""


class Machine:
    """A directory with fake /proc, /sys and /dev files."""

    def __init__(self, root: Path) -> None:
        self.proc, self.sys, self.dev = root / "proc", root / "sys", root / "dev"
        for path in (self.proc, self.sys / "bus/usb/devices", self.dev / "pts"):
            path.mkdir(parents=True)

    def console(self) -> Console:
        return Console(self.proc, self.sys, self.dev)

    def interrupt(self, keys: int, others: int = 0) -> None:
        (self.proc / "interrupts").write_text(INTERRUPTS.format(keys, others))

    def usb(self, name: str, count: int, protocol: str = "01", kind: str = "03") -> None:
        device = self.sys / "devices" / name
        interface = device / f"{name}:1.0"
        interface.mkdir(parents=True, exist_ok=True)
        (device / "urbnum").write_text(f"{count}\n")
        (interface / "bInterfaceClass").write_text(f"{kind}\n")
        (interface / "bInterfaceProtocol").write_text(f"{protocol}\n")
        link = self.sys / "bus/usb/devices" / interface.name
        if not link.exists():
            link.symlink_to(interface)

    def terminal(self, name: str, accessed: float) -> None:
        (self.dev / name).touch()
        os.utime(self.dev / name, (accessed, 0))


def test_no_source_means_unknown(tmp_path: Path) -> None:
    console = Machine(tmp_path).console()
    assert console.look("all", 10.0, 1000.0) is None and console.sources == ()


def test_ps2_keyboard_is_seen_by_interrupts(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.interrupt(100)
    console = machine.console()
    assert console.look("console", 50.0, 0.0) == 50.0, "input before the first look is unknown"
    machine.interrupt(100, others=5)
    assert console.look("console", 51.0, 0.0) == 51.0 and console.sources == ("PS/2",)
    machine.interrupt(102)
    assert console.look("console", 52.0, 0.0) == 0.0
    assert console.look("console", 60.0, 0.0) == 8.0


def test_usb_input_devices_only(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    for name, protocol, kind in (("1-1", "01", "03"), ("1-2", "02", "03"), ("1-3", "00", "03"), ("1-4", "01", "08")):
        machine.usb(name, 7, protocol, kind)
    console = machine.console()
    console.look("console", 50.0, 0.0)
    for name, protocol, kind in (("1-3", "00", "03"), ("1-4", "01", "08")):
        machine.usb(name, 8, protocol, kind)
    assert console.look("console", 51.0, 0.0) == 51.0 and console.sources == ("USB",)
    machine.usb("1-2", 8, "02")
    assert console.look("console", 52.0, 0.0) == 0.0
    machine.usb("1-9", 1000)
    assert console.look("console", 53.0, 0.0) == 1.0, "plugging in a device is no input"
    (machine.sys / "devices/1-1/urbnum").write_text("broken")
    assert console.look("console", 54.0, 0.0) == 2.0


def test_terminals_count_if_watched(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.terminal("tty1", 900.0)
    machine.terminal("ttyS0", 999.0)
    machine.terminal("pts/3", 980.0)
    machine.terminal("pts/ptmx", 999.0)
    near, far = machine.console(), machine.console()
    assert near.look("console", 500.0, 1000.0) == 100.0 and near.sources == ("consoles",)
    assert far.look("all", 500.0, 1000.0) == 20.0 and far.sources == ("consoles", "terminals")
    machine.terminal("pts/3", 1002.0)
    assert near.look("console", 505.0, 1005.0) == 105.0
    assert far.look("all", 505.0, 1005.0) == 0.0
    machine.terminal("pts/4", 5000.0)
    assert far.look("all", 506.0, 1006.0) == 0.0, "idle time is never negative, even if the clock is set back"


@pytest.fixture
def terminal() -> "tuple[int, int, str]":
    """Return a real terminal: its master, its slave and the path of the slave."""
    master, slave = pty.openpty()
    return master, slave, os.ttyname(slave)


def test_real_terminal_counts_input_not_output(terminal: "tuple[int, int, str]") -> None:
    master, slave, name = terminal
    try:
        os.utime(name, (1.0, 1.0))
        console = Console()
        before = console.look("all", 100.0, 1000.0)
        assert before is not None and "terminals" in console.sources
        os.write(slave, b"a line of output\n")
        os.read(master, 64)
        assert Path(name).stat().st_atime == 1.0
        os.write(master, b"typed\n")
        os.read(slave, 64)
        assert console.look("all", 200.0, 1000.0) == 0.0
    finally:
        os.close(master)
        os.close(slave)


def test_guest_terminal_does_not_count(terminal: "tuple[int, int, str]") -> None:
    master, slave, name = terminal
    os.utime(name, (1.0, 1.0))
    take = "import fcntl, os, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); print(flush=True)"
    guest = subprocess.Popen([sys.executable, "-c", f"{take}; sys.stdin.read()"], stdin=slave, stdout=subprocess.PIPE)
    try:
        assert guest.stdout is not None
        guest.stdout.readline()
        console = Console()
        console.look("all", 100.0, 1000.0, [guest.pid])
        os.write(master, b"typed\n")
        deadline = time.monotonic() + WAIT_S
        while Path(name).stat().st_atime == 1.0:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert name not in console._known
        console.look("all", 101.0, 1000.0, [guest.pid])
        assert name not in console._known
    finally:
        guest.kill()
        guest.wait()
        for descriptor in (master, slave):
            os.close(descriptor)
        if guest.stdout is not None:
            guest.stdout.close()


LOOK = """
import fcntl, os, subprocess, sys, termios
from mesh.provider.console import Console
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
helper = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
console = Console()
console.look("all", 100.0, 1000.0, [helper.pid])
print(os.ttyname(0) in console._known)
helper.communicate()
"""


def test_terminal_that_the_daemon_was_started_from_counts(terminal: "tuple[int, int, str]") -> None:
    """Its helpers have it too."""
    master, slave, _ = terminal
    try:
        looked = subprocess.run(
            [sys.executable, "-c", LOOK], stdin=slave, capture_output=True, text=True, timeout=WAIT_S, check=True
        )
        assert looked.stdout == "True\n"
    finally:
        os.close(master)
        os.close(slave)


class Processes:
    """A fake /proc with settable figures."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def set(self, busy_s: float, daemon_s: float, **guests_s: float) -> None:
        ticks = os.sysconf("SC_CLK_TCK")
        busy = round(busy_s * ticks)
        (self.root / "stat").write_text(f"cpu {busy} 0 0 99999 99 0 0 5 0 0\n")
        for pid, used_s in {str(os.getpid()): daemon_s, **{name[1:]: some for name, some in guests_s.items()}}.items():
            (self.root / pid).mkdir(exist_ok=True)
            (self.root / pid / "stat").write_text(f"{pid} (a (b) c) S {'0 ' * 10}{round(used_s * ticks)} {'0 ' * 9}\n")


def test_load_excludes_guests(tmp_path: Path) -> None:
    processes, load = Processes(tmp_path), Load(tmp_path)
    processes.set(100.0, 10.0, _7=5.0)
    assert load.look(0.0, (7,)) is None
    processes.set(104.0, 11.0, _7=6.0)
    assert load.look(1.0, (7,)) == 2.0
    processes.set(108.0, 12.0)
    assert load.look(2.0) == 2.0, "the usage of an ended guest cannot be separated, so the load is kept"
    processes.set(148.0, 12.0)
    assert 2.0 < (load.look(12.0) or 0) < 4.0, "the load is smoothed"
    (tmp_path / "stat").write_text("nonsense")
    assert load.look(13.0) is None


def test_own_process_is_not_load() -> None:
    load, me, busy = Load(), os.getpid(), subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        assert load.look(time.monotonic(), descendants_of(me)) is None
        before = load._last
        deadline = time.monotonic() + WAIT_S
        while load._last is None or before is None or load._last[2] < before[2] + 0.2:
            assert time.monotonic() < deadline, "the CPU time of the child counts as own usage"
            time.sleep(0.05)
            found = load.look(time.monotonic(), descendants_of(me))
        assert found is not None and found >= 0
    finally:
        busy.kill()
        busy.wait()


def test_memory_wait_counts_no_guest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a tree of control groups with the files of a machine where guests wait most."""
    waits = {"": 90, "user": 80, "user/shell": 12.5, "user/mesh": 80, "user/mesh/guest": 80, "system": 3, "docker": 70}
    for name, share in waits.items():
        (tmp_path / name).mkdir(exist_ok=True)
        line = f"avg10={share:.2f} avg60=0.00 avg300=0.00 total=7"
        (tmp_path / name / "memory.pressure").write_text(f"some {line}\nfull {line}\n")
    own = {os.getpid(): "user/mesh", 41: "user/mesh/guest", 42: "docker"}
    monkeypatch.setattr(load.cgroups, "mounts", lambda: {"": ("/", tmp_path)})
    monkeypatch.setattr(load.cgroups, "groups_of", lambda pid: {"": tmp_path / own[pid]} if pid in own else {})
    assert memory_wait([41, 42]) == 12.5 and memory_wait([41]) == 70.0
    (tmp_path / "user/shell/memory.pressure").unlink()
    assert memory_wait([41, 42]) == 3.0, "a group that has just gone is left out"
    own[os.getpid()] = ""
    assert memory_wait([41, 42]) is None, "in one group, guests and others cannot be told apart"
    monkeypatch.setattr(load.cgroups, "mounts", dict)
    assert memory_wait() is None

"""The network edge of one node: attached guests, what is cut off, and shaping of outgoing traffic.

It changes nothing in the system before the first guest is attached, unless the owner names an interface to shape. It removes its
changes when it closes, and those of a killed run when it opens. `cut` and `restore` may be called from any thread and never wait;
everything else takes a lock and blocks for some milliseconds.
"""

import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

import msgspec

from mesh.network import bpf, shaping, tc
from mesh.network.device import Device, DeviceLock, remove_queue
from mesh.network.hooks import Hooks, clear
from mesh.network.program import NAMES, BuildError, Programs, object_file
from mesh.network.switch import ALL, GUESTS, MIGRATION, PINNED
from mesh.network.tc import HOOKS, EdgeError
from mesh.util.capabilities import BPF, NET_ADMIN, SYS_ADMIN

IN_SOCKETS = "checkpoints are paced by their sockets alone"

log = logging.getLogger(__name__)


class EdgeState(msgspec.Struct, frozen=True):
    """The state of the edge. `problem`: what it should do and cannot, and why; `next`: what the owner can do about it."""

    off: bool = False  # the owner wants none
    guests: bool = False  # guests with their own interface can be cut off
    attached: tuple[str, ...] = ()
    device: str = ""  # the machine's interface at which checkpoints and guests can be cut off
    shaped_mbps: float = 0.0
    reserved_mbps: float = 0.0  # for checkpoints with a deadline
    cut: tuple[str, ...] = ()
    problem: str = ""
    next: str = ""


class Guest(msgspec.Struct, frozen=True):
    index: int
    hooks: Hooks


class Edge:
    """The edge of one node. `directory` holds its pinned BPF objects, below a directory that only root can write."""

    def __init__(
        self, directory: Path, wanted: bool = True, device: str = "", mbps: float = 0.0, cache: Path | None = None
    ) -> None:
        self.directory = directory
        self._wanted = wanted
        self._cache = cache
        self._tag = int.from_bytes(blake2b(os.fsencode(directory), digest_size=4).digest()) & 0x7FFFFFFF | 1
        self._programs: Programs | None = None
        self._guests: dict[str, Guest] = {}
        self._device_name, self._mbps = device, mbps
        self._device: Device | None = None
        self._problem = self._next = ""
        self._lock = threading.RLock()

    # --- life

    def open(self) -> None:
        """Clean up after a killed run and get ready. Never fails: `state` reports what does not work."""
        with self._lock:
            if left_at(self.directory) and tc.is_installed():
                self._sweep()
            if not self._wanted:
                return
            problem, self._next = self._load()
            if not problem and self._device_name:
                problem = self._claim()
            if problem:
                self._problem = f"{problem}; {IN_SOCKETS}"
                log.info("no network edge: %s", self._problem)

    def _load(self) -> tuple[str, str]:
        """Load the programs into the kernel. Return what is wrong and what to do about it; both empty on success."""
        if not tc.is_installed():
            return "tc is not installed", "apt install iproute2"
        lacking = lacking_privileges(Path("/proc/self/status").read_text(), bpf.is_mounted(self.directory))
        if lacking == ["CAP_SYS_ADMIN"]:
            place, who = self.directory, os.geteuid()
            return (
                "this process lacks CAP_SYS_ADMIN, to mount a bpf file system",
                f"as root: `mkdir -p {place} && mount -t bpf -o mode=0700 bpf {place} && chown {who} {place} {place.parent}`, "
                "then start the daemon again",
            )
        if lacking:
            return (
                f"this process lacks {', '.join(lacking)}",
                "docs/explanation/edge-limits.md says how to give it what it lacks",
            )
        try:
            self._programs = Programs.load(object_file(self._cache))
        except bpf.Rejected as error:
            log.warning("%s: %s", error, error.log[-2000:])
            return f"{error} (the log says more)", "the edge needs Linux 5.11 or newer"
        except BuildError as error:
            return str(error), "apt install clang libc6-dev"
        except OSError as error:
            return str(error), ""
        return "", ""

    def close(self) -> None:
        """Remove everything; a failure of one part does not stop the others."""
        with self._lock:
            for interface in list(self._guests):
                self._tried(self.detach, interface)
            if self._device is not None:
                self._tried(self._device.release)
                self._device = None
            programs, self._programs = self._programs, None
            if programs is not None:
                programs.close()
            self._unpin()

    # --- what is cut

    def cut(self, what: int = ALL, interface: str | None = None) -> bool:
        """Drop every packet of these, or of one guest, from now on, with one system call. False if that is not possible."""
        return self._turn(what, interface, True)

    def restore(self, what: int = ALL, interface: str | None = None) -> bool:
        return self._turn(what, interface, False)

    def _turn(self, what: int, interface: str | None, off: bool) -> bool:
        programs = self._programs
        if programs is None:
            return False
        try:
            if interface is not None:
                guest = self._guests.get(interface)
                if guest is not None:
                    programs.guests.put(guest.index, int(off))
                return guest is not None
            if off:
                programs.switch.cut(what)
            else:
                programs.switch.restore(what)
        except OSError as error:  # the reclaim continues without it
            log.error("network edge: %s", error)
            return False
        return bool(self._guests) or self._device is not None

    # --- guests

    def attach(self, interface: str) -> None:
        """Make an interface of one guest cuttable; it is cut at once while guests are cut off.

        It must belong to one guest alone: the host's end of its pair, or the bridge of one job. EdgeError on failure.
        """
        with self._lock:
            if self._programs is None:
                raise EdgeError(self._problem or "the edge is off")
            try:
                index = socket.if_nametoindex(interface)
            except OSError as error:
                raise EdgeError(f"there is no interface {interface}") from error
            self._pin()
            known = self._guests.get(interface)
            if known is not None and known.index == index:
                known.hooks.put(tc.qdiscs())
                return
            self._forget(interface)
            guest = self._guests[interface] = Guest(index, self._hooks(interface))
            try:
                self._programs.guests.put(index, 0)
                guest.hooks.put(tc.qdiscs())
            except (EdgeError, OSError) as error:
                self._tried(self.detach, interface)  # it may be half done
                raise EdgeError(str(error)) from error

    def detach(self, interface: str) -> None:
        """Detach an interface. No error if it is not attached or gone."""
        with self._lock:
            guest = self._guests.get(interface)
            if guest is None:
                return
            self._forget(interface)
            if _index(interface) == guest.index:
                guest.hooks.remove()

    def _forget(self, interface: str) -> None:
        guest = self._guests.pop(interface, None)
        if guest is not None and self._programs is not None:
            self._programs.guests.drop(guest.index)

    # --- shaping

    @property
    def link_bps(self) -> float:
        """Return the rate that the machine's interface is shaped for, in bits per second; 0 if it is not."""
        return self._device.link_bps if self._device is not None else 0.0

    @property
    def watches(self) -> bool:
        """Return whether the class of our packets makes a difference."""
        return self._device is not None and self._device.watched

    def needs(self, need_bytes_s: float) -> bool:
        """Return whether `give` should be called for checkpoints that must leave at this rate, in bytes per second."""
        device = self._device
        if device is None or not device.link_bps:
            return False
        return shaping.worth(device.given_bps, shaping.reserved(need_bytes_s, device.link_bps), device.link_bps)

    def give(self, need_bytes_s: float) -> None:
        """Reserve the rate that checkpoints with a deadline need, at most half of the link. EdgeError if the queue is gone."""
        with self._lock:
            if self._device is not None and self._device.link_bps:
                self._device.give(shaping.reserved(need_bytes_s, self._device.link_bps))

    # --- maintenance

    def look(self) -> list[str]:
        """Restore what other programs removed and forget interfaces that are gone; return a text for each finding."""
        with self._lock:
            messages = []
            try:
                queues = tc.qdiscs() if self._guests else []
                for interface, guest in list(self._guests.items()):
                    if _index(interface) != guest.index:
                        self._forget(interface)
                    elif not guest.hooks.there(queues):
                        guest.hooks.put(tc.qdiscs())
                        messages.append(f"another program had removed the edge from {interface}; it is restored")
            except EdgeError as error:
                messages.append(str(error))
            if self._device is not None:
                messages.append(self._device.look())
            return [text for text in messages if text]

    def state(self) -> EdgeState:
        value = self._turned()
        words = {GUESTS: "guests", MIGRATION: "checkpoints"}
        device = self._device
        problem, then = self._problem, self._next
        if device is not None and device.problem:
            problem = device.problem if device.watched else f"{device.problem}; {IN_SOCKETS}"
            then = "`ip link` and `tc qdisc show` show more; edge_device and edge_mbps are in config.toml"
        return EdgeState(
            off=not self._wanted,
            guests=self._programs is not None,
            attached=tuple(sorted(list(self._guests))),
            device=device.name if device is not None and device.watched else "",
            shaped_mbps=self.link_bps / 1e6,
            reserved_mbps=round(device.given_bps / 1e6, 1) if device is not None else 0.0,
            cut=tuple(word for bit, word in words.items() if value & bit),
            problem=problem,
            next=then,
        )

    # --- the rest

    def _turned(self) -> int:
        try:
            return self._programs.switch.value if self._programs is not None else 0
        except OSError:  # it is being closed
            return 0

    def _claim(self) -> str:
        try:
            self._pin()
        except EdgeError as error:
            return str(error)
        hooks = self._hooks(self._device_name, "mesh_device", ("egress",))
        self._device = Device(self._device_name, self._mbps, self.directory.parent, hooks)
        self._device.claim()
        if self._device.problem:
            log.warning("network edge: %s", self._device.problem)
        return ""

    def _hooks(self, device: str, program: str = "mesh_guest", at: Sequence[str] = HOOKS) -> Hooks:
        return Hooks(device, self.directory / program, tuple(at), self._tag)

    def _pin(self) -> None:
        """Pin the programs, for tc, and the switch, for a process that must turn it when the daemon cannot."""
        assert self._programs is not None
        try:
            if (self.directory / PINNED).exists():
                return
            try:
                self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            except FileNotFoundError:  # another daemon has just removed the parent
                self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not bpf.is_mounted(self.directory):
                bpf.mount(self.directory)
            for name, descriptor in {**self._programs.descriptors, PINNED: self._programs.switch.map.fd}.items():
                (self.directory / name).unlink(missing_ok=True)  # left by a try that failed
                bpf.pin(descriptor, self.directory / name)
        except OSError as error:
            raise EdgeError(str(error)) from error

    def _unpin(self) -> None:
        if bpf.is_mounted(self.directory):
            for name in (PINNED, *NAMES.values()):
                with suppress(OSError):
                    (self.directory / name).unlink(missing_ok=True)
            with suppress(OSError):  # a user who was given the mount may not unmount it
                bpf.unmount(self.directory)
        with suppress(OSError):
            self.directory.rmdir()
            self.directory.parent.rmdir()

    def _sweep(self) -> None:
        """Remove what an earlier run of this node left: filters with its tag, and queues whose lock nobody holds."""
        try:
            for queue in (queues := tc.qdiscs()):
                if queue.kind == "clsact":
                    self._tried(clear, queue.dev, self._tag)
            for queue in queues:
                if queue.root and shaping.whose(queue) == "ours":
                    self._tried(self._free, queue.dev)
        except EdgeError as error:
            log.warning("cannot clean up after an earlier run: %s", error)
        self._unpin()

    def _free(self, device: str) -> None:
        try:
            lock = DeviceLock(self.directory.parent, device)
        except EdgeError:
            return  # another running daemon has it
        try:
            remove_queue(device)
        finally:
            lock.release()

    def _tried(self, step: Callable[..., object], *words: object) -> None:
        try:
            step(*words)
        except (EdgeError, OSError) as error:
            log.warning("network edge: %s", error)


def lacking_privileges(status: str, mounted: bool) -> list[str]:
    """Return the capabilities that a process with this /proc/self/status lacks for the edge."""
    line = next((line for line in status.splitlines() if line.startswith("CapEff:")), "CapEff: 0")
    effective = int(line.split()[1], 16)
    if effective & 1 << SYS_ADMIN:
        effective |= 1 << BPF
    needed = {NET_ADMIN: "CAP_NET_ADMIN", BPF: "CAP_BPF"} | ({} if mounted else {SYS_ADMIN: "CAP_SYS_ADMIN"})
    return [name for bit, name in needed.items() if not effective & 1 << bit]


def left_at(directory: Path) -> bool:
    """Return whether a node's edge is in use, or was when its daemon was killed. False if another user's."""
    try:
        return directory.exists()
    except OSError:
        return False


def _index(interface: str) -> int | None:
    try:
        return socket.if_nametoindex(interface)
    except OSError:
        return None

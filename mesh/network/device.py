"""The machine's interface, if the owner names one (`edge_device`), with our program at its egress hook and our classes as queue.

One daemon at a time: the holder of the interface's lock may add a queue. A queue of another program is never touched; then
outgoing traffic can be cut off, but is not shaped.
"""

import fcntl
import os
import socket
from contextlib import suppress
from pathlib import Path

from mesh.network import shaping, tc
from mesh.network.hooks import Hooks
from mesh.network.tc import EdgeError

DEFAULT_QUEUE = Path("/proc/sys/net/core/default_qdisc")


class DeviceLock:
    """The lock of one interface; it ends with its process. Only root can write `directory`, so only root can take a lock."""

    def __init__(self, directory: Path, device: str) -> None:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        namespace = Path("/proc/thread-self/ns/net").stat().st_ino  # interface names belong to a namespace
        self._path = directory / f"{device}-{namespace}.lock"
        while True:
            self._file = self._path.open("w")
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._path.stat().st_ino == os.fstat(self._file.fileno()).st_ino:
                    return
            except FileNotFoundError:
                pass
            except OSError as error:
                self._file.close()
                raise EdgeError(f"another daemon on this machine uses {device}") from error
            self._file.close()  # its holder removed it in between

    def release(self) -> None:
        self._path.unlink(missing_ok=True)
        self._file.close()


class Device:
    """A shaped interface. `link_bps`: the rate that it is shaped for, in bits per second; 0 if not, and `problem` says why."""

    def __init__(self, name: str, mbps: float, locks: Path, hooks: Hooks) -> None:
        self.name = name
        self.link_bps = 0.0
        self.watched = False
        self.problem = ""
        self.given_bps = 0.0  # reserved for checkpoints with a deadline
        self._mbps = mbps
        self._locks = locks
        self._hooks = hooks
        self._lock: DeviceLock | None = None

    def claim(self) -> None:
        """Attach and shape as far as possible; `problem` says what failed."""
        self.problem, self.watched, self.link_bps = "", False, 0.0
        try:
            if self.name not in {name for _, name in socket.if_nameindex()}:
                raise EdgeError(f"there is no interface {self.name}")
            if self._lock is None:
                self._lock = DeviceLock(self._locks, self.name)
            self._hooks.put(tc.qdiscs())
            self.watched = True
            self._shape()
        except (EdgeError, OSError) as error:
            self.problem = str(error)

    def look(self) -> str:
        """Check that all is in place and repair it if not; return a text about the repair, empty if none."""
        before = (self.watched, self.link_bps, self.problem)
        try:
            if self._sound():
                return ""
        except EdgeError as error:
            return str(error)
        self.claim()
        if (self.watched, self.link_bps, self.problem) == before:
            return "" if self.problem else f"another program had removed the edge from {self.name}; it is restored"
        return self.problem or f"{self.name} is shaped for {self.link_bps / 1e6:g} Mbit/s"

    def _sound(self) -> bool:
        """Return whether nothing needs repair."""
        queues = tc.qdiscs()
        if not self.watched or not self._hooks.there(queues):
            return False
        root = shaping.whose(shaping.root_of(queues, self.name))
        if self.link_bps:
            return root == "ours"
        return bool(self.problem) and (root == "another" or not self._speed_mbps())

    def give(self, urgent_bps: float) -> None:
        """Set the rate of checkpoints with a deadline, in bits per second. EdgeError if the classes are gone; `look` repairs."""
        try:
            tc.do(shaping.rates(self.name, self.link_bps, urgent_bps))
        except EdgeError:
            self.link_bps = 0.0
            raise
        self.given_bps = urgent_bps

    def release(self) -> None:
        if self._lock is None:
            return  # nothing was added
        try:
            remove_queue(self.name)
            self._hooks.remove()
        finally:
            self.watched, self.link_bps = False, 0.0
            self._lock.release()
            self._lock = None

    def _speed_mbps(self) -> float:
        """Return the link's speed by the owner's setting or the card; 0 if unknown."""
        try:
            return self._mbps or max(0.0, float(Path(f"/sys/class/net/{self.name}/speed").read_text()))
        except (OSError, ValueError):
            return 0.0

    def _shape(self) -> None:
        mbps = self._speed_mbps()
        if not mbps:
            raise EdgeError(f"the speed of {self.name} is unknown: set `edge_mbps = NUMBER` in config.toml")
        found = shaping.root_of(tc.qdiscs(), self.name)
        match shaping.whose(found):
            case "another":
                assert found is not None
                raise EdgeError(
                    f"{self.name} has another program's queue ({found.kind} {found.handle}), which is left as it is"
                )
            case "ours":
                tc.do([shaping.remove(self.name)])  # left by a killed run, perhaps incomplete
        leaf = DEFAULT_QUEUE.read_text().strip() if DEFAULT_QUEUE.exists() else ""
        try:
            tc.do(shaping.build(self.name, mbps * 1e6, leaf))
        except EdgeError:
            with suppress(EdgeError):
                remove_queue(self.name)
            raise
        self.link_bps, self.given_bps = mbps * 1e6, 0.0


def remove_queue(name: str) -> None:
    """Remove our queue; the kernel's default returns by itself."""
    if shaping.whose(shaping.root_of(tc.qdiscs(), name)) == "ours":
        tc.do([shaping.remove(name)])

"""The machine's own interface, where its owner names one (`edge_device`): our program where packets leave, and our classes as its
queue. One daemon at a time: who holds the lock of the interface may put a queue there. A queue that somebody else put there is
never touched; then what leaves can be cut, but is not shaped.
"""

import fcntl
import os
import socket
from contextlib import suppress
from pathlib import Path

from mesh.edge import shaping, tc
from mesh.edge.hooks import Hooks
from mesh.edge.tc import EdgeError

DEFAULT_QUEUE = Path("/proc/sys/net/core/default_qdisc")


class DeviceLock:
    """Gone with the process that has it. `directory` is root's alone, so that nobody else can take them."""

    def __init__(self, directory: Path, device: str) -> None:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        namespace = Path("/proc/thread-self/ns/net").stat().st_ino  # names of interfaces are of one
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
                raise EdgeError(f"another daemon of this machine has {device}") from error
            self._file.close()  # of one that ended in between, and is removed

    def release(self) -> None:
        self._path.unlink(missing_ok=True)
        self._file.close()


class Device:
    """`link_bps`: bits a second that it is shaped for; 0 while it is not, and `problem` says why."""

    def __init__(self, name: str, mbps: float, locks: Path, hooks: Hooks) -> None:
        self.name = name
        self.link_bps = 0.0
        self.watched = False
        self.problem = ""
        self.given_bps = 0.0  # what checkpoints with a deadline have
        self._mbps = mbps
        self._locks = locks
        self._hooks = hooks
        self._lock: DeviceLock | None = None

    def claim(self) -> None:
        """Take what can be had of it; what cannot is in `problem`."""
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
        """Whether all is as it was left; what was done about it, in words, if not."""
        before = (self.watched, self.link_bps, self.problem)
        try:
            if self._sound():
                return ""
        except EdgeError as error:
            return str(error)
        self.claim()
        if (self.watched, self.link_bps, self.problem) == before:
            return "" if self.problem else f"what was taken away from {self.name} is there again"
        return self.problem or f"{self.name} is shaped for {self.link_bps / 1e6:g} Mbit/s"

    def _sound(self) -> bool:
        """Whether nothing could be better than it is."""
        queues = tc.qdiscs()
        if not self.watched or not self._hooks.there(queues):
            return False
        root = shaping.whose(shaping.root_of(queues, self.name))
        if self.link_bps:
            return root == "ours"
        return bool(self.problem) and (root == "another" or not self._speed_mbps())

    def give(self, urgent_bps: float) -> None:
        """Bits a second for checkpoints with a deadline. EdgeError if the classes are not there any more: `look` sees to that."""
        try:
            tc.do(shaping.rates(self.name, self.link_bps, urgent_bps))
        except EdgeError:
            self.link_bps = 0.0
            raise
        self.given_bps = urgent_bps

    def release(self) -> None:
        if self._lock is None:
            return  # nothing there is ours
        try:
            remove_queue(self.name)
            self._hooks.remove()
        finally:
            self.watched, self.link_bps = False, 0.0
            self._lock.release()
            self._lock = None

    def _speed_mbps(self) -> float:
        """What its owner says that its link carries, or the card; 0 if nobody knows."""
        try:
            return self._mbps or max(0.0, float(Path(f"/sys/class/net/{self.name}/speed").read_text()))
        except (OSError, ValueError):
            return 0.0

    def _shape(self) -> None:
        mbps = self._speed_mbps()
        if not mbps:
            raise EdgeError(f"{self.name} does not say how fast it is: `edge_mbps = NUMBER` in config.toml does")
        found = shaping.root_of(tc.qdiscs(), self.name)
        match shaping.whose(found):
            case "another":
                assert found is not None
                raise EdgeError(
                    f"{self.name} has a queue of somebody else's ({found.kind} {found.handle}), which is left as it is"
                )
            case "ours":
                tc.do([shaping.remove(self.name)])  # of a run that was killed, perhaps half done
        leaf = DEFAULT_QUEUE.read_text().strip() if DEFAULT_QUEUE.exists() else ""
        try:
            tc.do(shaping.build(self.name, mbps * 1e6, leaf))
        except EdgeError:
            with suppress(EdgeError):
                remove_queue(self.name)
            raise
        self.link_bps, self.given_bps = mbps * 1e6, 0.0


def remove_queue(name: str) -> None:
    """Ours; the kernel's own comes back by itself."""
    if shaping.whose(shaping.root_of(tc.qdiscs(), name)) == "ours":
        tc.do([shaping.remove(name)])

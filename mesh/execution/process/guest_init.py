"""The watcher and the first process of a guest of the `process` engine: forks of `fork_server`. Standard library only.

It makes namespaces where the kernel allows, starts the job in its own session, reaps orphans, and kills everything when the
daemon's end of the pipe closes: a guest never outlives its daemon. The pipe brings the job as a line of JSON, then lines with
the time until which it may run (seconds of CLOCK_BOOTTIME); after that the guest is stopped until a later line allows more.
Reports are JSON lines on the status pipe: {"first": pid}, {"isolation": ...}, and at the end {"exit": code, "oom": ...}. A
socket brings descriptors: each is one end of a session, for which a process is added to the guest (`session_agent`). By it the
daemon first gets the socket for its proxy, if the guest has one.

This is no sandbox: except for hidden files (`sandbox`) and rights given up (`confinement`), the job may do what its user may.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Collection

from mesh.execution import guest_network
from mesh.execution.process import confinement, sandbox, session_agent
from mesh.execution.process.guest_cgroup import GuestGroup
from mesh.util.boottime import Alarm, boot_s
from mesh.util.processes import USER_SHARE, children_of, descendants_of, stands_still

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
MS_REC, MS_PRIVATE = 0x4000, 1 << 18
MS_NOSUID, MS_NODEV, MS_NOEXEC = 2, 4, 8
PR_SET_CHILD_SUBREAPER = 36

# Limits of user namespaces: what is in one also counts for the user of the one above (namespaces(7)).
WATCHES = ("max_inotify_instances", "max_inotify_watches", "max_fanotify_groups", "max_fanotify_marks")

STOP_LOOKS, STOP_LOOK_S = 1000, 0.001  # checks until all are stopped; it takes a few (own choice)

libc = ctypes.CDLL(None, use_errno=True)


def main(daemon: int, status: int, doors: socket.socket) -> None:
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    spec = read_spec(daemon)
    isolation = enter_namespaces(spec["namespaces"], spec["network"] == "none")
    if spec["network"] == "none" and isolation != "namespaces":
        sys.exit("it cannot be kept from the network here")
    if spec["proxy"]:
        with guest_network.listen() as listener:  # the daemon's alone from now on
            socket.send_fds(doors, [b"proxy"], [listener.fileno()])
    log = os.open(spec["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.setsid()
    confine(spec["sandbox"] if isolation == "session" else None)
    first = os.fork()
    if first == 0:
        confinement.die_with_parent()
        doors.close()
        be_init(spec, daemon, status, log, isolation)
    os.close(log)
    os.write(status, (json.dumps({"first": first}) + "\n").encode())
    group = GuestGroup.of(spec["groups"])
    watch(first, daemon, status, SessionProcesses(doors, spec, first, isolation, group), spec["until"], group)


def read_spec(daemon: int) -> dict:  # type: ignore[type-arg]
    """Read one line of JSON; a pipe gives at most 64 KiB at a time."""
    data = b""
    while not data.endswith(b"\n"):
        piece = os.read(daemon, 1 << 16)
        if not piece:
            sys.exit("the daemon ended before it said what to run")
        data += piece
    return json.loads(data)  # type: ignore[no-any-return]


def enter_namespaces(wanted: bool, cut_off: bool = False) -> str:
    """Enter new namespaces; return "namespaces", or "session" without them.

    The PID namespace matters most: with it, one SIGKILL ends everything.
    """
    if not wanted:
        return "session"
    uid, gid = os.getuid(), os.getgid()
    flags = CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS
    if cut_off:
        flags |= CLONE_NEWNET
    if uid != 0:
        flags |= CLONE_NEWUSER
    shares = watch_shares()
    if libc.unshare(flags) != 0:
        return "session"
    if uid != 0:
        for name, line in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with contextlib.suppress(OSError), open(f"/proc/self/{name}", "w") as file:  # noqa: PTH123
                file.write(line)
        limit_watches(shares)
    libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    if cut_off:
        raise_loopback()
    return "namespaces"


def watch_shares() -> dict[str, int]:
    """Return a guest's share of the watches of files that its user may have, by the file of the limit."""
    found = {}
    for name in WATCHES:
        with contextlib.suppress(FileNotFoundError), open(f"/proc/sys/user/{name}") as file:  # noqa: PTH123
            found[name] = max(1, int(file.read()) // USER_SHARE)
    return found


def limit_watches(shares: dict[str, int]) -> None:
    """Limit this user namespace, to which these files then belong. They cannot be written where /proc/sys is read-only."""
    for name, most in shares.items():
        with contextlib.suppress(OSError), open(f"/proc/sys/user/{name}", "w") as file:  # noqa: PTH123
            file.write(str(most))


def raise_loopback() -> None:
    """Bring up the loopback interface: a program may talk to itself."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", IFF_UP))


def confine(order: dict | None) -> None:  # type: ignore[type-arg]
    """Give up rights, for this process too: only processes of one Landlock domain may signal and trace each other."""
    try:
        if order is None:
            confinement.confine((), {})
        else:
            own = dict.fromkeys(order["stands_for"].values(), True)
            confinement.confine(set(order["hidden"]) - set(sandbox.IN_DEV), {**order["kept"], **own})
    except OSError as error:
        sys.exit(f"its rights cannot be limited: {error}")


def probe() -> None:
    """Print what keeps guests apart here, as JSON."""
    isolation, version = enter_namespaces(True), confinement.landlock_version()
    print(
        json.dumps({"namespaces": isolation == "namespaces", "landlock": version, "filter": confinement.has_filter()})
    )


def be_init(spec: dict, daemon: int, status: int, log: int, isolation: str) -> None:  # type: ignore[type-arg]
    """Run as process 1 of the guest: start the job, reap orphans, exit with the job's code."""
    os.close(daemon)
    GuestGroup.of(spec["groups"]).enter()
    if isolation == "namespaces":
        libc.unshare(CLONE_NEWNS)  # the watcher must keep its own view of /proc
        libc.mount(b"proc", b"/proc", b"proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, None)
        if spec["sandbox"] is not None:
            enter_sandbox(spec["sandbox"])
        show_data(spec["reads"])
    job = os.fork()
    if job == 0:
        session_agent.become_command(spec, spec, (os.open(os.devnull, os.O_RDONLY), log, log))
    os.write(status, (json.dumps({"isolation": isolation}) + "\n").encode())
    code = 0
    while True:
        try:
            pid, result = os.wait()
        except InterruptedError:
            continue
        except ChildProcessError:
            break
        if pid == job:
            code = os.waitstatus_to_exitcode(result)
            break
    code = code if code >= 0 else 128 - code
    os._exit(code)


def enter_sandbox(order: dict) -> None:  # type: ignore[type-arg]
    try:
        sandbox.enter(**order)
    except OSError as error:
        os.write(2, f"the owner's files cannot be hidden from it: {error}\n".encode())
        os._exit(1)


def show_data(paths: list) -> None:  # type: ignore[type-arg]
    try:
        sandbox.show_read_only(paths)
    except OSError as error:
        os.write(2, f"its data sets cannot be made read-only: {error}\n".encode())
        os._exit(1)


def watch(first: int, daemon: int, status: int, sessions: "SessionProcesses", until: float, group: GuestGroup) -> None:
    """Run the watcher, outside the namespace: enforce the lease, kill the guest when the daemon is gone, report its exit.

    Without a PID namespace it is the parent of the job's orphans, which would fill the limit of processes if nobody reaped them.
    """
    child, some_ended = os.pidfd_open(first), told_of_ends()
    lease = Lease(first, until, group)
    poller = select.poll()
    poller.register(some_ended, select.POLLIN)
    poller.register(daemon, select.POLLIN | select.POLLHUP)
    poller.register(child, select.POLLIN)
    poller.register(lease.alarm, select.POLLIN)
    poller.register(sessions.doors, select.POLLIN)
    while True:
        ready = dict(poller.poll())
        if child in ready:
            break
        if daemon in ready:
            heard = os.read(daemon, 4096)
            if not heard:
                os.kill(first, signal.SIGKILL)
                break
            lease.read(heard)
        lease.enforce()
        sessions.serve(ready, poller, lease.stopped)
        if some_ended in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(some_ended, 4096)
        reap_orphans({first, *sessions.pids})
    result = wait_for(first)
    end_session_children()
    code = os.waitstatus_to_exitcode(result)
    line = json.dumps({"exit": code if code >= 0 else 128 - code, "oom": group.ran_out_of_memory()}) + "\n"
    group.remove()
    with contextlib.suppress(OSError):
        os.write(status, line.encode())


def told_of_ends() -> int:
    """Return a descriptor that is readable once a child has ended (SIGCHLD)."""
    there, here = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(here, warn_on_full_buffer=False)
    return there


def reap_orphans(known: Collection[int]) -> None:
    """Reap children that have ended, up to one of the known ones, whose pidfd is readable: the next turn reaps that one first."""
    while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid not in known:
        os.waitpid(ended.si_pid, 0)


def wait_for(first: int) -> int:
    """Return the first process's exit. A PID namespace ends only when all its processes are reaped, sessions included."""
    while True:
        pid, result = os.wait()
        if pid == first:
            return result


class Lease:
    """The time until which the guest may run, and whether it is stopped because that time is over.

    Its group is frozen. Without a group that can be, each of its processes is stopped.
    """

    def __init__(self, first: int, until: float, group: GuestGroup) -> None:
        self.alarm = Alarm()
        self._first, self._until, self._group = first, until, group
        self.stopped = False
        self._rest = b""
        self.alarm.set(until)

    def read(self, heard: bytes) -> None:
        """Take new times; the last whole line counts."""
        *lines, self._rest = (self._rest + heard).split(b"\n")
        if lines:
            self._until = float(lines[-1])
            self.alarm.set(self._until)

    def enforce(self) -> None:
        self.alarm.clear()
        over = boot_s() >= self._until
        if over and not self.stopped:
            if not self._group.freeze():
                stop_all(self._first)
        elif self.stopped and not over:
            self._group.thaw()
            for pid in _descendants(self._first):
                _signal(pid, signal.SIGCONT)
        self.stopped = over


class SessionProcesses:
    """Processes added to the running guest, for `mesh exec`.

    They are children of the watcher in the guest's namespaces and control groups: they are stopped and killed with the guest, and
    end with its first process.
    """

    def __init__(
        self,
        doors: socket.socket,
        spec: dict,  # type: ignore[type-arg]
        first: int,
        isolation: str,
        group: GuestGroup,
    ) -> None:
        self.doors = doors
        self._spec, self._first, self._isolation, self._group = spec, first, isolation, group
        self._inside: dict[int, int] = {}  # pidfd -> pid

    @property
    def pids(self) -> Collection[int]:
        return self._inside.values()

    def serve(self, ready: dict[int, int], poller: select.poll, stopped: bool) -> None:
        for ended in [descriptor for descriptor in self._inside if descriptor in ready]:
            poller.unregister(ended)
            os.waitpid(self._inside.pop(ended), 0)
            os.close(ended)
        if self.doors.fileno() not in ready:
            return
        _, descriptors, _, _ = socket.recv_fds(self.doors, 16, 1)
        if not descriptors:
            poller.unregister(self.doors)
        for connection in descriptors:
            if not stopped:  # else the connection closes at once
                with contextlib.suppress(OSError):  # the guest has just ended
                    self._admit(connection, poller)
            os.close(connection)

    def _admit(self, connection: int, poller: select.poll) -> None:
        child = os.fork()
        if child == 0:
            confinement.die_with_parent()
            session_agent.serve(connection, self._spec, self._enter)
        descriptor = os.pidfd_open(child)
        self._inside[descriptor] = child
        poller.register(descriptor, select.POLLIN)

    def _enter(self) -> None:
        """Enter the guest's mount namespace, for its /proc; a fork of the watcher is already in its PID namespace."""
        self._group.enter()
        if self._isolation != "namespaces":
            return
        mounts = os.open(f"/proc/{self._first}/ns/mnt", os.O_RDONLY)
        if libc.setns(mounts, CLONE_NEWNS) != 0:
            raise OSError(ctypes.get_errno(), "cannot enter the guest")
        os.close(mounts)


def stop_all(first: int) -> None:
    """Stop all processes of the guest.

    A process may fork until it has stopped, and only then is the list of its children complete (proc(5)): repeat until all are
    stopped and no new one is found. A process that hangs in the kernel is not waited for.
    """
    stopped: set[int] = set()
    for _ in range(STOP_LOOKS):
        still = all(stands_still(pid) for pid in stopped)
        fresh = _descendants(first) - stopped
        if still and not fresh:
            return
        for pid in fresh:
            _signal(pid, signal.SIGSTOP)
        stopped |= fresh
        if not fresh:
            time.sleep(STOP_LOOK_S)


def end_session_children() -> None:
    """Kill processes that the job left behind; without a PID namespace they are children of this subreaper."""
    while True:
        children = children_of(os.getpid())
        if not children:
            return
        for pid in children:
            _signal(pid, signal.SIGKILL)
        for pid in children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _descendants(first: int) -> set[int]:
    """Return every process of the job: this process's descendants without process 1 of the guest."""
    return descendants_of(os.getpid()) - {first}


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)

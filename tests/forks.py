"""Starts `python -m MODULE` by a fork of a process that has loaded it: a daemon starts in 0.2 s of CPU time, not 0.5 s.

A server for each program has one thread, only loads, and ends with the test run. A fork has the arguments, environment,
directory, descriptors, session and signals of a program of its own, and ends as an interpreter does. What it inherits otherwise
(limits, umask, variables that are read once) chooses its server. It shares with other forks the seed of hashes, and the command
and environment in /proc, which are the server's. A start within another command (`ip netns exec`) is a program of its own.
"""

import contextlib
import gc
import importlib
import json
import os
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from mesh.daemon import launcher
from mesh.daemon.layout import Layout

DAEMON, COMMAND = "mesh.daemon.entry", "mesh.cli"
USED = {DAEMON: "membership.mdns", COMMAND: "mesh.cli.jobs"}  # modules that most runs load late
READ_ONCE = ("PYTHON", "LD_", "LC_", "LANG", "TZ", "MALLOC")  # variables of Python and the C library
MESSAGE_BYTES = 1 << 20  # at most; an order is the arguments, directory and environment


class Fork:
    """A process that a server has forked, with the part of `subprocess.Popen` that tests use."""

    def __init__(self, module: str, arguments: list[str], files: list[int], cwd: Path, env: dict[str, str]) -> None:
        self._answers, starter = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with starter:
            order = json.dumps([arguments, str(cwd.absolute()), env]).encode()
            socket.send_fds(server(module, *inherited(env))[0], [order], [*files, starter.fileno()])
        self.returncode: int | None = None
        self.pid = self._answer()

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._answers], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            self.returncode = self._answer()
            self._answers.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _answer(self) -> int:
        return int(self._answers.recv(MESSAGE_BYTES))  # the pid, then the exit code; ValueError if the server has ended


def start_daemon(where: Layout, overrides: dict[str, Any], within: tuple[str, ...] = ()) -> Any:
    """Start a daemon as `launcher.start_daemon` does."""
    if within:
        return launcher.start_daemon(where, overrides, within)
    _, _, module, *arguments = launcher.daemon_command(where, overrides)
    with where.log.open("ab") as log, Path(os.devnull).open() as nothing:
        return Fork(module, arguments, [nothing.fileno(), log.fileno(), log.fileno()], Path(), dict(os.environ))


def run(arguments: list[str], given: str, cwd: Path, timeout: float, env: dict[str, str]) -> Any:
    """Run the command line to its end as `subprocess.run` with captured output does, but into files instead of pipes."""
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(os.fdopen(os.memfd_create("file"), "w+")) for _ in range(3)]
        files[0].write(given)
        files[0].seek(0)
        fork = Fork(COMMAND, arguments, [file.fileno() for file in files], cwd, env)
        stack.callback(fork.wait)
        stack.callback(fork.kill)
        code = fork.wait(timeout)
        for file in files:
            file.seek(0)
        return subprocess.CompletedProcess(arguments, code, files[1].read(), files[2].read())


def inherited(env: dict[str, str]) -> tuple[Any, ...]:
    variables = tuple(sorted(item for item in env.items() if item[0].startswith(READ_ONCE)))
    umask = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("Umask"))
    return variables, tuple(resource.getrlimit(number) for number in range(16)), umask


@cache
def server(module: str, variables: tuple[tuple[str, str], ...], *_: Any) -> tuple[socket.socket, Any]:
    """Start a server; return the socket for orders, and the process, which ends when this one does."""
    orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    env = {name: value for name, value in os.environ.items() if not name.startswith(READ_ONCE)} | dict(variables)
    command = [sys.executable, "-m", "tests.forks", str(theirs.fileno()), module]
    with theirs:
        return orders, subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd=Path(__file__).parents[1], env=env)


# --- in a server


def main() -> None:
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the test run
    _, orders, module = sys.argv
    if module == DAEMON:
        runpy.run_module(DAEMON)["load"]()
    importlib.import_module(USED[module])
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a fork would lack the other threads"
    gc.freeze()  # a collection in a fork would copy what it shares
    become(module, *serve(socket.socket(fileno=int(orders))), interrupt)


def serve(orders: socket.socket) -> tuple[bytes, list[int]]:
    """Fork for each order and report its end, until the test run ends. In a fork, return its order and descriptors."""
    forks: dict[int, tuple[int, int]] = {}  # pidfd -> pid, descriptor for answers
    poller = select.poll()
    poller.register(orders, select.POLLIN)
    while True:
        for ready, _ in poller.poll():
            if ready in forks:
                poller.unregister(ready)
                pid, starter = forks.pop(ready)
                answer(starter, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                closed = [starter, ready]
            else:
                order, descriptors, _, _ = socket.recv_fds(orders, MESSAGE_BYTES, 4)
                if not order:
                    sys.exit()
                pid = os.fork()
                if pid == 0:
                    orders.detach()
                    return order, descriptors
                *closed, starter = descriptors
                answer(starter, pid)
                watched = os.pidfd_open(pid)
                forks[watched] = pid, starter
                poller.register(watched, select.POLLIN)
            for descriptor in closed:
                os.close(descriptor)


def answer(starter: int, number: int) -> None:
    with contextlib.suppress(OSError):  # who started it may be gone
        os.write(starter, b"%d" % number)


def become(module: str, order: bytes, descriptors: list[int], interrupt: Any) -> None:
    """Run the program, as a process of its own."""
    arguments, cwd, env = json.loads(order)
    for number, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, number)
    os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    signal.signal(signal.SIGINT, interrupt)
    if module == DAEMON:
        os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    sys.argv[1:], sys.path[0] = arguments, cwd
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

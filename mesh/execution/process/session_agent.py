"""The agent that runs one command of `mesh exec` inside a guest of the `process` engine. Standard library only.

It is a fork of the guest's watcher and so one of the guest's processes, in its namespaces: stopped and killed with them. It reads
frames (`mesh.rpc.frames`) from the daemon and writes frames back, through a terminal or three pipes to the command. Buffers are
bounded, so a slow end blocks the other. When the daemon's end closes, the command is hung up.
"""

import contextlib
import errno
import fcntl
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import termios
from collections.abc import Callable
from typing import Any

from mesh.execution.process import confinement
from mesh.execution.session_framing import TooLong, Unframer, framed
from mesh.util.processes import keep_to_user_limits, no_core_dumps

INPUT, OUTPUT, ERRORS, CONTROL = 0, 1, 2, 3  # as in mesh.rpc.frames, which needs more than the standard library
PIECE_BYTES, MAX_FRAME_BYTES = 32 * 1024, 256 * 1024
FULL_BYTES = 64 * 1024  # buffered in each direction (own choice)
LINGER_S = 5.0  # for the daemon to read the last frames (own choice)
HANG_UP_S = 2.0  # between SIGHUP and SIGKILL (own choice)
NOT_EXECUTABLE, NOT_FOUND = 126, 127
END_OF_INPUT = b"\x04"  # to a terminal

Spec = dict[str, Any]


def serve(connection: int, spec: Spec, enter: Callable[[], None]) -> None:
    """Run a session and exit. `enter` moves this process into the guest."""
    code = 1
    try:
        reset_signals()
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        os.closerange(3, connection)
        os.closerange(connection + 1, os.sysconf("SC_OPEN_MAX"))
        os.setsid()
        enter()
        Agent(connection, spec).run()
        code = 0
    except (OSError, ValueError, KeyError) as error:
        with contextlib.suppress(OSError):
            os.write(
                connection, framed(bytes([CONTROL]) + json.dumps({"type": "failed", "text": str(error)[:300]}).encode())
            )
    finally:
        os._exit(code)


class Agent:
    """One session: a command, and the frames to and from the daemon."""

    def __init__(self, connection: int, spec: Spec) -> None:
        self._connection, self._spec = connection, spec
        self._unframer = Unframer(MAX_FRAME_BYTES)
        self._out = bytearray()  # frames that the daemon has not taken yet
        self._in = bytearray()  # input that the command has not taken yet
        self._input_ended = False
        self._sources: dict[int, int] = {}  # descriptor of the command's output -> kind of frame
        self._sink = -1
        self._terminal = -1
        self._command = 0

    def run(self) -> None:
        os.set_blocking(self._connection, True)
        order, early = self._first_frames()
        self._start(order)
        self._say({"type": "opened"})
        for frame in early:
            self._heed(frame)
        os.set_blocking(self._connection, False)
        watched = os.pidfd_open(self._command)
        if not self._carry(watched):
            self._hang_up(watched)
            return
        _, result = os.waitpid(self._command, 0)
        self._drain()
        code = os.waitstatus_to_exitcode(result)
        self._say({"type": "exit", "code": code if code >= 0 else 128 - code})
        os.set_blocking(self._connection, True)
        while self._out:
            self._flush()
        self._linger()

    def _linger(self) -> None:
        """Wait until the daemon has read all and closes: if it sent to a closed connection, it would lose unread frames."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._connection)) as connection:
            connection.shutdown(socket.SHUT_WR)
            connection.settimeout(LINGER_S)
            while connection.recv(FULL_BYTES):
                pass

    def _first_frames(self) -> tuple[Spec, list[bytes]]:
        frames: list[bytes] = []
        while not frames:
            data = os.read(self._connection, 1 << 16)
            if not data:
                os._exit(0)
            frames = self._unframer.feed(data)
        return json.loads(frames[0][1:]), frames[1:]

    # --- the command

    def _start(self, order: Spec) -> None:
        theirs: tuple[int, int, int]
        if order.get("tty"):
            self._terminal, slave = os.openpty()
            self._resize(order.get("rows", 24), order.get("columns", 80))
            self._sources, self._sink, theirs = {self._terminal: OUTPUT}, self._terminal, (slave, slave, slave)
        else:
            (stdin, sink), (out, stdout), (err, stderr) = os.pipe(), os.pipe(), os.pipe()
            self._sources, self._sink, theirs = {out: OUTPUT, err: ERRORS}, sink, (stdin, stdout, stderr)
        self._command = os.fork()
        if self._command == 0:
            become_command(order, self._spec, theirs)
        for descriptor in set(theirs):
            os.close(descriptor)
        for descriptor in {self._sink, *self._sources}:
            os.set_blocking(descriptor, False)

    def _resize(self, rows: int, columns: int) -> None:
        if self._terminal >= 0:
            fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def _signal(self, name: str) -> None:
        """Signal the command's process group; with a terminal, its foreground group."""
        group = 0
        with contextlib.suppress(OSError):
            group = os.tcgetpgrp(self._terminal) if self._terminal >= 0 else 0
        self._tell(group or self._command, signal.Signals[f"SIG{name}"])

    def _tell(self, group: int, number: signal.Signals) -> None:
        """Signal a process group. The command leads its group only after it was first scheduled; before, signal it alone."""
        with contextlib.suppress(PermissionError):
            try:
                os.killpg(group, number)
            except ProcessLookupError:
                os.kill(self._command, number)  # only this process reaps it, so the id is still valid

    def _hang_up(self, watched: int) -> None:
        """End the command: the daemon has closed its end."""
        for number in (signal.SIGHUP, signal.SIGCONT):
            self._tell(self._command, number)
        for descriptor in {self._sink, *self._sources} - {-1}:
            os.close(descriptor)
        select.select([watched], [], [], HANG_UP_S)
        self._tell(self._command, signal.SIGKILL)

    # --- what goes back and forth

    def _carry(self, watched: int) -> bool:
        """Carry frames until the command has ended (True) or the daemon has gone (False)."""
        while True:
            reads: list[int] = [watched]
            if len(self._in) < FULL_BYTES:
                reads.append(self._connection)
            if len(self._out) < FULL_BYTES:
                reads += self._sources
            writes = ([self._connection] if self._out else []) + ([self._sink] if self._in else [])
            readable, writable, broken = _poll(reads, writes, self._connection)
            if self._connection in broken and self._connection not in readable:
                return False
            if self._sink in writable and self._in:
                self._feed()
            if self._connection in writable and not self._flush():
                return False
            if self._connection in readable and not self._receive():
                return False
            for source in [source for source in self._sources if source in readable]:
                self._read(source)
            if watched in readable:
                return True

    def _receive(self) -> bool:
        """Read frames; return whether the daemon is still connected."""
        try:
            data = os.read(self._connection, FULL_BYTES)
        except BlockingIOError:
            return True
        except ConnectionError:
            return False
        if not data:
            return False
        try:
            for frame in self._unframer.feed(data):
                self._heed(frame)
        except (TooLong, ValueError, KeyError):
            return False
        return True

    def _heed(self, frame: bytes) -> None:
        if frame[0] == INPUT:
            if self._sink >= 0 and not self._input_ended:
                self._in += frame[1:]
                self._feed()
            return
        word = json.loads(frame[1:])
        match word["type"]:
            case "resize":
                self._resize(word["rows"], word["columns"])
            case "signal":
                self._signal(word["name"])
            case "input_end":
                self._input_ended = True
                if self._terminal >= 0:
                    self._in += END_OF_INPUT
                self._feed()

    def _feed(self) -> None:
        try:
            while self._in:
                del self._in[: os.write(self._sink, self._in[:PIECE_BYTES])]
        except BlockingIOError:
            return
        except OSError:  # the command has closed its input
            self._in.clear()
        if self._input_ended and self._terminal < 0 and self._sink >= 0:
            os.close(self._sink)
            self._sink = -1

    def _read(self, source: int) -> bool:
        """Read a piece of output; return whether there was any."""
        try:
            data = os.read(source, PIECE_BYTES)
        except BlockingIOError:
            return False
        except OSError:  # EIO: the terminal is closed
            data = b""
        if not data:
            del self._sources[source]
            return False
        self._out += framed(bytes([self._sources[source]]) + data)
        return True

    def _drain(self) -> None:
        """Send the output written before its end; processes it left behind may keep the pipes open for ever."""
        os.set_blocking(self._connection, True)
        for source in list(self._sources):
            while source in self._sources and self._read(source):
                while self._out:
                    if not self._flush():
                        return

    def _say(self, word: Spec) -> None:
        self._out += framed(bytes([CONTROL]) + json.dumps(word).encode())

    def _flush(self) -> bool:
        """Write frames; return whether the daemon is still connected."""
        try:
            del self._out[: os.write(self._connection, self._out[: FULL_BYTES * 2])]
        except BlockingIOError:
            return True
        except OSError:
            self._out.clear()
            return False
        return True


def _poll(reads: list[int], writes: list[int], always: int) -> tuple[set[int], set[int], set[int]]:
    """Wait; return the descriptors that are readable (or at their end), writable, and whose other end is closed.

    The closed end of `always` is reported even when it is not polled for input.
    """
    wanted: dict[int, int] = {always: 0}
    for descriptor in reads:
        wanted[descriptor] = wanted.get(descriptor, 0) | select.POLLIN
    for descriptor in writes:
        wanted[descriptor] = wanted.get(descriptor, 0) | select.POLLOUT
    poller = select.poll()
    for descriptor, events in wanted.items():
        poller.register(descriptor, events)
    found = poller.poll()
    gone = select.POLLHUP | select.POLLERR
    readable = {
        descriptor
        for descriptor, events in found
        if wanted[descriptor] & select.POLLIN and events & (select.POLLIN | gone)
    }
    writable = {
        descriptor
        for descriptor, events in found
        if wanted[descriptor] & select.POLLOUT and events & (select.POLLOUT | gone)
    }
    return readable, writable, {descriptor for descriptor, events in found if events & gone}


def reset_signals() -> None:
    """Give all signals their default action. Python ignores SIGPIPE and SIGXFSZ, and the watcher SIGTERM."""
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)


def become_command(order: Spec, spec: Spec, stdio: tuple[int, int, int]) -> None:
    """Become the job's own command or a session's, with the job's variables, directory and limits."""
    try:
        confinement.die_with_parent()
        os.setsid()
        if order.get("tty"):
            fcntl.ioctl(stdio[0], termios.TIOCSCTTY, 0)
        for target, descriptor in enumerate(stdio):
            os.dup2(descriptor, target)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        confinement.drop_capabilities()
        reset_signals()
        no_core_dumps()
        keep_to_user_limits()
        if spec["memory_mib"]:
            limit = spec["memory_mib"] << 20
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        env = dict(spec["env"])
        if order.get("tty"):
            env["TERM"] = order.get("term") or "dumb"
        os.chdir(spec["cwd"])
        argv = [*spec["wrap"], *order["argv"]]
        os.execvpe(argv[0], argv, env)
    except OSError as error:
        missing = error.errno in {errno.ENOENT, errno.ENOTDIR}
        os.write(2, f"mesh: cannot run {order['argv'][0]!r}: {error.strerror}\n".encode())
        os._exit(NOT_FOUND if missing else NOT_EXECUTABLE)
    finally:
        sys.stderr.flush()
        os._exit(NOT_EXECUTABLE)

"""The local end of a tunnel: a terminal or pipes for `mesh exec`, a port on the loopback for `mesh job forward`."""

import asyncio
import contextlib
import fcntl
import os
import signal
import struct
import sys
import termios
import threading
import tty
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import aiohttp

from mesh.api import no_daemon
from mesh.cli.output import Output
from mesh.rpc.frame_connection import MESSAGE_LIMIT, Line
from mesh.rpc.frames import (
    ERRORS,
    INPUT,
    MOVES_S,
    OUTPUT,
    PIECE_BYTES,
    Data,
    Exit,
    Failed,
    FrameError,
    InputEnd,
    Note,
    Opened,
    Order,
    Resize,
    Signal,
    SignalName,
)
from mesh.util.errors import ExitCode, MeshError
from mesh.util.race import race

LOOPBACK = "127.0.0.1"
AGAIN_S = 0.5  # between two attempts to connect (own choice)
CONNECTIONS = 64  # at once, the limit of a job's tunnels (`mesh.api.handlers.tunnels`)

Report = Callable[[str], None]


class Escape:
    """Escapes in typed input, as in ssh: `~.` at the beginning of a line ends the session, `~~` is a tilde."""

    def __init__(self) -> None:
        self._begins, self._tilde = True, False

    def take(self, typed: bytes) -> tuple[bytes, bool]:
        """Return what to send, and whether to end the session."""
        through = bytearray()
        for byte in typed:
            if self._tilde:
                self._tilde = False
                if byte == ord("."):
                    return bytes(through), True
                if byte != ord("~"):
                    through += b"~"
            elif byte == ord("~") and self._begins:
                self._tilde = True
                continue
            through.append(byte)
            self._begins = byte in b"\r\n\x03\x04\x15"
        return bytes(through), False


class Gone(MeshError):
    """The tunnel ended without an exit code. `again_s`: seconds for which it is worth trying again."""

    def __init__(self, failure: Failed) -> None:
        super().__init__(failure.text, _code(failure.code))
        self.again_s = failure.again_s


def _code(number: int) -> ExitCode:
    return ExitCode(number) if number in set(ExitCode) else ExitCode.ERROR


class Dialler:
    """Opens tunnels through this machine's own daemon."""

    def __init__(self, socket_path: Path) -> None:
        connector = aiohttp.UnixConnector(str(socket_path), limit=0)
        self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))

    async def __aenter__(self) -> "Dialler":
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._session.close()

    @asynccontextmanager
    async def line(self, job: str, way: str) -> AsyncIterator[Line]:
        address = f"http://mesh/v1/jobs/{job}/tunnel/{way}"
        try:
            web_socket = await self._session.ws_connect(address, max_msg_size=MESSAGE_LIMIT, compress=0)
        except (aiohttp.ClientError, OSError) as error:
            raise no_daemon.stopped() from error
        line = Line(web_socket)
        try:
            yield line
        finally:
            await line.close()

    @asynccontextmanager
    async def opened(self, job: str, way: str, *, patient: bool = False) -> AsyncIterator[tuple[Line, str]]:
        """Open a tunnel to a port or socket; yield it and the job's node. Gone if that fails.

        If `patient`, wait until the job and its program run again, for example after a move.
        """
        loop = asyncio.get_running_loop()
        begun = loop.time()
        while True:
            async with self.line(job, way) as line:
                try:
                    node = (await until_opened(line)).node
                except Gone as error:
                    if not patient or loop.time() - begun >= error.again_s:
                        raise
                else:
                    yield line, node
                    return
            await asyncio.sleep(AGAIN_S)


async def until_opened(line: Line) -> Opened:
    """Wait until the other end has accepted the tunnel; Gone if it does not."""
    while True:
        try:
            frame = await line.receive()
        except FrameError as error:
            raise Gone(Failed(str(error))) from error
        if isinstance(frame, Opened):
            return frame
        if isinstance(frame, Failed):
            raise Gone(frame)
        if frame is None:
            raise Gone(Failed("the tunnel was closed", again_s=MOVES_S))


# --- a command


async def run_command(socket_path: Path, job: str, argv: tuple[str, ...], terminal: bool, report: Report) -> int:
    """Run a command next to the job and return its exit code."""
    async with Dialler(socket_path) as dialler, dialler.line(job, "exec") as line:
        rows, columns = _size() if terminal else (24, 80)
        term = os.environ.get("TERM", "") if terminal else ""
        await line.send(Order(argv, terminal, term if term.isprintable() and len(term) <= 64 else "", rows, columns))
        node = (await until_opened(line)).node
        ending: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        with _raw() if terminal else contextlib.nullcontext(), _signals(line, terminal, ending):
            _read_input(line, Escape() if terminal else None, ending)
            outputs = {OUTPUT: Output(raw=terminal), ERRORS: Output(raw=terminal, err=True)}
            showing = asyncio.create_task(_show(line, node, report, outputs), name="output")
            await asyncio.wait([showing, ending], return_when=asyncio.FIRST_COMPLETED)
            if showing.done():
                return showing.result()
            showing.cancel()
            return ending.result()


async def _show(line: Line, node: str, report: Report, outputs: dict[int, Output]) -> int:
    while True:
        match await line.receive():
            case Data(kind=kind, data=data) if kind in outputs:
                await asyncio.to_thread(outputs[kind].write, data)
            case Note(text=text):
                report(text)
            case Exit(code=code):
                for output in outputs.values():
                    output.close()
                return code
            case Failed() as failure:
                raise Gone(failure)
            case None:
                raise Gone(Failed(f"the connection to {node} was lost, and the command was killed", again_s=MOVES_S))


def _read_input(line: Line, escape: Escape | None, ending: "asyncio.Future[int]") -> None:
    """Read the input in a daemon thread, because a read from a terminal cannot be cancelled."""
    loop = asyncio.get_running_loop()

    def end() -> None:
        if not ending.done():
            ending.set_result(0)

    def read() -> None:
        with contextlib.suppress(OSError, RuntimeError, asyncio.CancelledError):
            while typed := os.read(0, PIECE_BYTES):
                through, over = escape.take(typed) if escape is not None else (typed, False)
                if through:
                    asyncio.run_coroutine_threadsafe(line.send(Data(INPUT, through)), loop).result()
                if over:
                    loop.call_soon_threadsafe(end)
                    return
            asyncio.run_coroutine_threadsafe(line.send(InputEnd()), loop).result()

    threading.Thread(target=read, name="input", daemon=True).start()


@contextmanager
def _signals(line: Line, terminal: bool, ending: "asyncio.Future[int]") -> Iterator[None]:
    """Send signals to the command if there is no terminal; the second of a kind ends the session."""
    loop = asyncio.get_running_loop()
    reported: set[int] = set()
    sending: set[asyncio.Task[None]] = set()

    def send(frame: Signal | Resize) -> None:
        task = asyncio.create_task(line.send(frame), name="signal")
        sending.add(task)
        task.add_done_callback(sending.discard)

    def pass_on(number: signal.Signals, name: SignalName) -> None:
        if (number in reported or terminal) and not ending.done():
            ending.set_result(128 + number)
        reported.add(number)
        send(Signal(name))

    names: dict[signal.Signals, SignalName] = {signal.SIGINT: "INT", signal.SIGTERM: "TERM", signal.SIGHUP: "HUP"}
    for number, name in names.items():
        loop.add_signal_handler(number, pass_on, number, name)
    if terminal:
        loop.add_signal_handler(signal.SIGWINCH, lambda: send(Resize(*_size())))
    try:
        yield
    finally:
        for number in (*names, signal.SIGWINCH):
            loop.remove_signal_handler(number)


@contextmanager
def _raw() -> Iterator[None]:
    """Send every key to the other end; restore the terminal afterwards."""
    before = termios.tcgetattr(0)
    try:
        tty.setraw(0, termios.TCSANOW)
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)


def _size() -> tuple[int, int]:
    try:
        rows, columns, _, _ = struct.unpack("HHHH", fcntl.ioctl(0, termios.TIOCGWINSZ, bytes(8)))
    except OSError:
        rows = columns = 0
    return rows or 24, columns or 80


# --- a port


class Forwarder:
    """A listener on the loopback. Each connection gets a tunnel of its own."""

    def __init__(self, dialler: Dialler, job: str, way: str, report: Report) -> None:
        self._dialler, self._job, self._way, self._report = dialler, job, way, report
        self._slots = asyncio.Semaphore(CONNECTIONS)
        self._last_error = ""
        self._server: asyncio.Server | None = None

    async def listen(self, port: int) -> int:
        """Listen on this port, or on any with 0; return it."""
        try:
            self._server = await asyncio.start_server(self._connected, LOOPBACK, port, limit=PIECE_BYTES)
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)  # asyncio's own text has the address, too
            raise MeshError(
                f"port {port} on {LOOPBACK} cannot be used ({reason}): choose another local port from 1024 on, or none",
                ExitCode.USAGE,
            ) from error
        return int(self._server.sockets[0].getsockname()[1])

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def problem(self) -> str:
        """Return what is in the way of a connection now; Gone if that is permanent."""
        try:
            async with self._dialler.opened(self._job, self._way):
                return ""
        except Gone as error:
            if not error.again_s:
                raise
            return str(error)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with self._slots, self._dialler.opened(self._job, self._way, patient=True) as (line, _):
                await _carry(line, reader, writer)
        except MeshError as error:
            if str(error) != self._last_error:
                self._last_error = str(error)
                self._report(self._last_error)
        finally:
            writer.transport.abort()


async def _carry(line: Line, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    async def out() -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(PIECE_BYTES):
                await line.send(Data(INPUT, data))
        await line.send(InputEnd())
        await asyncio.Event().wait()  # the other end may still send data

    async def back() -> None:
        with contextlib.suppress(OSError, FrameError):
            while isinstance(frame := await line.receive(), Data):
                writer.write(frame.data)
                await writer.drain()
            writer.close()
            await writer.wait_closed()

    await race("tunnel", out(), back())


def is_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()

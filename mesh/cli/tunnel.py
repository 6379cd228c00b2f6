"""The command line's end of a tunnel: a terminal or pipes for `mesh exec`, a port on this machine's loopback for `forward`."""

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

from mesh.api.errors import ExitCode, MeshError
from mesh.api.line import MESSAGE_LIMIT, Line
from mesh.engine.frames import (
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
from mesh.race import race

LOOPBACK = "127.0.0.1"
AGAIN_S, PATIENT_S = (
    0.5,
    120.0,
)  # between two tries of a connection, and for how long; a move takes a grace and a restore; ours
CONNECTIONS = 64  # at once, as a job may have tunnels (`mesh.api.tunnels`)
TELLS_S = 5.0  # for a command that was told to end; ours
INTERRUPTED = 130

Say = Callable[[str], None]


class Escape:
    """What is typed, as ssh has it: `~.` at the beginning of a line ends the session here, `~~` is a tilde."""

    def __init__(self) -> None:
        self._begins, self._tilde = True, False

    def take(self, typed: bytes) -> tuple[bytes, bool]:
        """What goes to the other end, and whether the session is to end."""
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
    """The tunnel ended without an exit; `again_s`: how long it is worth trying again."""

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
            raise MeshError("the daemon of this machine went away: `mesh up` starts it", ExitCode.NO_DAEMON) from error
        line = Line(web_socket)
        try:
            yield line
        finally:
            await line.close()

    @asynccontextmanager
    async def opened(self, job: str, way: str, *, patient: bool = False) -> AsyncIterator[tuple[Line, str]]:
        """A tunnel to a port or socket that stands, and the node it leads to; if `patient`, once the job and its program are
        there again. Gone if it does not come to that."""
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
    """Gone if it does not come to stand."""
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
            raise Gone(Failed("the tunnel broke off", again_s=MOVES_S))


# --- a command


async def run_command(socket_path: Path, job: str, argv: tuple[str, ...], terminal: bool, say: Say) -> int:
    """Run it beside the job; its exit code."""
    async with Dialler(socket_path) as dialler, dialler.line(job, "exec") as line:
        rows, columns = _size() if terminal else (24, 80)
        term = os.environ.get("TERM", "") if terminal else ""
        await line.send(Order(argv, terminal, term if term.isprintable() and len(term) <= 64 else "", rows, columns))
        node = (await until_opened(line)).node
        ending: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        with _raw() if terminal else contextlib.nullcontext(), _signals(line, terminal, ending):
            _read_input(line, Escape() if terminal else None, ending)
            showing = asyncio.create_task(_show(line, node, say), name="output")
            await asyncio.wait([showing, ending], return_when=asyncio.FIRST_COMPLETED)
            if showing.done():
                return showing.result()
            showing.cancel()
            return ending.result()


async def _show(line: Line, node: str, say: Say) -> int:
    while True:
        match await line.receive():
            case Data(kind=kind, data=data) if kind in {OUTPUT, ERRORS}:
                await asyncio.to_thread(_write_all, 1 if kind == OUTPUT else 2, data)
            case Note(text=text):
                say(text)
            case Exit(code=code):
                return code
            case Failed() as failure:
                raise Gone(failure)
            case None:
                raise Gone(Failed(f"the connection to {node} broke off: what ran there is ended", again_s=MOVES_S))


def _read_input(line: Line, escape: Escape | None, ending: "asyncio.Future[int]") -> None:
    """In a thread that nobody waits for: a read from a terminal cannot be called off."""
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
    """Without a terminal, a signal goes to the command; the second of its kind ends the session."""
    loop = asyncio.get_running_loop()
    told: set[int] = set()
    sending: set[asyncio.Task[None]] = set()

    def send(frame: Signal | Resize) -> None:
        task = asyncio.create_task(line.send(frame), name="signal")
        sending.add(task)
        task.add_done_callback(sending.discard)

    def pass_on(number: signal.Signals, name: SignalName) -> None:
        if (number in told or terminal) and not ending.done():
            ending.set_result(128 + number)
        told.add(number)
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
    """Every key goes to the other end; the terminal is as it was afterwards, whatever happens."""
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


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


# --- a port


class Forwarder:
    """Listens on this machine's loopback, and nowhere else; each connection is a tunnel of its own."""

    def __init__(self, dialler: Dialler, job: str, way: str, say: Say) -> None:
        self._dialler, self._job, self._way, self._say = dialler, job, way, say
        self._turns = asyncio.Semaphore(CONNECTIONS)
        self._told = ""
        self._server: asyncio.Server | None = None

    async def listen(self, port: int) -> int:
        """On this port, or with 0 on any; which it is."""
        try:
            self._server = await asyncio.start_server(self._connected, LOOPBACK, port, limit=PIECE_BYTES)
        except OSError as error:
            raise MeshError(
                f"port {port} on {LOOPBACK} is taken: name another one, as `{port + 1}:...`, or none", ExitCode.USAGE
            ) from error
        return int(self._server.sockets[0].getsockname()[1])

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def try_it(self) -> None:
        """Say what stands against it now, before anybody connects; Gone if that is for good."""
        try:
            async with self._dialler.opened(self._job, self._way):
                return
        except Gone as error:
            if not error.again_s:
                raise
            self._say(str(error))

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with self._turns, self._dialler.opened(self._job, self._way, patient=True) as (line, _):
                await _carry(line, reader, writer)
        except MeshError as error:
            if str(error) != self._told:
                self._told = str(error)
                self._say(self._told)
        finally:
            writer.transport.abort()


async def _carry(line: Line, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    async def out() -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(PIECE_BYTES):
                await line.send(Data(INPUT, data))
        await line.send(InputEnd())
        await asyncio.Event().wait()  # the other end may still have something to say

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

"""The file system of a data set that is still being fetched: a process of its own, so that no read can hold up the daemon.

It shows the whole tree at once, answers from the packs that are here, every chunk compared with its hash, and asks the daemon for
the chunks that reads wait for. A read that does not get a chunk within `read_s` seconds, or all of them within 1.5 times that,
fails with EIO. Records on the pipes: a letter, a chunk's id and its length; the first has the data set's key instead, of length
0 if it is not encrypted. So no argument or variable has it. The file system goes when the daemon's end closes.
"""

import asyncio
import errno
import logging
import os
import signal
import sqlite3
import stat
import struct
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

from ckptstore.cipher import StateCipher
from ckptstore.dataset import Link
from ckptstore.dataset_view import TOP, DataView, Found, Lacking
from ckptstore.encoding import Bytes
from ckptstore.errors import MissingChunks, NotFound, StoreError
from ckptstore.index import IndexReader
from ckptstore.objects import ObjectReader
from mesh.data import fuse
from mesh.util.processes import lines_of, no_core_dumps

OPENS, WANT, HERE, FAILED = b"o", b"w", b"h", b"f"
RECORD = struct.Struct("=c32sI")
AGAIN_S = (
    5.0  # until the daemon is asked again, and for which a read of a chunk that did not come fails at once (own choice)
)
KILLED_S = 0.05  # between looks whether an interrupted reader was killed (own choice)
CACHE_BYTES = 64 << 20  # of chunks, decoded (own choice)
MOST_BROUGHT = 4096  # chunks for one request; more only if they evict each other from memory (own choice)
WAITS = 1.5  # times `read_s` for a whole request; the kernel gives up after 2 (own choice)
MOST_PIECES = os.sysconf("SC_IOV_MAX")
READERS = 4  # threads that read packs (own choice)
READ_ONLY_FILE, READ_ONLY_DIRECTORY = 0o444, 0o555
SIGKILL_BIT = 1 << (signal.SIGKILL - 1)

log = logging.getLogger(__name__)


class StreamServer:
    """Answers the kernel. `load` reads a chunk that is here, and blocks; `tell` sends a record to the daemon."""

    def __init__(
        self,
        kernel: int,
        root: Link,
        unix: int,
        load: Callable[[bytes], Bytes],
        tell: Callable[[bytes, bytes, int], None],
        read_s: float,
    ) -> None:
        self._kernel, self._root, self._unix, self._load, self._tell = kernel, root, unix, load, tell
        self._read_s = read_s
        self._view = DataView(root, self._give)
        self._chunks: OrderedDict[bytes, Bytes] = OrderedDict()
        self._cached = 0
        self._coming: dict[bytes, asyncio.Task[None]] = {}
        self._arrivals: dict[bytes, asyncio.Event] = {}
        self._failed: dict[bytes, float] = {}  # until when reads of a chunk fail at once
        self._serving: dict[int, tuple[asyncio.Task[None], int]] = {}  # by the request; the thread that waits
        self._watching: set[asyncio.Task[None]] = set()
        self.over = asyncio.Event()

    def here(self, identity: bytes) -> None:
        """The daemon says that a chunk has come."""
        if (arrival := self._arrivals.get(identity)) is not None:
            arrival.set()

    def asked(self) -> None:
        """Take what the kernel asks, until nothing is left."""
        while True:
            try:
                message = os.read(self._kernel, fuse.REQUEST_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in {errno.ENOENT, errno.EINTR}:  # the reader has gone
                    continue
                self.over.set()  # ENODEV: it is not mounted any more
                return
            self._handle(fuse.decode(message))

    def _handle(self, request: fuse.Request) -> None:
        if request.opcode == fuse.INTERRUPT:
            if (waiting := self._serving.get(request.interrupted)) is not None:
                watching = asyncio.create_task(_end_if_killed(*waiting), name="watch an interrupted reader")
                self._watching.add(watching)
                watching.add_done_callback(self._watching.discard)
        elif request.opcode not in fuse.UNANSWERED and not self._try(request):
            task = asyncio.create_task(self._wait(request), name="answer a read")
            self._serving[request.unique] = task, request.pid
            task.add_done_callback(lambda _: self._serving.pop(request.unique, None))

    def _try(self, request: fuse.Request) -> bool:
        """Answer if all chunks that it takes are in memory, and return True."""
        try:
            self._reply(request.unique, self._answer(request))
        except Lacking:
            return False
        except Exception as error:
            self._refuse(request, error)
        return True

    async def _wait(self, request: fuse.Request) -> None:
        """Answer once the chunks that it takes are in memory."""
        try:
            async with asyncio.timeout(WAITS * self._read_s):
                body = await self._answered(request)
            self._reply(request.unique, body)
        except Exception as error:
            self._refuse(request, error)
        except asyncio.CancelledError:
            self._reply(request.unique, (), errno.EINTR)
            raise

    async def _answered(self, request: fuse.Request) -> list[Bytes]:
        for _ in range(MOST_BROUGHT):
            try:
                return self._answer(request)
            except Lacking as lacking:
                await self._bring(lacking)
        raise OSError(errno.EIO, "it takes more chunks than there is memory for")

    def _refuse(self, request: fuse.Request, error: Exception) -> None:
        """Answer with an error, whatever it is: a request without an answer would hold its reader for ever."""
        if not isinstance(error, OSError | StoreError):
            log.error("request %d fails", request.opcode, exc_info=error)
        number = errno.ENOENT if isinstance(error, NotFound) else getattr(error, "errno", None) or errno.EIO
        self._reply(request.unique, (), number)

    def _reply(self, unique: int, body: list[Bytes] | tuple[()], error: int = 0) -> None:
        pieces = fuse.answer(unique, body, error)
        with suppress(OSError):  # the reader has gone, or the mount
            os.writev(self._kernel, pieces if len(pieces) <= MOST_PIECES else [b"".join(pieces)])

    def _answer(self, request: fuse.Request) -> list[Bytes]:
        match request.opcode:
            case fuse.INIT:
                return [fuse.init(request, int(2 * self._read_s))]
            case fuse.LOOKUP:
                return [fuse.entry(self._attributes(self._view.lookup(request.node, request.name)))]
            case fuse.GETATTR if request.node == TOP:
                top = fuse.Attributes(TOP, stat.S_IFDIR | READ_ONLY_DIRECTORY, 0, self._unix)
                return [fuse.attributes(top)]
            case fuse.GETATTR:
                return [fuse.attributes(self._attributes(self._view.at(request.node)))]
            case fuse.READLINK:
                return [self._view.at(request.node).entry.target]
            case fuse.READ:
                return self._view.content(self._view.at(request.node), *request.span)
            case fuse.READDIR | fuse.READDIRPLUS:
                return self._listing(request)
            case fuse.STATFS:
                return [fuse.statfs(self._root.size, self._root.entries)]
        raise OSError(errno.ENOSYS, "not needed")

    def _listing(self, request: fuse.Request) -> list[Bytes]:
        (at, room), plus = request.span, request.opcode == fuse.READDIRPLUS
        lines: list[Bytes] = []
        for found in self._view.listing(request.node, at):
            line = fuse.listed(self._attributes(found), found.entry.name, found.after, plus)
            room -= len(line)
            if room < 0:
                break
            lines.append(line)
        return [b"".join(lines)]

    def _attributes(self, found: Found) -> fuse.Attributes:
        mode = found.entry.mode
        if stat.S_ISDIR(mode):
            mode = stat.S_IFDIR | READ_ONLY_DIRECTORY
        elif stat.S_ISREG(mode):
            mode = stat.S_IFREG | READ_ONLY_FILE | mode & 0o111
        size = len(found.entry.target) if stat.S_ISLNK(mode) else found.entry.size
        return fuse.Attributes(found.number, mode, size, self._unix)

    # --- chunks

    def _give(self, identity: bytes, length: int) -> Bytes:
        found = self._chunks.get(identity)
        if found is None:
            raise Lacking(identity, length)
        self._chunks.move_to_end(identity)
        return found

    async def _bring(self, lacking: Lacking) -> None:
        """Have a chunk in memory. OSError if it does not come in time; StoreError if it is damaged."""
        coming = self._coming.get(lacking.id)
        if coming is None:
            name = f"bring chunk {lacking.id.hex()[:12]}"
            coming = self._coming[lacking.id] = asyncio.create_task(self._come(lacking), name=name)
            coming.add_done_callback(lambda _: self._coming.pop(lacking.id, None))
        await asyncio.shield(coming)

    async def _come(self, lacking: Lacking) -> None:
        if self._failed.get(lacking.id, 0.0) > time.monotonic():  # the kernel reads ahead first, and then again
            raise OSError(errno.EIO, "the chunk did not come")
        try:
            async with asyncio.timeout(self._read_s):
                data = await self._loaded(lacking)
        except (TimeoutError, StoreError, sqlite3.Error) as error:
            self._tell(FAILED, lacking.id, lacking.length)
            self._failed = {one: until for one, until in self._failed.items() if until > time.monotonic()}
            self._failed[lacking.id] = time.monotonic() + AGAIN_S
            raise OSError(errno.EIO, "the chunk did not come") from error
        self._chunks[lacking.id] = data
        self._cached += len(data)
        while self._cached > CACHE_BYTES:
            self._cached -= len(self._chunks.popitem(last=False)[1])

    async def _loaded(self, lacking: Lacking) -> Bytes:
        while True:
            try:
                return await asyncio.to_thread(self._load, lacking.id)
            except MissingChunks:
                arrival = self._arrivals[lacking.id] = asyncio.Event()
                self._tell(WANT, lacking.id, lacking.length)
                with suppress(TimeoutError):
                    async with asyncio.timeout(AGAIN_S):
                        await arrival.wait()
            finally:
                self._arrivals.pop(lacking.id, None)


async def _end_if_killed(task: asyncio.Task[None], pid: int) -> None:
    """End an interrupted read if its reader was killed. Others, such as stopped ones, go on to wait: programs expect no EINTR."""
    while not task.done():
        if was_killed(pid):
            task.cancel()
            return
        await asyncio.sleep(KILLED_S)


def was_killed(pid: int) -> bool:
    """Tell whether SIGKILL is pending for a thread, or it has ended."""
    try:
        lines = lines_of(f"/proc/{pid}/status")
    except OSError:
        return True
    return any(int(line.split()[1], 16) & SIGKILL_BIT for line in lines if line.startswith(("SigPnd:", "ShdPnd:")))


def tell(kind: bytes, identity: bytes, length: int) -> None:
    with suppress(BlockingIOError, BrokenPipeError):  # a daemon that stands still is asked again
        os.write(sys.stdout.fileno(), RECORD.pack(kind, identity, length))


def key_of(record: bytes) -> StateCipher | None:
    """Return the key that the daemon sends first."""
    _, key, length = RECORD.unpack(record)
    return StateCipher(key) if length else None


async def serve(path: Path, store: Path, unix: int, root: Link, read_s: float, cipher: StateCipher | None) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(READERS))
    reader = ObjectReader(store / "packs", IndexReader(store / "index.sqlite"))
    kernel = fuse.mounted(path)
    try:
        server = StreamServer(kernel, root, unix, partial(reader.chunk, cipher=cipher), tell, read_s)
        asyncio.get_running_loop().add_reader(kernel, server.asked)
        tell(HERE, bytes(32), 0)
        hearing = asyncio.create_task(_hear(server), name="hear the daemon")
        ending = asyncio.create_task(server.over.wait(), name="wait for the end of the mount")
        await asyncio.wait([hearing, ending], return_when=asyncio.FIRST_COMPLETED)
    finally:
        with suppress(OSError):
            fuse.unmounted(path)
    os._exit(0)  # a thread may be reading from a disk that hangs


async def _hear(server: StreamServer) -> None:
    orders = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    with suppress(asyncio.IncompleteReadError):
        while True:
            _, identity, _ = RECORD.unpack(await orders.readexactly(RECORD.size))
            server.here(identity)


def main() -> None:
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    os.set_blocking(sys.stdout.fileno(), False)
    no_core_dumps()
    root, record = msgspec.msgpack.decode(bytes.fromhex(sys.argv[4]), type=Link), b""
    while len(record) < RECORD.size:
        record += (read := os.read(sys.stdin.fileno(), RECORD.size - len(record)))
        if not read:
            sys.exit("the daemon has gone")
    cipher = key_of(record)
    try:
        asyncio.run(serve(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), root, float(sys.argv[5]), cipher))
    except OSError as error:
        sys.exit(f"a data set cannot be shown while it is fetched: {error}")

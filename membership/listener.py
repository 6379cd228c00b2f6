"""One TCP port for two protocols: frames between nodes, and TLS for those who speak it, so that a firewall needs one opening.

The first byte of a connection tells them apart: TLS begins with 22, the type of a handshake (RFC 8446, section 5.1), a frame with
the high byte of its length, 0. Until then a connection is a stranger's: these share few places, and those of one address fewer.
When they are full, the oldest one of the host that has most ends, so that an honest one, which speaks within milliseconds, gets
through a flood.
"""

import asyncio
import errno
import logging
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from membership.addresses import address_group

TLS, FRAMES = b"\x16", b"\0"
FIRST_BYTE_S = 5.0  # as for a handshake
HONEST_S = 0.25  # an honest connection speaks within milliseconds
MAX_UNSORTED, MAX_UNSORTED_PER_HOST = 128, 64  # at a time, as handshakes (`mesh.rpc.server`)
BACKLOG = 1024  # connections that the kernel keeps until they are accepted
ACCEPT_RETRY_S = 0.5

log = logging.getLogger(__name__)

Take = Callable[[socket.socket, str], None]
"""Takes over a connection from this host (`address_group`)."""


class Acceptor:
    """Passes the connections to bound sockets, which it closes, to `take`."""

    def __init__(self, take: Take) -> None:
        self._take = take
        self._accepting: dict[socket.socket, asyncio.Task[None]] = {}

    def start(self, listeners: Sequence[socket.socket]) -> None:
        for listener in listeners:
            listener.setblocking(False)
            listener.listen(BACKLOG)
            self._accepting[listener] = asyncio.create_task(self._accept(listener), name="accept nodes")

    async def close(self) -> None:
        for task in self._accepting.values():
            task.cancel()
        await asyncio.gather(*self._accepting.values(), return_exceptions=True)
        for listener in self._accepting:
            listener.close()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(0)  # while connections wait, `sock_accept` returns at once: all else needs its turn
            try:
                connection, address = await loop.sock_accept(listener)
            except OSError as error:
                if error.errno in {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}:
                    log.warning("no connection of another node can be accepted: %s", error.strerror)
                    await asyncio.sleep(ACCEPT_RETRY_S)
                continue
            self._take(connection, address_group(str(address[0])))


class Strangers:
    """Tasks that serve connections of unknown nodes, at most so many, and so many of one host."""

    def __init__(self, most: int, most_of_host: int) -> None:
        self._most, self._most_of_host = most, most_of_host
        self._tasks: dict[asyncio.Task[None], tuple[str, float]] = {}  # host and begin; the oldest first

    def __len__(self) -> int:
        return len(self._tasks)

    def make_place(self, host: str) -> int | None:
        """End a task if there are too many, and return how many ended; None if this host began too many at once.

        It is the oldest one of the host that has most, so a flood of few hosts ends its own tasks.
        """
        of_host = [task for task, (other, _) in self._tasks.items() if other == host]
        if len(of_host) >= self._most_of_host:
            excess = of_host[0]
            if time.monotonic() - self._tasks[excess][1] < HONEST_S:
                return None
        elif len(self._tasks) >= self._most:
            hosts = Counter(other for other, _ in self._tasks.values())
            most = max(hosts.values())
            excess = next(task for task, (other, _) in self._tasks.items() if hosts[other] == most)
        else:
            return 0
        excess.cancel()
        del self._tasks[excess]
        return 1

    def add(self, task: asyncio.Task[None], host: str) -> None:
        self._tasks[task] = host, time.monotonic()
        task.add_done_callback(self.recognize)

    def recognize(self, task: asyncio.Task[None]) -> None:
        """Free the place of a task whose node is known now; it goes on."""
        self._tasks.pop(task, None)

    async def end(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Listener:
    """Accepts connections and passes each on: to `frames` as streams, or to `tls`, with its host."""

    def __init__(
        self,
        frames: Callable[[asyncio.StreamReader, asyncio.StreamWriter, str], Awaitable[None]],
        tls: Take,
        counters: Counter[str],
    ) -> None:
        self._frames, self._tls, self._counters = frames, tls, counters
        self._acceptor = Acceptor(self.take)
        self._unsorted = Strangers(MAX_UNSORTED, MAX_UNSORTED_PER_HOST)

    def start(self, listeners: Sequence[socket.socket]) -> None:
        """Accept connections to these bound sockets, which this listener closes."""
        self._acceptor.start(listeners)

    async def close(self) -> None:
        await self._acceptor.close()
        await self._unsorted.end()

    def take(self, connection: socket.socket, host: str) -> None:
        """Serve a connection from this host (`address_group`); a relay has accepted it for this node, if not the kernel."""
        ended = self._unsorted.make_place(host)
        self._counters["refused_silent"] += 1 if ended is None else ended
        if ended is None:
            connection.close()
            return
        self._unsorted.add(asyncio.create_task(self._sort(connection, host), name="first byte"), host)

    async def _sort(self, connection: socket.socket, host: str) -> None:
        taken = False
        try:
            async with asyncio.timeout(FIRST_BYTE_S):
                first = await first_byte(connection)
            if first == TLS:
                taken = True
                self._tls(connection, host)
            elif first == FRAMES:
                loop = asyncio.get_running_loop()
                taken = True
                await loop.connect_accepted_socket(lambda: _streams(self._frames, host), connection)
            else:
                self._counters["refused_unsigned"] += 1
        except TimeoutError:
            self._counters["refused_silent"] += 1
        except OSError:
            self._counters["reconcile_failed"] += 1
        finally:
            if not taken:
                connection.close()


def _streams(
    serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter, str], Awaitable[None]], host: str
) -> asyncio.StreamReaderProtocol:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await serve(reader, writer, host)

    callback: Any = answer  # typeshed wants no result, asyncio takes a coroutine
    return asyncio.StreamReaderProtocol(asyncio.StreamReader(), callback)


async def first_byte(connection: socket.socket) -> bytes:
    """Wait for a byte and return it, unread; b"" if the connection has ended."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            return connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            ready = asyncio.Event()
            loop.add_reader(connection, ready.set)
            try:
                await ready.wait()
            finally:
                loop.remove_reader(connection)

"""Proxy: one job's only way to hosts, those that it asked for by name (docs/explanation/egress.md).

It accepts on a socket that listens inside the guest's network, so no other job can use it. `CONNECT` leads to a destination whose
TLS must name the same host in its first message; `http://` goes to port 80. What comes in is a guest's: heads are bounded before
they are read, connections, time and bytes are bounded, and the address that was checked is the one that is connected to.
"""

import asyncio
import contextlib
import logging
import re
import socket
from asyncio.staggered import staggered_race
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from itertools import zip_longest

import h11

from mesh.model.destinations import HTTP_PORT, DestinationError, destination
from mesh.network.addresses import NotPublic
from mesh.network.client_hello import ACCESS_DENIED, HelloReader, HelloRefused
from mesh.network.proxy_rules import ProxyRules, Refusal
from mesh.util.byte_text import amount
from mesh.util.task_set import TaskSet
from mesh.util.text import plural

CONNECTIONS = 128  # of one job at a time (own choice); further ones wait in the guest's kernel
ACCEPT_S = (
    0.005  # between two connections of one job: a guest that only connects costs 200 of them a second (own choice)
)
RETRY_S = 1.0  # after this machine had no descriptors for another connection (own choice)
HEAD_BYTES = 16_384  # h11's default for the head of a request or answer
READ_BYTES = 4096  # while a head or a ClientHello is read: the most beyond their bounds
PIECE_BYTES = 65_536
HANDSHAKE_S = 20.0  # for a request and its connection, and then for the ClientHello (own choice)
CONNECT_S, ADDRESSES = 5.0, 4  # for one address, and how many are tried (own choice)
NEXT_S = 0.25  # until the next address is tried beside one that does not answer (RFC 8305, 5)
IDLE_S = 600.0  # without a byte in either direction (own choice)
REFUSALS_TOLD = 16  # different refused destinations of one attempt in its events (own choice)
HOP_BY_HOP = {
    b"connection",
    b"keep-alive",
    b"proxy-connection",
    b"proxy-authorization",
    b"te",
    b"upgrade",
}  # RFC 9110 7.6.1
_ABSOLUTE = re.compile(r"http://([^/?]*)([/?].*)?")

Read = Callable[[], Awaitable[bytes]]
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]

log = logging.getLogger(__name__)


class Traffic:
    """What an attempt exchanged with one destination, in bytes."""

    def __init__(self) -> None:
        self.connections = self.sent = self.received = 0

    def __str__(self) -> str:
        return f"{plural(self.connections, 'connection')}, {amount(self.sent)} sent, {amount(self.received)} received"


class Proxy:
    """The proxy of one attempt; `note` reports what it reaches."""

    def __init__(self, rules: ProxyRules, job: bytes, asked: Iterable[str], note: Callable[[str], None]) -> None:
        self._allowed = rules.allowed.intersection(asked)
        self._resolve, self._spend, self._note = rules.resolve, partial(rules.spend, job), note
        self._loop = asyncio.get_running_loop()
        self._traffic: dict[str, Traffic] = {}
        self._refused: set[str] = set()
        self._tasks = TaskSet(log)
        self._room = asyncio.Semaphore(CONNECTIONS)
        self._closed = False

    def listen(self, listener: socket.socket) -> None:
        """Serve what connects to this socket, which nobody else may hold. From any thread."""
        self._loop.call_soon_threadsafe(self._begin, listener)

    def _begin(self, listener: socket.socket) -> None:
        if self._closed:
            listener.close()
        else:
            self._tasks.start(self._accept(listener), "proxy of a job")

    async def close(self) -> None:
        """End all connections, and report what they carried."""
        self._closed = True
        await self._tasks.close()
        for where, traffic in self._traffic.items():
            self._note(f"{where}: {traffic}")
        self._traffic.clear()

    async def _accept(self, listener: socket.socket) -> None:
        with listener:
            listener.setblocking(False)
            while True:
                await self._room.acquire()
                try:
                    connection, _ = await self._loop.sock_accept(listener)
                except OSError as error:
                    log.warning("the proxy of a job cannot accept: %s", error)
                    self._room.release()
                    await asyncio.sleep(RETRY_S)
                    continue
                self._tasks.start(self._serve(connection), "connection of a job")
                await asyncio.sleep(ACCEPT_S)

    async def _serve(self, connection: socket.socket) -> None:
        with contextlib.ExitStack() as ends:
            ends.callback(self._room.release)
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(sock=connection, limit=PIECE_BYTES)
                ends.callback(writer.transport.abort)
                await self._answer(reader, writer)
                writer.close()
                async with asyncio.timeout(HANDSHAKE_S):  # a guest may not read what is left
                    await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES)
        head = 0

        async def read() -> bytes:
            nonlocal head
            data = await reader.read(READ_BYTES)
            head += len(data)
            self._spend(len(data))
            return data

        try:
            async with asyncio.timeout(HANDSHAKE_S):
                request = await _event(client, read)
                if not isinstance(request, h11.Request):
                    return
                where, path = _asked(request)
                upstream = await self._connect(where)
                self._traffic[where].sent += head
        except (Refusal, h11.RemoteProtocolError, TimeoutError) as error:
            refusal = _refusal_of(error)
            self._tell_refused(refusal)
            await _say(client, writer, refusal)
            return
        try:
            if path is None:
                await self._tunnel(client, (reader, writer), upstream, where)
            else:
                await self._forward(client, (reader, writer), upstream, where, request, path)
        except (Refusal, HelloRefused) as error:
            self._tell_refused(_refusal_of(error, where))
            if isinstance(error, HelloRefused):
                writer.write(ACCESS_DENIED)
                await writer.drain()
        except (TimeoutError, h11.ProtocolError):
            pass  # the guest sees its connection closed
        finally:
            upstream[1].transport.abort()

    async def _connect(self, where: str) -> Streams:
        """Connect to an allowed destination, at an address that was checked. Refusal."""
        if where not in self._allowed:
            raise Refusal(403, f"{where} is not among the hosts that the job asked for (mesh run --network)", where)
        host, _, port = where.rpartition(":")
        try:
            addresses = await self._resolve(host)
        except NotPublic as error:
            raise Refusal(403, str(error), where) from error
        except (OSError, UnicodeError) as error:
            raise Refusal(502, f"{host} was not found: {error}", where) from error
        tries = [partial(_opened, address, int(port)) for address in _in_turn(addresses)[:ADDRESSES]]
        streams: Streams | None
        streams, _, problems = await staggered_race(tries, NEXT_S)
        if streams is None:
            why = dict.fromkeys(str(problem) or f"nothing within {CONNECT_S:g} s" for problem in problems)
            raise Refusal(502, f"{where} does not answer: {'; '.join(why) or 'it has no address'}", where)
        if where not in self._traffic:
            self._note(f"connected to {where}")
        self._traffic.setdefault(where, Traffic()).connections += 1
        return streams

    async def _tunnel(self, client: h11.Connection, guest: Streams, server: Streams, where: str) -> None:
        """Pass bytes between a guest and a server once the guest's TLS has named the server's host."""
        reader, writer = guest
        answer = client.send(h11.Response(status_code=200, headers=[], reason=b"Connection established"))
        assert answer is not None
        writer.write(answer)
        hello = HelloReader()
        async with asyncio.timeout(HANDSHAKE_S):
            name = hello.feed(client.trailing_data[0])
            while name is None:
                data = await reader.read(READ_BYTES)
                self._count(where, data, 0)
                if not data:
                    return
                name = hello.feed(data)
        host = where.rpartition(":")[0]
        if name != host:
            raise HelloRefused(f"TLS for {name[:253] if name.isprintable() else 'another host'}, not for {host}")
        server[1].write(hello.received)
        async with asyncio.timeout(IDLE_S) as idle:
            sent, received = (self._reading(end, where, idle, way) for way, end in enumerate((guest, server)))
            await _both(_pump(sent, server[1]), _pump(received, writer))

    async def _forward(
        self, client: h11.Connection, guest: Streams, server: Streams, where: str, request: h11.Request, path: str
    ) -> None:
        """Pass on one request in plain HTTP, with the host that was checked, and its answer."""
        host = where.rpartition(":")[0].encode()
        onward = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_BYTES)
        kept = [(name, value) for name, value in _kept(request.headers) if name != b"host"]
        head = h11.Request(method=request.method, target=path, headers=[(b"Host", host), *kept])

        async def up() -> None:
            event: h11.Event = head
            try:
                while not isinstance(event, h11.EndOfMessage):
                    await _write(onward, server[1], event)
                    event = await _event(client, sent)
                await _write(onward, server[1], event)
            except BaseException:
                server[1].transport.abort()
                raise

        async def down() -> None:
            while True:
                event = await _event(onward, received)
                if isinstance(event, h11.Response | h11.InformationalResponse):
                    event = type(event)(
                        status_code=event.status_code, headers=_kept(event.headers), reason=event.reason
                    )
                await _write(client, guest[1], event)
                if isinstance(event, h11.EndOfMessage):
                    return

        async with asyncio.timeout(IDLE_S) as idle:
            sent, received = (self._reading(end, where, idle, way) for way, end in enumerate((guest, server)))
            sending = asyncio.ensure_future(up())
            try:
                await down()  # a server may answer before it has the whole request
            finally:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)

    def _reading(self, end: Streams, where: str, idle: asyncio.Timeout, way: int) -> Read:
        """Return how to read from one end of a connection, in which each byte counts."""

        async def read() -> bytes:
            data = await end[0].read(PIECE_BYTES)
            self._count(where, data, way)
            if not idle.expired():
                idle.reschedule(self._loop.time() + IDLE_S)
            return data

        return read

    def _count(self, where: str, data: bytes, way: int) -> None:
        traffic = self._traffic.setdefault(where, Traffic())
        traffic.sent, traffic.received = traffic.sent + len(data) * (1 - way), traffic.received + len(data) * way
        self._spend(len(data))

    def _tell_refused(self, refusal: Refusal) -> None:
        """Report a refused destination, each once."""
        if refusal.where not in self._refused and len(self._refused) < REFUSALS_TOLD:
            self._refused.add(refusal.where)
            self._note(f"refused: {refusal}")


async def _opened(address: str, port: int) -> Streams:
    async with asyncio.timeout(CONNECT_S):
        return await asyncio.open_connection(address, port, limit=PIECE_BYTES)


def _in_turn(addresses: list[str]) -> list[str]:
    """Order addresses so that both families take turns, from the first: one of them may be broken here."""
    ipv6 = [one for one in addresses if ":" in one]
    ipv4 = [one for one in addresses if ":" not in one]
    families = (ipv6, ipv4) if addresses[:1] == ipv6[:1] else (ipv4, ipv6)
    return [one for pair in zip_longest(*families) for one in pair if one is not None]


def _asked(request: h11.Request) -> tuple[str, str | None]:
    """Return the destination of a request, and its path there; None for a tunnel. Refusal."""
    target = request.target.decode("ascii")  # h11 takes no other bytes
    try:
        if request.method == b"CONNECT":
            return destination(target), None
        found = _ABSOLUTE.fullmatch(target)
        if found is None:
            raise Refusal(400, "this is a proxy: it takes CONNECT, and http:// addresses")
        authority, path = found[1], found[2] or "/"
        where = destination(authority if ":" in authority else f"{authority}:{HTTP_PORT}")
    except DestinationError as error:
        raise Refusal(400, str(error)) from error
    if not where.endswith(f":{HTTP_PORT}"):
        raise Refusal(403, f"plain HTTP goes to port {HTTP_PORT} only, not to {where}", where)
    names = {name for name, _ in request.headers}
    if {b"content-length", b"transfer-encoding"} <= names:
        raise Refusal(400, "a request has one length", where)
    return where, path if path[0] == "/" else f"/{path}"


def _kept(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the headers that are for the other end; the connection ends with the exchange."""
    named = {word.strip().lower() for name, value in headers if name == b"connection" for word in value.split(b",")}
    return [(name, value) for name, value in headers if name not in HOP_BY_HOP | named] + [(b"Connection", b"close")]


def _refusal_of(error: Exception, where: str = "") -> Refusal:
    match error:
        case Refusal():
            return error
        case h11.RemoteProtocolError():
            return Refusal(error.error_status_hint, f"no HTTP that this proxy takes: {error}")
        case HelloRefused():
            return Refusal(403, f"{where} by {error}", where)
    return Refusal(504, f"no answer within {HANDSHAKE_S:g} s")


async def _event(connection: h11.Connection, read: Read) -> h11.Event:
    """Return the next event of a connection; RemoteProtocolError if it ends too early."""
    while True:
        event = connection.next_event()
        if not isinstance(event, type(h11.NEED_DATA)):
            return event  # type: ignore[return-value]
        connection.receive_data(await read())


async def _write(connection: h11.Connection, writer: asyncio.StreamWriter, event: h11.Event) -> None:
    writer.write(connection.send(event) or b"")
    await writer.drain()


async def _pump(read: Read, writer: asyncio.StreamWriter) -> None:
    while data := await read():
        writer.write(data)
        await writer.drain()
    with contextlib.suppress(OSError):
        writer.write_eof()


async def _both(*work: Awaitable[None]) -> None:
    """Wait for all of these, or the first failure; leave none running."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _say(client: h11.Connection, writer: asyncio.StreamWriter, refusal: Refusal) -> None:
    """Answer with a refusal, if the connection still takes an answer."""
    body = f"mesh: {refusal}\n".encode()
    headers = [("Content-Type", "text/plain"), ("Content-Length", str(len(body))), ("Connection", "close")]
    with contextlib.suppress(h11.LocalProtocolError, OSError):
        for event in (
            h11.Response(status_code=refusal.status, headers=headers),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            await _write(client, writer, event)

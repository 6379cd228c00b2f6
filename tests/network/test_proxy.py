"""The proxy of a job on real sockets: it leads to the named hosts alone, and what a guest can make it spend is bounded."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mesh.network import proxy as proxies
from mesh.network.addresses import NotPublic
from mesh.network.client_hello import ACCESS_DENIED
from mesh.network.proxy import Proxy
from mesh.network.proxy_rules import ProxyRules
from tests.network.hellos import hello
from tests.tls_site import ANSWER, HOST, Site, site

WAIT_S = 60.0
JOB = b"j" * 16
MIB = 1 << 20


class Wire:
    """A job's proxy, with the socket that its guest would have, and what it told."""

    def __init__(self, *asked: str, most_bytes: int = 64 * MIB, node: ProxyRules | None = None) -> None:
        self.told: list[str] = []
        self.answers: dict[str, list[str]] = {HOST: ["127.0.0.1"]}
        self.node = node or ProxyRules(asked, most_bytes, self._resolve)
        self.proxy = Proxy(self.node, JOB, asked, self.told.append)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.proxy.listen(self._listener)

    async def _resolve(self, host: str) -> list[str]:
        if not self.answers.get(host):
            raise NotPublic(f"{host} has no public address")
        return self.answers[host]

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def said(self, sent: bytes) -> bytes:
        """Return all that the proxy answers to these bytes."""
        reader, writer = await self.connect()
        try:
            writer.write(sent)
            async with asyncio.timeout(WAIT_S):
                return await reader.read()
        except ConnectionError:
            return b""
        finally:
            writer.close()

    async def tunnel(self, where: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await self.connect()
        writer.write(f"CONNECT {where} HTTP/1.1\r\nHost: {where}\r\n\r\n".encode())
        async with asyncio.timeout(WAIT_S):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        return reader, writer


async def fetched(wire: Wire, where: Site, name: str = HOST) -> bytes:
    """Fetch by TLS through the proxy, as a client that names this server."""
    reader, writer = await wire.tunnel(where.where)
    context = ssl.create_default_context(cafile=where.ca)
    try:
        async with asyncio.timeout(WAIT_S):
            await writer.start_tls(context, server_hostname=name)
            writer.write(b"GET / HTTP/1.1\r\nHost: " + name.encode() + b"\r\n\r\n")
            return await reader.read()
    finally:
        writer.close()


@contextlib.asynccontextmanager
async def talking(talk: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]) -> AsyncIterator[str]:
    """Serve on loopback without TLS; yield where that is, by the host's name."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await talk(reader, writer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"{HOST}:{server.sockets[0].getsockname()[1]}"


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Site]:
    async with site(tmp_path) as found:
        yield found


async def test_named_host_is_reached_and_counted(served: Site) -> None:
    wire = Wire(served.where)
    for _ in range(2):
        assert (await fetched(wire, served)).endswith(b"hello")
    assert wire.told == [f"connected to {served.where}"]
    for _ in range(2):
        await wire.proxy.close()
    (told,) = wire.told[1:]
    assert told.startswith(f"{served.where}: 2 connections, ") and "sent" in told


async def test_tls_may_come_with_the_request(served: Site) -> None:
    wire = Wire(served.where)
    reader, writer = await wire.connect()
    writer.write(f"CONNECT {served.where} HTTP/1.1\r\nHost: x\r\n\r\n".encode() + hello(b"evil.example.org"))
    async with asyncio.timeout(WAIT_S):
        assert (await reader.read()).endswith(b"\r\n\r\n" + ACCESS_DENIED)
    writer.close()
    await wire.proxy.close()


async def test_other_name_in_tls_is_refused(served: Site) -> None:
    """Domain fronting by the handshake: the address is that of an allowed host, the name another's."""
    wire = Wire(served.where)
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await fetched(wire, served, name="evil.example.org")
    near = (b"x" + HOST.encode(), b"www." + HOST.encode(), HOST.encode() + b".", b"example.org")
    for first in (*map(hello, (b"evil.example.org", *near, b"127.0.0.1")), b"SSH-2.0-x\r\n"):
        reader, writer = await wire.tunnel(served.where)
        writer.write(first)
        async with asyncio.timeout(WAIT_S):
            assert await reader.read() == ACCESS_DENIED
        writer.close()
    assert served.heads == [] and any("TLS for evil.example.org, not for" in text for text in wire.told)
    await wire.proxy.close()


@pytest.mark.parametrize("name", [b"\x1b[2Jevil", b"a" * 1000])
async def test_hostile_name_in_tls_does_not_get_into_a_terminal(served: Site, name: bytes) -> None:
    wire = Wire(served.where)
    reader, writer = await wire.tunnel(served.where)
    writer.write(hello(name))
    async with asyncio.timeout(WAIT_S):
        assert await reader.read() == ACCESS_DENIED
    writer.close()
    _, refused = wire.told
    assert refused.isprintable() and len(refused) < 400
    await wire.proxy.close()


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("other.example.org:443", b"403"),
        (f"{HOST}:22", b"403"),
        ("127.0.0.1:443", b"400"),
        ("[::1]:443", b"400"),
        ("0x7f.1:443", b"400"),
        (f"{HOST}:0443", b"400"),
        (f"{HOST}:99999", b"400"),
        (HOST, b"400"),
        ("", b"400"),
        (f"user@{HOST}:443", b"400"),
        ("b\xc3\xbccher.example:443", b"400"),
    ],
)
async def test_other_targets_are_refused(served: Site, target: str, status: bytes) -> None:
    wire = Wire(served.where)
    answer = await wire.said(b"CONNECT " + target.encode("latin-1") + b" HTTP/1.1\r\nHost: x\r\n\r\n")
    assert answer.split()[1] == status, answer
    assert served.connections == 0 and len(wire.told) == 1 and wire.told[0].startswith("refused: ")
    await wire.proxy.close()


async def test_spelling_of_a_target_plays_no_part(served: Site) -> None:
    wire = Wire(served.where)
    _, writer = await wire.tunnel(f"{HOST.upper()}.:{served.port}")
    writer.close()
    await wire.proxy.close()


async def test_owner_and_job_must_both_name_a_host(served: Site) -> None:
    owners = Wire(served.where)
    told = list[str]()
    strict = Proxy(owners.node, JOB, ["other.example.org:443"], told.append)
    assert strict._allowed == frozenset(), "what the owner does not allow"
    both = Proxy(owners.node, JOB, [served.where, "other.example.org:443"], told.append)
    assert both._allowed == {served.where}
    for each in (owners.proxy, strict, both):
        await each.close()


async def test_address_that_was_checked_is_connected_to(served: Site) -> None:
    """A second lookup would be the attacker's chance: there is none, and a name without a public address is refused."""
    wire = Wire(served.where)
    asked = list[str]()
    plain = wire._resolve

    async def once(host: str) -> list[str]:
        asked.append(host)
        return await plain(host)

    wire.proxy._resolve = once
    assert (await fetched(wire, served)).endswith(b"hello") and asked == [HOST]
    wire.answers[HOST] = []
    answer = await wire.said(f"CONNECT {served.where} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    assert b"403" in answer and b"no public address" in answer
    await wire.proxy.close()


async def test_host_that_cannot_be_reached_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many addresses a few are tried, each for a bounded time."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        where = f"{HOST}:{closed.getsockname()[1]}"
    wire, connect, tried = Wire(where), asyncio.open_connection, list[str]()
    ask = f"CONNECT {where} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
    answer = await wire.said(ask)
    assert answer.split()[1] == b"502" and b"does not answer: [Errno" in answer
    monkeypatch.setattr(proxies, "CONNECT_S", 0.1)

    async def silent(*where: Any, **more: Any) -> Any:
        if where and where[0] != "127.0.0.1":
            tried.append(where[0])
            await asyncio.sleep(WAIT_S)
        return await connect(*where, **more)

    monkeypatch.setattr(asyncio, "open_connection", silent)
    wire.answers[HOST] = [f"10.0.0.{number}" for number in range(8)]
    answer = await wire.said(ask)
    assert answer.split()[1] == b"502" and b"nothing within 0.1 s" in answer
    assert tried == wire.answers[HOST][: proxies.ADDRESSES]

    async def missing(host: str) -> list[str]:
        raise error

    wire.proxy._resolve = missing
    for error in (socket.gaierror("unknown name"), UnicodeError("label too long")):
        answer = await wire.said(ask)
        assert answer.split()[1] == b"502" and str(error).encode() in answer
    await wire.proxy.close()


async def test_proxy_accepts_again_after_descriptors_ran_out(served: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxies, "CONNECTIONS", 1)
    monkeypatch.setattr(proxies, "RETRY_S", 0.0)
    loop = asyncio.get_running_loop()
    accept, errors = loop.sock_accept, [OSError("too many open files")] * 3

    async def accepts(listener: socket.socket) -> tuple[socket.socket, Any]:
        if errors:
            raise errors.pop()
        return await accept(listener)

    monkeypatch.setattr(loop, "sock_accept", accepts)
    wire = Wire(served.where)
    assert (await fetched(wire, served)).endswith(b"hello") and not errors
    await wire.proxy.close()


@pytest.mark.parametrize("pause", ["RETRY_S", "ACCEPT_S"])
async def test_proxy_pauses_between_connections(monkeypatch: pytest.MonkeyPatch, pause: str) -> None:
    """A guest that connects without end, or a machine without descriptors, costs little."""
    monkeypatch.setattr(proxies, pause, WAIT_S)
    loop = asyncio.get_running_loop()
    accept, accepted = loop.sock_accept, list[socket.socket]()

    async def accepts(listener: socket.socket) -> tuple[socket.socket, Any]:
        connection = await accept(listener)
        accepted.append(connection[0])
        if pause == "RETRY_S":
            raise OSError("too many open files")
        return connection

    monkeypatch.setattr(loop, "sock_accept", accepts)
    wire = Wire()
    ends = [await wire.connect() for _ in range(3)]
    async with asyncio.timeout(WAIT_S):
        while not accepted:
            await asyncio.sleep(0)
    for _ in range(100):
        await asyncio.sleep(0)
    assert len(accepted) == 1
    await wire.proxy.close()
    for _, writer in ends:
        writer.close()


async def test_bytes_of_a_job_are_bounded_over_its_attempts(tmp_path: Path) -> None:
    body = b"x" * MIB
    async with site(tmp_path, answer=b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + body) as large:
        wire = Wire(large.where, most_bytes=MIB // 2)
        got = b""
        with contextlib.suppress(ssl.SSLError, ConnectionError):
            got = await fetched(wire, large)
        assert len(got) < MIB
        await wire.proxy.close()
        assert any("has used its 512.0 KiB" in text for text in wire.told)
        again = Wire(large.where, node=wire.node)  # its next attempt here
        answer = await again.said(f"CONNECT {large.where} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert answer.split()[1] == b"429"
        await again.proxy.close()


async def test_answer_that_ends_at_the_bound_has_no_other_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 1048576\r\n\r\n" + b"x" * MIB
    async with site(tmp_path, tls=False, answer=answer) as large:
        monkeypatch.setattr(proxies, "HTTP_PORT", large.port)
        wire = Wire(large.where, most_bytes=MIB // 2)
        got = await wire.said(f"GET http://{large.where}/ HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert not got.partition(b"\r\n\r\n")[2].strip(b"x")
        await wire.proxy.close()


async def test_every_byte_of_a_guest_counts_once(tmp_path: Path, served: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    async with site(tmp_path, tls=False) as plain:
        monkeypatch.setattr(proxies, "HTTP_PORT", plain.port)
        wire = Wire(plain.where, served.where, most_bytes=64 * 1024)
        body = b"x" * 100
        ask = f"POST http://{plain.where}/{'y' * 14_000} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n"
        answer = await wire.said(ask.encode() + body)
        used = len(ask) + len(body) + len(ANSWER)
        assert answer.endswith(b"hello") and wire.node._used[JOB] == used
        traffic = wire.proxy._traffic[plain.where]
        assert (traffic.sent, traffic.received) == (len(ask) + len(body), len(ANSWER))
        reader, writer = await wire.tunnel(served.where)
        used += len(f"CONNECT {served.where} HTTP/1.1\r\nHost: {served.where}\r\n\r\n")
        writer.write(hello(b"evil.example.org"))
        assert await reader.read() == ACCESS_DENIED
        writer.close()
        assert wire.node._used[JOB] == used + len(hello(b"evil.example.org"))
        answers = [await wire.said(ask.encode() + body) for _ in range(8)]
        assert answers[-1] == b"" or answers[-1].split()[1] == b"429"
        assert len(plain.heads) == 4
        await wire.proxy.close()
        assert any(text.startswith(f"{plain.where}: 4 connections, ") for text in wire.told)


async def test_family_that_is_broken_here_delays_a_connection_a_little(
    served: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = asyncio.open_connection
    tried = list[str]()

    async def broken(address: str, *rest: Any, **more: Any) -> Any:
        tried.append(address)
        if ":" in address:
            await asyncio.sleep(WAIT_S)  # its packets vanish
        return await connect(address, *rest, **more)

    wire = Wire(served.where)
    ipv6 = [f"2001:db8::{number}" for number in range(4)]
    wire.answers[HOST] = [*ipv6, "127.0.0.1"]
    ends = await wire.connect()
    monkeypatch.setattr(asyncio, "open_connection", broken)
    ends[1].write(f"CONNECT {served.where} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    async with asyncio.timeout(proxies.CONNECT_S):
        assert (await ends[0].readline()).startswith(b"HTTP/1.1 200 ")
    assert tried == [ipv6[0], "127.0.0.1"]
    assert proxies._in_turn(["a", "b", "::1", "::2", "::3"]) == ["a", "::1", "b", "::2", "::3"]
    ends[1].close()
    await wire.proxy.close()


async def test_connections_of_a_job_are_bounded(served: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxies, "CONNECTIONS", 3)
    wire = Wire(served.where)
    ends = [await wire.tunnel(served.where) for _ in range(3)]
    late, writer = await wire.connect()
    writer.write(f"CONNECT {served.where} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await late.read(1)
    ends[0][1].close()  # makes room
    async with asyncio.timeout(WAIT_S):
        assert (await late.readline()).startswith(b"HTTP/1.1 200 ")
    writer.close()
    for _, end in ends:
        end.close()
    await wire.proxy.close()


async def test_endless_head_is_refused_at_its_bound(served: Site) -> None:
    wire = Wire(served.where)
    for endless in (b"CONNECT " + b"a" * 10 * MIB, b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * MIB):
        answer = await wire.said(endless)
        assert answer == b"" or answer.split()[1] in {b"431", b"400"}
    answer = await wire.said(b"CONNECT x HTTP/1.1\r\nX: " + b"y" * (proxies.HEAD_BYTES - 20))
    assert answer.split()[1] == b"431"
    await wire.proxy.close()


async def test_slow_guest_is_given_up(served: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxies, "HANDSHAKE_S", 0.3)
    wire = Wire(served.where)
    assert (await wire.said(b"CONNECT ")).split()[1] == b"504"
    reader, writer = await wire.tunnel(served.where)
    writer.write(hello(HOST.encode())[:20])
    async with asyncio.timeout(WAIT_S):
        assert await reader.read() == b""
    writer.close()
    monkeypatch.setattr(proxies, "HANDSHAKE_S", WAIT_S)
    monkeypatch.setattr(proxies, "IDLE_S", 0.3)
    reader, writer = await wire.tunnel(served.where)
    writer.write(hello(HOST.encode()))
    async with asyncio.timeout(WAIT_S):
        await reader.read()  # the server's part of the handshake, and then the end
    writer.close()
    await wire.proxy.close()


@pytest.mark.parametrize("tls", [True, False])
async def test_server_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch, tls: bool) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    monkeypatch.setattr(proxies, "IDLE_S", 0.1)
    async with talking(talk) as where:
        monkeypatch.setattr(proxies, "HTTP_PORT", int(where.rpartition(":")[2]))
        wire = Wire(where)
        reader, writer = await (wire.tunnel(where) if tls else wire.connect())
        ask = f"GET http://{where}/ HTTP/1.1\r\nHost: x\r\n\r\n".encode()
        writer.write(hello(HOST.encode()) if tls else ask)
        async with asyncio.timeout(WAIT_S):
            assert await reader.read() == b""
        writer.close()
        await wire.proxy.close()


async def test_each_byte_begins_the_time_without_one_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    first, arrived = hello(HOST.encode()), asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(len(first))
        arrived.set()
        await reader.read()

    async with talking(talk) as where:
        wire = Wire(where)
        reader, writer = await wire.tunnel(where)
        writer.write(first)
        async with asyncio.timeout(WAIT_S):
            await arrived.wait()
            monkeypatch.setattr(proxies, "IDLE_S", 0.1)
            writer.write(b"more")
            assert await reader.read() == b""
        writer.close()
        await wire.proxy.close()


async def test_end_of_what_a_server_sends_reaches_the_guest() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"bye")
        writer.write_eof()
        assert (await reader.read()).endswith(b"and more")

    async with talking(talk) as where:
        wire = Wire(where)
        reader, writer = await wire.tunnel(where)
        writer.write(hello(HOST.encode()))
        async with asyncio.timeout(WAIT_S):
            assert await reader.read() == b"bye"
        writer.write(b"and more")
        writer.close()
        await wire.proxy.close()


@pytest.mark.parametrize("tls", [True, False])
async def test_ends_that_do_not_read_are_given_up(monkeypatch: pytest.MonkeyPatch, tls: bool) -> None:
    """What the other end sends to them fills no memory here, and their connections do not stay."""
    monkeypatch.setattr(proxies, "IDLE_S", 0.5)
    loop, body, lost = asyncio.get_running_loop(), bytes(32 * MIB), list[OSError]()
    accept, accepted = loop.sock_accept, list[socket.socket]()

    async def accepts(listener: socket.socket) -> tuple[socket.socket, Any]:
        accepted.append((await accept(listener))[0])
        return accepted[-1], None

    async def pour(writer: asyncio.StreamWriter, head: bytes) -> None:
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(head + body)
        try:
            await writer.drain()
        except ConnectionError as error:
            lost.append(error)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        await pour(writer, b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body))

    monkeypatch.setattr(loop, "sock_accept", accepts)
    async with talking(talk) as where:
        monkeypatch.setattr(proxies, "HTTP_PORT", int(where.rpartition(":")[2]))
        wire = Wire(where, most_bytes=1 << 30)
        _, writer = await (wire.tunnel(where) if tls else wire.connect())
        monkeypatch.setattr(proxies, "HANDSHAKE_S", 0.5)
        head = f"POST http://{where}/ HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        async with asyncio.timeout(WAIT_S):
            await pour(writer, hello(HOST.encode()) if tls else head)
            while len(lost) < 2 or accepted[0].fileno() >= 0:
                await asyncio.sleep(0.01)
        writer.close()
        await wire.proxy.close()


async def test_close_ends_all_connections(served: Site) -> None:
    wire = Wire(served.where)
    reader, writer = await wire.tunnel(served.where)
    await wire.proxy.close()
    async with asyncio.timeout(WAIT_S):
        assert await reader.read() == b""
    writer.close()
    with pytest.raises(OSError):
        await wire.connect()
    late = socket.create_server(("127.0.0.1", 0))
    wire.proxy.listen(late)
    async with asyncio.timeout(WAIT_S):
        while late.fileno() >= 0:
            await asyncio.sleep(0.01)


async def test_refusals_that_are_told_are_bounded(served: Site) -> None:
    wire = Wire(served.where)
    for number in range(2 * proxies.REFUSALS_TOLD):
        for _ in range(2):
            await wire.said(f"CONNECT h{number}.example.org:443 HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    assert len(set(wire.told)) == len(wire.told) == proxies.REFUSALS_TOLD
    await wire.proxy.close()


# --- plain HTTP


async def test_plain_http_goes_to_its_port_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with site(tmp_path, tls=False) as plain:
        wire = Wire(plain.where, f"{HOST}:8080")
        ask = f"GET http://{HOST}:%d/a?b=c HTTP/1.1\r\nHost: evil.example.org\r\nProxy-Authorization: x\r\n\r\n"
        answer = await wire.said((ask % 8080).encode())
        assert answer.split()[1] == b"403" and b"plain HTTP goes to port 80 only" in answer
        monkeypatch.setattr(proxies, "HTTP_PORT", plain.port)
        answer = await wire.said((ask % plain.port + ask % plain.port).encode())
        assert answer.startswith(b"HTTP/1.1 200 ") and answer.endswith(b"hello") and answer.count(b"HTTP/1.1") == 1
        (head,) = plain.heads
        assert head.startswith(b"GET /a?b=c HTTP/1.1\r\n") and f"Host: {HOST}\r\n".encode() in head
        assert b"evil" not in head and b"roxy" not in head and b"Connection: close" in head
        await wire.proxy.close()


async def test_plain_http_carries_bodies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = list[bytes]()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        bodies.append(await reader.readexactly(100_000))
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    monkeypatch.setattr(proxies, "HTTP_PORT", port)
    async with server:
        wire = Wire(f"{HOST}:{port}")
        head = f"POST http://{HOST}:{port}/ HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n"
        assert b"hello" in await wire.said(head.encode() + b"\r\n" + b"z" * 100_000)
        assert bodies == [b"z" * 100_000]
        two = await wire.said(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n")
        assert two.split()[1] == b"400"
        await wire.proxy.close()


async def test_heads_in_plain_http_are_written_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is for one connection stays there, also what is named as such."""
    heard = list[bytes]()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.readuntil(b"\r\n0\r\n\r\n"))
        own = b"Connection: X-Own\r\nX-Own: 1\r\nKeep-Alive: 1\r\nX-Kept: 1\r\n"
        writer.write(b"HTTP/1.1 103 Early Hints\r\n" + own + b"\r\n")
        writer.write(b"HTTP/1.1 200 Fine\r\n" + own + b"Content-Length: 2\r\n\r\nok")
        await writer.drain()

    async with talking(talk) as where:
        monkeypatch.setattr(proxies, "HTTP_PORT", int(where.rpartition(":")[2]))
        wire = Wire(where)
        answer = await wire.said(
            f"PUT http://{HOST}?b=c HTTP/1.1\r\nHost: evil.example.org\r\nProxy-Authorization: x\r\n"
            "Proxy-Connection: x\r\nConnection: close, X-Own\r\nX-Own: 1\r\nKeep-Alive: 1\r\nTE: gzip\r\n"
            "Upgrade: x\r\nX-Kept: 1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n".encode()
        )
        kept = b"x-kept: 1\r\n"
        head = b"PUT /?b=c HTTP/1.1\r\nHost: data.example.org\r\n" + kept + b"transfer-encoding: chunked\r\n"
        assert heard == [head + b"Connection: close\r\n\r\n5\r\nhello\r\n0\r\n\r\n"]
        assert answer == (
            b"HTTP/1.1 103 Early Hints\r\n" + kept + b"Connection: close\r\n\r\n"
            b"HTTP/1.1 200 Fine\r\n" + kept + b"content-length: 2\r\nConnection: close\r\n\r\nok"
        )
        await wire.proxy.close()


@pytest.mark.parametrize("goes_on", [True, False])
async def test_server_may_answer_before_the_end_of_a_request(monkeypatch: pytest.MonkeyPatch, goes_on: bool) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if goes_on:
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            assert await reader.readexactly(4) == b"body"
        writer.write(ANSWER)
        await writer.drain()

    async with talking(talk) as where:
        monkeypatch.setattr(proxies, "HTTP_PORT", int(where.rpartition(":")[2]))
        wire = Wire(where)
        reader, writer = await wire.connect()
        writer.write(f"PUT http://{where}/ HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n".encode())
        async with asyncio.timeout(WAIT_S):
            if goes_on:
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
                writer.write(b"body")
            assert (await reader.read()).endswith(b"hello")
        writer.close()
        await wire.proxy.close()


async def test_request_that_is_cut_off_ends_at_its_server(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        with contextlib.suppress(OSError):
            assert await reader.read() == b"half"
        ended.set()

    async with talking(talk) as where:
        monkeypatch.setattr(proxies, "HTTP_PORT", int(where.rpartition(":")[2]))
        wire = Wire(where)
        _, writer = await wire.connect()
        writer.write(f"PUT http://{where}/ HTTP/1.1\r\nHost: x\r\nContent-Length: 8\r\n\r\nhalf".encode())
        writer.write_eof()
        async with asyncio.timeout(WAIT_S):
            await ended.wait()
        writer.close()
        await wire.proxy.close()


async def test_endless_head_of_an_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * MIB)
        await writer.drain()

    async with talking(talk) as where:
        monkeypatch.setattr(proxies, "HTTP_PORT", int(where.rpartition(":")[2]))
        wire = Wire(where)
        assert await wire.said(f"GET http://{where}/ HTTP/1.1\r\nHost: x\r\n\r\n".encode()) == b""
        assert wire.proxy._traffic[where].received < MIB
        await wire.proxy.close()


@pytest.mark.parametrize(
    "request_line", [b"GET / HTTP/1.1", b"GET https://data.example.org/ HTTP/1.1", b"OPTIONS * HTTP/1.1"]
)
async def test_requests_that_are_not_for_a_proxy_are_refused(served: Site, request_line: bytes) -> None:
    wire = Wire(served.where)
    answer = await wire.said(request_line + b"\r\nHost: x\r\n\r\n")
    assert answer.split()[1] == b"400" and b"this is a proxy" in answer
    await wire.proxy.close()


async def test_hostile_bytes_leave_the_proxy_working(served: Site) -> None:
    wire = Wire(served.where)
    loop = asyncio.get_running_loop()

    @settings(max_examples=40, suppress_health_check=list(HealthCheck))
    @given(
        st.one_of(st.binary(max_size=300), st.binary(max_size=60).map(lambda junk: b"CONNECT " + junk + b"\r\n\r\n"))
    )
    def send(junk: bytes) -> None:
        async def once() -> None:
            _, writer = await wire.connect()
            writer.write(junk)
            writer.write_eof()
            writer.close()

        asyncio.run_coroutine_threadsafe(once(), loop).result(WAIT_S)

    await asyncio.to_thread(send)
    assert (await fetched(wire, served)).endswith(b"hello")
    await wire.proxy.close()

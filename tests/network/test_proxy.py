"""The proxy of a job on real sockets: it leads to the named hosts alone, and what a guest can make it spend is bounded."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
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


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Site]:
    async with site(tmp_path) as found:
        yield found


async def test_named_host_is_reached_and_counted(served: Site) -> None:
    wire = Wire(served.where)
    assert (await fetched(wire, served)).endswith(b"hello")
    assert wire.told == [f"connected to {served.where}"]
    await wire.proxy.close()
    assert wire.told[1].startswith(f"{served.where}: 1 connection, ") and "sent" in wire.told[1]


async def test_other_name_in_tls_is_refused(served: Site) -> None:
    """Domain fronting by the handshake: the address is that of an allowed host, the name another's."""
    wire = Wire(served.where)
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await fetched(wire, served, name="evil.example.org")
    for first in (hello(b"evil.example.org"), hello(HOST.encode() + b"."), hello(b"127.0.0.1"), b"SSH-2.0-x\r\n"):
        reader, writer = await wire.tunnel(served.where)
        writer.write(first)
        async with asyncio.timeout(WAIT_S):
            assert await reader.read() == ACCESS_DENIED
        writer.close()
    assert served.heads == [] and any("TLS for evil.example.org, not for" in text for text in wire.told)
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


async def test_every_byte_of_a_guest_counts_once(tmp_path: Path, served: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    async with site(tmp_path, tls=False) as plain:
        monkeypatch.setattr(proxies, "HTTP_PORT", plain.port)
        wire = Wire(plain.where, served.where, most_bytes=64 * 1024)
        body = b"x" * 100
        ask = f"POST http://{plain.where}/{'y' * 14_000} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n"
        answer = await wire.said(ask.encode() + body)
        used = len(ask) + len(body) + len(ANSWER)
        assert answer.endswith(b"hello") and wire.node._used[JOB] == used
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
        await wire.said(f"CONNECT h{number}.example.org:443 HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    assert len(wire.told) == proxies.REFUSALS_TOLD
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

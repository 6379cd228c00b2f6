"""One port for frames and TLS: connections are sorted by their first byte, within bounds."""

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from membership import listener
from membership.addresses import bound_sockets
from membership.listener import HONEST_S, MAX_UNSORTED, MAX_UNSORTED_PER_HOST, Acceptor, Listener, Strangers
from tests.membership.test_node import LOOPBACK, until

TLS_HELLO = b"\x16\x03\x01"


class Port:
    """A listener that answers frames with "frames", and keeps what TLS connections send."""

    def __init__(self) -> None:
        self.counters = Counter[str]()
        self.tls: list[tuple[bytes, str]] = []
        self.listener = Listener(self._frames, self._tls, self.counters)
        (bound,) = bound_sockets(LOOPBACK, 0, socket.SOCK_STREAM)
        self.number: int = bound.getsockname()[1]
        self.listener.start([bound])

    async def _frames(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str) -> None:
        writer.write(b"frames " + await reader.read(4))
        writer.close()

    def _tls(self, connection: socket.socket, host: str) -> None:
        self.tls.append((connection.recv(16), host))
        connection.close()

    async def say(self, data: bytes, source: str = LOOPBACK) -> bytes:
        reader, writer = await asyncio.open_connection(LOOPBACK, self.number, local_addr=(source, 0))
        writer.write(data)
        try:
            return await reader.read()
        except ConnectionResetError:  # closed with the byte unread
            return b""
        finally:
            writer.close()


def accepted(port: Port) -> int:
    """Return how many silent connections have ended or wait."""
    return len(port.listener._unsorted) + port.counters["refused_silent"]


@pytest.fixture
async def port() -> AsyncIterator[Port]:
    made = Port()
    yield made
    await made.listener.close()


async def test_first_byte_decides_and_stays_unread(port: Port) -> None:
    assert await port.say(b"\0\0\0\1") == b"frames \0\0\0\1"
    assert await port.say(TLS_HELLO) == b""
    assert port.tls == [(TLS_HELLO, LOOPBACK)]
    assert await port.say(b"GET / HTTP/1.1") == b""
    assert port.counters["refused_unsigned"] == 1
    await until(lambda: not port.listener._unsorted, "their places to be free")


async def test_hosts_of_one_ipv6_network_count_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, taken = asyncio.get_running_loop(), list[str]()
    accept = loop.sock_accept

    async def from_ipv6(bound: socket.socket) -> tuple[socket.socket, object]:
        connection, _ = await accept(bound)
        return connection, (f"2001:db8::{len(taken) + 1:x}", 1, 0, 0)

    def take(connection: socket.socket, host: str) -> None:
        taken.append(host)
        connection.close()

    monkeypatch.setattr(loop, "sock_accept", from_ipv6)
    acceptor = Acceptor(take)
    (bound,) = bound_sockets(LOOPBACK, 0, socket.SOCK_STREAM)
    acceptor.start([bound])
    for _ in range(2):
        socket.create_connection(bound.getsockname()).close()
    await until(lambda: len(taken) == 2, "both to be accepted")
    assert taken == ["2001:db8::/64"] * 2
    await acceptor.close()


async def test_closed_port_takes_no_connection(port: Port) -> None:
    await port.listener.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((LOOPBACK, port.number))


async def test_silent_connections_of_one_host_end_and_keep_nobody_out(port: Port) -> None:
    silent = [socket.create_connection((LOOPBACK, port.number)) for _ in range(3 * MAX_UNSORTED_PER_HOST)]
    try:
        await until(lambda: accepted(port) == len(silent), "all to be accepted")
        assert len(port.listener._unsorted) == MAX_UNSORTED_PER_HOST
        await asyncio.sleep(HONEST_S)
        assert await port.say(b"\0\0\0\1") == b"frames \0\0\0\1", "the host itself"
        assert await port.say(b"\0\0\0\2", "127.0.0.2") == b"frames \0\0\0\2", "another host"
    finally:
        for connection in silent:
            connection.close()


async def test_silent_connections_of_many_hosts_are_bounded(port: Port) -> None:
    silent = [
        socket.create_connection((LOOPBACK, port.number), source_address=(f"127.0.1.{number % 200 + 1}", 0))
        for number in range(2 * MAX_UNSORTED)
    ]
    try:
        await until(lambda: accepted(port) == len(silent), "all to be accepted")
        assert len(port.listener._unsorted) == MAX_UNSORTED
        assert await port.say(b"\0\0\0\1") == b"frames \0\0\0\1"
    finally:
        for connection in silent:
            connection.close()


async def test_flood_of_few_hosts_ends_no_connection_of_another() -> None:
    places = Strangers(8, 4)

    def begin(host: str) -> asyncio.Task[None]:
        places.make_place(host)
        task = asyncio.create_task(asyncio.sleep(60))
        places.add(task, host)
        return task

    honest = begin("honest")
    flood = [begin(f"flood {number % 2}") for number in range(40)]
    assert len(places) <= 8 and not honest.cancelling() and sum(task.cancelling() for task in flood) > 20
    places.recognize(honest)
    await places.end()
    assert not honest.cancelling(), "its node is known"
    honest.cancel()


async def test_connection_that_says_nothing_is_ended(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "FIRST_BYTE_S", 0.1)
    assert await port.say(b"") == b""
    assert port.counters["refused_silent"] == 1

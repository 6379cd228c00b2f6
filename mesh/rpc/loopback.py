"""HTTP servers at ports of 127.0.0.1, for programs of this machine.

Any user and guest of the machine may reach such a port. So connections are bounded, and silent ones are closed.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from aiohttp import web

T = TypeVar("T")

HOST = "127.0.0.1"
SILENT_S = 60.0  # for which a connection may be silent (own choice)


class LoopbackServer:
    """Serves an application on at most `most` connections, each of them `welcome`."""

    def __init__(self, most: int, welcome: Callable[[asyncio.Transport], bool] = lambda transport: True) -> None:
        self.most, self.welcome = most, welcome
        self.port = 0
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None
        self._also: asyncio.Server | None = None

    async def open(self, app: web.Application, ports: Sequence[int]) -> bool:
        """Serve at the first of these ports that is free; return whether one is."""
        runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0, keepalive_timeout=SILENT_S
        )
        await runner.setup()
        server = runner.server
        assert server is not None
        for port in ports:
            with suppress(OSError):
                loop = asyncio.get_running_loop()
                self._listener = await loop.create_server(lambda: _Door(server, self), HOST, port)
                self._runner, self.port = runner, int(self._listener.sockets[0].getsockname()[1])
                return True
        await runner.cleanup()
        return False

    async def listen_also(self, listener: socket.socket) -> None:
        """Serve at this socket too, in the place of an earlier one."""
        server = self._runner.server if self._runner is not None else None
        assert server is not None, "it is open"
        if self._also is not None:
            self._also.close()
        self._also = await asyncio.get_running_loop().create_server(lambda: _Door(server, self), sock=listener)

    async def close(self) -> None:
        for listener in filter(None, (self._listener, self._also)):
            listener.close()
        if self._runner is not None:
            await self._runner.cleanup()


class _Door(asyncio.Protocol):
    """Passes a connection on to the server if it is welcome and not one too many."""

    def __init__(self, server: web.Server, rules: LoopbackServer) -> None:
        self._server, self._rules = server, rules

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        if len(self._server.connections) >= self._rules.most or not self._rules.welcome(transport):
            transport.abort()
            return
        option = socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * SILENT_S)
        transport.get_extra_info("socket").setsockopt(*option)  # it may read nothing
        inner = self._server()
        transport.set_protocol(inner)
        inner.connection_made(transport)


async def heard(body: Awaitable[T]) -> T:
    """Wait for a request's body, or its next part; HTTPRequestTimeout if the other end is silent."""
    try:
        async with asyncio.timeout(SILENT_S):
            return await body
    except TimeoutError as error:
        raise web.HTTPRequestTimeout from error

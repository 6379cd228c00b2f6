"""Connections to the page's port: whose are served, how many, and for how long without a request."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from membership.identity import Identity
from mesh.rpc import loopback, peer_credentials
from mesh.web import site
from mesh.web.site import HOST, Site


@asynccontextmanager
async def opened() -> AsyncIterator[Site]:
    membership: Any = SimpleNamespace(credentials=SimpleNamespace(nick="ada", user="lab/ada"))
    page = Site(SimpleNamespace(), membership, Identity.generate().node_id, "lab", 0)  # type: ignore[arg-type]
    await page.invite()
    try:
        yield page
    finally:
        await page.close()


async def said(page: Site, request: bytes = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n") -> bytes:
    """Return the first line that the page answers; empty if it only closes the connection."""
    reader, writer = await asyncio.open_connection(HOST, page.port)
    try:
        writer.write(request)
        return await asyncio.wait_for(reader.readline(), 8)
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


async def test_connection_of_another_user_is_closed_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened() as page:
        assert b"403" in await said(page)
        monkeypatch.setattr(peer_credentials, "is_ours", lambda uid: False)
        assert await said(page) == await said(page, b"") == b""


async def test_connections_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "FEWEST", 2)
    monkeypatch.setattr(site, "FILES_KEPT", 1 << 40)
    async with opened() as page:
        others = [await asyncio.open_connection(HOST, page.port) for _ in range(2)]
        assert await said(page) == b""
        for _, writer in others:
            writer.close()
            await writer.wait_closed()
        async with asyncio.timeout(20):
            while b"403" not in await said(page):
                await asyncio.sleep(0.01)


async def test_connection_that_asks_for_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loopback, "SILENT_S", 0.2)
    async with opened() as page:
        assert await said(page, b"GET / HTTP") == b""

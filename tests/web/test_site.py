"""Connections to the page's port: whose are served, how many, and for how long without a request."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from membership.identity import Identity
from mesh.rpc import loopback, peer_credentials
from mesh.util.errors import MeshError
from mesh.web import site
from mesh.web.frame import Shown
from mesh.web.session import Session
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


async def test_order_is_carried_out_although_nobody_waits_and_its_result_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(site, "ORDER_S", 0.01)
    page = Site(SimpleNamespace(), SimpleNamespace(), b"n" * 32, "lab", 0)  # type: ignore[arg-type]
    go = asyncio.Event()

    async def order() -> str:
        await go.wait()
        return "yours"

    answer = await page._ordered(order(), lambda words: words)
    assert (answer.status, answer.headers["Location"]) == (303, "/lend")
    assert page._under_way().startswith("Taking it back: waiting for guests") and page._tasks
    go.set()
    (task,) = page._tasks
    await task
    await asyncio.sleep(0)
    assert page._under_way() == "Yours" and not page._tasks and page._problem == ""

    async def fails() -> str:
        raise MeshError("your certificate has no role provider")

    await page._ordered(fails(), lambda words: words)
    assert page._problem == "your certificate has no role provider" and page._under_way() == ""
    page._told = "yours"
    page._ordered_at -= site.TOLD_S + 1
    assert page._under_way() == "", "that was long ago"


def test_result_of_a_reclaim_names_those_who_lost_work() -> None:
    def told(*lost: float, seconds: float = 2.04) -> str:
        rows: Any = [
            SimpleNamespace(name="" if number else "train", job="j" * 26, user="ada", lost_s=lost_s)
            for number, lost_s in enumerate(lost)
        ]
        answer: Any = SimpleNamespace(reclaimed=["j"] * len(rows), guests=rows, seconds=seconds)
        return site._gone(answer)

    assert told() == "yours; there were no guests"
    assert told(0.09) == "yours again after 2.0 s; 1 guest has gone"
    words = "yours again after 2.0 s; 2 guests have gone; train of ada lost 0.1 s; jjjjjjjj of ada lost 5.0 s"
    assert told(0.1, 5.0) == words


async def test_page_is_of_its_own_origin_and_sessions_alone() -> None:
    async with opened() as page:
        token = (await page.invite()).url.partition("?")[2]
        host = f"Host: {HOST}:{page.port}\r\n"

        async def head(request: str) -> dict[str, str]:
            reader, writer = await asyncio.open_connection(HOST, page.port)
            writer.write(request.encode())
            lines = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 8)).decode().split("\r\n")
            writer.close()
            return {"status": lines[0]} | dict(line.split(": ", 1) for line in lines[1:] if ": " in line)

        entered = await head(f"GET /enter?{token} HTTP/1.1\r\n{host}\r\n")
        assert "303" in entered["status"] and entered["Location"] == "/"
        assert "HttpOnly" in entered["Set-Cookie"] and "SameSite=Strict" in entered["Set-Cookie"]
        assert entered["Content-Security-Policy"].startswith("default-src 'none'") and "Server" not in entered
        assert entered["Cache-Control"] == "no-store"
        cookie = f"Cookie: {entered['Set-Cookie'].partition(';')[0]}\r\n"
        assert "403" in (await head(f"GET /enter?{token} HTTP/1.1\r\n{host}\r\n"))["status"], "used"
        origin = f"Origin: http://{HOST}:{page.port}\r\nContent-Type: application/x-www-form-urlencoded\r\n"
        post = f"POST /leave HTTP/1.1\r\n{host}{origin}{cookie}"
        assert "403" in (await head(f"{post}Content-Length: 6\r\n\r\nword=x"))["status"], "another page's form"
        (session,) = page._sessions._sessions.values()
        form = f"word={session.word}"
        assert "404" in (await head(f"GET /nothing HTTP/1.1\r\n{host}{cookie}\r\n"))["status"]
        left = await head(f"{post}Content-Length: {len(form)}\r\n\r\n{form}")
        assert "200" in left["status"] and not page._sessions.holds(session) and "Max-Age=0" in left["Set-Cookie"]
        assert "403" in (await head(f"GET /week HTTP/1.1\r\n{host}{cookie}\r\n"))["status"]


async def test_port_that_is_taken_is_named() -> None:
    async with opened() as first:
        page = Site(SimpleNamespace(), SimpleNamespace(), b"n" * 32, "lab", first.port)  # type: ignore[arg-type]
        with pytest.raises(MeshError, match=f"port {first.port} of .* is taken: choose another as web_port"):
            await page.invite()


async def shows_nothing() -> Shown:
    return Shown({}, {})


async def test_stream_ends_with_its_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Site, "_renderer", lambda self, what, viewer: (shows_nothing, None))
    async with opened() as page:
        token = (await page.invite()).url.rpartition("=")[2]
        visit = page._sessions.enter(token, time.monotonic())
        assert visit is not None
        reader, writer = await asyncio.open_connection(HOST, page.port)
        head = (
            f"GET /stream/nodes HTTP/1.1\r\nHost: {HOST}:{page.port}\r\nCookie: {page._cookie}={visit.cookie}\r\n\r\n"
        )
        writer.write(head.encode())
        async with asyncio.timeout(10):
            assert b"200" in await reader.readline()
            while b"still here" not in await reader.readline():
                pass
            page._sessions.end(visit.session)
            (topic,) = page._topics.values()
            topic._wake()
            while (line := await reader.readline()) != b"0\r\n":  # the last chunk
                assert b"still here" not in line
        writer.close()
        assert topic.viewers == 0


async def test_forms_of_one_session_are_shown_to_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Site, "_renderer", lambda self, what, viewer: (shows_nothing, None))
    async with opened() as page:
        first, second = (Session(word.encode(), word, 0.0) for word in ("one", "two"))
        viewer: Any = None
        of_owner = [page._topic(("lend",), session, viewer) for session in (first, second, first)]
        assert of_owner[0] is of_owner[2] is not of_owner[1]
        assert page._topic(("nodes",), first, viewer) is page._topic(("nodes",), second, viewer)

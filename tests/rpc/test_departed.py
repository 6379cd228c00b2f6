"""A client that leaves before the end of its answer is no error in the log; a connection that another call loses is one."""

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web

from mesh.api.server import application
from mesh.rpc.departed import departed


async def served(app: web.Application, path: Path, url: str, whole: bool) -> int:
    """Ask for `url`; leave after the first piece of the answer unless `whole`. Return its status."""
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, str(path)).start()
    try:
        async with (
            aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as session,
            session.get(f"http://mesh{url}") as response,
        ):
            if whole:
                await response.read()
            else:
                await response.content.readany()
                response.close()
            return response.status
    finally:
        await runner.cleanup()  # waits for the handler


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


async def until_left(request: web.Request) -> None:
    while request.transport is not None and not request.transport.is_closing():
        await asyncio.sleep(0)


@pytest.mark.parametrize("middlewares", [[], [departed]])
async def test_client_that_leaves_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, middlewares: list[Any]
) -> None:
    done = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"first")
        await until_left(request)
        done.set()
        await response.write(b"second")
        return response

    app = web.Application(middlewares=middlewares)
    app.router.add_get("/x", answer)
    assert await served(app, tmp_path / "socket", "/x", whole=False) == 200
    assert done.is_set() and bool(errors(caplog)) == (not middlewares), "aiohttp alone logs one"


async def test_daemon_does_not_log_a_client_that_leaves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    begun: asyncio.Queue[web.Request] = asyncio.Queue()

    async def copy(job: str, path: str) -> AsyncIterator[bytes]:
        async def pieces() -> AsyncIterator[bytes]:
            yield b"first"
            await until_left(await begun.get())
            yield b"second"

        return pieces()

    async def load(named: str) -> None:
        pass

    @web.middleware
    async def kept(request: web.Request, handler: Any) -> Any:
        begun.put_nowait(request)
        return await handler(request)

    handlers = SimpleNamespace(lookup=SimpleNamespace(load=load), files=SimpleNamespace(copy=copy))
    app = application(cast(Any, handlers), cast(Any, None))
    app.middlewares.insert(0, kept)
    assert await served(app, tmp_path / "socket", "/v1/jobs/j/files?path=x", whole=False) == 200
    assert errors(caplog) == []


async def test_lost_connection_to_another_node_is_still_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        raise ConnectionResetError("node2 has gone")

    app = web.Application(middlewares=[departed])
    app.router.add_get("/x", answer)
    assert await served(app, tmp_path / "socket", "/x", whole=True) == 500 and errors(caplog)


def test_every_server_of_a_daemon_ends_such_requests() -> None:
    root = Path(__file__).parents[2] / "mesh"
    made = [line for path in root.rglob("*.py") for line in path.read_text().splitlines() if "web.Application(" in line]
    assert len(made) >= 5 and all("departed" in line for line in made)

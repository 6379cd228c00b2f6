"""The local HTTP server: JSON over a unix socket that only the daemon's user can open."""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from membership.malformed import MALFORMED
from mesh.api.audit import audited
from mesh.api.problems import http_problem, problem
from mesh.api.routes import ROUTES
from mesh.api.routing import BYTES, Call, Handlers, Route
from mesh.api.schema_version import SCHEMA
from mesh.jobs.event_log import EventLog
from mesh.model.spec import SpecError
from mesh.rpc.departed import departed
from mesh.util.errors import ExitCode, MeshError

MAX_BODY_BYTES = 1 << 20  # of an order; a job's files go by its working directory (own choice)

log = logging.getLogger(__name__)


def application(handlers: Handlers, event_log: EventLog) -> web.Application:
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_in_words, departed])
    for route in ROUTES:
        app.router.add_route(route.method, route.path, _answering(handlers, event_log, route))
    return app


async def _asked(request: web.Request, route: Route) -> Any:
    """The body of an order, the query of a read; MeshError if it is not one."""
    query = dict(request.query)
    try:
        if len(query) < len(request.query):
            raise MeshError("a parameter is given twice", ExitCode.USAGE)
        if route.method == "GET":
            return msgspec.convert(query, route.asked, strict=False)
        if query:
            raise MeshError(f"an order has its terms in its body, not behind `?`: {', '.join(query)}", ExitCode.USAGE)
        return msgspec.json.decode(await request.read() or b"{}", type=route.asked)
    except MALFORMED as error:
        raise MeshError(f"the request is not understood: {error}", ExitCode.USAGE) from error


def _answering(
    handlers: Handlers, event_log: EventLog, route: Route
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def answer(request: web.Request) -> web.StreamResponse:
        asked = await _asked(request, route)
        named = request.match_info.get("job") or getattr(asked, "fits", "") or getattr(asked, "job", "")
        if named:
            await handlers.lookup.load(named)
        call = Call(request, asked)
        if route.method == "GET":
            result = await route.handle(handlers, call)
        else:
            result = await audited(event_log, route, handlers, call)
        if isinstance(result, web.StreamResponse):
            return result
        if route.content == BYTES:
            return await _streamed(request, result)
        return web.Response(body=_json(result), content_type="application/json")

    return answer


def _json(answer: msgspec.Struct) -> bytes:
    """Return the answer as a JSON object, with the schema's version as its first field."""
    fields = msgspec.json.encode(answer)[1:]
    return b'{"schema":%d%s%s' % (SCHEMA, b"" if fields == b"}" else b",", fields)


@web.middleware
async def _in_words(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Every error becomes one that a program can tell apart and a person can read."""
    try:
        return await handler(request)
    except MeshError as error:
        return problem(str(error), error.code)
    except SpecError as error:
        return problem(str(error), ExitCode.USAGE)
    except web.HTTPException as error:
        refusal = http_problem(error.status, f"{request.method} {request.path}: {error.reason}")
        if "Allow" in error.headers:
            refusal.headers["Allow"] = error.headers["Allow"]
        return refusal
    except Exception as error:
        log.exception("%s %s failed", request.method, request.path)
        return http_problem(500, str(error) or type(error).__name__)


async def _streamed(request: web.Request, pieces: AsyncIterator[bytes]) -> web.StreamResponse:
    first = await anext(pieces, b"")  # what cannot be had is an error, not an empty answer
    response = web.StreamResponse(headers={"Content-Type": BYTES})
    await response.prepare(request)
    await response.write(first)
    async for piece in pieces:
        await response.write(piece)
    await response.write_eof()
    return response

"""Clients that leave before they have the whole answer, as `mesh cp` after the last file: no error of ours."""

from aiohttp import web
from aiohttp.typedefs import Handler


@web.middleware
async def departed(request: web.Request, handler: Handler) -> web.StreamResponse:
    """End a request whose client has gone; else aiohttp logs an error with a traceback."""
    try:
        return await handler(request)
    except ConnectionError:
        if request.transport is not None and not request.transport.is_closing():
            raise  # another connection than this one
        return web.Response(status=400)  # nobody reads it

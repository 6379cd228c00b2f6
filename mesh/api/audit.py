"""The audit log: each order on this node's socket becomes a signed event of the node (`mesh job events --audit`)."""

import asyncio
import socket
from typing import Any

import msgspec
from aiohttp import web

from mesh.api.requests import SubmitOrder
from mesh.api.routing import Call, Handlers, Route
from mesh.jobs.event_log import EventLog
from mesh.model.spec import SpecError
from mesh.util.errors import MeshError
from mesh.util.processes import name_of, peer_of

TERM_CHARS = 60  # of one term of an order (own choice)


async def audited(event_log: EventLog, route: Route, handlers: Handlers, call: Call[Any]) -> Any:
    """Carry out an order; record who gave it, with which terms, and its result."""
    words = f"{route.name.replace('_', ' ')}{_terms(call.request, call.asked)}, by {_who(call.request)}"
    try:
        result = await route.handle(handlers, call)
    except (MeshError, SpecError) as error:
        event_log.add(None, "audit", f"{words}: refused: {error}", new=route.name)
        raise
    except asyncio.CancelledError:
        event_log.add(None, "audit", f"{words}: who ordered it did not wait for its end", new=route.name)
        raise
    except Exception as error:
        event_log.add(None, "audit", f"{words}: failed: {type(error).__name__}", new=route.name)
        raise
    event_log.add(None, "audit", words, new=route.name)
    return result


def _terms(request: web.Request, asked: Any) -> str:
    """Return the terms of an order; of a job only its name, since the rest may hold secrets."""
    named = " ".join(_plain(value) for value in request.match_info.values())
    parts = [named] if named else []
    for field in msgspec.structs.fields(type(asked)):
        value = getattr(asked, field.name)
        if isinstance(asked, SubmitOrder) and field.name != "name":
            continue
        if value != field.default and isinstance(value, bool | int | float | str):
            parts.append(f"{field.name}={_plain(str(value))}")
    return f" ({', '.join(parts)})" if parts else ""


def _who(request: web.Request) -> str:
    """The user and the program at the other end of the socket, by the kernel's word; a program may have ended meanwhile."""
    sock = request.transport.get_extra_info("socket") if request.transport is not None else None
    if sock is None or sock.family != socket.AF_UNIX:
        return f"a client at {_plain(str(request.remote))}"
    pid, uid = peer_of(sock)
    try:
        name = _plain(name_of(pid))
    except OSError:
        name = "a program that has ended"
    return f"uid {uid} ({name}, pid {pid})"


def _plain(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text[:TERM_CHARS])

"""Who ordered what on this node: each order by its own socket becomes a signed event of the node (`mesh events --audit`)."""

import asyncio
import socket
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from mesh.api.errors import MeshError
from mesh.api.orders import SubmitOrder

if TYPE_CHECKING:
    from mesh.daemon import Daemon

TERM_CHARS = 60  # of one term of an order; ours


async def audited(daemon: "Daemon", route: Any, call: Any) -> Any:
    """Do it, and note who ordered it, with which terms, and what became of it."""
    words = f"{route.name.replace('_', ' ')}{_terms(call.request, call.asked)}, by {_who(call.request)}"
    try:
        result = await route.handle(daemon, call)
    except MeshError as error:
        daemon.jobs.chronicle.say(None, "audit", f"{words}: refused: {error}", new=route.name)
        raise
    except asyncio.CancelledError:
        daemon.jobs.chronicle.say(None, "audit", f"{words}: who ordered it did not wait for its end", new=route.name)
        raise
    except Exception as error:
        daemon.jobs.chronicle.say(None, "audit", f"{words}: failed: {type(error).__name__}", new=route.name)
        raise
    daemon.jobs.chronicle.say(None, "audit", words, new=route.name)
    return result


def _terms(request: web.Request, asked: Any) -> str:
    """What was asked for; of a job's description its name alone, since the rest may hold what is nobody else's business."""
    named = " ".join(_plain(value) for value in request.match_info.values())
    told = [named] if named else []
    for field in msgspec.structs.fields(type(asked)):
        value = getattr(asked, field.name)
        if isinstance(asked, SubmitOrder) and field.name != "name":
            continue
        if value != field.default and isinstance(value, bool | int | float | str):
            told.append(f"{field.name}={_plain(str(value))}")
    return f" ({', '.join(told)})" if told else ""


def _who(request: web.Request) -> str:
    """The user and the program at the other end of the socket, by the kernel's word; a program may have ended meanwhile."""
    sock = request.transport.get_extra_info("socket") if request.transport is not None else None
    if sock is None or sock.family != socket.AF_UNIX:
        return f"somebody at {_plain(str(request.remote))}"
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    try:
        name = _plain(Path(f"/proc/{pid}/comm").read_text().strip())
    except OSError:
        name = "a program that has ended"
    return f"uid {uid} ({name}, pid {pid})"


def _plain(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text[:TERM_CHARS])

"""A daemon whose every answer is hostile: each text in it is what a member, user or lender might call something.

It answers the real routes with the real schemas, so a route that is added is answered, too.
"""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from aiohttp import WSMsgType, web

from mesh.api.problems import problem
from mesh.api.routes import ROUTES
from mesh.api.routing import BYTES, DOCUMENT, FRAMES, Route
from mesh.api.schema_version import SCHEMA
from mesh.api.schemas.owner import Rehearsed
from mesh.rpc.frames import MAX_TEXT, OUTPUT, Data, Exit, Note, Opened, encode_frame
from mesh.util.errors import ExitCode
from mesh.util.version import VERSION
from tests.adversary.lender import HOSTILE_NAME, directory, file, link, stream

LOG = f"\x1b[31mcoloured\x1b[0m\n{HOSTILE_NAME}\r\nprogress 1\rprogress 2\n\x1b]0;title\x07\u202eend".encode()
# Fields that choose the way of a command, and numbers with a meaning.
PLAIN: dict[str, Any] = {
    "state": "done",
    "pid": 2**22 + 1,  # beyond the kernel's most
    "url": "http://127.0.0.1:9/",
    "version": VERSION,
    "level": "vacate",
}


def hostile(hint: Any, text: str = HOSTILE_NAME, field: str = "") -> Any:
    """Return a value of this type, as JSON has it, in which every text is `text`, and nothing is empty or absent."""
    if field in PLAIN and hint in {str, int}:
        return PLAIN[field]
    if field == "asked" and get_origin(hint) is dict:  # a job's description, as it is
        return {"argv": [text], "env": {text: text}, "image": text, "vram_mib": 3, "vram_limit_mib": 4}
    if hint is Any or hint is str:
        return text
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        hints = get_type_hints(hint, include_extras=True)
        return {one.encode_name: hostile(hints[one.name], text, one.name) for one in msgspec.structs.fields(hint)}
    kinds = get_args(hint)
    match get_origin(hint):
        case origin if origin in {Union, UnionType}:
            return hostile(next(one for one in kinds if one not in {type(None), msgspec.UnsetType}), text, field)
        case origin if origin is Literal:
            return kinds[0]
        case origin if origin in {list, tuple, set, frozenset} and kinds:
            length = 2 if origin is not tuple or kinds[-1] is ... else len(kinds)
            return [
                hostile(kinds[0] if kinds[-1] is ... or origin is not tuple else kinds[n], text) for n in range(length)
            ]
        case origin if origin is dict or str(origin) == "<class 'collections.abc.Mapping'>":
            return {text: hostile(kinds[1], text)}
        case None if hint in {int, float, bool, bytes}:
            return {int: 3, float: 2.5, bool: True, bytes: ""}[hint]
        case _ if hasattr(hint, "__metadata__"):
            return hostile(kinds[0], text, field)
    raise AssertionError(f"no hostile value of {hint}")


def answer_type(route: Route, body: dict[str, Any]) -> Any:
    hint = get_type_hints(route.handle)["return"]
    if get_origin(hint) in {Union, UnionType}:
        return next(kind for kind in get_args(hint) if (kind is Rehearsed) == bool(body.get("dry_run")))
    return hint


async def _streamed(request: web.Request, pieces: Iterator[bytes]) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    for piece in pieces:
        await response.write(piece)
    await response.write_eof()
    return response


async def _tunnel(request: web.Request) -> web.WebSocketResponse:
    web_socket = web.WebSocketResponse()
    await web_socket.prepare(request)
    if request.match_info["way"] == "exec":
        assert (await web_socket.receive()).type == WSMsgType.BINARY
    for frame in (Opened(HOSTILE_NAME), Note(HOSTILE_NAME[:MAX_TEXT]), Data(OUTPUT, LOG), Exit(0)):
        await web_socket.send_bytes(encode_frame(frame))
    await web_socket.receive()
    return web_socket


class HostileDaemon:
    """`asked`: method and path of every request. With `fails` every answer is an error with a hostile text; with `named` the
    jobs that are asked for have plain ids, and with `runs` they run; otherwise they are done."""

    def __init__(self, text: str = HOSTILE_NAME) -> None:
        self.text, self.fails, self.named, self.runs = text, False, False, False
        self.asked: list[tuple[str, str]] = []

    def application(self) -> web.Application:
        app = web.Application()
        for route in ROUTES:
            app.router.add_route(route.method, route.path, self._answering(route))
        return app

    def _answering(self, route: Route) -> Any:
        async def respond(request: web.Request) -> web.StreamResponse:
            self.asked.append((route.method, route.path))
            if self.fails:
                return problem(self.text, ExitCode.ERROR)
            if route.content == FRAMES:
                return await _tunnel(request)
            if route.path.endswith("/files"):
                name = self.text.replace("/", "_").replace("\0", "")[:50]
                return await _streamed(
                    request, stream(directory("out"), file(f"out/{name}"), link("out/l", "/" + name))
                )
            if route.content == BYTES:
                return await _streamed(request, iter([LOG]))
            if route.content in {DOCUMENT, "text/plain"}:
                return web.Response(text="{}")
            body = msgspec.json.decode(await request.read() or b"{}") if request.method == "POST" else {}
            answer = hostile(answer_type(route, body), self.text)
            if route.path.endswith("/migrate") or (self.named and (route.method, route.path) == ("POST", "/v1/jobs")):
                answer["job"] = "abcd2345"  # by which the command asks again
            if self.named and route.path == "/v1/jobs/{job}":
                answer["job"] |= {"job": "abcd2345"} | ({"state": "running", "outcome": None} if self.runs else {})
            return web.json_response({"schema": SCHEMA, **answer})

        return respond


@contextmanager
def hostile_daemon(state: Path, text: str = HOSTILE_NAME) -> Iterator[HostileDaemon]:
    """Answer on the socket of a state directory, from a thread."""
    daemon, ready, loop = HostileDaemon(text), threading.Event(), asyncio.new_event_loop()
    state.mkdir(parents=True, exist_ok=True)

    async def serve() -> None:
        runner = web.AppRunner(daemon.application(), handle_signals=False, shutdown_timeout=0.1)
        await runner.setup()
        await web.UnixSite(runner, str(state / "mesh.sock")).start()
        ready.set()
        await ended.wait()
        await runner.cleanup()

    ended = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), name="hostile daemon")
    thread.start()
    assert ready.wait(10)
    try:
        yield daemon
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
        loop.close()

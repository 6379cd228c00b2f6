"""The page's server: loopback only, opened when `mesh top --web` first asks, with what the unix socket answers and nothing else.

A connection of another user's program is closed at once. States of a request: refused (another host's name, another site),
without a session (told how to get one), with a session. States of the server: not open, open, closed with its daemon.
"""

import asyncio
import contextlib
import logging
import os
import resource
import time
from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import Any, TypeVar, get_args

from aiohttp import web

from membership.identity import NodeId, short_id
from membership.node import MembershipNode
from mesh.api import schemas
from mesh.api.problems import problem
from mesh.api.queries import LogQuery
from mesh.api.requests import ReclaimOrder
from mesh.api.routing import Handlers
from mesh.provider.usage import By
from mesh.rpc.departed import departed
from mesh.rpc.loopback import HOST, LoopbackServer, heard
from mesh.rpc.peer_credentials import is_own
from mesh.util.errors import ExitCode, MeshError
from mesh.util.text import plural
from mesh.web import frame, views
from mesh.web.frame import Shown, Viewer, document
from mesh.web.markup import element
from mesh.web.session import Session, Sessions, is_word, objection
from mesh.web.stream import Output, Topic
from mesh.web.stylesheet import sheet
from mesh.web.views import PATIENCE_S

A = TypeVar("A")

MOST_BODY = 4096  # bytes of a form; the forms here have two short fields
FILES_KEPT = 512  # open files that connections leave to the daemon (own choice)
FEWEST = 64  # connections that are served whatever the limit of open files (own choice; a browser opens six)
ORDER_S = 1.0  # for an order to be carried out before the page is shown again
TOLD_S = 120.0  # for which the page shows the result of an order (own choice)
ANSWERED = (MeshError, OSError, RuntimeError)

# No script, style, frame or connection but our own, and nothing kept. A form's Origin would be null with no-referrer.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'self'",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
SIGN_IN = (
    "Run `mesh top --web` on this machine: it prints an address that is good for one visit within ten minutes.",
    "If you have just opened such an address from another page, open this one again in the address bar.",
)
log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Site:
    def __init__(self, handlers: Handlers, membership: MembershipNode, me: NodeId, mesh: str, port: int) -> None:
        self._handlers, self._membership = handlers, membership
        self._mesh, self._wanted_port = mesh, port
        self._cookie = f"mesh-{short_id(me)}"  # cookies ignore ports, and a machine may have several nodes
        self._server: LoopbackServer | None = None
        self._opening = asyncio.Lock()
        self._sessions = Sessions(os.urandom)
        self._topics: dict[tuple[str, ...], Topic] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._order: asyncio.Task[None] | None = None
        self._ordered_at = 0.0
        self._told = ""
        self._problem = ""
        self.port = 0

    async def invite(self) -> schemas.owner.Page:
        """Serve the page from now on; return its address for one visit."""
        async with self._opening:
            if self._server is None:
                await self._open()
        token = self._sessions.invite(time.monotonic())
        return schemas.owner.Page(url=f"http://{HOST}:{self.port}/enter?token={token}", port=self.port)

    async def close(self) -> None:
        for topic in list(self._topics.values()):
            await topic.close()
        for task in self._tasks:
            task.cancel()
        if self._server is not None:
            await self._server.close()

    async def _open(self) -> None:
        app = web.Application(client_max_size=MOST_BODY, middlewares=[departed, self._guarded])
        app.add_routes(
            [
                web.get("/enter", self._enter),
                web.get("/page.css", self._css),
                web.get("/live.js", self._script),
                web.get("/", self._nodes),
                web.get("/jobs", self._jobs),
                web.get("/jobs/{job}", self._job),
                web.get("/week", self._week),
                web.get("/lend", self._lend),
                web.get("/usage", self._usage),
                web.get("/usage/{by}", self._usage),
                web.get("/stream/{page}", self._stream),
                web.get("/stream/{page}/{of}", self._stream),
                web.post("/lend/pause", self._pause),
                web.post("/lend/resume", self._resume),
                web.post("/lend/reclaim", self._reclaim),
                web.post("/leave", self._leave),
            ]
        )
        app.on_response_prepare.append(_harden)
        most = max(FEWEST, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - FILES_KEPT)
        server = LoopbackServer(most, is_own)
        if not await server.open(app, [self._wanted_port]):
            words = f"port {self._wanted_port} of {HOST} is taken: choose another as web_port in config.toml"
            raise MeshError(words)
        self._server, self.port = server, server.port
        self._css_text = sheet()
        self._script_text = files("mesh.web").joinpath("live.js").read_text("utf-8")

    # --- who may

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if words := objection(request.method, request.headers, self.port):
                return _page(403, frame.message("Refused", f"{words[0].upper()}{words[1:]}."))
            if request.method == "POST":
                session = self._session(request)
                if session is None or not is_word(session, str((await heard(request.post())).get("word", ""))):
                    return _page(403, frame.message("Refused", "This form is of a session that is over.", *SIGN_IN))
            return await handler(request)
        except web.HTTPException as error:
            if error.status < 400:
                raise
            return _page(error.status, frame.message(error.reason, "There is no such page here."))
        except MeshError as error:
            return _page(problem(str(error), error.code).status, frame.message("That did not work", str(error)))

    def _session(self, request: web.Request) -> Session | None:
        return self._sessions.find(request.cookies.get(self._cookie, ""), time.monotonic())

    def _asker(self, request: web.Request) -> tuple[Session, Viewer]:
        session = self._session(request)
        if session is None:
            raise _Stranger
        credentials = self._membership.credentials
        return session, Viewer(credentials.nick, self._mesh, credentials.user, session.word)

    async def _enter(self, request: web.Request) -> web.StreamResponse:
        """The token becomes a cookie, and leaves the address."""
        visit = self._sessions.enter(request.query.get("token", ""), time.monotonic())
        if visit is None:
            return _page(403, frame.message("This address was used, or is too old", *SIGN_IN))
        response = web.Response(status=303, headers={"Location": "/"})
        response.set_cookie(self._cookie, visit.cookie, path="/", httponly=True, samesite="Strict")
        return response

    async def _leave(self, request: web.Request) -> web.StreamResponse:
        session, _ = self._asker(request)
        self._sessions.end(session)
        response = _page(200, frame.message("Signed out", *SIGN_IN[:1]))
        response.del_cookie(self._cookie, path="/", httponly=True, samesite="Strict")
        return response

    # --- pages

    async def _css(self, request: web.Request) -> web.StreamResponse:
        return web.Response(text=self._css_text, content_type="text/css")

    async def _script(self, request: web.Request) -> web.StreamResponse:
        return web.Response(text=self._script_text, content_type="text/javascript")

    async def _nodes(self, request: web.Request) -> web.StreamResponse:
        return await self._shown(request, ("nodes",), "Nodes", "/")

    async def _jobs(self, request: web.Request) -> web.StreamResponse:
        return await self._shown(request, ("jobs",), "Jobs", "/jobs")

    async def _week(self, request: web.Request) -> web.StreamResponse:
        _, viewer = self._asker(request)
        shown = views.week(self._handlers, request.query.get("node", ""))
        inside = [element("h1", "Availability"), shown.parts["which"], shown.parts["week"]]
        return _page(200, document(viewer, "Availability", "/week", "", *inside))

    async def _lend(self, request: web.Request) -> web.StreamResponse:
        return await self._shown(request, ("lend",), "Lend this machine", "/lend")

    async def _usage(self, request: web.Request) -> web.StreamResponse:
        by = request.match_info.get("by", "user")
        if by not in get_args(By):
            raise web.HTTPNotFound
        return await self._shown(request, ("usage", by), "Lent and borrowed", "/usage")

    async def _job(self, request: web.Request) -> web.StreamResponse:
        await self._handlers.lookup.load(request.match_info["job"])
        status = self._handlers.lookup.find_job(request.match_info["job"])
        shown = self._handlers.jobs.show(status)
        return await self._shown(request, ("jobs", shown.job), shown.name or f"Job {shown.job[:8]}", "/jobs")

    async def _shown(self, request: web.Request, what: tuple[str, ...], title: str, here: str) -> web.StreamResponse:
        session, viewer = self._asker(request)
        topic = self._topic(what, session, viewer)
        shown, _ = await asyncio.gather(topic.look(), topic.read_some(PATIENCE_S))
        parts = list(shown.parts.values())
        if topic.tail is not None:
            output = element(
                "pre",
                topic.tail.shown(),
                id="log",
                tabindex="0",
                role="region",
                aria_label="Output",
                data_place=topic.tail.place,
            )
            parts[1:1] = [element("h2", "Output"), output]
        return _page(200, document(viewer, title, here, f"/stream/{'/'.join(what)}", element("h1", title), *parts))

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        session, viewer = self._asker(request)
        what = tuple(request.match_info.values())
        match what:
            case ("nodes" | "jobs" | "lend",):
                pass
            case ("usage", by) if by in get_args(By):
                pass
            case ("jobs", job):
                what = ("jobs", self._handlers.jobs.show(self._handlers.lookup.find_job(job)).job)
            case _:
                raise web.HTTPNotFound
        topic = self._topic(what, session, viewer)
        await topic.ready()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        place = request.headers.get("Last-Event-ID") or request.query.get("after", "")

        async def write(data: bytes) -> None:
            if not self._sessions.holds(session):
                raise ConnectionResetError("signed out")
            session.used = time.monotonic()
            await response.write(data)

        with contextlib.suppress(ConnectionError, TimeoutError):
            await topic.follow(write, place)
        return response

    def _topic(self, what: tuple[str, ...], session: Session, viewer: Viewer) -> Topic:
        """Return the topic of a page. The owner's page has one for each session, since its forms carry the session's token."""
        key = (*what, session.word) if what[0] == "lend" else what
        topic = self._topics.get(key)
        if topic is None:
            render, output = self._renderer(what, viewer)
            topic = self._topics[key] = Topic(render, output, lambda: self._forget(key))
            topic.open()
        return topic

    def _forget(self, key: tuple[str, ...]) -> None:
        self._topics.pop(key, None)

    def _renderer(self, what: tuple[str, ...], viewer: Viewer) -> tuple[Callable[[], Awaitable[Shown]], Output | None]:
        handlers = self._handlers
        if what[0] == "lend":
            return lambda: views.lend(handlers, viewer, self._under_way(), self._problem), None
        if what[0] == "usage":
            return views.Ledger(handlers, what[1]).render, None
        if len(what) > 1:
            return views.Job(handlers, what[1]).render, lambda: handlers.logs.follow_log(what[1], LogQuery(follow=True))
        if what[0] == "jobs":
            return lambda: views.jobs(handlers, viewer), None
        return lambda: views.nodes(handlers), None

    # --- orders

    async def _pause(self, request: web.Request) -> web.StreamResponse:
        paused = self._handlers.lending.set_paused(True)
        return await self._ordered(paused, lambda _: "no new guests from now on")

    async def _resume(self, request: web.Request) -> web.StreamResponse:
        return await self._ordered(self._handlers.lending.set_paused(False), lambda _: "lending")

    async def _reclaim(self, request: web.Request) -> web.StreamResponse:
        now = (await request.post()).get("now") == "1"
        return await self._ordered(self._handlers.lending.reclaim(ReclaimOrder(now=now)), _gone)

    async def _ordered(self, order: Awaitable[A], words: Callable[[A], str]) -> web.StreamResponse:
        """Carry out an order, even if the browser goes away, and show the page, which says how far it is."""

        async def carry_out() -> None:
            self._problem, self._told = "", ""
            try:
                self._told = words(await order)
            except ANSWERED as error:
                self._problem = str(error) or type(error).__name__
                raise

        task = asyncio.create_task(carry_out(), name="the page's order")
        self._order, self._ordered_at = task, time.monotonic()
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await asyncio.wait([task], timeout=ORDER_S)
        if task.done():
            task.exception()  # is told on the page
        return web.Response(status=303, headers={"Location": "/lend"})

    def _under_way(self) -> str:
        if self._order is not None and not self._order.done():
            waited = time.monotonic() - self._ordered_at
            return f"Taking it back: waiting for guests to save and move on ({waited:.0f} s)"
        fresh = time.monotonic() - self._ordered_at < TOLD_S
        return self._told[:1].upper() + self._told[1:] if fresh else ""


class _Stranger(MeshError):
    def __init__(self) -> None:
        super().__init__(" ".join(SIGN_IN), ExitCode.REFUSED)


def _gone(answer: schemas.owner.Reclaimed) -> str:
    """Return the result of a reclaim in the words of `mesh reclaim`."""
    gone = len(answer.reclaimed)
    if not gone:
        return "yours; there were no guests"
    losers = [row for row in answer.guests if row.lost_s >= 0.1]
    lost = [f"{row.name or row.job[:8]} of {row.user} lost {row.lost_s:.1f} s" for row in losers]
    words = f"yours again after {answer.seconds:.1f} s; {plural(gone, 'guest has', 'guests have')} gone"
    return "; ".join([words, *lost])


def _page(status: int, text: str) -> web.Response:
    return web.Response(status=status, text=text, content_type="text/html")


async def _harden(request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(HEADERS)
    response.headers.pop("Server", None)

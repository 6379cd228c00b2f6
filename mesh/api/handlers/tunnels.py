"""Tunnels into running jobs, for their users: a command beside the job, a port or a socket (docs/explanation/tunnels.md).

Commands and ports go by a session of the engine, so they need no network inside the guest and are processes of it; a socket in
the job's control directory is connected to from outside. Only the job's own user comes in, with a certificate that lets them
submit, on a node whose owner allows it; that is looked at again while the tunnel stands.
"""

import asyncio
import contextlib
import logging
import os
import stat
import time
from collections.abc import AsyncIterator, Iterator

from aiohttp import web

from membership.node import MembershipNode
from membership.trust import Credentials, TrustStore
from mesh.api.handlers.lookup import JobLookup
from mesh.execution.engine import Guest
from mesh.execution.session import Session, SessionError
from mesh.jobs.attempt import Attempt
from mesh.jobs.authority import is_user, may_enter
from mesh.jobs.service import JobService
from mesh.jobs.tunnel_targets import NotRunning, TunnelTarget, open_control, parse_target, reach
from mesh.model.spec import format_job
from mesh.rpc.client import PeerClient, PeerError
from mesh.rpc.frame_connection import MESSAGE_LIMIT, Line, splice
from mesh.rpc.frames import (
    INPUT,
    MOVES_S,
    OUTPUT,
    Data,
    Failed,
    FrameError,
    InputEnd,
    Note,
    Opened,
    Order,
    Resize,
    Signal,
    failed,
)
from mesh.util.errors import ExitCode, MeshError
from mesh.util.race import race

OF_A_JOB, OF_A_NODE = 64, 256  # tunnels at once; a browser with JupyterLab opens about ten (own choice)
LOOK_S = 0.5  # between two checks that the tunnel may stay open (own choice)
ORDER_WITHIN_S = 10.0
CONTROL_BYTES = 64 * 1024  # of a file in the control directory (own choice)

log = logging.getLogger(__name__)


class Tunnels:
    """Bridges commands, ports and sockets of jobs. `interactive`: the owner lets users into guests on this node."""

    def __init__(
        self,
        trust: TrustStore,
        membership: MembershipNode,
        jobs: JobService,
        peers: PeerClient,
        lookup: JobLookup,
        interactive: bool,
    ) -> None:
        self._trust, self._membership, self._jobs = trust, membership, jobs
        self._peers, self._lookup, self._interactive = peers, lookup, interactive
        self._lines: dict[Line, bytes] = {}  # with the job that each is about

    async def close(self) -> None:
        """Close all tunnels. Call it before closing the servers, which wait for open connections."""
        last = failed("its daemon stops", again_s=MOVES_S)
        await asyncio.gather(*(line.close(last) for line in list(self._lines)))

    @contextlib.contextmanager
    def _listed(self, line: Line, job: bytes) -> Iterator[None]:
        if len(self._lines) >= OF_A_NODE or sum(other == job for other in self._lines.values()) >= OF_A_JOB:
            raise MeshError("there are too many tunnels open already", ExitCode.REFUSED)
        self._lines[line] = job
        try:
            yield
        finally:
            del self._lines[line]

    # --- on the node of the user

    async def from_here(self, request: web.Request, text: str, way: str) -> web.WebSocketResponse:
        """Open a tunnel from this node's command line to the node that runs the job."""
        async with _accepted(request) as (web_socket, line):
            try:
                await self._lead(line, text, way)
            except MeshError as error:
                await line.send(_failure(error))
            except PeerError as error:
                await line.send(failed(str(error), again_s=MOVES_S))
        return web_socket

    async def _lead(self, line: Line, text: str, way: str) -> None:
        try:
            parse_target(way)
        except ValueError as error:
            raise MeshError(str(error), ExitCode.USAGE) from error
        job, runner = await self._runner_of(text)
        if runner == self._lookup.me:
            await self.serve(line, job, way, self._membership.credentials)
            return
        with self._listed(line, job):
            async with self._peers.tunnel(runner, f"/v1/jobs/{job.hex()}/tunnel/{way}") as other:
                await splice(line, other)

    async def _runner_of(self, text: str) -> tuple[bytes, bytes]:
        """Return the job and the node that runs it, which sees what the user types; MeshError if none does, or for another's."""
        status = await self._lookup.find_own(text)
        name = format_job(status.job)[:8]
        runner = await self._lookup.runner_of(status.job)
        if runner is not None:
            return status.job, runner
        if status.outcome is not None:
            raise MeshError(
                f"job {name} is over ({status.state}): `mesh logs {name}` shows its output", ExitCode.NOT_FOUND
            )
        if status.runner is not None:
            raise NotRunning(f"most of the witnesses of job {name} do not say where it runs: try again in a moment")
        raise NotRunning(f"job {name} does not run now (it is {status.state}): `mesh why {name}` says more")

    async def control_file(self, text: str, name: str) -> str:
        """Return a small file from the job's control directory."""
        job, runner = await self._runner_of(text)
        if runner == self._lookup.me:
            return self.own_control_file(job, name, self._membership.credentials).decode(errors="replace")
        try:
            data = await self._peers.call(runner, "GET", f"/v1/jobs/{job.hex()}/control/{name}")
        except PeerError as error:
            code = {403: ExitCode.REFUSED, 404: ExitCode.NOT_FOUND}.get(error.status or 0, ExitCode.ERROR)
            raise MeshError(str(error), code) from error
        return data.decode(errors="replace")

    # --- on the node that runs the job

    def own_control_file(self, job: bytes, name: str, credentials: Credentials) -> bytes:
        attempt = self._enter(job, credentials)
        try:
            descriptor = open_control(attempt, name, os.O_RDONLY | os.O_NONBLOCK)
        except (OSError, ValueError) as error:
            raise MeshError(f"the job has no {name} in its control directory (yet)", ExitCode.NOT_FOUND) from error
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise MeshError(f"{name} is not a file", ExitCode.NOT_FOUND)
            return file.read(CONTROL_BYTES)

    async def to_here(
        self, request: web.Request, job: bytes, way: str, credentials: Credentials
    ) -> web.WebSocketResponse:
        """Open a tunnel from another node to a job here."""
        async with _accepted(request) as (web_socket, line):
            try:
                await self.serve(line, job, way, credentials)
            except MeshError as error:
                await line.send(_failure(error))
        return web_socket

    def _enter(self, job: bytes, credentials: Credentials) -> Attempt:
        """Return the attempt that runs here; MeshError if this user may not enter it."""
        attempt = self._jobs.attempts.get(job)
        if attempt is None:
            raise NotRunning("the job does not run on this node any more")
        if not is_user(credentials, attempt.spec.user_key):
            raise MeshError(f"job {format_job(job)[:8]} is {attempt.spec.user}'s, not yours", ExitCode.REFUSED)
        if not may_enter(credentials, attempt.spec.user_key):
            raise MeshError("your node may lend, but not use: its certificate says so", ExitCode.REFUSED)
        if not self._interactive:
            nick = self._membership.credentials.nick
            raise MeshError(
                f"the owner of {nick} allows no interactive sessions (interactive = false); `mesh job migrate` moves the job",
                ExitCode.REFUSED,
            )
        return attempt

    async def serve(self, line: Line, job: bytes, way: str, credentials: Credentials) -> None:
        attempt = self._enter(job, credentials)
        try:
            where = parse_target(way)
        except ValueError as error:
            raise MeshError(str(error), ExitCode.USAGE) from error
        if attempt.guest is None:
            raise NotRunning("the job is being started")
        with self._listed(line, job):
            opened = self._open(line, job, attempt, where)
            allowed = self._look(line, job, attempt, credentials, where == TunnelTarget())
            await race(f"tunnel {format_job(job)[:8]}", opened, allowed)

    async def _open(self, line: Line, job: bytes, attempt: Attempt, where: TunnelTarget) -> None:
        assert attempt.guest is not None
        try:
            if where == TunnelTarget():
                await self._to_command(line, attempt.guest, job)
            else:
                await self._to_server(line, attempt, where)
        except SessionError as error:
            await line.send(failed(str(error), again_s=MOVES_S))
        except (FrameError, TimeoutError) as error:
            await line.send(failed(str(error) or "nothing was asked for"))

    async def _look(self, line: Line, job: bytes, attempt: Attempt, credentials: Credentials, tell: bool) -> None:
        """Wait until the tunnel must close: the attempt has left, or its user may not enter any more."""
        while True:
            await asyncio.sleep(LOOK_S)
            now = self._trust.credentials(credentials.node_id, time.time())
            if now is None or not may_enter(now, attempt.spec.user_key):
                await line.close(failed("your node is not let in any more", int(ExitCode.REFUSED)))
                return
            if self._jobs.attempts.get(job) is not attempt:
                await line.close(failed("the job has left this node", again_s=MOVES_S))
                return
            state, detail = self._jobs.own_status.state(job)
            if tell and state == "vacating":
                tell = False
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await line.send(Note(f"the job has notice: {detail}"[:500]))

    async def _to_command(self, line: Line, guest: Guest, job: bytes) -> None:
        async with asyncio.timeout(ORDER_WITHIN_S):
            order = await line.receive()
        if not isinstance(order, Order):
            raise FrameError("what is to run comes first")
        log.info("job %s: a session begins: %s", format_job(job)[:8], order.argv[0][:80])
        session = await guest.open_session(order)
        try:
            await line.send(Opened(self._membership.credentials.nick))
            await _carry(line, session)
        finally:
            await session.close()

    async def _to_server(self, line: Line, attempt: Attempt, where: TunnelTarget) -> None:
        session, early = await reach(attempt, where)
        try:
            await line.send(Opened(self._membership.credentials.nick))
            if early:
                await line.send(Data(OUTPUT, early))
            await _carry(line, session)
        finally:
            await session.close()


def _failure(error: MeshError) -> Failed:
    return failed(str(error), int(error.code), error.again_s if isinstance(error, NotRunning) else 0.0)


async def _carry(line: Line, session: Session) -> None:
    """Copy frames both ways until one side ends."""

    async def inwards() -> None:
        while (frame := await line.receive()) is not None:
            if not isinstance(frame, Resize | Signal | InputEnd) and not (
                isinstance(frame, Data) and frame.kind == INPUT
            ):
                raise FrameError("only input goes in")
            await session.send(frame)

    async def outwards() -> None:
        while (frame := await session.receive()) is not None:
            await line.send(frame)

    await race("session", inwards(), outwards())


@contextlib.asynccontextmanager
async def _accepted(request: web.Request) -> AsyncIterator[tuple[web.WebSocketResponse, Line]]:
    web_socket = web.WebSocketResponse(max_msg_size=MESSAGE_LIMIT, compress=False, timeout=2.0)
    await web_socket.prepare(request)
    line = Line(web_socket, request.transport)
    try:
        yield web_socket, line
    finally:
        await line.close()

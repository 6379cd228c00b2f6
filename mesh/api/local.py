"""What a daemon answers to its own machine's command line: JSON over a unix socket that only its owner can open."""

import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from aiohttp import web

from mesh.api.attendance import survival_of
from mesh.api.errors import HTTP_STATUS, ExitCode, MeshError
from mesh.api.explanation import explanation
from mesh.api.files import copy
from mesh.api.gpudesk import change_share, gpu_list, pause_job, receipt_list
from mesh.api.lending import lend, lend_state, set_paused
from mesh.api.lending import reclaim as reclaim_from_guests
from mesh.api.migration import migrate as migrate_job
from mesh.api.orders import (
    AllowImage,
    ApproveOrder,
    CollectOrder,
    DenyImage,
    DownOrder,
    GpuPauseOrder,
    InviteOrder,
    LendOrder,
    MigrateOrder,
    PauseOrder,
    PruneImages,
    PullCheckpoint,
    PullImage,
    PullOrder,
    PushImage,
    ReclaimOrder,
    RecoverOrder,
    RemoveCheckpoints,
    RevokeOrder,
    ShareOrder,
    SubmitOrder,
)
from mesh.api.recovery import recover as recover_job
from mesh.api.zones import zone_list
from mesh.jobs.spec import SpecError

if TYPE_CHECKING:
    from mesh.daemon import Daemon

SCHEMA = 1  # of every answer; grows when a field changes its meaning

log = logging.getLogger(__name__)


T = TypeVar("T")


async def _read(request: web.Request, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(await request.read() or b"{}", type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise MeshError(f"the request is not understood: {error}", ExitCode.USAGE) from error


def application(daemon: "Daemon") -> web.Application:
    async def status(request: web.Request) -> Any:
        return daemon.desk.describe()

    async def nodes(request: web.Request) -> Any:
        return {"nodes": daemon.desk.nodes()}

    async def zones(request: web.Request) -> Any:
        return zone_list(daemon)

    async def survival(request: web.Request) -> Any:
        return survival_of(daemon, request.match_info["node"])

    async def gpus(request: web.Request) -> Any:
        return gpu_list(daemon)

    async def receipts(request: web.Request) -> Any:
        return await receipt_list(daemon, request.query.get("job"))

    async def pause_gpu(request: web.Request) -> Any:
        order = await _read(request, GpuPauseOrder)
        return await pause_job(daemon, request.match_info["job"], order.paused)

    async def share(request: web.Request) -> Any:
        return change_share(daemon, request.match_info["job"], await _read(request, ShareOrder))

    async def jobs(request: web.Request) -> Any:
        return {"jobs": daemon.job_desk.job_list(request.query.get("fits", ""))}

    async def job(request: web.Request) -> Any:
        return await daemon.job_desk.job_detail(request.match_info["job"])

    async def submit(request: web.Request) -> Any:
        return await daemon.job_desk.submit(await _read(request, SubmitOrder))

    async def recover(request: web.Request) -> Any:
        return await recover_job(daemon, request.match_info["job"], (await _read(request, RecoverOrder)).go)

    async def migrate(request: web.Request) -> Any:
        order = await _read(request, MigrateOrder)
        return await migrate_job(daemon, request.match_info["job"], order.to, order.force)

    async def cancel(request: web.Request) -> Any:
        return await daemon.job_desk.cancel(request.match_info["job"])

    async def why(request: web.Request) -> Any:
        return await explanation(daemon, request.match_info["job"], would="would" in request.query)

    async def describe(request: web.Request) -> Any:
        return await daemon.job_desk.describe(request.match_info["job"])

    async def files(request: web.Request) -> web.StreamResponse:
        return await _streamed(request, await copy(daemon, request.match_info["job"], request.query.get("path", "")))

    async def pull(request: web.Request) -> Any:
        return await daemon.job_desk.pull(request.match_info["job"], (await _read(request, PullOrder)).destination)

    async def events(request: web.Request) -> Any:
        after = request.query.get("after", "0")
        if not after.isdigit():
            raise MeshError("after must be a number", ExitCode.USAGE)
        return {"events": await daemon.job_desk.events(request.query.get("job"), int(after))}

    async def checkpoints(request: web.Request) -> Any:
        return await daemon.ckpt_desk.stored(request.query.get("job"))

    async def verify(request: web.Request) -> Any:
        return await daemon.ckpt_desk.verify()

    async def pull_checkpoint(request: web.Request) -> Any:
        order = await _read(request, PullCheckpoint)
        return await daemon.ckpt_desk.pull(order.job, order.seq, order.destination)

    async def remove_checkpoints(request: web.Request) -> Any:
        order = await _read(request, RemoveCheckpoints)
        return await daemon.ckpt_desk.remove(order.ids, order.force)

    async def collect(request: web.Request) -> Any:
        return await daemon.ckpt_desk.collect((await _read(request, CollectOrder)).min_age_s)

    async def images(request: web.Request) -> Any:
        return await daemon.image_desk.all()

    async def prune_images(request: web.Request) -> Any:
        return await daemon.image_desk.prune(await _read(request, PruneImages))

    async def allow_image(request: web.Request) -> Any:
        return await daemon.image_desk.allow(await _read(request, AllowImage))

    async def deny_image(request: web.Request) -> Any:
        return await daemon.image_desk.deny(await _read(request, DenyImage))

    async def pull_image(request: web.Request) -> Any:
        return await daemon.image_desk.pull((await _read(request, PullImage)).alias)

    async def push_image(request: web.Request) -> Any:
        return await daemon.image_desk.push(await _read(request, PushImage))

    async def pause(request: web.Request) -> Any:
        order = await _read(request, PauseOrder)
        return await set_paused(daemon, order.paused, order.gpu)

    async def lending(request: web.Request) -> Any:
        return lend_state(daemon)

    async def change_lending(request: web.Request) -> Any:
        return await lend(daemon, await _read(request, LendOrder))

    async def reclaim(request: web.Request) -> Any:
        return await reclaim_from_guests(daemon, await _read(request, ReclaimOrder))

    async def down(request: web.Request) -> Any:
        order = await _read(request, DownOrder)
        return daemon.ask_down(order.grace_s, order.now)

    async def invite(request: web.Request) -> Any:
        return {"invite": daemon.desk.invite(await _read(request, InviteOrder))}

    async def network(request: web.Request) -> Any:
        return await daemon.desk.network()

    async def pending(request: web.Request) -> Any:
        return {"pending": daemon.desk.pending()}

    async def approve(request: web.Request) -> Any:
        return daemon.desk.approve(await _read(request, ApproveOrder))

    async def trust(request: web.Request) -> Any:
        return {"members": daemon.desk.trusted()}

    async def revoke(request: web.Request) -> Any:
        order = await _read(request, RevokeOrder)
        return daemon.desk.revoke(order.node, order.reason)

    async def logs(request: web.Request) -> web.StreamResponse:
        follow = request.query.get("follow") == "1"
        return await _streamed(request, daemon.logs.follow_log(request.match_info["job"], follow))

    async def tunnel(request: web.Request) -> web.StreamResponse:
        return await daemon.tunnels.from_here(request, request.match_info["job"], request.match_info["way"])

    async def control(request: web.Request) -> Any:
        name = request.match_info["name"]
        return {"text": await daemon.tunnels.control_file(request.match_info["job"], name)}

    app = web.Application(client_max_size=1 << 20)
    routes: list[tuple[str, str, Callable[[web.Request], Awaitable[Any]]]] = [
        ("GET", "/v1/status", status),
        ("GET", "/v1/nodes", nodes),
        ("GET", "/v1/zones", zones),
        ("GET", "/v1/survival/{node}", survival),
        ("GET", "/v1/gpus", gpus),
        ("GET", "/v1/receipts", receipts),
        ("GET", "/v1/jobs", jobs),
        ("POST", "/v1/jobs", submit),
        ("GET", "/v1/jobs/{job}", job),
        ("POST", "/v1/jobs/{job}/cancel", cancel),
        ("POST", "/v1/jobs/{job}/migrate", migrate),
        ("POST", "/v1/jobs/{job}/recover", recover),
        ("POST", "/v1/jobs/{job}/share", share),
        ("POST", "/v1/jobs/{job}/gpu-pause", pause_gpu),
        ("GET", "/v1/jobs/{job}/why", why),
        ("POST", "/v1/jobs/{job}/pull", pull),
        ("GET", "/v1/jobs/{job}/describe", describe),
        ("GET", "/v1/jobs/{job}/files", files),
        ("GET", "/v1/jobs/{job}/log", logs),
        ("GET", "/v1/jobs/{job}/tunnel/{way}", tunnel),
        ("GET", "/v1/jobs/{job}/control/{name}", control),
        ("GET", "/v1/events", events),
        ("GET", "/v1/checkpoints", checkpoints),
        ("POST", "/v1/checkpoints/verify", verify),
        ("POST", "/v1/checkpoints/pull", pull_checkpoint),
        ("POST", "/v1/checkpoints/remove", remove_checkpoints),
        ("POST", "/v1/checkpoints/collect", collect),
        ("GET", "/v1/lend", lending),
        ("POST", "/v1/lend", change_lending),
        ("GET", "/v1/images", images),
        ("POST", "/v1/images/allow", allow_image),
        ("POST", "/v1/images/deny", deny_image),
        ("POST", "/v1/images/prune", prune_images),
        ("POST", "/v1/images/pull", pull_image),
        ("POST", "/v1/images/push", push_image),
        ("POST", "/v1/pause", pause),
        ("POST", "/v1/reclaim", reclaim),
        ("POST", "/v1/down", down),
        ("POST", "/v1/invite", invite),
        ("GET", "/v1/network", network),
        ("GET", "/v1/pending", pending),
        ("POST", "/v1/approve", approve),
        ("GET", "/v1/trust", trust),
        ("POST", "/v1/revoke", revoke),
    ]
    for method, path, handler in routes:
        app.router.add_route(method, path, _answering(daemon, handler))
    return app


async def _streamed(request: web.Request, pieces: AsyncIterator[bytes]) -> web.StreamResponse:
    first = await anext(pieces, b"")  # what cannot be had is an error, not an empty answer
    response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
    await response.prepare(request)
    await response.write(first)
    async for piece in pieces:
        await response.write(piece)
    await response.write_eof()
    return response


def _answering(
    daemon: "Daemon",
    handler: Callable[[web.Request], Awaitable[Any]],
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """Answers as JSON; errors as JSON with the text for people and the exit code."""

    async def answer(request: web.Request) -> web.StreamResponse:
        named = request.match_info.get("job") or request.query.get("fits") or request.query.get("job")
        try:
            if named:
                await daemon.job_desk.heard_of(named)
            result = await handler(request)
        except MeshError as error:
            return _problem(str(error), error.code)
        except SpecError as error:
            return _problem(str(error), ExitCode.USAGE)
        except (OSError, RuntimeError) as error:
            log.exception("%s %s failed", request.method, request.path)
            return _problem(str(error) or type(error).__name__, ExitCode.ERROR)
        if isinstance(result, web.StreamResponse):
            return result
        return web.json_response({"schema": SCHEMA, **result})

    return answer


def _problem(text: str, code: ExitCode) -> web.Response:
    body = json.dumps({"schema": SCHEMA, "error": text, "exit_code": int(code)})
    return web.Response(status=HTTP_STATUS.get(code, 500), text=body, content_type="application/json")

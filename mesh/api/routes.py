"""Every call of the agent's API, once: its method and path, what it takes, what it answers, and what does it.

The server is made of this table (mesh.api.local), and so is the document of it (mesh.api.openapi).
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec
from aiohttp import web

from mesh.api import lending, orders, queries
from mesh.api.attendance import survival_of
from mesh.api.explanation import explanation
from mesh.api.files import copy
from mesh.api.gpudesk import change_share, gpu_list, pause_job, receipt_list
from mesh.api.migration import migrate
from mesh.api.needs import needs
from mesh.api.queries import Nothing
from mesh.api.recovery import recover
from mesh.api.transfers import transfer_list
from mesh.api.usage import usage as usage_of
from mesh.api.zones import zone_list

if TYPE_CHECKING:
    from mesh.daemon import Daemon

A = TypeVar("A")
Answer = dict[str, Any]
BYTES, FRAMES = "application/octet-stream", "websocket"  # what is answered, where it is no JSON
DOCUMENT, TEXT = "application/openapi+json", "text/plain"


class Call(msgspec.Struct, Generic[A], frozen=True):
    """`asked`: the body of an order, the query of a read."""

    request: web.Request
    asked: A

    @property
    def job(self) -> str:
        return self.request.match_info["job"]


class Route(msgspec.Struct, frozen=True):
    """`answer`: the fields of the JSON object that is answered, with their types, or a content type."""

    method: str
    path: str
    section: str
    asked: type[Any]
    answer: Mapping[str, Any] | str
    handle: Callable[["Daemon", Call[Any]], Awaitable[Any]]

    @property
    def name(self) -> str:
        return self.handle.__name__

    @property
    def title(self) -> str:
        return (self.handle.__doc__ or "").strip()


ROUTES: list[Route] = []
_Handle = Callable[["Daemon", Call[A]], Awaitable[Any]]


def _route(
    method: str, path: str, section: str, asked: type[A], answer: Mapping[str, Any] | str
) -> Callable[[_Handle[A]], _Handle[A]]:
    def enter(handle: _Handle[A]) -> _Handle[A]:
        ROUTES.append(Route(method, f"/v1/{path}", section, asked, answer, handle))
        return handle

    return enter


def read(
    path: str, section: str, query: type[A], answer: Mapping[str, Any] | str
) -> Callable[[_Handle[A]], _Handle[A]]:
    return _route("GET", path, section, query, answer)


def order(path: str, section: str, body: type[A], answer: Mapping[str, Any]) -> Callable[[_Handle[A]], _Handle[A]]:
    return _route("POST", path, section, body, answer)


# --- the mesh: nodes and what they offer


@read(
    "status",
    "mesh",
    Nothing,
    {
        "version": str,
        "node": str,
        "nick": str,
        "mesh": str,
        "lending": bool,
        "paused": bool,
        "lend": dict,
        "alive": int,
    },
)
async def status(daemon: "Daemon", call: Call[Nothing]) -> Answer:
    """This node's own state."""
    return daemon.desk.describe()


@read("nodes", "mesh", Nothing, {"nodes": list[dict[str, Any]]})
async def nodes(daemon: "Daemon", call: Call[Nothing]) -> Answer:
    """Every node that is known, with what it offers: its advert."""
    return {"nodes": daemon.desk.nodes()}


@read("zones", "mesh", Nothing, {})
async def zones(daemon: "Daemon", call: Call[Nothing]) -> Answer:
    """The zones of the campus, and who speaks for each."""
    return zone_list(daemon)


@read("transfers", "mesh", Nothing, {"transfers": list[dict[str, Any]]})
async def transfers(daemon: "Daemon", call: Call[Nothing]) -> Answer:
    """What this node sends to others now."""
    return transfer_list(daemon)


@read("survival/{node}", "mesh", Nothing, {})
async def survival(daemon: "Daemon", call: Call[Nothing]) -> Answer:
    """How long a node is likely to stay."""
    return survival_of(daemon, call.request.match_info["node"])


@read("network", "mesh", Nothing, {})
async def network(daemon: "Daemon", call: Call[Nothing]) -> Answer:
    """How this node stands in the network, as it and others see it."""
    return await daemon.desk.network()


@read("openapi.json", "mesh", Nothing, DOCUMENT)
async def openapi(daemon: "Daemon", call: Call[Nothing]) -> web.Response:
    """This API, as an OpenAPI document."""
    from mesh.api.openapi import encoded

    return web.Response(body=encoded(), content_type=DOCUMENT)


# --- GPUs


@read("gpus", "gpus", Nothing, {"guards": bool, "gpu_sharing": bool, "gpus": list[dict[str, Any]]})
async def gpus(daemon: "Daemon", call: Call[Nothing]) -> Answer:
    """This node's GPUs, and who has what of them."""
    return gpu_list(daemon)


@read("receipts", "gpus", queries.JobQuery, {"receipts": list[dict[str, Any]]})
async def receipts(daemon: "Daemon", call: Call[queries.JobQuery]) -> Answer:
    """What guests have used of this node's GPUs, signed."""
    return await receipt_list(daemon, call.asked.job)


@order("jobs/{job}/share", "gpus", orders.ShareOrder, {"job": str, "share": int, "limit": int, "vram_mib": int})
async def share(daemon: "Daemon", call: Call[orders.ShareOrder]) -> Answer:
    """Give a job that runs here another share of its GPUs."""
    return change_share(daemon, call.job, call.asked)


@order("jobs/{job}/gpu-pause", "gpus", orders.GpuPauseOrder, {"job": str, "paused": bool})
async def pause_gpu(daemon: "Daemon", call: Call[orders.GpuPauseOrder]) -> Answer:
    """Take a job off this node's GPUs where it is, alive, or let it go on."""
    return await pause_job(daemon, call.job, call.asked.paused)


# --- jobs


@read("jobs", "jobs", queries.FitsQuery, {"jobs": list[dict[str, Any]]})
async def jobs(daemon: "Daemon", call: Call[queries.FitsQuery]) -> Answer:
    """All jobs that are known here, or those that fit."""
    return {"jobs": daemon.job_desk.job_list(call.asked.fits)}


@order("jobs", "jobs", orders.SubmitOrder, {"job": str, "jobs": list[str], "witnesses": int, "warning": str})
async def submit(daemon: "Daemon", call: Call[orders.SubmitOrder]) -> Answer:
    """Submit a job, or an array of them."""
    return await daemon.job_desk.submit(call.asked)


@read("jobs/{job}", "jobs", Nothing, {"job": dict[str, Any]})
async def job(daemon: "Daemon", call: Call[Nothing]) -> Answer:
    """One job: state, attempts, checkpoint, outcome."""
    return await daemon.job_desk.job_detail(call.job)


@read("jobs/{job}/describe", "jobs", Nothing, {})
async def describe(daemon: "Daemon", call: Call[Nothing]) -> Answer:
    """All about one job: what was asked for, and what its witnesses remember."""
    return await daemon.job_desk.describe(call.job)


@read("jobs/{job}/needs", "jobs", Nothing, {"job": str, "receipts": int, "vram_mib": int | None, "ran_s": float})
async def needed(daemon: "Daemon", call: Call[Nothing]) -> Answer:
    """What a job has needed so far, by the receipts of the nodes that ran it."""
    return await needs(daemon, call.job)


@read("jobs/{job}/why", "jobs", queries.WhyQuery, {"job": str, "state": str, "explanation": list[str]})
async def why(daemon: "Daemon", call: Call[queries.WhyQuery]) -> Answer:
    """Where a job runs or why it waits: the ranking of all nodes, with reasons."""
    return await explanation(daemon, call.job, call.asked.would)


@order("jobs/{job}/cancel", "jobs", Nothing, {"jobs": list[dict[str, Any]]})
async def cancel(daemon: "Daemon", call: Call[Nothing]) -> Answer:
    """End a job, or all of an array."""
    return await daemon.job_desk.cancel(call.job)


@order("jobs/{job}/migrate", "jobs", orders.MigrateOrder, {"job": str, "attempt": int, "from": str, "to": str})
async def migrate_job(daemon: "Daemon", call: Call[orders.MigrateOrder]) -> Answer:
    """Move a running job to another node."""
    return await migrate(daemon, call.job, call.asked.to, call.asked.force)


@order("jobs/{job}/recover", "jobs", orders.RecoverOrder, {"job": str, "done": bool})
async def recover_job(daemon: "Daemon", call: Call[orders.RecoverOrder]) -> Answer:
    """Go on with a job whose record is lost, most of it; or say what that would lose."""
    return await recover(daemon, call.job, call.asked.go)


@order("jobs/{job}/pull", "jobs", orders.PullOrder, {"job": str, "destination": str, "files": int, "bytes": int})
async def pull(daemon: "Daemon", call: Call[orders.PullOrder]) -> Answer:
    """Write a finished job's published files to a new directory of this machine."""
    return await daemon.job_desk.pull(call.job, call.asked.destination)


@read("jobs/{job}/files", "jobs", queries.FilesQuery, BYTES)
async def files(daemon: "Daemon", call: Call[queries.FilesQuery]) -> AsyncIterator[bytes]:
    """A job's files as a tar stream, while it runs too."""
    return await copy(daemon, call.job, call.asked.path)


@read("jobs/{job}/log", "jobs", queries.LogQuery, BYTES)
async def log(daemon: "Daemon", call: Call[queries.LogQuery]) -> AsyncIterator[bytes]:
    """A job's output, over all its attempts."""
    return daemon.logs.follow_log(call.job, call.asked.follow)


@read("jobs/{job}/tunnel/{way}", "jobs", Nothing, FRAMES)
async def tunnel(daemon: "Daemon", call: Call[Nothing]) -> web.StreamResponse:
    """Into a running job, as a WebSocket of frames (docs/interactive.md)."""
    return await daemon.tunnels.from_here(call.request, call.job, call.request.match_info["way"])


@read("jobs/{job}/control/{name}", "jobs", Nothing, {"text": str})
async def control(daemon: "Daemon", call: Call[Nothing]) -> Answer:
    """A small file that a running job keeps in its control directory."""
    return {"text": await daemon.tunnels.control_file(call.job, call.request.match_info["name"])}


@read("events", "jobs", queries.EventsQuery, {"events": list[dict[str, Any]]})
async def events(daemon: "Daemon", call: Call[queries.EventsQuery]) -> Answer:
    """What happened to jobs."""
    return {"events": await daemon.job_desk.events(call.asked.job, call.asked.after, call.asked.audit)}


@read(
    "usage",
    "mesh",
    queries.UsageQuery,
    {
        "by": str,
        "since_unix_ms": int,
        "rows": list[dict[str, Any]],
        "silent": list[str],
        "cut": list[str],
        "runs": list,
    },
)
async def usage(daemon: "Daemon", call: Call[queries.UsageQuery]) -> Answer:
    """Hours lent and borrowed, by signed receipts."""
    return await usage_of(daemon, call.asked.since_s, call.asked.by, call.asked.here)


async def metrics(daemon: "Daemon", call: Call[Nothing]) -> web.StreamResponse:
    """What is measured here now, for Prometheus."""
    return await daemon.metrics.answer(call.request)


ROUTES.append(Route("GET", "/metrics", "mesh", Nothing, TEXT, metrics))  # where Prometheus looks


# --- checkpoints


@read("checkpoints", "checkpoints", queries.JobQuery, {"checkpoints": list[dict[str, Any]], "stored_bytes": int})
async def checkpoints(daemon: "Daemon", call: Call[queries.JobQuery]) -> Answer:
    """What this node's store keeps."""
    return await daemon.ckpt_desk.stored(call.asked.job)


@order("checkpoints/verify", "checkpoints", Nothing, {"chunks": int, "bad_chunks": int, "repaired": list[str]})
async def verify(daemon: "Daemon", call: Call[Nothing]) -> Answer:
    """Read everything back, and fetch again what is damaged."""
    return await daemon.ckpt_desk.verify()


@order("checkpoints/pull", "checkpoints", orders.PullCheckpoint, {"job": str, "seq": int, "destination": str})
async def pull_checkpoint(daemon: "Daemon", call: Call[orders.PullCheckpoint]) -> Answer:
    """Write a job's checkpoint to a new directory of this machine."""
    return await daemon.ckpt_desk.pull(call.asked.job, call.asked.seq, call.asked.destination)


@order("checkpoints/remove", "checkpoints", orders.RemoveCheckpoints, {"removed": list[str]})
async def remove_checkpoints(daemon: "Daemon", call: Call[orders.RemoveCheckpoints]) -> Answer:
    """Forget checkpoints of this node's store."""
    return await daemon.ckpt_desk.remove(call.asked.ids, call.asked.force)


@order("checkpoints/collect", "checkpoints", orders.CollectOrder, {"packs": int, "bytes": int, "stored_bytes": int})
async def collect(daemon: "Daemon", call: Call[orders.CollectOrder]) -> Answer:
    """Free what nothing in the store needs."""
    return await daemon.ckpt_desk.collect(call.asked.min_age_s)


# --- images


@read("images", "images", Nothing, {"listed": bool, "images": list[dict[str, Any]]})
async def images(daemon: "Daemon", call: Call[Nothing]) -> Answer:
    """The mesh's list of images, and who has them."""
    return await daemon.image_desk.all()


@order("images/allow", "images", orders.AllowImage, {"alias": str, "here": bool, "listed": bool})
async def allow_image(daemon: "Daemon", call: Call[orders.AllowImage]) -> Answer:
    """Put an image on the mesh's list, or allow it on this node."""
    return await daemon.image_desk.allow(call.asked)


@order("images/deny", "images", orders.DenyImage, {"alias": str, "mesh": bool})
async def deny_image(daemon: "Daemon", call: Call[orders.DenyImage]) -> Answer:
    """Refuse an image here, or take it from the mesh's list."""
    return await daemon.image_desk.deny(call.asked)


@order("images/prune", "images", orders.PruneImages, {"dry_run": bool, "images": list[dict[str, Any]]})
async def prune_images(daemon: "Daemon", call: Call[orders.PruneImages]) -> Answer:
    """Remove what was fetched and is not used."""
    return await daemon.image_desk.prune(call.asked)


@order("images/pull", "images", orders.PullImage, {"alias": str, "here": bool, "words": str})
async def pull_image(daemon: "Daemon", call: Call[orders.PullImage]) -> Answer:
    """Begin to bring an image here."""
    return await daemon.image_desk.pull(call.asked.alias)


@order("images/push", "images", orders.PushImage, {"alias": str, "nodes": list[dict[str, Any]]})
async def push_image(daemon: "Daemon", call: Call[orders.PushImage]) -> Answer:
    """Ask nodes to fetch an image, or how far they are."""
    return await daemon.image_desk.push(call.asked)


# --- the owner's word


@read(
    "lend",
    "owner",
    Nothing,
    {"lending": bool, "paused": bool, "now": bool, "guests": int, "gpus": list[dict[str, Any]]},
)
async def lend(daemon: "Daemon", call: Call[Nothing]) -> Answer:
    """What is lent now, and what the owner's policy has seen."""
    return lending.lend_state(daemon)


@order("lend", "owner", orders.LendOrder, {"lending": bool, "paused": bool, "guests": int})
async def change_lending(daemon: "Daemon", call: Call[orders.LendOrder]) -> Answer:
    """Lend or not, and in which hours."""
    return await lending.lend(daemon, call.asked)


@order("pause", "owner", orders.PauseOrder, {"lending": bool, "paused": bool, "withheld": list[str], "guests": int})
async def pause(daemon: "Daemon", call: Call[orders.PauseOrder]) -> Answer:
    """Take no new guests, or take them again; the machine, or one GPU of it."""
    return await lending.set_paused(daemon, call.asked.paused, call.asked.gpu)


@order("reclaim", "owner", orders.ReclaimOrder, {"gpu": str | None, "guests": list[dict[str, Any]]})
async def reclaim(daemon: "Daemon", call: Call[orders.ReclaimOrder]) -> Answer:
    """Take the machine, or one GPU, back from its guests: with notice, or at once."""
    return await lending.reclaim(daemon, call.asked)


@order("web", "owner", Nothing, {"url": str, "port": int})
async def page(daemon: "Daemon", call: Call[Nothing]) -> Answer:
    """Where this node's page is: an address for one visit (docs/web.md)."""
    return await daemon.invite_to_page()


@order("down", "owner", orders.DownOrder, {"pid": int, "guests": int})
async def down(daemon: "Daemon", call: Call[orders.DownOrder]) -> Answer:
    """Leave: guests save and move on, then the daemon ends."""
    return daemon.ask_down(call.asked.grace_s, call.asked.now)


# --- who belongs


@order("invite", "trust", orders.InviteOrder, {"invite": str})
async def invite(daemon: "Daemon", call: Call[orders.InviteOrder]) -> Answer:
    """A string that lets its holder join."""
    return {"invite": daemon.desk.invite(call.asked)}


@read("pending", "trust", Nothing, {"pending": list[dict[str, Any]]})
async def pending(daemon: "Daemon", call: Call[Nothing]) -> Answer:
    """Who knocks, and waits to be let in."""
    return {"pending": daemon.desk.pending()}


@order("approve", "trust", orders.ApproveOrder, {"node": str, "nick": str, "user": str})
async def approve(daemon: "Daemon", call: Call[orders.ApproveOrder]) -> Answer:
    """Let in one who waits."""
    return daemon.desk.approve(call.asked)


@read("trust", "trust", Nothing, {"members": list[dict[str, Any]]})
async def trust(daemon: "Daemon", call: Call[Nothing]) -> Answer:
    """Everybody who belongs, and every key that was shut out."""
    return {"members": daemon.desk.trusted()}


@order("revoke", "trust", orders.RevokeOrder, {"node": str, "nick": str, "already": bool})
async def revoke(daemon: "Daemon", call: Call[orders.RevokeOrder]) -> Answer:
    """Shut a node out for good."""
    return daemon.desk.revoke(call.asked.node, call.asked.reason)

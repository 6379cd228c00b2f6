"""Every call of the agent's API, once: its method and path, what it takes, what it answers, and what does it.

The server is made of this table (mesh.api.local), and so is the document of it (mesh.api.openapi).
"""

from collections.abc import AsyncIterator, Awaitable, Callable
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
    from mesh.api import answers
    from mesh.daemon import Daemon

A = TypeVar("A")
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
    """`content`: the type of what is answered; empty for the JSON object that `handle` is declared to return."""

    method: str
    path: str
    section: str
    asked: type[Any]
    content: str
    handle: Callable[["Daemon", Call[Any]], Awaitable[Any]]

    @property
    def name(self) -> str:
        return self.handle.__name__

    @property
    def title(self) -> str:
        return (self.handle.__doc__ or "").strip()


ROUTES: list[Route] = []
_Handle = Callable[["Daemon", Call[A]], Awaitable[Any]]


def _route(method: str, path: str, section: str, asked: type[A], content: str) -> Callable[[_Handle[A]], _Handle[A]]:
    def enter(handle: _Handle[A]) -> _Handle[A]:
        ROUTES.append(Route(method, f"/v1/{path}", section, asked, content, handle))
        return handle

    return enter


def read(path: str, section: str, query: type[A], content: str = "") -> Callable[[_Handle[A]], _Handle[A]]:
    return _route("GET", path, section, query, content)


def order(path: str, section: str, body: type[A]) -> Callable[[_Handle[A]], _Handle[A]]:
    return _route("POST", path, section, body, "")


# --- the mesh: nodes and what they offer


@read("status", "mesh", Nothing)
async def status(daemon: "Daemon", call: Call[Nothing]) -> "answers.mesh.Status":
    """This node's own state."""
    return daemon.desk.describe()


@read("nodes", "mesh", Nothing)
async def nodes(daemon: "Daemon", call: Call[Nothing]) -> "answers.mesh.Nodes":
    """Every node that is known, with what it offers: its advert."""
    return {"nodes": daemon.desk.nodes()}


@read("zones", "mesh", Nothing)
async def zones(daemon: "Daemon", call: Call[Nothing]) -> "answers.mesh.Zones":
    """The zones of the campus, and who speaks for each."""
    return zone_list(daemon)


@read("transfers", "mesh", Nothing)
async def transfers(daemon: "Daemon", call: Call[Nothing]) -> "answers.mesh.Transfers":
    """What this node sends to others now."""
    return transfer_list(daemon)


@read("survival/{node}", "mesh", Nothing)
async def survival(daemon: "Daemon", call: Call[Nothing]) -> "answers.mesh.Survival":
    """How long a node is likely to stay."""
    return survival_of(daemon, call.request.match_info["node"])


@read("network", "mesh", Nothing)
async def network(daemon: "Daemon", call: Call[Nothing]) -> "answers.mesh.Network":
    """How this node stands in the network, as it and others see it."""
    return await daemon.desk.network()


@read("openapi.json", "mesh", Nothing, DOCUMENT)
async def openapi(daemon: "Daemon", call: Call[Nothing]) -> web.Response:
    """This API, as an OpenAPI document."""
    from mesh.api.openapi import encoded

    return web.Response(body=encoded(), content_type=DOCUMENT)


# --- GPUs


@read("gpus", "gpus", Nothing)
async def gpus(daemon: "Daemon", call: Call[Nothing]) -> "answers.gpus.Gpus":
    """This node's GPUs, and who has what of them."""
    return gpu_list(daemon)


@read("receipts", "gpus", queries.JobQuery)
async def receipts(daemon: "Daemon", call: Call[queries.JobQuery]) -> "answers.gpus.Receipts":
    """What guests have used of this node's GPUs, signed."""
    return await receipt_list(daemon, call.asked.job)


@order("jobs/{job}/share", "gpus", orders.ShareOrder)
async def share(daemon: "Daemon", call: Call[orders.ShareOrder]) -> "answers.gpus.Shared":
    """Give a job that runs here another share of its GPUs."""
    return change_share(daemon, call.job, call.asked)


@order("jobs/{job}/gpu-pause", "gpus", orders.GpuPauseOrder)
async def pause_gpu(daemon: "Daemon", call: Call[orders.GpuPauseOrder]) -> "answers.gpus.GpuPaused":
    """Take a job off this node's GPUs where it is, alive, or let it go on."""
    return await pause_job(daemon, call.job, call.asked.paused)


# --- jobs


@read("jobs", "jobs", queries.JobsQuery)
async def jobs(daemon: "Daemon", call: Call[queries.JobsQuery]) -> "answers.jobs.Jobs":
    """All jobs that are at hand here, or those that fit."""
    return await daemon.job_desk.jobs(call.asked)


@order("jobs", "jobs", orders.SubmitOrder)
async def submit(daemon: "Daemon", call: Call[orders.SubmitOrder]) -> "answers.jobs.Submitted":
    """Submit a job, or an array of them."""
    return await daemon.job_desk.submit(call.asked)


@read("jobs/{job}", "jobs", Nothing)
async def job(daemon: "Daemon", call: Call[Nothing]) -> "answers.jobs.OneJob":
    """One job: state, attempts, checkpoint, outcome."""
    return await daemon.job_desk.job_detail(call.job)


@read("jobs/{job}/describe", "jobs", Nothing)
async def describe(daemon: "Daemon", call: Call[Nothing]) -> "answers.jobs.Described":
    """All about one job: what was asked for, and what its witnesses remember."""
    return await daemon.job_desk.describe(call.job)


@read("jobs/{job}/needs", "jobs", Nothing)
async def needed(daemon: "Daemon", call: Call[Nothing]) -> "answers.jobs.Needs":
    """What a job has needed so far, by the receipts of the nodes that ran it."""
    return await needs(daemon, call.job)


@read("jobs/{job}/why", "jobs", queries.WhyQuery)
async def why(daemon: "Daemon", call: Call[queries.WhyQuery]) -> "answers.jobs.Why":
    """Where a job runs or why it waits: the ranking of all nodes, with reasons."""
    return await explanation(daemon, call.job, call.asked.would)


@order("jobs/{job}/cancel", "jobs", Nothing)
async def cancel(daemon: "Daemon", call: Call[Nothing]) -> "answers.jobs.AllCancelled":
    """End a job, or all of an array."""
    return await daemon.job_desk.cancel(call.job)


@order("jobs/{job}/migrate", "jobs", orders.MigrateOrder)
async def migrate_job(daemon: "Daemon", call: Call[orders.MigrateOrder]) -> "answers.jobs.Migrating":
    """Move a running job to another node."""
    return await migrate(daemon, call.job, call.asked.to, call.asked.force)


@order("jobs/{job}/recover", "jobs", orders.RecoverOrder)
async def recover_job(daemon: "Daemon", call: Call[orders.RecoverOrder]) -> "answers.jobs.Recovered":
    """Go on with a job whose record is lost, most of it; or say what that would lose."""
    return await recover(daemon, call.job, call.asked.go)


@order("jobs/{job}/pull", "jobs", orders.PullOrder)
async def pull(daemon: "Daemon", call: Call[orders.PullOrder]) -> "answers.jobs.Pulled":
    """Write a finished job's published files to a new directory of this machine."""
    return await daemon.job_desk.pull(call.job, call.asked.destination)


@read("jobs/{job}/files", "jobs", queries.FilesQuery, BYTES)
async def files(daemon: "Daemon", call: Call[queries.FilesQuery]) -> AsyncIterator[bytes]:
    """A job's files as a tar stream, while it runs too."""
    return await copy(daemon, call.job, call.asked.path)


@read("jobs/{job}/log", "jobs", queries.LogQuery, BYTES)
async def log(daemon: "Daemon", call: Call[queries.LogQuery]) -> AsyncIterator[bytes]:
    """A job's output, over all its attempts, or of one."""
    return daemon.logs.follow_log(call.job, call.asked.follow, call.asked.attempt)


@read("jobs/{job}/tunnel/{way}", "jobs", Nothing, FRAMES)
async def tunnel(daemon: "Daemon", call: Call[Nothing]) -> web.StreamResponse:
    """Into a running job, as a WebSocket of frames (docs/interactive.md)."""
    return await daemon.tunnels.from_here(call.request, call.job, call.request.match_info["way"])


@read("jobs/{job}/control/{name}", "jobs", Nothing)
async def control(daemon: "Daemon", call: Call[Nothing]) -> "answers.jobs.Control":
    """A small file that a running job keeps in its control directory."""
    return {"text": await daemon.tunnels.control_file(call.job, call.request.match_info["name"])}


@read("events", "jobs", queries.EventsQuery)
async def events(daemon: "Daemon", call: Call[queries.EventsQuery]) -> "answers.jobs.Events":
    """What happened to jobs."""
    return {"events": await daemon.job_desk.events(call.asked.job, call.asked.after, call.asked.audit)}


@read("usage", "mesh", queries.UsageQuery)
async def usage(daemon: "Daemon", call: Call[queries.UsageQuery]) -> "answers.mesh.Usage":
    """Hours lent and borrowed, by signed receipts."""
    return await usage_of(daemon, call.asked.since_s, call.asked.by, call.asked.here)


async def metrics(daemon: "Daemon", call: Call[Nothing]) -> web.StreamResponse:
    """What is measured here now, for Prometheus."""
    return await daemon.metrics.answer(call.request)


ROUTES.append(Route("GET", "/metrics", "mesh", Nothing, TEXT, metrics))  # where Prometheus looks


# --- checkpoints


@read("checkpoints", "checkpoints", queries.JobQuery)
async def checkpoints(daemon: "Daemon", call: Call[queries.JobQuery]) -> "answers.checkpoints.Store":
    """What this node's store keeps."""
    return await daemon.ckpt_desk.stored(call.asked.job)


@order("checkpoints/verify", "checkpoints", Nothing)
async def verify(daemon: "Daemon", call: Call[Nothing]) -> "answers.checkpoints.Verified":
    """Read everything back, and fetch again what is damaged."""
    return await daemon.ckpt_desk.verify()


@order("checkpoints/pull", "checkpoints", orders.PullCheckpoint)
async def pull_checkpoint(
    daemon: "Daemon", call: Call[orders.PullCheckpoint]
) -> "answers.checkpoints.CheckpointPulled":
    """Write a job's checkpoint to a new directory of this machine."""
    return await daemon.ckpt_desk.pull(call.asked.job, call.asked.seq, call.asked.destination)


@order("checkpoints/remove", "checkpoints", orders.RemoveCheckpoints)
async def remove_checkpoints(daemon: "Daemon", call: Call[orders.RemoveCheckpoints]) -> "answers.checkpoints.Removed":
    """Forget checkpoints of this node's store."""
    return await daemon.ckpt_desk.remove(call.asked.ids, call.asked.force)


@order("checkpoints/collect", "checkpoints", orders.CollectOrder)
async def collect(daemon: "Daemon", call: Call[orders.CollectOrder]) -> "answers.checkpoints.Collected":
    """Free what nothing in the store needs."""
    return await daemon.ckpt_desk.collect(call.asked.min_age_s)


# --- images


@read("images", "images", Nothing)
async def images(daemon: "Daemon", call: Call[Nothing]) -> "answers.images.Images":
    """The mesh's list of images, and who has them."""
    return await daemon.image_desk.all()


@order("images/allow", "images", orders.AllowImage)
async def allow_image(daemon: "Daemon", call: Call[orders.AllowImage]) -> "answers.images.Allowed":
    """Put an image on the mesh's list, or allow it on this node."""
    return await daemon.image_desk.allow(call.asked)


@order("images/deny", "images", orders.DenyImage)
async def deny_image(daemon: "Daemon", call: Call[orders.DenyImage]) -> "answers.images.Denied":
    """Refuse an image here, or take it from the mesh's list."""
    return await daemon.image_desk.deny(call.asked)


@order("images/prune", "images", orders.PruneImages)
async def prune_images(daemon: "Daemon", call: Call[orders.PruneImages]) -> "answers.images.AllPruned":
    """Remove what was fetched and is not used."""
    return await daemon.image_desk.prune(call.asked)


@order("images/pull", "images", orders.PullImage)
async def pull_image(daemon: "Daemon", call: Call[orders.PullImage]) -> "answers.images.ImagePulled":
    """Begin to bring an image here."""
    return await daemon.image_desk.pull(call.asked.alias)


@order("images/push", "images", orders.PushImage)
async def push_image(daemon: "Daemon", call: Call[orders.PushImage]) -> "answers.images.Pushed":
    """Ask nodes to fetch an image, or how far they are."""
    return await daemon.image_desk.push(call.asked)


# --- the owner's word


@read("lend", "owner", Nothing)
async def lend(daemon: "Daemon", call: Call[Nothing]) -> "answers.owner.Lend":
    """What is lent now, and what the owner's policy has seen."""
    return lending.lend_state(daemon)


@order("lend", "owner", orders.LendOrder)
async def change_lending(daemon: "Daemon", call: Call[orders.LendOrder]) -> "answers.owner.Lend":
    """Lend or not, and in which hours."""
    return await lending.lend(daemon, call.asked)


@order("pause", "owner", orders.PauseOrder)
async def pause(daemon: "Daemon", call: Call[orders.PauseOrder]) -> "answers.owner.Paused":
    """Take no new guests, or take them again; the machine, or one GPU of it."""
    return await lending.set_paused(daemon, call.asked.paused, call.asked.gpu, call.asked.for_s)


@order("reclaim", "owner", orders.ReclaimOrder)
async def reclaim(
    daemon: "Daemon", call: Call[orders.ReclaimOrder]
) -> "answers.owner.Rehearsed | answers.owner.Reclaimed":
    """Take the machine, or one GPU, back from its guests: with notice, or at once."""
    if call.asked.dry_run:
        return lending.rehearsed(daemon, call.asked)
    return await lending.reclaim(daemon, call.asked)


@order("web", "owner", Nothing)
async def page(daemon: "Daemon", call: Call[Nothing]) -> "answers.owner.Page":
    """Where this node's page is: an address for one visit (docs/web.md)."""
    return await daemon.invite_to_page()


@order("down", "owner", orders.DownOrder)
async def down(daemon: "Daemon", call: Call[orders.DownOrder]) -> "answers.owner.Leaving":
    """Leave: guests save and move on, then the daemon ends."""
    return daemon.ask_down(call.asked.grace_s, call.asked.now)


# --- who belongs


@order("invite", "trust", orders.InviteOrder)
async def invite(daemon: "Daemon", call: Call[orders.InviteOrder]) -> "answers.trust.Invited":
    """A string that lets its holder join."""
    return {"invite": daemon.desk.invite(call.asked)}


@read("pending", "trust", Nothing)
async def pending(daemon: "Daemon", call: Call[Nothing]) -> "answers.trust.Pending":
    """Who knocks, and waits to be let in."""
    return {"pending": daemon.desk.pending()}


@order("approve", "trust", orders.ApproveOrder)
async def approve(daemon: "Daemon", call: Call[orders.ApproveOrder]) -> "answers.trust.Approved":
    """Let in one who waits."""
    return daemon.desk.approve(call.asked)


@read("trust", "trust", Nothing)
async def trust(daemon: "Daemon", call: Call[Nothing]) -> "answers.trust.Members":
    """Everybody who belongs, and every key that was shut out."""
    return {"members": daemon.desk.trusted()}


@order("revoke", "trust", orders.RevokeOrder)
async def revoke(daemon: "Daemon", call: Call[orders.RevokeOrder]) -> "answers.trust.Revoked":
    """Shut a node out for good."""
    return daemon.desk.revoke(call.asked.node, call.asked.reason)

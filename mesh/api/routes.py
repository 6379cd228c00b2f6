"""The route table of the local API: method, path, request, answer and handler of each call.

The server is made from this table (mesh.api.server), and so is its OpenAPI document (mesh.api.openapi).
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from aiohttp import web

from membership.reachability import NetworkReport
from mesh.api import queries, requests, schemas
from mesh.api.openapi import encoded
from mesh.api.queries import Nothing
from mesh.api.routing import BYTES, DOCUMENT, FRAMES, TEXT, A, Call, Handlers, Route

ROUTES: list[Route] = []
Handle = Callable[[Handlers, Call[A]], Awaitable[Any]]


def _route(method: str, path: str, section: str, content: str = "") -> Callable[[Handle[A]], Handle[A]]:
    def enter(handle: Handle[A]) -> Handle[A]:
        ROUTES.append(Route(method, path, section, content, handle))
        return handle

    return enter


def read(path: str, section: str, content: str = "") -> Callable[[Handle[A]], Handle[A]]:
    return _route("GET", f"/v1/{path}", section, content)


def order(path: str, section: str) -> Callable[[Handle[A]], Handle[A]]:
    return _route("POST", f"/v1/{path}", section)


# --- the mesh: nodes and what they offer


@read("status", "mesh")
async def status(handlers: Handlers, call: Call[Nothing]) -> schemas.mesh.Status:
    """Return this node's own state."""
    return handlers.node.status()


@read("nodes", "mesh")
async def nodes(handlers: Handlers, call: Call[Nothing]) -> schemas.mesh.Nodes:
    """List all known nodes with their adverts."""
    return schemas.mesh.Nodes(nodes=handlers.node.nodes())


@read("zones", "mesh")
async def zones(handlers: Handlers, call: Call[Nothing]) -> schemas.mesh.Zones:
    """List the zones of the campus and their coordinators."""
    return handlers.placement.zones()


@read("transfers", "mesh")
async def transfers(handlers: Handlers, call: Call[Nothing]) -> schemas.mesh.Transfers:
    """List the transfers from this node to others."""
    return handlers.node.transfers()


@read("survival/{node}", "mesh")
async def survival(handlers: Handlers, call: Call[Nothing]) -> schemas.mesh.Survival:
    """Estimate how long a node is likely to stay."""
    return handlers.placement.survival(call.request.match_info["node"])


@read("network", "mesh")
async def network(handlers: Handlers, call: Call[Nothing]) -> NetworkReport:
    """Diagnose this node's network, as it and others see it."""
    return await handlers.node.network()


@read("openapi.json", "mesh", DOCUMENT)
async def openapi(handlers: Handlers, call: Call[Nothing]) -> web.Response:
    """Return this API as an OpenAPI document."""
    return web.Response(body=encoded(tuple(ROUTES)), content_type=DOCUMENT)


# --- GPUs


@read("gpus", "gpus")
async def gpus(handlers: Handlers, call: Call[Nothing]) -> schemas.gpus.Gpus:
    """List this node's GPUs and the jobs on them."""
    return handlers.gpus.gpu_list()


@read("receipts", "gpus")
async def receipts(handlers: Handlers, call: Call[queries.JobQuery]) -> schemas.gpus.Receipts:
    """List signed receipts of guests' use of this node."""
    return await handlers.gpus.receipt_list(call.asked.job)


@order("jobs/{job}/share", "gpus")
async def share(handlers: Handlers, call: Call[requests.ShareOrder]) -> schemas.gpus.Shared:
    """Give a job that runs here another share of its GPUs."""
    return handlers.gpus.change_share(call.job, call.asked)


@order("jobs/{job}/gpu-pause", "gpus")
async def pause_gpu(handlers: Handlers, call: Call[requests.GpuPauseOrder]) -> schemas.gpus.GpuPaused:
    """Pause a job on this node's GPUs, or resume it."""
    return await handlers.gpus.pause_job(call.job, call.asked.paused)


# --- jobs


@read("jobs", "jobs")
async def jobs(handlers: Handlers, call: Call[queries.JobsQuery]) -> schemas.jobs.Jobs:
    """List the jobs that this node knows, or those that match."""
    return await handlers.jobs.jobs(call.asked)


@order("jobs", "jobs")
async def submit(handlers: Handlers, call: Call[requests.SubmitOrder]) -> schemas.jobs.Submitted:
    """Submit a job, or an array of them."""
    return await handlers.submission.submit(call.asked)


@read("jobs/{job}", "jobs")
async def job(handlers: Handlers, call: Call[Nothing]) -> schemas.jobs.OneJob:
    """Return one job: state, attempts, checkpoint, outcome."""
    return handlers.jobs.job(call.job)


@read("jobs/{job}/describe", "jobs")
async def describe(handlers: Handlers, call: Call[Nothing]) -> schemas.jobs.Described:
    """Describe one job: its specification, its record and its last events."""
    return await handlers.jobs.describe(call.job)


@read("jobs/{job}/needs", "jobs")
async def needed(handlers: Handlers, call: Call[Nothing]) -> schemas.jobs.Needs:
    """Return the resources a job has used, by the receipts of the nodes that ran it."""
    return await handlers.usage.needs(call.job)


@read("jobs/{job}/why", "jobs")
async def why(handlers: Handlers, call: Call[queries.WhyQuery]) -> schemas.jobs.Why:
    """Explain where a job runs or why it waits: the ranking of all nodes, with reasons."""
    return await handlers.placement.why(call.job, call.asked.would)


@read("deliveries", "jobs")
async def deliveries(handlers: Handlers, call: Call[Nothing]) -> schemas.jobs.Deliveries:
    """List the directories that still lack the files of their jobs (`out` of a submission)."""
    return handlers.submission.deliveries()


@order("jobs/{job}/cancel", "jobs")
async def cancel(handlers: Handlers, call: Call[Nothing]) -> schemas.jobs.AllCancelled:
    """Cancel a job, or all jobs of an array."""
    return await handlers.jobs.cancel(call.job)


@order("jobs/{job}/migrate", "jobs")
async def migrate_job(handlers: Handlers, call: Call[requests.MigrateOrder]) -> schemas.jobs.Migrating:
    """Move a running job to another node."""
    return await handlers.jobs.migrate(call.job, call.asked)


@order("jobs/{job}/recover", "jobs")
async def recover_job(handlers: Handlers, call: Call[requests.RecoverOrder]) -> schemas.jobs.Recovered:
    """Recover a job that lost its quorum, or report what that would lose."""
    return await handlers.jobs.recover(call.job, call.asked.go)


@order("jobs/{job}/pull", "jobs")
async def pull(handlers: Handlers, call: Call[requests.PullOrder]) -> schemas.jobs.Pulled:
    """Write a finished job's published files to a new directory of this machine."""
    return await handlers.jobs.pull(call.job, call.asked.destination)


@read("jobs/{job}/files", "jobs", BYTES)
async def files(handlers: Handlers, call: Call[queries.FilesQuery]) -> AsyncIterator[bytes]:
    """Return a job's files as a stream (mesh/api/file_stream.py), also while it runs."""
    return await handlers.files.copy(call.job, call.asked.path)


@read("jobs/{job}/log", "jobs", BYTES)
async def log(handlers: Handlers, call: Call[queries.LogQuery]) -> AsyncIterator[bytes]:
    """Return a job's output, of all its attempts or of one."""
    return handlers.logs.follow_log(call.job, call.asked)


@read("jobs/{job}/tunnel/{way}", "jobs", FRAMES)
async def tunnel(handlers: Handlers, call: Call[Nothing]) -> web.StreamResponse:
    """Open a tunnel into a running job, as a WebSocket of frames (docs/explanation/tunnels.md)."""
    return await handlers.tunnels.from_here(call.request, call.job, call.request.match_info["way"])


@read("jobs/{job}/control/{name}", "jobs")
async def control(handlers: Handlers, call: Call[Nothing]) -> schemas.jobs.Control:
    """Return a small file from a running job's control directory."""
    return schemas.jobs.Control(text=await handlers.tunnels.control_file(call.job, call.request.match_info["name"]))


@read("events", "jobs")
async def events(handlers: Handlers, call: Call[queries.EventsQuery]) -> schemas.jobs.Events:
    """List events of jobs."""
    return schemas.jobs.Events(events=await handlers.jobs.events(call.asked.job, call.asked.after, call.asked.audit))


@read("usage", "mesh")
async def usage(handlers: Handlers, call: Call[queries.UsageQuery]) -> schemas.mesh.Usage:
    """Sum hours lent and borrowed, by signed receipts."""
    return await handlers.usage.usage(call.asked.since_s, call.asked.by, call.asked.here)


@_route("GET", "/metrics", "mesh", TEXT)  # Prometheus's default path
async def metrics(handlers: Handlers, call: Call[Nothing]) -> web.StreamResponse:
    """Return the metrics of this node for Prometheus."""
    return await handlers.metrics.answer(call.request)


# --- checkpoints


@read("checkpoints", "checkpoints")
async def checkpoints(handlers: Handlers, call: Call[queries.JobQuery]) -> schemas.checkpoints.Store:
    """List the checkpoints in this node's store."""
    return await handlers.checkpoints.stored(call.asked.job)


@order("checkpoints/verify", "checkpoints")
async def verify(handlers: Handlers, call: Call[Nothing]) -> schemas.checkpoints.Verified:
    """Verify the store, and fetch damaged data again."""
    return await handlers.checkpoints.verify()


@order("checkpoints/pull", "checkpoints")
async def pull_checkpoint(
    handlers: Handlers, call: Call[requests.PullCheckpoint]
) -> schemas.checkpoints.CheckpointPulled:
    """Write a job's checkpoint to a new directory of this machine."""
    return await handlers.checkpoints.pull(call.asked.job, call.asked.seq, call.asked.destination)


@order("checkpoints/remove", "checkpoints")
async def remove_checkpoints(handlers: Handlers, call: Call[requests.RemoveCheckpoints]) -> schemas.checkpoints.Removed:
    """Remove checkpoints from this node's store."""
    return await handlers.checkpoints.remove(call.asked.ids, call.asked.force)


@order("checkpoints/collect", "checkpoints")
async def collect(handlers: Handlers, call: Call[requests.CollectOrder]) -> schemas.checkpoints.Collected:
    """Free space that no checkpoint needs."""
    return await handlers.checkpoints.collect(call.asked.min_age_s)


# --- data sets


@read("data", "data")
async def data_sets(handlers: Handlers, call: Call[Nothing]) -> schemas.data.DataSets:
    """List the data sets of the mesh and the nodes that have them."""
    return handlers.data.all()


@read("data/show", "data")
async def show_data(handlers: Handlers, call: Call[queries.DataQuery]) -> schemas.data.ShownData:
    """Return one data set, and the files in one of its directories if it is here."""
    return await handlers.data.show(call.asked)


@read("data/work", "data")
async def data_work(handlers: Handlers, call: Call[queries.WorkQuery]) -> schemas.data.DataWork:
    """Return how far an add, a fetch or a verification of a data set is."""
    return handlers.data.work(call.asked)


@order("data/add", "data")
async def add_data(handlers: Handlers, call: Call[requests.AddData]) -> schemas.data.DataWork:
    """Start to add a directory or file of this machine as a data set."""
    return await handlers.data.add(call.asked)


@read("data/groups", "data")
async def data_groups(handlers: Handlers, call: Call[queries.GroupQuery]) -> schemas.data.Groups:
    """List the groups of users whom data sets may name as readers."""
    return await handlers.data.groups(call.asked.name)


@order("data/groups", "data")
async def set_data_group(handlers: Handlers, call: Call[requests.SetGroup]) -> schemas.data.Groups:
    """Say who is in a group of this node's user."""
    return await handlers.data.set_group(call.asked)


@order("data/remove", "data")
async def remove_data(handlers: Handlers, call: Call[requests.RemoveData]) -> schemas.data.RemovedData:
    """Remove a data set of this node's user from the mesh, or any from this node."""
    return await handlers.data.remove(call.asked)


@order("data/verify", "data")
async def verify_data(handlers: Handlers, call: Call[requests.NameData]) -> schemas.data.DataWork:
    """Start to verify a data set on this node; damaged chunks are fetched again."""
    return await handlers.data.verify(call.asked.name)


@order("data/pin", "data")
async def pin_data(handlers: Handlers, call: Call[requests.PinData]) -> schemas.data.DataWork:
    """Keep a data set on this node, after fetching it, or let it go again."""
    return await handlers.data.pin(call.asked)


@order("data/stop", "data")
async def stop_data(handlers: Handlers, call: Call[requests.StopData]) -> schemas.data.DataWork:
    """Stop an add, a fetch or a verification of a data set. The same order later continues it."""
    return await handlers.data.stop(call.asked)


# --- images


@read("images", "images")
async def images(handlers: Handlers, call: Call[Nothing]) -> schemas.images.Images:
    """List the images of the mesh and the nodes that have them."""
    return await handlers.images.all()


@order("images/allow", "images")
async def allow_image(handlers: Handlers, call: Call[requests.AllowImage]) -> schemas.images.Allowed:
    """Put an image on the mesh's list, or allow it on this node."""
    return await handlers.images.allow(call.asked)


@order("images/deny", "images")
async def deny_image(handlers: Handlers, call: Call[requests.DenyImage]) -> schemas.images.Denied:
    """Refuse an image here, or take it from the mesh's list."""
    return await handlers.images.deny(call.asked)


@order("images/prune", "images")
async def prune_images(handlers: Handlers, call: Call[requests.PruneImages]) -> schemas.images.AllPruned:
    """Remove fetched images that are not used."""
    return await handlers.images.prune(call.asked)


@order("images/pull", "images")
async def pull_image(handlers: Handlers, call: Call[requests.PullImage]) -> schemas.images.ImagePulled:
    """Start to fetch an image to this node."""
    return await handlers.images.pull(call.asked.alias)


@order("images/push", "images")
async def push_image(handlers: Handlers, call: Call[requests.PushImage]) -> schemas.images.Pushed:
    """Push an image into this node's registry, or ask nodes to fetch it, or for their progress."""
    return await handlers.images.push(call.asked)


@read("images/registry", "images")
async def image_registry(handlers: Handlers, call: Call[Nothing]) -> schemas.images.Registry:
    """Return the address and the password of this node's registry."""
    return handlers.images.registry()


# --- secrets


@read("secrets", "jobs")
async def secrets(handlers: Handlers, call: Call[Nothing]) -> schemas.secrets.Secrets:
    """List the names of the user's secrets on this node."""
    return await handlers.secrets.all()


@order("secrets", "jobs")
async def set_secret(handlers: Handlers, call: Call[requests.SetSecret]) -> schemas.secrets.SecretSet:
    """Keep a secret for jobs on this node."""
    return await handlers.secrets.set(call.asked)


@order("secrets/remove", "jobs")
async def remove_secrets(handlers: Handlers, call: Call[requests.RemoveSecrets]) -> schemas.secrets.SecretsRemoved:
    """Remove secrets from this node."""
    return await handlers.secrets.remove(call.asked)


# --- the owner's orders


@read("lend", "owner")
async def lend(handlers: Handlers, call: Call[Nothing]) -> schemas.owner.Lend:
    """Return what is lent now, and what the owner's policy has observed."""
    return handlers.lending.lend_state()


@order("lend", "owner")
async def change_lending(handlers: Handlers, call: Call[requests.LendOrder]) -> schemas.owner.Lend:
    """Start or stop lending, or set its hours."""
    return await handlers.lending.lend(call.asked)


@order("pause", "owner")
async def pause(handlers: Handlers, call: Call[requests.PauseOrder]) -> schemas.owner.Paused:
    """Pause or resume lending, of the machine or of one GPU."""
    return await handlers.lending.set_paused(call.asked.paused, call.asked.gpu, call.asked.for_s)


@order("reclaim", "owner")
async def reclaim(
    handlers: Handlers, call: Call[requests.ReclaimOrder]
) -> schemas.owner.Rehearsed | schemas.owner.Reclaimed:
    """Reclaim the machine or one GPU from its guests: with notice, or at once."""
    if call.asked.dry_run:
        return handlers.lending.rehearsed(call.asked)
    return await handlers.lending.reclaim(call.asked)


@order("web", "owner")
async def page(handlers: Handlers, call: Call[Nothing]) -> schemas.owner.Page:
    """Return the address of this node's page, for one visit (docs/how-to/web.md)."""
    return await handlers.node.page()


@order("down", "owner")
async def down(handlers: Handlers, call: Call[requests.DownOrder]) -> schemas.owner.Leaving:
    """Stop the daemon: guests save and move on first."""
    return handlers.node.down(call.asked)


# --- members


@order("invite", "trust")
async def invite(handlers: Handlers, call: Call[requests.InviteOrder]) -> schemas.trust.Invited:
    """Create an invite: for a new user, or for another machine of this node's user."""
    return schemas.trust.Invited(invite=handlers.trust.invite(call.asked))


@read("pending", "trust")
async def pending(handlers: Handlers, call: Call[Nothing]) -> schemas.trust.Pending:
    """List pending join requests."""
    return schemas.trust.Pending(pending=handlers.trust.pending())


@order("approve", "trust")
async def approve(handlers: Handlers, call: Call[requests.ApproveOrder]) -> schemas.trust.Approved:
    """Approve a pending join request."""
    return handlers.trust.approve(call.asked)


@read("trust", "trust")
async def trust(handlers: Handlers, call: Call[Nothing]) -> schemas.trust.Members:
    """List all members and all revoked keys."""
    return schemas.trust.Members(members=handlers.trust.trusted())


@order("promote", "trust")
async def promote(handlers: Handlers, call: Call[requests.PromoteOrder]) -> schemas.trust.Promoted:
    """Sign that a node may admit others, as one of the mesh's founders."""
    return handlers.trust.promote(call.asked.node)


@order("revoke", "trust")
async def revoke(handlers: Handlers, call: Call[requests.RevokeOrder]) -> schemas.trust.Revoked:
    """Revoke a node's key for good."""
    return handlers.trust.revoke(call.asked.node, call.asked.reason)

"""The checkpoint store of this node: list, verify, fetch, remove, collect."""

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path

from ckptstore.checker import verify
from ckptstore.errors import StoreError
from ckptstore.store import ManifestInfo, Store
from membership.node import MembershipNode
from mesh.api import schemas
from mesh.api.handlers.lookup import JobLookup, require_free
from mesh.checkpoints.replicator import Expected, FetchError
from mesh.consensus.status import JobStatus
from mesh.jobs.service import JobService
from mesh.model.spec import format_job
from mesh.util.errors import ExitCode, MeshError
from mesh.util.structs import copy_as

ASKED = 16  # for what is damaged here
LEAST_ID = 4  # letters of an id that are enough to name it


class CheckpointHandlers:
    def __init__(self, membership: MembershipNode, store: Store, jobs: JobService, lookup: JobLookup) -> None:
        self._membership, self._store, self._jobs, self._lookup = membership, store, jobs, lookup

    async def stored(self, job: str | None) -> schemas.checkpoints.Store:
        """Return the manifests in this node's store, of one job or of all, and the space in use."""
        store = self._store
        wanted = self._lookup.find_job(job) if job else None
        infos = await asyncio.to_thread(store.manifests)
        if wanted is not None:
            infos = [info for info in infos if info.job == wanted.job or info.id == wanted.workdir]
        statuses = self._lookup.statuses()
        return schemas.checkpoints.Store(
            checkpoints=[self._show(info, _needing(info, statuses)) for info in infos],
            stored_bytes=await asyncio.to_thread(store.stored_bytes),
            foreign_bytes=await asyncio.to_thread(store.foreign_bytes),
            quota_bytes=store.quota_bytes,
            foreign_quota_bytes=store.foreign_quota_bytes,
        )

    def _show(self, info: ManifestInfo, status: JobStatus | None) -> schemas.checkpoints.Stored:
        use, holders = _use(info, status)
        nicks = {member.node_id: member.nick for member in self._membership.members()}
        return copy_as(
            schemas.checkpoints.Stored,
            info,
            id=info.id.hex(),
            job=format_job(status.job if status is not None else info.job),
            name=status.name if status is not None else "",
            bytes=info.total_bytes,
            encrypted=bool(info.realm),
            use=use,
            holders=[nicks.get(node, node.hex()[:8]) for node in holders],
        )

    async def verify(self) -> schemas.checkpoints.Verified:
        """Read everything back; quarantine damaged data, and fetch it again from other holders."""
        store = self._store
        report = await asyncio.to_thread(verify, store)
        repaired: list[str] = []
        lost: dict[str, str] = {}
        for identity in report.damaged_manifests:
            try:
                manifest = await asyncio.to_thread(store.manifest, identity)
                of = Expected(manifest.job, manifest.user)  # its signer was checked as it came here
                await self._jobs.replicator.fetch(identity, self._sources(manifest.job, identity), of)
                repaired.append(identity.hex())
            except (StoreError, FetchError) as error:
                lost[identity.hex()] = str(error)
        return schemas.checkpoints.Verified(
            chunks=report.chunks,
            bad_chunks=report.bad_chunks,
            quarantined=list(report.quarantined),
            quarantine=str(store.quarantine),
            repaired=repaired,
            lost=lost,
        )

    async def pull(self, text: str, seq: int | None, destination: str) -> schemas.checkpoints.CheckpointPulled:
        """Write the files of a job's checkpoint (the last committed one, or one by number) to a new directory."""
        target = Path(destination)
        await require_free(target)
        status = self._lookup.find_job(text)
        await self._lookup.check_owner(status)
        name = format_job(status.job)[:8]
        if seq is None or (status.commit is not None and status.commit.seq == seq):
            if status.commit is None:
                raise MeshError(f"job {name} has no committed checkpoint yet", ExitCode.NOT_FOUND)
            manifest, seq, holders = status.commit.manifest, status.commit.seq, status.commit.holders
        else:
            infos = await asyncio.to_thread(self._store.manifests, status.job)
            found = [info for info in infos if info.kind == "checkpoint" and info.seq == seq]
            if not found:
                raise MeshError(
                    f"checkpoint {seq} of job {name} is not in this node's store: `mesh ckpt ls {name}` lists what is",
                    ExitCode.NOT_FOUND,
                )
            manifest, holders = found[-1].id, ()
        report = await self._lookup.restore(status, manifest, holders, "ckpt", target)
        job, destination = format_job(status.job), str(target)
        return copy_as(schemas.checkpoints.CheckpointPulled, report, job=job, seq=seq, destination=destination)

    async def remove(self, names: list[str], force: bool) -> schemas.checkpoints.Removed:
        """Remove manifests from this store; the next collection frees their bytes."""
        infos = await asyncio.to_thread(self._store.manifests)
        statuses = self._lookup.statuses()
        chosen = [_named(infos, name) for name in names]
        for info in chosen:
            use, _ = _use(info, _needing(info, statuses))
            if use in {"committed", "at risk", "predecessor", "in use"} and not force:
                raise MeshError(
                    f"{info.id.hex()[:12]} is {use}: job {format_job(info.job)[:8]} may need it from here; "
                    "`mesh ckpt rm --force` removes it all the same",
                    ExitCode.USAGE,
                )
        for info in chosen:
            await asyncio.to_thread(self._store.forget, info.id)
        return schemas.checkpoints.Removed(removed=[info.id.hex() for info in chosen])

    async def collect(self, min_age_s: float) -> schemas.checkpoints.Collected:
        done = await asyncio.to_thread(
            lambda: self._store.collect(min_age_s=min_age_s, now_unix=time.time()),
        )
        left = await asyncio.to_thread(self._store.stored_bytes)
        return schemas.checkpoints.Collected(packs=done.packs, bytes=done.bytes, stored_bytes=left)

    def _sources(self, job: bytes, manifest: bytes) -> list[bytes]:
        """Return nodes that may have a manifest: the holders in the commit first."""
        status = self._lookup.statuses().get(job)
        commit = status.commit if status is not None else None
        first = commit.holders if commit is not None and commit.manifest == manifest else ()
        ran = [attempt.node for attempt in status.attempts] if status is not None else []
        others = [member.node_id for member in self._membership.members() if member.present]
        return [node for node in dict.fromkeys([*first, *ran, *others]) if node != self._lookup.me][:ASKED]


def _needing(info: ManifestInfo, statuses: Mapping[bytes, JobStatus]) -> JobStatus | None:
    """Return the job of a manifest; of a working directory, one that names it, if possible one that is not over."""
    if info.kind != "workdir":
        return statuses.get(info.job)
    naming = [status for status in statuses.values() if status.workdir == info.id]
    return min(naming, key=lambda status: (status.outcome is not None, status.job), default=None)


def _use(info: ManifestInfo, status: JobStatus | None) -> tuple[str, tuple[bytes, ...]]:
    """Return what the mesh needs a manifest for, as far as this node knows, and its other holders."""
    if status is None:
        return "unknown", ()
    commit, outcome = status.commit, status.outcome
    if commit is not None and commit.manifest == info.id:
        use = "at risk" if commit.at_risk else "committed"
        return (use if outcome is None else "kept"), commit.holders
    before = status.predecessor
    if before is not None and before.manifest == info.id and outcome is None:
        return "predecessor", before.holders
    if outcome is not None and outcome.manifest == info.id:
        return "result", outcome.holders
    if info.kind == "workdir":
        return ("in use" if outcome is None else "over"), ()
    if outcome is None and (commit is None or info.seq > commit.seq):
        return "not committed", ()
    return "older" if outcome is None else "over", ()


def _named(infos: list[ManifestInfo], name: str) -> ManifestInfo:
    found = [info for info in infos if len(name) >= LEAST_ID and info.id.hex().startswith(name.lower())]
    if len(found) == 1:
        return found[0]
    problem = (
        f"{name!r} fits {len(found)} checkpoints: give more of the id" if found else f"no checkpoint {name!r} is here"
    )
    raise MeshError(f"{problem}; `mesh ckpt ls` lists them", ExitCode.USAGE if found else ExitCode.NOT_FOUND)

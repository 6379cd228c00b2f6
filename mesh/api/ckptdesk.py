"""What `mesh ckpt` asks of this node's store: what is in it, whether it is whole, and room when it is needed."""

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ckptstore.checker import verify
from ckptstore.errors import StoreError
from ckptstore.store import ManifestInfo
from mesh.api.errors import ExitCode, MeshError
from mesh.api.jobdesk import must_be_free
from mesh.jobs.courier import FetchError
from mesh.jobs.spec import format_job
from mesh.jobs.status import JobStatus

if TYPE_CHECKING:
    from mesh.api import answers
    from mesh.daemon import Daemon

ASKED = 16  # for what is damaged here
LEAST_ID = 4  # letters of an id that are enough to name it


class CkptDesk:
    def __init__(self, daemon: "Daemon") -> None:
        self._daemon = daemon

    async def stored(self, job: str | None) -> "answers.checkpoints.Store":
        """What is in this node's store, of one job or of all, and how much of its room is used."""
        store = self._daemon.store
        wanted = self._daemon.job_desk.find_job(job).job if job else None
        infos = await asyncio.to_thread(store.manifests, wanted)
        statuses = self._daemon.job_desk.statuses()
        return {
            "checkpoints": [self._show(info, statuses.get(info.job)) for info in infos],
            "stored_bytes": await asyncio.to_thread(store.stored_bytes),
            "foreign_bytes": await asyncio.to_thread(store.foreign_bytes),
            "quota_bytes": store.quota_bytes,
            "foreign_quota_bytes": store.foreign_quota_bytes,
        }

    def _show(self, info: ManifestInfo, status: JobStatus | None) -> "answers.checkpoints.Stored":
        use, holders = _use(info, status)
        nicks = {member.node_id: member.nick for member in self._daemon.membership.members()}
        return {
            "id": info.id.hex(),
            "job": format_job(info.job),
            "name": status.name if status is not None else "",
            "kind": info.kind,
            "seq": info.seq,
            "term": info.term,
            "created_unix": info.created_unix,
            "bytes": info.total_bytes,
            "files": info.files,
            "encrypted": info.encrypted,
            "user": info.user,
            "use": use,
            "holders": [nicks.get(node, node.hex()[:8]) for node in holders],
        }

    async def verify(self) -> "answers.checkpoints.Verified":
        """Read everything back; what is damaged is put away, and fetched again from who has it."""
        store = self._daemon.store
        report = await asyncio.to_thread(verify, store)
        repaired: list[str] = []
        lost: dict[str, str] = {}
        for identity in report.damaged_manifests:
            try:
                manifest = await asyncio.to_thread(store.manifest, identity)
                await self._daemon.jobs.courier.fetch(identity, self._sources(manifest.job, identity))
                repaired.append(identity.hex())
            except (StoreError, FetchError) as error:
                lost[identity.hex()] = str(error)
        return {
            "chunks": report.chunks,
            "bad_chunks": report.bad_chunks,
            "quarantined": list(report.quarantined),
            "quarantine": str(store.quarantine),
            "repaired": repaired,
            "lost": lost,
        }

    async def pull(self, text: str, seq: int | None, destination: str) -> "answers.checkpoints.CheckpointPulled":
        """Write the files of a job's checkpoint (the last committed one, or one by number) to a new directory."""
        store, target = self._daemon.store, Path(destination)
        await must_be_free(target)
        status = self._daemon.job_desk.find_job(text)
        self._daemon.job_desk.check_owner(status)
        name = format_job(status.job)[:8]
        if seq is None or (status.commit is not None and status.commit.seq == seq):
            if status.commit is None:
                raise MeshError(f"job {name} has no committed checkpoint yet", ExitCode.NOT_FOUND)
            manifest, seq, holders = status.commit.manifest, status.commit.seq, status.commit.holders
            vault = await self._daemon.job_desk.bring(status, manifest, holders)
        else:
            infos = await asyncio.to_thread(store.manifests, status.job)
            found = [info for info in infos if info.kind == "checkpoint" and info.seq == seq]
            if not found:
                raise MeshError(
                    f"checkpoint {seq} of job {name} is not in this node's store: `mesh ckpt ls {name}` lists what is",
                    ExitCode.NOT_FOUND,
                )
            manifest = found[-1].id
            vault = await self._daemon.job_desk.vault_of(status, manifest)
        try:
            report = await asyncio.to_thread(lambda: store.restore(manifest, target, prefix="ckpt", vault=vault))
        except (StoreError, OSError) as error:
            raise MeshError(f"the checkpoint could not be written to {target}: {error}") from error
        return {
            "job": format_job(status.job),
            "seq": seq,
            "destination": str(target),
            "files": report.files,
            "bytes": report.bytes,
        }

    async def remove(self, names: list[str], force: bool) -> "answers.checkpoints.Removed":
        """Forget manifests of this store; their bytes go with the next collection."""
        infos = await asyncio.to_thread(self._daemon.store.manifests)
        statuses = self._daemon.job_desk.statuses()
        chosen = [_named(infos, name) for name in names]
        for info in chosen:
            use, _ = _use(info, statuses.get(info.job))
            if use in {"committed", "in use"} and not force:
                raise MeshError(
                    f"{info.id.hex()[:12]} is {use}: job {format_job(info.job)[:8]} may need it from here; "
                    "`mesh ckpt rm --force` removes it all the same",
                    ExitCode.USAGE,
                )
        for info in chosen:
            await asyncio.to_thread(self._daemon.store.forget, info.id)
        return {"removed": [info.id.hex() for info in chosen]}

    async def collect(self, min_age_s: float) -> "answers.checkpoints.Collected":
        done = await asyncio.to_thread(
            lambda: self._daemon.store.collect(min_age_s=min_age_s, now_unix=time.time()),
        )
        left = await asyncio.to_thread(self._daemon.store.stored_bytes)
        return {"packs": done.packs, "bytes": done.bytes, "stored_bytes": left}

    def _sources(self, job: bytes, manifest: bytes) -> list[bytes]:
        """Who may have it too: those the commit names, then those who would have been chosen."""
        status = self._daemon.job_desk.statuses().get(job)
        commit = status.commit if status is not None else None
        first = commit.holders if commit is not None and commit.manifest == manifest else ()
        ran = [attempt.node for attempt in status.attempts] if status is not None else []
        others = [member.node_id for member in self._daemon.membership.members() if member.present]
        return [node for node in dict.fromkeys([*first, *ran, *others]) if node != self._daemon.me][:ASKED]


def _use(info: ManifestInfo, status: JobStatus | None) -> tuple[str, tuple[bytes, ...]]:
    """What the mesh needs it for, as far as this node knows, and who else holds it."""
    if status is None:
        return "unknown", ()
    commit, outcome = status.commit, status.outcome
    if commit is not None and commit.manifest == info.id:
        return ("committed" if outcome is None else "kept"), commit.holders
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

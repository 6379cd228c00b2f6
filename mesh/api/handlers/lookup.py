"""Find the nodes and jobs that a request names, and what the mesh keeps of a job: its description, record, events and files."""

import asyncio
import errno
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec

from ckptstore.cipher import StateCipher
from ckptstore.errors import ReadOnlyStore, StoreError
from ckptstore.manifest import MAX_FILES
from ckptstore.store import RestoreReport, Store
from membership.events import MemberView
from membership.identity import NodeId, format_id, short_id
from membership.malformed import MALFORMED
from membership.node import MembershipNode
from mesh.checkpoints.keys import NoKey
from mesh.checkpoints.replicator import Expected, FetchError
from mesh.consensus.effects import WitnessRecord, decode_witness_record
from mesh.consensus.status import JobStatus, best_of
from mesh.jobs.authority import is_user
from mesh.jobs.awaited_ends import one_stated
from mesh.jobs.job_table import OWN
from mesh.jobs.service import JobService
from mesh.journal import EVENTS_READ, Journal
from mesh.model.events import MAX_EVENT_BYTES, Event
from mesh.model.record import Attempt
from mesh.model.spec import JOB_ID_LENGTH, JobSpec, SpecError, format_job
from mesh.rpc.client import CALL_TIMEOUT_S, PeerClient, PeerError
from mesh.util.errors import ExitCode, MeshError
from mesh.util.lookup import job_name_meant, node_meant
from placement.decision import replica_order

EVENTS_WITHIN_S = 3.0
HEARD_WITHIN_S = 2.0  # a gossip round, and a push-pull for what is too large for it
NEW_S = 30.0  # after this, a job of an array that is not known here has been forgotten (own choice)
MOST_LABELS = 10  # indices of an array that are listed (own choice)
# Errors of a path that no later try can write to.
NO_DIRECTORY = {errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL}
Telling = tuple[bytes, Event, bool]

# What a node answers of a job's events: as many as its journal gives at a time.
_Sealed = Annotated[bytes, msgspec.Meta(max_length=MAX_EVENT_BYTES)]
_events_decoder = msgspec.msgpack.Decoder(Annotated[list[_Sealed], msgspec.Meta(max_length=EVENTS_READ)])


def nicks_of(membership: MembershipNode) -> dict[NodeId, str]:
    """Return the nick of every known node."""
    return {member.node_id: member.nick for member in membership.members()}


def nick_in(nicks: Mapping[NodeId, str], node: NodeId) -> str:
    """Return a node's nick, or the short form of its id if it is not known."""
    return nicks.get(node) or short_id(node)


def find_node(membership: MembershipNode, text: str, *, whole: bool = False) -> MemberView:
    """Return the node with this nick, id, or unique prefix of either; with `whole`, a nick has to be complete."""
    members = {format_id(member.node_id): member for member in membership.members()}
    nicks = {node: member.nick for node, member in members.items()}
    return members[node_meant(text, nicks, {node: member.user for node, member in members.items()}, whole=whole)]


MINE, TRUSTED = "mine", "trusted"


class NodeLookup:
    """Finds the nodes that an option lists. `trusted`: the users and nodes that the word `trusted` means."""

    def __init__(self, membership: MembershipNode, trusted: Sequence[str]) -> None:
        self._membership, self._trusted = membership, trusted

    def named(self, words: Sequence[str]) -> list[bytes]:
        """Return the nodes, of the members that are known now. MeshError for a word that means none."""
        found: dict[bytes, None] = {}
        for word in words:
            nodes = [member.node_id for member in self._membership.members() if self._fits(word, member)]
            if word not in {MINE, TRUSTED}:
                nodes = [find_node(self._membership, word).node_id]
            elif not nodes:
                hint = "" if word == MINE else self._hint()
                raise MeshError(f"no node is {word}{hint}", ExitCode.USAGE)
            found |= dict.fromkeys(nodes)
        return list(found)

    def _hint(self) -> str:
        if self._trusted:
            return f": `trusted` names {', '.join(self._trusted)}, and no member has such a name"
        return ": `mesh config set trusted USER NODE ...` names them, from the next start of the daemon on"

    def _fits(self, word: str, member: MemberView) -> bool:
        if member.state == "revoked":
            return False
        if word == MINE:
            return member.user_key == self._membership.credentials.user_key
        return word == TRUSTED and (member.user in self._trusted or member.nick in self._trusted)


class JobLookup:
    """Finds jobs, and reads what this node and others keep of them."""

    def __init__(
        self,
        me: NodeId,
        membership: MembershipNode,
        journal: Journal,
        store: Store,
        jobs: JobService,
        peers: PeerClient,
    ) -> None:
        self.me = me
        self._membership, self._journal, self._store = membership, journal, store
        self._jobs, self._peers = jobs, peers

    @property
    def user(self) -> str:
        """The user of this node."""
        return self._membership.credentials.user

    def statuses(self) -> dict[bytes, JobStatus]:
        return self._jobs.job_table.all()

    # --- by name

    async def load(self, text: str) -> None:
        """Bring the named job into the job table: from the archive, or by waiting for gossip about a job submitted just now.

        Gossip is awaited only for a whole id; of an array, until all its jobs are known.
        """
        try:
            found = self.find_jobs(text)
        except MeshError:
            found = []
        if not found or (found[0].name != text and format_job(found[0].job) != text.lower()):
            await self._jobs.archive.find(text, whole=bool(found))
        deadline = time.monotonic() + HEARD_WITHIN_S
        while len(text) == JOB_ID_LENGTH and time.monotonic() < deadline:
            with suppress(MeshError):
                first, *others = self.find_jobs(text)
                old = time.time() - first.created_unix_ms / 1000 > NEW_S
                array = first.array
                if array is None or old or 1 + len(others) == array.of or format_job(array.array) != text.lower():
                    return
            await asyncio.sleep(HEARD_WITHIN_S / 40)

    def find_job(self, text: str) -> JobStatus:
        """Return the job with this id, name, prefix of either, or one index of an array; MeshError if none or several match."""
        matches = self.find_jobs(text)
        if len(matches) > 1 and matches[0].array is not None:
            name = format_job(matches[0].array.array)[:8]
            labels = [status.array.label for status in matches if status.array is not None]
            many = len(labels) > MOST_LABELS
            listed = f"{labels[0]} to {labels[-1]} (`mesh ps {name}`)" if many else ", ".join(labels)
            words = f"{text!r} is an array of {len(matches)} jobs, {listed}: name one of them, as {name}_{labels[0]}"
            raise MeshError(words, ExitCode.USAGE)
        return matches[0]

    def find_jobs(self, text: str) -> list[JobStatus]:
        """Return one job, or all jobs of one array, or those with some indices: ARRAY_7, ARRAY_16-30, by its id or its full name.

        A full id beats a full name, that beats the beginning of an id, and that the beginning of a name. Of jobs with the same
        name it is the newest of this user's own that has not ended, else their newest, else that of the others.
        """
        statuses = self.statuses().values()
        array_name, _, index = text.rpartition("_")
        wanted, index = (array_name.lower(), index) if array_name else (text.lower(), "")
        groups: dict[bytes, list[JobStatus]] = {}
        for status in statuses:
            if wanted and format_job(status.job).startswith(text.lower()):
                groups[status.job] = [status]
            array = status.array
            if array is None or not wanted or (index and not array.has(index)):
                continue
            if format_job(array.array).startswith(wanted):
                groups.setdefault(array.array, []).append(status)
        whole = len(wanted) == JOB_ID_LENGTH and bool(groups)
        names = {status.name for status in statuses if status.name}
        if not whole and (text in names or not groups):
            own = {status.name for status in statuses if status.name and status.user == self.user}
            groups = self._newest([status for status in statuses if text not in names and status.name == array_name])
            groups = {
                key: [one for one in group if one.array and one.array.has(index)] for key, group in groups.items()
            }
            if not any(groups.values()):
                name = job_name_meant(text, names, own)
                groups = self._newest([status for status in statuses if name is not None and status.name == name])
        if len(groups) > 1:
            going = {key: group for key, group in groups.items() if any(status.outcome is None for status in group)}
            groups = going or groups
        if not groups:
            raise MeshError(f"no job {text!r} is known here: `mesh ps -a` lists them", ExitCode.NOT_FOUND)
        if len(groups) > 1:
            ids = ", ".join(format_job(key)[:8] for key in groups)
            raise MeshError(f"{text!r} is ambiguous: {ids}: give more of the id", ExitCode.USAGE)
        [found] = groups.values()
        return sorted(found, key=lambda status: status.array.place if status.array is not None else 0)

    def _newest(self, named: list[JobStatus]) -> dict[bytes, list[JobStatus]]:
        """Return the job that is meant of those with the same name, with the other jobs of its array."""
        if not named:
            return {}
        meant = min(named, key=lambda s: (s.user != self.user, s.outcome is not None, -s.created_unix_ms))
        array = meant.array
        return {
            meant.job: [meant]
            if array is None
            else [status for status in named if status.array is not None and status.array.array == array.array]
        }

    async def find_own(self, text: str) -> JobStatus:
        """Return the named job; MeshError if it is another user's."""
        status = self.find_job(text)
        await self.check_owner(status)
        return status

    async def check_owner(self, status: JobStatus) -> None:
        """Check that the job belongs to this node's user; MeshError if not.

        Its description says so: any member can publish a status that names another user.
        """
        spec = await self.spec_of(status)
        if not is_user(self._membership.credentials, spec.user_key):
            raise MeshError(f"job {format_job(status.job)[:8]} is {spec.user}'s, not yours", ExitCode.REFUSED)

    # --- what its witnesses keep

    async def sealed_spec(self, job: bytes) -> bytes | None:
        """Return the signed description that this node holds as a witness or submitter."""
        witness = self._jobs.participant.witnesses.get(job)
        return witness.witness_record.spec if witness is not None else await self._journal.submitted(job)

    async def spec_of(self, status: JobStatus) -> JobSpec:
        """Return the job's description, signed by a node of its user, from this node or another; MeshError if none gives it."""
        job, authority = status.job, self._jobs.authority
        sealed = await self.sealed_spec(job)
        if sealed is not None:
            try:
                return authority.read_members_spec(job, sealed)
            except SpecError as error:
                raise MeshError(f"this node has a damaged job description: {error}") from error
        spec = await self._jobs.vouching.describe(job)
        for node in status.witnesses if spec is None else ():  # it asks only some
            if node != self.me:
                with suppress(PeerError, SpecError):
                    return authority.read_members_spec(
                        job, await self._peers.call(node, "GET", f"/v1/jobs/{job.hex()}/spec")
                    )
        if spec is None:
            raise MeshError("none of the job's witnesses can be reached now; try again in a moment")
        return spec

    async def runner_of(self, job: bytes) -> NodeId | None:
        """Return the node that runs a job, as most of its witnesses say: any member can publish that it does."""
        if job in self._jobs.participant.runners:
            return self.me
        views = self._jobs.job_table.views_of(job)
        if not any(view.runner is not None and view.outcome is None for view in views):
            return None
        return await self._jobs.vouching.runner_of(job)

    def seen_by(self, runner: NodeId, status: JobStatus) -> JobStatus:
        """Return what a job's runner and its witnesses say of it, if they do: any member can publish another status."""
        views = self._jobs.job_table.views_by_node(status.job)
        own = views.get(OWN if runner == self.me else runner)
        able = {OWN, runner, *own.witnesses} if own is not None else set[bytes]()
        return best_of([view for node, view in views.items() if node in able] or [status])

    def own_record(self, job: bytes) -> WitnessRecord | None:
        """Return this node's witness record of the job."""
        witness = self._jobs.participant.witnesses.get(job)
        return witness.witness_record if witness is not None else None

    async def record_of(self, node: NodeId, job: bytes, timeout_s: float = CALL_TIMEOUT_S) -> WitnessRecord | None:
        """Return another node's witness record of the job; None if it has none or does not answer."""
        with suppress(PeerError, *MALFORMED):
            path = f"/v1/jobs/{job.hex()}/witness-record"
            record = decode_witness_record(await self._peers.call(node, "GET", path, timeout_s=timeout_s))
            return record if record.job == job else None
        return None

    async def attempts(self, status: JobStatus) -> tuple[Attempt, ...]:
        """Return all attempts that are known: a status carries only the last ones."""
        return await self.all_attempts(status) if status.attempts and status.attempts[0].number else status.attempts

    async def all_attempts(self, status: JobStatus) -> tuple[Attempt, ...]:
        """Return the attempts in the witness record of this node or of the first witness that answers."""
        found = self.own_record(status.job)
        for node in status.witnesses:
            if found is None:
                found = await self.record_of(node, status.job, EVENTS_WITHIN_S)
        return found.record.attempts if found is not None and found.record.attempts else status.attempts

    async def events_of(self, status: JobStatus, own: Sequence[tuple[int, bytes]] | None = None) -> list[Telling]:
        """Return (actor, event, whether an event before it is missing) from this node, the runner and the witnesses."""
        own = await self._journal.events(status.job, 0) if own is None else own
        asked = [node for node in dict.fromkeys([status.runner, *status.witnesses]) if node not in {None, self.me}]
        tellings = await asyncio.gather(*(self._events_from(node, status.job) for node in asked))
        copies = [[sealed for _, sealed in own], *tellings]
        return await asyncio.to_thread(self._jobs.event_log.merge, status.job, copies)

    async def _events_from(self, node: NodeId, job: bytes) -> list[bytes]:
        try:
            body = await self._peers.call(node, "GET", f"/v1/jobs/{job.hex()}/events", timeout_s=EVENTS_WITHIN_S)
            return _events_decoder.decode(body)
        except (PeerError, *MALFORMED):
            return []

    # --- its files

    async def results(self, status: JobStatus) -> tuple[bytes, tuple[bytes, ...]]:
        """Return the manifest of what a finished job has published, with its holders; MeshError if its witnesses name none.

        Programs trust it (Python's results are unpickled), and any member can publish a status.
        """
        name = format_job(status.job)[:8]
        if status.outcome is None or status.outcome.manifest is None:
            raise MeshError(f"job {name} is {status.state}: it has no results to pull yet", ExitCode.NOT_FOUND)
        outcome = one_stated(await self._jobs.vouching.words(status.job))
        if outcome is None or outcome.manifest is None:
            raise MeshError(f"the witnesses of job {name} that can be asked name no results: try again in a moment")
        return outcome.manifest, outcome.holders

    async def fetch(self, status: JobStatus, manifest: bytes, holders: tuple[bytes, ...]) -> StateCipher | None:
        """Bring a checkpoint or result of the job into this node's store, and return its key (None if not encrypted)."""
        ran = [attempt.node for attempt in status.attempts]
        others = replica_order(status.job, self._jobs.mesh_view.adverts(), {self.me}, 0)
        sources = [node for node in dict.fromkeys([*holders, *reversed(ran), *others]) if node != self.me]
        try:
            await self._jobs.replicator.fetch(manifest, sources, Expected.of(status.job, await self.spec_of(status)))
        except FetchError as error:
            raise MeshError(f"its files cannot be reached now: {error}") from error
        return await self.cipher_of(status, manifest)

    async def restore(
        self,
        status: JobStatus,
        manifest: bytes,
        holders: tuple[bytes, ...],
        prefix: str,
        target: Path,
        *,
        part: int = 1,
        most: int = MAX_FILES,
    ) -> RestoreReport:
        """Write the files of a checkpoint or result below `prefix` to a new directory; MeshError if that is impossible now.

        Its code is that of wrong usage if `target` cannot be written. The files take at most one `part`-th of what is free on the
        disk, and are at most so many.
        """
        fetch = partial(self.fetch, status, manifest, holders)
        cipher = await fetch()

        def write() -> RestoreReport:
            room = free_bytes(target) // part
            return self._store.restore(manifest, target, prefix=prefix, cipher=cipher, limit_bytes=room, most=most)

        try:
            return await self._jobs.replicator.mended(manifest, fetch, write)
        except (StoreError, OSError) as error:
            wrong = isinstance(error, ReadOnlyStore) or getattr(error, "errno", None) in NO_DIRECTORY
            code = ExitCode.USAGE if wrong else ExitCode.ERROR
            why = error.strerror if isinstance(error, OSError) else error
            raise MeshError(f"the files could not be written to {target}: {why}", code) from error

    async def cipher_of(self, status: JobStatus, manifest: bytes) -> StateCipher | None:
        """Return the key to a manifest in this node's store; None if its job is not encrypted.

        MeshError if the manifest is not of this job, with this job's key: any member can publish a status that names another.
        """
        try:
            kept, spec = await asyncio.to_thread(self._store.manifest, manifest), await self.spec_of(status)
            if (kept.job, kept.realm) != (status.job, b"" if spec.lock is None else spec.lock.realm):
                raise MeshError("what the job's status names are no files of this job")
            return await self._jobs.keyring.cipher(status.job, spec, status.witnesses)
        except (NoKey, StoreError) as error:
            raise MeshError(str(error)) from error


async def require_free(target: Path) -> None:
    """Check that files can be written to `target`; MeshError if something is there already."""

    def is_taken() -> bool:
        return target.exists() and (not target.is_dir() or any(target.iterdir()))

    try:
        taken = await asyncio.to_thread(is_taken)
    except OSError as error:
        raise MeshError(f"{target} cannot be a directory: {error.strerror}", ExitCode.USAGE) from error
    if taken:
        raise MeshError(f"{target} exists and is not empty: name a new directory", ExitCode.USAGE)


def free_bytes(target: Path) -> int:
    """Return the free space of the disk that is to hold `target`, which may not exist yet."""
    return shutil.disk_usage(next(place for place in (target, *target.parents) if place.exists())).free

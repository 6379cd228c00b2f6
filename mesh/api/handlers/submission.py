"""Submit jobs, and deliver their output to `submit --out DIR` when they are done."""

import asyncio
import logging
import os
import re
import time
from collections.abc import Awaitable, Callable
from math import inf
from pathlib import Path, PurePath
from typing import Any

import msgspec

from ckptstore.cipher import StateCipher
from ckptstore.errors import StoreError
from ckptstore.store import Store
from membership.envelope import seal
from membership.identity import Identity
from membership.node import MembershipNode
from membership.trust import USER, TrustStore
from mesh.api import schemas
from mesh.api.handlers.data import DataHandlers
from mesh.api.handlers.images import ImageHandlers
from mesh.api.handlers.lookup import JobLookup, NodeLookup, find_node, require_free
from mesh.api.handlers.secrets import SecretHandlers
from mesh.api.requests import ANY_END, SubmitOrder
from mesh.checkpoints.key_shares import seal_shares
from mesh.checkpoints.replica_policy import NEED_MIB
from mesh.consensus.proposer import WANT_WITNESSES
from mesh.execution.control_files import read_file
from mesh.jobs.awaited_ends import stated_outcome
from mesh.jobs.service import JobService
from mesh.jobs.submission_retry import SubmissionRetry
from mesh.jobs.workdir import ALWAYS_IGNORED, collect_files
from mesh.journal import DeliveryKind, Journal
from mesh.model.destinations import DestinationError, destinations
from mesh.model.environment import (
    MOST_LOCK_BYTES,
    ONE_ENVIRONMENT,
    CondaList,
    EnvironmentRefused,
    UvProject,
    conda_packages_of,
    has_metadata,
)
from mesh.model.record import Outcome, Voter
from mesh.model.spec import (
    JOB_ID_BYTES,
    MAX_ARRAY,
    NO_JOB,
    ArrayPlace,
    Checkpointing,
    HomePolicy,
    JobSpec,
    check_spec,
    format_job,
    placement_request,
)
from mesh.util.backoff import Backoff
from mesh.util.errors import ExitCode, MeshError
from mesh.util.task_set import TaskSet
from placement.decision import cannot_ever, replica_order, witness_order

WORKDIR_REPLICAS = 2
NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,62}[A-Za-z0-9_])?")  # of a job
LEAST_MEMORY_MIB = 6  # Docker's least
SUBMITTED_AT_ONCE = 32  # jobs of one array
LOOK_S = 1.0
DELIVERED_AT_ONCE = 4  # own choice
AGAIN_S, AGAIN_MAX_S = 2.0, 2 * 3600.0  # after a failed delivery of a job (own choice)
ASKED_MAX_S = 300.0  # after the job's witnesses have stated no end: any member can publish one (own choice)
TOLD_AT = 5  # failed deliveries until they are reported: half a minute, in which a new daemon finds the holders
GIVEN_UP_AT = 12  # failed deliveries of files that nodes need not keep any more: an hour (own choice)
MOST_LOST = 100  # deliveries given up that are remembered for `mesh wait` (own choice)

log = logging.getLogger(__name__)


class Defaults(msgspec.Struct, frozen=True):
    """Settings of this node that a submitted job takes over; `settle_s`: None for the default of a spec."""

    encrypt: bool
    grace_s: float
    lease_s: float
    settle_s: float | None = None


class Delivery:
    """Brings the results of finished jobs where they were asked for, also after a restart.

    `bring` takes a job, the target and the outcome, and returns what it has done in words, empty if nothing; `done` is the event
    of that. Nodes keep the files for `keep_s` after the job's end.

    A status that says that a job is over only hints at that, since any member can publish one. What most of the job's witnesses
    state counts.
    """

    def __init__(
        self,
        kind: DeliveryKind,
        journal: Journal,
        jobs: JobService,
        bring: Callable[[bytes, str, Outcome], Awaitable[str]],
        done: str,
        keep_s: float = inf,
    ) -> None:
        self.kind, self._done = kind, done
        self._journal, self._jobs, self._bring, self._keep_s = journal, jobs, bring, keep_s
        self._wanted: dict[bytes, str] = {}
        self._again = Backoff[bytes](AGAIN_S, AGAIN_MAX_S)
        self._asked = Backoff[bytes](AGAIN_S, ASKED_MAX_S)  # without an answer
        self._delivering: dict[bytes, asyncio.Task[None]] = {}
        self._problems: dict[bytes, str] = {}
        self._lost: dict[bytes, schemas.jobs.Delivery] = {}  # the last ones that were given up

    async def want(self, job: bytes, target: str) -> None:
        self._wanted[job] = target
        await self._journal.request_delivery(self.kind, job, target)

    def rows(self) -> list[schemas.jobs.Delivery]:
        """Return the deliveries that are not done, and the last ones that were given up."""
        return [*self._lost.values(), *(self._row(job, target, False) for job, target in self._wanted.items())]

    def _row(self, job: bytes, target: str, over: bool) -> schemas.jobs.Delivery:
        problem, output = self._problems.get(job, ""), self.kind == "output"
        return schemas.jobs.Delivery(
            job=format_job(job),
            directory=target if output else "",
            caches=[] if output else target.split(","),
            problem=problem,
            over=over,
        )

    async def run(self) -> None:
        self._wanted |= await self._journal.requested_deliveries(self.kind)
        try:
            while True:
                await asyncio.sleep(LOOK_S)
                self._look()
        finally:
            for task in self._delivering.values():
                task.cancel()
            await asyncio.gather(*self._delivering.values(), return_exceptions=True)
            self._delivering.clear()

    def _look(self) -> None:
        """Begin the deliveries that are due: first those that have failed least often, of them those of the newest jobs."""
        for job, task in list(self._delivering.items()):
            if task.done():
                del self._delivering[job]
                task.result()  # the journal may be unable to write
        found = [(job, self._jobs.job_table.get(job)) for job in self._wanted if job not in self._delivering]
        ended = {job: status.outcome for job, status in found if status is not None and status.outcome is not None}
        now = time.monotonic()
        due = [job for job in ended if self._again.is_due(job, now) and self._asked.is_due(job, now)]
        due.sort(key=lambda job: (self._again.failures(job) + self._asked.failures(job), -ended[job].ended_unix_ms))
        for job in due[: DELIVERED_AT_ONCE - len(self._delivering)]:
            work = self._deliver(job, self._wanted[job])
            self._delivering[job] = asyncio.create_task(work, name=f"deliver {self.kind} of {format_job(job)[:8]}")

    async def _deliver(self, job: bytes, target: str) -> None:
        event_log, outcome = self._jobs.event_log, None
        try:
            outcome = stated_outcome(await self._jobs.vouching.words(job))
            if outcome is None:
                raise MeshError("most of the job's witnesses do not say how it ended, or cannot be asked")
            if words := await self._bring(job, target, outcome):
                event_log.add(job, "state", words, new=self._done)
        except Exception as error:  # an error of one delivery must not end the daemon
            rests, words = self._asked if outcome is None else self._again, str(error)
            failed = rests.failed(job, time.monotonic())
            given_up = isinstance(error, MeshError) and error.code == ExitCode.USAGE
            ago_s = 0.0 if outcome is None else time.time() - outcome.ended_unix_ms / 1000
            if failed >= GIVEN_UP_AT and ago_s > self._keep_s:
                given_up = True
                words = f"{words}; nodes keep files for {self._keep_s / 86_400:g} days after a job's end"
            self._problems[job] = words
            if given_up or failed == TOLD_AT:
                name, trace = format_job(job)[:8], None if isinstance(error, MeshError) else error
                log.warning("job %s: its %s %s is not delivered: %s", name, self.kind, target, words, exc_info=trace)
                event_log.add(job, "state", words, new=f"not {self._done}" if given_up else f"not {self._done} yet")
            if not given_up:
                return
            self._lost = dict([*self._lost.items(), (job, self._row(job, target, True))][-MOST_LOST:])
        self._wanted.pop(job, None)
        self._again.forget(job)
        self._asked.forget(job)
        self._problems.pop(job, None)
        await self._journal.request_delivery(self.kind, job, "")


class SubmissionHandlers:
    def __init__(
        self,
        identity: Identity,
        trust: TrustStore,
        membership: MembershipNode,
        journal: Journal,
        store: Store,
        jobs: JobService,
        submissions: SubmissionRetry,
        images: ImageHandlers,
        secrets: SecretHandlers,
        outputs: Delivery,
        caches: Delivery,
        lookup: JobLookup,
        nodes: NodeLookup,
        defaults: Defaults,
        data: DataHandlers,
    ) -> None:
        self._data = data
        self._identity, self._trust, self._membership = identity, trust, membership
        self._journal, self._store, self._jobs = journal, store, jobs
        self._submissions, self._images, self._outputs, self._caches = submissions, images, outputs, caches
        self._secrets = secrets
        self._lookup, self._nodes, self._defaults = lookup, nodes, defaults
        self._tasks = TaskSet(log)

    async def submit(self, order: SubmitOrder) -> schemas.jobs.Submitted:
        if USER not in self._membership.credentials.roles:
            raise MeshError("this node may lend, but not submit: its certificate says so", ExitCode.REFUSED)
        _check_order(order)
        chosen = tuple(find_node(self._membership, name).node_id for name in order.ckpt_to)
        for name in order.after:
            await self._lookup.load(name.removeprefix(ANY_END))
        members = [m for m in self._membership.members() if m.state == "alive" and not m.draining]
        alive = [member.node_id for member in members]
        needs, command = await self._data.needs(order.data, order.caches), await asyncio.to_thread(_command, order)
        drawn = [(self._spec(order, command, chosen, alive), place) for place in _places(order)]
        specs = [msgspec.structs.replace(spec, array=place, data=needs) for spec, place in drawn]
        specs = await self._secrets.sealed(specs, order, await self._data.keys(needs))
        for spec in specs:
            check_spec(spec)
        if order.out is not None:
            await require_free(Path(order.out))
        self._refuse_impossible(specs[0])
        size, cipher = 0, None
        if self._defaults.encrypt:
            cipher = await self._jobs.keyring.create()
            specs = await asyncio.to_thread(_with_lock, specs, cipher)
        if order.workdir is not None:
            workdir, holders, size = await self._pack_workdir(order.workdir, specs[0].checkpointing, cipher)
            specs = [msgspec.structs.replace(spec, workdir=workdir, workdir_holders=holders) for spec in specs]
        # A witness may have the job from here on: it is handed over to the end, even if the client stops waiting.
        handed = await asyncio.shield(self._tasks.start(self._hand_over(specs, order.out), "submit"))
        jobs, late = [job for job, _ in handed], [words for _, words in handed if words]
        few = "" if len(specs[0].witnesses) >= WANT_WITNESSES else _few_witnesses(len(alive))
        array = specs[0].array
        return schemas.jobs.Submitted(
            job=format_job(jobs[0] if array is None else array.array),
            jobs=[format_job(job) for job in jobs],
            workdir_bytes=size,
            witnesses=len(specs[0].witnesses),
            warning=late[0] if late else few,
        )

    def deliveries(self) -> schemas.jobs.Deliveries:
        return schemas.jobs.Deliveries(deliveries=[*self._outputs.rows(), *self._caches.rows()])

    def _spec(
        self, order: SubmitOrder, command: dict[str, Any], chosen: tuple[bytes, ...], alive: list[bytes]
    ) -> JobSpec:
        done = [name for name in order.after if not name.startswith(ANY_END)]
        over = [name.removeprefix(ANY_END) for name in order.after if name.startswith(ANY_END)]
        return JobSpec(
            submitter=self._lookup.me,
            chain=self._membership.chain,
            user=self._lookup.user,
            user_key=self._membership.credentials.user_key,
            created_unix_ms=time.time_ns() // 1_000_000,
            nonce=os.urandom(16),
            **command,
            witnesses=self._choose_witnesses(alive),
            name=order.name,
            env=order.env,
            image=order.image,
            image_id=self._images.pin(order.image, order.engine),
            engine=order.engine,
            **order.gpu_terms(),
            memory_mib=order.memory_mib,
            cpus=order.cpus,
            zone=order.zone,
            on=tuple(self._nodes.named(order.on)),
            not_on=tuple(self._nodes.named(order.not_on)),
            interactive=order.interactive,
            least_nodes=order.least_nodes,
            most_nodes=order.most_nodes,
            checkpointing=_checkpointing(order, chosen),
            grace_s=self._defaults.grace_s if order.grace_s is None else order.grace_s,
            lease_s=self._defaults.lease_s,
            error_budget=order.retries,
            retry_codes=tuple(order.retry_on),
            on_exit_0="done" if order.ckpt_mode == "system" else order.on_exit_0,
            on_partition=order.on_partition,
            max_time_s=order.max_time_s,
            deadline_unix_ms=None if order.deadline_unix is None else int(order.deadline_unix * 1000),
            priority=order.priority,
            after=tuple(job for name in done for job in self._dependencies(name)),
            after_any=tuple(status.job for name in over for status in self._lookup.find_jobs(name)),
            home=self._home_policy(order.home),
            network=_network(order.network),
        )

    def _home_policy(self, home: str | None) -> HomePolicy:
        """Return what `--home` asks for; MeshError if it names no node."""
        policy = HomePolicy() if self._defaults.settle_s is None else HomePolicy(settle_s=self._defaults.settle_s)
        match home:
            case None:
                return policy
            case "first" | "none":
                return msgspec.structs.replace(policy, rule=home)
        return msgspec.structs.replace(policy, rule="node", node=find_node(self._membership, home).node_id)

    async def _hand_over(self, specs: list[JobSpec], out: str | None) -> list[tuple[bytes, str]]:
        """Give jobs to their witnesses; return their ids, each with a warning if they do not have it yet."""
        turns = asyncio.Semaphore(SUBMITTED_AT_ONCE)

        async def submit(spec: JobSpec) -> tuple[bytes, str]:
            async with turns:
                return await self._submissions.submit(spec)

        handed = await asyncio.gather(*map(submit, specs))
        if names := ",".join(need.last for need in specs[0].data if need.cache):
            for job, _ in handed:
                await self._caches.want(job, names)
        if out is not None:
            for (job, _), spec in zip(handed, specs, strict=True):
                await self._outputs.want(job, out if spec.array is None else str(Path(out) / spec.array.label))
        return handed

    def _dependencies(self, name: str) -> list[bytes]:
        found = self._lookup.find_jobs(name)
        for status in found:
            if status.outcome is not None and status.outcome.kind != "done":
                raise MeshError(f"job {format_job(status.job)[:8]} has ended already, and not well: {status.state}")
        return [status.job for status in found]

    def _refuse_impossible(self, spec: JobSpec) -> None:
        adverts = self._jobs.mesh_view.adverts()
        for need in spec.data:
            if not need.manifest and not need.cache and not any(need.name in advert.data_paths for advert in adverts):
                words = f"there is no data set {need.name}: `mesh data ls` lists them, `mesh data add` makes one"
                raise MeshError(words, ExitCode.NOT_FOUND)
        if reason := cannot_ever(placement_request(b"", spec, 0), adverts):
            raise MeshError(reason, ExitCode.IMPOSSIBLE)

    def _choose_witnesses(self, alive: list[bytes]) -> tuple[Voter, ...]:
        """Return this node and two others, or this node alone if there are fewer than three."""
        me, disks = self._lookup.me, self._jobs.mesh_view.disks()
        ranked = witness_order(os.urandom(8), self._jobs.mesh_view.adverts(), alive)
        others = [Voter(node, disks[node]) for node in ranked if node != me and node in disks]
        chosen = others[: WANT_WITNESSES - 1] if len(others) >= WANT_WITNESSES - 1 else []
        return (Voter(me, self._journal.disk), *chosen)

    async def _pack_workdir(
        self, directory: str, checkpointing: Checkpointing | None, cipher: StateCipher | None
    ) -> tuple[bytes, tuple[bytes, ...], int]:
        """Store the user's files and copy them to peers; return the manifest, its holders and its size in bytes."""
        leave = (checkpointing.directory,) if checkpointing is not None and checkpointing.mode != "system" else ()
        files = await asyncio.to_thread(collect_files, Path(directory), leave)
        try:
            saved = await asyncio.to_thread(
                self._store.save,
                files,
                job=NO_JOB,
                config=0,
                term=0,
                seq=0,
                parent=None,
                kind="workdir",
                created_unix=int(time.time()),
                seal=lambda payload: seal(self._identity, self._trust.mesh_id, "manifest", payload),
                cipher=cipher,
                user=self._lookup.user,
                whole=False,
            )
        except StoreError as error:
            raise MeshError(f"the working directory could not be packed: {error}") from error
        order_of_peers = replica_order(
            saved.id[:16], self._jobs.mesh_view.adverts(), {self._lookup.me}, NEED_MIB, {self._lookup.me}
        )
        copies = await self._jobs.replicator.replicate(saved.id, [], order_of_peers, WORKDIR_REPLICAS)
        return saved.id, (self._lookup.me, *copies.holders), saved.manifest.total_bytes


def _check_order(order: SubmitOrder) -> None:
    """Check what new jobs are held to, and those of before are not; MeshError if it cannot be."""
    if order.name and NAME.fullmatch(order.name) is None:
        words = "letters, digits and _, with . and - between them"
        raise MeshError(f"{order.name[:80]!r} cannot be a job's name: up to 64 {words}", ExitCode.USAGE)
    if order.memory_mib is not None and order.memory_mib < LEAST_MEMORY_MIB:
        words = f"a job needs {LEAST_MEMORY_MIB} MiB of memory at least (--memory), and most need far more"
        raise MeshError(words, ExitCode.USAGE)
    if order.retries < 0:
        raise MeshError(f"retries is a number from 0, not {order.retries}", ExitCode.USAGE)
    if order.retry_on and not order.retries:
        raise MeshError("--retry-on chooses among retries, and there are none: add --retries N", ExitCode.USAGE)
    if order.ckpt is None and order.ckpt_mode in {"rename", "marker"}:
        raise MeshError(f"--ckpt-mode {order.ckpt_mode} is about a directory: add --ckpt DIR", ExitCode.USAGE)
    program = PurePath(*order.argv[:1])
    left_out = [part for part in program.parts if part in ALWAYS_IGNORED]
    if order.workdir is not None and left_out and not program.is_absolute():
        words = f"{program} is not there on a node: `{left_out[0]}` is never copied"
        raise MeshError(f"{words}. Use --uv, or a program of the node, as python3", ExitCode.USAGE)


def _network(names: list[str]) -> tuple[str, ...]:
    try:
        return destinations(names)
    except DestinationError as error:
        raise MeshError(f"--network: {error}", ExitCode.USAGE) from error


def _command(order: SubmitOrder) -> dict[str, Any]:
    """Return the command, and its environment; MeshError without what describes that."""
    if not order.uv and not order.conda:
        return {"argv": tuple(order.argv)}
    if order.uv and order.conda:
        raise MeshError(ONE_ENVIRONMENT, ExitCode.USAGE)
    if order.workdir is None:
        option = "--uv" if order.uv else "--conda"
        raise MeshError(f"{option} reads files of the working directory: leave out --no-workdir", ExitCode.USAGE)
    here, runs_itself = Path(order.workdir), any(word.endswith(".py") for word in order.argv[:1])
    argv = (*(("python",) if runs_itself else ()), *order.argv)
    if order.conda:
        return {"argv": argv, "conda": _conda(here, order.conda)}
    script = next((word.removeprefix("./") for word in order.argv if word.endswith(".py")), "")
    described = bool(script) and not script.startswith("/") and _describes(here / script)
    project = UvProject(script if described else "")
    for name in (project.source, project.lock):
        if not (here / name).is_file():
            hint = "or a script with inline metadata (PEP 723)" if name == "pyproject.toml" else "makes it"
            command = "uv init" if name == "pyproject.toml" else project.lock_command
            raise MeshError(f"--uv: {here} has no {name}: `{command}` {hint}", ExitCode.USAGE)
    return {"argv": argv, "uv": project}


def _conda(here: Path, name: str) -> CondaList:
    try:
        conda_packages_of(read_file(here / name, MOST_LOCK_BYTES).decode())
    except OSError as error:
        raise MeshError(f"--conda: cannot read {here / name}: {error.strerror or error}", ExitCode.USAGE) from error
    except (UnicodeDecodeError, EnvironmentRefused) as error:
        raise MeshError(f"--conda: {name}: {error}", ExitCode.USAGE) from error
    return CondaList(name)


def _describes(script: Path) -> bool:
    try:
        with script.open("rb") as file:
            return has_metadata(file.read(MOST_LOCK_BYTES).decode())
    except (OSError, UnicodeDecodeError):
        return False


def _places(order: SubmitOrder) -> list[ArrayPlace | None]:
    """Return the array place of each job that the order makes; a single None if it makes one job."""
    indices, batch = order.array, order.array_batch
    if not indices:
        if order.array_limit or batch > 1:
            raise MeshError("a limit and a batch belong to an array", ExitCode.USAGE)
        return [None]
    if len(set(indices)) != len(indices):
        raise MeshError("each index of an array comes once", ExitCode.USAGE)
    if batch > 1 and indices != list(range(indices[0], indices[0] + len(indices))):
        raise MeshError("a batch needs indices without gaps, as 1-100", ExitCode.USAGE)
    firsts = indices[::batch]
    if len(firsts) > MAX_ARRAY:
        more = f"--batch {-(-len(indices) // MAX_ARRAY)} makes larger jobs"
        raise MeshError(f"an array has 1 to {MAX_ARRAY} jobs, not {len(firsts)}: {more}", ExitCode.USAGE)
    array, of, count = os.urandom(JOB_ID_BYTES), len(firsts), len(indices) if batch > 1 else 0
    return [
        ArrayPlace(array, first, place, of, order.array_limit, min(batch, len(indices) - place * batch), count)
        for place, first in enumerate(firsts)
    ]


def _with_lock(specs: list[JobSpec], cipher: StateCipher) -> list[JobSpec]:
    locks = [seal_shares(cipher, [voter.node for voter in spec.witnesses], spec.author) for spec in specs]
    return [msgspec.structs.replace(spec, lock=lock) for spec, lock in zip(specs, locks, strict=True)]


def _few_witnesses(alive: int) -> str:
    here = "this node is alone" if alive <= 1 else f"only {alive} nodes are here"
    return f"{here}, so one witness keeps the job's record: if its disk is lost, so is the record"


def _checkpointing(order: SubmitOrder, chosen: tuple[bytes, ...]) -> Checkpointing | None:
    """Return how the job saves, None without checkpoints; `chosen`: the nodes that hold them."""
    if order.ckpt_mode == "system":
        if order.ckpt is not None:
            words = "--ckpt-mode system saves the whole container, whatever it writes: leave out --ckpt"
            raise MeshError(words, ExitCode.USAGE)
        every = "auto" if order.ckpt_every is None else order.ckpt_every
        return Checkpointing(mode="system", every=every, replicas=order.replicas, to=chosen)
    if order.ckpt is None:
        if chosen or order.ckpt_every is not None:
            raise MeshError("--ckpt-to and --ckpt-every need --ckpt DIR: which holds checkpoints?", ExitCode.USAGE)
        return None
    return Checkpointing(
        directory=order.ckpt.rstrip("/").removeprefix("./"),
        mode=order.ckpt_mode,
        keep=order.keep,
        replicas=order.replicas,
        to=chosen,
        every=order.ckpt_every,
    )

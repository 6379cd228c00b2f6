"""What a user at this node can ask and order of jobs, in terms of the daemon's parts."""

import asyncio
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ckptstore.errors import StoreError
from ckptstore.vault import Vault
from membership.envelope import seal
from membership.identity import format_id, short_id
from membership.trust import USER
from mesh.api.errors import ExitCode, MeshError
from mesh.api.gpudesk import room
from mesh.api.migration import homing_of
from mesh.api.naming import job_name_meant
from mesh.api.orders import SubmitOrder
from mesh.api.peer import PeerError
from mesh.api.queries import JobsQuery
from mesh.api.saving import checkpointing_of
from mesh.jobs.authority import Authority
from mesh.jobs.courier import FetchError
from mesh.jobs.custody import NEED_MIB
from mesh.jobs.effects import Cell, decode_cell
from mesh.jobs.events import Event, words
from mesh.jobs.keyring import NoKey
from mesh.jobs.ledger import Attempt, Seat
from mesh.jobs.shares import locked
from mesh.jobs.spec import (
    JOB_ID_BYTES,
    JOB_ID_LENGTH,
    MAX_ARRAY,
    ArrayPlace,
    Checkpointing,
    JobSpec,
    SpecError,
    check_spec,
    format_job,
    placement_request,
)
from mesh.jobs.status import JobStatus
from mesh.jobs.steward import WANT_WITNESSES
from mesh.jobs.workdir import collect_files
from placement.decision import cannot_ever, replica_order, witness_order

if TYPE_CHECKING:
    from mesh.api import answers
    from mesh.daemon import Daemon

WORKDIR_REPLICAS = 2
EVENTS_WITHIN_S = 3.0
EVENTS_SHOWN = 20
HEARD_WITHIN_S = 2.0  # a gossip round, and a push-pull for what is too large for it
NEW_S = 30.0  # after which what is not known of an array has been forgotten; ours
SUBMITTED_AT_ONCE = 32  # jobs of one array
Telling = tuple[bytes, Event, bool]
_Around = tuple[dict[bytes, str], set[bytes], dict[bytes, bytes]]
# Of a description: what is told in other words, or is of no use to a person.
UNTOLD = {"submitter", "chain", "nonce", "witnesses", "workdir", "workdir_holders"}
UNTOLD |= {"checkpointing", "array", "after", "lock"}
LOCAL_LEASE_S = 4.0  # with the local gossip profile: failover in seconds


class JobDesk:
    def __init__(self, daemon: "Daemon") -> None:
        self._daemon = daemon

    def statuses(self) -> dict[bytes, JobStatus]:
        return self._daemon.jobs.board.all()

    def job_list(self, fits: str = "") -> "list[answers.jobs.Job]":
        """All jobs that are at hand, or those that `fits` names."""
        return self._rows(self.find_jobs(fits) if fits else self.statuses().values())

    async def jobs(self, asked: JobsQuery) -> "answers.jobs.Jobs":
        """Those that are asked for, also of what is put away."""
        past, statuses = self._daemon.jobs.past, self.find_jobs(asked.fits) if asked.fits else self.statuses().values()
        if asked.since_s is not None:
            since = int((time.time() - asked.since_s) * 1000)
            away = [] if asked.fits else await past.ended_since(since)
            recent = [status for status in statuses if status.outcome is None or status.outcome.ended_unix_ms >= since]
            statuses = {status.job: status for status in [*away, *recent]}.values()
        rows = self._rows(statuses if asked.over else [status for status in statuses if status.outcome is None])
        return {"jobs": rows, "put_away": past.count}

    def _rows(self, found: Iterable[JobStatus]) -> "list[answers.jobs.Job]":
        ordered = sorted(found, key=lambda status: (status.created_unix_ms, status.array.place if status.array else 0))
        around = self._around()
        return [self.show(status, around) for status in ordered]

    def _around(self) -> _Around:
        """Everybody's nick, who is there, and with which disk; looked up once for all jobs that are shown."""
        members = self._daemon.membership.members()
        nicks = {member.node_id: member.nick for member in members}
        return nicks, {member.node_id for member in members if member.present}, self._daemon.jobs.outlook.disks()

    def show(self, status: JobStatus, around: _Around | None = None) -> "answers.jobs.Job":
        nicks, present, disks = around or self._around()
        state, detail = status.state, status.detail if status.detail != status.state else ""
        seats = {
            seat
            for seat in status.config.everyone
            if seat.node in present and disks.get(seat.node, seat.disk) == seat.disk
        }
        if status.outcome is None and not status.config.quorum(seats):
            left = {seat.node for seat in seats}
            gone = [nicks.get(node, short_id(node)) for node in status.witnesses if node not in left]
            state, detail = "stranded", _stranded(gone, len(status.witnesses))

        def nick(node: bytes) -> str:
            return nicks.get(node, short_id(node))

        commit, outcome, due, saving = status.commit, status.outcome, status.next_checkpoint, status.saving
        return {
            "job": format_job(status.job),
            "name": status.name,
            "array": None
            if status.array is None
            else {"array": format_job(status.array.array), "index": status.array.index, "of": status.array.of},
            "priority": status.priority,
            "user": status.user,
            "submitter": nick(status.submitter),
            "command": status.command,
            "created_unix_ms": status.created_unix_ms,
            "state": state,
            "detail": detail,
            "node": None if status.runner is None else nick(status.runner),
            "mates": [nick for _, nick in status.attempts[-1].mates] if status.runner is not None else [],
            "heir": None if status.heir is None else nick(status.heir),
            "warm": status.warm,
            "gpus": status.gpus,
            "gpu_share": status.gpu_share,
            "gpu_share_limit": status.gpu_share_limit,
            "vram_mib": status.vram_mib,
            "vram_limit_mib": status.vram_limit_mib or status.vram_mib,
            "gpu_portions": [room(portion) for portion in status.portions],
            "witnesses": [nick(node) for node in status.witnesses],
            "step": status.step,
            "of": status.of,
            "at_risk_s": status.at_risk_s(time.time() * 1000),
            "heeds_notice": status.heeds_notice,
            "next_checkpoint": None
            if due is None
            else {"due_unix": due.due_unix, "interval_s": due.interval_s, "loss_s": due.loss_s, "why": due.why},
            "saving": None
            if saving is None
            else {
                "kind": saving.kind,
                "seq": saving.seq,
                "since_unix_ms": saving.since_unix_ms,
                "sent": saving.sent,
                "bytes": saving.size,
                "nodes": saving.nodes,
            },
            "checkpoint": None
            if commit is None
            else {
                "seq": commit.seq,
                "step": commit.step,
                "manifest": commit.manifest.hex(),
                "holders": [nick(node) for node in commit.holders],
                "created_unix_ms": commit.created_unix_ms,
            },
            "attempts": [
                {
                    "number": attempt.number,
                    "node": attempt.nick,
                    "term": attempt.term,
                    "started_unix_ms": attempt.started_unix_ms,
                    "running_unix_ms": attempt.running_unix_ms,
                    "ended_unix_ms": attempt.ended_unix_ms,
                    "seen_unix_ms": attempt.seen_unix_ms,
                    "reason": attempt.reason,
                    "exit_code": attempt.exit_code,
                    "resumed_step": attempt.resumed_step,
                    "last_step": attempt.last_step,
                }
                for attempt in status.attempts
            ],
            "outcome": None
            if outcome is None
            else {
                "kind": outcome.kind,
                "detail": outcome.detail,
                "exit_code": outcome.exit_code,
                "ended_unix_ms": outcome.ended_unix_ms,
            },
        }

    async def heard_of(self, text: str) -> None:
        """Have the job at hand that is named: if it is put away; or was submitted elsewhere a moment ago, and is named by its
        whole id, so that it is given the time to be heard of; all of an array."""
        try:
            found = self.find_jobs(text)
        except MeshError:
            found = []
        if not found or (found[0].name != text and found[0].name.startswith(text)):
            await self._daemon.jobs.past.find(text, whole=bool(found))
        deadline = time.monotonic() + HEARD_WITHIN_S
        while len(text) == JOB_ID_LENGTH and time.monotonic() < deadline:
            with suppress(MeshError):
                first, *others = self.find_jobs(text)
                old = time.time() - first.created_unix_ms / 1000 > NEW_S
                if first.array is None or old or 1 + len(others) == first.array.of:
                    return
            await asyncio.sleep(HEARD_WITHIN_S / 40)

    def find_job(self, text: str) -> JobStatus:
        """By id, name, the beginning of either, or ARRAY_INDEX; MeshError if none or several fit."""
        fits = self.find_jobs(text)
        if len(fits) > 1 and fits[0].array is not None:
            name = format_job(fits[0].array.array)[:8]
            raise MeshError(f"{text!r} is an array of {len(fits)} jobs: name one of them, as {name}_1", ExitCode.USAGE)
        return fits[0]

    def find_jobs(self, text: str) -> list[JobStatus]:
        """One job, or all of one array."""
        statuses = self.statuses()
        wanted, _, index = text.lower().partition("_")
        fits = [status for job, status in statuses.items() if wanted and format_job(job).startswith(text.lower())]
        arrays: dict[bytes, list[JobStatus]] = {}
        for status in statuses.values():
            array = status.array
            if array is None or index not in {"", str(array.index)}:
                continue
            if wanted and format_job(array.array).startswith(wanted):
                arrays.setdefault(array.array, []).append(status)
        if not fits and not arrays:
            name = job_name_meant(text, {status.name for status in statuses.values() if status.name})
            named = [status for status in statuses.values() if status.name and status.name == name]
            fits = sorted(named, key=lambda status: -status.created_unix_ms)[:1]
            if fits and fits[0].array is not None:
                arrays, fits = {b"": [s for s in named if s.array and s.array.array == fits[0].array.array]}, []
        found = [*([status] for status in fits), *arrays.values()]
        if not found:
            raise MeshError(f"no job {text!r} is known here: `mesh ps -a` lists them", ExitCode.NOT_FOUND)
        if len(found) > 1:
            ids = ", ".join(format_job(status.job)[:8] for status, *_ in found)
            raise MeshError(f"{text!r} is ambiguous: {ids}: give more of the id", ExitCode.USAGE)
        return sorted(found[0], key=lambda status: status.array.place if status.array is not None else 0)

    async def job_detail(self, text: str) -> "answers.jobs.OneJob":
        return {"job": self.show(self.find_job(text))}

    async def events(self, job: str | None, after: int, audit: bool = False) -> "list[answers.jobs.Event]":
        """What all who have a part in a job say of it; or, of no job, what this node has seen, after the event of that id;
        `audit`: of that what is about the node itself."""
        chronicle, status = self._daemon.jobs.chronicle, self.find_job(job) if job else None
        own = await self._daemon.journal.events(status.job if status is not None else b"" if audit else None, after)
        if status is None:
            found = [(number, *chronicle.open(sealed)) for number, sealed in own]
            return [{"id": number, **self._event(actor, event)} for number, actor, event in found]
        return [{"gap": gap, **self._event(actor, event)} for actor, event, gap in await self.told(status, own)]

    async def told(self, status: JobStatus, own: Sequence[tuple[int, bytes]] | None = None) -> list[Telling]:
        """What its runner, its witnesses and this node say of a job: who, what, and whether something before it is missing."""
        own = await self._daemon.journal.events(status.job, 0) if own is None else own
        asked = [
            node for node in dict.fromkeys([status.runner, *status.witnesses]) if node not in {None, self._daemon.me}
        ]
        tellings = await asyncio.gather(*(self._told_by(node, status.job) for node in asked))
        return self._daemon.jobs.chronicle.merge([[sealed for _, sealed in own], *tellings])

    async def _told_by(self, node: bytes, job: bytes) -> list[bytes]:
        """The events of a job that a node has kept; none if it does not answer."""
        try:
            body = await self._daemon.peers.call(node, "GET", f"/v1/jobs/{job.hex()}/events", timeout_s=EVENTS_WITHIN_S)
            return msgspec.msgpack.decode(body, type=list[bytes])
        except (PeerError, msgspec.MsgspecError, UnicodeDecodeError):
            return []

    def _event(self, actor: bytes, event: Event) -> "answers.jobs.Event":
        nicks = self._around()[0]
        target = nicks.get(event.target, short_id(event.target)) if event.target is not None else ""
        return {
            "unix_ms": event.unix_ms,
            "job": format_job(event.job) if event.job else None,
            "actor": nicks.get(actor, short_id(actor)),
            "node": format_id(actor),
            "seq": event.seq,
            "kind": event.kind,
            "attempt": event.attempt,
            "number": event.number,
            "step": event.step,
            "old": event.old,
            "new": event.new,
            "reason": event.reason,
            "target": target,
            "text": words(event, target),
        }

    # --- what it does

    async def submit(self, order: SubmitOrder) -> "answers.jobs.Submitted":
        if USER not in self._daemon.membership.standing.roles:
            raise MeshError("this node may lend, but not submit: its certificate says so", ExitCode.REFUSED)
        chosen = tuple(self._daemon.desk.find_node(name).node_id for name in order.ckpt_to)
        for name in order.after:
            await self.heard_of(name)
        members = [m for m in self._daemon.membership.members() if m.state == "alive" and not m.draining]
        alive = [member.node_id for member in members]
        specs = [msgspec.structs.replace(self._spec(order, chosen, alive), array=place) for place in _places(order)]
        for spec in specs:
            check_spec(spec)
        if order.out is not None:
            await must_be_free(Path(order.out))
        self._refuse_impossible(specs[0])
        size, vault = 0, None
        if self._daemon.settings.encrypt:
            vault = await self._daemon.jobs.keyring.fresh()
            specs = await asyncio.to_thread(_locked, specs, vault)
        if order.workdir is not None:
            workdir, holders, size = await self._pack_workdir(order.workdir, specs[0].checkpointing, vault)
            specs = [msgspec.structs.replace(spec, workdir=workdir, workdir_holders=holders) for spec in specs]
        turns = asyncio.Semaphore(SUBMITTED_AT_ONCE)
        handed = await asyncio.gather(*(self._hand_over(spec, turns) for spec in specs))
        jobs, late = [job for job, _ in handed], [words for _, words in handed if words]
        few = "" if len(specs[0].witnesses) >= WANT_WITNESSES else _few_witnesses(len(alive))
        array = specs[0].array
        for job, spec in zip(jobs, specs, strict=True):
            if order.out is not None:
                place = order.out if spec.array is None else str(Path(order.out) / str(spec.array.index))
                await self._daemon.homecoming.want(job, place)
        return {
            "job": format_job(jobs[0] if array is None else array.array),
            "jobs": [format_job(job) for job in jobs],
            "workdir_bytes": size,
            "witnesses": len(specs[0].witnesses),
            "warning": late[0] if late else few,
        }

    def _spec(self, order: SubmitOrder, chosen: tuple[bytes, ...], alive: list[bytes]) -> JobSpec:
        return JobSpec(
            submitter=self._daemon.me,
            chain=self._daemon.membership.chain,
            user=self._daemon.membership.standing.user,
            created_unix_ms=time.time_ns() // 1_000_000,
            nonce=os.urandom(16),
            argv=tuple(order.argv),
            witnesses=self._choose_witnesses(alive),
            name=order.name,
            env=order.env,
            image=order.image,
            image_id=self._daemon.image_desk.pin(order.image, order.engine),
            engine=order.engine,
            **order.gpu_terms(),
            memory_mib=order.memory_mib,
            cpus=order.cpus,
            zone=order.zone,
            interactive=order.interactive,
            least_nodes=order.least_nodes,
            most_nodes=order.most_nodes,
            checkpointing=checkpointing_of(order, chosen),
            grace_s=self._daemon.settings.grace_s if order.grace_s is None else order.grace_s,
            lease_s=LOCAL_LEASE_S if self._daemon.settings.profile == "local" else self._daemon.settings.lease_s,
            error_budget=order.retries,
            retry_codes=tuple(order.retry_on),
            on_exit_0="done" if order.ckpt_mode == "system" else order.on_exit_0,
            on_partition=order.on_partition,
            max_time_s=order.max_time_s,
            deadline_unix_ms=None if order.deadline_unix is None else int(order.deadline_unix * 1000),
            priority=order.priority,
            after=tuple(job for name in order.after for job in self._to_come_after(name)),
            homing=homing_of(self._daemon, order.home),
        )

    async def _hand_over(self, spec: JobSpec, turns: asyncio.Semaphore) -> tuple[bytes, str]:
        """Give a job to its witnesses: its id, and what is to be said if they have not got it yet."""
        async with turns:
            return await self._daemon.deputy.submit(spec)

    def _to_come_after(self, name: str) -> list[bytes]:
        found = self.find_jobs(name)
        for status in found:
            if status.outcome is not None and status.outcome.kind != "done":
                raise MeshError(f"job {format_job(status.job)[:8]} has ended already, and not well: {status.state}")
        return [status.job for status in found]

    def _refuse_impossible(self, spec: JobSpec) -> None:
        if reason := cannot_ever(placement_request(b"", spec, 0), self._daemon.jobs.outlook.adverts()):
            raise MeshError(reason, ExitCode.IMPOSSIBLE)

    def _choose_witnesses(self, alive: list[bytes]) -> tuple[Seat, ...]:
        """This node and two others, or this node alone on a mesh of one or two."""
        me, disks = self._daemon.me, self._daemon.jobs.outlook.disks()
        ranked = witness_order(os.urandom(8), self._daemon.jobs.outlook.adverts(), alive)
        others = [Seat(node, disks[node]) for node in ranked if node != me and node in disks]
        chosen = others[: WANT_WITNESSES - 1] if len(others) >= WANT_WITNESSES - 1 else []
        return (Seat(me, self._daemon.journal.disk), *chosen)

    async def _pack_workdir(
        self, directory: str, checkpointing: Checkpointing | None, vault: Vault | None
    ) -> tuple[bytes, tuple[bytes, ...], int]:
        """Store the user's files and copy them to peers: the manifest, who holds it, its size in bytes."""
        leave = (checkpointing.directory,) if checkpointing is not None and checkpointing.mode != "system" else ()
        files = await asyncio.to_thread(collect_files, Path(directory), leave)
        try:
            saved = await asyncio.to_thread(
                self._daemon.store.save,
                files,
                job=b"\0" * 16,
                config=0,
                term=0,
                seq=0,
                parent=None,
                kind="workdir",
                created_unix=int(time.time()),
                seal=lambda payload: seal(self._daemon.identity, self._daemon.trust.mesh_id, "manifest", payload),
                vault=vault,
                user=self._daemon.membership.standing.user,
            )
        except StoreError as error:
            raise MeshError(f"the working directory could not be packed: {error}") from error
        order_of_peers = replica_order(
            saved.id[:16], self._daemon.jobs.outlook.adverts(), {self._daemon.me}, NEED_MIB, {self._daemon.me}
        )
        copies = await self._daemon.jobs.courier.replicate(saved.id, [], order_of_peers, WORKDIR_REPLICAS)
        return saved.id, (self._daemon.me, *copies.holders), saved.manifest.total_bytes

    async def cancel(self, text: str) -> "answers.jobs.AllCancelled":
        found = self.find_jobs(text)
        rows: list[answers.jobs.Cancelled] = []
        for status in found:
            over = status.outcome is not None
            if not over:
                self.check_owner(status)
                nodes = [*([status.runner] if status.runner is not None else []), *status.witnesses, status.submitter]
                self._daemon.jobs.cancel(status.job, self._daemon.membership.standing.user, nodes)
            state = status.state if over else "cancelling"
            rows.append({"job": format_job(status.job), "state": state, "already": over})
        await asyncio.gather(*(self._daemon.deputy.withdraw(status.job) for status in found))
        return {"jobs": rows}

    def check_owner(self, status: JobStatus) -> None:
        """MeshError if it is not this node's user's job."""
        if status.user != self._daemon.membership.standing.user:
            raise MeshError(f"job {format_job(status.job)[:8]} is {status.user}'s, not yours", ExitCode.REFUSED)

    async def sealed_spec(self, job: bytes) -> bytes | None:
        witness = self._daemon.jobs.participant.witnesses.get(job)
        return witness.cell.spec if witness is not None else await self._daemon.journal.submitted(job)

    async def spec_of(self, status: JobStatus) -> JobSpec:
        sealed = await self.sealed_spec(status.job)
        for node in status.witnesses:
            if sealed is None and node != self._daemon.me:
                with suppress(PeerError):
                    sealed = await self._daemon.peers.call(node, "GET", f"/v1/jobs/{status.job.hex()}/spec")
        if sealed is None:
            raise MeshError("none of the job's witnesses can be reached now; try again in a moment")
        try:
            return Authority(self._daemon.me, self._daemon.trust).read_spec(status.job, sealed)
        except SpecError as error:
            raise MeshError(f"a witness gave a damaged job description: {error}") from error

    async def attempts(self, status: JobStatus) -> tuple[Attempt, ...]:
        """All that are known, also those for which its section has no room."""
        cell = await self._cell(status) if status.attempts and status.attempts[0].number else None
        return cell.ledger.attempts if cell is not None else status.attempts

    async def describe(self, text: str) -> "answers.jobs.Described":
        """Everything about one job: what was asked for, and all that its witnesses remember."""
        status = self.find_job(text)
        spec = await self.spec_of(status)
        cell = await self._cell(status)
        attempts = cell.ledger.attempts if cell is not None and cell.ledger.attempts else status.attempts
        whole = msgspec.structs.replace(status, attempts=attempts)
        wanted = {
            name: msgspec.to_builtins(value) for name, value in msgspec.structs.asdict(spec).items()
        }  # defaults too
        asked = {
            name: value for name, value in wanted.items() if name not in UNTOLD and value not in (None, "", [], {})
        }
        rules = spec.checkpointing
        nicks = self._around()[0]
        if rules is not None:
            to = [nicks.get(node, short_id(node)) for node in rules.to]
            asked["checkpoints"] = {**msgspec.structs.asdict(rules), "to": to}
        if spec.image_id is not None:
            asked["image_id"] = f"sha256:{spec.image_id.hex()}"
        asked["after"] = [format_job(job) for job in spec.after]
        events = await self.events(format_job(status.job), 0)
        return {
            "job": self.show(whole),
            "asked": asked,
            "group": status.config.number,
            "events": events[-EVENTS_SHOWN:],
        }

    async def _cell(self, status: JobStatus) -> Cell | None:
        """A witness's record of it, if one can be reached."""
        own = self._daemon.jobs.participant.witnesses.get(status.job)
        if own is not None:
            return own.cell
        for node in status.witnesses:
            with suppress(PeerError, msgspec.MsgspecError, UnicodeDecodeError):
                return decode_cell(
                    await self._daemon.peers.call(
                        node, "GET", f"/v1/jobs/{status.job.hex()}/cell", timeout_s=EVENTS_WITHIN_S
                    )
                )
        return None

    async def pull(self, text: str, destination: str) -> "answers.jobs.Pulled":
        """Bring a finished job's published files here."""
        status = self.find_job(text)
        if status.outcome is None or status.outcome.manifest is None:
            raise MeshError(
                f"job {format_job(status.job)[:8]} is {status.state}: it has no results to pull yet", ExitCode.NOT_FOUND
            )
        target = Path(destination)
        await must_be_free(target)
        try:
            vault = await self.bring(status, status.outcome.manifest, status.outcome.holders)
            kept = status.outcome.manifest
            report = await asyncio.to_thread(
                lambda: self._daemon.store.restore(kept, target, prefix="out", vault=vault)
            )
        except StoreError as error:
            raise MeshError(f"the results could not be written to {target}: {error}") from error
        return {"job": format_job(status.job), "destination": str(target), "files": report.files, "bytes": report.bytes}

    async def bring(self, status: JobStatus, manifest: bytes, holders: tuple[bytes, ...]) -> Vault | None:
        """Have a checkpoint or result of the job in this node's store; the key to it."""
        ran = [attempt.node for attempt in status.attempts]
        others = replica_order(status.job, self._daemon.jobs.outlook.adverts(), {self._daemon.me}, 0)
        sources = [node for node in dict.fromkeys([*holders, *reversed(ran), *others]) if node != self._daemon.me]
        try:
            await self._daemon.jobs.courier.fetch(manifest, sources)
        except FetchError as error:
            raise MeshError(f"its files cannot be reached now: {error}") from error
        return await self.vault_of(status, manifest)

    async def vault_of(self, status: JobStatus, manifest: bytes) -> Vault | None:
        """The key to something of this job's that is in this node's store, None if it is not sealed."""
        try:
            realm = (await asyncio.to_thread(self._daemon.store.manifest, manifest)).realm
            keyring = self._daemon.jobs.keyring
            known = keyring.known(realm)
            if known is not None or not realm:
                return known
            return await keyring.vault(status.job, await self.spec_of(status), status.witnesses)
        except (NoKey, StoreError) as error:
            raise MeshError(str(error)) from error


def _places(order: SubmitOrder) -> list[ArrayPlace | None]:
    """The place of each job that this order makes; one job that is in no array, if it asks for none."""
    if not order.array:
        if order.array_limit:
            raise MeshError("a limit belongs to an array", ExitCode.USAGE)
        return [None]
    if len(order.array) > MAX_ARRAY or len(set(order.array)) != len(order.array):
        raise MeshError(f"an array has 1 to {MAX_ARRAY} jobs, each with its own index", ExitCode.USAGE)
    array, of = os.urandom(JOB_ID_BYTES), len(order.array)
    return [ArrayPlace(array, index, place, of, order.array_limit) for place, index in enumerate(order.array)]


def _locked(specs: list[JobSpec], vault: Vault) -> list[JobSpec]:
    locks = [locked(vault, [seat.node for seat in spec.witnesses]) for spec in specs]
    return [msgspec.structs.replace(spec, lock=lock) for spec, lock in zip(specs, locks, strict=True)]


def _few_witnesses(alive: int) -> str:
    here = "this node is alone" if alive <= 1 else f"only {alive} nodes are here"
    return f"{here}, so one witness keeps the job's record: if its disk is lost, so is the record"


def _stranded(gone: list[str], of: int) -> str:
    return (
        f"{', '.join(gone)} of the {of} nodes that keep its record are gone; it goes on by itself when most are back; "
        "if they never will be: `mesh recover`"
    )


async def must_be_free(target: Path) -> None:
    """MeshError if there is something where files are to be written."""

    def is_taken() -> bool:
        return target.exists() and (not target.is_dir() or any(target.iterdir()))

    try:
        taken = await asyncio.to_thread(is_taken)
    except OSError as error:
        raise MeshError(f"{target} cannot be a directory: {error.strerror}", ExitCode.USAGE) from error
    if taken:
        raise MeshError(f"{target} exists and is not empty: name a new directory", ExitCode.USAGE)

"""Jobs as their users see them: list, describe, explain, cancel, move, recover, and fetch results."""

import asyncio
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET

from ckptstore.store import RestoreReport
from membership.envelope import seal
from membership.identity import Identity, NodeId, format_id
from membership.node import MembershipNode
from membership.trust import TrustStore
from mesh.api import schemas
from mesh.api.handlers.gpus import room
from mesh.api.handlers.lookup import JobLookup, find_node, nick_in, nicks_of, require_free
from mesh.api.queries import JobsQuery
from mesh.api.requests import ANY_END, MigrateOrder
from mesh.checkpoints.keys import NoKey
from mesh.consensus.effects import WitnessRecord
from mesh.consensus.forced_reconfiguration import Plan, RecoveryError, encode_reconfiguration, make_plan
from mesh.consensus.status import JobStatus
from mesh.jobs.mesh_view import instant
from mesh.jobs.service import JobService
from mesh.jobs.submission_retry import SubmissionRetry
from mesh.journal import AUDIT_KEPT, EVENTS_READ, Journal
from mesh.model.events import Event, describe
from mesh.model.record import Outcome
from mesh.model.spec import ArrayPlace, HomePolicy, SpecError, attempt_request, format_job
from mesh.util.errors import ExitCode, MeshError
from mesh.util.structs import copy_as

EVENTS_SHOWN = 20
_Around = tuple[dict[bytes, str], set[bytes], dict[bytes, bytes]]
# Fields of a spec that a description leaves out: shown in another form, or of no use to a person.
UNTOLD = {"submitter", "chain", "nonce", "witnesses", "workdir", "workdir_holders"}
UNTOLD |= {"checkpointing", "array", "after", "after_any", "home", "lock", "secrets", "uv", "conda", "on", "not_on"}


class JobHandlers:
    def __init__(
        self,
        identity: Identity,
        trust: TrustStore,
        membership: MembershipNode,
        journal: Journal,
        jobs: JobService,
        submissions: SubmissionRetry,
        lookup: JobLookup,
    ) -> None:
        self._identity, self._trust, self._membership = identity, trust, membership
        self._journal, self._jobs = journal, jobs
        self._submissions, self._lookup = submissions, lookup

    def rows(self) -> list[schemas.jobs.Job]:
        """Return every job in the job table, oldest first."""
        return self._rows(self._lookup.statuses().values())

    async def jobs(self, asked: JobsQuery) -> schemas.jobs.Jobs:
        """Return the jobs that match, those in the archive included if a time span is given."""
        past, lookup = self._jobs.archive, self._lookup
        statuses = lookup.find_jobs(asked.fits) if asked.fits else lookup.statuses().values()
        if asked.since_s is not None:
            since = int((time.time() - asked.since_s) * 1000)
            away = [] if asked.fits else await past.ended_since(since)
            recent = [status for status in statuses if status.outcome is None or status.outcome.ended_unix_ms >= since]
            statuses = {status.job: status for status in [*away, *recent]}.values()
        rows = self._rows(statuses if asked.over else [status for status in statuses if status.outcome is None])
        return schemas.jobs.Jobs(jobs=rows, archived=past.count)

    def _rows(self, found: Iterable[JobStatus]) -> list[schemas.jobs.Job]:
        ordered = sorted(found, key=lambda status: (status.created_unix_ms, status.array.place if status.array else 0))
        around = self._around()
        return [self.show(status, around) for status in ordered]

    def _around(self) -> _Around:
        """Return all nicks, the nodes that are present, and each node's disk id: looked up once for all rows."""
        members = self._membership.members()
        nicks = {member.node_id: member.nick for member in members}
        return nicks, {member.node_id for member in members if member.present}, self._jobs.mesh_view.disks()

    def show(self, status: JobStatus, around: _Around | None = None) -> schemas.jobs.Job:
        nicks, present, disks = around or self._around()
        state, detail = status.state, status.detail if status.detail != status.state else ""
        voters = {
            voter
            for voter in status.config.everyone
            if voter.node in present and disks.get(voter.node, voter.disk) == voter.disk
        }
        if status.outcome is None and not status.config.quorum(voters):
            left = {voter.node for voter in voters}
            gone = [nick_in(nicks, node) for node in status.witnesses if node not in left]
            state, detail = "stranded", _stranded(gone, len(status.witnesses))

        def nick(node: bytes) -> str:
            return nick_in(nicks, node)

        commit, outcome, saving = status.commit, status.outcome, status.saving
        return copy_as(
            schemas.jobs.Job,
            status,
            job=format_job(status.job),
            array=_place(status.array),
            submitter=nick(status.submitter),
            state=state,
            detail=detail,
            node=None if status.runner is None else nick(status.runner),
            gang=[nick for _, nick in status.attempts[-1].gang] if status.runner is not None else [],
            standby=None if status.standby is None else nick(status.standby),
            vram_limit_mib=status.vram_limit_mib or status.vram_mib,
            gpu_portions=[room(portion) for portion in status.portions],
            witnesses=[nick(node) for node in status.witnesses],
            at_risk_s=status.at_risk_s(time.time() * 1000),
            saving=saving and copy_as(schemas.jobs.Saving, saving, bytes=saving.size),
            checkpoint=commit
            and copy_as(
                schemas.jobs.Checkpoint,
                commit,
                manifest=commit.manifest.hex(),
                holders=[nick(node) for node in commit.holders],
            ),
            attempts=[copy_as(schemas.jobs.Attempt, attempt, node=attempt.nick) for attempt in status.attempts],
            outcome=outcome and copy_as(schemas.jobs.Outcome, outcome),
        )

    def job(self, text: str) -> schemas.jobs.OneJob:
        return schemas.jobs.OneJob(job=self.show(self._lookup.find_job(text)))

    async def events(self, job: str | None, after: int, audit: bool = False) -> list[schemas.jobs.Event]:
        """Return a job's events from all nodes that take part in it; without a job, this node's own events after id `after`.

        `audit`: only events about the node itself, all that are kept; else the newest `EVENTS_READ`.
        """
        event_log, status = self._jobs.event_log, self._lookup.find_job(job) if job else None
        of, most = (b"", AUDIT_KEPT) if audit else (None, EVENTS_READ)
        own = await self._journal.events(status.job if status is not None else of, after, most)
        nicks = nicks_of(self._membership)
        if status is None:  # a thread checks the signatures, since the audit log is long
            return await asyncio.to_thread(
                lambda: [_event(nicks, *event_log.open(sealed), id=number) for number, sealed in own]
            )
        return [_event(nicks, actor, event, gap=gap) for actor, event, gap in await self._lookup.events_of(status, own)]

    async def describe(self, text: str) -> schemas.jobs.Described:
        """Return a job's status, spec and last events, with every attempt that its witnesses know."""
        status = self._lookup.find_job(text)
        spec = await self._lookup.spec_of(status)
        whole = msgspec.structs.replace(status, attempts=await self._lookup.all_attempts(status))
        asked = {name: value for name, value in _given(spec).items() if name not in UNTOLD}
        rules, home = spec.checkpointing, spec.home
        nicks = self._around()[0]
        if rules is not None:
            asked["checkpoints"] = {**_given(rules), "directory": rules.directory}
            if rules.to:
                asked["checkpoints"]["to"] = [nick_in(nicks, node) for node in rules.to]
        if home.rule != HomePolicy().rule:
            asked["home"] = home.rule if home.node is None else nick_in(nicks, home.node)
        asked |= {
            name: [nick_in(nicks, node) for node in nodes]
            for name, nodes in (("on", spec.on), ("not_on", spec.not_on))
            if nodes
        }
        if caches := [need.last for need in spec.data if need.cache]:
            asked["data"] = msgspec.to_builtins([need for need in spec.data if not need.cache])
            asked["caches"] = caches
        if spec.image_id is not None:
            asked["image_id"] = f"sha256:{spec.image_id.hex()}"
        if spec.secrets is not None and spec.secrets.uses:
            asked["secrets"] = [name if name == target else f"{name} as {target}" for name, target in spec.secrets.uses]
            asked["secret_nodes"] = [nick_in(nicks, node) for node in spec.secrets.nodes]
        if spec.environment is not None:
            asked["environment"] = spec.environment.lock
        if after := [*map(format_job, spec.after), *(ANY_END + format_job(job) for job in spec.after_any)]:
            asked["after"] = after
        events = await self.events(format_job(status.job), 0)
        return schemas.jobs.Described(
            job=self.show(whole), asked=asked, group=status.config.number, events=events[-EVENTS_SHOWN:]
        )

    async def pull(self, text: str, destination: str) -> schemas.jobs.Pulled:
        """Write a finished job's published files to a new directory of this machine."""
        status = self._lookup.find_job(text)
        manifest, holders = await self._lookup.results(status)
        report = await self._pull(status, manifest, holders, Path(destination))
        return copy_as(schemas.jobs.Pulled, report, job=format_job(status.job), destination=destination)

    async def deliver(self, job: bytes, directory: str, outcome: Outcome) -> str:
        """Write a finished job's published files to a directory that the job was submitted with; return what there is now."""
        if not outcome.manifest:
            return ""
        status = self._lookup.find_job(format_job(job))
        report = await self._pull(status, outcome.manifest, outcome.holders, Path(directory))
        return f"{report.files} files in {directory}"

    async def _pull(self, status: JobStatus, manifest: bytes, holders: tuple[bytes, ...], new: Path) -> RestoreReport:
        await require_free(new)
        return await self._lookup.restore(status, manifest, holders, "out", new)

    async def cancel(self, text: str) -> schemas.jobs.AllCancelled:
        found = self._lookup.find_jobs(text)
        rows: list[schemas.jobs.Cancelled] = []
        for status in found:
            over = status.outcome is not None
            views = self._jobs.job_table.views_of(status.job)
            going = [view for view in views if view.outcome is None]
            own = any(view.user == self._lookup.user for view in going)
            if not own and not over:
                await self._lookup.check_owner(status)
            if own or not over:  # a false view may say that it is over, or another's
                known = {node for view in going for node in (view.runner, *view.witnesses, view.submitter)}
                self._jobs.cancel(status.job, self._lookup.user, sorted(filter(None, known)))
            state = status.state if over else "cancelling"
            job = format_job(status.job)
            rows.append(schemas.jobs.Cancelled(job=job, array=_place(status.array), state=state, already=over))
        await asyncio.gather(*(self._submissions.withdraw(status.job) for status in found))
        return schemas.jobs.AllCancelled(jobs=rows)

    async def migrate(self, text: str, order: MigrateOrder) -> schemas.jobs.Migrating:
        """Ask the job's runner to move it; MeshError if no other node, or not the named one, could take it now."""
        status = await self._lookup.find_own(text)
        name = format_job(status.job)[:8]
        runner = await self._lookup.runner_of(status.job)
        status = self._lookup.seen_by(runner, status) if runner is not None else status
        last = status.attempts[-1] if status.attempts else None
        if runner is None or last is None or not last.running_unix_ms:
            raise MeshError(f"job {name} does not run now (it is {status.state}): `mesh why {name}` says more")
        spec = await self._lookup.spec_of(status)
        if spec.checkpointing is None and not order.force:
            raise MeshError(
                f"job {name} has no checkpoints (--ckpt), so it would start over; --force moves it all the same"
            )
        target = find_node(self._membership, order.to) if order.to else None
        if target is not None and target.node_id == runner:
            raise MeshError(f"job {name} runs on {target.nick} already")
        wanted = target.node_id if target is not None else None
        now_ms = time.time_ns() // 1_000_000
        request = attempt_request(status.job, spec, last.number + 1, status.attempts, now_ms, wanted, status.commit)
        view = self._jobs.mesh_view
        ranking = view.hierarchy().rank(request, view.adverts())
        others = [candidate for candidate in ranking.candidates if candidate.node != runner]
        if target is not None and target.node_id not in {candidate.node for candidate in others}:
            reasons = [r.reasons for r in ranking.refused if r.node == target.node_id] or [("offers nothing",)]
            raise MeshError(f"{target.nick} cannot take job {name}: {'; '.join(reasons[0])}", ExitCode.IMPOSSIBLE)
        if not others:
            raise MeshError(f"no other node could take job {name} now: `mesh why {name}` says why", ExitCode.IMPOSSIBLE)
        self._jobs.migrate(status.job, self._lookup.user, runner, wanted)
        standby = next((one for one in others if target is None and one.node == status.standby), others[0])
        return schemas.jobs.Migrating(job=format_job(status.job), attempt=last.number, from_=last.nick, to=standby.nick)

    async def recover(self, text: str, go: bool) -> schemas.jobs.Recovered:
        """Collect the witness records that are left and report what continuing from them would lose; with `go`, continue."""
        status = await self._lookup.find_own(text)
        records = await self._records(status.job)
        try:
            plan = make_plan(status.job, records, self._jobs.mesh_view.look(), instant())
        except RecoveryError as error:
            raise MeshError(f"job {format_job(status.job)[:8]} cannot be recovered: {error}") from error
        keyring, cipher, key_problem = self._jobs.keyring, None, ""
        try:
            spec = self._jobs.authority.read_spec(status.job, plan.spec)
            cipher = await keyring.cipher(status.job, spec, plan.kept)
        except (NoKey, SpecError) as error:
            key_problem = str(error)
        if go:
            body = encode_reconfiguration(plan.reconfiguration)
            problem = await self._jobs.recover(plan, seal(self._identity, self._trust.mesh_id, "recovery", body))
            if problem is not None:
                raise MeshError(f"the new group did not take the record: {problem}. Try again, or see `mesh nodes`.")
            if cipher is not None:
                await keyring.share_with_witnesses(status.job, cipher, plan.reconfiguration.config)
        return self._plan_row(plan, go, key_problem)

    async def _records(self, job: bytes) -> Mapping[NodeId, WitnessRecord]:
        """Return every record of the job's witnesses that can be read now."""
        me = self._lookup.me
        others = [one.node_id for one in self._membership.members() if one.present and one.node_id != me]
        answers = await asyncio.gather(*(self._lookup.record_of(node, job) for node in others))
        found = {node: record for node, record in zip(others, answers, strict=True) if record is not None}
        own = self._lookup.own_record(job)
        return self._jobs.authority.records_of_witnesses(job, found | ({me: own} if own is not None else {}))

    def _plan_row(self, plan: Plan, done: bool, key_problem: str) -> schemas.jobs.Recovered:
        nicks, commit = nicks_of(self._membership), plan.record.commit

        def names(nodes: tuple[bytes, ...]) -> list[str]:
            return [nick_in(nicks, node) for node in nodes]

        return schemas.jobs.Recovered(
            job=format_job(plan.reconfiguration.job),
            done=done,
            key_problem=key_problem,
            lost=names(plan.lost),
            kept=names(plan.kept),
            witnesses=names(plan.reconfiguration.config.nodes),
            checkpoint=None if commit is None else copy_as(schemas.jobs.At, commit),
            checkpoint_unix_ms=None if commit is None else commit.created_unix_ms,
        )


def _given(struct: msgspec.Struct) -> dict[str, Any]:
    """Return the fields that differ from their defaults. `omit_defaults` leaves in what is equal, but another object."""
    values = ((field.name, getattr(struct, field.name), field.default) for field in msgspec.structs.fields(struct))
    return {name: msgspec.to_builtins(value) for name, value, default in values if value not in (default, {})}


def _place(array: ArrayPlace | None) -> schemas.jobs.Place | None:
    return None if array is None else copy_as(schemas.jobs.Place, array, array=format_job(array.array))


def _event(nicks: Mapping[NodeId, str], actor: bytes, event: Event, **place: int) -> schemas.jobs.Event:
    target = nick_in(nicks, event.target) if event.target is not None else ""
    return copy_as(
        schemas.jobs.Event,
        event,
        job=format_job(event.job) if event.job else None,
        actor=nick_in(nicks, actor),
        node=format_id(actor),
        target=target,
        text=describe(event, target),
        **{"id": UNSET, "gap": UNSET, **place},
    )


def _stranded(gone: list[str], of: int) -> str:
    return (
        f"{', '.join(gone)} of the {of} nodes that keep its record are gone; it goes on by itself when most are back; "
        "if they never will be: `mesh job recover`"
    )

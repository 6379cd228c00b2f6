"""Jobs on this node: the shell around `Participant`. Performs its effects in order, and carries the world's answers back.

One queue of inputs, one task that works it off: messages, timers, changes of the mesh, facts from attempts. So the cores never
see two things at once, and a promise is on disk before it is sent.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from random import Random

from ckptstore.store import Store
from membership.envelope import EnvelopeError, open_envelope, seal
from membership.identity import Identity, NodeId, short_id
from membership.node import MembershipNode
from membership.records import Record
from membership.trust import CLOCK_GRACE_S, NODE_CERTIFICATE_S, PROVIDER, USER, TrustError, TrustStore
from mesh.api.peer import PeerClient, decode_facts
from mesh.engine.alarm import boot_s
from mesh.engine.engine import Engine
from mesh.jobs.attempt import Attempt, Custody
from mesh.jobs.courier import Courier
from mesh.jobs.effects import (
    Committed,
    Ended,
    Kill,
    Launch,
    Notify,
    RunUntil,
    SaveCell,
    SaveCheckpoint,
    SaveResult,
    Send,
    SetTimer,
    StateChanged,
)
from mesh.jobs.joblogs import JobLogs
from mesh.jobs.journal import Journal
from mesh.jobs.messages import Accept, AnyMessage, Cancel, Migrate, Start, decode_message, encode_message
from mesh.jobs.participant import Directed, Participant, Role, Rules, Submitted
from mesh.jobs.postman import Postman
from mesh.jobs.recovery import Mandate, Plan, decode_mandate
from mesh.jobs.runner import KillWanted, RunnerEvent, VacateWanted
from mesh.jobs.spec import (
    JobSpec,
    SpecError,
    decode_spec,
    encode_spec,
    format_job,
    job_id,
    placement_request,
    waiting_place,
)
from mesh.jobs.status import JobStatus, decode_status, encode_status, merge_statuses, status_of
from mesh.jobs.view import Instant, Surroundings, Timer, View
from mesh.jobs.witness import Witness
from mesh.provider.inventory import Inventory
from placement.advert import Advert, AdvertError, decode_advert
from placement.decision import replica_order
from placement.filters import engine_for
from placement.queue import Queue, Waiting, decayed

INPUT_LIMIT = 10_000  # inputs waiting; ours
REMOTE_LIMIT = (
    INPUT_LIMIT // 2
)  # from here on peers are told to slow down (503), so that facts of this node always find room
ACTING = {"preparing", "offered", "waiting"}  # what a steward says in any other state is about the past
STATUS_TTL_S = 3600.0
STATUSES_DECODED = 50_000
REPUBLISH_S = 600.0
COLLECT_EVERY_S = 60.0
COMMITTED_KEPT = 2  # the committed checkpoint and the one before it, should the newer one be damaged everywhere; ours
COLLECT_MIN_AGE_S = 900.0  # longer than any upload between its chunks and its manifest; kopia uses 24 h, over WANs

log = logging.getLogger(__name__)

Input = Callable[[Instant], "list[Directed | Submitted]"]


class JobService:
    def __init__(
        self,
        identity: Identity,
        trust: TrustStore,
        membership: MembershipNode,
        journal: Journal,
        store: Store,
        engines: dict[str, Engine],
        inventory: Inventory,
        peers: PeerClient,
        directory: Path,
        logs: JobLogs,
        rng: Random,
    ) -> None:
        self.membership = membership
        self.journal = journal
        self.store = store
        self.inventory = inventory
        self.courier = Courier(peers, store)
        self.attempts: dict[bytes, Attempt] = {}
        self.states: dict[bytes, tuple[str, str]] = {}
        self._identity, self._trust = identity, trust
        self._me = identity.node_id
        self._nick = membership.standing.nick
        self._engines = engines
        self._directory = directory
        self.logs = logs
        self._postman = Postman(lambda node, body: peers.call(node, "POST", "/v1/messages", body))
        rules = Rules(self._open_spec, self._admit, self._may_cancel, self._is_mandated)
        self.participant = Participant(self._me, journal.disk, self._nick, rules, rng)
        self._inputs: asyncio.Queue[Input] = asyncio.Queue(INPUT_LIMIT)
        self._submissions: dict[bytes, asyncio.Future[str | None]] = {}
        self._timers: dict[tuple[bytes, Role, str], asyncio.TimerHandle] = {}
        self._endings: set[asyncio.Task[None]] = set()
        self._cell_saved = asyncio.Event()
        self._published: dict[bytes, tuple[JobStatus, float]] = {}
        self._decoded: dict[tuple[NodeId, str], tuple[Record, JobStatus | None]] = {}
        self._view_changed = asyncio.Event()
        self._vacated: dict[bytes, asyncio.Event] = {}

    # --- life

    async def restore(self) -> None:
        """Take up the cells of an earlier run, before anybody can ask about them."""
        cells, self.participant.forgotten = await self.journal.cells()
        for cell in cells:
            try:
                spec = self._read_spec(cell.job, cell.spec)[0]
            except SpecError as error:
                await self.journal.record(cell.job, "journal", f"a witness cell was skipped: {error}")
                self.participant.forgotten.add(cell.job)
                continue
            at = instant()
            for output in self.participant.restore(Witness.restored(cell, spec, at.now), at):
                await self._perform(output)

    async def run(self) -> None:
        """Work off inputs until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._work(), name="job inputs")
            group.create_task(self._watch_mesh(), name="job view")
            group.create_task(self._upkeep(), name="job upkeep")

    async def close(self) -> None:
        """End every guest at once, whatever its state. Vacate first to be kind."""
        for timer in self._timers.values():
            timer.cancel()
        await asyncio.gather(*(attempt.close() for attempt in self.attempts.values()), return_exceptions=True)
        await asyncio.gather(*self._endings, return_exceptions=True)
        await self._postman.close()

    # --- for the API

    def deliver(self, sender: NodeId, data: bytes) -> bool:
        """A message from a peer; False if this node has too much to do. MessageError if it is none."""
        message = decode_message(data)
        if self._inputs.qsize() >= REMOTE_LIMIT:
            return False
        self._feed(lambda at: self.participant.receive(sender, message, at))
        return True

    async def submit(self, spec: JobSpec) -> tuple[bytes, str | None]:
        """Hand a job to its witnesses: its id, and why no majority has it, or None."""
        payload = encode_spec(spec)
        sealed = seal(self._identity, self._trust.mesh_id, "job", payload)
        job = job_id(payload)
        await self.journal.save_submitted(job, sealed)
        return job, await self._answered(job, lambda at: self.participant.submit(job, sealed, spec, at))

    async def recover(self, plan: Plan, mandate: bytes) -> str | None:
        """Let the group that the job's user has named take over: why it did not, or None."""
        job = plan.mandate.job
        problem = await self._answered(job, lambda at: self.participant.recover(plan, mandate, at))
        if problem is None:
            await self._note(
                job, f"its user made it go on from the record of {len(plan.kept)}, without {len(plan.lost)}"
            )
        return problem

    def cancel(self, job: bytes, user: str, nodes: Sequence[NodeId]) -> None:
        """Ask everybody who may have a part in the job to end it."""
        for node in dict.fromkeys([*nodes, self._me]):
            self._send(node, Cancel(job=job, user=user))

    def migrate(self, job: bytes, user: str, runner: NodeId, to: NodeId | None) -> None:
        """Ask the node where it runs to give it notice, and to have it go on elsewhere."""
        self._send(runner, Migrate(job=job, user=user, to=to))

    async def vacate(self, grace_s: float, reason: str) -> list[bytes]:
        """Give notice to every guest and wait until each attempt has ended (or its grace has, and it was killed)."""
        jobs = list(self.participant.runners)
        await self._end_all(jobs, VacateWanted(grace_s, reason), grace_s + 30)
        return jobs

    async def kill(self, reason: str) -> list[bytes]:
        """SIGKILL to every guest, now; the bookkeeping follows."""
        jobs = list(self.participant.runners)
        await asyncio.gather(*(attempt.kill_guest() for attempt in self.attempts.values()))
        await self._end_all(jobs, KillWanted(reason), 10.0)
        return jobs

    async def hand_over(self, timeout_s: float) -> None:
        """Before leaving: let runners and stewards replace this node in its witness groups, and deliver what is posted."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._still_witness():
                    self._cell_saved.clear()
                    await self._cell_saved.wait()
        except TimeoutError:
            log.info("still a witness of some jobs; their groups go on without this node")
        await self._postman.flush(1.0)

    def views_changed(self) -> None:
        self._view_changed.set()

    def job_changed(self, node: NodeId, section: str) -> None:
        """Somebody says something new of a job; others may have waited for its end."""
        record = self.membership.record(node, section)
        status = self._heard(record) if record is not None else None
        if status is not None and status.outcome is not None:
            self.views_changed()

    def adverts(self) -> list[Advert]:
        """The valid adverts of members who may lend and can be reached, one each."""
        found = []
        present = {
            member.node_id
            for member in self.membership.members()
            if member.present and member.state != "unreachable" and PROVIDER in member.roles
        }
        for record in self.membership.records("advert"):
            try:
                advert = decode_advert(record.node, record.body)
            except AdvertError as error:
                log.debug("ignored the advert of %s: %s", short_id(record.node), error)
                continue
            if advert.node in present:
                found.append(advert)
        return found

    def disks(self) -> dict[NodeId, bytes]:
        """On which disk each node keeps its promises."""
        found = ((record.node, decode_facts(record.body)) for record in self.membership.records("facts"))
        return {node: facts.disk for node, facts in found if facts is not None and facts.disk}

    def view(self, job: bytes) -> View:
        return self._view_maker()(job)

    # --- inputs

    async def _answered(self, job: bytes, item: Input) -> str | None:
        """Feed what a majority must take in: why it did not, or None."""
        answer: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._submissions[job] = answer
        self._feed(item)
        try:
            return await answer
        finally:
            del self._submissions[job]

    def _feed(self, item: Input) -> None:
        try:
            self._inputs.put_nowait(item)
        except asyncio.QueueFull:
            log.error("too many inputs; one was dropped")

    async def _work(self) -> None:
        while True:
            item = await self._inputs.get()
            for output in item(instant()):
                await self._perform(output)

    async def _watch_mesh(self) -> None:
        while True:
            await self._view_changed.wait()
            self._view_changed.clear()
            self._feed(lambda at: self.participant.observe(self._view_maker(), at))
            await asyncio.sleep(0.1)  # a burst of changes is one change

    async def _upkeep(self) -> None:
        collect_at = time.monotonic() + COLLECT_EVERY_S
        while True:
            await asyncio.sleep(1.0)
            for job in list(self.participant.witnesses) + list(self.participant.runners):
                self._publish(job)
            if time.monotonic() >= collect_at:
                collect_at = time.monotonic() + COLLECT_EVERY_S
                statuses = self.statuses()
                await asyncio.to_thread(self._collect, statuses)

    def _collect(self, statuses: dict[bytes, JobStatus]) -> None:
        for status in statuses.values():
            self.store.prune(status.job, status.settled, COMMITTED_KEPT)
        self.logs.trim(set(self.attempts))
        self.store.collect(min_age_s=COLLECT_MIN_AGE_S, now_unix=time.time())

    # --- effects

    async def _perform(self, output: Directed | Submitted) -> None:
        if isinstance(output, Submitted):
            future = self._submissions.get(output.job)
            if future is not None and not future.done():
                future.set_result(output.problem)
            return
        job, role, effect = output.job, output.role, output.effect
        attempt = self.attempts.get(job)
        match effect:
            case SaveCell(cell=cell):
                await self.journal.save_cell(cell)
                self._cell_saved.set()
                self._publish(job)
            case Send(to=to, message=message):
                self._send(to, message)
            case SetTimer():
                self._set_timer(job, role, effect)
            case Launch(ledger=ledger) if attempt is not None:
                attempt.launch(ledger)
            case SaveCheckpoint() if attempt is not None:
                attempt.save(effect)
            case SaveResult() if attempt is not None:
                attempt.save_result(effect)
            case Notify(kind=kind, grace_s=grace_s, reason=reason) if attempt is not None:
                attempt.notify(kind, grace_s, reason)
            case RunUntil(boot_s=until) if attempt is not None:
                attempt.allow_until(until)
            case Kill() if attempt is not None:
                attempt.kill()
            case Committed(commit=commit):
                step = f" at step {commit.step}" if commit.step is not None else ""
                others = f"{len(commit.holders)} other node{'' if len(commit.holders) == 1 else 's'}"
                await self._note(job, f"checkpoint {commit.seq}{step} committed, on {others}")
            case StateChanged(state=state, detail=detail):
                if self.states.get(job) != (state, detail):
                    self.states[job] = (state, detail)
                    await self._note(job, f"{state}" + (f": {detail}" if detail else ""))
            case Ended(reason=reason):
                await self._note(job, f"attempt ended here: {reason}")
                self.states.pop(job, None)
                self._end(job, role)

    def _send(self, to: NodeId, message: AnyMessage) -> None:
        if to == self._me:
            self._feed(lambda at: self.participant.receive(self._me, message, at))
        else:
            self._postman.post(to, encode_message(message))

    def _set_timer(self, job: bytes, role: Role, effect: SetTimer) -> None:
        key = (job, role, effect.name)
        old = self._timers.pop(key, None)
        if old is not None:
            old.cancel()
        timer = Timer(effect.name, effect.token)
        delay = max(0.0, effect.at - instant().now)
        loop = asyncio.get_running_loop()
        self._timers[key] = loop.call_later(
            delay, self._feed, lambda at: self.participant.on_timer(job, role, timer, at)
        )

    def _end(self, job: bytes, role: Role) -> None:
        for name in ("renew", "lease", "grace", "acquire", "max time"):
            timer = self._timers.pop((job, role, name), None)
            if timer is not None:
                timer.cancel()
        attempt = self.attempts.pop(job, None)
        if attempt is not None:
            task = asyncio.create_task(self._clear_away(job, attempt), name=f"end {format_job(job)[:8]}")
            self._endings.add(task)
            task.add_done_callback(self._endings.discard)

    async def _clear_away(self, job: bytes, attempt: Attempt) -> None:
        try:
            await attempt.close()
        finally:
            self.inventory.release(job)
            done = self._vacated.pop(job, None)
            if done is not None:
                done.set()
            self._publish(job)

    async def _end_all(self, jobs: list[bytes], event: RunnerEvent, timeout_s: float) -> None:
        waits = [self._vacated.setdefault(job, asyncio.Event()) for job in jobs]
        for job in jobs:
            self._feed(lambda at, job=job: self.participant.tell_runner(job, event, at))  # type: ignore[misc]
        try:
            async with asyncio.timeout(timeout_s):
                for wait in waits:
                    await wait.wait()
        except TimeoutError:
            log.warning("some guests had not ended after %g s; they are killed", timeout_s)
            await asyncio.gather(*(attempt.kill_guest() for attempt in self.attempts.values()))

    # --- the rules

    def _open_spec(self, job: bytes, sealed: bytes) -> JobSpec:
        """The job as its submitter signed it, the submitter being a member under the user's name; else SpecError."""
        spec, signer = self._read_spec(job, sealed)
        now, created = time.time(), spec.created_unix_ms / 1000
        if not now - NODE_CERTIFICATE_S < created < now + CLOCK_GRACE_S:
            raise SpecError("the job's description is from another time: is the clock right?")
        try:
            # Its certificate may have ended since: what counts is that it held when the job was submitted.
            standing = self._trust.check_chain(spec.chain, min(now, created))
        except TrustError as error:
            raise SpecError(f"the job's submitter is not a member of this mesh: {error}") from error
        if standing.node_id != signer or standing.user != spec.user:
            raise SpecError("the job's description carries somebody else's certificate")
        if USER not in standing.roles:
            raise SpecError(f"{standing.nick} may lend, but not submit")
        return spec

    def _read_spec(self, job: bytes, sealed: bytes) -> tuple[JobSpec, NodeId]:
        """The job and its signer, for one that was let in before."""
        try:
            signer, payload = open_envelope(sealed, self._trust.mesh_id, "job")
        except EnvelopeError as error:
            raise SpecError(f"the job's description is not signed by a node of this mesh: {error}") from error
        spec = decode_spec(payload)
        if signer != spec.submitter or job_id(payload) != job:
            raise SpecError("the job's description is not the one its submitter signed")
        return spec, signer

    def _admit(self, job: bytes, spec: JobSpec, start: Start) -> str | None:
        request = placement_request(job, spec, start.ledger.next_attempt)
        refusal = self.inventory.admit(request)
        if refusal is not None:
            return refusal
        name = engine_for(request, self.inventory.advert())
        engine = self._engines.get(name or "")
        if engine is None:
            self.inventory.release(job)
            return f"has no {name} engine"
        self.attempts[job] = Attempt(
            job,
            spec,
            start.ledger.next_attempt,
            self._directory / format_job(job) / str(start.term),
            self.logs.prepare(job, start.ledger.next_attempt, spec.user),
            engine,
            self.inventory.gpus_of(job),
            self._nick,
            self.store,
            self.courier,
            lambda payload: seal(self._identity, self._trust.mesh_id, "manifest", payload),
            lambda: self._custody(job),
            lambda event: self._feed(lambda at: self.participant.tell_runner(job, event, at)),
        )
        return None

    def _custody(self, job: bytes) -> Custody:
        runner = self.participant.runners.get(job)
        leaving = {m.node_id for m in self.membership.members() if m.draining or m.state != "alive"}
        order = replica_order(job, self.adverts(), {self._me} | leaving, need_mib=1)
        if runner is None:
            return Custody(config=0, term=0, fallback=tuple(order))
        return Custody(config=runner.config.number, term=runner.term, fallback=tuple(order))

    def _may_cancel(self, sender: NodeId, user: str, spec: JobSpec) -> bool:
        """The user who submitted it, from any of his nodes."""
        standing = self._trust.standing(sender, time.time())
        return sender == self._me or (standing is not None and standing.user == user == spec.user)

    def _is_mandated(self, message: Accept, spec: JobSpec) -> bool:
        """Signed by the job's user, at whichever of his nodes."""
        try:
            signer, payload = open_envelope(message.mandate or b"", self._trust.mesh_id, "recovery")
        except EnvelopeError:
            return False
        standing = self._trust.standing(signer, time.time())
        is_user = standing is not None and standing.user == spec.user and USER in standing.roles
        return is_user and decode_mandate(payload) == Mandate(message.job, message.term, message.config)

    # --- what others see

    def statuses(self) -> dict[bytes, JobStatus]:
        """Every job this node has heard of, each by the most advanced view."""
        views = [self._heard(record) for record in self.membership.records("jobs/")]
        mine = [self.status(job) for job in {*self.participant.witnesses, *self.participant.runners}]
        return merge_statuses(view for view in (*views, *mine) if view is not None)

    def _heard(self, record: Record) -> JobStatus | None:
        """What a section says; each is decoded once."""
        key = (record.node, record.section)
        known = self._decoded.get(key)
        if known is None or known[0] is not record:
            known = self._decoded[key] = (record, decode_status(record.body))
            if len(self._decoded) > STATUSES_DECODED:
                self._decoded.clear()
        return known[1]

    def status(self, job: bytes) -> JobStatus | None:
        """This node's own view of a job it has a part in."""
        witness, runner = self.participant.witnesses.get(job), self.participant.runners.get(job)
        attempt = self.attempts.get(job)
        if witness is None and runner is None:
            return None
        steward = self.participant.stewards.get(job)
        acts = runner is not None or (steward is not None and steward.state in ACTING)
        state, detail = self.states.get(job, ("", "")) if acts else ("", "")
        progress = attempt.progress if attempt is not None else None
        note = attempt.note if attempt is not None else ""
        waiting = None
        if steward is not None and acts and runner is None and not steward.held_back_by:
            waiting = waiting_place(steward.spec, steward.request(steward.witness.cell.ledger))
        return status_of(job, witness, runner, state, detail or note, progress, waiting)

    def _publish(self, job: bytes) -> None:
        status = self.status(job)
        if status is None:
            return
        before, at = self._published.get(job, (None, 0.0))
        now = time.monotonic()
        if before != status or now - at > REPUBLISH_S:
            self._published[job] = (status, now)
            ended = before is not None and before.outcome is None and status.outcome is not None
            section = f"jobs/{format_job(job)}"
            self.membership.publish(section, encode_status(status), STATUS_TTL_S, urgent=ended)

    async def _note(self, job: bytes, text: str) -> None:
        log.info("job %s: %s", format_job(job)[:8], text)
        await self.journal.record(job, self._nick, text)
        self._publish(job)

    def _view_maker(self) -> Callable[[bytes], View]:
        members = self.membership.members()
        alive = frozenset(m.node_id for m in members if m.present)
        leaving = frozenset(m.node_id for m in members if m.draining)
        left = frozenset(m.node_id for m in members if m.state == "left")
        adverts = tuple(sorted(self.adverts(), key=lambda advert: advert.node))
        statuses = self.statuses().values()
        ends = {status.job: status.outcome.kind for status in statuses if status.outcome is not None}
        queue = _queue(statuses, adverts)
        return Surroundings(self._me, alive, leaving, left, adverts, self.disks(), queue, ends).view

    def _still_witness(self) -> bool:
        """Whether a group that this node is in could still replace it: somebody else stays who is not in it yet."""
        staying = {m.node_id for m in self.membership.members() if m.state == "alive" and not m.draining}
        return any(
            self._me in witness.cell.config.nodes and not witness.finished and staying - set(witness.cell.config.nodes)
            for witness in self.participant.witnesses.values()
        )


def instant() -> Instant:
    return Instant(boot_s(), time.time_ns() // 1_000_000)


def _queue(statuses: Iterable[JobStatus], adverts: Sequence[Advert]) -> Queue:
    """Who waits, and what each user has had lately, by what this node has heard."""
    now_unix = time.time()
    waiting: list[Waiting] = []
    usage: Counter[str] = Counter()
    for status in statuses:
        if status.waiting is not None and status.waiting.job == status.job:
            waiting.append(status.waiting)
            usage[status.user] += 0
        for attempt in status.attempts:
            if attempt.running_unix_ms:
                ago_s = now_unix - (attempt.ended_unix_ms or attempt.seen_unix_ms) / 1000
                usage[status.user] += decayed(attempt.ran_s, status.gpus, ago_s)
    return Queue(waiting, usage, adverts, int(now_unix))

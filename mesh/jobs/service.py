"""Jobs on this node: the shell around `Participant`. Performs its effects in order, and carries the world's answers back.

One queue of inputs, one task that works it off: messages, timers, changes of the mesh, facts from attempts. So the cores never
see two things at once, and a promise is on disk before it is sent.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf
from pathlib import Path
from random import Random
from typing import Any

from ckptstore.store import Store
from membership.envelope import seal
from membership.identity import Identity, NodeId, short_id
from membership.node import MembershipNode
from membership.trust import TrustStore
from mesh.api.peer import PeerClient
from mesh.engine.alarm import boot_s
from mesh.engine.engine import Engine
from mesh.jobs.attempt import Attempt, HaveImage
from mesh.jobs.authority import Authority
from mesh.jobs.board import OWN, Board
from mesh.jobs.cadence import Cadences
from mesh.jobs.chronicle import Chronicle, Waits
from mesh.jobs.courier import Courier
from mesh.jobs.custody import Custody, custody_of
from mesh.jobs.effects import (
    Cell,
    Committed,
    Concluded,
    Decided,
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
from mesh.jobs.events import Kind, words
from mesh.jobs.hearing import Hearing
from mesh.jobs.herald import Herald, speaks_for
from mesh.jobs.joblogs import JobLogs
from mesh.jobs.journal import Journal
from mesh.jobs.keyring import Keyring
from mesh.jobs.leaving import Leaving
from mesh.jobs.logcopies import EVERY_S as LOGS_EVERY_S
from mesh.jobs.logcopies import LogCopies
from mesh.jobs.mending import Mending
from mesh.jobs.messages import AnyMessage, Cancel, Enlist, Migrate, Start, Told, decode_message, encode_message
from mesh.jobs.outlook import Outlook
from mesh.jobs.participant import Directed, Participant, Role, Rules, Submitted
from mesh.jobs.past import Past
from mesh.jobs.postman import Postman
from mesh.jobs.recovery import Plan
from mesh.jobs.remains import Remains
from mesh.jobs.rendezvous import meeting_place
from mesh.jobs.reports import KillWanted, Recopied, RunnerEvent
from mesh.jobs.spec import (
    JobSpec,
    SpecError,
    encode_spec,
    format_job,
    job_id,
    placement_request,
    waiting_place,
)
from mesh.jobs.status import JobStatus, status_of
from mesh.jobs.timers import Timers
from mesh.jobs.view import Instant, Timer
from mesh.jobs.warming import Warming
from mesh.jobs.witness import Witness
from mesh.provider.inventory import Inventory
from placement.filters import engine_for

INPUT_LIMIT = 10_000  # inputs waiting; ours
REMOTE_LIMIT = INPUT_LIMIT // 2  # from here on peers are told to slow down (503): facts of this node always find room
ACTING = {"asking", "preparing", "offered", "waiting"}  # what a steward says in any other state is about the past
BATCH = 256  # inputs that are worked off together, so that their cells share one fsync; ours
LOOK_SHARE = 10  # looking around takes at most one part in so many of a node's time; ours
MAIL_WITHIN_S = 3.0  # what is not delivered by then is sent again by the cores: `steward.ANSWER_S`
COLLECT_EVERY_S = 60.0

TIMERS = ("renew", "lease", "grace", "acquire", "max time", "deadline", "home", "crew", "kept", "ask")

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
        engines: Mapping[str, Engine],
        inventory: Inventory,
        peers: PeerClient,
        directory: Path,
        logs: JobLogs,
        rng: Random,
        places_changed: Callable[[], None] = lambda: None,
        have_image: HaveImage | None = None,
        keep_s: float = inf,
    ) -> None:
        self.membership = membership
        self.journal = journal
        self.store = store
        self.inventory = inventory
        self.courier = Courier(peers, store)
        self.warming = Warming(self.courier)
        self.leaving = Leaving(self, instant)
        self.mending = Mending(identity.node_id, self.courier, store, self.custody, self._recopied)
        self.attempts: dict[bytes, Attempt] = {}
        self.states: dict[bytes, tuple[str, str]] = {}
        self._identity, self._trust = identity, trust
        self._me = identity.node_id
        self._authority = Authority(self._me, trust)
        self._nick = membership.standing.nick
        self._engines = engines
        self._directory = directory
        self._places_changed, self._have_image = places_changed, have_image
        self.logs = logs
        self._postman = Postman(lambda node, body: peers.call(node, "POST", "/v1/messages", body, MAIL_WITHIN_S))
        judges = self._authority
        rendezvous = partial(meeting_place, membership.host, rng)
        rules = Rules(judges.open_spec, self._admit, judges.may_cancel, judges.is_mandated, rendezvous)
        self.participant = Participant(self._me, journal.disk, self._nick, rules, rng)
        self.keyring = Keyring(identity, peers, journal, self.participant, lambda: self.outlook.last.alive)
        self._inputs: asyncio.Queue[Input] = asyncio.Queue(INPUT_LIMIT)
        self._submissions: dict[bytes, asyncio.Future[str | None]] = {}
        self._timers = Timers()
        self.cadences = Cadences(journal)
        self._endings: set[asyncio.Task[None]] = set()
        self._cell_saved = asyncio.Event()
        self.board = Board()
        self.chronicle = Chronicle(identity, trust, journal)
        self.past = Past(
            journal, self.participant, self.board, judges.read_spec, self._take_up, self._publish, self._put_away
        )
        self._remains = Remains(store, journal, keep_s)
        self._log_copies = LogCopies(peers)
        self._herald = Herald(membership.publish)
        self.hearing = Hearing(self._me, membership, self.board, self.views_changed)
        self.outlook = Outlook(self._me, membership, self.board)
        self._view_changed = asyncio.Event()
        self._looked_s = 0.0  # how long that last took
        self._vacated: dict[bytes, asyncio.Event] = {}
        self._waits = Waits()
        self.left: Callable[[bytes, Attempt, str], None] = lambda *ended: None  # an attempt has ended here
        self.cleared: Callable[[bytes, Attempt, str], None] = lambda *ended: None  # and nothing of it is left

    # --- life

    async def restore(self) -> None:
        """Take up the cells of an earlier run, before anybody can ask about them."""
        await self.keyring.restore()
        await self.cadences.restore()
        await self.leaving.restore()
        await self.past.restore()
        await self._remains.restore()
        cells, damaged = await self.journal.cells()
        self.participant.forgotten = set(damaged)
        for job, problem in damaged.items():
            self.chronicle.say(job, "state", f"a damaged witness cell was skipped: {problem}")
        await self._take_up(cells)

    async def _take_up(self, cells: Sequence[Cell]) -> None:
        for cell in cells:
            try:
                spec = self._authority.read_spec(cell.job, cell.spec)
            except SpecError as error:
                self.chronicle.say(cell.job, "state", f"a witness cell was skipped: {error}")
                self.participant.forgotten.add(cell.job)
                continue
            at = instant()
            await self._perform_all(self.participant.restore(Witness.restored(cell, spec, at.now), at))

    async def run(self) -> None:
        """Work off inputs until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._work(), name="job inputs")
            group.create_task(self._watch_mesh(), name="job view")
            group.create_task(self._upkeep(), name="job upkeep")
            group.create_task(self._copy_logs(), name="job logs")

    async def close(self) -> None:
        """End every guest at once, whatever its state. Vacate first to be kind."""
        self._timers.stop()
        await asyncio.gather(*(attempt.close() for attempt in self.attempts.values()), return_exceptions=True)
        await asyncio.gather(*self._endings, return_exceptions=True)
        await asyncio.gather(self.keyring.close(), self.warming.close(), self.mending.close(), self.past.close())
        await self._postman.close()

    # --- for the API

    def deliver(self, sender: NodeId, data: bytes) -> bool:
        """A message from a peer; False if this node has too much to do. MessageError if it is none."""
        message = decode_message(data)
        if isinstance(message, Told):
            if message.job in self.participant.witnesses:
                self.participant.refused += self.chronicle.take(message)
            return True
        if self._inputs.qsize() >= REMOTE_LIMIT:
            return False
        self.past.at_hand(message.job, lambda: self._feed(lambda at: self.participant.receive(sender, message, at)))
        return True

    async def submit(self, spec: JobSpec) -> tuple[bytes, bytes, str | None]:
        """Hand a job to its witnesses: its id, its sealed description, and why no majority has it, or None."""
        payload = encode_spec(spec)
        sealed = seal(self._identity, self._trust.mesh_id, "job", payload)
        job = job_id(payload)
        await self.journal.save_submitted(job, sealed)
        return job, sealed, await self.submit_sealed(job, sealed, spec)

    async def submit_sealed(self, job: bytes, sealed: bytes, spec: JobSpec) -> str | None:
        """The same once more, or for whoever has sealed it."""
        problem = await self._answered(job, lambda at: self.participant.submit(job, sealed, spec, at))
        if problem is None:
            self.chronicle.say(job, "submitted", f"by {spec.user}")
        return problem

    async def recover(self, plan: Plan, mandate: bytes) -> str | None:
        """Let the group that the job's user has named take over: why it did not, or None."""
        job = plan.mandate.job
        problem = await self._answered(job, lambda at: self.participant.recover(plan, mandate, at))
        if problem is None:
            words = f"its user made it go on from the record of {len(plan.kept)}, without {len(plan.lost)}"
            self.chronicle.say(job, "order", words, new="recover")
        return problem

    def cancel(self, job: bytes, user: str, nodes: Sequence[NodeId]) -> None:
        """Ask everybody who may have a part in the job to end it."""
        self.chronicle.say(job, "order", new="cancel")
        for node in dict.fromkeys([*nodes, self._me]):
            self._send(node, Cancel(job=job, user=user))

    def migrate(self, job: bytes, user: str, runner: NodeId, to: NodeId | None) -> None:
        """Ask the node where it runs to give it notice, and to have it go on elsewhere."""
        self.chronicle.say(job, "order", new="migrate", target=to)
        self._send(runner, Migrate(job=job, user=user, to=to))

    def tell(self, job: bytes, event: RunnerEvent) -> None:
        """Something of this node's, for the job's runner or mate here."""
        self._feed(lambda at: self.participant.tell_runner(job, event, at))

    async def vacate(self, grace_s: float, reason: str, only: Sequence[bytes] | None = None) -> list[bytes]:
        """Give notice to every guest, or to these; wait until each attempt has ended (or its grace has, and it was killed)."""
        jobs = self._those(only)
        await self._end_all(self.leaving.notices(jobs, grace_s, reason), grace_s + 30)
        return jobs

    async def kill(self, reason: str, only: Sequence[bytes] | None = None) -> list[bytes]:
        """SIGKILL to every guest, or to these, now; the bookkeeping follows, and knows first that it was no fault of theirs."""
        jobs = self._those(only)
        await self._end_all(dict.fromkeys(jobs, KillWanted(reason)), 10.0, at_once=True)
        return jobs

    def _those(self, only: Sequence[bytes] | None) -> list[bytes]:
        return [job for job in self.participant.hosted if only is None or job in only]

    async def hand_over(self, timeout_s: float) -> None:
        """Before leaving: let runners and stewards replace this node in its witness groups, and deliver what is posted."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.participant.replaceable(self.outlook.look().staying):
                    self._cell_saved.clear()
                    await self._cell_saved.wait()
        except TimeoutError:
            log.info("still a witness of some jobs; their groups go on without this node")
        await self._postman.flush(1.0)

    def views_changed(self) -> None:
        self._view_changed.set()

    # --- inputs

    async def _answered(self, job: bytes, item: Input) -> str | None:
        """Feed what a majority must take in: why it did not, or None."""
        while job in self._submissions:
            await asyncio.wait([self._submissions[job]])
            await asyncio.sleep(0)  # whoever waited for that takes it away
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
            batch = [await self._inputs.get()]
            while len(batch) < BATCH and not self._inputs.empty():
                batch.append(self._inputs.get_nowait())
            await self._perform_all([output for item in batch for output in item(instant())])

    async def _watch_mesh(self) -> None:
        while True:
            await self._view_changed.wait()
            self._view_changed.clear()
            self._feed(self._look)
            await asyncio.sleep(max(0.1, LOOK_SHARE * self._looked_s))  # a burst of changes is one change

    async def _upkeep(self) -> None:
        collect_at = time.monotonic() + COLLECT_EVERY_S
        while True:
            await asyncio.sleep(1.0)
            for job in self.leaving.slowest_first({*self.past.present(time.time()), *self.participant.runners}):
                runner = self.participant.runners.get(job)
                self.warming.follow(job, runner)
                self.keyring.follow(job, runner)
                self._publish(job)
            guests = {job: self.attempts[job] for job in self.participant.runners if job in self.attempts}
            await self.cadences.look(guests.values(), instant().now, self.courier.budget_bps)
            self.mending.look(self.board.all().values(), self.outlook.last.staying, set(self.participant.runners))
            if self.board.waiting:
                self.views_changed()
            if time.monotonic() >= collect_at:
                collect_at = time.monotonic() + COLLECT_EVERY_S
                await self._remains.tidy(self.board.all(), time.time())
                await asyncio.to_thread(self.logs.trim, set(self.attempts))
                await self.past.put_away({*self.attempts, *self._submissions}, time.time())

    async def _copy_logs(self) -> None:
        while True:
            await asyncio.sleep(LOGS_EVERY_S)
            await self._log_copies.ship(
                {
                    (job, attempt.number): (attempt.log_path, [node for node in self._group(job) if node != self._me])
                    for job, attempt in self.attempts.items()
                    if job in self.participant.runners
                }
            )

    # --- effects

    async def _perform_all(self, outputs: Sequence[Directed | Submitted]) -> None:
        """Every promise among them is durable before anything else happens: so none is given that could be forgotten."""
        cells: dict[bytes, Cell] = {}
        for output in outputs:
            if isinstance(output, Directed) and isinstance(output.effect, SaveCell):
                cells[output.job] = output.effect.cell
        if cells:
            await self.journal.save_cells(list(cells.values()))
            self._cell_saved.set()
        changed = dict.fromkeys(cells)
        for output in outputs:
            if isinstance(output, Submitted):
                future = self._submissions.get(output.job)
                if future is not None and not future.done():
                    future.set_result(output.problem)
            else:
                self._perform(output)
                if isinstance(output.effect, Committed | StateChanged | Ended):
                    changed[output.job] = None
        self._tell_witnesses()
        for job in changed:
            self._publish(job)

    def _tell_witnesses(self) -> None:
        """What was said here of each job, for those who keep its record."""
        for job, told in self.chronicle.untold():
            for node in self._group(job):
                if node != self._me:
                    self._send(node, told)

    def _group(self, job: bytes) -> tuple[bytes, ...]:
        """The job's witnesses, as far as this node knows."""
        runner, witness = self.participant.runners.get(job), self.participant.witnesses.get(job)
        config = runner.config if runner is not None else witness.cell.config if witness is not None else None
        known = self.board.get(job)
        return config.nodes if config is not None else known.witnesses if known is not None else ()

    def _perform(self, output: Directed) -> None:
        job, role, effect = output.job, output.role, output.effect
        attempt = self.attempts.get(job)
        match effect:
            case Send(to=to, message=message):
                self._send(to, message)
            case SetTimer():
                timer = Timer(effect.name, effect.token)
                self._timers.set(
                    (job, role, effect.name),
                    effect.at - instant().now,
                    partial(self._feed, lambda at: self.participant.on_timer(job, role, timer, at)),
                )
            case Launch(ledger=ledger, post=post) if attempt is not None:
                attempt.launch(ledger, post)
            case SaveCheckpoint() if attempt is not None:
                attempt.save(effect)
            case SaveResult() if attempt is not None:
                attempt.save_result(effect)
            case Notify(kind=kind, grace_s=grace_s, reason=reason) if attempt is not None:
                self.warming.stop(job)
                attempt.notify(kind, grace_s, reason)
            case RunUntil(boot_s=until) if attempt is not None:
                attempt.allow_until(until)
            case Kill() if attempt is not None:
                attempt.kill()
            case Committed(commit=commit):
                others = f"on {len(commit.holders)} other node{'' if len(commit.holders) == 1 else 's'}"
                self.note(job, "checkpoint", others, number=commit.seq, step=commit.step)
                self.warming.follow(job, self.participant.runners.get(job))
            case StateChanged(state=state, detail=detail):
                before = self.states.get(job, ("", ""))
                if before != (state, detail):
                    self.states[job] = (state, detail)
                    self._note_state(job, before[0], state, detail)
            case Ended(reason=reason):
                self.note(job, "attempt", reason)
                self.states.pop(job, None)
                self._end(job, role, reason)
            case Decided(decision=decision):
                self.note(job, "decision", decision.words, target=decision.chosen, decision=decision)
            case Concluded(outcome=outcome):
                self.note(job, "end", outcome.detail, new=outcome.kind)

    def _send(self, to: NodeId, message: AnyMessage) -> None:
        if to == self._me:
            self._feed(lambda at: self.participant.receive(self._me, message, at))
        else:
            self._postman.post(to, encode_message(message))

    def _end(self, job: bytes, role: Role, reason: str) -> None:
        self._timers.stop((job, role, name) for name in TIMERS)
        self.warming.forget(job)
        attempt = self.attempts.pop(job, None)
        if attempt is not None:
            self.left(job, attempt, reason)
            self.cadences.left(attempt, reason)
            task = asyncio.create_task(self._clear_away(job, attempt, reason), name=f"end {format_job(job)[:8]}")
            self._endings.add(task)
            task.add_done_callback(self._endings.discard)

    async def _clear_away(self, job: bytes, attempt: Attempt, reason: str) -> None:
        try:
            await attempt.close()
        finally:
            self.cleared(job, attempt, reason)
            self.inventory.release(job)
            self._places_changed()
            self._vacated.pop(job, asyncio.Event()).set()
            self._publish(job)

    async def _end_all(self, jobs: Mapping[bytes, RunnerEvent], timeout_s: float, at_once: bool = False) -> None:
        waits = [self._vacated.setdefault(job, asyncio.Event()) for job in jobs]
        for job, event in jobs.items():
            self.tell(job, event)
        if at_once:
            await asyncio.gather(*(self.attempts[job].kill_guest() for job in jobs if job in self.attempts))
        try:
            async with asyncio.timeout(timeout_s):
                for wait in waits:
                    await wait.wait()
        except TimeoutError:
            log.warning("some guests had not ended after %g s; they are killed", timeout_s)
            await asyncio.gather(*(self.attempts[job].kill_guest() for job in jobs if job in self.attempts))

    # --- the rules

    def _admit(self, job: bytes, spec: JobSpec, order: Start | Enlist) -> str | None:
        number = order.number if isinstance(order, Enlist) else order.ledger.next_attempt
        request = placement_request(job, spec, number)
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
            number,
            self._directory / format_job(job) / str(order.term),
            self.logs.prepare(job, number, spec.user),
            engine,
            self.inventory.portions_of(job),
            self._nick,
            self.store,
            self.courier,
            lambda payload: seal(self._identity, self._trust.mesh_id, "manifest", payload),
            lambda: self.custody(job),
            lambda: self.keyring.vault(job, spec, self._group(job)),
            lambda event: self.tell(job, event),
            lambda text, new: self.note(job, "state", text, new=new),
            self._have_image,
        )
        self._places_changed()
        return None

    def custody(self, job: bytes) -> Custody:
        runner = self.participant.runners.get(job)
        hierarchy = self.outlook.hierarchy()
        custody = custody_of(job, self._me, runner, self.membership.members(), hierarchy)
        if runner is None:
            return custody
        return custody.first(self.leaving.order(job, custody.fallback, runner.ledger.prefer))

    def _recopied(self, job: bytes, manifest: bytes, holders: tuple[NodeId, ...], words: str) -> None:
        self.note(job, "state", words, new="copied again")
        self.tell(job, Recopied(manifest, holders))

    # --- what others see

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
        note, preparing = (attempt.held or attempt.note, attempt.preparing) if attempt is not None else ("", "")
        waiting = None
        if steward is not None and acts and runner is None and not steward.held_back:
            waiting = waiting_place(steward.spec, steward.request(steward.witness.cell.ledger, instant()))
        warm = runner is not None and self.warming.is_warm(job, runner.spec, runner.onward.heir, runner.ledger.commit)
        heeds, portions = (attempt.heeds_notice, attempt.portions) if attempt is not None else (None, ())
        due, saving = (attempt.cadence.next, attempt.deposits.saving) if attempt is not None else (None, None)
        detail = preparing or detail or note
        return status_of(job, witness, runner, state, detail, progress, waiting, heeds, warm, portions, due, saving)

    def _publish(self, job: bytes) -> None:
        """Take note of how this node sees the job now; and tell the others, if it is this node that speaks for it."""
        known = self.board.own(job)
        if known is not None and known.outcome is not None and job not in self.participant.runners:
            status: JobStatus | None = known  # for ever
        else:
            status = self.status(job)
        if status != known:
            if self.board.tell(OWN, job, status):
                self.views_changed()
            if status is None or status.outcome is not None:
                self.chronicle.forget(job)
                self._waits.forget(job)
        if status is not None and self._speaks_for(status):
            self._herald.tell(status)

    def _put_away(self, job: bytes) -> None:
        self.states.pop(job, None)
        self._herald.forget(job)

    def _speaks_for(self, status: JobStatus) -> bool:
        steward = self.participant.stewards.get(status.job)
        acting = steward is not None and steward.state in ACTING
        return speaks_for(status, self._me, status.job in self.participant.runners, acting, self.outlook.last.alive)

    def _note_state(self, job: bytes, old: str, new: str, detail: str) -> None:
        if self._waits.is_news(job, old, new, time.monotonic()):
            self.note(job, "state", detail, old=old, new=new)

    def note(self, job: bytes, kind: Kind, reason: str, **fields: Any) -> None:
        attempt = self.attempts.get(job)
        event = self.chronicle.say(job, kind, reason, attempt=attempt.number if attempt is not None else None, **fields)
        log.info("job %s: %s", format_job(job)[:8], words(event, short_id(event.target) if event.target else ""))

    def _look(self, at: Instant) -> list[Directed | Submitted]:
        begun = time.monotonic()
        outputs = self.participant.observe(self.outlook.look(), at)
        self._looked_s = time.monotonic() - begun
        return outputs


def instant() -> Instant:
    return Instant(boot_s(), time.time_ns() // 1_000_000)

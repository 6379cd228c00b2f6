"""Job service: the shell around `Participant`. It performs the effects of the job cores and feeds them what happens.

One queue of inputs and one worker: the cores never see two things at once, and a promise is on disk before it is sent
(`durable_order.py`).
"""

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from pathlib import Path
from random import Random

import msgspec

from ckptstore.store import Store
from membership.envelope import MeshSealer, seal
from membership.identity import Identity, NodeId
from membership.node import MembershipNode
from membership.trust import TrustStore
from mesh.checkpoints.keys import SECRETS_KEY, Keyring, KeyRules
from mesh.checkpoints.repair import Repair
from mesh.checkpoints.repair_plan import LOST_S
from mesh.checkpoints.replica_policy import ReplicaPolicy, replica_policy_of
from mesh.checkpoints.replicator import Replicator
from mesh.checkpoints.retention import Retention
from mesh.checkpoints.save_schedule import SaveSchedules, base_rates
from mesh.checkpoints.witness_group import WitnessGroup
from mesh.checkpoints.workdirs import Workdirs
from mesh.consensus.durable_order import SaveRecords, in_durable_order
from mesh.consensus.effects import (
    Abandoned,
    Committed,
    Concluded,
    Decided,
    Ended,
    GuestEffect,
    Left,
    Notify,
    Send,
    SetTimer,
    StateChanged,
    Submitted,
    WitnessRecord,
)
from mesh.consensus.forced_reconfiguration import Plan
from mesh.consensus.messages import (
    Accept,
    AnyMessage,
    Cancel,
    Enlist,
    EventReport,
    Migrate,
    Start,
    cost_of,
    decode_message,
    encode_message,
)
from mesh.consensus.participant import STILL_ENDING, Directed, Participant, Role, Rules
from mesh.consensus.reports import KillWanted, Recopied, RunnerEvent
from mesh.consensus.view import Instant, Timer
from mesh.consensus.witness import Witness
from mesh.execution.engine import Engine
from mesh.execution.secret_files import SecretFiles
from mesh.gpus.inventory import Inventory
from mesh.jobs.archive import Archive
from mesh.jobs.attempt import Attempt, HaveData, HaveImage
from mesh.jobs.attempt_secrets import AttemptSecrets
from mesh.jobs.authority import (
    Authority,
    is_user,
    may_give_secrets_share,
    may_give_share,
    may_read_secrets,
    runs,
)
from mesh.jobs.awaited_ends import AwaitedEnds
from mesh.jobs.departure_planner import DeparturePlanner
from mesh.jobs.environments import Environments
from mesh.jobs.event_log import EventLog
from mesh.jobs.input_queue import Input, InputQueue, Overloaded
from mesh.jobs.job_table import JobTable
from mesh.jobs.log_times import MARK_EVERY_S, mark_sizes
from mesh.jobs.logs import SHIP_EVERY_S, JobLogs, LogShipping
from mesh.jobs.mesh_view import MeshView, instant
from mesh.jobs.message_sender import MessageSender
from mesh.jobs.own_status import OwnStatus
from mesh.jobs.standby import StandbySync
from mesh.jobs.status_gossip import StatusGossip
from mesh.jobs.vouching import Asking, Vouching
from mesh.journal import Journal, JournalError
from mesh.model.spec import JobSpec, SpecError, encode_spec, format_job, job_id, placement_request
from mesh.network.proxy_rules import ProxyRules
from mesh.rpc.client import PeerClient
from mesh.util.task_set import TaskSet
from mesh.util.text import plural
from placement.filters import engine_for
from placement.observed import Caps
from placement.schedule import Rates

LOOK_SHARE = 10  # building views takes at most one part in so many of a node's time (own choice)
TOLD_AT = 3  # views in a row that could not be built, until the node's owner is told (own choice)
MESSAGE_TIMEOUT_S = 3.0  # then the cores send again: `leader.ANSWER_S`
UPKEEP_EVERY_S, TIDY_EVERY_S = 1.0, 60.0
UPKEPT = 100  # jobs that do not run here, looked at in a second, each in its turn (own choice)
CLOCKS_EVERY_S = 1.0  # between two looks while nothing else happens (own choice)
KILL_AFTER_GRACE_S = 30.0  # for the last upload of a guest that was given notice
KILL_WITHIN_S = 10.0
TIMERS = ("renew", "lease", "grace", "acquire", "max time", "deadline", "home", "gang", "kept", "ask")
PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
LEAST_PORT, MOST_PORT = 20_000, 65_535
PORT_TRIES = 64

log = logging.getLogger(__name__)


class JobHooks(msgspec.Struct, frozen=True):
    """Callbacks to the rest of the node.

    `attempt_ended` and `attempt_cleared` get the job, its attempt and the reason: when the attempt is over, and when nothing
    of it is left. `rates` gives this machine's departures per second from a Unix time on, `stay_caps` the limits to what other
    nodes claim about their stays. `warn` informs the node's owner.
    """

    places_changed: Callable[[], None] = lambda: None
    attempt_ended: Callable[[bytes, Attempt, str], None] = lambda job, attempt, reason: None
    attempt_cleared: Callable[[bytes, Attempt, str], None] = lambda job, attempt, reason: None
    rates: Rates = base_rates
    stay_caps: Callable[[], Mapping[bytes, Caps]] = dict
    warn: Callable[[str], None] = log.warning


class JobService:
    """The jobs of one node.

    `directory` holds the guests' files, and is emptied at a start; `disk_limit` says how many bytes each attempt may hold.
    `have_image` gives the id of an image once this node has it, `data` brings data sets here, and `proxy_rules` say which hosts
    jobs reach. What a job has left stays for `keep_s` once it is over. A checkpoint is copied again when one of its holders has
    been away for `repair_after_s`.
    """

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
        environments: Environments,
        disk_limit: Callable[[Path], int],
        have_image: HaveImage | None = None,
        keep_s: float = inf,
        repair_after_s: float = LOST_S,
        hooks: JobHooks | None = None,
        data: HaveData | None = None,
        proxy_rules: ProxyRules | None = None,
    ) -> None:
        self._hooks = hooks = hooks or JobHooks()
        self._identity, self._trust, self._membership = identity, trust, membership
        self._me, self._nick = identity.node_id, membership.credentials.nick
        self._journal, self._store, self._engines, self._inventory = journal, store, engines, inventory
        self.directory, self.logs, self._have_image = directory, logs, have_image
        self._data, self._proxy_rules = data, proxy_rules
        sealer = MeshSealer(identity, trust.mesh_id)
        self.authority = Authority(sealer, trust, lambda node: membership.record(node, "advert") is not None)
        self._disk_limit = disk_limit
        rng = Random()
        rules = Rules(
            self.authority.open_spec,
            self._admit,
            self.authority.may_cancel,
            self.authority.read_recovery,
            self.authority.may_propose,
            self.authority.warrant,
            self.authority.warrants_group,
            lambda: rendezvous_address(membership.own_host, rng),
            lambda guest, job, spec: inventory.fits_without(guest, placement_request(job, spec, 0)),
        )
        self.participant = Participant(self._me, journal.disk, self._nick, rules, rng)
        self.attempts: dict[bytes, Attempt] = {}
        self.job_table = JobTable()
        self.event_log = EventLog(identity, trust, journal)
        self.mesh_view = MeshView(self._me, membership, self.job_table, hooks.stay_caps)
        self.replicator = Replicator(peers, store, journal, hooks.warn)
        self._witness_group = WitnessGroup(self._me, peers, self.participant, self.authority.recovered_group)
        self.keyring = Keyring(
            identity,
            peers,
            journal,
            self.participant,
            lambda: self.mesh_view.last.alive,
            KeyRules(is_user, runs, may_give_share),
            self._witness_group,
        )
        self.secrets_keyring = Keyring(
            identity,
            peers,
            journal,
            self.participant,
            lambda: self.mesh_view.last.alive,
            # Not even other nodes of its user: only who runs the job.
            KeyRules(lambda caller, user_key: False, runs, may_give_secrets_share, may_read_secrets),
            self._witness_group,
            SECRETS_KEY,
        )
        self._secret_files, self._environments = SecretFiles(self._me), environments
        self.vouching = Vouching(self.authority, trust, self.participant, self._witness_group, peers, self.job_table)
        self._awaited_ends = AwaitedEnds(self.participant, self.job_table, self.vouching, self.views_changed)
        self.status_gossip = StatusGossip(self._me, membership, self.job_table, self.views_changed)
        self._standby_sync = StandbySync(self.replicator)
        self.own_status = OwnStatus(
            self._me,
            self.participant,
            self.attempts,
            self._standby_sync,
            self.job_table,
            self.status_gossip,
            self.mesh_view,
            self.event_log,
            self.views_changed,
        )
        self.departure_planner = DeparturePlanner(
            self.participant,
            self.attempts,
            self.replicator.bandwidth,
            self._standby_sync,
            self.mesh_view,
            membership,
            self.replica_policy,
            self.own_status.note,
        )
        self.archive = Archive(
            journal,
            self.participant,
            self.job_table,
            self.authority.read_spec,
            self._restore_records,
            self.own_status.publish,
            self.own_status.forget,
        )
        self._repair = Repair(
            self._me,
            self.replicator,
            store,
            self.replica_policy,
            self._on_recopied,
            self.vouching.relied_on,
            repair_after_s,
        )
        self._retention = Retention(store, journal, keep_s, self.vouching.needed)
        table, describe = self.job_table, self.vouching.describe
        self.workdirs = Workdirs(store, journal, keep_s, table.views, lambda: table.ends, describe)
        self._save_schedules = SaveSchedules(journal, hooks.rates)
        self._log_shipping = LogShipping(peers)
        self._message_sender = MessageSender(
            lambda node, body: peers.call(node, "POST", "/v1/messages", body, MESSAGE_TIMEOUT_S)
        )
        self._inputs = InputQueue()
        self._submissions: dict[bytes, asyncio.Future[str | None]] = {}
        self._handed_on, self._view_changed = asyncio.Event(), asyncio.Event()
        self._look_s = 0.0  # that building the last view took
        self._failed_looks = 0  # since the last view
        self._cleared: dict[bytes, asyncio.Event] = {}
        self._deliveries, self._endings = TaskSet(log), set[asyncio.Task[None]]()

    # --- life

    async def restore(self) -> None:
        """Restore the witness records of an earlier run; call it before peers can send messages."""
        await asyncio.to_thread(self._secret_files.clear)
        await asyncio.to_thread(self._environments.clear)
        await self.keyring.restore()
        await self.secrets_keyring.restore()
        await self._save_schedules.restore()
        await self.replicator.restore()
        await self.archive.restore()
        await self._retention.restore()
        await self.workdirs.restore()
        records, damaged = await self._journal.witness_records()
        self.participant.forgotten = set(damaged)
        for job, problem in damaged.items():
            self.event_log.add(job, "state", f"a damaged witness record was skipped: {problem}")
        await self._restore_records(records)

    async def _restore_records(self, records: Sequence[WitnessRecord]) -> None:
        for record in records:
            try:
                spec = self.authority.read_spec(record.job, record.spec)
            except SpecError as error:
                self.event_log.add(record.job, "state", f"a witness record was skipped: {error}")
                self.participant.forgotten.add(record.job)
                continue
            if record.reconfiguration:
                self.status_gossip.publish_recovery(record.job, record.reconfiguration)
            at = instant()
            await self._perform_all(self.participant.restore(Witness.restored(record, spec, at.now), at))

    async def run(self) -> None:
        """Work off inputs until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._work(), name="job inputs")
            group.create_task(self._watch_clocks(), name="job clocks")
            group.create_task(self._watch_mesh(), name="job view")
            group.create_task(self._upkeep(), name="job upkeep")
            group.create_task(self._tidy_now_and_then(), name="job tidying")
            group.create_task(self._ship_logs(), name="job logs")
            group.create_task(self._mark_logs(), name="times of job logs")

    async def close(self) -> None:
        """Kill every guest at once. Call `vacate` first to let guests save."""
        self._inputs.stop_timers()
        await asyncio.gather(*(attempt.close() for attempt in self.attempts.values()), return_exceptions=True)
        await asyncio.gather(*self._endings, return_exceptions=True)
        await asyncio.to_thread(self._secret_files.clear)
        await asyncio.gather(self.keyring.close(), self.secrets_keyring.close())
        await asyncio.gather(self._standby_sync.close(), self._repair.close(), self._awaited_ends.close())
        await asyncio.gather(self._deliveries.close(), self._message_sender.close())

    async def _work(self) -> None:
        while True:
            batch = await self._inputs.batch()
            inputs = (self.participant.look_at_clocks, *batch)
            await self._perform_all([output for item in inputs for output in item(instant())])

    async def _watch_clocks(self) -> None:
        while True:
            await asyncio.sleep(CLOCKS_EVERY_S)
            await self._inputs.put(self.participant.look_at_clocks)

    async def _watch_mesh(self) -> None:
        while True:
            await self._view_changed.wait()
            self._view_changed.clear()
            await self._inputs.put(self._look)
            await asyncio.sleep(max(0.1, LOOK_SHARE * self._look_s))  # a burst of changes is one change

    def _look(self, at: Instant) -> list[Directed]:
        begun, problems = time.monotonic(), self._membership.problems
        try:
            view = msgspec.structs.replace(self.mesh_view.look(), recoveries=self.status_gossip.recoveries())
        except Exception as error:  # of what nodes publish; one in a core is fatal, since its changes are not saved
            log.exception("the view of the mesh could not be built; the next change tries again")
            self._failed_looks += 1
            if self._failed_looks >= TOLD_AT:
                problems["view"] = (
                    f"jobs are placed by an old view of the mesh: a new one fails ({error}; see daemon.log)"
                )
            return []
        finally:
            self._look_s = time.monotonic() - begun
        self._failed_looks = 0
        problems.pop("view", None)
        outputs = self.participant.observe(view, at)
        self._look_s = time.monotonic() - begun
        return outputs

    async def _upkeep(self) -> None:
        turn = 0
        while True:
            await asyncio.sleep(UPKEEP_EVERY_S)
            runners = self.participant.runners
            others = [job for job in self.archive.current(time.time()) if job not in runners]
            due = others[turn : turn + UPKEPT]
            turn = turn + UPKEPT if turn + UPKEPT < len(others) else 0
            for job in self.departure_planner.slowest_first({*due, *runners}):
                self._standby_sync.follow(job, runners.get(job))
                self.keyring.share_with_new_witnesses(job, runners.get(job))
                self.secrets_keyring.share_with_new_witnesses(job, runners.get(job))
                self.own_status.publish(job)
            guests = [self.attempts[job] for job in runners if job in self.attempts]
            await self._save_schedules.look(guests, instant().now, self.replicator.budget_bps)
            statuses = self.job_table.by_own_view(runners).values()
            self._repair.look(statuses, self.job_table.every_view(), self.mesh_view.last.staying, set(runners))
            self._awaited_ends.look()
            if self.job_table.waiting:
                self.views_changed()

    async def _tidy_now_and_then(self) -> None:
        """Tidy apart from the upkeep: a round asks other nodes, which may not answer."""
        while True:
            await asyncio.sleep(TIDY_EVERY_S)
            await self._tidy()

    async def _tidy(self) -> None:
        """Remove what jobs have left. The next round repeats a step that failed; a journal that cannot write ends the node."""
        steps: tuple[Callable[[], Awaitable[object]], ...] = (
            lambda: self._retention.tidy(self.job_table.views(), time.time(), time.monotonic()),
            lambda: self.workdirs.tidy(time.time(), time.monotonic()),
            lambda: asyncio.to_thread(self.logs.trim, set(self.attempts)),
            lambda: self.keyring.tidy(lambda: {info.realm for info in self._store.manifests()}),
            lambda: self.secrets_keyring.tidy(frozenset),
            lambda: self.archive.archive_old({*self.attempts, *self._submissions}, time.time()),
        )
        for step in steps:
            try:
                await step()
            except JournalError:
                raise
            except Exception:
                log.exception("what jobs have left could not all be removed; the next round tries again")

    async def _mark_logs(self) -> None:
        while True:
            await asyncio.sleep(MARK_EVERY_S)
            await asyncio.to_thread(mark_sizes, [attempt.log_path for attempt in self.attempts.values()])

    async def _ship_logs(self) -> None:
        while True:
            await asyncio.sleep(SHIP_EVERY_S)
            await self._log_shipping.ship(
                {
                    (job, attempt.number): (attempt.log_path, [node for node in self._group(job) if node != self._me])
                    for job, attempt in self.attempts.items()
                }
            )

    def views_changed(self) -> None:
        """Have a new view built soon."""
        self._view_changed.set()

    # --- messages and requests

    async def room_for(self, sender: NodeId) -> bool:
        """Wait until few messages of a peer wait to be handled; False if they still do after a while."""
        return await self._inputs.room_for(sender)

    def deliver(self, sender: NodeId, data: bytes) -> bool:
        """Take in a peer's message; False if this node is overloaded. MessageError if the bytes are not a message."""
        message = decode_message(data)
        cost = cost_of(message, len(data))
        if not self._inputs.has_room_for_peers:
            return False
        if isinstance(message, EventReport):  # after what came before it: that may say that the sender runs the job
            self._inputs.put_of_peer(sender, cost, partial(self._keep_events, sender, message))
            return True
        if sender != self._me and isinstance(message, Asking) and self._needs_vouching(message):
            if not self.vouching.enter(sender):
                return False
            self._deliveries.start(self._deliver_vouched(sender, message), f"start {format_job(message.job)[:8]}")
        elif message.job in self.participant.archived:
            self._deliveries.start(self._deliver_archived(sender, message), f"deliver {format_job(message.job)[:8]}")
        else:
            self._inputs.put_of_peer(sender, cost, partial(self.participant.receive, sender, message))
        return True

    def _keep_events(self, sender: NodeId, message: EventReport, at: Instant) -> list[Directed]:
        witness = self.participant.witnesses.get(message.job)
        if witness is not None:
            known, spec = witness.witness_record, witness.spec
            self.participant.refused += self.event_log.on_report(sender, message, known, spec)
        return []

    def _needs_vouching(self, message: Asking) -> bool:
        """Tell whether the cores cannot judge a message: it starts or displaces a job, or names a later group of one."""
        if not isinstance(message, Accept):
            return True
        known = self.participant.votes(message.job) or message.job in self.participant.archived
        return not known and bool(message.spec) and message.config.number > 0 and message.reconfiguration is None

    async def _deliver_vouched(self, sender: NodeId, message: Asking) -> None:
        try:
            allowed = await self.vouching.allows(sender, message)
        finally:
            self.vouching.leave(sender)
        if allowed:
            await self._deliver_archived(sender, message)
        else:
            self.participant.refused += 1

    async def _deliver_archived(self, sender: NodeId, message: AnyMessage) -> None:
        await self.archive.take_out((message.job,))
        await self._inputs.put(partial(self.participant.receive, sender, message))

    async def submit(self, spec: JobSpec) -> tuple[bytes, bytes, str | None]:
        """Bring a job to its witnesses: its id, its sealed spec, and why no majority has it, or None."""
        payload = encode_spec(spec)
        sealed = seal(self._identity, self._trust.mesh_id, "job", payload)
        job = job_id(payload)
        if spec.workdir is not None:
            await self.workdirs.name(spec.workdir, job)
        await self._journal.save_submitted(job, sealed)
        return job, sealed, await self.submit_sealed(job, sealed, spec)

    async def submit_sealed(self, job: bytes, sealed: bytes, spec: JobSpec) -> str | None:
        """Bring a sealed job to its witnesses, perhaps again: why no majority has it, or None."""
        problem = await self._answered(job, partial(self.participant.submit, job, sealed, spec))
        if problem is None:
            self.event_log.add(job, "submitted", f"by {spec.user}")
        return problem

    async def recover(self, plan: Plan, reconfiguration: bytes) -> str | None:
        """Bring the remaining record to the group that the job's user has named: why that failed, or None."""
        job = plan.reconfiguration.job
        problem = await self._answered(job, partial(self.participant.recover, plan, reconfiguration))
        if problem is None:
            text = f"its user recovered it from {len(plan.kept)} of its records; {len(plan.lost)} are lost"
            self.event_log.add(job, "order", text, new="recover")
        return problem

    async def _answered(self, job: bytes, item: Input) -> str | None:
        while job in self._submissions:
            await asyncio.wait([self._submissions[job]])
            await asyncio.sleep(0)  # the earlier caller removes its entry first
        try:
            self._inputs.put_now(item)
        except Overloaded as error:
            return str(error)
        answer: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._submissions[job] = answer
        try:
            return await answer
        finally:
            del self._submissions[job]

    def cancel(self, job: bytes, user: str, nodes: Sequence[NodeId]) -> None:
        """Ask every node that may take part in the job to end it."""
        self.event_log.add(job, "order", new="cancel")
        self._order([*nodes, self._me], Cancel(job=job, user=user))

    def migrate(self, job: bytes, user: str, runner: NodeId, to: NodeId | None) -> None:
        """Ask the job's runner to give it notice, so that it continues elsewhere."""
        self.event_log.add(job, "order", new="migrate", target=to)
        self._order([runner], Migrate(job=job, user=user, to=to))

    def _order(self, nodes: Sequence[NodeId], message: Cancel | Migrate) -> None:
        if self._me in nodes:
            self._inputs.put_now(partial(self.participant.receive, self._me, message))
        for node in dict.fromkeys(nodes):
            if node != self._me:
                self._message_sender.post(node, encode_message(message))

    async def vacate(self, grace_s: float, reason: str, only: Sequence[bytes] | None = None) -> list[bytes]:
        """Give notice to every guest, or to these; wait until each has ended, or was killed after the grace."""
        jobs = [job for job in self.participant.hosted if only is None or job in only]
        notices = self.departure_planner.notices(jobs, grace_s, reason)
        await self._end_all(notices, grace_s + KILL_AFTER_GRACE_S, at_once=False)
        return jobs

    async def kill(self, reason: str, only: Sequence[bytes] | None = None) -> list[bytes]:
        """Kill every guest, or these, now. The cores learn the reason first, so that the job is not blamed."""
        jobs = [job for job in self.participant.hosted if only is None or job in only]
        await self._end_all(dict.fromkeys(jobs, KillWanted(reason)), KILL_WITHIN_S, at_once=True)
        return jobs

    async def _end_all(self, jobs: Mapping[bytes, RunnerEvent], timeout_s: float, at_once: bool) -> None:
        cleared = [self._cleared.setdefault(job, asyncio.Event()) for job in jobs]
        reports = [self.report(job, event) for job, event in jobs.items()]
        kills = [self.attempts[job].kill_guest() for job in jobs if at_once and job in self.attempts]
        await asyncio.gather(*reports, *kills)  # started in this order; a full queue delays no kill
        try:
            async with asyncio.timeout(timeout_s):
                for event in cleared:
                    await event.wait()
        except TimeoutError:
            log.warning("some guests had not ended after %g s; they are killed", timeout_s)
            await asyncio.gather(*(self.attempts[job].kill_guest() for job in jobs if job in self.attempts))

    async def hand_over(self, timeout_s: float) -> None:
        """Before leaving: wait until witness groups have taken the releases of this node and replaced it, then deliver what is
        left to send.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while self.participant.runners or self.participant.replaceable(self.mesh_view.look().staying):
                    self._handed_on.clear()
                    await self._handed_on.wait()
        except TimeoutError:
            log.info("still a witness or the last host of some jobs; their groups continue without this node")
        await self._message_sender.flush(1.0)

    async def report(self, job: bytes, event: RunnerEvent) -> None:
        """Report an event of this node to the job's runner or gang member here."""
        await self._inputs.put(partial(self.participant.report, job, event))

    def _reported(self, attempt: Attempt, event: RunnerEvent, at: Instant) -> list[Directed]:
        """Pass on what an attempt says, unless it is over: the next one of its job may have begun here."""
        present = self.attempts.get(attempt.job) is attempt
        return self.participant.report(attempt.job, event, at) if present else []

    async def _on_recopied(self, job: bytes, manifest: bytes, holders: tuple[NodeId, ...], text: str) -> None:
        self.own_status.note(job, "state", text, new="copied again")
        await self.report(job, Recopied(manifest, holders))

    # --- effects

    async def _perform_all(self, outputs: Sequence[Directed]) -> None:
        changed: dict[bytes, None] = {}
        for step in in_durable_order(outputs):
            if isinstance(step, SaveRecords):
                await self._save(step.records)
                changed.update((record.job, None) for record in step.records)
            else:
                self._perform(step.job, step.role, step)
                if isinstance(step.effect, Committed | StateChanged | Left | Ended):
                    changed[step.job] = None
        for job, report in self.event_log.unreported():
            for node in self._group(job):
                if node != self._me:
                    self._message_sender.post(node, encode_message(report))
        for job in changed:
            self.own_status.publish(job)

    async def _save(self, records: Sequence[WitnessRecord]) -> None:
        await self._journal.save_witness_records(records)
        self._handed_on.set()
        for record in records:
            if record.reconfiguration:
                self.status_gossip.publish_recovery(record.job, record.reconfiguration)

    def _perform(self, job: bytes, role: Role, output: Directed) -> None:
        note = self.own_status.note
        match output.effect:
            case Send(to=to, message=message) if to == self._me:
                self._inputs.put_own(partial(self.participant.receive, self._me, message))
            case Send(to=to, message=message):
                self._message_sender.post(to, encode_message(message))
            case SetTimer(name=name, token=token, at=at):
                fired = partial(self.participant.on_timer, job, role, Timer(name, token))
                self._inputs.set_timer((job, role, name), at - instant().now, fired)
            case Submitted(problem=problem):
                answer = self._submissions.get(job)
                if answer is not None and not answer.done():
                    answer.set_result(problem)
            case StateChanged() as state:
                self.own_status.on_state(job, state)
            case Committed(commit=commit):
                copies = f"on {plural(len(commit.holders), 'other node')}"
                if commit.at_risk:
                    copies = f"at risk, on {len(commit.holders)} of {plural(commit.wanted, 'other node')}"
                note(job, "checkpoint", copies, number=commit.seq, step=commit.step)
                self._standby_sync.follow(job, self.participant.runners.get(job))
            case Abandoned(commit=commit, reason=reason):
                note(
                    job, "state", reason, new=f"checkpoint {commit.seq} abandoned", number=commit.seq, step=commit.step
                )
            case Decided(decision=decision):
                note(job, "decision", decision.words, target=decision.chosen, decision=decision)
            case Concluded(outcome=outcome):
                note(job, "end", outcome.detail, new=outcome.kind)
            case Left(reason=reason):
                self._leave(job, reason)
            case Ended(reason=reason):
                self._leave(job, reason)
                self._end(job, role)
            case effect if job in self.attempts and isinstance(effect, GuestEffect):
                if isinstance(effect, Notify):
                    self._standby_sync.stop(job)
                self.attempts[job].perform(effect)

    def _leave(self, job: bytes, reason: str) -> None:
        """End what this node does for an attempt, and give its place back."""
        if job in self.attempts:
            self.own_status.note(job, "attempt", reason)
            self._standby_sync.forget(job)
            attempt = self.attempts.pop(job)
            self._hooks.attempt_ended(job, attempt, reason)
            self._save_schedules.left(attempt, reason)
            task = asyncio.create_task(self._clear(job, attempt, reason), name=f"end {format_job(job)[:8]}")
            self._endings.add(task)
            task.add_done_callback(self._endings.discard)

    def _end(self, job: bytes, role: Role) -> None:
        self._inputs.stop_timers((job, role, name) for name in TIMERS)
        self.own_status.forget_state(job)
        self._handed_on.set()

    async def _clear(self, job: bytes, attempt: Attempt, reason: str) -> None:
        try:
            await attempt.close()
        finally:
            if job not in self.attempts:  # else the next one has taken over its place
                self._inventory.release(job)
            self._hooks.places_changed()
            self._cleared.pop(job, asyncio.Event()).set()
            self.own_status.publish(job)
            self._hooks.attempt_cleared(job, attempt, reason)  # last: a report that fails keeps no place

    def _group(self, job: bytes) -> tuple[bytes, ...]:
        """Return the job's witnesses, as far as this node knows them."""
        runner, witness = self.participant.runners.get(job), self.participant.witnesses.get(job)
        config = runner.config if runner is not None else witness.witness_record.config if witness is not None else None
        known = self.job_table.get(job)
        return config.nodes if config is not None else known.witnesses if known is not None else ()

    # --- rules of the cores

    def _admit(self, job: bytes, spec: JobSpec, order: Start | Enlist) -> str | None:
        if job in self.attempts:  # its end was decided in this batch of inputs, and is performed after it
            return STILL_ENDING
        number = order.number if isinstance(order, Enlist) else order.record.next_attempt
        request = placement_request(job, spec, number)
        refusal = self._inventory.admit(request)
        if refusal is not None:
            return refusal
        name = engine_for(request, self._inventory.advert())
        engine = self._engines.get(name or "")
        if engine is None:
            self._inventory.release(job)
            return f"has no {name} engine"
        try:
            log_path = self.logs.prepare(job, number, spec.user_key)
        except OSError as error:
            self._inventory.release(job)
            return f"cannot write the job's log ({error.strerror})"
        attempt = self.attempts[job] = Attempt(
            job,
            spec,
            number,
            self.directory / format_job(job) / str(order.term),
            log_path,
            engine,
            self._inventory.portions_of(job),
            self._nick,
            self._store,
            self.replicator,
            partial(seal, self._identity, self._trust.mesh_id, "manifest"),
            partial(self.replica_policy, job),
            lambda: self.keyring.cipher(job, spec, self._group(job)),
            lambda event: self._inputs.put(partial(self._reported, attempt, event)),
            self._disk_limit,
            AttemptSecrets(
                spec,
                f"{format_job(job)}-{order.term}",
                engine.own_root,
                self._identity,
                self._secret_files,
                lambda: self.secrets_keyring.cipher(job, spec, self._group(job)),
                lambda: self.secrets_keyring.forget(spec),
            ),
            self._environments,
            lambda text, new: self.own_status.note(job, "state", text, new=new),
            self._have_image,
            self._data,
            self._proxy_rules,
        )
        self._hooks.places_changed()
        return None

    def replica_policy(self, job: bytes) -> ReplicaPolicy:
        """Return who may hold the job's checkpoints now."""
        runner = self.participant.runners.get(job)
        hierarchy = self.mesh_view.hierarchy()
        policy = replica_policy_of(job, self._me, runner, self._membership.members(), hierarchy)
        if runner is None:
            return policy
        return policy.first(self.departure_planner.order(job, policy.fallback, runner.record.prefer))


def rendezvous_ports(ephemeral: str) -> range:
    """Return the ports for the rendezvous of a gang, given the kernel's range ("first last") for outgoing connections.

    A port of that range may be taken by any connection between the choice and the guest's `bind`. The result is the larger part
    of what the range leaves from LEAST_PORT on, or everything if it leaves nothing.
    """
    first, last = (int(number) for number in ephemeral.split())
    below, above = range(LEAST_PORT, min(first, MOST_PORT + 1)), range(max(last + 1, LEAST_PORT), MOST_PORT + 1)
    return max(below, above, key=len) or range(LEAST_PORT, MOST_PORT + 1)


def rendezvous_address(host: str, random: Random) -> tuple[str, int]:
    """Return `host` and a port that is free there now, as far as this node can tell; the guest binds it later.

    It cannot tell where `host` is no address of this machine (1:1 NAT). The guest then binds the port on another address.
    """
    try:
        ports = rendezvous_ports(PORT_RANGE.read_text())
    except (OSError, ValueError):  # not Linux, or /proc is not mounted
        ports = range(LEAST_PORT, MOST_PORT + 1)
    for port in random.choices(ports, k=PORT_TRIES):
        with suppress(OSError):
            socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
            return host, port
    return host, random.choice(ports)

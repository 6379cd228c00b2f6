"""The production job cores on simulated machines, under the faults of `sim.protocol.membership` and some of their own.

Membership, records and trust are real. The network loses, delays, repeats and partitions messages; machines stall, sleep, crash
around an fsync and lose their disks, with the checkpoints on them. Only what the job cores never see is simulated: guests that
take steps, copies that take time, owners who pull the kill switch. One seed determines the whole run.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from copy import deepcopy
from functools import lru_cache, partial
from random import Random
from typing import Any

import msgspec

from ckptstore.errors import StoreError
from ckptstore.replication import Settled
from membership.bootstrap import Address
from membership.effects import MemberChanged
from membership.envelope import EnvelopeError
from membership.identity import Identity
from mesh.checkpoints.writer import RESULT_REPLICAS
from mesh.consensus.disk_age import HEAR_WITHIN_S, PUBLISH_EVERY_S, DiskAge, encode_disk_age, is_old_copy
from mesh.consensus.disk_age import SECTION as DISK
from mesh.consensus.disk_age import TTL_S as DISK_TTL_S
from mesh.consensus.effects import (
    Committed,
    Ended,
    Kill,
    Launch,
    Left,
    Notify,
    RunUntil,
    SaveCheckpoint,
    SaveResult,
    Send,
    SetTimer,
    Submitted,
    WitnessRecord,
)
from mesh.consensus.forced_reconfiguration import (
    Plan,
    RecoveryError,
    encode_reconfiguration,
    make_plan,
)
from mesh.consensus.gang import GangMember
from mesh.consensus.messages import (
    Accept,
    AnyMessage,
    Cancel,
    Closed,
    Enlist,
    MessageError,
    Prepare,
    Refused,
    Start,
    decode_message,
    encode_message,
)
from mesh.consensus.next_placement import GOES_HOME
from mesh.consensus.participant import STILL_ENDING, Directed, Participant, Role, Rules
from mesh.consensus.reports import (
    CheckpointFailed,
    CheckpointFound,
    CheckpointStored,
    GuestExited,
    GuestFailed,
    GuestStarted,
    KillWanted,
    MigrateWanted,
    ResultStored,
    RunnerEvent,
    VacateWanted,
)
from mesh.consensus.runner import Runner
from mesh.consensus.status import encode_status
from mesh.consensus.view import Instant, Timer, View
from mesh.consensus.witness import Witness
from mesh.jobs.authority import Authority
from mesh.jobs.mesh_view import with_jobs
from mesh.jobs.status_gossip import RECOVERED
from mesh.jobs.status_gossip import TTL_S as STATUS_TTL_S
from mesh.model.record import FIRST_TERM, SHUNNED_S, Attempt, Commit, Config, JobRecord, Outcome, OutcomeKind, Voter
from mesh.model.spec import (
    JOB_ID_BYTES,
    ArrayPlace,
    Checkpointing,
    HomePolicy,
    JobSpec,
    SpecError,
    encode_spec,
    format_job,
    job_id,
)
from placement.advert import Advert, AdvertError, decode_advert, encode_advert
from placement.decision import witness_order
from placement.queue import Patience
from placement.zones import Hierarchy
from sim.protocol.backups import COPIED_EVERY_S, Backups, JournalCopy
from sim.protocol.checkpoints import content, result
from sim.protocol.fakes import USER_NAME, ChecksumSealer
from sim.protocol.faults import FaultPlan, MeshPlan, WorkPlan, draw_job_faults, draw_mesh, draw_work_plan
from sim.protocol.guests import MOST_HICCUPS, SAVED_EXIT, Guest, Work, draw_work
from sim.protocol.journal_faults import INCIDENTS as DISK_INCIDENTS
from sim.protocol.journal_faults import STARTS_AGAIN_S, JournalFaults
from sim.protocol.membership import Disk, MembershipNode, MembershipWorld, Violation
from sim.protocol.memory_store import MemoryStore
from sim.protocol.status_board import SECTION as STATUSES
from sim.protocol.upkeep import KeepingNode
from sim.protocol.worker import Input, Worker

MARK = b"J"  # first byte of a job message among datagrams
SLOTS = 2
STEP_S = 1.0
BETWEEN_JOBS_S = (
    10.0  # from the end of a job to the start of one that waited for it: news, a beat of its leader, a restore
)
CHECKPOINT_EVERY_STEPS = 5
OBSERVE_S = 2.0  # between two looks at the membership without a change
PUBLISH_S, PUBLISH_TTL_S = 600.0, 3600.0
LEASE_S = 6.0
CLOCKS_SEEN_S = OBSERVE_S + 0.5  # until a node whose wall clock was set right has looked at it
LIE = "lie"  # begins the detail of an outcome that a malicious witness made up
HEARD_S = 0.5  # until the quickest hear of an order to recover a job
AGREE_S = 30.0  # for restarted nodes to rejoin before a user recovers a job
ANY_END_SHARE = 0.3  # of jobs that come after another one: however that ends
SELDOM_SHARE = 0.2  # of jobs that save once, after their first few steps
STEPS = (20, 90)  # of a job
LONG_SHARE, LONG_STEPS = 0.3, (150, 220)  # of jobs where places are few: no job makes room in its first two minutes
PRIORITIES = (0, 50, 100)
EXCLUDED_SHARE = 0.5  # of the nodes that the users of some jobs exclude
SEIZURES, SEIZE_WITHIN_S = 5, 60.0  # of the lease of such a job by one of its witnesses that is excluded
HOME_SHARE, SETTLE_S = 0.1, 8.0  # share of jobs that migrate back to their first node, once it was free for SETTLE_S
MIN_WIPE_INTERVAL_S = 60.0  # a group needs time to replace a member that lost its disk
ECHOES_KEPT = 16  # sent messages of each type that may arrive once more


def advert_of(node: bytes, nick: str, user_key: bytes, slots: int, free: int) -> Advert:
    return Advert(
        version=1,
        node=node,
        nick=nick,
        user=USER_NAME,
        user_key=user_key,
        zone="",
        weight=32,
        up_since_unix=0,
        lending=True,
        paused=False,
        gpus=(),
        free_portions=(),
        guards=False,
        gpu_sharing=True,
        slots=slots,
        slots_free=free,
        cpus=8,
        memory_mib=1 << 16,
        engines=("process",),
        own_only=(),
        images=(),
        accepts=("*",),
        store_free_mib=1 << 20,
    )


_decoded_advert = lru_cache(decode_advert)


class JobChecker:
    name = ""

    def proposed(self, world: "JobsWorld", manifest: bytes, parent: bytes | None) -> None:
        """Called when a checkpoint is stored, before its commit."""

    def committed(self, world: "JobsWorld", job: bytes, commit: Commit) -> None:
        """Called when a runner learns that a majority holds a commit."""

    def sent(self, world: "JobsWorld", node: "JobNode", to: bytes, message: AnyMessage) -> None:
        """Called when a node's cores send a message."""

    def saved(self, world: "JobsWorld", node: "JobNode", witness_record: WitnessRecord) -> None:
        """Called when a witness has written its record to disk."""

    def stepped(self, world: "JobsWorld", node: "JobNode", job: bytes) -> None:
        """Called before a guest takes a step."""

    def placed(self, world: "JobsWorld", node: "JobNode", start: Start, to: bytes) -> None:
        """Called when a leader has chosen the host `to`."""

    def launched(self, world: "JobsWorld", node: "JobNode", job: bytes, spec: bytes) -> None:
        """Called before a guest starts; `spec` is the job's signed description."""

    def resumed(self, world: "JobsWorld", node: "JobNode", job: bytes, term: int, step: int) -> None:
        """Called when a guest of this term starts at this step."""

    def noticed(self, world: "JobsWorld", node: "JobNode", job: bytes, reason: str) -> None:
        """Called when a guest is given notice."""

    def killed(self, world: "JobsWorld", node: "JobNode", job: bytes, reason: str) -> None:
        """Called when a runner or gang member has its guest killed."""

    def exited(
        self, world: "JobsWorld", node: "JobNode", job: bytes, guest: Guest, end: GuestExited | GuestFailed
    ) -> None:
        """Called when a guest has ended by itself, or could not start."""

    def left(self, world: "JobsWorld", node: "JobNode", job: bytes, term: int, step: int) -> None:
        """Called when a runner's guest has ended at a notice, by itself."""

    def not_saved(self, world: "JobsWorld", node: "JobNode", job: bytes) -> None:
        """Called when a checkpoint could not be stored, or no other node took it."""

    def abandoned(self, world: "JobsWorld", job: bytes, commit: Commit) -> None:
        """Called when a witness first has a record in which this commit is given up, since no node could give it."""

    def ended(self, world: "JobsWorld", node: "JobNode", job: bytes, reason: str) -> None:
        """Called when an attempt is over on this node."""

    def switched(self, world: "JobsWorld", node: "JobNode") -> None:
        """Called after the owner of this node pulled the kill switch."""

    def recovered(self, world: "JobsWorld", job: bytes) -> None:
        """Called when the user recovers a job from the remaining records; earlier decisions no longer bind it."""

    def violated(self, world: "JobsWorld", job: bytes, text: str) -> Violation:
        return Violation(f"{self.name} at {world.kernel.now:.3f} s, job {job.hex()[:8]}: {text}")


class JobDisk(Disk):
    """The disk of a node with its witness records. `name` identifies the journal (`record.Voter`)."""

    name: bytes = b""
    witness_records: dict[bytes, WitnessRecord] = msgspec.field(default_factory=dict)
    store: MemoryStore = msgspec.field(default_factory=MemoryStore)
    faults: JournalFaults = msgspec.field(default_factory=JournalFaults)
    saves: int = 0
    old_copy: bool = False

    @property
    def age(self) -> DiskAge:
        return DiskAge(self.name, self.saves)


class JobNode(KeepingNode):
    world: "JobsWorld"
    disk: JobDisk

    def __init__(self, world: "JobsWorld", number: int, identity: Identity, chain: bytes) -> None:
        super().__init__(world, number, identity, chain)
        # The first two nodes are where others join, and can run a gang.
        drawn, mesh, first = world.streams.get(self.name, "mesh"), world.mesh, number < 2
        self.late = drawn.random() < mesh.late and not first
        self.closed = drawn.random() < mesh.closed and not first  # to calls, until the faults stop
        self.old = drawn.random() < mesh.old and not first  # a version that refuses every job
        plan = world.work_plan
        self.slots = SLOTS if not plan.busy else int(first or drawn.random() >= plan.busy)
        self._free = -1  # places, as last published
        self.participant: Participant
        self.guests: dict[bytes, Guest] = {}
        self.attempts: set[bytes] = set()  # jobs whose attempt here has not ended, or is still to be told that it has
        self.crash_at_save = ""
        self.serving = False
        self.doubted_until = 0.0  # its clock has stood still, and it need not know
        self.backups = Backups()
        self.lies: dict[bytes, WitnessRecord] = {}
        self.gang_members_started = 0
        self._allowed: dict[bytes, float] = {}
        self._observe_pending = False
        self._disk_rng = world.streams.get(self.name, "disk")
        self._sealer: ChecksumSealer
        self.authority: Authority
        self._worker: Worker

    def new_disk(self) -> JobDisk:
        return JobDisk(name=self.world.streams.get(self.name, "journal").randbytes(8))

    @property
    def store(self) -> MemoryStore:
        return self.disk.store

    def described(self, job: bytes) -> JobSpec:
        return self.world.specs[job]

    def hierarchy(self) -> Hierarchy:
        return Hierarchy(0, tuple(self.view().adverts))

    @property
    def takes_calls(self) -> bool:
        return self.world.takes_calls(self.id)

    # --- life

    def start(self, *, crash_at: str = "") -> None:
        self.guests, self._allowed, self._observe_pending, self.crash_at_save = {}, {}, False, ""
        self.attempts = set()
        super().start(crash_at=crash_at)
        if not self.up:
            return
        trust = self.core.trust
        self._sealer = ChecksumSealer(self.identity, trust.mesh_id, lambda *written: None)
        self.authority = Authority(self._sealer, trust, self._advertises, self.unix)
        rules = Rules(
            self._refuse_spec if self.old else self.authority.open_spec,
            self._admit,
            self.authority.may_cancel,
            self.authority.read_recovery,
            self.authority.may_propose,
            self.authority.warrant,
            self.authority.warrants_group,
        )
        self._patience = Patience()
        self._worker, rng = Worker(self), self.world.streams.get(self.name, "jobs")
        self.participant = Participant(self.id, self.disk.name, self.name, rules, rng)
        self.begin_upkeep()
        self.serving = False
        self._serve_when_heard(self.world.kernel.now + HEAR_WITHIN_S)

    def _serve_when_heard(self, until: float) -> None:
        """Take part in jobs once another node has said what it knows of this one."""
        if self.core.counters["reconciled"] == 0 and self.world.kernel.now < until:
            self.after(0.05, self._serve_when_heard, until)
            return
        self.check_disk()
        self.serving, self.participant.disk = True, self.disk.name
        for job in sorted(self.disk.witness_records):
            witness_record = self.disk.witness_records[job]
            witness = self.world.restored(witness_record, self)
            self.take(partial(self.participant.restore, witness))
        self._publish()
        self._publish_age(None)
        self._back_up()
        self._observe_periodically()

    def check_disk(self) -> None:
        heard = self.core.records.get(self.id, DISK, self.unix())
        if is_old_copy(self.disk.age, heard.body if heard is not None else None):
            self.world.old_copies["noticed"] += 1
            self.disk.old_copy, self.disk.name = False, self.new_disk().name
        elif self.disk.old_copy:  # nobody could tell: not covered
            self.world.old_copies["unnoticed"] += 1
            self.disk.old_copy, self.disk.name = False, self.new_disk().name

    def _back_up(self) -> None:
        self.backups.take(self.disk.age, self.disk.witness_records)
        self.after(self.world.draw(self, "backups", *COPIED_EVERY_S), self._back_up)

    def roll_back(self, copy: JournalCopy) -> None:
        self.disk.saves, self.disk.old_copy = copy.age.saves, True
        self.disk.witness_records = dict(copy.witness_records)

    def may_be_behind(self, job: bytes) -> bool:
        """Tell whether a guest may run on by a clock that stood still, its own or that of its gang's runner, as is allowed
        until it sees that the wall clock is right, or for one lease.
        """
        member = self.participant.members.get(job)
        leader = self.world.by_id.get(member.runner) if member is not None else None
        until = leader.doubted_until + LEASE_S if isinstance(leader, JobNode) else 0.0
        held_up = max(self.last_stall_end, self.stalled_until, self.disk.faults.slow_until) > self.paused_until
        if (held_up or self._worker.busy) and self.paused_until >= 0:
            until = max(until, self.paused_until + LEASE_S)  # its process may not have looked yet
        return self.world.kernel.now < max(self.doubted_until, until)

    def crash(self) -> None:
        """Crash; guests end with the daemon."""
        super().crash()
        for guest in self.guests.values():
            guest.ended = True
        self.guests = {}

    def leave(self) -> None:
        """Drain, give the guests notice, leave the mesh, and restart after a while."""
        self.perform(self.core.swim.set_draining(True, self.boot()))
        for job in self.participant.hosted:
            self.report(job, VacateWanted(5.0, "its node leaves"))
        self.after(6.0, self._finish_leaving)

    def _finish_leaving(self) -> None:
        if self.world.healed and not self.gone:
            self.perform(self.core.swim.set_draining(False, self.boot()))
            return
        super().leave()
        rng = self.world.streams.get("world", "leave")
        self.world.kernel.after(rng.uniform(5.0, 60.0), self.world._restart, self, "")

    def pull_kill_switch(self) -> None:
        """Kill all guests at once, as `mesh reclaim --now` does, without asking other nodes."""
        for job in self.participant.hosted:
            self.report(job, KillWanted("its owner"))
        self.kill_guests()
        self.world.switched(self)

    def kill_guests(self) -> None:
        """End all guests without waiting for the cores, which a save may keep busy."""
        for job in self.guests:
            self.kill_guest(job)

    def kill_guest(self, job: bytes) -> None:
        guest = self.guests.get(job)
        if guest is not None and not guest.ended:
            guest.ended = True
            self._report_soon(job, GuestExited(137, False, False))

    @property
    def instant(self) -> Instant:
        return Instant(self.boot(), int(self.unix() * 1000))

    # --- view of the mesh

    def _publish(self) -> None:
        self._publish_advert(self._places_left)
        for witness_record in self.disk.witness_records.values():
            self._publish_recovery(witness_record)
        self.after(PUBLISH_S, self._publish)

    def _publish_advert(self, free: int) -> None:
        self._free = free
        advert = advert_of(self.id, self.name, self.world.user_key, self.slots, free)
        self.core.publish("advert", encode_advert(advert), PUBLISH_TTL_S)

    @property
    def _places_left(self) -> int:
        return max(0, self.slots - len(self.participant.hosted))

    def _publish_age(self, last: DiskAge | None) -> None:
        age = self.disk.age
        if age != last:
            self.core.publish(DISK, encode_disk_age(age), DISK_TTL_S)
        self.after(PUBLISH_EVERY_S, self._publish_age, age)

    def _publish_recovery(self, witness_record: WitnessRecord) -> None:
        if witness_record.reconfiguration:
            self.core.publish(RECOVERED + witness_record.job.hex(), witness_record.reconfiguration, PUBLISH_TTL_S)
            if witness_record.promised == witness_record.config.number:  # nobody has won a later term yet
                self.world.misuse_order(witness_record)

    def _observe_periodically(self) -> None:
        if self._places_left != self._free:
            self._publish_advert(self._places_left)
        self.observe()
        self.keep_up_in_turn()
        self.after(OBSERVE_S, self._observe_periodically)

    def observe_soon(self) -> None:
        if not self._observe_pending:
            self._observe_pending = True
            self.after(0.1, self._observe_now)

    def _observe_now(self) -> None:
        self._observe_pending = False
        self.observe()

    def observe(self) -> None:
        self.take(lambda at: self.participant.observe(self.view(), at))

    def view(self) -> View:
        members, unix = self.core.swim.table.all(), self.unix()
        alive = frozenset(member.node for member in members if member.present)
        adverts = []
        for record in self.core.records.section("advert", unix):
            if record.node in alive and not self.core.swim.is_unreachable(record.node):
                try:
                    adverts.append(_decoded_advert(record.node, record.body))
                except AdvertError:
                    continue
        orders: dict[bytes, list[bytes]] = {}
        for record in self.core.records.section(RECOVERED, unix):
            orders.setdefault(bytes.fromhex(record.section.removeprefix(RECOVERED)), []).append(record.body)
        view = View(
            self.id,
            alive,
            frozenset(member.node for member in members if member.draining),
            frozenset(member.node for member in members if member.state == "left"),
            tuple(sorted(adverts, key=lambda advert: advert.node)),
            {record.node: disk_of(record.body) for record in self.core.records.section(DISK, unix)},
            recoveries=orders,
        )
        return with_jobs(view, self.board.table, self._patience, self.boot(), unix)

    # --- messages and timers

    def handle_datagram(self, data: bytes, source: Address) -> None:
        if not data.startswith(MARK):
            super().handle_datagram(data, source)
            return
        try:
            sender, payload = self._sealer.open_addressed(data[1:], self.core.trust.with_tag)
            message = decode_message(payload)
        except (EnvelopeError, MessageError):
            return
        if self.serving and self.core.trust.credentials(sender, self.unix()) is not None:
            self.handle_message(sender, message)

    def handle_message(self, sender: bytes, message: AnyMessage) -> None:
        if not self._is_late_theft(sender, message):
            self.take(partial(self._hear_lie if is_lie(message) else self.participant.receive, sender, message))

    def _is_late_theft(self, sender: bytes, message: AnyMessage) -> bool:
        """Tell whether a thief has become a witness since it sent this: a hostile witness may take a waiting job."""
        theft = self.world.thefts.get((sender, message.job))
        if theft is None or not isinstance(message, Prepare | Accept | Refused):
            return False
        if message.term != theft.term and message.config != theft.config:
            return False
        witness = self.participant.witnesses.get(message.job)
        return witness is not None and sender in witness.witness_record.config.nodes

    def _hear_lie(self, sender: bytes, message: AnyMessage, at: Instant) -> Sequence[Directed]:
        """Take a lie, unless its teller runs the job by now: a hostile runner may end its job."""
        witness = self.participant.witnesses.get(message.job)
        runs = witness is not None and witness.witness_record.holder == sender
        return [] if runs else self.participant.receive(sender, message, at)

    def send(self, to: bytes, message: AnyMessage) -> None:
        if to == self.id:
            self.after(0.0, self.handle_message, self.id, message)
            return
        member = self.core.swim.table.get(to)
        if member is not None and self.world.takes_calls(to):
            data = MARK + self._sealer.seal_to(to, encode_message(message))
            self.world.remember(self, message, data, (member.host, member.port))
            self.world.send_datagram(self, data, (member.host, member.port))

    def _job_timer(self, job: bytes, role: Role, timer: Timer) -> None:
        self.take(partial(self.participant.on_timer, job, role, timer))

    def report(self, job: bytes, event: RunnerEvent) -> None:
        self.take(partial(self.participant.report, job, event))

    def _refuse_spec(self, job: bytes, sealed: bytes) -> JobSpec:
        raise SpecError("it has a field that this version does not know")

    def _admit(self, job: bytes, spec: JobSpec, order: Start | Enlist) -> str | None:
        if job in self.attempts:
            return STILL_ENDING
        if not self._places_left:
            return "its slots are taken"
        self.attempts.add(job)
        return None

    def _advertises(self, node: bytes) -> bool:
        return self.core.records.get(node, "advert", self.unix()) is not None

    def submit(self, job: bytes, payload: bytes, spec: JobSpec) -> None:
        self.take(partial(self.participant.submit, job, self._sealer.seal("job", payload), spec))

    def recover(self, plan: Plan) -> None:
        """Recover a job as its user does."""
        order = self._sealer.seal("recovery", encode_reconfiguration(plan.reconfiguration))
        self.take(partial(self.participant.recover, plan, order))

    def forge(self, witness: Witness) -> bytes:
        """Return a job's description with another command, under this node's own signature."""
        return self._sealer.seal("job", encode_spec(msgspec.structs.replace(witness.spec, argv=("mine, bitcoin",))))

    # --- effects of the cores

    def take(self, item: Input) -> None:
        """Give the cores an input."""
        self._worker.take(item)

    def wanted(self, outputs: Sequence[Directed]) -> None:
        for output in outputs:
            if isinstance(output.effect, Send) and isinstance(output.effect.message, Start):
                for checker in self.world.job_checkers:
                    checker.placed(self.world, self, output.effect.message, output.effect.to)

    def perform_job(self, output: Directed) -> None:
        job, effect, world = output.job, output.effect, self.world
        guest = self.guests.get(job)
        match effect:
            case Send(to=to, message=message):
                for checker in world.on_sent:
                    checker.sent(world, self, to, message)
                self.send(to, message)
            case SetTimer(name=name, token=token, at=at):
                delay = max(0.0, (at - self.boot()) / self.rate)
                self.after(delay, self._job_timer, job, output.role, Timer(name, token))
            case RunUntil(boot_s=boot_s):
                self._allowed[job] = boot_s
            case Launch(record=record):
                host = self.participant.members.get(job) or self.participant.runners.get(job)
                self.after(world.draw(self, "restore", 0.1, 1.0), self._launch, job, record, host)
            case SaveCheckpoint(seq=seq, parent=parent):
                self._save_checkpoint(job, seq, parent, guest)
            case SaveResult(seq=seq, parent=parent):
                self.after(0.2, self._store_result, job, seq, parent)
            case Committed(commit=commit):
                world.log.add(world.kernel.now, "commit", job, commit.seq, commit.term, commit.manifest)
                world.commits += 1
                for checker in world.job_checkers:
                    checker.committed(world, job, commit)
            case Notify(reason=reason) if guest is not None:
                for checker in world.job_checkers:
                    checker.noticed(world, self, job, reason)
                guest.vacating = True
                world.returns += reason == GOES_HOME
            case Kill(reason=reason):
                for checker in world.job_checkers:
                    checker.killed(world, self, job, reason)
                self.kill_guest(job)
            case Submitted(problem=problem):
                world.submitted(job, problem)
            case Ended(reason=reason):
                world.log.add(world.kernel.now, "ended", self.name, job, reason)
                for checker in world.job_checkers:
                    checker.ended(world, self, job, reason)
                self._forget_attempt(job)
            case Left():
                self._forget_attempt(job)

    def _forget_attempt(self, job: bytes) -> None:
        self._allowed.pop(job, None)
        self.attempts.discard(job)
        guest = self.guests.pop(job, None)
        if guest is not None:
            guest.ended = True

    def save_records(self, records: Sequence[WitnessRecord], saved: Callable[[], None]) -> None:
        mode, self.crash_at_save = self.crash_at_save, ""
        if mode == "before fsync":
            self.crash()
            return
        took_s = self.disk.faults.takes_s(self.world.kernel.now, self._disk_rng)
        if took_s:
            self.after(took_s, self._write, records, mode, saved)
        else:
            self._write(records, mode, saved)

    def _write(self, records: Sequence[WitnessRecord], mode: str, saved: Callable[[], None]) -> None:
        result = self.disk.faults.result(self.world.kernel.now, self._disk_rng)
        if result != "failed":
            for witness_record in records:
                self.keep(witness_record)
        if result != "saved":
            self.save_failed(saved)
        elif mode and not self.world.healed:  # nothing would start it again
            self.crash()
        else:
            saved()

    def save_failed(self, saved: Callable[[], None]) -> None:
        """Stop, as the daemon does: `saved` is never called. The service manager starts it again."""
        self.world.failed_saves += 1
        self.crash()
        self.world.kernel.after(STARTS_AGAIN_S, self.world._restart, self, "")

    def keep(self, witness_record: WitnessRecord) -> None:
        self.disk.witness_records[witness_record.job] = witness_record
        self.disk.saves += 1
        self._publish_recovery(witness_record)
        self.world.saved(self, witness_record)
        if self.will_decide_alone(witness_record):
            self.lies.pop(witness_record.job, None)
        given_up = witness_record.record.abandoned
        for checker in self.world.job_checkers:
            if given_up is not None and given_up.manifest not in self.world.given_up:
                checker.abandoned(self.world, witness_record.job, given_up)
            checker.saved(self.world, self, witness_record)
        if given_up is not None:
            self.world.given_up.add(given_up.manifest)

    def will_decide_alone(self, witness_record: WitnessRecord) -> bool:
        """Tell whether this node decides in the group to come, perhaps under the name of an earlier disk."""
        members = witness_record.config.members
        return majority(members, {voter for voter in members if voter.node == self.id})

    # --- guests

    def _launch(self, job: bytes, record: JobRecord, host: Runner | GangMember | None) -> None:
        if host is None or not self._restores(job, host):
            return

        def brought(failure: GuestFailed | None) -> None:
            if failure is None:
                step = self.store.manifest(record.commit.manifest).step if record.commit is not None else 0
                self._start_guest(job, host, step)
            elif self._restores(job, host):
                self.report(job, failure)

        self.bring(job, record, brought)

    def _host(self, job: bytes) -> Runner | GangMember | None:
        return self.participant.members.get(job) or self.participant.runners.get(job)

    def _restores(self, job: bytes, host: Runner | GangMember) -> bool:
        return host is self._host(job) and host.state == "restoring"

    def _report_soon(self, job: bytes, event: RunnerEvent, delay_s: float = 0.0) -> None:
        """Report what the present attempt says; after its end it says nothing."""
        host = self._host(job)
        self.after(delay_s, lambda: self.report(job, event) if host is self._host(job) else None)

    def _start_guest(self, job: bytes, host: Runner | GangMember, step: int) -> None:
        if not self._restores(job, host):
            return
        if self.boot() >= self._allowed.get(job, 0.0):  # fetching the checkpoint can outlast the lease
            self.after(0.2, self._start_guest, job, host, step)
            return
        for checker in self.world.job_checkers:
            checker.launched(self.world, self, job, host.spec_bytes)
        work = self.world.work[job]
        failure = work.next_failure(step)
        guest = Guest(work, step, host.term, isinstance(host, GangMember), failure)
        if failure is not None and isinstance(failure.end, GuestFailed):
            self._exited(job, guest, failure.end)
            return
        self.guests[job] = guest
        for checker in self.world.job_checkers:
            checker.resumed(self.world, self, job, host.term, step)
        self.gang_members_started += guest.gang_member
        self.report(job, GuestStarted(step))
        self._go_on(job, guest)

    def _take_step(self, job: bytes, guest: Guest) -> None:
        if guest.ended:
            return
        if self.boot() < self._allowed[job]:
            for checker in self.world.job_checkers:
                checker.stepped(self.world, self, job)
            guest.step += 1
            self.world.steps += 1
            due = guest.step % CHECKPOINT_EVERY_STEPS == 0
            if job in self.world.seldom:
                due = guest.step == CHECKPOINT_EVERY_STEPS
            if due and not guest.gang_member and guest.end() is None:
                self._report_soon(job, CheckpointFound())
            self._go_on(job, guest)
        else:
            self.machine_after(STEP_S, self._take_step, job, guest)

    def _go_on(self, job: bytes, guest: Guest) -> None:
        """End the guest if it ends now, else let it take another step."""
        end = None if guest.ended else guest.end()
        if end is None:
            self.machine_after(STEP_S, self._take_step, job, guest)
            return
        guest.ended = True
        self._exited(job, guest, end)

    def _exited(self, job: bytes, guest: Guest, end: GuestExited | GuestFailed) -> None:
        runner = self.participant.runners.get(job)
        for checker in self.world.job_checkers:
            checker.exited(self.world, self, job, guest, end)
            if end is SAVED_EXIT and guest.vacating and runner is not None:
                checker.left(self.world, self, job, runner.term, guest.step)
        self._report_soon(job, end)

    def _save_checkpoint(self, job: bytes, seq: int, parent: bytes | None, guest: Guest | None) -> None:
        delay = self.world.draw(self, "upload", 0.05, 1.5)
        if guest is None or guest.step == guest.saved:
            self._report_soon(job, CheckpointStored(None, (), None), delay)
            return
        self.after(delay, self._store_checkpoint, job, seq, parent, guest)

    def _store_checkpoint(self, job: bytes, seq: int, parent: bytes | None, guest: Guest) -> None:
        runner = self.participant.runners.get(job)
        if runner is None or runner.spec.checkpointing is None:
            return
        policy, step = self.replica_policy(job), guest.step
        try:
            saved = self.save(job, content(job, step), seq, parent, policy, "checkpoint", step)
        except StoreError as error:
            self._not_saved(job, str(error))
            return
        for checker in self.world.job_checkers:
            checker.proposed(self.world, saved.info.id, parent)

        def copied(holders: tuple[bytes, ...], refusal: str) -> None:
            if self.participant.runners.get(job) is not runner:
                return
            if refusal:
                self._not_saved(job, refusal)
                return
            guest.saved = step
            self.report(job, CheckpointStored(saved.info.id, holders, step))

        self.replicate_or_retry(job, saved, runner.spec.checkpointing.replicas, copied)

    def _store_result(self, job: bytes, seq: int, parent: bytes | None) -> None:
        runner, policy = self.participant.runners.get(job), self.replica_policy(job)
        if runner is None:
            return
        try:
            saved = self.save(job, result(job), seq, parent, policy, "result", runner.attempt.last_step or 0)
        except StoreError as error:
            self.report(job, ResultStored(None, (), str(error)))
            return

        def settled(copies: Settled) -> None:
            if self.participant.runners.get(job) is runner:
                self.report(job, ResultStored(saved.info.id, copies.holders))

        self.replicate(saved, policy, policy.fallback, RESULT_REPLICAS, settled)

    def _not_saved(self, job: bytes, reason: str) -> None:
        for checker in self.world.job_checkers:
            checker.not_saved(self.world, self, job)
        self.report(job, CheckpointFailed(reason))


class JobsWorld(MembershipWorld):
    """A mesh with jobs. `accepted` jobs are those whose user was told that a majority holds them.

    `groups` are the last witness groups that were in force: their majority had them on disk.
    """

    node_type = JobNode
    least_up = 1
    has_admitters = False
    nodes: list[JobNode]  # type: ignore[assignment]

    def __init__(
        self,
        seed: int,
        *,
        nodes: int | None = None,
        jobs: int = 6,
        minutes: float = 10.0,
        faults: FaultPlan | None = None,
        mesh: MeshPlan | None = None,
        work: WorkPlan | None = None,
        job_checkers: Sequence[JobChecker] = (),
    ) -> None:
        self.work_plan = work or draw_work_plan(seed)
        self.mesh = mesh or draw_mesh(seed)
        count, faults = nodes or self.mesh.nodes, faults or draw_job_faults(seed, minutes)
        super().__init__(seed, nodes=count, minutes=minutes, faults=faults, checkers=())
        self.job_checkers = list(job_checkers)
        self.user_key = self.nodes[0].id  # of the user to whom all nodes and jobs belong
        self.on_sent = [checker for checker in job_checkers if type(checker).sent is not JobChecker.sent]
        self.given_up: set[bytes] = set()  # abandoned checkpoints
        self.work: dict[bytes, Work] = {}  # what the guests of each submitted job do
        self.cancelled: set[bytes] = set()  # jobs that their user has cancelled
        self.seldom: set[bytes] = set()  # jobs that save once
        self.returns = 0  # migrations back to the first node
        self.accepted: set[bytes] = set()
        self.lost: set[bytes] = set()  # jobs that lost the disks of a majority of their witnesses
        self.recovered: set[bytes] = set()  # lost jobs that their user recovered
        self.recoveries: Counter[bytes] = Counter()  # orders for each of them
        self.specs: dict[bytes, JobSpec] = {}
        self.arrays: dict[bytes, list[bytes]] = {}  # the jobs of each array, in the order of their places
        self.groups: dict[bytes, Config] = {}
        self.revocations: dict[bytes, bytes] = {}  # of nodes, as their founder has signed them
        self.thefts: dict[tuple[bytes, bytes], Accept] = {}  # by thief and job: the last lease and group it asked for
        self.old_copies: Counter[str] = Counter()
        self.commits = self.steps = self.failed_saves = self.rumours = 0
        self._have_group: dict[tuple[bytes, Config], set[Voter]] = defaultdict(set)
        self._closed: list[bytes] = []  # nodes that take no calls for a while
        self._echoes: dict[type[AnyMessage], list[tuple[JobNode, bytes, Address]]] = defaultdict(list)
        self._sent: Counter[type[AnyMessage]] = Counter()
        self._wanted = jobs
        self._wiped_at = -MIN_WIPE_INTERVAL_S
        self.liar: JobNode | None = None  # the member that spreads rumours
        self._departing_submitter: tuple[bytes, JobNode] | None = None

    # --- running

    def run(self) -> str:
        """Run with faults, then without; return the digest. Violation if an accepted job does not end (J4)."""
        try:
            self.begin()
            self.kernel.run(self.faults.until_s)
            self.heal()
            self.lost = {job for job in self.accepted if self._lost_quorum(job)}
            self.kernel.run(self.kernel.now + AGREE_S)
            for job in sorted(self.lost):
                self._recover(job)
            took = self.until(self.all_ended, self.bound_s, "J4")
            self.log.add(self.kernel.now, "all ended", f"{took:.3f}")
        except (Violation, AssertionError) as error:
            raise Violation(f"{error}\n  SEED={self.seed}: {self.replay}") from error
        return self.log.digest

    @property
    def replay(self) -> str:
        options = f"--nodes {len(self.nodes)} --minutes {self.minutes:g} --jobs {self._wanted}"
        return f"replay: python -m sim jobs --seed {self.seed} {options}"

    @property
    def bound_s(self) -> float:
        """The time within which all jobs must end (J4): agreement of membership, and every step of every job in sequence."""
        # A node where the job failed is not tried for a minute, and for twice as long each further time. It may be the only one.
        # Jobs that wait for each other are shunned in turn (seed 1305005).
        shunned_s = SHUNNED_S * (2**MOST_HICCUPS - 1) if self.work_plan.failing else 0.0
        specs = map(self.specs.__getitem__, self.work)
        in_turn = 1 + sum(bool(spec.after or spec.after_any) or bool(spec.array and spec.array.limit) for spec in specs)
        steps = sum(work.steps for work in self.work.values())
        # The only place may be held by a job that is cut off for good, and whose user was not told that it was accepted.
        held = {job for node in self.nodes if node.up for job in node.participant.runners}
        stranded_s = 2400.0 if held - self.accepted else 0.0
        return 90.0 + shunned_s * in_turn + stranded_s + steps * STEP_S + BETWEEN_JOBS_S * len(self.work)

    def begin(self, spread_s: float = 5.0) -> None:
        super().begin(spread_s)
        rng = self.streams.get("world", "submit")
        for number in range(self._wanted):
            self.kernel.at(rng.uniform(10.0, 0.5 * self.faults.until_s), self._submit, number)
        if self.faults.brought_again_s:
            self.kernel.after(self.faults.brought_again_s, self._bring_again)

    def joins_after_s(self, node: MembershipNode) -> float:
        assert isinstance(node, JobNode)
        return self.streams.get(node.name, "join").uniform(20.0, 0.7 * self.faults.until_s) if node.late else 0.0

    def heal(self) -> None:
        self._closed.clear()
        for node in self.nodes:
            node.crash_at_save, node.closed, node.disk.faults = "", False, JournalFaults()
            node.lies.clear()
            node.store.free()
        super().heal()

    def all_ended(self) -> bool:
        return all(self.outcome(job) is not None for job in self.accepted if self._can_end(job))

    def _can_end(self, job: bytes) -> bool:
        """Tell whether a job must end: it is not lost, a node has room for it, and so it is with the jobs that it waits for."""
        if job in self.lost - self.recovered or not self._has_room(job):
            return False
        others = [other for other in self.waits_for(job) if not self._end_is_kept(other)]
        return all(other in self.accepted and self.outcome(other) is None and self._can_end(other) for other in others)

    def _end_is_kept(self, job: bytes) -> bool:
        """Tell whether others can learn how a job ended. The word of one node proves nothing while most of its witness group has
        lost the job, or never heard of it.
        """
        there = {
            node: record for node in self.nodes if not node.gone and (record := node.disk.witness_records.get(job))
        }
        having = {Voter(node.id, node.disk.name) for node in there}
        alone = job in self.lost - self.recovered or not (job in self.groups and decides(self.groups[job], having))
        return sum(record.final for record in there.values()) >= (2 if alone else 1)

    def waits_for(self, job: bytes) -> list[bytes]:
        """Return the jobs whose ends another one may have to wait for."""
        array = self.specs[job].array
        before = self.arrays[array.array][: array.place] if array is not None and array.limit else ()
        return [*self.specs[job].after, *self.specs[job].after_any, *before]

    def _has_room(self, job: bytes) -> bool:
        """Tell whether as many nodes as the job needs can ever run it. A job whose submitter is revoked stays with the nodes that
        have taken it on.
        """
        able = [node for node in self.nodes if not node.gone and not node.old and node.slots]
        able = [node for node in able if node.id not in self.specs[job].not_on]
        if self.specs[job].submitter in self.revocations:
            able = [node for node in able if job in node.disk.witness_records]
        return self.specs[job].least_nodes <= len(able)

    def outcome(self, job: bytes) -> str | None:
        """Return how the job ended, as any witness has it on disk, or None."""
        for node in self.nodes:
            witness_record = node.disk.witness_records.get(job)
            if witness_record is not None and witness_record.final and witness_record.record.outcome is not None:
                return witness_record.record.outcome.kind
        return None

    def holders(self, job: bytes) -> list[tuple[JobNode, int]]:
        """Return the nodes that believe they hold the job's lease, with their terms."""
        found = []
        for node in self.nodes:
            runner = node.participant.runners.get(job) if node.up else None
            if runner is not None and runner.holds_lease(node.boot()):
                found.append((node, runner.term))
        return found

    @property
    def gang_members(self) -> int:
        """The number of guests started as further members of a gang."""
        return sum(node.gang_members_started for node in self.nodes)

    def draw(self, node: JobNode, purpose: str, low: float, high: float) -> float:
        return self.streams.get(node.name, purpose).uniform(low, high)

    def restored(self, witness_record: WitnessRecord, node: JobNode) -> Witness:
        """Return the witness restored from a node's disk; a negative control replaces this method."""
        return Witness.restored(
            witness_record, node.authority.read_spec(witness_record.job, witness_record.spec), node.boot()
        )

    # --- jobs

    def _submit(self, number: int) -> None:
        rng = self.streams.get("world", "submit")
        able = [node for node in self.nodes if node.up and node.serving and not node.stalled and not node.old]
        if not able:
            return
        submitter = rng.choice(able)
        seen = submitter.view()
        ranked = witness_order(rng.randbytes(8), seen.adverts, seen.alive - seen.leaving)
        others = [Voter(node, seen.disks[node]) for node in ranked if node != submitter.id and node in seen.disks]
        gang = rng.random() < self.mesh.gangs
        homes = not gang and self.streams.get("world", "home").random() < HOME_SHARE
        spec = JobSpec(
            chain=submitter.chain,
            submitter=submitter.id,
            user=USER_NAME,
            user_key=self.user_key,
            created_unix_ms=submitter.instant.unix_ms,
            nonce=b"%d" % number,
            argv=("train",),
            witnesses=(Voter(submitter.id, submitter.disk.name), *(others[:2] if len(others) > 1 else ())),
            checkpointing=Checkpointing(),
            lease_s=LEASE_S,
            on_partition="compute_uncommitted" if rng.random() < 0.2 else "freeze",
            least_nodes=2 if gang else 1,
            most_nodes=3 if gang else 1,
            home=HomePolicy("first" if homes else "none", settle_s=SETTLE_S),
            not_on=self._draw_excluded(),
        )
        drawn = self.streams.get("world", "work")
        steps = rng.randint(*STEPS)
        if self.work_plan.busy and drawn.random() < LONG_SHARE:
            steps = drawn.randint(*LONG_STEPS)
        work, limits = draw_work(drawn, self.work_plan, steps, spec.created_unix_ms)
        spec = msgspec.structs.replace(spec, **limits)
        for fields in self._draw_order(number, drawn):
            job = self._submit_one(submitter, msgspec.structs.replace(spec, **fields), work)
        if number == 0 and len(spec.witnesses) > 1:
            # J9: the submitter leaves for good as soon as its job is accepted.
            self._departing_submitter = (job, submitter)

    def _draw_excluded(self) -> tuple[bytes, ...]:
        """Draw the nodes that the user of a job excludes from running it: for some jobs, all but the first two may be."""
        rng = self.streams.get("world", "excluded")
        if rng.random() >= self.work_plan.selective:
            return ()
        return tuple(node.id for node in self.nodes[2:] if rng.random() < EXCLUDED_SHARE)

    def _draw_order(self, number: int, rng: Random) -> list[dict[str, Any]]:
        """Draw the fields of each job of a submission that say when it may start."""
        plan, fields = self.work_plan, dict[str, Any]()
        if plan.busy:
            fields["priority"] = rng.choice(PRIORITIES)
        if self.accepted and rng.random() < plan.after:
            any_end = self.streams.get("world", "any end").random() < ANY_END_SHARE
            fields["after_any" if any_end else "after"] = (rng.choice(sorted(self.accepted)),)
        if number == 0 or rng.random() >= plan.arrays:
            return [fields]
        array, of, limit = rng.randbytes(JOB_ID_BYTES), rng.randint(2, 4), rng.randint(0, 2)
        return [{**fields, "array": ArrayPlace(array, place, place, of, limit)} for place in range(of)]

    def _submit_one(self, submitter: JobNode, spec: JobSpec, work: Work) -> bytes:
        payload = encode_spec(spec)
        job = job_id(payload)
        self.work[job], self.specs[job] = deepcopy(work), spec
        if spec.array is not None:
            self.arrays.setdefault(spec.array.array, []).append(job)
        if self.streams.get("world", "seldom").random() < SELDOM_SHARE:
            self.seldom.add(job)
        submitter.submit(job, payload, spec)
        return job

    def submitted(self, job: bytes, problem: str | None) -> None:
        self.log.add(self.kernel.now, "submitted", job, problem or "")
        if problem is None:
            self.accepted.add(job)
            if self._departing_submitter is not None and self._departing_submitter[0] == job:
                node = self._departing_submitter[1]
                if self._may_go(node):
                    node.gone = node.powered_off = True
                    node.crash()

    def saved(self, node: JobNode, witness_record: WitnessRecord) -> None:
        """Keep account of the groups in force."""
        job, config = witness_record.job, witness_record.config
        known = self.groups.get(job)
        if known is not None and (config == known or config.order < known.order):
            return
        voters = self._have_group[job, config]
        voters.add(Voter(node.id, witness_record.disk))
        if decides(config, voters):
            self.groups[job] = config

    def _standing(self, but: JobNode | None = None) -> set[Voter]:
        """Return the voters whose disk is not lost for good. An old node never has a record."""
        there = [node for node in self.nodes if not node.gone and not node.old and node is not but]
        return {Voter(node.id, node.disk.name) for node in there if not node.disk.old_copy}

    def _lost_quorum(self, job: bytes) -> bool:
        """Tell whether a witness group of a job has lost a majority of its disks: the last one in force, or one that may be."""
        standing = self._standing()
        if self.specs[job].submitter in self.revocations:
            having = {node.id for node in self.nodes if job in node.disk.witness_records}
            standing = {voter for voter in standing if voter.node in having}  # no other node takes it on
        return job not in self.groups or not all(decides(group, standing) for group in self._groups_of(job))

    def _groups_of(self, job: bytes) -> list[Config]:
        """Return the last group that was in force, and the newest that a node has: perhaps that one decides already."""
        known = [node.disk.witness_records[job].config for node in self.nodes if job in node.disk.witness_records]
        return [self.groups[job], *sorted(known, key=lambda config: config.order)[-1:]]

    def _may_go(self, leaver: JobNode) -> bool:
        """Tell whether a node may leave for good: a majority of every group stays, and a node where others can join."""
        others = self._standing(but=leaver)
        joinable = any(not node.gone and node is not leaver for node in self.nodes[:2])
        groups = [group for job in self.accepted if job in self.groups for group in self._groups_of(job)]
        return joinable and all(decides(group, others) for group in groups)

    def _recover(self, job: bytes) -> None:
        """Recover a job as `mesh job recover` does, on a node that has a record. The history may fork here.

        In half of the cases another user's order comes from another such node at the same time.
        """
        nodes = [node for node in self.nodes if node.up and not node.gone and job in node.participant.witnesses]
        witness_records = {node.id: node.participant.witnesses[job].witness_record for node in nodes}
        askers = [nodes[0] if nodes else self.nodes[0]]
        rng = self.streams.get("world", "recover")
        askers += [rng.choice(nodes[1:])] if len(nodes) > 1 and rng.random() < 0.5 else []
        for asker in askers:
            believed = asker.authority.records_of_witnesses(job, witness_records)
            try:
                plan = make_plan(job, believed, asker.view(), asker.instant)
            except RecoveryError:
                continue
            self.recoveries[job] += 1
            self.recovered.add(job)
            for checker in self.job_checkers:
                checker.recovered(self, job)
            asker.after(rng.uniform(0.0, 2.0), asker.recover, plan)

    def misuse_order(self, taken: WitnessRecord) -> None:
        """Let a malicious member, which hears of an order to recover a job, bring a record of its own under it."""
        rng = self.streams.get("world", "misuse")
        thieves = [node for node in self.nodes if node.up and node.serving and node.id not in taken.config.nodes]
        if not thieves:
            return
        thief = rng.choice(thieves)
        ended = Outcome("cancelled", f"{LIE} of {thief.name}", None, None, (), 0)
        lie = msgspec.structs.replace(taken.record, version=taken.record.version + 1, outcome=ended)
        accept = Accept(taken.job, taken.promised, 1, taken.config, lie, None, reconfiguration=taken.reconfiguration)
        for node in taken.config.nodes:
            thief.after(rng.uniform(0.0, HEARD_S), thief.send, node, accept)

    # --- incidents

    def _inject(self, kind: str, up: list[JobNode], rng: Random) -> None:  # type: ignore[override]
        victim = rng.choice(up)
        match kind:
            case "crash at a save":
                victim.crash_at_save = rng.choice(["before fsync", "after fsync"])
                self.kernel.after(rng.uniform(5.0, 30.0), self._restart, victim, "")
            case "pause":
                victim = rng.choice([node for node in up if node.participant.runners] or up)
                for_s = min(rng.uniform(1.0, 120.0), self.faults.until_s - self.kernel.now)
                wall_right_after_s = rng.choice((0.0, rng.uniform(0.0, 60.0)))
                victim.pause(for_s, wall_right_after_s)
                victim.doubted_until = victim.paused_until + min(LEASE_S, wall_right_after_s + CLOCKS_SEEN_S)
            case "old copy":
                copy = victim.backups.older_than(victim.disk.age, rng)
                if copy is not None and self.kernel.now - self._wiped_at >= MIN_WIPE_INTERVAL_S:
                    self._wiped_at = self.kernel.now
                    victim.crash()
                    victim.roll_back(copy)
                    self.kernel.after(rng.uniform(1.0, 60.0), self._restart, victim, "")
            case fault if fault in DISK_INCIDENTS:
                victim.disk.faults.strike(fault, self.kernel.now, rng)
            case "wipe" if self.kernel.now - self._wiped_at < MIN_WIPE_INTERVAL_S:
                super()._inject("crash", up, rng)  # type: ignore[arg-type]
            case "wipe":
                self._wiped_at = self.kernel.now
                super()._inject(kind, up, rng)  # type: ignore[arg-type]
            case "switch":
                busy = [node for node in up if node.participant.hosted]
                if busy:
                    rng.choice(busy).pull_kill_switch()
            case "notice":
                for job in victim.participant.hosted:
                    victim.report(job, VacateWanted(rng.uniform(0.5, 10.0), "its owner"))
            case "forgery":
                for node in up:  # a malicious node sends altered descriptions of every job it knows
                    for job, witness in list(victim.participant.witnesses.items()):
                        witness_record = witness.witness_record
                        victim.send(
                            node.id,
                            Start(
                                job,
                                witness_record.promised + 1,
                                witness_record.config,
                                witness_record.record,
                                victim.forge(witness),
                            ),
                        )
            case "theft" | "lie":
                faults = self.faults  # no late copies: the hostile node may be a witness or the runner by then
                self.faults = msgspec.structs.replace(faults, replay=0.0, incidents=())
                (self._steal if kind == "theft" else self._lie)(victim, up)
                self.faults = faults
            case "rumour":
                self.liar = self.liar or victim  # one in a run
                if self.liar in up:
                    self._spread_rumours(self.liar)
            case "echo":
                for sent in self._echoes.values():
                    source, data, to = rng.choice(sent)
                    self.kernel.post(rng.uniform(0.0, 5.0), self._arrive, data, source.address, to)
            case "full store" | "small quota":
                victim.limit_store(kind == "full store", rng.uniform(5.0, 120.0))
            case "closed port":
                self._closed.append(victim.id)
                self.kernel.after(rng.uniform(5.0, 120.0), self._open, victim.id)
            case "revoke":
                root = self.nodes[0]
                if root.up and not root.stalled and victim is not root and not victim.gone and self._may_go(victim):
                    victim.gone = True
                    self.revocations[victim.id] = self.revoke(victim)
            case "retire" | "scrap" if not self._may_go(victim):
                super()._inject("crash", up, rng)  # type: ignore[arg-type]
            case "retire":
                victim.gone = True
                victim.leave()
            case "scrap":
                victim.gone = victim.powered_off = True
                victim.crash()
            case "migrate":
                for job in list(victim.participant.runners):
                    victim.report(job, MigrateWanted(rng.choice([None, rng.choice(up).id])))
            case "cancel":
                running = sorted(job for job in self.accepted if self.outcome(job) is None)
                if running and rng.random() < 0.3:
                    job = rng.choice(running)
                    self.cancelled.add(job)
                    for node in self.nodes:
                        victim.send(node.id, Cancel(job=job, user=USER_NAME))
            case _:
                super()._inject(kind, up, rng)  # type: ignore[arg-type]

    def takes_calls(self, node: bytes) -> bool:
        """Tell whether job messages reach a node; gossip always does. One that is new to the mesh counts as reachable."""
        other = self.by_id.get(node)
        return node not in self._closed and not (isinstance(other, JobNode) and other.closed)

    def _open(self, node: bytes) -> None:
        if node in self._closed:
            self._closed.remove(node)

    def remember(self, source: JobNode, message: AnyMessage, data: bytes, to: Address) -> None:
        """Keep a sample of all messages of each type, to deliver some of them once more."""
        if "echo" not in self.faults.incidents:
            return
        kind = type(message)
        self._sent[kind] += 1
        if len(self._echoes[kind]) < ECHOES_KEPT:
            self._echoes[kind].append((source, data, to))
        elif (place := self.streams.get("world", "echo").randrange(self._sent[kind])) < ECHOES_KEPT:
            self._echoes[kind][place] = (source, data, to)

    def _bring_again(self) -> None:
        """Let members bring the unfinished jobs to their witnesses once more, as any member may ask them to."""
        rng = self.streams.get("world", "again")
        up = [node for node in self.nodes if node.up and node.serving and not node.stalled and not node.old]
        for job in sorted(self.accepted) if up else ():
            records = [node.disk.witness_records[job] for node in self.nodes if job in node.disk.witness_records]
            if records and self.outcome(job) is None:
                bringer = rng.choice(up)
                bringer.take(partial(bringer.participant.submit, job, records[0].spec, self.specs[job]))
        self.kernel.after(self.faults.brought_again_s, self._bring_again)

    def _steal(self, thief: JobNode, up: list[JobNode]) -> None:
        """A malicious member that no witness has chosen asks for terms, takes leases, names groups and calls jobs over."""
        known = {job: record for node in up for job, record in node.disk.witness_records.items()}
        for job, record in sorted(known.items()):
            copies = [node.disk.witness_records[job] for node in self.nodes if job in node.disk.witness_records]
            if any(thief.id in {one.holder, *one.config.nodes} for one in copies) or job in thief.participant.runners:
                continue  # a witness and a runner may, and those with an old group still take it for one
            term, config = record.promised + 1000, record.config
            own = Config(config.number + 1, term, (Voter(thief.id, thief.disk.name),))
            joined = Config(config.number + 1, term, (*config.everyone, *own.members))
            attempt = Attempt(record.record.next_attempt, thief.id, thief.name, term, 0)
            stolen, warrant = record.record.with_attempt(attempt), thief.authority.warrant(job, term, thief.id, own)
            voters = {voter.node: voter.disk for voter in config.everyone}
            self.thefts[thief.id, job] = Accept(job, term, 1, own, stolen, thief.id)
            for node in config.nodes:
                thief.send(node, Prepare(job, term, joined, (thief.authority.warrant(job, term, thief.id, joined),)))
                for group in (config, own):
                    accept = Accept(job, term, 1, group, stolen, thief.id, spec=record.spec, warrants=(warrant,))
                    thief.send(node, accept)
                    thief.send(node, msgspec.structs.replace(accept, holder=None))
                thief.send(node, Accept(job, FIRST_TERM, 1, own, JobRecord(), None, spec=record.spec))
            for other in up:
                for asked in (record.promised, term):
                    refused = Refused(
                        job, asked, voters[config.nodes[0]], 1, 1 << 40, own, 0.0, False, True, asked, stolen
                    )
                    thief.send(other.id, refused)

    def _lie(self, liar: JobNode, up: list[JobNode]) -> None:
        """A malicious witness says of each job that it has ended, or that an ended one has left no checkpoint.

        One that it runs or witnesses alone would end.
        """
        for job, witness in list(liar.participant.witnesses.items()):
            known = witness.witness_record
            records = [node.disk.witness_records[job] for node in self.nodes if job in node.disk.witness_records]
            alone = Config(known.config.number + 1, known.promised + 1, (Voter(liar.id, liar.disk.name),))
            if any(
                liar.id in {record.holder, *(last.node for last in record.record.attempts[-1:])}
                or decides(record.config, {voter for voter in record.config.everyone if voter.node == liar.id})
                for record in records
            ):
                continue
            if known.record.outcome is None:
                lie = Outcome("cancelled", f"{LIE} of {liar.name}", None, None, (), 0)
                record = msgspec.structs.replace(known.record, version=known.record.version + 1, outcome=lie)
            else:
                record = msgspec.structs.replace(  # no two liars tell the same
                    known.record, version=known.record.version + 1, commit=None, needed=(), prefer=liar.id
                )
            for other in up:
                if other is not liar:
                    for term in (known.accepted_term, known.promised + 1):
                        liar.send(other.id, Closed(job, term, record))
                    if all(one.final for one in records):
                        for group, told in ((known.config, record), (alone, known.record)):
                            liar.send(other.id, Accept(job, alone.term, 1, group, told, None))
                    ended = (known.config, 0.0, False, True, known.accepted_term, record)
                    liar.send(other.id, Refused(job, known.promised, liar.disk.name, 1, known.promised, *ended))
            if liar.id in self.specs[job].not_on:
                rng = self.streams.get("world", "seize")
                for _ in range(SEIZURES):
                    liar.after(rng.uniform(0.0, SEIZE_WITHIN_S), self._seize, liar, job)

    def _seize(self, liar: JobNode, job: bytes) -> None:
        """A malicious witness takes a term of a job that it is not to run, and then the lease for itself."""
        witness = liar.participant.witnesses.get(job)
        if witness is None or self.kernel.now > self.faults.until_s:
            return
        known = witness.witness_record
        term, nodes = known.promised + 1, set(known.config.nodes) - {liar.id}
        config = msgspec.structs.replace(known.config, term=term)
        record = known.record.with_attempt(Attempt(known.record.next_attempt, liar.id, liar.name, term, 0))
        warrant = liar.authority.warrant(job, term, liar.id, config)
        for node in sorted(nodes):
            liar.send(node, Prepare(job, term))
            liar.after(HEARD_S, liar.send, node, Accept(job, term, 1, config, record, liar.id, warrants=(warrant,)))

    def _spread_rumours(self, liar: JobNode) -> None:
        """A malicious member publishes, as the furthest view of each job, that it has ended or needs newer checkpoints only, or
        that some nodes have its last checkpoint.

        It answers so as a witness, too, unless it decides alone, or soon will.
        """
        rng = self.streams.get("world", "rumours")
        for job, status in sorted(liar.board.table.all().items()):
            if status.outcome is not None:
                continue
            witness = liar.participant.witnesses.get(job)
            kind: OutcomeKind | None = rng.choice((None, "done", "failed"))
            outcome = None if kind is None else Outcome(kind, f"{LIE} of {liar.name}", None, None, (), 0)
            needed = (max(status.needed, default=0) + rng.randint(1, 5),)
            rank, nodes = (int(kind is not None), 1 << 40, 0, 0), tuple(node.id for node in self.nodes)
            commit = status.commit and msgspec.structs.replace(
                status.commit, holders=tuple(rng.sample(nodes, rng.randint(0, len(nodes))))
            )
            told = msgspec.structs.replace(status, rank=rank, outcome=outcome, commit=commit, needed=needed)
            liar.core.publish(STATUSES + format_job(job), encode_status(told), STATUS_TTL_S)
            self.rumours += 1
            if witness is not None and not liar.will_decide_alone(witness.witness_record):
                record = msgspec.structs.replace(witness.witness_record.record, needed=needed, outcome=outcome)
                liar.lies[job] = msgspec.structs.replace(witness.witness_record, record=record, final=kind is not None)

    # --- calls of the checkers

    def changed(self, node: MembershipNode, change: MemberChanged) -> None:
        super().changed(node, change)
        assert isinstance(node, JobNode)
        node.observe_soon()

    def switched(self, node: JobNode) -> None:
        for checker in self.job_checkers:
            checker.switched(self, node)


def majority(members: Collection[Voter], of: Collection[Voter]) -> bool:
    """Tell whether most of these members are among the others. Counted here, so that no production rule checks itself."""
    return 2 * len(set(members) & set(of)) > len(set(members))


def decides(config: Config, voters: Collection[Voter]) -> bool:
    """Tell whether these voters can decide for the group, or for both groups during a change."""
    return majority(config.members, voters) and (not config.previous or majority(config.previous, voters))


def is_lie(message: AnyMessage) -> bool:
    record = message.record if isinstance(message, Closed | Refused) else None
    return record is not None and record.outcome is not None and record.outcome.detail.startswith(LIE)


def disk_of(body: bytes) -> bytes:
    return msgspec.msgpack.decode(body, type=DiskAge).disk

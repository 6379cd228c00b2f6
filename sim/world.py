"""Tier B: the production job cores on the mesh of tier A, under the same faults and some of their own.

The nodes are those of `sim.gossip`: real membership, records and trust over a network that loses, delays, repeats and is cut,
on machines that stall, sleep, crash around an fsync and lose their disks. What is simulated here besides is only what the job
cores never see: guests that take steps, uploads that take time, owners who pull the switch. One seed decides everything.
"""

from collections.abc import Sequence
from hashlib import blake2b
from random import Random

import msgspec

from membership.effects import MemberChanged
from membership.envelope import EnvelopeError
from membership.identity import Identity
from membership.search import Address
from mesh.jobs.effects import (
    Cell,
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
)
from mesh.jobs.gang import Member
from mesh.jobs.ledger import Ledger, Seat
from mesh.jobs.messages import AnyMessage, Cancel, Enlist, MessageError, Start, decode_message, encode_message
from mesh.jobs.onward import GOES_HOME
from mesh.jobs.participant import Directed, Participant, Role, Rules, Submitted
from mesh.jobs.recovery import RecoveryError, make_plan
from mesh.jobs.reports import (
    CheckpointFound,
    CheckpointStored,
    GuestExited,
    GuestStarted,
    KillWanted,
    MigrateWanted,
    ResultStored,
    RunnerEvent,
    VacateWanted,
)
from mesh.jobs.runner import Runner
from mesh.jobs.spec import Checkpointing, Homing, JobSpec, SpecError, decode_spec, encode_spec, job_id
from mesh.jobs.view import Instant, Timer, View
from mesh.jobs.witness import Witness
from placement.advert import AdvertError, decode_advert, encode_advert
from placement.decision import witness_order
from sim.checkers import Violation
from sim.gossip import Disk, GossipNode, GossipWorld
from sim.guests import Guest
from sim.invariants import JobChecker, OneChain, StepsInLease, all_job_checkers
from sim.mix import Mix, draw_job_mix
from sim.offer import SLOTS, offer_of
from sim.paper import PaperSeals

MARK = b"J"  # of a job message among datagrams
STEP_S = 1.0
CHECKPOINT_EVERY_STEPS = 5
LOOK_S = 2.0  # a node also looks around without being told of a change
SHOW_S, SHOW_TTL_S = 600.0, 3600.0
LEASE_S = 6.0
AGREE_S = 30.0  # in which nodes that were reborn meet the others again, before a user asks what is left
GANG_SHARE = 0.25  # of the jobs run on two or three nodes at once
HOME_SHARE, SETTLE_S = 0.1, 8.0  # of the jobs go back to where they ran first, once that was free for so long
WIPE_PAUSE_S = (
    60.0  # a group needs a moment to replace whom a disk has left; majorities that go together are another matter
)


class JobDisk(Disk):
    """`name` is the journal's: see `ledger.Seat`."""

    name: bytes = b""
    cells: dict[bytes, Cell] = msgspec.field(default_factory=dict)


class JobNode(GossipNode):
    world: "World"
    disk: JobDisk

    def __init__(self, world: "World", number: int, identity: Identity, chain: bytes) -> None:
        super().__init__(world, number, identity, chain)
        self.participant: Participant
        self.guests: dict[bytes, Guest] = {}
        self.dies_at_save = ""
        self.mates_started = 0
        self._allowed: dict[bytes, float] = {}
        self._looking = False
        self._seals: PaperSeals

    def new_disk(self) -> JobDisk:
        return JobDisk(name=self.world.streams.get(self.name, "journal").randbytes(8))

    # --- life

    def start(self, *, crash_at: str = "") -> None:
        self.guests, self._allowed, self._looking, self.dies_at_save = {}, {}, False, ""
        super().start(crash_at=crash_at)
        if not self.up:
            return
        self._seals = PaperSeals(self.identity, self.core.trust.mesh_id, lambda *written: None)
        rules = Rules(_open_spec, self._admit, lambda *asked: True, lambda message, spec: message.mandate == b"signed")
        rng = self.world.streams.get(self.name, "jobs")
        self.participant = Participant(self.id, self.disk.name, self.name, rules, rng)
        for job in sorted(self.disk.cells):
            cell = self.disk.cells[job]
            self.perform_jobs(self.participant.restore(self.world.restored(cell, self), self.instant))
        self._show()
        self._look_again()

    def crash(self) -> None:
        """Guests end with the daemon."""
        super().crash()
        for guest in self.guests.values():
            guest.ended = True
        self.guests = {}

    def leave(self) -> None:
        """Notice to the guests, drain, farewell, end; it comes back after a while."""
        self.perform(self.core.swim.set_draining(True, self.boot()))
        for job in self.participant.hosted:
            self.tell(job, VacateWanted(5.0, "its node leaves"))
        self.after(6.0, self._farewell)

    def _farewell(self) -> None:
        if self.world.healed:
            self.perform(self.core.swim.set_draining(False, self.boot()))
            return
        super().leave()
        rng = self.world.streams.get("world", "leave")
        self.world.kernel.after(rng.uniform(5.0, 60.0), self.world._come_back, self, "")

    def pull_the_switch(self) -> None:
        """`mesh reclaim --now`: asks nobody."""
        for job in self.participant.hosted:
            self.tell(job, KillWanted("its owner"))
        self.world.switched(self)

    @property
    def instant(self) -> Instant:
        return Instant(self.boot(), int(self.unix() * 1000))

    # --- what it sees

    def _show(self) -> None:
        self.core.publish("advert", encode_advert(offer_of(self.id, self.name)), SHOW_TTL_S)
        self.core.publish("disk", self.disk.name, SHOW_TTL_S)
        self.after(SHOW_S, self._show)

    def _look_again(self) -> None:
        self.look()
        self.after(LOOK_S, self._look_again)

    def look_soon(self) -> None:
        if not self._looking:
            self._looking = True
            self.after(0.1, self._look_now)

    def _look_now(self) -> None:
        self._looking = False
        self.look()

    def look(self) -> None:
        self.perform_jobs(self.participant.observe(self.view(), self.instant))

    def view(self) -> View:
        members, unix = self.core.swim.table.all(), self.unix()
        alive = frozenset(member.node for member in members if member.present)
        adverts = []
        for record in self.core.records.section("advert", unix):
            if record.node in alive and not self.core.swim.is_unreachable(record.node):
                try:
                    adverts.append(decode_advert(record.node, record.body))
                except AdvertError:
                    continue
        return View(
            self.id,
            alive,
            frozenset(member.node for member in members if member.draining),
            frozenset(member.node for member in members if member.state == "left"),
            tuple(sorted(adverts, key=lambda advert: advert.node)),
            {record.node: record.body for record in self.core.records.section("disk", unix)},
        )

    # --- messages and timers

    def take(self, data: bytes, source: Address) -> None:
        if not data.startswith(MARK):
            super().take(data, source)
            return
        try:
            sender, payload = self._seals.open_addressed(data[1:], self.core.trust.with_tag)
            message = decode_message(payload)
        except (EnvelopeError, MessageError):
            return
        if self.core.trust.standing(sender, self.unix()) is not None:
            self.hear(sender, message)

    def hear(self, sender: bytes, message: AnyMessage) -> None:
        self.perform_jobs(self.participant.receive(sender, message, self.instant))
        self.world.handled(message.job)

    def say(self, to: bytes, message: AnyMessage) -> None:
        if to == self.id:
            self.after(0.0, self.hear, self.id, message)
            return
        member = self.core.swim.table.get(to)
        if member is not None:
            sealed = self._seals.seal_to(to, encode_message(message))
            self.world.carry(self, MARK + sealed, (member.host, member.port))

    def _job_timer(self, job: bytes, role: Role, timer: Timer) -> None:
        self.perform_jobs(self.participant.on_timer(job, role, timer, self.instant))
        self.world.handled(job)

    def tell(self, job: bytes, event: RunnerEvent) -> None:
        self.perform_jobs(self.participant.tell_runner(job, event, self.instant))

    def _admit(self, job: bytes, spec: JobSpec, order: Start | Enlist) -> str | None:
        return "its slots are taken" if len(self.participant.hosted) >= SLOTS else None

    # --- what the cores want

    def perform_jobs(self, outputs: Sequence[Directed | Submitted]) -> None:
        life = self.life
        for output in outputs:
            if not self.up or self.life != life:
                return
            if isinstance(output, Submitted):
                self.world.submitted(output)
            else:
                self._perform_job(output)

    def _perform_job(self, output: Directed) -> None:
        job, effect, world = output.job, output.effect, self.world
        guest = self.guests.get(job)
        match effect:
            case SaveCell(cell=cell):
                self._save(cell)
            case Send(to=to, message=message):
                if isinstance(message, Start):
                    for checker in world.job_checkers:
                        checker.placed(world, self, message, to)
                self.say(to, message)
            case SetTimer(name=name, token=token, at=at):
                delay = max(0.0, (at - self.boot()) / self.rate)
                self.after(delay, self._job_timer, job, output.role, Timer(name, token))
            case RunUntil(boot_s=boot_s):
                self._allowed[job] = boot_s
                world.allowed(self, job, boot_s)
            case Launch(ledger=ledger):
                host = self.participant.members.get(job) or self.participant.runners.get(job)
                self.after(world.draw(self, "restore", 0.1, 1.0), self._launch, job, ledger, host)
            case SaveCheckpoint(seq=seq, parent=parent):
                self._save_checkpoint(job, seq, parent, guest)
            case SaveResult():
                self.after(0.2, self.tell, job, ResultStored(None, ()))
            case Committed(commit=commit):
                world.log.add(world.kernel.now, "commit", job, commit.seq, commit.term, commit.manifest)
                for checker in world.job_checkers:
                    checker.committed(world, job, commit)
            case Notify(reason=reason) if guest is not None:
                guest.vacating = True
                world.returns += reason == GOES_HOME
            case Kill() if guest is not None and not guest.ended:
                guest.ended = True
                self.after(0.0, self.tell, job, GuestExited(137, False, False))
            case Ended(reason=reason):
                world.log.add(world.kernel.now, "ended", self.name, job, reason)
                self._allowed.pop(job, None)
                if guest is not None:
                    guest.ended = True
                    del self.guests[job]

    def _save(self, cell: Cell) -> None:
        mode, self.dies_at_save = self.dies_at_save, ""
        if mode == "before fsync":
            self.crash()
            return
        self.disk.cells[cell.job] = cell
        for checker in self.world.job_checkers:
            checker.saved(self.world, self, cell)
        if mode:
            self.crash()

    # --- guests

    def _launch(self, job: bytes, ledger: Ledger, host: Runner | Member | None) -> None:
        now_here = self.participant.members.get(job) or self.participant.runners.get(job)
        if host is None or host is not now_here or host.state != "restoring":
            return
        if self.boot() >= self._allowed.get(job, 0.0):
            self.after(0.2, self._launch, job, ledger, host)
            return
        step = ledger.commit.step or 0 if ledger.commit is not None else 0
        for checker in self.world.job_checkers:
            checker.launched(self.world, self, job, host.spec_bytes)
        guest = Guest(step, self.world.lengths[job], isinstance(host, Member))
        self.guests[job] = guest
        self.mates_started += guest.mate
        self.machine_after(STEP_S, self._take_step, job, guest)
        self.tell(job, GuestStarted(step))

    def _take_step(self, job: bytes, guest: Guest) -> None:
        if guest.ended:
            return
        if self.boot() < self._allowed[job]:
            for checker in self.world.job_checkers:
                checker.stepped(self.world, self, job)
            guest.step += 1
            done = guest.step >= guest.of and not guest.mate
            if done or guest.vacating:
                guest.ended = True
                code = 0 if done else 85
                self.after(0.0, self.tell, job, GuestExited(code, False, False))
                return
            if guest.step % CHECKPOINT_EVERY_STEPS == 0 and not guest.mate:
                self.after(0.0, self.tell, job, CheckpointFound())
        self.machine_after(STEP_S, self._take_step, job, guest)

    def _save_checkpoint(self, job: bytes, seq: int, parent: bytes | None, guest: Guest | None) -> None:
        delay = self.world.draw(self, "upload", 0.05, 1.5)
        if guest is None or guest.step == guest.saved:
            self.after(delay, self.tell, job, CheckpointStored(None, (), None))
            return
        guest.saved = guest.step
        name = b"%b/%d/%d/%b/%f" % (job, seq, guest.step, self.id, self.world.kernel.now)
        manifest = blake2b(name, digest_size=32).digest()
        for checker in self.world.job_checkers:
            checker.proposed(self.world, manifest, parent)
        self.after(delay, self.tell, job, CheckpointStored(manifest, (), guest.step))


class World(GossipWorld):
    """`lengths` are in steps. `accepted` jobs are those whose user was told that a majority has them."""

    node_type = JobNode
    nodes: list[JobNode]  # type: ignore[assignment]

    def __init__(
        self,
        seed: int,
        *,
        nodes: int = 12,
        jobs: int = 6,
        minutes: float = 10.0,
        mix: Mix | None = None,
        job_checkers: Sequence[JobChecker] | None = None,
    ) -> None:
        super().__init__(seed, nodes=nodes, minutes=minutes, mix=mix or draw_job_mix(seed, minutes), checkers=())
        self.job_checkers = list(all_job_checkers() if job_checkers is None else job_checkers)
        self.lengths: dict[bytes, int] = {}
        self.returns = 0  # how often a job went home
        self.accepted: set[bytes] = set()
        self.lost: set[bytes] = set()  # jobs whose witnesses' disks are gone, most of them
        self.recovered: set[bytes] = set()  # of those, where their user made them go on from what was left
        self._wanted = jobs
        self._wiped_at = -WIPE_PAUSE_S
        self._leaver: tuple[bytes, JobNode] | None = None

    # --- playing

    def run(self) -> str:
        """Faults, then none: every accepted job must end, but those whose record is lost."""
        try:
            self.begin()
            self.kernel.run(self.mix.until_s)
            self.heal()
            self.lost = {job for job in self.accepted if self._record_is_lost(job)}
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
        """J4: what membership needs to agree, and each job's remaining steps on nodes that take two at a time."""
        return 90.0 + sum(self.lengths.values()) * STEP_S

    def begin(self, spread_s: float = 5.0) -> None:
        super().begin(spread_s)
        rng = self.streams.get("world", "submit")
        for number in range(self._wanted):
            self.kernel.at(rng.uniform(10.0, 0.5 * self.mix.until_s), self._submit, number)

    def heal(self) -> None:
        for node in self.nodes:
            node.dies_at_save = ""
        super().heal()

    def all_ended(self) -> bool:
        return all(self.outcome(job) is not None for job in self.accepted - (self.lost - self.recovered))

    def outcome(self, job: bytes) -> str | None:
        """How it ended, by what any witness has on disk."""
        for node in self.nodes:
            cell = node.disk.cells.get(job)
            if cell is not None and cell.final and cell.ledger.outcome is not None:
                return cell.ledger.outcome.kind
        return None

    def holders(self, job: bytes) -> list[tuple[JobNode, int]]:
        """Who believes in a lease of this job now, and under which term."""
        found = []
        for node in self.nodes:
            runner = node.participant.runners.get(job) if node.up else None
            if runner is not None and runner.holds_lease(node.boot()):
                found.append((node, runner.term))
        return found

    @property
    def mates(self) -> int:
        """How often a guest was started that is not its job's first."""
        return sum(node.mates_started for node in self.nodes)

    @property
    def commits(self) -> int:
        return sum(checker.commits for checker in self.job_checkers if isinstance(checker, OneChain))

    @property
    def steps(self) -> int:
        return sum(checker.steps for checker in self.job_checkers if isinstance(checker, StepsInLease))

    def draw(self, node: JobNode, purpose: str, low: float, high: float) -> float:
        return self.streams.get(node.name, purpose).uniform(low, high)

    def restored(self, cell: Cell, node: JobNode) -> Witness:
        """A witness as its node finds it on its disk; a negative control replaces it."""
        return Witness.restored(cell, _open_spec(cell.job, cell.spec), node.boot())

    # --- jobs

    def _submit(self, number: int) -> None:
        rng = self.streams.get("world", "submit")
        able = [node for node in self.nodes if node.up and not node.still]
        if not able:
            return
        submitter = rng.choice(able)
        seen = submitter.view()
        ranked = witness_order(rng.randbytes(8), seen.adverts, seen.alive - seen.leaving)
        others = [Seat(node, seen.disks[node]) for node in ranked if node != submitter.id and node in seen.disks]
        gang = rng.random() < GANG_SHARE
        homes = not gang and self.streams.get("world", "home").random() < HOME_SHARE
        spec = JobSpec(
            chain=b"",
            submitter=submitter.id,
            user="sim",
            created_unix_ms=submitter.instant.unix_ms,
            nonce=b"%d" % number,
            argv=("train",),
            witnesses=(Seat(submitter.id, submitter.disk.name), *(others[:2] if len(others) > 1 else ())),
            checkpointing=Checkpointing(),
            lease_s=LEASE_S,
            on_partition="compute_uncommitted" if rng.random() < 0.2 else "freeze",
            least_nodes=2 if gang else 1,
            most_nodes=3 if gang else 1,
            homing=Homing("first" if homes else "none", settle_s=SETTLE_S),
        )
        payload = encode_spec(spec)
        job = job_id(payload)
        self.lengths[job] = rng.randint(20, 90)
        submitter.perform_jobs(submitter.participant.submit(job, payload, spec, submitter.instant))
        if number == 0 and len(spec.witnesses) > 1:
            # J9: it goes, for good, as soon as it was told that its job is accepted.
            self._leaver = (job, submitter)

    def submitted(self, answer: Submitted) -> None:
        self.log.add(self.kernel.now, "submitted", answer.job, answer.problem or "")
        if answer.problem is None:
            self.accepted.add(answer.job)
            if self._leaver is not None and self._leaver[0] == answer.job:
                node = self._leaver[1]
                node.gone = node.dark = True
                node.crash()

    def _record_is_lost(self, job: bytes) -> bool:
        """Whether most disks of its last witness group are gone, or were never reached after they were."""
        cells = [node.disk.cells[job] for node in self.nodes if job in node.disk.cells and not node.gone]
        if not cells:
            return True
        config = max((cell.config for cell in cells), key=lambda config: config.order)
        standing = {Seat(node.id, node.disk.name) for node in self.nodes if not node.gone}
        return not config.quorum(standing)

    def _recover(self, job: bytes) -> None:
        """`mesh recover`, on a node that has a record; history may fork here, and nothing before it counts any more."""
        nodes = [node for node in self.nodes if node.up and job in node.disk.cells]
        cells = {node.id: node.disk.cells[job] for node in nodes}
        try:
            asker = nodes[0] if nodes else self.nodes[0]
            plan = make_plan(job, cells, asker.view(), asker.instant)
        except RecoveryError:
            return
        self.recovered.add(job)
        for checker in self.job_checkers:
            checker.recovered(self, job)
        asker.perform_jobs(asker.participant.recover(plan, b"signed", asker.instant))

    # --- fate

    def _fate(self, kind: str, up: list[JobNode], rng: Random) -> None:  # type: ignore[override]
        victim = rng.choice(up)
        match kind:
            case "crash at a save":
                victim.dies_at_save = rng.choice(["before fsync", "after fsync"])
                self.kernel.after(rng.uniform(5.0, 30.0), self._come_back, victim, "")
            case "wipe" if self.kernel.now - self._wiped_at < WIPE_PAUSE_S:
                super()._fate("crash", up, rng)  # type: ignore[arg-type]
            case "wipe":
                self._wiped_at = self.kernel.now
                super()._fate(kind, up, rng)  # type: ignore[arg-type]
            case "switch":
                busy = [node for node in up if node.participant.hosted]
                if busy:
                    rng.choice(busy).pull_the_switch()
            case "notice":
                for job in victim.participant.hosted:
                    victim.tell(job, VacateWanted(rng.uniform(0.5, 10.0), "its owner"))
            case "forgery":
                for node in up:  # one that lies about every job it knows
                    for job, witness in list(victim.participant.witnesses.items()):
                        cell = witness.cell
                        spec = encode_spec(msgspec.structs.replace(witness.spec, argv=("mine, bitcoin",)))
                        victim.say(node.id, Start(job, cell.promised + 1, cell.config, cell.ledger, spec))
            case "migrate":
                for job in list(victim.participant.runners):
                    victim.tell(job, MigrateWanted(rng.choice([None, rng.choice(up).id])))
            case "cancel":
                running = sorted(job for job in self.accepted if self.outcome(job) is None)
                if running and rng.random() < 0.3:
                    job = rng.choice(running)
                    for node in self.nodes:
                        victim.say(node.id, Cancel(job=job, user="sim"))
            case _:
                super()._fate(kind, up, rng)  # type: ignore[arg-type]

    # --- watching

    def changed(self, node: GossipNode, change: MemberChanged) -> None:
        super().changed(node, change)
        assert isinstance(node, JobNode)
        node.look_soon()

    def handled(self, job: bytes) -> None:
        for checker in self.job_checkers:
            checker.handled(self, job)

    def allowed(self, node: JobNode, job: bytes, until: float) -> None:
        for checker in self.job_checkers:
            checker.allowed(self, node, job, until)

    def switched(self, node: JobNode) -> None:
        for checker in self.job_checkers:
            checker.switched(self, node)


def _open_spec(job: bytes, payload: bytes) -> JobSpec:
    if job_id(payload) != job:
        raise SpecError("not this job")
    return decode_spec(payload)

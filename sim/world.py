"""A mesh in virtual time: the production membership and job cores of N nodes, over a network that loses and a fate that crashes.

What is simulated is only what the cores never see: packets' delays and losses, disks that keep what was saved, guests that take
steps, clocks that run at different rates. One seed decides everything. Invariants are checked as the run goes (`sim.invariants`).
"""

from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b

import msgspec

from membership.config import SwimConfig
from membership.effects import (
    MemberChanged,
    PersistEpoch,
    SendPacket,
    SetTimer,
    StreamOutcome,
    StreamPing,
    WantReconcile,
)
from membership.swim import Swim, Verified
from membership.wire import AnyEvidence, AnyPacket, decode_evidence, encode
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
)
from mesh.jobs.effects import SetTimer as SetJobTimer
from mesh.jobs.ledger import Ledger, Seat
from mesh.jobs.messages import AnyMessage, Start, decode_message, encode_message
from mesh.jobs.participant import Directed, Participant, Role, Rules, Submitted
from mesh.jobs.runner import (
    CheckpointFound,
    CheckpointStored,
    GuestExited,
    GuestStarted,
    ResultStored,
    VacateWanted,
)
from mesh.jobs.spec import Checkpointing, JobSpec, SpecError, decode_spec, encode_spec, job_id
from mesh.jobs.view import Instant, Timer, View
from mesh.jobs.witness import Witness
from placement.advert import Advert
from placement.decision import witness_order
from sim.invariants import Invariants
from sim.kernel import EventLog, Handle, Kernel
from sim.streams import Streams

DISK = b"the disk"
EPOCH_UNIX_MS = 1_800_000_000_000
STEP_S = 1.0
CHECKPOINT_EVERY_STEPS = 5


class Faults(msgspec.Struct, frozen=True):
    """`loss` of every message, delays drawn between the two, clock rates within +-`drift`, one crash each `crash_every_s`.

    Faults stop at `until_s`: from then on everything must come to its end (the liveness phase).
    """

    loss: float = 0.05
    delay_s: tuple[float, float] = (0.0005, 0.03)
    drift: float = 0.01
    crash_every_s: float = 15.0
    down_s: tuple[float, float] = (5.0, 40.0)
    leave_share: float = 0.3
    until_s: float = 240.0


class Guest:
    """A stand-in for a job's process: one step a second, a checkpoint every few, an end."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.saved = step
        self.vacating = False
        self.timer: Handle | None = None


class Node:
    def __init__(self, world: "World", number: int) -> None:
        self.world = world
        self.name = f"node{number:02d}"
        self.id = blake2b(self.name.encode(), digest_size=32).digest()
        clock = world.streams.get(self.name, "clock")
        self.offset_s = clock.uniform(0, 1e6)
        self.rate = 1 + clock.uniform(-world.faults.drift, world.faults.drift)
        self.disk: dict[bytes, Cell] = {}
        self.epoch = 0
        self.up = False
        self.life = 0
        self.swim: Swim
        self.participant: Participant
        self.guests: dict[bytes, Guest] = {}
        self.allowed: dict[bytes, float] = {}

    # --- life

    def start(self) -> None:
        world = self.world
        self.up, self.life, self.epoch = True, self.life + 1, self.epoch + 1
        self.guests = {}
        rng = world.streams.get(self.name, "protocol")
        self.swim = Swim(self.id, self.name, 7373, self.epoch, SwimConfig.local(), rng, self._seal_evidence, lambda: 0)
        rules = Rules(open_spec=_open_spec, admit=self._admit, may_cancel=lambda sender, user, spec: True)
        self.participant = Participant(self.id, DISK, self.name, rules, rng)
        world.log.add(world.kernel.now, "start", self.name, self.epoch)
        self.perform_swim(self.swim.start(self.now))
        for other in world.nodes:
            if other is not self and other.up:
                self._push_pull(other)
        for job in sorted(self.disk):
            witness = Witness.restored(self.disk[job], _open_spec(job, self.disk[job].spec), self.now)
            self.perform(self.participant.restore(witness, self.instant))
        self.look()

    def crash(self) -> None:
        """Everything but the disk is gone; what was on its way from here still travels."""
        self.up = False
        self.world.log.add(self.world.kernel.now, "crash", self.name)
        for job, guest in self.guests.items():
            self._stop_guest(job, guest)
        self.guests = {}

    def leave(self) -> None:
        """Notice to the guests, drain, farewell, end."""
        self.perform_swim(self.swim.set_draining(True, self.now))
        for job in list(self.participant.runners):
            self.perform(self.participant.tell_runner(job, VacateWanted(5.0, "its node leaves"), self.instant))
        self.look()
        self.world.kernel.after(6.0, self._farewell, self.life)

    def _farewell(self, life: int) -> None:
        if self.up and life == self.life:
            self.perform_swim(self.swim.leave(self.now))
            self.crash()

    @property
    def now(self) -> float:
        """This node's own CLOCK_BOOTTIME."""
        return self.offset_s + self.world.kernel.now * self.rate

    @property
    def instant(self) -> Instant:
        return Instant(self.now, EPOCH_UNIX_MS + int(self.world.kernel.now * 1000))

    def later(self, at_local: float, callback: Callable[..., None], *arguments: object) -> Handle:
        """Run at a moment of this node's clock, in this life of the node only."""
        delay = max(0.0, (at_local - self.now) / self.rate)
        life = self.life

        def run() -> None:
            if self.up and self.life == life:
                callback(*arguments)

        return self.world.kernel.after(delay, run)

    # --- membership

    def _seal_evidence(self, evidence: AnyEvidence) -> bytes:
        return self.id + encode(evidence)  # who may say what is still checked, by decode_evidence

    def perform_swim(self, effects: Sequence[object]) -> None:
        changed = False
        for effect in effects:
            match effect:
                case SendPacket(to=to, packet=packet):
                    self.world.send(self, to, partial(Node.on_packet, sender=self.id, packet=packet))
                case SetTimer(name=name, token=token, at=at):
                    self.later(at, self._swim_timer, name, token)
                case StreamPing(node=node):
                    self._stream_ping(node)
                case WantReconcile(node=node, unless_equal=unless_equal):
                    other = self.world.by_id.get(node)
                    if other is not None and other.up and not (unless_equal and other.swim.root() == self.swim.root()):
                        self._push_pull(other)
                case MemberChanged(node=node, state=state):
                    self.world.log.add(self.world.kernel.now, "sees", self.name, node[:4], state)
                    changed = True
                case PersistEpoch(epoch=epoch):
                    self.epoch = epoch
        if changed:
            self.look()

    def _swim_timer(self, name: str, token: int) -> None:
        self.perform_swim(self.swim.on_timer(name, token, self.now))

    def _stream_ping(self, node: bytes) -> None:
        """TCP: nothing is lost, and a machine whose process has crashed refuses."""
        other = self.world.by_id[node]
        outcome: StreamOutcome = "acked" if other.up else "refused"
        if not self.world.reaches(self, other):
            outcome = "silent"
        delay = self.world.draw(self, "stream", 0.001, 0.02)
        self.later(self.now + delay, self._stream_pinged, node, outcome)

    def _stream_pinged(self, node: bytes, outcome: StreamOutcome) -> None:
        self.perform_swim(self.swim.on_stream_ping(node, outcome, self.now))

    def _push_pull(self, other: "Node") -> None:
        for source, target in ((self, other), (other, self)):
            evidence = source.swim.evidence_missing_from([], source.now)
            self.world.send(source, target.id, partial(Node.take_evidence, evidence=evidence))

    def on_packet(self, sender: bytes, packet: AnyPacket) -> None:
        evidence = [_verified(sealed) for kind, sealed in packet.gossip if kind == "member"]
        self.perform_swim(self.swim.on_packet(sender, packet, evidence, self.now))

    def take_evidence(self, evidence: list[bytes]) -> None:
        for sealed in evidence:
            self.perform_swim(self.swim.on_evidence(*_verified(sealed), self.now, rumoured=False))

    # --- jobs

    def look(self) -> None:
        self.perform(self.participant.observe(self._view, self.instant))

    def _view(self, job: bytes) -> View:
        members = self.swim.table.all()
        alive = frozenset(member.node for member in members if member.present)
        adverts = tuple(self.world.adverts[node] for node in sorted(alive))
        leaving = frozenset(member.node for member in members if member.draining)
        left = frozenset(member.node for member in members if member.state == "left")
        order = witness_order(job, adverts, sorted(alive - leaving))
        return View(self.id, alive, leaving, left, adverts, order, dict.fromkeys(self.world.by_id, DISK))

    def _admit(self, job: bytes, spec: JobSpec, start: Start) -> str | None:
        return "its slot is taken" if len(self.participant.runners) >= 2 else None

    def receive(self, sender: bytes, message: AnyMessage) -> None:
        self.perform(self.participant.receive(sender, message, self.instant))
        self.world.invariants.check_leases(message.job, self.world.nodes)

    def _job_timer(self, job: bytes, role: Role, timer: Timer) -> None:
        self.perform(self.participant.on_timer(job, role, timer, self.instant))
        self.world.invariants.check_leases(job, self.world.nodes)

    def tell(self, job: bytes, event: object) -> None:
        self.perform(self.participant.tell_runner(job, event, self.instant))  # type: ignore[arg-type]

    def perform(self, outputs: list[Directed | Submitted]) -> None:
        for output in outputs:
            if isinstance(output, Submitted):
                self.world.log.add(self.world.kernel.now, "submitted", output.job, output.problem or "")
            else:
                self._perform(output)

    def _perform(self, output: Directed) -> None:
        job, effect, world = output.job, output.effect, self.world
        guest = self.guests.get(job)
        match effect:
            case SaveCell(cell=cell):
                self.disk[job] = cell
                world.invariants.cell_saved(cell)
            case Send(to=to, message=message):
                data = encode_message(message)
                world.log.add(world.kernel.now, "send", self.name, to[:4], data)
                if to == self.id:
                    self.later(self.now, self.receive, self.id, message)
                else:
                    world.send(self, to, lambda node: node.receive(self.id, decode_message(data)))
            case SetJobTimer(name=name, token=token, at=at):
                self.later(at, self._job_timer, job, output.role, Timer(name, token))
            case Launch(ledger=ledger):
                self.later(self.now + world.draw(self, "restore", 0.1, 1.0), self._launch, job, ledger)
            case SaveCheckpoint(seq=seq, parent=parent):
                self._save_checkpoint(job, seq, parent, guest)
            case SaveResult():
                self.later(self.now + 0.2, self.tell, job, ResultStored(None, ()))
            case Committed(commit=commit):
                world.log.add(world.kernel.now, "commit", job, commit.seq, commit.term, commit.manifest)
                world.invariants.committed(job, commit)
            case RunUntil(boot_s=boot_s):
                self.allowed[job] = boot_s
            case Notify() if guest is not None:
                guest.vacating = True
            case Kill() if guest is not None:
                self._stop_guest(job, guest)
                self.later(self.now, self.tell, job, GuestExited(137, False, False))
            case Ended(reason=reason):
                world.log.add(world.kernel.now, "ended", self.name, job, reason)
                if guest is not None:
                    self._stop_guest(job, guest)
                    del self.guests[job]

    # --- guests

    def _launch(self, job: bytes, ledger: Ledger) -> None:
        step = ledger.commit.step or 0 if ledger.commit is not None else 0
        guest = Guest(step)
        self.guests[job] = guest
        guest.timer = self.later(self.now + STEP_S, self._take_step, job, guest)
        self.tell(job, GuestStarted(step))

    def _take_step(self, job: bytes, guest: Guest) -> None:
        runner = self.participant.runners.get(job)
        if self.now < self.allowed[job]:
            if runner is not None:
                self.world.invariants.step_taken(job, runner, self.now)
            guest.step += 1
            if guest.step >= self.world.steps or guest.vacating:
                code = 0 if guest.step >= self.world.steps else 85
                self.later(self.now, self.tell, job, GuestExited(code, False, False))
                return
            if guest.step % CHECKPOINT_EVERY_STEPS == 0:
                self.later(self.now, self.tell, job, CheckpointFound())
        guest.timer = self.later(self.now + STEP_S, self._take_step, job, guest)

    def _save_checkpoint(self, job: bytes, seq: int, parent: bytes | None, guest: Guest | None) -> None:
        delay = self.world.draw(self, "upload", 0.05, 1.5)
        if guest is None or guest.step == guest.saved:
            self.later(self.now + delay, self.tell, job, CheckpointStored(None, (), None))
            return
        guest.saved = guest.step
        name = b"%b/%d/%d/%b/%f" % (job, seq, guest.step, self.id, self.world.kernel.now)
        manifest = blake2b(name, digest_size=32).digest()
        self.world.invariants.proposed(manifest, parent)
        self.later(self.now + delay, self.tell, job, CheckpointStored(manifest, (), guest.step))

    @staticmethod
    def _stop_guest(job: bytes, guest: Guest) -> None:
        if guest.timer is not None:
            guest.timer.cancel()


class World:
    def __init__(
        self, seed: int, *, nodes: int = 20, jobs: int = 6, steps: int = 60, faults: Faults | None = None
    ) -> None:
        self.seed = seed
        self.faults = faults or Faults()
        self.steps = steps
        self.kernel = Kernel()
        self.log = EventLog()
        self.streams = Streams(seed)
        self.invariants = Invariants(self.kernel)
        self.nodes = [Node(self, number) for number in range(nodes)]
        self.by_id = {node.id: node for node in self.nodes}
        self.adverts = {node.id: _advert(node) for node in self.nodes}
        self.cut_off: frozenset[bytes] = frozenset()  # one side of a partition
        self.jobs: list[bytes] = []
        self._wanted_jobs = jobs

    def run(self, until_s: float = 400.0) -> str:
        """Play the whole; the digest of everything that happened."""
        self.begin()
        self.kernel.run(until_s)
        return self.log.digest

    def begin(self) -> None:
        """Set the stage; `kernel.run` plays as far as it is told, and may be told again."""
        for number, node in enumerate(self.nodes):
            self.kernel.at(0.05 * number, node.start)
        for number in range(self._wanted_jobs):
            self.kernel.at(5.0 + number, self._submit, number)
        if self.faults.crash_every_s > 0:
            self.kernel.after(12.0, self._strike)
        self.kernel.at(self.faults.until_s, self._heal)

    def send(self, source: Node, to: bytes, deliver: Callable[[Node], None]) -> None:
        """Over the network: late, or never."""
        target = self.by_id.get(to)
        if target is not None and not self.reaches(source, target):
            return
        rng = self.streams.get(source.name, "network")
        lost = rng.random() < (self.faults.loss if self.kernel.now < self.faults.until_s else 0.0)
        delay = rng.uniform(*self.faults.delay_s)
        if target is None or lost:
            return

        def arrive() -> None:
            if target.up and self.reaches(source, target):
                deliver(target)

        self.kernel.after(delay, arrive)

    def reaches(self, one: Node, other: Node) -> bool:
        """Whether the network carries anything between these two now."""
        return (one.id in self.cut_off) == (other.id in self.cut_off)

    def draw(self, node: Node, purpose: str, low: float, high: float) -> float:
        return self.streams.get(node.name, purpose).uniform(low, high)

    def outcomes(self) -> dict[bytes, set[str]]:
        """Per job, the outcomes that any witness has on disk."""
        found: dict[bytes, set[str]] = {job: set() for job in self.jobs}
        for node in self.nodes:
            for job, cell in node.disk.items():
                if cell.ledger.outcome is not None:
                    found[job].add(cell.ledger.outcome.kind)
        return found

    def _submit(self, number: int) -> None:
        rng = self.streams.get("world", "submit")
        up = [node for node in self.nodes if node.up]
        submitter = rng.choice(up)
        others = [node for node in up if node is not submitter]
        spec = JobSpec(
            chain=b"",
            submitter=submitter.id,
            user="sim",
            created_unix_ms=EPOCH_UNIX_MS,
            nonce=b"%d" % number,
            argv=("train",),
            witnesses=tuple(Seat(node.id, DISK) for node in (submitter, *rng.sample(others, 2))),
            checkpointing=Checkpointing(),
            lease_s=6.0,
        )
        payload = encode_spec(spec)
        job = job_id(payload)
        self.jobs.append(job)
        submitter.perform(submitter.participant.submit(job, payload, spec, submitter.instant))

    def _strike(self) -> None:
        """Take one node out, now and then; never so many at once that no majority could be left."""
        rng = self.streams.get("world", "fate")
        self.kernel.after(rng.expovariate(1 / self.faults.crash_every_s), self._strike)
        up = [node for node in self.nodes if node.up]
        if self.kernel.now >= self.faults.until_s or len(up) < 0.8 * len(self.nodes):
            return
        victim = rng.choice(up)
        leaves = rng.random() < self.faults.leave_share
        down_s = rng.uniform(*self.faults.down_s)
        if leaves:
            victim.leave()
        else:
            victim.crash()
        self.kernel.after(down_s + 10, self._come_back, victim)

    def _come_back(self, node: Node) -> None:
        if not node.up:
            node.start()

    def _heal(self) -> None:
        self.log.add(self.kernel.now, "heal")
        for node in self.nodes:
            self._come_back(node)


def _open_spec(job: bytes, payload: bytes) -> JobSpec:
    if job_id(payload) != job:
        raise SpecError("not this job")
    return decode_spec(payload)


def _verified(sealed: bytes) -> Verified:
    return sealed[:32], decode_evidence(sealed[:32], sealed[32:]), sealed


def _advert(node: Node) -> Advert:
    return Advert(
        version=1,
        node=node.id,
        nick=node.name,
        user="sim",
        zone="",
        weight=32,
        up_since_unix=0,
        lending=True,
        paused=False,
        gpus=(),
        gpus_free=(),
        slots=2,
        slots_free=2,
        cpus=8,
        memory_mib=1 << 16,
        engines=("process",),
        own_only=(),
        images=(),
        accepts=("*",),
        store_free_mib=1 << 20,
    )

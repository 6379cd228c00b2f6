"""The production membership core of many nodes on a virtual network, under injected faults.

One seed determines the whole run: the fault plan (swarm testing), the strength and the time of each fault. A run has a phase with
faults, in which the invariants must hold, and then a phase without, in which all nodes must agree within a bound. Only what the
core never sees is simulated: delays, losses and repetitions of packets, streams that break off, disks, clocks, and stalled
processes. Signatures are checksums, except for certificates and revocations.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from random import Random

import msgspec

from membership.bootstrap import Address, Bootstrap
from membership.config import SwimConfig
from membership.core import Core, StreamExchange
from membership.effects import (
    Cloned,
    Effect,
    KeepChain,
    KeepRevocations,
    MemberChanged,
    PersistEpoch,
    SendPacket,
    SetTimer,
    StreamOutcome,
    StreamPing,
    WantReconcile,
)
from membership.envelope import EnvelopeError
from membership.identity import Identity, NodeId
from membership.reconcile import FrameError
from membership.snapshot import next_epoch
from membership.trust import TrustError
from membership.trust import make_revocation as sign_revocation
from membership.wire import Dead, Rumours, Suspect
from sim.kernel import EventLog, Kernel, Streams
from sim.protocol.fakes import ADMITTED, ADMITTER, ENDORSED, UNIX, CachedTrust, ChecksumSealer, corrupt, members
from sim.protocol.faults import FaultPlan, draw_faults

PORT = 7373
RECEIVE_BUFFER = 4000  # packets that wait while a process is stalled
UPKEEP_S = 10.0
AUDIT_S = 30.0
REPLAYABLE = 64  # packets of each node that may be replayed
STREAM_TIMEOUT_S = 5.0
TURN_S = 0.002  # in which a node applies a part of a frame
RECEIVED_KEPT = 400  # received packets of each node, which the checker of M11 replays


class Violation(AssertionError):
    """A violated invariant; the text names the invariant, the nodes and the virtual time."""


class Checker:
    """A checker of one invariant; the world calls its methods. A checker raises what `violated` returns."""

    name = ""

    def signed(
        self, world: "MembershipWorld", node: "MembershipNode", kind: str, payload: bytes, sealed: bytes
    ) -> None:
        """Called when `node` has signed a payload."""

    def sent(self, world: "MembershipWorld", node: "MembershipNode", data: bytes) -> None:
        """Called when `node` sends a datagram."""

    def changed(self, world: "MembershipWorld", node: "MembershipNode", change: MemberChanged) -> None:
        """Called when `node` changes its belief about a member."""

    def audit(self, world: "MembershipWorld") -> None:
        """Called every AUDIT_S of virtual time, to look at all nodes together."""

    def end(self, world: "MembershipWorld") -> None:
        """Called after the last event."""

    def violated(self, world: "MembershipWorld", text: str) -> Violation:
        return Violation(f"{self.name} at {world.kernel.now:.3f} s: {text}")


class Disk(msgspec.Struct):
    """The state that survives a crash. Wiping a disk replaces it by a new one."""

    epoch: int = 0
    remembered: list[Address] = []
    revocations: list[bytes] = []


class MembershipNode:
    """One machine: its clocks, disk and address, and the membership core while its process runs."""

    def __init__(self, world: "MembershipWorld", number: int, identity: Identity, chain: bytes) -> None:
        self.world = world
        self.number = number
        self.name = f"node{number:03d}"
        self.identity, self.chain = identity, chain
        self.id = identity.node_id
        self.address: Address = (f"1:{number:03d}::", PORT)  # each node in a network of its own
        self.host_name: Address = (f"{self.name}.campus", PORT)  # resolves to its present address
        faults, clock = world.faults, world.streams.get(self.name, "clock")
        self.offset_s = clock.uniform(0, 1e6)
        self.rate = 1 + clock.uniform(-faults.drift, faults.drift)
        self.wall_offset_s = clock.uniform(-faults.offset_s, faults.offset_s)
        self.clock_is_wrong = bool(faults.wrong_clock_s) and number == len(world.members.identities) - 1
        if self.clock_is_wrong:
            self.wall_offset_s = faults.wrong_clock_s
        self.slow = clock.random() < faults.slow
        self.disk = self.new_disk()
        self.up = self.revoked = False
        self.gone = False  # left for good
        self.powered_off = False  # no process refuses connections
        self.asleep = False  # the whole machine is suspended, not only the process
        self.stalled_until = -1.0
        self.last_stall_end = -1e9
        self.paused_until = -1.0
        self.paused_s = self.wall_behind_s = 0.0  # in all, and not made up for yet
        self.life = 0
        self._late: list[tuple[int, float, Callable[..., None], tuple[object, ...]]] = []
        self.core: Core
        self._waiting: deque[tuple[bytes, Address]] = deque(maxlen=RECEIVE_BUFFER)
        self.taken: deque[tuple[bytes, Address]] = deque(maxlen=RECEIVED_KEPT)
        self._bootstrap: Bootstrap
        self._network = world.streams.get(self.name, "network")

    def new_disk(self) -> Disk:
        return Disk()

    # --- clocks

    @property
    def awake_s(self) -> float:
        """The time that has passed for this machine: all but its pauses."""
        return max(self.world.kernel.now, self.paused_until) - self.paused_s

    def boot(self) -> float:
        return self.offset_s + self.awake_s * self.rate

    def unix(self) -> float:
        now = max(self.world.kernel.now, self.paused_until) - self.wall_behind_s
        return UNIX + self.wall_offset_s + now * self.rate

    def pause(self, for_s: float, wall_right_after_s: float) -> None:
        """Stop the machine with its clocks, as a virtual machine; its wall clock is set right some time after that."""
        self.paused_until = self.world.kernel.now + for_s
        self.paused_s += for_s
        self.wall_behind_s += for_s
        self.world.kernel.at(self.paused_until + wall_right_after_s, self.set_wall_clock)
        self.stall(for_s, asleep=True)

    def set_wall_clock(self) -> None:
        if self.world.kernel.now >= self.paused_until:
            self.wall_behind_s = 0.0

    # --- life

    def start(self, *, crash_at: str = "") -> None:
        """Start the process; `crash_at` makes it crash "before fsync" or "after fsync" of the new epoch."""
        world = self.world
        self.up, self.life = True, self.life + 1
        self.stalled_until, self.asleep = -1.0, False
        early_s = max(0.0, self.paused_until - world.kernel.now)  # its pause ended with its former run
        self.paused_until, self.paused_s = self.paused_until - early_s, self.paused_s - early_s
        self.wall_behind_s = 0.0
        self._late = []
        self._waiting.clear()
        self.taken.clear()
        epoch = next_epoch(self.disk.epoch, int(self.unix() * 1000))
        if crash_at == "before fsync":
            self.crash()
            return
        self.disk.epoch = epoch
        if crash_at == "after fsync":
            self.crash()
            return
        trust = CachedTrust(world.members.genesis)
        try:
            trust.admit_chain(self.chain, self.unix())
        except TrustError:
            assert self.clock_is_wrong, "only a clock that is days off makes a node's own certificate useless"
            self.crash()
            return
        for sealed in self.disk.revocations:
            trust.admit_statement(sealed)
        rng = world.streams.get(self.name, "protocol")
        self.core = Core(
            ChecksumSealer(self.identity, trust.mesh_id, partial(world.signed, self)),
            trust,
            self.chain,
            world.config,
            rng,
            self,
            self.perform,
            host=self.address[0],
            port=self.address[1],
            epoch=world.epoch_to_use(epoch),
            zone_of=lambda node: world.zones.get(node, ""),
        )
        seeds = [node.host_name for node in world.nodes[:2] if node is not self]
        self._bootstrap = Bootstrap(seeds, rng)
        self._bootstrap.remembered = list(self.disk.remembered)
        world.log.add(world.kernel.now, "start", self.name, epoch)
        self.core.start()
        self._search_peers()
        self._do_upkeep(publish=True)

    def machine_after(self, delay_s: float, callback: Callable[..., None], *arguments: object) -> None:
        """Schedule a callback outside of the process: it is delayed only while the whole machine is suspended."""
        self.world.kernel.post(delay_s, self._run_beside, self.life, self.paused_s, callback, arguments)

    def _run_beside(
        self, life: int, paused_s: float, callback: Callable[..., None], arguments: tuple[object, ...]
    ) -> None:
        if not self.up or self.life != life:
            return
        if paused_s != self.paused_s:  # its clock stood still meanwhile
            again = (life, self.paused_s, callback, arguments)
            self.world.kernel.post(self.paused_s - paused_s, self._run_beside, *again)
            return
        if self.asleep and self.stalled:
            self.world.kernel.at(self.stalled_until, self._run_beside, life, paused_s, callback, arguments)
            return
        callback(*arguments)

    def crash(self) -> None:
        """Lose everything but the disk. Packets already sent still arrive."""
        self.up = False
        self.world.log.add(self.world.kernel.now, "crash", self.name)

    def leave(self) -> None:
        self.perform(self.core.swim.leave(self.boot()))
        self.crash()

    def stall(self, for_s: float, asleep: bool) -> None:
        """Stop the process (SIGSTOP), or suspend the machine (`asleep`). Only the boot clock continues."""
        self.stalled_until = self.world.kernel.now + for_s
        self.asleep = asleep
        self.world.kernel.at(self.stalled_until, self.wake, self.life)

    def move(self) -> None:
        """Change the address; packets to the old one are lost."""
        self.address = (f"1:{self.number:03d}:{self.world.kernel.now % 9999:.0f}::", PORT)
        self.world.placed(self)
        if self.up:
            self.perform(self.core.swim.set_address(*self.address, self.boot()))

    @property
    def stalled(self) -> bool:
        return self.world.kernel.now < self.stalled_until

    @property
    def healthy_for_s(self) -> float:
        """The time since the last stall."""
        return 0.0 if self.stalled else self.world.kernel.now - self.last_stall_end

    def wake(self, life: int) -> None:
        """Continue after a stall: late timers first, then waiting packets, as an event loop does."""
        if life != self.life or not self.up or self.stalled:
            return
        self.asleep = False
        self.last_stall_end = self.world.kernel.now
        late, self._late = self._late, []
        for item in late:
            self._run(*item)
        waiting, self._waiting = self._waiting, deque(maxlen=RECEIVE_BUFFER)
        for number, (data, source) in enumerate(waiting):
            self.after(0.00005 * (number + 1), self.receive, data, source)

    def after(self, delay_s: float, callback: Callable[..., None], *arguments: object) -> None:
        """Schedule a callback in this run of the process; a stall delays it, a crash cancels it."""
        self.world.kernel.post(delay_s, self._run, self.life, self.paused_s, callback, arguments)

    def _run(self, life: int, paused_s: float, callback: Callable[..., None], arguments: tuple[object, ...]) -> None:
        if not self.up or self.life != life:
            return
        if paused_s != self.paused_s:  # its clock stood still meanwhile
            self.world.kernel.post(self.paused_s - paused_s, self._run, life, self.paused_s, callback, arguments)
            return
        if self.world.kernel.now < self.stalled_until:
            self._late.append((life, paused_s, callback, arguments))
            return
        callback(*arguments)

    # --- effects of the core

    def perform(self, effects: Iterable[Effect]) -> None:
        world = self.world
        for effect in effects:
            # Fast path: nearly all effects are one of these two.
            if type(effect) is SendPacket:
                data = self.core.seal_packet(effect.to, effect.packet)
                world.sent(self, data)
                world.send_datagram(self, data, (effect.host, effect.port))
                continue
            if type(effect) is SetTimer:
                delay = (effect.at - self.boot()) / self.rate
                self.after(max(0.0, delay), self.core.on_timer, effect.name, effect.token, effect.at)
                continue
            match effect:
                case MemberChanged():
                    world.log.add(world.kernel.now, "sees", self.name, effect.node[:4], effect.state)
                    world.changed(self, effect)
                case StreamPing():
                    self._stream_ping(effect)
                case WantReconcile(host=host, port=port, unless_equal=unless_equal):
                    world.connect(self, (host, port), self.core.push_pull(unless_equal))
                case PersistEpoch(epoch=epoch):
                    self.disk.epoch = epoch
                case KeepRevocations(sealed=sealed):
                    self.disk.revocations = sealed
                case Cloned():
                    world.log.add(world.kernel.now, "cloned", self.name)
                case KeepChain(chain=chain):
                    self.chain = chain

    def receive(self, data: bytes, source: Address) -> None:
        if self.stalled:
            if not self.asleep:
                self._waiting.append((data, source))
            return
        if self.world.watched:
            self.taken.append((data, source))
        self.handle_datagram(data, source)

    def handle_datagram(self, data: bytes, source: Address) -> None:
        self.core.on_datagram(data, source)

    def _stream_ping(self, effect: StreamPing) -> None:
        target = self.world.by_address.get((effect.host, effect.port))
        outcome: StreamOutcome = "silent"
        delay = self.world.config.probe_interval_s
        if target is not None and self.world.link(self, target) and self.world.link(target, self) and not target.asleep:
            delay = self._network.uniform(0.001, 0.02)
            if not target.up and not target.powered_off:
                outcome = "refused"
            elif target.up and not target.stalled and target.id == effect.node:
                outcome = "acked"
            else:
                delay = self.world.config.probe_interval_s
        self.after(delay, self._stream_pinged, effect.node, outcome)

    def _stream_pinged(self, node: bytes, outcome: StreamOutcome) -> None:
        self.perform(self.core.swim.on_stream_ping(node, outcome, self.boot()))

    # --- periodic work of the shell

    def _search_peers(self) -> None:
        self.after(self.core.contact_candidates(self._bootstrap), self._search_peers)

    def _do_upkeep(self, publish: bool = False) -> None:
        """Expire old state, remember peers, and sometimes publish a section."""
        world, rng = self.world, self.world.streams.get(self.name, "news")
        self.core.expire()
        known = dict.fromkeys(self.disk.remembered)
        known |= dict.fromkeys((m.host, m.port) for m in self.core.swim.table.present() if m.node != self.id)
        self.disk.remembered = list(known)[-256:]
        publishes = world.faults.news_every_s > 0 and rng.random() < UPKEEP_S / world.faults.news_every_s
        if publish or (publishes and world.kernel.now < world.faults.until_s):
            section = rng.choice(["facts", "load", "jobs/a", "jobs/b"])
            size = rng.choice([60, 200, 2000])
            self.core.publish(
                section, rng.randbytes(size), rng.choice([60.0, 600.0, 7200.0]), urgent=rng.random() < 0.2
            )
        self.after(UPKEEP_S, self._do_upkeep)


class Exchange:
    """One TCP exchange between two cores, frame by frame. It breaks off when a side dies, the link fails or time runs out."""

    def __init__(
        self, world: "MembershipWorld", source: MembershipNode, target: MembershipNode, exchange: StreamExchange
    ) -> None:
        self.world = world
        self.ends = (source, target)
        self.lives = (source.life, target.life)
        self.generators: list[StreamExchange | None] = [exchange, None]
        self.begun = world.kernel.now
        self._resume(0, exchange, None)

    def _resume(self, side: int, exchange: StreamExchange, heard: tuple[NodeId, object] | None) -> None:
        """Resume one side with a received frame, and send its next frame to the other side."""
        me = self.ends[side]
        try:
            frame = next(exchange) if heard is None else exchange.send(heard)  # type: ignore[arg-type]
        except StopIteration as end:
            self.generators[side] = None
            if end.value is not None:
                self._carry(side, me.core.seal_frame(end.value))
            return
        except (FrameError, TrustError, EnvelopeError):
            self._break()
            return
        self.generators[side] = exchange
        if frame is None:
            self.world.kernel.post(TURN_S, self._arrive, side, None, me)
        else:
            self._carry(side, me.core.seal_frame(frame))

    def _carry(self, side: int, data: bytes) -> None:
        me, other = self.ends[side], self.ends[1 - side]
        self.world.bytes_carried += len(data) + 60
        delay = me._network.uniform(0.0005, 0.01) + len(data) / 1e8
        self.world.kernel.post(delay, self._arrive, 1 - side, data, other)

    def _arrive(self, side: int, data: bytes | None, node: MembershipNode) -> None:
        """Let one side go on with what the other has sent, or with what it was about (None)."""
        world = self.world
        alive = all(end.up and end.life == life for end, life in zip(self.ends, self.lives, strict=True))
        linked = world.link(*self.ends) and world.link(*reversed(self.ends))
        if not alive or not linked or node.asleep or world.kernel.now - self.begun > STREAM_TIMEOUT_S:
            self._break()
            return
        if node.stalled:
            world.kernel.at(node.stalled_until, self._arrive, side, data, node)
            return
        exchange = self.generators[side]
        if data is None:
            if exchange is not None:
                self._resume(side, exchange, None)
            return
        try:
            sender, frame = node.core.open_frame(data)
            if exchange is None and side == 1:
                self._resume(1, node.core.answer(sender, frame), None)
            elif exchange is not None:
                self._resume(side, exchange, (sender, frame))
        except (FrameError, TrustError, EnvelopeError):
            self._break()

    def _break(self) -> None:
        self.world.broken_exchanges += 1
        for exchange in self.generators:
            if exchange is not None:
                exchange.close()
        self.generators = [None, None]


class MembershipWorld:
    """A mesh of nodes on a virtual network, with the faults of one plan. Without checkers it runs faster."""

    node_type: type[MembershipNode] = MembershipNode
    least_up = 3  # nodes, for an incident to happen
    has_admitters = True  # nodes that are no founders have admitted and endorsed others

    def __init__(
        self,
        seed: int,
        *,
        nodes: int = 20,
        faults: FaultPlan | None = None,
        minutes: float = 30.0,
        config: SwimConfig | None = None,
        checkers: Sequence[Checker] = (),
    ) -> None:
        self.seed = seed
        self.minutes = minutes
        self.faults = faults or draw_faults(seed, minutes)
        self._network_faults = any(
            (self.faults.loss, self.faults.duplicate, self.faults.reorder, self.faults.replay, self.faults.garbage)
        )
        self._network_faults = self._network_faults or bool(self.faults.slow)
        self.config = config or SwimConfig.lan()
        self.kernel = Kernel()
        self.log = EventLog()
        self.streams = Streams(seed)
        self.members = members(nodes, self.has_admitters)
        self.checkers = list(checkers)
        self.watched = bool(self.checkers)
        self._on_sent = [checker for checker in self.checkers if type(checker).sent is not Checker.sent]
        self.nodes = [
            self.node_type(self, number, identity, chain)
            for number, (identity, chain) in enumerate(zip(self.members.identities, self.members.chains, strict=True))
        ]
        self.by_id = {node.id: node for node in self.nodes}
        self.bound_by: dict[bytes, set[bytes]] = {}  # nodes -> those, other than the founder, that they came in through
        if self.has_admitters and nodes > ENDORSED:
            admitter, admitted, endorsed = (self.nodes[number].id for number in (ADMITTER, ADMITTED, ENDORSED))
            self.bound_by = {admitted: {admitter}, endorsed: {admitter, admitted}}
        self.zones = {node.id: f"zone{node.number % 3}" for node in self.nodes}
        self.by_address: dict[Address, MembershipNode] = {
            address: node for node in self.nodes for address in (node.address, node.host_name)
        }
        self.cuts: list[set[tuple[bytes, bytes]]] = []  # sets of directed links that are down
        self.healed = False
        self.bytes_carried = 0
        self.exchanges = self.broken_exchanges = self.incidents = 0
        self._old: deque[tuple[MembershipNode, bytes, Address]] = deque(maxlen=REPLAYABLE * nodes)

    # --- running

    def run(self) -> str:
        """Run with faults, then without; return the digest of all events. Violation if an invariant does not hold."""
        try:
            self.begin()
            self.kernel.run(self.faults.until_s)
            self.heal()
            took = self.until(self.converged, self.bound_s, "M4")
            self.log.add(self.kernel.now, "converged", f"{took:.3f}")
            self._last_crash()
            self.kernel.run(max(self.kernel.now, self.minutes * 60))
            for checker in self.checkers:
                checker.end(self)
        except (Violation, AssertionError) as error:
            raise Violation(f"{error}\n  SEED={self.seed}: {self.replay}") from error
        return self.log.digest

    @property
    def replay(self) -> str:
        return (
            f"replay: python -m sim membership --seed {self.seed} --nodes {len(self.nodes)} --minutes {self.minutes:g}"
        )

    @property
    def bound_s(self) -> float:
        """The bound of M4: reconciliation with dead members, discovery, and a few pings that compare roots.

        The value is twice our own measurement.
        """
        return 90.0

    def begin(self, spread_s: float = 5.0) -> None:
        rng = self.streams.get("world", "start")
        for node in self.nodes:
            self.kernel.at(rng.uniform(0.0, spread_s) + self.joins_after_s(node), node.start)
        if self.faults.incidents:
            self.kernel.after(30.0, self._inject_incident)
        if self.watched:
            self.kernel.after(AUDIT_S, self._audit)

    def joins_after_s(self, node: MembershipNode) -> float:
        """Return how much later than the first nodes this one starts for the first time."""
        return 0.0

    def heal(self) -> None:
        """End all faults and restart all nodes that did not leave for good."""
        self.log.add(self.kernel.now, "heal")
        self.healed = True  # scheduled restarts and crashes no longer happen
        self.cuts.clear()
        self._network_faults = False
        self.faults = msgspec.structs.replace(
            self.faults, loss=0.0, duplicate=0.0, reorder=0.0, replay=0.0, garbage=0.0, incidents=()
        )
        for node in self.nodes:
            node.slow = node.powered_off = False
            if node.stalled:
                node.stalled_until = self.kernel.now
                node.wake(node.life)
            if not node.up and not node.gone:
                node.start()

    def healthy_nodes(self) -> list[MembershipNode]:
        return [node for node in self.nodes if node.up and not node.revoked and not node.clock_is_wrong]

    def converged(self) -> bool:
        """Tell whether all healthy nodes see exactly each other, alive, and hold equal state."""
        nodes = self.healthy_nodes()
        wanted = {node.id for node in nodes}
        aside = {node.id for node in self.nodes if node.clock_is_wrong}
        for node in nodes:
            present = [member for member in node.core.swim.table.present() if member.node not in aside]
            if {member.node for member in present} != wanted or any(member.state != "alive" for member in present):
                return False
        # Clocks differ, so a section that expires soon has expired on some nodes only.
        surely = max(node.unix() for node in nodes) + 2 * self.faults.offset_s + 60.0
        states = {
            frozenset(entry for entry in node.core.records.state(surely) if entry[0] not in aside) for node in nodes
        }
        return len(states) == 1

    def until(self, true: Callable[[], bool], within_s: float, name: str) -> float:
        """Run until the condition holds and return the virtual seconds; Violation after `within_s`."""
        begun = self.kernel.now
        while not true():
            if self.kernel.now - begun > within_s:
                raise Violation(f"{name}: not within {within_s:g} s of virtual time, at {self.kernel.now:.1f} s")
            self.kernel.run(self.kernel.now + 0.5)
        return self.kernel.now - begun

    def _last_crash(self) -> None:
        """Kill a node and check M5: all others learn of a crash within 15 s, of a power cut within 45 s."""
        rng = self.streams.get("world", "last crash")
        victim = rng.choice(self.healthy_nodes())
        victim.powered_off = rng.random() < 0.5
        victim.crash()
        self.until(
            lambda: all(
                (m := node.core.swim.table.get(victim.id)) is None or not m.present for node in self.healthy_nodes()
            ),
            45.0 if victim.powered_off else 15.0,
            "M5",
        )
        for node in self.healthy_nodes():
            for other in self.healthy_nodes():
                member = node.core.swim.table.get(other.id)
                if member is None or not member.present:
                    raise Violation(f"M5: {node.name} declared {other.name} dead, when only {victim.name} was")

    # --- the network

    def link(self, source: MembershipNode, target: MembershipNode) -> bool:
        return not any((source.id, target.id) in cut for cut in self.cuts)

    def placed(self, node: MembershipNode) -> None:
        self.by_address = {address: other for address, other in self.by_address.items() if other is not node}
        self.by_address[node.address] = self.by_address[node.host_name] = node

    def send_datagram(self, source: MembershipNode, data: bytes, to: Address) -> None:
        """Send a datagram, which the faults may delay, lose, duplicate, reorder, corrupt or replay much later."""
        faults, rng = self.faults, source._network
        self.bytes_carried += len(data) + 28
        if not self._network_faults:
            low, high = faults.delay_s
            self._deliver(source, data, to, low + (high - low) * rng.random())
            return
        if faults.replay and rng.random() < faults.replay:
            self._old.append((source, data, to))
        if faults.replay and self._old and rng.random() < faults.replay:
            origin, old, where = rng.choice(self._old)
            self._deliver(origin, old, where, rng.uniform(*faults.delay_s))
        if faults.garbage and rng.random() < faults.garbage:
            self._deliver(source, corrupt(data, rng), to, rng.uniform(*faults.delay_s))
        if faults.loss and rng.random() < faults.loss:
            return
        delay = rng.uniform(*faults.delay_s)
        if source.slow:
            delay += rng.uniform(0.0, 1.0)
        if faults.reorder and rng.random() < faults.reorder:
            delay += rng.uniform(0.0, 0.3)
        self._deliver(source, data, to, delay)
        if faults.duplicate and rng.random() < faults.duplicate:
            self._deliver(source, data, to, delay + rng.uniform(0.0, 0.5))

    def _deliver(self, source: MembershipNode, data: bytes, to: Address, delay_s: float) -> None:
        if self.cuts and (target := self.by_address.get(to)) is not None and not self.link(source, target):
            return
        self.kernel.post(delay_s, self._arrive, data, source.address, to)

    def _arrive(self, data: bytes, source: Address, to: Address) -> None:
        target = self.by_address.get(to)
        if target is not None and target.up:
            target.receive(data, source)

    def connect(self, source: MembershipNode, to: Address, exchange: StreamExchange) -> None:
        """Start a TCP exchange between two cores."""
        target = self.by_address.get(to)
        self.exchanges += 1
        if target is None or target is source or not target.up:
            return
        Exchange(self, source, target, exchange)

    # --- incidents

    def _inject_incident(self) -> None:
        rng = self.streams.get("world", "fate")
        faults = self.faults
        if not faults.incidents or self.kernel.now >= faults.until_s:
            return
        self.kernel.after(rng.expovariate(1 / faults.incident_every_s), self._inject_incident)
        up = [node for node in self.nodes if node.up and not node.stalled]
        if len(up) < self.least_up:
            return
        kind = rng.choice(faults.incidents)
        self.incidents += 1
        self.log.add(self.kernel.now, "strike", kind)
        self._inject(kind, up, rng)

    def _inject(self, kind: str, up: list[MembershipNode], rng: Random) -> None:
        kernel, victim = self.kernel, rng.choice(up)
        down_s = rng.choice([rng.uniform(0.5, 5.0), rng.uniform(5.0, 120.0)])
        match kind:
            case "crash" | "power cut" | "wipe" | "crash around fsync" | "leave":
                victim.powered_off = kind == "power cut"
                if kind == "leave":
                    victim.leave()
                else:
                    victim.crash()
                if kind == "wipe":
                    victim.disk = victim.new_disk()
                crash_at = rng.choice(["before fsync", "after fsync"]) if kind == "crash around fsync" else ""
                kernel.after(down_s, self._restart, victim, crash_at)
            case "stall" | "suspend":
                asleep = kind == "suspend"
                long_s = rng.uniform(1.0, 12.0) if self.faults.gentle or not asleep else rng.uniform(1.0, 200.0)
                still = [node for node in self.nodes if node.stalled]
                if not self.faults.gentle or len(still) + 1 < len(self.nodes) / 4:
                    victim.stall(long_s, asleep)
            case "partition":
                side = {node.id for node in rng.sample(self.nodes, rng.randint(1, len(self.nodes) // 2))}
                self._cut(
                    {(a.id, b.id) for a in self.nodes for b in self.nodes if (a.id in side) != (b.id in side)}, rng
                )
            case "partial partition":
                one, other = rng.sample(self.nodes, 2)
                self._cut({(one.id, other.id), (other.id, one.id)}, rng)
            case "one way":
                one, other = rng.sample(self.nodes, 2)
                whole = rng.random() < 0.5
                self._cut({(one.id, b.id) for b in self.nodes} if whole else {(one.id, other.id)}, rng)
            case "address":
                victim.move()
            case "mass restart":
                for node in up:
                    kernel.after(rng.uniform(0.0, 3.0), self._crash_if_up, node)
                    kernel.after(rng.uniform(4.0, 30.0), self._restart, node, "")
            case "false accusation":
                self._accuse_falsely(victim, rng.choice(up), rng)
            case "revoke":
                root = self.nodes[0]
                others = [node for node in up if node is not root]
                if root.up and not root.stalled and len(root.core.trust.revoked) < 2:
                    self.revoke(rng.choice(others))
            case "renew":
                # The founder renews any member, and the admitter those that came in through it.
                issuer = self.nodes[rng.choice([0, ADMITTER]) if victim.id in self.bound_by else 0]
                if victim is not issuer:
                    self.connect(victim, issuer.address, victim.core.ask_renewal())

    def _accuse_falsely(self, liar: MembershipNode, subject: MembershipNode, rng: Random) -> None:
        """Have a member tell three others that another one is suspect or dead, perhaps in a life that it never announced."""
        held = liar.core.swim.table.get(subject.id)
        if held is None or liar is subject:
            return
        kind, later = rng.choice([Suspect, Dead]), rng.choice([(0, 0), (0, 0), (0, 1), (3_600_000, 0)])
        lie = kind(subject.id, held.epoch + later[0], held.incarnation + later[1])
        rumour = Rumours(liar.core.nonce(), liar.core.swim.root(), (("member", liar.core._seal_evidence(lie)),))
        told = [node for node in rng.sample(self.nodes, min(3, len(self.nodes))) if node is not liar]
        liar.perform([SendPacket(node.id, *node.address, rumour) for node in told])

    def revoke(self, outcast: MembershipNode) -> bytes:
        """Have the founder revoke a node, and return the statement. Its clock is wrong for the first ones of some runs."""
        root = self.nodes[0]
        for node in self.nodes:
            node.revoked |= node is outcast or outcast.id in self.bound_by.get(node.id, ())
        wrong_s = 0.0 if root.core.trust.revoked else self.faults.wrong_clock_s
        sealed = sign_revocation(root.identity, root.core.trust, outcast.id, "sim", root.unix() + wrong_s)
        root.core.publish_statement(sealed)
        return sealed

    def _cut(self, links: set[tuple[bytes, bytes]], rng: Random) -> None:
        self.cuts.append(links)
        self.kernel.after(rng.choice([rng.uniform(1, 30), rng.uniform(30, 300)]), self._repair, links)

    def _repair(self, links: set[tuple[bytes, bytes]]) -> None:
        self.cuts = [cut for cut in self.cuts if cut is not links]

    def _crash_if_up(self, node: MembershipNode) -> None:
        if node.up and not self.healed:
            node.crash()

    def _restart(self, node: MembershipNode, crash_at: str) -> None:
        if node.up or node.gone or self.healed:
            return
        node.powered_off = False
        node.start(crash_at=crash_at)
        if crash_at:
            self.kernel.after(1.0, self._restart, node, "")

    def epoch_to_use(self, epoch: int) -> int:
        """Return the epoch of a node's new run; a negative control replaces this method."""
        return epoch

    # --- calls of the checkers

    def signed(self, node: MembershipNode, kind: str, payload: bytes, sealed: bytes) -> None:
        for checker in self.checkers:
            checker.signed(self, node, kind, payload, sealed)

    def sent(self, node: MembershipNode, data: bytes) -> None:
        for checker in self._on_sent:
            checker.sent(self, node, data)

    def changed(self, node: MembershipNode, change: MemberChanged) -> None:
        for checker in self.checkers:
            checker.changed(self, node, change)

    def _audit(self) -> None:
        for checker in self.checkers:
            checker.audit(self)
        self.kernel.after(AUDIT_S, self._audit)

"""Tier A: the production membership core of N nodes over a virtual network, under every fault we know of.

One seed decides everything: which faults there are (swarm testing: each run has its own mix), how strong, when. A run has a
phase of faults, in which nothing may go wrong for good, and then a healed one, in which everything must come right within a
bound. What is simulated is only what the core never sees: delays, losses and repetitions of packets, streams that break,
disks, clocks, processes that stand still. Signatures are simulated too (a checksum), but for certificates and revocations.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from random import Random

import msgspec

from membership.config import SwimConfig
from membership.core import Conversation, Core
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
from membership.identity import Identity
from membership.search import Address, Search
from membership.snapshot import next_epoch
from membership.trust import TrustError
from membership.trust import make_revocation as sign_revocation
from sim.checkers import Checker, Violation, all_checkers
from sim.exchange import Exchange
from sim.kernel import EventLog, Kernel
from sim.mix import Mix, draw_mix
from sim.paper import UNIX, CachedTrust, PaperSeals, people, spoil
from sim.streams import Streams

PORT = 7373
RECEIVE_BUFFER = 4000  # packets that wait while a process stands still
UPKEEP_S = 10.0
AUDIT_S = 30.0
REPLAYABLE = 64  # packets of each node that may be sent again
LIFETIMES_KEPT = 400  # of packets that a node has taken in, for M11


class Disk(msgspec.Struct):
    """What outlives a crash; a wiped one is a new one."""

    epoch: int = 0
    remembered: list[Address] = []
    revocations: list[bytes] = []


class GossipNode:
    """One machine: its clock, its disk, its address, and the core while its process runs."""

    def __init__(self, world: "GossipWorld", number: int, identity: Identity, chain: bytes) -> None:
        self.world = world
        self.number = number
        self.name = f"node{number:03d}"
        self.identity, self.chain = identity, chain
        self.id = identity.node_id
        self.address: Address = (self.name, PORT)
        mix, clock = world.mix, world.streams.get(self.name, "clock")
        self.offset_s = clock.uniform(0, 1e6)
        self.rate = 1 + clock.uniform(-mix.drift, mix.drift)
        self.wall_offset_s = clock.uniform(-mix.offset_s, mix.offset_s)
        self.out_of_time = bool(mix.wrong_clock_s) and number == len(world.people.identities) - 1
        if self.out_of_time:
            self.wall_offset_s = mix.wrong_clock_s
        self.slow = clock.random() < mix.slow
        self.disk = self.new_disk()
        self.up = self.revoked = False
        self.gone = False  # for good
        self.dark = False  # without power: it does not even refuse
        self.asleep = False  # of a machine that stands still: its network sleeps too
        self.still_until = -1.0
        self.still_before = -1e9  # when it last stood still
        self.life = 0
        self._late: list[tuple[int, Callable[..., None], tuple[object, ...]]] = []
        self.core: Core
        self._waiting: deque[tuple[bytes, Address]] = deque(maxlen=RECEIVE_BUFFER)
        self.taken: deque[tuple[bytes, Address]] = deque(maxlen=LIFETIMES_KEPT)
        self._search: Search
        self._network = world.streams.get(self.name, "network")

    def new_disk(self) -> Disk:
        return Disk()

    # --- clocks

    def boot(self) -> float:
        return self.offset_s + self.world.kernel.now * self.rate

    def unix(self) -> float:
        return UNIX + self.wall_offset_s + self.world.kernel.now * self.rate

    # --- life

    def start(self, *, crash_at: str = "") -> None:
        """`crash_at`: "before fsync" or "after fsync" of the new epoch, before anything was said."""
        world = self.world
        self.up, self.life = True, self.life + 1
        self.still_until, self.asleep = -1.0, False
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
        trust = CachedTrust(world.people.genesis)
        try:
            trust.admit_chain(self.chain, self.unix())
        except TrustError:
            assert self.out_of_time, "only a clock that is days off makes a node's own certificate useless"
            self.crash()
            return
        for sealed in self.disk.revocations:
            trust.admit_revocation(sealed, self.unix())
        rng = world.streams.get(self.name, "protocol")
        self.core = Core(
            PaperSeals(self.identity, trust.mesh_id, partial(world.wrote, self)),
            trust,
            self.chain,
            world.config,
            rng,
            self,
            self.perform,
            host=self.address[0],
            port=self.address[1],
            epoch=world.first_epoch(epoch),
            zone_of=lambda node: world.zones.get(node, ""),
        )
        seeds = [node.address for node in world.nodes[:2] if node is not self]
        self._search = Search(seeds, rng)
        self._search.remembered = list(self.disk.remembered)
        world.log.add(world.kernel.now, "start", self.name, epoch)
        self.core.start()
        self._look()
        self._tend(publish=True)

    def machine_after(self, delay_s: float, callback: Callable[..., None], *arguments: object) -> None:
        """As `after`, for what runs beside the process: it stands still only while the whole machine sleeps."""
        self.world.kernel.post(delay_s, self._run_beside, self.life, callback, arguments)

    def _run_beside(self, life: int, callback: Callable[..., None], arguments: tuple[object, ...]) -> None:
        if not self.up or self.life != life:
            return
        if self.asleep and self.still:
            self.world.kernel.at(self.still_until, self._run_beside, life, callback, arguments)
            return
        callback(*arguments)

    def crash(self) -> None:
        """Everything but the disk is gone; what was on its way from here still travels."""
        self.up = False
        self.world.log.add(self.world.kernel.now, "crash", self.name)

    def leave(self) -> None:
        self.perform(self.core.swim.leave(self.boot()))
        self.crash()

    def stand_still(self, for_s: float, asleep: bool) -> None:
        """SIGSTOP, or a closed lid (`asleep`): the boot clock goes on, nothing else does."""
        self.still_until = self.world.kernel.now + for_s
        self.asleep = asleep
        self.world.kernel.at(self.still_until, self.wake, self.life)

    def move(self) -> None:
        """Another address: what is sent to the old one is lost."""
        host, _ = self.address
        self.address = (f"{host.partition('@')[0]}@{self.world.kernel.now:.0f}", PORT)
        self.world.placed(self)
        if self.up:
            self.perform(self.core.swim.set_address(*self.address, self.boot()))

    @property
    def still(self) -> bool:
        return self.world.kernel.now < self.still_until

    @property
    def healthy_for_s(self) -> float:
        """How long this node has not stood still."""
        return 0.0 if self.still else self.world.kernel.now - self.still_before

    def wake(self, life: int) -> None:
        """Late timers first, then the mail, as an event loop has it."""
        if life != self.life or not self.up or self.still:
            return
        self.asleep = False
        self.still_before = self.world.kernel.now
        late, self._late = self._late, []
        for item in late:
            self._run(*item)
        waiting, self._waiting = self._waiting, deque(maxlen=RECEIVE_BUFFER)
        for number, (data, source) in enumerate(waiting):
            self.after(0.00005 * (number + 1), self.receive, data, source)

    def after(self, delay_s: float, callback: Callable[..., None], *arguments: object) -> None:
        """Run in this life of the node, once it does not stand still."""
        self.world.kernel.post(delay_s, self._run, self.life, callback, arguments)

    def _run(self, life: int, callback: Callable[..., None], arguments: tuple[object, ...]) -> None:
        if not self.up or self.life != life:
            return
        if self.world.kernel.now < self.still_until:
            self._late.append((life, callback, arguments))
            return
        callback(*arguments)

    # --- what the core wants

    def perform(self, effects: Iterable[Effect]) -> None:
        world = self.world
        for effect in effects:
            # Nearly all effects are these two.
            if type(effect) is SendPacket:
                data = self.core.seal_packet(effect.to, effect.packet)
                world.sent(self, data)
                world.carry(self, data, (effect.host, effect.port))
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
                    world.connect(self, (host, port), self.core.converse(unless_equal))
                case PersistEpoch(epoch=epoch):
                    self.disk.epoch = epoch
                case KeepRevocations(sealed=sealed):
                    self.disk.revocations = sealed
                case Cloned():
                    world.log.add(world.kernel.now, "cloned", self.name)
                case KeepChain(chain=chain):
                    self.chain = chain

    def receive(self, data: bytes, source: Address) -> None:
        if self.still:
            if not self.asleep:
                self._waiting.append((data, source))
            return
        if self.world.watched:
            self.taken.append((data, source))
        self.take(data, source)

    def take(self, data: bytes, source: Address) -> None:
        self.core.on_datagram(data, source)

    def _stream_ping(self, effect: StreamPing) -> None:
        target = self.world.at.get((effect.host, effect.port))
        outcome: StreamOutcome = "silent"
        delay = self.world.config.probe_interval_s
        if target is not None and self.world.link(self, target) and self.world.link(target, self) and not target.asleep:
            delay = self._network.uniform(0.001, 0.02)
            if not target.up and not target.dark:
                outcome = "refused"
            elif target.up and not target.still and target.id == effect.node:
                outcome = "acked"
            else:
                delay = self.world.config.probe_interval_s
        self.after(delay, self._stream_pinged, effect.node, outcome)

    def _stream_pinged(self, node: bytes, outcome: StreamOutcome) -> None:
        self.perform(self.core.swim.on_stream_ping(node, outcome, self.boot()))

    # --- what the shell does beside

    def _look(self) -> None:
        self.after(self.core.look_for_others(self._search), self._look)

    def _tend(self, publish: bool = False) -> None:
        """Upkeep, and now and then something to say."""
        world, rng = self.world, self.world.streams.get(self.name, "news")
        self.core.forget_the_old()
        known = dict.fromkeys(self.disk.remembered)
        known |= dict.fromkeys((m.host, m.port) for m in self.core.swim.table.present() if m.node != self.id)
        self.disk.remembered = list(known)[-256:]
        talks = world.mix.news_every_s > 0 and rng.random() < UPKEEP_S / world.mix.news_every_s
        if publish or (talks and world.kernel.now < world.mix.until_s):
            section = rng.choice(["facts", "load", "jobs/a", "jobs/b"])
            size = rng.choice([60, 200, 2000])
            self.core.publish(
                section, rng.randbytes(size), rng.choice([60.0, 600.0, 7200.0]), urgent=rng.random() < 0.2
            )
        self.after(UPKEEP_S, self._tend)


class GossipWorld:
    """`watched`: with all checkers; without, as fast as can be."""

    node_type: type[GossipNode] = GossipNode

    def __init__(
        self,
        seed: int,
        *,
        nodes: int = 20,
        mix: Mix | None = None,
        minutes: float = 30.0,
        config: SwimConfig | None = None,
        checkers: Sequence[Checker] | None = None,
    ) -> None:
        self.seed = seed
        self.minutes = minutes
        self.mix = mix or draw_mix(seed, minutes)
        self._unkind = any((self.mix.loss, self.mix.duplicate, self.mix.reorder, self.mix.replay, self.mix.garbage))
        self._unkind = self._unkind or bool(self.mix.slow)
        self.config = config or SwimConfig.lan()
        self.kernel = Kernel()
        self.log = EventLog()
        self.streams = Streams(seed)
        self.people = people(nodes)
        self.checkers = list(all_checkers() if checkers is None else checkers)
        self.watched = bool(self.checkers)
        self._on_sent = [checker for checker in self.checkers if type(checker).sent is not Checker.sent]
        self.nodes = [
            self.node_type(self, number, identity, chain)
            for number, (identity, chain) in enumerate(zip(self.people.identities, self.people.chains, strict=True))
        ]
        self.by_id = {node.id: node for node in self.nodes}
        self.zones = {node.id: f"zone{node.number % 3}" for node in self.nodes}
        self.at: dict[Address, GossipNode] = {node.address: node for node in self.nodes}
        self.cuts: list[set[tuple[bytes, bytes]]] = []  # directed links that carry nothing
        self.healed = False
        self.bytes_carried = 0
        self.conversations = self.broken_conversations = self.strikes = 0
        self._old: deque[tuple[GossipNode, bytes, Address]] = deque(maxlen=REPLAYABLE * nodes)

    # --- playing

    def run(self) -> str:
        """All of it; the digest of everything that happened. Violation if an invariant does not hold."""
        try:
            self.begin()
            self.kernel.run(self.mix.until_s)
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
        return f"replay: python -m sim gossip --seed {self.seed} --nodes {len(self.nodes)} --minutes {self.minutes:g}"

    @property
    def bound_s(self) -> float:
        """M4's B(n): a knock at the dead, a search, a few pings that compare roots; our own measurement, doubled."""
        return 90.0

    def begin(self, spread_s: float = 5.0) -> None:
        rng = self.streams.get("world", "start")
        for node in self.nodes:
            self.kernel.at(rng.uniform(0.0, spread_s), node.start)
        if self.mix.strikes:
            self.kernel.after(30.0, self._strike)
        if self.watched:
            self.kernel.after(AUDIT_S, self._audit)

    def heal(self) -> None:
        """No more faults, and everybody is there."""
        self.log.add(self.kernel.now, "heal")
        self.healed = True  # what fate had still in store does not happen
        self.cuts.clear()
        self._unkind = False
        self.mix = msgspec.structs.replace(
            self.mix, loss=0.0, duplicate=0.0, reorder=0.0, replay=0.0, garbage=0.0, strikes=()
        )
        for node in self.nodes:
            node.slow = node.dark = False
            if node.still:
                node.still_until = self.kernel.now
                node.wake(node.life)
            if not node.up and not node.gone:
                node.start()

    def correct(self) -> list[GossipNode]:
        return [node for node in self.nodes if node.up and not node.revoked and not node.out_of_time]

    def converged(self) -> bool:
        """Whether all correct nodes see just each other, alive, and know the same."""
        nodes = self.correct()
        wanted = {node.id for node in nodes}
        aside = {node.id for node in self.nodes if node.out_of_time}
        for node in nodes:
            present = [member for member in node.core.swim.table.present() if member.node not in aside]
            if {member.node for member in present} != wanted or any(member.state != "alive" for member in present):
                return False
        # What ends within the difference between the clocks has ended for some and not yet for others.
        surely = max(node.unix() for node in nodes) + 2 * self.mix.offset_s + 60.0
        states = {
            frozenset(entry for entry in node.core.records.state(surely) if entry[0] not in aside) for node in nodes
        }
        return len(states) == 1

    def until(self, true: Callable[[], bool], within_s: float, name: str) -> float:
        """Virtual seconds until it holds."""
        begun = self.kernel.now
        while not true():
            if self.kernel.now - begun > within_s:
                raise Violation(f"{name}: not within {within_s:g} s of virtual time, at {self.kernel.now:.1f} s")
            self.kernel.run(self.kernel.now + 0.5)
        return self.kernel.now - begun

    def _last_crash(self) -> None:
        """M5: one dies, by a crash or without power, and all know within D(n)."""
        rng = self.streams.get("world", "last crash")
        victim = rng.choice(self.correct())
        victim.dark = rng.random() < 0.5
        victim.crash()
        self.until(
            lambda: all((m := node.core.swim.table.get(victim.id)) is None or not m.present for node in self.correct()),
            45.0 if victim.dark else 15.0,
            "M5",
        )
        for node in self.correct():
            for other in self.correct():
                member = node.core.swim.table.get(other.id)
                if member is None or not member.present:
                    raise Violation(f"M5: {node.name} gave up {other.name} with {victim.name}")

    # --- the network

    def link(self, source: GossipNode, target: GossipNode) -> bool:
        return not any((source.id, target.id) in cut for cut in self.cuts)

    def placed(self, node: GossipNode) -> None:
        self.at = {address: other for address, other in self.at.items() if other is not node}
        self.at[node.address] = node

    def carry(self, source: GossipNode, data: bytes, to: Address) -> None:
        """A datagram: late, lost, twice, out of order, and perhaps again much later."""
        mix, rng = self.mix, source._network
        self.bytes_carried += len(data) + 28
        if not self._unkind:
            low, high = mix.delay_s
            self._deliver(source, data, to, low + (high - low) * rng.random())
            return
        if mix.replay and rng.random() < mix.replay:
            self._old.append((source, data, to))
        if mix.replay and self._old and rng.random() < mix.replay:
            origin, old, where = rng.choice(self._old)
            self._deliver(origin, old, where, rng.uniform(*mix.delay_s))
        if mix.garbage and rng.random() < mix.garbage:
            self._deliver(source, spoil(data, rng), to, rng.uniform(*mix.delay_s))
        if mix.loss and rng.random() < mix.loss:
            return
        delay = rng.uniform(*mix.delay_s)
        if source.slow:
            delay += rng.uniform(0.0, 1.0)
        if mix.reorder and rng.random() < mix.reorder:
            delay += rng.uniform(0.0, 0.3)
        self._deliver(source, data, to, delay)
        if mix.duplicate and rng.random() < mix.duplicate:
            self._deliver(source, data, to, delay + rng.uniform(0.0, 0.5))

    def _deliver(self, source: GossipNode, data: bytes, to: Address, delay_s: float) -> None:
        if self.cuts and (target := self.at.get(to)) is not None and not self.link(source, target):
            return
        self.kernel.post(delay_s, self._arrive, data, source.address, to)

    def _arrive(self, data: bytes, source: Address, to: Address) -> None:
        target = self.at.get(to)
        if target is not None and target.up:
            target.receive(data, source)

    def connect(self, source: GossipNode, to: Address, conversation: Conversation) -> None:
        """A TCP exchange between two cores, a frame at a time; it breaks off when either side dies or the link does."""
        target = self.at.get(to)
        self.conversations += 1
        if target is None or target is source or not target.up:
            return
        Exchange(self, source, target, conversation)

    # --- fate

    def _strike(self) -> None:
        rng = self.streams.get("world", "fate")
        mix = self.mix
        if not mix.strikes or self.kernel.now >= mix.until_s:
            return
        self.kernel.after(rng.expovariate(1 / mix.strike_every_s), self._strike)
        up = [node for node in self.nodes if node.up and not node.still]
        if len(up) < 3:
            return
        kind = rng.choice(mix.strikes)
        self.strikes += 1
        self.log.add(self.kernel.now, "strike", kind)
        self._fate(kind, up, rng)

    def _fate(self, kind: str, up: list[GossipNode], rng: Random) -> None:
        kernel, victim = self.kernel, rng.choice(up)
        down_s = rng.choice([rng.uniform(0.5, 5.0), rng.uniform(5.0, 120.0)])
        match kind:
            case "crash" | "power cut" | "wipe" | "crash around fsync" | "leave":
                victim.dark = kind == "power cut"
                if kind == "leave":
                    victim.leave()
                else:
                    victim.crash()
                if kind == "wipe":
                    victim.disk = victim.new_disk()
                crash_at = rng.choice(["before fsync", "after fsync"]) if kind == "crash around fsync" else ""
                kernel.after(down_s, self._come_back, victim, crash_at)
            case "stall" | "suspend":
                asleep = kind == "suspend"
                long_s = rng.uniform(1.0, 12.0) if self.mix.gentle or not asleep else rng.uniform(1.0, 200.0)
                still = [node for node in self.nodes if node.still]
                if not self.mix.gentle or len(still) + 1 < len(self.nodes) / 4:
                    victim.stand_still(long_s, asleep)
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
                    kernel.after(rng.uniform(4.0, 30.0), self._come_back, node, "")
            case "revoke":
                root = self.nodes[0]
                others = [node for node in up if node is not root]
                if root.up and not root.still and sum(node.revoked for node in self.nodes) < 2:
                    outcast = rng.choice(others)
                    outcast.revoked = True
                    sealed = sign_revocation(root.identity, root.core.trust, outcast.id, "sim", root.unix())
                    root.core.revoke(sealed)

    def _cut(self, links: set[tuple[bytes, bytes]], rng: Random) -> None:
        self.cuts.append(links)
        self.kernel.after(rng.choice([rng.uniform(1, 30), rng.uniform(30, 300)]), self._mend, links)

    def _mend(self, links: set[tuple[bytes, bytes]]) -> None:
        self.cuts = [cut for cut in self.cuts if cut is not links]

    def _crash_if_up(self, node: GossipNode) -> None:
        if node.up and not self.healed:
            node.crash()

    def _come_back(self, node: GossipNode, crash_at: str) -> None:
        if node.up or node.gone or self.healed:
            return
        node.dark = False
        node.start(crash_at=crash_at)
        if crash_at:
            self.kernel.after(1.0, self._come_back, node, "")

    def first_epoch(self, epoch: int) -> int:
        """In which a node's new life begins; a negative control replaces it."""
        return epoch

    # --- watching

    def wrote(self, node: GossipNode, kind: str, payload: bytes, sealed: bytes) -> None:
        for checker in self.checkers:
            checker.wrote(self, node, kind, payload, sealed)

    def sent(self, node: GossipNode, data: bytes) -> None:
        for checker in self._on_sent:
            checker.sent(self, node, data)

    def changed(self, node: GossipNode, change: MemberChanged) -> None:
        for checker in self.checkers:
            checker.changed(self, node, change)

    def _audit(self) -> None:
        for checker in self.checkers:
            checker.audit(self)
        self.kernel.after(AUDIT_S, self._audit)

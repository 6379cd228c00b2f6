"""SWIM (Das, Gupta, Motivala 2002) with Lifeguard, as a state machine without I/O.

Each interval one member is pinged, round-robin in shuffled order. A member that does not answer is pinged through relays and over
TCP; if it stays silent it is suspected. It may refute by raising its incarnation, and is declared dead when the suspicion runs
out. Evidence and small records spread as rumours on the same packets. Time, randomness and signatures come from outside.
"""

from collections import deque
from collections.abc import Callable
from random import Random

from msgspec.structs import replace

from membership.addresses import address_group
from membership.clock_skew import ClockSkew
from membership.config import SwimConfig
from membership.effects import (
    Cloned,
    Effect,
    MemberChanged,
    PersistEpoch,
    SendPacket,
    SetTimer,
    StreamOutcome,
    StreamPing,
    WantReconcile,
)
from membership.member import Member, MemberTable
from membership.probe import LocalHealth, Probe, ProbeOrder, Relays
from membership.ratelimit import MinimumInterval
from membership.reconcile import MemberDigest
from membership.records import ROOT_BYTES
from membership.rumours import ITEM_OVERHEAD, RumourQueue
from membership.suspicion import AccuserCredit, Suspicion
from membership.wire import (
    MAX_INCARNATION,
    Ack,
    Alive,
    AnyEvidence,
    AnyPacket,
    Dead,
    Gossip,
    Left,
    Nack,
    Ping,
    PingRequest,
    Rumours,
    Suspect,
)

Verified = tuple[bytes, AnyEvidence, bytes]  # author, evidence, the sealed bytes

PACKET_OVERHEAD = 73 + 9 + 10 + 34 + 24  # upper bound: envelope, nonce, root, a target, framing
WOKE_UP_S = 5.0  # a timer this late means the machine slept, not that it was busy
LEAVE_ROUNDS = 3  # farewells sent to each member; two may be lost
INTRODUCED_TO = 256  # members that the node it joined by tells of a newcomer; the rest hear rumours (own choice)
GOSSIP_TO_DEAD_S = 30.0  # rumours also go to dead members for this long, so that they can refute (memberlist)
MAX_REMEMBERED_RUNS = 8


class CloneDetector:
    """Detects a second machine with this node's key, by the boot epochs of evidence about this node from elsewhere.

    Such evidence may also come from an earlier run (a wiped disk, a clock that is behind). That run is over, so outbidding it
    once is enough. A run that outbids this node again afterwards is alive.
    """

    def __init__(self, boot: int) -> None:
        self._boot = boot
        self._seen: deque[int] = deque(maxlen=MAX_REMEMBERED_RUNS)

    def is_clone(self, boot: int) -> bool:
        """Record evidence of the run that began with this epoch; True if it must be a second machine."""
        if boot in self._seen:
            return True
        self._seen.append(boot)
        return False

    def started_before(self, boot: int) -> bool:
        """Return True if the other run started before this one, which then has to stop."""
        return boot < self._boot


class Swim:
    """The failure detector of one node. `seal_evidence` signs its own evidence; the shell signs packets."""

    def __init__(
        self,
        node: bytes,
        host: str,
        port: int,
        epoch: int,
        config: SwimConfig,
        rng: Random,
        seal_evidence: Callable[[AnyEvidence], bytes],
        records_root: Callable[[], int],
        *,
        wall: Callable[[], float] = lambda: 0.0,
        zone_of: Callable[[bytes], str] = lambda node: "",
    ) -> None:
        self.node = node
        self.config = config
        self.table = MemberTable(config.max_members)
        self.health = LocalHealth(config.health_max)
        self.rumours = RumourQueue(config.retransmit_multiplier)
        self.left = False
        self._host, self._port = host, port
        self._boot = epoch
        self._epoch, self._incarnation, self._draining = epoch, 0, False
        self._clones = CloneDetector(epoch)
        self.skew = ClockSkew()
        self._wall, self._zone_of = wall, zone_of
        self._rng = rng
        self._seal = seal_evidence
        self._records_root = records_root
        self._differing_since: float | None = None
        self._probe_order = ProbeOrder(rng)
        self._probe: Probe | None = None
        self.relays = Relays()
        self._suspicions: dict[bytes, Suspicion] = {}
        self._unreachable: set[bytes] = set()
        self._reconciling_soon = False
        self._reconcile_limit = MinimumInterval(config.reconcile_pause_s)
        self._unproven_limit = MinimumInterval(config.reconcile_pause_s)
        self._recently_dead: deque[bytes] = deque()
        self._gossiping = False
        self._credit = AccuserCredit(config)
        self._no_verdicts_before = 0.0  # set after this node stood still: acks may wait unread in its socket
        self._tokens: dict[str, int] = {}
        self._last_token = 0

    # --- lifecycle

    def start(self, now: float) -> list[Effect]:
        self._announce(now)
        stagger = self._rng.random()
        return [
            self._timer("probe", now + self.config.probe_interval_s * stagger),
            self._timer("compare", now + self.config.reconcile_interval_s * stagger),
            self._timer("cross-zone", now + self.config.cross_zone_interval_s * stagger),
            self._timer("reconcile-dead", now + self.config.dead_reconcile_interval_s * stagger),
            *self._schedule_gossip(now),
        ]

    def set_draining(self, draining: bool, now: float) -> list[Effect]:
        """Announce that this node is about to leave, or no longer is."""
        if draining == self._draining:
            return []
        self._draining = draining
        self._incarnation += 1
        self._announce(now)
        return [MemberChanged(self.node, "alive", "alive", draining), *self.gossip_now(now)]

    def leave(self, now: float) -> list[Effect]:
        """Send a farewell to every member."""
        self.left = True
        farewell = Left(node=self.node, epoch=self._epoch, incarnation=self._incarnation)
        sealed = self._seal(farewell)
        self.table.apply(farewell, sealed, now)
        recipients = self._others() * LEAVE_ROUNDS
        return [self._send(member, self._rumours((("member", sealed),))) for member in recipients]

    def digest(self, now: float) -> MemberDigest:
        """Return the evidence held, for a push-pull. Members gone for long are left out, so that every node forgets them."""
        return [(member.node, *member.order) for member in self._digested(now)]

    def evidence_missing_from(self, digest: MemberDigest, now: float) -> list[bytes]:
        """Return the evidence that a peer with this digest lacks: each member's own statement, and what outranks it."""
        entries = set(digest)
        news = [member for member in self._digested(now) if (member.node, *member.order) not in entries]
        if not news:
            return []
        theirs = {node: (epoch, incarnation, rank) for node, epoch, incarnation, rank in digest}
        missing: list[bytes] = []
        for member in news:
            known = theirs.get(member.node, (-1, -1, -1))
            if member.order > known:
                missing.append(member.alive_sealed)
                if member.verdict_sealed is not None:
                    missing.append(member.verdict_sealed)
        return missing

    def _digested(self, now: float) -> list[Member]:
        limit_s = self.config.dead_forget_s / 2
        return [member for member in self.table.all() if member.present or now - member.since < limit_s]

    def forget_long_gone(self, now: float) -> None:
        """Drop members that have been dead or gone for so long that no rumour about them can be left."""
        for member in self.table.all():
            if not member.present and now - member.since > self.config.dead_forget_s:
                self.table.forget(member.node)

    def expel(self, node: bytes) -> list[Effect]:
        """Drop a node that is no longer a member; evidence about it is not accepted any more."""
        member = self.table.get(node)
        if member is None or node == self.node:
            return []
        self.table.forget(node)
        self._suspicions.pop(node, None)
        self._unreachable.discard(node)
        self._tokens.pop(_suspicion_timer(node), None)
        return [MemberChanged(node, "dead", member.state, member.draining)]

    def set_address(self, host: str, port: int, now: float) -> list[Effect]:
        """Announce a new address of this node with a new incarnation."""
        if (host, port) == (self._host, self._port):
            return []
        self._host, self._port = host, port
        self._incarnation += 1
        self._announce(now)
        return self.gossip_now(now)

    def gossip_record(self, node: bytes, section: str, sealed: bytes, now: float, urgent: bool = False) -> list[Effect]:
        """Gossip a record with the next packets; an urgent one at once, before other rumours and with more transmissions."""
        self.rumours.add("record", node + section.encode(), sealed, urgent)
        return self.gossip_now(now) if urgent else self._schedule_gossip(now)

    @property
    def epoch(self) -> int:
        return self._epoch

    def reconcile_soon(self, now: float) -> list[Effect]:
        """Schedule a push-pull with another member: the last one brought so much that there is probably more."""
        if self._reconciling_soon or self.left:
            return []
        self._reconciling_soon = True
        return [self._timer("reconcile-soon", now + self.config.reconcile_pause_s * self._rng.uniform(0.5, 1.5))]

    def want_reconcile(
        self, node: bytes, host: str, port: int, unless_equal: bool, now: float, unproven: bool = False
    ) -> list[Effect]:
        """Ask for a push-pull with the node at this address, unless there was one a moment ago.

        The ports of a host that unsigned packets name count as one address.
        """
        if unproven and not self._unproven_limit.allow((address_group(host), 0), now):
            return []
        if not self._reconcile_limit.allow((host, port), now):
            return []
        return [WantReconcile(node, host, port, unless_equal, unproven)]

    def introduce(self, newcomer: bytes, certificate: bytes) -> list[Effect]:
        """Tell the other members about a newcomer that only this node knows yet.

        Rumours alone take seconds when many start at once, since few certificates fit into a packet.
        """
        member = self.table.get(newcomer)
        if member is None or not member.present:
            return []
        news: Gossip = (("record", certificate), ("member", member.alive_sealed))
        packets: list[Gossip] = [news] if self._fits(news) else [(item,) for item in news if self._fits((item,))]
        others = self.table.draw(INTRODUCED_TO, self._rng, without=(self.node, newcomer))
        return [self._send_exactly(other, self._rumours(gossip)) for other in others for gossip in packets]

    def _fits(self, gossip: Gossip) -> bool:
        return _used(gossip) <= self.config.packet_bytes

    def is_unreachable(self, node: bytes) -> bool:
        return node in self._unreachable

    # --- packets

    def on_packet(
        self,
        sender: bytes,
        packet: AnyPacket,
        evidence: list[Verified],
        now: float,
        source: tuple[str, int] | None = None,
    ) -> list[Effect]:
        """Handle a verified packet of a member, with its verified `evidence`, from the address `source`."""
        effects: list[Effect] = []
        for item in evidence:
            effects += self.on_evidence(*item, now)
        member = self.table.get(sender)
        if member is None or self.left:
            return effects
        match packet:
            case Ping():
                effects.append(self._answer(member, packet, source))
                effects += self._compare_root(member, packet.root, now)
            case Ack():
                effects += self._on_ack(member, packet, now)
            case PingRequest():
                effects += self._relay(member, packet, now)
            case Nack():
                if self._probe is not None and packet.answers == self._probe.nonce:
                    self._probe.nacks.add(sender)
            case Rumours():
                pass
        return effects

    def on_evidence(
        self, author: bytes, evidence: AnyEvidence, sealed: bytes, now: float, *, rumoured: bool = True
    ) -> list[Effect]:
        """Handle verified evidence. A rumour is gossiped on; from a push-pull, only what changes a known member is.

        Otherwise each joining node would gossip about every member (consul issue 5567).
        """
        if evidence.node == self.node:
            return [*self._on_own_evidence(evidence, now), *self._schedule_gossip(now)]
        if isinstance(evidence, Suspect | Dead):
            return self._on_accusation(author, evidence, sealed, now)
        return self._apply(author, evidence, sealed, now, rumoured)

    def _on_accusation(self, author: bytes, accusation: Suspect | Dead, sealed: bytes, now: float) -> list[Effect]:
        """Begin or confirm a suspicion. A verdict of another node does no more: each node's own suspicion has to run out.

        An accusation counts only for what its subject has announced last, so that the subject knows how to refute it.
        """
        member = self.table.get(accusation.node)
        if member is None or (accusation.epoch, accusation.incarnation) != (member.epoch, member.incarnation):
            return []
        if author != self.node and not self._credit.believed(author, now):
            return []
        refused = isinstance(accusation, Suspect) and accusation.refused
        suspicion = self._suspicions.get(member.node)
        if suspicion is None:
            return self._apply(author, Suspect(member.node, member.epoch, member.incarnation, refused), sealed, now)
        if not suspicion.confirm(author, now, refused):
            return []
        self.rumours.add("member", member.node + author, sealed)
        return [*self._watch(member.node, suspicion, now), *self._schedule_gossip(now)]

    def _apply(
        self, author: bytes, evidence: AnyEvidence, sealed: bytes, now: float, rumoured: bool = True
    ) -> list[Effect]:
        change = self.table.apply(evidence, sealed, now)
        if change is None:
            return []
        before, after = change
        if rumoured or before is not None:
            self.rumours.add("member", after.node, sealed)
        refused = isinstance(evidence, Suspect) and evidence.refused
        return [*self._on_change(before, after, author, refused, now), *self._schedule_gossip(now)]

    def on_stream_ping(self, node: bytes, outcome: StreamOutcome, now: float) -> list[Effect]:
        """Handle the outcome of a TCP ping, of our own probe or of one we relay."""
        relay = self.relays.take_stream(node)
        if outcome == "acked":
            if self._probe is not None and self._probe.target == node:
                self._probe.acked = True
            requester = self.table.get(relay[0]) if relay is not None else None
            if relay is None or requester is None:
                return []
            return [self._send(requester, self._ack(relay[1]))]
        member = self.table.get(node)
        if outcome == "silent" or member is None or not member.present:
            return []
        return self._accuse(member, now, refused=True)

    def is_unheard(self, node: bytes) -> bool:
        """Return True if this member is being probed and has not acked itself."""
        return self._probe is not None and self._probe.target == node and not self._probe.heard

    def on_lag(self, late_s: float, now: float) -> list[Effect]:
        """Handle a late timer: this node stood still (stopped, asleep or busy), so missing acks prove nothing."""
        if late_s < self.config.lag_s:
            return []
        self.health.degrade()
        self._probe = None
        self._no_verdicts_before = now + self.config.probe_interval_s
        if late_s < WOKE_UP_S:
            return []
        # After a sleep the others may hold this node dead: find out now.
        return self._reconcile_with_one(self._random_member(), False, now)

    def _answer(self, member: Member, ping: Ping, source: tuple[str, int] | None) -> SendPacket:
        """Return the ack, sent to the source of the ping.

        It carries the accusation if the member is suspect or dead, so that it can refute. If the source differs from the
        member's announced address, it carries that announcement: a second machine may have the member's key.
        """
        if source is None or source == (member.host, member.port):
            return self._send(member, self._ack(ping.nonce, _accusation(member)))
        # No rumours to an unsigned address: that would allow amplification attacks.
        answer = self._ack(ping.nonce, _accusation(member) or (("member", member.alive_sealed),))
        return SendPacket(member.node, source[0], source[1], answer)

    # --- timers

    def on_timer(self, name: str, token: int, now: float) -> list[Effect]:
        if self._tokens.get(name) != token or self.left:
            return []
        if name == "probe":
            return self._next_probe(now)
        if name == "probe-timeout":
            return self._probe_indirectly(now)
        if name == "gossip":
            self._gossiping = False
            return [*self._gossip(now), *self._schedule_gossip(now)]
        if name == "reconcile-soon":
            self._reconciling_soon = False
            return self._reconcile_with_one(self._random_member(), True, now)
        if name == "compare":
            again = self._timer("compare", now + self.config.reconcile_interval_s)
            return [again, *self._reconcile_with_one(self._random_member(), True, now)]
        if name == "cross-zone":
            again = self._timer("cross-zone", now + self.config.cross_zone_interval_s)
            here = self._zone_of(self.node)
            elsewhere = [member for member in self._others() if self._zone_of(member.node) != here]
            return [again, *self._reconcile_with_one(elsewhere, True, now)]
        if name == "reconcile-dead":
            # Contacting dead members heals partitions (memberlist issue 222).
            again = self._timer("reconcile-dead", now + self.config.dead_reconcile_interval_s)
            dead = [member for member in self.table.all() if member.state == "dead"]
            return [again, *self._reconcile_with_one(dead, False, now)]
        if name.startswith("suspect-"):
            return self._suspicion_due(bytes.fromhex(name.removeprefix("suspect-")), now)
        return []

    # --- probing

    def _next_probe(self, now: float) -> list[Effect]:
        effects = self._close_probe(now)
        target = self._probe_order.next(self.table, self.node)
        interval = self.health.scaled(self.config.probe_interval_s)
        effects.append(self._timer("probe", now + interval))
        if target is None:
            return effects
        self._probe = Probe(target.node, self._nonce())
        # Lifeguard's buddy system: a suspect can refute at once.
        ping = Ping(nonce=self._probe.nonce, root=self.root(), gossip=_accusation(target))
        return [
            *effects,
            self._send(target, ping),
            self._timer("probe-timeout", now + self.config.probe_timeout_s),
        ]

    def _probe_indirectly(self, now: float) -> list[Effect]:
        probe = self._probe
        if probe is None or probe.acked:
            return []
        drawn = self.table.draw(self.config.indirect_probes, self._rng, without=(self.node, probe.target))
        relays = [member for member in drawn if member.state == "alive"]
        probe.expected_nacks = len(relays)
        effects: list[Effect] = []
        for relay in relays:
            request = PingRequest(nonce=probe.nonce, root=self.root(), gossip=(), target=probe.target)
            effects.append(self._send(relay, request))
        target = self.table.get(probe.target)
        if target is not None:
            effects.append(StreamPing(target.node, target.host, target.port))
        return effects

    def _close_probe(self, now: float) -> list[Effect]:
        probe, self._probe = self._probe, None
        if probe is None:
            return []
        if probe.acked:
            self.health.improve()
            return []
        self.health.degrade(probe.missed_nacks)
        member = self.table.get(probe.target)
        return self._accuse(member, now, refused=False) if member is not None and member.present else []

    def _accuse(self, member: Member, now: float, refused: bool) -> list[Effect]:
        """Accuse a member of not answering; if it is suspected already, this confirms the suspicion."""
        accusation = Suspect(node=member.node, epoch=member.epoch, incarnation=member.incarnation, refused=refused)
        return self.on_evidence(self.node, accusation, self._seal(accusation), now)

    def _on_ack(self, member: Member, packet: Ack, now: float) -> list[Effect]:
        probe = self._probe
        if probe is not None and packet.answers == probe.nonce:
            probe.acked = True
            probe.heard = probe.heard or probe.target == member.node
            if packet.wall_unix and probe.target == member.node:
                self.skew.add_sample(member.node, packet.wall_unix - self._wall())
        effects = self._compare_root(member, packet.root, now)
        relay = self.relays.take(packet.answers, now)
        requester = self.table.get(relay[0]) if relay is not None else None
        if relay is not None and requester is not None:
            effects.append(self._send(requester, self._ack(relay[1])))
        return effects

    def _relay(self, requester: Member, packet: PingRequest, now: float) -> list[Effect]:
        target = self.table.get(packet.target)
        # The nack proves only that this relay is alive; an ack may still follow.
        nack = Nack(nonce=self._nonce(), root=self.root(), gossip=(), answers=packet.nonce)
        effects: list[Effect] = [self._send(requester, nack)]
        if target is not None:
            ping = Ping(nonce=self._nonce(), root=self.root(), gossip=())
            self.relays.add(ping.nonce, target.node, requester.node, packet.nonce, now)
            effects += [self._send(target, ping), StreamPing(target.node, target.host, target.port)]
        return effects

    # --- evidence

    def _on_own_evidence(self, evidence: AnyEvidence, now: float) -> list[Effect]:
        """Handle evidence about this node: outbid statements of earlier runs, report clones, refute accusations."""
        if isinstance(evidence, Alive | Left):
            # From a run before the disk was wiped, or from another machine with this key.
            if (evidence.epoch, evidence.incarnation) <= (self._epoch, self._incarnation):
                return []
            effects = self.outbid(evidence.epoch + 1, now)
            if isinstance(evidence, Alive) and self._clones.is_clone(evidence.boot):
                younger = self._clones.started_before(evidence.boot)
                return [Cloned(evidence.host, evidence.port, younger), *effects]
            return effects
        # Others ignore an accusation of anything else, unless they know a newer announcement, which they send along with it.
        if (evidence.epoch, evidence.incarnation) != (self._epoch, self._incarnation) or self.left:
            return []
        self.health.degrade()
        if self._incarnation + 1 >= MAX_INCARNATION:
            return self.outbid(self._epoch + 1, now)
        self._incarnation += 1
        self._announce(now)
        return []

    def outbid(self, epoch: int, now: float) -> list[Effect]:
        """Continue in a higher epoch."""
        self._epoch, self._incarnation = epoch, 0
        self._announce(now)
        return [PersistEpoch(epoch)]

    def _announce(self, now: float) -> None:
        me = Alive(
            node=self.node,
            epoch=self._epoch,
            incarnation=self._incarnation,
            host=self._host,
            port=self._port,
            draining=self._draining,
            boot=self._boot,
        )
        sealed = self._seal(me)
        self.table.apply(me, sealed, now)
        self.rumours.add("member", self.node, sealed)

    def _on_change(
        self, before: Member | None, after: Member, author: bytes, refused: bool, now: float
    ) -> list[Effect]:
        was: str = before.state if before is not None else ""
        watch: list[Effect] = []
        if after.state != "suspect":
            settled = self._suspicions.pop(after.node, None)
            if settled is not None and before is not None and (after.state, after.epoch) == ("alive", before.epoch):
                for accuser in settled.accusers:
                    self._credit.refuted(accuser, now)
            self._tokens.pop(_suspicion_timer(after.node), None)
            if after.node in self._unreachable:
                self._unreachable.discard(after.node)
                was = "unreachable"
            if after.state == "dead":
                self._recently_dead.append(after.node)
        elif was != "suspect" or (before is not None and before.order[:2] != after.order[:2]):
            self._unreachable.discard(after.node)
            suspicion = Suspicion(self.config, self.table.present_count, author, now, refused)
            self._suspicions[after.node] = suspicion
            watch = self._watch(after.node, suspicion, now)
        if before is None:
            self._probe_order.insert(after.node)
        if before is None or before.state != after.state or before.draining != after.draining:
            return [MemberChanged(after.node, after.state, was, after.draining), *watch]
        return watch

    def _watch(self, node: bytes, suspicion: Suspicion, now: float) -> list[Effect]:
        """Set the timer for a suspect's next state: unreachable, then dead."""
        effects: list[Effect] = []
        member = self.table.get(node)
        if node not in self._unreachable and now >= suspicion.unreachable_at and member is not None:
            self._unreachable.add(node)
            effects.append(MemberChanged(node, "unreachable", "suspect", member.draining))
        due = suspicion.deadline if node in self._unreachable else suspicion.unreachable_at
        return [*effects, self._timer(_suspicion_timer(node), due)]

    def _suspicion_due(self, node: bytes, now: float) -> list[Effect]:
        member, suspicion = self.table.get(node), self._suspicions.get(node)
        if member is None or member.state != "suspect" or suspicion is None:
            return []
        if now < self._no_verdicts_before:
            return [self._timer(_suspicion_timer(node), self._no_verdicts_before)]
        if now < suspicion.deadline:
            return self._watch(node, suspicion, now)
        verdict = Dead(node=node, epoch=member.epoch, incarnation=member.incarnation)
        return self._apply(self.node, verdict, self._seal(verdict), now)

    def _reconcile_with_one(self, members: list[Member], unless_equal: bool, now: float) -> list[Effect]:
        if not members:
            return []
        chosen = self._rng.choice(members)
        return self.want_reconcile(chosen.node, chosen.host, chosen.port, unless_equal, now)

    def _random_member(self) -> list[Member]:
        return self.table.draw(1, self._rng, without=(self.node,))

    def _compare_root(self, member: Member, root: bytes, now: float) -> list[Effect]:
        """Reconcile when no peer has had our root for `settle_s`; until then rumours, which are cheaper, may settle it."""
        if root == self.root():
            self._differing_since = None
            return []
        if self._differing_since is None:
            self._differing_since = now
        if now - self._differing_since < self.config.settle_s and not self._overloaded:
            return []
        self._differing_since = now
        return self.want_reconcile(member.node, member.host, member.port, False, now)

    @property
    def _overloaded(self) -> bool:
        """True if more rumours wait than the packets of `settle_s` can carry, as in a mass restart: push-pulls are faster."""
        config = self.config
        capacity = config.gossip_fanout * config.packet_bytes * config.settle_s / config.gossip_interval_s
        return self.rumours.waiting_bytes * self.rumours.rounds(len(self.table)) > capacity

    def root(self) -> bytes:
        """Return the hash of all members and records known here; every packet carries it."""
        return (self.table.root ^ self._records_root()).to_bytes(ROOT_BYTES, "big")

    def gossip_now(self, now: float) -> list[Effect]:
        return [*self._gossip(now), *self._schedule_gossip(now)]

    def _schedule_gossip(self, now: float) -> list[Effect]:
        """Set the timer of the next gossip round if there are rumours."""
        if self._gossiping or self.left or not len(self.rumours):
            return []
        self._gossiping = True
        return [self._timer("gossip", now + self.config.gossip_interval_s * self._rng.uniform(0.5, 1.0))]

    def _gossip(self, now: float) -> list[Effect]:
        if not len(self.rumours):
            return []
        chosen = self.table.draw(self.config.gossip_fanout, self._rng, without=(self.node,))
        dead = self._gossip_targets_dead(now)
        if dead:
            chosen.append(self._rng.choice(dead))
        effects: list[Effect] = []
        for member in chosen:
            gossip = self.rumours.take(self.config.packet_bytes - PACKET_OVERHEAD, len(self.table))
            if gossip:
                effects.append(self._send_exactly(member, self._rumours(gossip)))
        return effects

    def _gossip_targets_dead(self, now: float) -> list[Member]:
        """Return the members that died less than GOSSIP_TO_DEAD_S ago."""
        dead = [member for node in self._recently_dead if (member := self.table.get(node)) is not None]
        dead = [member for member in dead if member.state == "dead" and now - member.since < GOSSIP_TO_DEAD_S]
        self._recently_dead = deque(member.node for member in dead)
        return dead

    # --- helpers

    def _others(self) -> list[Member]:
        return [member for member in self.table.present() if member.node != self.node]

    def _rumours(self, gossip: Gossip) -> Rumours:
        return Rumours(nonce=self._nonce(), root=self.root(), gossip=gossip)

    def _send(self, member: Member, packet: AnyPacket) -> SendPacket:
        """Send a packet with as many rumours as still fit."""
        if not len(self.rumours):
            return self._send_exactly(member, packet)
        more = self.rumours.take(self.config.packet_bytes - _used(packet.gossip), len(self.table))
        extra = tuple(item for item in more if item not in packet.gossip)
        return self._send_exactly(member, replace(packet, gossip=packet.gossip + extra))

    def _send_exactly(self, member: Member, packet: AnyPacket) -> SendPacket:
        return SendPacket(member.node, member.host, member.port, packet)

    def _ack(self, answers: int, gossip: Gossip = ()) -> Ack:
        return Ack(nonce=self._nonce(), root=self.root(), gossip=gossip, answers=answers, wall_unix=int(self._wall()))

    def _nonce(self) -> int:
        return self._rng.getrandbits(62)

    def _timer(self, name: str, at: float) -> SetTimer:
        self._last_token += 1
        self._tokens[name] = self._last_token
        return SetTimer(name, self._last_token, at)


def _used(gossip: Gossip) -> int:
    """Return how many bytes a packet with this gossip takes at most."""
    return PACKET_OVERHEAD + sum(len(sealed) + ITEM_OVERHEAD for _, sealed in gossip)


def _accusation(member: Member) -> Gossip:
    """Return the accusation of a suspect or dead member, after the announcement that it names; nothing of others."""
    if member.state not in {"suspect", "dead"} or member.verdict_sealed is None:
        return ()
    return (("member", member.alive_sealed), ("member", member.verdict_sealed))


def _suspicion_timer(node: bytes) -> str:
    return "suspect-" + node.hex()

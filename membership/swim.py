"""SWIM (Das, Gupta, Motivala 2002) with Lifeguard, as a state machine without I/O.

Each interval one member is pinged, in a shuffled round; a silent one is pinged through relays; one that stays silent is
suspected, may refute by raising its incarnation, and is declared dead when the suspicion runs out. All news spreads as
rumours on these packets. Time, randomness and the signing of our own evidence come from outside.
"""

from collections import deque
from collections.abc import Callable
from random import Random

from msgspec.structs import replace

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
from membership.health import Health
from membership.lives import OtherLives
from membership.member import Member, MemberTable
from membership.pauses import Pauses
from membership.probe import Probe, Relays, Round
from membership.reconcile import MemberDigest
from membership.records import ROOT_BYTES
from membership.rumours import ITEM_OVERHEAD, RumourQueue
from membership.skew import Skew
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

PACKET_OVERHEAD = 73 + 9 + 10 + 34 + 24  # envelope, nonce, root, a target, framing: generously
WOKE_UP_S = 5.0  # so long without a timer is sleep, not a busy moment
LEAVE_ROUNDS = 3  # farewells are sent to everyone this often; two may be lost
DEAD_HEAR_S = 30.0  # rumours go to the dead too for so long, so that they can refute (memberlist's gossip-to-the-dead)


class Swim:
    """One node's view. `seal_evidence` signs what we say ourselves; packets are signed by the shell."""

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
        self.health = Health(config.health_max)
        self.rumours = RumourQueue(config.retransmit_multiplier)
        self.left = False
        self._host, self._port = host, port
        self._boot = epoch
        self._epoch, self._incarnation, self._draining = epoch, 0, False
        self._lives = OtherLives(epoch)
        self.skew = Skew()
        self._wall, self._zone_of = wall, zone_of
        self._rng = rng
        self._seal = seal_evidence
        self._records_root = records_root
        self._differing_since: float | None = None
        self._round = Round(rng)
        self._probe: Probe | None = None
        self.relays = Relays()
        self._suspicions: dict[bytes, Suspicion] = {}
        self._unreachable: set[bytes] = set()
        self._hurrying = False
        self._pauses = Pauses(config.reconcile_pause_s)
        self._buried: deque[bytes] = deque()  # who died lately, the last at the right
        self._gossiping = False
        self._credit = AccuserCredit(config)
        self._calm_at = 0.0  # nobody is judged before: we stood still, and have not read our mail yet
        self._tokens: dict[str, int] = {}
        self._count = 0

    # --- life

    def start(self, now: float) -> list[Effect]:
        self._announce(now)
        stagger = self._rng.random()
        return [
            self._timer("probe", now + self.config.probe_interval_s * stagger),
            self._timer("compare", now + self.config.reconcile_interval_s * stagger),
            self._timer("cross-zone", now + self.config.cross_zone_interval_s * stagger),
            self._timer("knock", now + self.config.dead_reconcile_interval_s * stagger),
            *self._gossip_soon(now),
        ]

    def set_draining(self, draining: bool, now: float) -> list[Effect]:
        """Tell everyone that this node is about to leave (or not any more)."""
        if draining == self._draining:
            return []
        self._draining = draining
        self._incarnation += 1
        self._announce(now)
        return [MemberChanged(self.node, "alive", "alive", draining), *self.gossip_now(now)]

    def leave(self, now: float) -> list[Effect]:
        """Say farewell to everyone at once."""
        self.left = True
        farewell = Left(node=self.node, epoch=self._epoch, incarnation=self._incarnation)
        sealed = self._seal(farewell)
        self.table.apply(farewell, sealed, now)
        told = self._others() * LEAVE_ROUNDS
        return [self._send(member, self._rumours(member, (("member", sealed),))) for member in told]

    def digest(self, now: float) -> MemberDigest:
        """Which evidence we hold, for a push-pull. Those long gone are not spoken of, so that all can forget them."""
        return [(member.node, *member.order) for member in self._spoken_of(now)]

    def evidence_missing_from(self, digest: MemberDigest, now: float) -> list[bytes]:
        """What a peer with this digest lacks: each member's own word, and what outranks it."""
        entries = set(digest)
        news = [member for member in self._spoken_of(now) if (member.node, *member.order) not in entries]
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

    def _spoken_of(self, now: float) -> list[Member]:
        silence = self.config.dead_forget_s / 2
        return [member for member in self.table.all() if member.present or now - member.since < silence]

    def forget_long_gone(self, now: float) -> None:
        """Drop members that have been dead or gone for so long that no rumour about them is left anywhere."""
        for member in self.table.all():
            if not member.present and now - member.since > self.config.dead_forget_s:
                self.table.forget(member.node)

    def expel(self, node: bytes) -> list[Effect]:
        """Forget one that may not be a member any more; nothing about it will be verified again."""
        member = self.table.get(node)
        if member is None or node == self.node:
            return []
        self.table.forget(node)
        self._suspicions.pop(node, None)
        self._unreachable.discard(node)
        self._tokens.pop(_suspicion_timer(node), None)
        return [MemberChanged(node, "dead", member.state, member.draining)]

    def set_address(self, host: str, port: int, now: float) -> list[Effect]:
        """A new address of our own, told as a new incarnation."""
        if (host, port) == (self._host, self._port):
            return []
        self._host, self._port = host, port
        self._incarnation += 1
        self._announce(now)
        return self.gossip_now(now)

    def tell(self, node: bytes, section: str, sealed: bytes, now: float, urgent: bool = False) -> list[Effect]:
        """Tell of a record with the next packets; an urgent one at once, before other news and to more."""
        self.rumours.add("record", node + section.encode(), sealed, urgent)
        return self.gossip_now(now) if urgent else self._gossip_soon(now)

    @property
    def epoch(self) -> int:
        return self._epoch

    def hurry(self, now: float) -> list[Effect]:
        """A push-pull has just taught us much: there is more, and others lack it too. Go on with somebody else soon."""
        if self._hurrying or self.left:
            return []
        self._hurrying = True
        return [self._timer("hurry", now + self.config.reconcile_pause_s * self._rng.uniform(0.5, 1.5))]

    def want_reconcile(self, node: bytes, host: str, port: int, unless_equal: bool, now: float) -> list[Effect]:
        """A push-pull with whoever is there, unless there was one a moment ago."""
        return [WantReconcile(node, host, port, unless_equal)] if self._pauses.over((host, port), now) else []

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
        """A verified packet from a known member; `evidence` is what it says of others, verified too; `source` is its address."""
        effects: list[Effect] = []
        for item in evidence:
            effects += self.on_evidence(*item, now)
        member = self.table.get(sender)
        if member is None or self.left:
            return effects
        match packet:
            case Ping():
                effects.append(self._answer(member, packet, source))
                effects += self._differs(member, packet.root, now)
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
        """One verified piece of news: a rumour is told on; from a push-pull, only what changes somebody we know.

        Else each joiner would tell everybody about everybody (consul issue 5567).
        """
        if evidence.node == self.node:
            return [*self._about_me(evidence, now), *self._gossip_soon(now)]
        suspicion = self._suspicions.get(evidence.node)
        if isinstance(evidence, Suspect) and suspicion is not None:
            member = self.table.get(evidence.node)
            if (
                member is not None
                and (evidence.epoch, evidence.incarnation) == (member.epoch, member.incarnation)
                and self._credit.believed(author, now)
                and suspicion.confirm(author, now, evidence.refused)
            ):
                self.rumours.add("member", evidence.node + author, sealed)
                return [*self._watch(evidence.node, suspicion, now), *self._gossip_soon(now)]
        change = self.table.apply(evidence, sealed, now)
        if change is None:
            return []
        before, after = change
        if rumoured or before is not None:
            self.rumours.add("member", after.node, sealed)
        refused = isinstance(evidence, Suspect) and evidence.refused
        return [*self._changed(before, after, author, refused, now), *self._gossip_soon(now)]

    def on_stream_ping(self, node: bytes, outcome: StreamOutcome, now: float) -> list[Effect]:
        """What a TCP ping has shown, of our own probe or of one we relay."""
        asked = self.relays.stream_over(node)
        if outcome == "acked":
            if self._probe is not None and self._probe.target == node:
                self._probe.acked = True
            asker = self.table.get(asked[0]) if asked is not None else None
            if asked is None or asker is None:
                return []
            return [self._send(asker, self._ack(asked[1]))]
        member = self.table.get(node)
        if outcome == "silent" or member is None or not member.present:
            return []
        return self._accuse(member, now, refused=True)

    def on_lag(self, late_s: float, now: float) -> list[Effect]:
        """This node stood still (a stopped process, a sleeping machine, a long computation): nobody else's silence counts."""
        if late_s < self.config.lag_s:
            return []
        self.health.worse()
        self._probe = None
        self._calm_at = now + self.config.probe_interval_s
        if late_s < WOKE_UP_S:
            return []
        # A machine that slept may be dead to everybody: learn of it now, from whoever is there.
        return self._reconcile_with_one(self._anyone(), False, now)

    def _answer(self, member: Member, ping: Ping, source: tuple[str, int] | None) -> SendPacket:
        """The ack goes to where the ping came from. Whoever is held suspect or dead hears that first, and refutes; whoever
        speaks from another address than its newest word has, hears that word: a second machine may have its key."""
        doubt: Gossip = ()
        if member.state in {"suspect", "dead"} and member.verdict_sealed is not None:
            doubt = (("member", member.verdict_sealed),)
        if source is None or source == (member.host, member.port):
            return self._send(member, self._ack(ping.nonce, doubt))
        # No rumours to an address that nobody has signed: it would be an amplifier.
        answer = self._ack(ping.nonce, (*doubt, ("member", member.alive_sealed)))
        return SendPacket(member.node, source[0], source[1], answer)

    # --- timers

    def on_timer(self, name: str, token: int, now: float) -> list[Effect]:
        if self._tokens.get(name) != token or self.left:
            return []
        if name == "probe":
            return self._next_probe(now)
        if name == "probe-timeout":
            return self._indirect(now)
        if name == "gossip":
            self._gossiping = False
            return [*self._gossip(now), *self._gossip_soon(now)]
        if name == "hurry":
            self._hurrying = False
            return self._reconcile_with_one(self._anyone(), True, now)
        if name == "compare":
            again = self._timer("compare", now + self.config.reconcile_interval_s)
            return [again, *self._reconcile_with_one(self._anyone(), True, now)]
        if name == "cross-zone":
            again = self._timer("cross-zone", now + self.config.cross_zone_interval_s)
            here = self._zone_of(self.node)
            elsewhere = [member for member in self._others() if self._zone_of(member.node) != here]
            return [again, *self._reconcile_with_one(elsewhere, True, now)]
        if name == "knock":
            # Partitions heal because somebody knocks at the dead (memberlist issue 222).
            again = self._timer("knock", now + self.config.dead_reconcile_interval_s)
            dead = [member for member in self.table.all() if member.state == "dead"]
            return [again, *self._reconcile_with_one(dead, False, now)]
        if name.startswith("suspect-"):
            return self._suspicion_due(bytes.fromhex(name.removeprefix("suspect-")), now)
        return []

    # --- probing

    def _next_probe(self, now: float) -> list[Effect]:
        effects = self._close_probe(now)
        target = self._round.next(self.table, self.node)
        interval = self.health.scaled(self.config.probe_interval_s)
        effects.append(self._timer("probe", now + interval))
        if target is None:
            return effects
        self._probe = Probe(target.node, self._nonce())
        gossip: Gossip = ()
        if target.state == "suspect" and target.verdict_sealed is not None:
            gossip = (("member", target.verdict_sealed),)  # Lifeguard's buddy: let it refute at once
        ping = Ping(nonce=self._probe.nonce, root=self.root(), gossip=gossip)
        return [
            *effects,
            self._send(target, ping),
            self._timer("probe-timeout", now + self.config.probe_timeout_s),
        ]

    def _indirect(self, now: float) -> list[Effect]:
        probe = self._probe
        if probe is None or probe.acked:
            return []
        drawn = self.table.draw(self.config.indirect_probes, self._rng, without=(self.node, probe.target))
        helpers = [member for member in drawn if member.state == "alive"]
        probe.expected_nacks = len(helpers)
        effects: list[Effect] = []
        for helper in helpers:
            request = PingRequest(nonce=probe.nonce, root=self.root(), gossip=(), target=probe.target)
            effects.append(self._send(helper, request))
        target = self.table.get(probe.target)
        if target is not None:
            effects.append(StreamPing(target.node, target.host, target.port))
        return effects

    def _close_probe(self, now: float) -> list[Effect]:
        probe, self._probe = self._probe, None
        if probe is None:
            return []
        if probe.acked:
            self.health.better()
            return []
        self.health.worse(probe.missed_nacks)
        member = self.table.get(probe.target)
        return self._accuse(member, now, refused=False) if member is not None and member.present else []

    def _accuse(self, member: Member, now: float, refused: bool) -> list[Effect]:
        """Say that it does not answer us; for one who is suspected already, an independent confirmation."""
        accusation = Suspect(node=member.node, epoch=member.epoch, incarnation=member.incarnation, refused=refused)
        return self.on_evidence(self.node, accusation, self._seal(accusation), now)

    def _on_ack(self, member: Member, packet: Ack, now: float) -> list[Effect]:
        probe = self._probe
        if probe is not None and packet.answers == probe.nonce:
            probe.acked = True
            if packet.wall_unix and probe.target == member.node:
                self.skew.heard(member.node, packet.wall_unix - self._wall())
        effects = self._differs(member, packet.root, now)
        relay = self.relays.answered(packet.answers, now)
        asker = self.table.get(relay[0]) if relay is not None else None
        if relay is not None and asker is not None:
            effects.append(self._send(asker, self._ack(relay[1])))
        return effects

    def _relay(self, asker: Member, packet: PingRequest, now: float) -> list[Effect]:
        target = self.table.get(packet.target)
        # The nack says "I am here, and it has not answered yet"; an ack may still follow.
        nack = Nack(nonce=self._nonce(), root=self.root(), gossip=(), answers=packet.nonce)
        effects: list[Effect] = [self._send(asker, nack)]
        if target is not None:
            ping = Ping(nonce=self._nonce(), root=self.root(), gossip=())
            self.relays.add(ping.nonce, target.node, asker.node, packet.nonce, now)
            effects += [self._send(target, ping), StreamPing(target.node, target.host, target.port)]
        return effects

    # --- news

    def _about_me(self, evidence: AnyEvidence, now: float) -> list[Effect]:
        if isinstance(evidence, Alive | Left):
            # Our own word from before a wiped disk, or another machine's with our key.
            if (evidence.epoch, evidence.incarnation) <= (self._epoch, self._incarnation):
                return []
            effects = self.outbid(evidence.epoch + 1, now)
            if isinstance(evidence, Alive) and self._lives.outbids_again(evidence.boot):
                return [Cloned(evidence.host, evidence.port, self._lives.is_older(evidence.boot)), *effects]
            return effects
        if (evidence.epoch, evidence.incarnation) < (self._epoch, self._incarnation) or self.left:
            return []
        self.health.worse()
        if evidence.epoch > self._epoch or evidence.incarnation + 1 >= MAX_INCARNATION:
            return self.outbid(evidence.epoch + 1, now)
        self._incarnation = evidence.incarnation + 1
        self._announce(now)
        return []

    def outbid(self, epoch: int, now: float) -> list[Effect]:
        """Go on in a higher epoch."""
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

    def _changed(self, before: Member | None, after: Member, author: bytes, refused: bool, now: float) -> list[Effect]:
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
                self._buried.append(after.node)
        elif was != "suspect" or (before is not None and before.order[:2] != after.order[:2]):
            self._unreachable.discard(after.node)
            suspicion = Suspicion(self.config, self.table.present_count, author, now, refused)
            self._suspicions[after.node] = suspicion
            watch = self._watch(after.node, suspicion, now)
        if before is None:
            self._round.insert(after.node)
        if before is None or before.state != after.state or before.draining != after.draining:
            return [MemberChanged(after.node, after.state, was, after.draining), *watch]
        return watch

    def _watch(self, node: bytes, suspicion: Suspicion, now: float) -> list[Effect]:
        """Wait for what comes next to a suspect: to count as unreachable, then to be given up."""
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
        if now < self._calm_at:
            return [self._timer(_suspicion_timer(node), self._calm_at)]
        if now < suspicion.deadline:
            return self._watch(node, suspicion, now)
        verdict = Dead(node=node, epoch=member.epoch, incarnation=member.incarnation)
        return self.on_evidence(self.node, verdict, self._seal(verdict), now)

    def _reconcile_with_one(self, members: list[Member], unless_equal: bool, now: float) -> list[Effect]:
        if not members:
            return []
        chosen = self._rng.choice(members)
        return self.want_reconcile(chosen.node, chosen.host, chosen.port, unless_equal, now)

    def _anyone(self) -> list[Member]:
        return self.table.draw(1, self._rng, without=(self.node,))

    def _differs(self, member: Member, root: bytes, now: float) -> list[Effect]:
        """Reconcile when nobody has known just what we know for a while: until then rumours, which are cheaper, may settle it."""
        if root == self.root():
            self._differing_since = None
            return []
        if self._differing_since is None:
            self._differing_since = now
        if now - self._differing_since < self.config.settle_s and not self._overfull:
            return []
        self._differing_since = now
        return self.want_reconcile(member.node, member.host, member.port, False, now)

    @property
    def _overfull(self) -> bool:
        """Whether more news waits than the packets of `settle_s` can carry, as when all start at once: work for push-pulls."""
        config = self.config
        told = config.gossip_fanout * config.packet_bytes * config.settle_s / config.gossip_interval_s
        return self.rumours.waiting_bytes * self.rumours.rounds(len(self.table)) > told

    def root(self) -> bytes:
        """Of all that is known here, members and their records; it travels in every ping and ack."""
        return (self.table.root ^ self._records_root()).to_bytes(ROOT_BYTES, "big")

    def gossip_now(self, now: float) -> list[Effect]:
        return [*self._gossip(now), *self._gossip_soon(now)]

    def _gossip_soon(self, now: float) -> list[Effect]:
        """The next tick, if there is anything to tell; without news nothing ticks."""
        if self._gossiping or self.left or not len(self.rumours):
            return []
        self._gossiping = True
        return [self._timer("gossip", now + self.config.gossip_interval_s * self._rng.uniform(0.5, 1.0))]

    def _gossip(self, now: float) -> list[Effect]:
        if not len(self.rumours):
            return []
        chosen = self.table.draw(self.config.gossip_fanout, self._rng, without=(self.node,))
        dead = self._lately_dead(now)
        if dead:
            chosen.append(self._rng.choice(dead))
        effects: list[Effect] = []
        for member in chosen:
            gossip = self.rumours.take(self.config.packet_bytes - PACKET_OVERHEAD, len(self.table))
            if gossip:
                effects.append(self._send_whole(member, self._rumours(member, gossip)))
        return effects

    def _lately_dead(self, now: float) -> list[Member]:
        dead = [member for node in self._buried if (member := self.table.get(node)) is not None]
        dead = [member for member in dead if member.state == "dead" and now - member.since < DEAD_HEAR_S]
        self._buried = deque(member.node for member in dead)
        return dead

    # --- small things

    def _others(self) -> list[Member]:
        return [member for member in self.table.present() if member.node != self.node]

    def _rumours(self, member: Member, gossip: Gossip) -> Rumours:
        return Rumours(nonce=self._nonce(), root=self.root(), gossip=gossip)

    def _send(self, member: Member, packet: AnyPacket) -> SendPacket:
        """Send, with as many rumours as still fit."""
        if not len(self.rumours):
            return self._send_whole(member, packet)
        used = PACKET_OVERHEAD + sum(len(sealed) + ITEM_OVERHEAD for _, sealed in packet.gossip)
        more = self.rumours.take(self.config.packet_bytes - used, len(self.table))
        extra = tuple(item for item in more if item not in packet.gossip)
        return self._send_whole(member, replace(packet, gossip=packet.gossip + extra))

    def _send_whole(self, member: Member, packet: AnyPacket) -> SendPacket:
        return SendPacket(member.node, member.host, member.port, packet)

    def _ack(self, answers: int, gossip: Gossip = ()) -> Ack:
        return Ack(nonce=self._nonce(), root=self.root(), gossip=gossip, answers=answers, wall_unix=int(self._wall()))

    def _nonce(self) -> int:
        return self._rng.getrandbits(62)

    def _timer(self, name: str, at: float) -> SetTimer:
        self._count += 1
        self._tokens[name] = self._count
        return SetTimer(name, self._count, at)


def _suspicion_timer(node: bytes) -> str:
    return "suspect-" + node.hex()

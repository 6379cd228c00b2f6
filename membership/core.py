"""Membership core of one node, without I/O: packets, push-pulls, timers, and the node's own sections.

It combines the failure detector (`swim`), the published state (`records`) and the certificates (`trust`). It passes effects to
`perform`, in order. `node.py` runs it with sockets and a disk, `sim.protocol.membership` on a virtual network.
"""

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Generator
from random import Random
from typing import Protocol

import msgspec
from msgspec.structs import replace

from membership.addresses import address_group
from membership.bootstrap import Bootstrap
from membership.config import SwimConfig
from membership.effects import Effect, KeepChain, KeepRevocations, RecordChanged, SendPacket
from membership.envelope import EnvelopeError, Recent, UnknownSender
from membership.identity import ID_BYTES, NodeId
from membership.malformed import MALFORMED
from membership.paths import Paths
from membership.ratelimit import TokenBuckets
from membership.reconcile import (
    DELTA_BYTES,
    STRANGER_FRAME_BYTES,
    AnyFrame,
    Delta,
    Differs,
    Done,
    FrameError,
    Greeting,
    Hello,
    Renew,
    Renewed,
    Reply,
    StreamPing,
    decode_frame,
    encode_frame,
    introduction,
)
from membership.records import (
    MAX_BODY_BYTES,
    MAX_LIFE_S,
    MAX_SECTIONS,
    STATEMENTS,
    TRUST,
    Record,
    RecordTable,
    decode_body,
    decode_statements,
    encode_body,
)
from membership.swim import Swim, Verified
from membership.trust import Signer, TrustError, TrustStore, renew_chain
from membership.wire import (
    EPOCH_AHEAD_MS,
    MAX_EPOCH,
    MAX_EVIDENCE_BYTES,
    Ack,
    Alive,
    AnyEvidence,
    AnyPacket,
    Left,
    WireError,
    decode_evidence,
    decode_packet,
    encode,
)

GOSSIPED_RECORD_BYTES = 800  # larger ones wait for the next push-pull
UNKNOWN_RECONCILE_S = 0.5  # minimum interval of push-pulls caused by unknown nodes (own choice)
MANY_ITEMS = 4  # new items in one push-pull; so many mean that the mesh is still forming, not a lost rumour
SLICE = 16  # records and pieces of evidence applied at a time: 2 ms (own measurement)
# Of one member: all of a mesh of 500 nodes with 10,000 jobs at once, and then few, which cost 4 % of a core (own measurement).
MAX_ITEMS, ITEMS_S = 16_384, 500.0
MAX_UNKNOWN = 512  # unknown nodes whose evidence is kept until their certificate arrives
RECENT = 8192  # packets remembered
REMEMBERED = 4 * MAX_SECTIONS  # versions of own sections, most of them expired: 172 bytes each
TOLD_EVERY_S = 60.0  # that sections of this node are not published (own choice)
TRUST_TTL_S = 29 * 86_400.0  # longer than any other section, so that every section can be verified

MAX_RELAYED = 16  # sections of statements that a revoked node is sent

log = logging.getLogger(__name__)

StreamExchange = Generator[AnyFrame | None, tuple[NodeId, AnyFrame], AnyFrame | None]
"""One side of an exchange over a stream: yields frames to send, receives the answers, returns the last frame to send.

It yields None where other work should have a turn; `next` continues it.
"""


class Clock(Protocol):
    def boot(self) -> float:
        """Seconds of CLOCK_BOOTTIME."""

    def unix(self) -> float:
        """Seconds of wall time."""


class Sealer(Signer, Protocol):
    """Seals and opens envelopes: `membership.envelope.MeshSealer`, or the simulator's."""

    def open(self, kind: str, data: bytes) -> tuple[NodeId, bytes]: ...
    def seal_to(self, recipient: NodeId, payload: bytes) -> bytes: ...
    def open_addressed(self, data: bytes, resolve: Callable[[bytes], list[NodeId]]) -> tuple[NodeId, bytes]: ...


class Core:
    def __init__(
        self,
        sealer: Sealer,
        trust: TrustStore,
        chain: bytes,
        config: SwimConfig,
        rng: Random,
        clock: Clock,
        perform: Callable[[list[Effect]], None],
        *,
        host: str,
        port: int,
        epoch: int,
        zone_of: Callable[[NodeId], str] = lambda node: "",
        counters: Counter[str] | None = None,
    ) -> None:
        self.me = sealer.node_id
        self.trust = trust
        self.chain = chain
        self.counters = Counter() if counters is None else counters
        self.records = RecordTable(trust, lambda sealed: sealer.open("record", sealed))
        self._sealer, self._config, self._rng, self._clock, self._perform = sealer, config, rng, clock, perform
        self._epoch = epoch  # of the published sections
        self._versions: dict[str, int] = {}  # in the order of publication
        self._tell_at = 0.0
        self._packets = Recent(RECENT)
        self._unknown: OrderedDict[NodeId, list[bytes]] = OrderedDict()
        self._buckets = TokenBuckets(config.source_packets_s)
        self._items = TokenBuckets(ITEMS_S, MAX_ITEMS)  # of push-pulls, by member
        self.paths = Paths()
        # Callbacks for acks to the shell's own pings, by nonce.
        self.on_ack: dict[int, Callable[[], None]] = {}
        self._statements_published = 0
        self._unknown_reconcile_at = 0.0
        self.swim = Swim(
            self.me,
            host,
            port,
            epoch,
            config,
            rng,
            self._seal_evidence,
            lambda: self.records.root,
            wall=clock.unix,
            zone_of=zone_of,
        )

    def start(self) -> None:
        self._perform(self.swim.start(self._clock.boot()))
        self.publish(TRUST, self.chain, TRUST_TTL_S)
        self.publish_statements()

    # --- publishing

    def publish(self, section: str, body: bytes, ttl_s: float, urgent: bool = False) -> bool:
        """Replace a section of this node; a small one reaches the others within about a second.

        False if it is not published: this node has as many sections as others take.
        """
        not_after_unix = int(self._clock.unix() + ttl_s)
        known = self.records.get(self.me, section, self._clock.unix())
        if known is not None:
            not_after_unix = max(not_after_unix, known.not_after_unix)  # else the older one would outlive the newer
        # The older one may be of a time when this node's clock was ahead; then no other node has it.
        not_after_unix = min(not_after_unix, int(self._clock.unix() + MAX_LIFE_S))
        version = self._versions.get(section, 0) + 1
        payload = encode_body(self.swim.epoch, version, section, not_after_unix, body)
        applied = self.records.apply(self._sealer.seal("record", payload), self._clock.unix())
        if isinstance(applied, Record):
            self._remember(section, version)
            self._gossip_record(applied, urgent)
            self._perform([RecordChanged(applied.node, section)])
            return True
        if self._clock.boot() >= self._tell_at:
            self._tell_at = self._clock.boot() + TOLD_EVERY_S
            log.warning("this node's own section %s was not published: %s", section, applied)
        return False

    def _remember(self, section: str, version: int) -> None:
        """Remember a section's version; of too many, forget the older half of those that have expired."""
        self._versions.pop(section, None)
        self._versions[section] = version
        if len(self._versions) > REMEMBERED:
            unix = self._clock.unix()
            expired = [known for known in self._versions if self.records.get(self.me, known, unix) is None]
            for known in expired[: len(expired) // 2]:
                del self._versions[known]

    def publish_chain(self, chain: bytes | None = None) -> None:
        """Publish this node's certificates; a new chain replaces the current one.

        TrustError if it is not this node's, or makes it a machine of another user: their programs would count as its owner's.
        """
        if chain is not None and chain != self.chain:
            offered = self.trust.check_chain(chain, self._clock.unix())
            held = self.trust.seen().get(self.me, offered)
            if offered.node_id != self.me:
                raise TrustError("the answer has a certificate for another node")
            if offered.user_key not in {held.user_key, self.me}:
                raise TrustError(f"the answer makes this node a machine of another user, {offered.user!r}")
            self.trust.admit_chain(chain, self._clock.unix())
            self.chain = chain
            self._perform([KeepChain(chain)])
        self.publish(TRUST, self.chain, TRUST_TTL_S)

    def publish_own_chain(self) -> None:
        """Renew the certificate of this node, a founder, with its own key: no other node has to be there."""
        self.publish_chain(renew_chain(self._sealer, self.trust, self.chain, self.me, self._clock.unix()))

    def set_address(self, host: str, port: int) -> None:
        """Announce a new address of this node."""
        self._perform(self.swim.set_address(host, port, self._clock.boot()))

    def publish_statement(self, sealed: bytes) -> None:
        """Apply a founder's statement made on this node, and publish it."""
        if self.trust.admit_statement(sealed):
            self.publish_statements()

    def publish_statements(self, refresh: bool = False) -> None:
        """Write the founders' statements to disk, drop the members that they end, and publish them.

        Admitters publish all of them; another node those that nobody else's sections hold, since their author may be gone. With
        `refresh`, sections that have not changed are published again, before they expire.
        """
        sealed = list(self.trust.statements)
        self._statements_published = len(sealed)
        self._expel_former_members()
        if not sealed:
            return
        self._perform([KeepRevocations(sealed)])
        unix = self._clock.unix()
        me = self.trust.credentials(self.me, unix)
        if me is None or not me.can_admit:
            others = (r for r in self.records.section(STATEMENTS, unix) if r.node != self.me)
            held = {statement for record in others for statement in decode_statements(record.body)}
            sealed = [statement for statement in sealed if statement not in held]
        for number, part in enumerate(_in_sections(sealed)):
            body, known = msgspec.msgpack.encode(part), self.records.get(self.me, f"{STATEMENTS}{number}", unix)
            if refresh or known is None or known.body != body:
                self.publish(f"{STATEMENTS}{number}", body, TRUST_TTL_S)

    def expire(self) -> None:
        """Drop expired records, members gone for long, and members with an expired certificate."""
        dropped = self._expel_former_members()
        expired = self.records.expire(self._clock.unix())
        self._perform([RecordChanged(record.node, record.section) for record in expired])
        self.swim.forget_long_gone(self._clock.boot())
        if any(record.section.startswith(STATEMENTS) for record in (*dropped, *expired)):
            self.publish_statements()

    def _expel_former_members(self) -> list[Record]:
        """Drop nodes that are no members any more; return their records."""
        unix = self._clock.unix()
        revoked = (node for node in self.trust.revoked if self.swim.table.get(node) is not None)
        known = {*self.records.authors(), *(member.node for member in self.swim.table.present()), *revoked}
        former = [node for node in known if node != self.me and self.trust.credentials(node, unix) is None]
        return [record for node in former for record in self._expel(node)]

    # --- lane 1

    def on_datagram(self, data: bytes, source: tuple[str, int]) -> None:
        """Handle a UDP packet; whatever is invalid changes nothing and is counted by reason.

        All ports of a host share one limit, apart from that of its packets over TCP, whose source nobody can forge.
        """
        heard = self._open_packet(data, ("UDP", address_group(source[0])), source)
        if heard is None:
            return
        sender, packet = heard
        if isinstance(packet, Ack):
            self.paths.acked(sender, self._clock.boot())
        self._perform(self._on_packet(sender, packet, source))
        self._follow_epoch()

    def on_stream_packet(self, data: bytes, host: str) -> list[bytes] | None:
        """Handle a packet that came over TCP from this host; return the packets that answer it, None if it is refused.

        All connections of a host share one limit, so that a flood over many of them is refused as early as one over UDP.
        """
        heard = self._open_packet(data, address_group(host), None)
        if heard is None:
            return None
        sender, packet = heard
        self.paths.came_by_stream(sender, self._clock.boot())
        effects = self._on_packet(sender, packet, None)
        answers = [effect for effect in effects if isinstance(effect, SendPacket) and effect.to == sender]
        self._perform([effect for effect in effects if effect not in answers])
        self._follow_epoch()
        return [self.seal_packet(sender, answer.packet) for answer in answers]

    def _open_packet(
        self, data: bytes, bucket: object, source: tuple[str, int] | None
    ) -> tuple[NodeId, AnyPacket] | None:
        self.counters["packets_in"] += 1
        now, unix = self._clock.boot(), self._clock.unix()
        if not self._buckets.allow(bucket, now):
            self.counters["refused_flood"] += 1
            return None
        try:
            if len(data) > self._config.packet_bytes:
                raise WireError("over TCP a packet is no larger than over UDP")
            sender, payload = self._sealer.open_addressed(data, self.trust.with_tag)
            if sender in self.trust.revoked:
                self.counters["refused_revoked"] += 1
                return None
            if self.trust.credentials(sender, unix) is None:
                raise UnknownSender("the sender's certificate has expired")
            packet = decode_packet(payload)
        except UnknownSender:
            self.counters["refused_foreign"] += 1
            if source is not None:
                # An unknown member sends its certificate in a push-pull.
                self.want_reconcile(b"", *source, unproven=True)
            return None
        except (EnvelopeError, WireError):
            self.counters["refused_unsigned"] += 1
            return None
        if self._packets.seen_before(sender + packet.nonce.to_bytes(8, "big", signed=True)):
            self.counters["refused_replayed"] += 1
            return None
        return sender, packet

    def _on_packet(self, sender: NodeId, packet: AnyPacket, source: tuple[str, int] | None) -> list[Effect]:
        now = self._clock.boot()
        if isinstance(packet, Ack) and packet.answers in self.on_ack:
            self.on_ack.pop(packet.answers)()
        # Records first: they may hold the certificate of the evidence's author.
        unknown = len(self._unknown)
        for kind, sealed in packet.gossip:
            if kind == "record":
                self._apply_record(sealed, rumoured=True)
        found = [self._verify(sealed) for kind, sealed in packet.gossip if kind == "member"]
        evidence = [verified for verified in found if verified is not None]
        if len(self._unknown) > unknown and now >= self._unknown_reconcile_at:
            self._unknown_reconcile_at = now + UNKNOWN_RECONCILE_S
            member = self.swim.table.get(sender)
            if source is None and member is not None:
                source = member.host, member.port
            if source is not None:
                self.want_reconcile(sender, *source)  # the sender knows their certificates
        return self.swim.on_packet(sender, packet, evidence, now, source)

    @property
    def packet_bytes(self) -> int:
        return self._config.packet_bytes

    def seal_packet(self, to: NodeId, packet: AnyPacket) -> bytes:
        data = self._sealer.seal_to(to, encode(packet))
        assert len(data) <= self._config.packet_bytes, "M9: packets fit"
        self.counters["packets_out"] += 1
        return data

    def on_timer(self, name: str, token: int, at: float) -> None:
        """Handle a timer that was due `at`; a late one shows that this node stood still."""
        now = self._clock.boot()
        if now - at >= self._config.lag_s:
            self.counters["lags"] += 1
            self._perform(self.swim.on_lag(now - at, now))
        self._perform(self.swim.on_timer(name, token, now))

    def contact_candidates(self, bootstrap: Bootstrap) -> float:
        """Contact addresses that may belong to unknown members; return the seconds until the next attempt."""
        present = [(member.host, member.port) for member in self.swim.table.present()]
        addresses, interval_s = bootstrap.next(present)
        for host, port in addresses:
            self.want_reconcile(b"", host, port, unless_equal=len(present) > 1)
        return interval_s

    def want_reconcile(
        self, node: NodeId, host: str, port: int, unless_equal: bool = False, unproven: bool = False
    ) -> None:
        """Ask for a push-pull with the node at this address, unless there was one a moment ago."""
        self._perform(self.swim.want_reconcile(node, host, port, unless_equal, self._clock.boot(), unproven))

    # --- lane 2

    def push_pull(self, unless_equal: bool = False) -> StreamExchange:
        """Run a push-pull with the node that answers; `unless_equal`: compare roots first. TrustError for another mesh."""
        nonce = self.nonce()
        if unless_equal:
            _, answer = yield Greeting(nonce, self.swim.root())
            if isinstance(answer, Done) and answer.answers == nonce:
                return None
        sender, reply = yield Hello(nonce, self.chain, self.records.digest(), self._member_digest())
        if not isinstance(reply, Reply) or reply.answers != nonce:
            raise FrameError("the answer does not match the question")
        self._admit(sender, reply.chain)
        yield from self._apply_delta(sender, reply)
        yield self._delta(reply.nonce, reply)
        self.counters["reconciled"] += 1
        return None

    def answer(self, sender: NodeId, frame: AnyFrame) -> StreamExchange:
        """Answer an exchange that another node begins with `frame`."""
        if sender in self.trust.revoked:
            return self._answer_revoked(sender, frame)
        if isinstance(frame, StreamPing):
            return Done(0, frame.nonce)
        if isinstance(frame, Renew):
            return self._answer_renewal(sender, frame)
        if isinstance(frame, Greeting):
            equal = frame.root == self.swim.root() and self.trust.credentials(sender, self._clock.unix()) is not None
            if equal:
                return Done(0, frame.nonce)
            sender, frame = yield Differs(0, frame.nonce)
        if not isinstance(frame, Hello):
            raise FrameError("a push-pull starts with Hello")
        if (key := self.trust.revoked_in(frame.chain)) is not None:
            return self._answer_revoked(key, frame)  # a node that it came in through was revoked, and it may not know
        is_new = self.swim.table.get(sender) is None
        self._admit(sender, frame.chain)
        nonce = self.nonce()
        missing = self._delta(frame.nonce, frame)
        second_sender, delta = yield Reply(
            nonce,
            frame.nonce,
            self.chain,
            self.records.digest(),
            self._member_digest(),
            missing.records,
            missing.evidence,
        )
        if second_sender != sender or not isinstance(delta, Delta) or delta.answers != nonce:
            self.counters["refused_replayed"] += 1
            raise FrameError("the answer does not match the question")
        yield from self._apply_delta(sender, delta)
        certificate = self.records.get(sender, TRUST, self._clock.unix())
        if is_new and certificate is not None:
            self._perform(self.swim.introduce(sender, certificate.sealed))
        return Done(0, delta.nonce)

    def ask_renewal(self) -> StreamExchange:
        """Ask an admitter for a new certificate; TrustError with its reason if it refuses."""
        nonce = self.nonce()
        _, answer = yield Renew(nonce, self.chain)
        if not isinstance(answer, Renewed) or answer.answers != nonce:
            raise FrameError("the answer does not match the question")
        if not answer.chain:
            raise TrustError(answer.problem or "the answer has no certificate and no reason")
        self.publish_chain(answer.chain)
        return None

    def seal_frame(self, frame: AnyFrame) -> bytes:
        return self._sealer.seal("reconcile", encode_frame(frame))

    def open_frame(self, data: bytes) -> tuple[NodeId, AnyFrame]:
        """Verify and decode a frame. A large one of a node that is no member yet is decoded once its chain is verified."""
        sender, payload = self._sealer.open("reconcile", data)
        if len(payload) > STRANGER_FRAME_BYTES and not self.is_member(sender):
            hello = introduction(payload)
            if self.trust.revoked_in(hello.chain) is not None:
                return sender, hello  # it is told so
            self._admit(sender, hello.chain)
        return sender, decode_frame(payload)

    def nonce(self) -> int:
        return self._rng.getrandbits(62)

    def is_member(self, node: NodeId) -> bool:
        return self.trust.credentials(node, self._clock.unix()) is not None

    # --- internals

    def _seal_evidence(self, evidence: AnyEvidence) -> bytes:
        return self._sealer.seal("member", encode(evidence))

    def _expel(self, node: NodeId) -> list[Record]:
        dropped = self.records.drop(node)
        self._perform(self.swim.expel(node))
        self._perform([RecordChanged(record.node, record.section) for record in dropped])
        return dropped

    def _gossip_record(self, record: Record, urgent: bool) -> None:
        if len(record.sealed) <= GOSSIPED_RECORD_BYTES:
            self._perform(
                self.swim.gossip_record(record.node, record.section, record.sealed, self._clock.boot(), urgent)
            )

    def _apply_record(self, sealed: bytes, rumoured: bool) -> None:
        if sealed[1 : 1 + ID_BYTES] == self.me:
            self._outbid_earlier_run(sealed)
        applied = self.records.apply(sealed, self._clock.unix())
        if isinstance(applied, Record):
            self.counters["records_in"] += 1
            if rumoured:
                self._gossip_record(applied, urgent=False)
            if len(self.trust.statements) > self._statements_published:
                self.publish_statements()
            self._perform([RecordChanged(applied.node, applied.section)])
            for evidence in self._unknown.pop(applied.node, ()) if applied.section == TRUST else ():
                self._apply_evidence(evidence, rumoured)
            if applied.node == self.me:
                self._replace_earlier_run(applied.section)
        elif applied == "outlives" and (own := self._extended(sealed)) is not None:
            self.publish(own.section, own.body, own.not_after_unix - self._clock.unix())
        elif applied in {"invalid", "full"}:
            self.counters[f"record_{applied}"] += 1

    def _replace_earlier_run(self, section: str) -> None:
        """Replace a section of an earlier run that came back because this run's had expired."""
        known = self.records.get(self.me, section, self._clock.unix())
        if known is None or section not in self._versions or known.epoch >= self.swim.epoch:
            return
        if section == TRUST:
            self.publish_chain()
        elif section.startswith(STATEMENTS):
            self.publish(section, known.body, TRUST_TTL_S)
        else:
            self.publish(section, b"", 0.0)

    def _outbid_earlier_run(self, sealed: bytes) -> None:
        """Raise the epoch if a record of an earlier run has a higher one: the disk was lost and the clock is behind."""
        try:
            node, payload = self._sealer.open("record", sealed)
            body = decode_body(payload)
        except (EnvelopeError, *MALFORMED):
            return
        if node == self.me and self.swim.epoch < body.epoch < MAX_EPOCH - 1:
            self._perform(self.swim.outbid(body.epoch + 1, self._clock.boot()))
            self._follow_epoch()

    def _follow_epoch(self) -> None:
        """Publish every section again after the epoch was raised."""
        if self.swim.epoch == self._epoch:
            return
        self._epoch = self.swim.epoch
        unix = self._clock.unix()
        for section in list(self._versions):
            known = self.records.get(self.me, section, unix)
            if known is not None:
                self.publish(section, known.body, known.not_after_unix - unix)

    def _extended(self, sealed: bytes) -> Record | None:
        """Return this node's current record, extended to expire after this older version of it."""
        node, payload = self._sealer.open("record", sealed)
        older = decode_body(payload)
        own = self.records.get(self.me, older.section, self._clock.unix())
        return None if node != self.me or own is None else replace(own, not_after_unix=older.not_after_unix + 1)

    def _apply_evidence(self, sealed: bytes, rumoured: bool) -> None:
        verified = self._verify(sealed)
        if verified is not None:
            self._perform(self.swim.on_evidence(*verified, self._clock.boot(), rumoured=rumoured))
            self._follow_epoch()

    def _verify(self, sealed: bytes) -> Verified | None:
        """Return evidence whose author and subject are members, or that is about this node; None (counted) for anything else."""
        if len(sealed) > MAX_EVIDENCE_BYTES:
            self.counters["refused_implausible"] += 1  # it would be relayed, and fit into no packet
            return None
        try:
            author, payload = self._sealer.open("member", sealed)
            evidence = decode_evidence(author, payload)
        except (EnvelopeError, WireError):
            self.counters["refused_unsigned"] += 1
            return None
        unix = self._clock.unix()
        # An accusation counts only for an announcement. Its subject, whose clock may be behind, refutes what others accept.
        if isinstance(evidence, Alive | Left) and evidence.epoch > unix * 1000 + EPOCH_AHEAD_MS:
            self.counters["refused_implausible"] += 1
            return None
        # Whoever sent an accusation of this node believes it, so it is refuted even if its author is no member any more.
        for node in (author, evidence.node) if evidence.node != self.me else (self.me,):
            if self.trust.credentials(node, unix) is None:
                self.counters["unknown_author"] += 1
                if node not in self.trust.revoked:
                    self._keep_for_later(node, sealed)
                return None
        return author, evidence, sealed

    def _keep_for_later(self, node: NodeId, sealed: bytes) -> None:
        """Keep evidence about or by an unknown node until its certificate arrives."""
        kept = self._unknown.setdefault(node, [])
        if sealed not in kept and len(kept) < 4:
            kept.append(sealed)
        if len(self._unknown) > MAX_UNKNOWN:
            self._unknown.popitem(last=False)

    def _apply_delta(self, sender: NodeId, delta: Reply | Delta) -> Generator[None, object, None]:
        """Apply a few items at a time, so that a large frame holds up nothing else. FrameError for too many in a short time."""
        items = [("record", sealed) for sealed in delta.records] + [("member", sealed) for sealed in delta.evidence]
        if len(items) >= MANY_ITEMS:
            self._perform(self.swim.reconcile_soon(self._clock.boot()))
        for start in range(0, len(items), SLICE):
            part = items[start : start + SLICE]
            if not self._items.allow(sender, self._clock.boot(), len(part)):
                self.counters["refused_flood"] += 1
                raise FrameError("a member sends too much in its push-pulls")
            for kind, sealed in part:
                if kind == "record":
                    self._apply_record(sealed, rumoured=False)
                elif not self._has_announcement(sealed):
                    self._apply_evidence(sealed, rumoured=False)
            if len(part) == SLICE:
                yield None

    def _has_announcement(self, sealed: bytes) -> bool:
        """Tell whether this is the announcement that the table has of a member: it was verified, and push-pulls repeat it."""
        author = self.swim.table.get(sealed[1 : 1 + ID_BYTES])
        return author is not None and sealed == author.alive_sealed

    def _admit(self, sender: NodeId, chain: bytes) -> None:
        if self.trust.admit_chain(chain, self._clock.unix()).node_id != sender:
            raise TrustError("a node sent the certificate of another node")

    def _member_digest(self) -> list[tuple[bytes, int, int, int]]:
        return self.swim.digest(self._clock.boot())

    def _delta(self, answers: int, theirs: Hello | Reply) -> Delta:
        records = self.records.missing_from(theirs.digest, DELTA_BYTES, self._clock.unix())
        evidence = self.swim.evidence_missing_from(theirs.members, self._clock.boot())
        return Delta(self.nonce(), answers, records, evidence)

    def _answer_revoked(self, key: NodeId, frame: AnyFrame) -> Reply:
        """Send the statements about a revoked key, with their relay's certificate, and nothing else."""
        self.counters["refused_revoked"] += 1
        unix, about = self._clock.unix(), self.trust.statements_about(key)
        found: list[bytes] = []
        for record in self.records.section(STATEMENTS, unix):
            relay = self.records.get(record.node, TRUST, unix)
            if (
                relay is not None
                and about.intersection(decode_statements(record.body))
                and len(found) < 2 * MAX_RELAYED
            ):
                found += [relay.sealed, record.sealed]
        return Reply(self.nonce(), frame.nonce, self.chain, [], [], found, [])

    def _answer_renewal(self, sender: NodeId, frame: Renew) -> Renewed:
        try:
            self._admit(sender, frame.chain)
            chain = renew_chain(self._sealer, self.trust, self.chain, sender, self._clock.unix())
        except TrustError as error:
            self.counters["renewals_refused"] += 1
            return Renewed(self.nonce(), frame.nonce, b"", str(error))
        self.counters["renewals"] += 1
        return Renewed(self.nonce(), frame.nonce, chain, "")


def _in_sections(statements: list[bytes]) -> list[list[bytes]]:
    """Divide statements into sections, in order, so that a new one changes only the last section."""
    parts: list[list[bytes]] = []
    room = 0
    for sealed in statements:
        room -= len(sealed) + 3  # the header of a binary in MessagePack
        if room < 0:
            parts.append([])
            room = MAX_BODY_BYTES - 3 - len(sealed) - 3
        parts[-1].append(sealed)
    return parts

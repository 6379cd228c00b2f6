"""A node's membership whole, without I/O: what it does with packets, push-pulls, timers and its own news.

`swim` is who is there, `records` what they say of themselves, `trust` who may. Everything that is to happen outside is
an effect, given to `perform` in order. `node.py` gives this sockets and a disk, `sim.gossip` a virtual network.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Generator
from random import Random
from typing import Protocol

import msgspec
from msgspec.structs import replace

from membership.buckets import Buckets
from membership.config import SwimConfig
from membership.effects import Effect, KeepChain, KeepRevocations, RecordChanged
from membership.envelope import EnvelopeError, Recent, UnknownSender
from membership.identity import NodeId
from membership.reconcile import (
    DELTA_BYTES,
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
)
from membership.records import REVOKED, TRUST, Record, RecordTable, decode_body, encode_body
from membership.search import Search
from membership.swim import Swim, Verified
from membership.trust import Signer, TrustError, TrustStore, renew_chain
from membership.wire import (
    EPOCH_AHEAD_MS,
    MAX_EPOCH,
    Ack,
    AnyEvidence,
    AnyPacket,
    WireError,
    decode_evidence,
    decode_packet,
    encode,
)

GOSSIPED_RECORD_BYTES = 800  # larger ones wait for the next push-pull
HURRY_PAUSE_S = 0.5  # between two push-pulls to learn of strangers; ours
MUCH_NEWS = 4  # in one push-pull: not a rumour that was missed, but a mesh that is just coming together
STRANGERS_KEPT = 512  # pieces of evidence that wait for a certificate
RECENT = 8192
TRUST_TTL_S = 29 * 86_400.0  # longer than any other section lives, so that all others can be verified

Conversation = Generator[AnyFrame, tuple[NodeId, AnyFrame], AnyFrame | None]
"""One side of an exchange over a stream: yields what to send, is sent what came back, returns what to send last."""


class Clock(Protocol):
    def boot(self) -> float:
        """Seconds of CLOCK_BOOTTIME."""

    def unix(self) -> float:
        """Seconds of wall time."""


class Sealer(Signer, Protocol):
    """`membership.envelope.Seals`, or the simulator's."""

    def open(self, kind: str, data: bytes) -> tuple[NodeId, bytes]: ...
    def seal_to(self, recipient: NodeId, payload: bytes) -> bytes: ...
    def open_addressed(self, data: bytes, resolve: Callable[[bytes], list[NodeId]]) -> tuple[NodeId, bytes]: ...


class Core:
    def __init__(
        self,
        seals: Sealer,
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
        self.me = seals.node_id
        self.trust = trust
        self.chain = chain
        self.counters = Counter() if counters is None else counters
        self.records = RecordTable(trust, lambda sealed: seals.open("record", sealed))
        self._seals, self._config, self._rng, self._clock, self._perform = seals, config, rng, clock, perform
        self._epoch = epoch  # of the sections we have published
        self._versions: dict[str, int] = {}
        self._packets = Recent(RECENT)
        self._evidence = Recent(RECENT)
        self._strangers: OrderedDict[NodeId, list[bytes]] = OrderedDict()
        self._buckets = Buckets(config.source_packets_s)
        self.echoes: dict[
            int, Callable[[], None]
        ] = {}  # by nonce: whom to tell that a ping of the shell's was answered
        self._revocations_shown = 0
        self._hurry_at = 0.0
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
        self.show_revocations()

    # --- our own news

    def publish(self, section: str, body: bytes, ttl_s: float, urgent: bool = False) -> None:
        """Replace our own section; others have it within about a second if it is small."""
        ends = int(self._clock.unix() + ttl_s)
        known = self.records.get(self.me, section, self._clock.unix())
        if known is not None:
            ends = max(ends, known.not_after_unix)  # else the older one would come back where the newer has ended
        version = self._versions.get(section, 0) + 1
        payload = encode_body(self.swim.epoch, version, section, ends, body)
        applied = self.records.apply(self._seals.seal("record", payload), self._clock.unix())
        if isinstance(applied, Record):
            self._versions[section] = version
            self._spread(applied, urgent)
            self._perform([RecordChanged(applied.node, section)])

    def show_chain(self, chain: bytes | None = None) -> None:
        """Our certificates, to everybody; a new chain replaces the one we had."""
        if chain is not None and chain != self.chain:
            self.trust.admit_chain(chain, self._clock.unix())
            self.chain = chain
            self._perform([KeepChain(chain)])
        self.publish(TRUST, self.chain, TRUST_TTL_S)

    def move(self, host: str, port: int) -> None:
        """We are at another address now."""
        self._perform(self.swim.set_address(host, port, self._clock.boot()))

    def revoke(self, sealed: bytes) -> None:
        """Take in a revocation made here, and show it to everybody."""
        if self.trust.admit_revocation(sealed, self._clock.unix()):
            self.show_revocations()

    def show_revocations(self) -> None:
        """Keep what is revoked on disk, and pass it on as our own section: its author may be gone when it is needed."""
        sealed = [data for _, data in self.trust.revocations.values()]
        self._revocations_shown = len(sealed)
        for node in self.trust.revoked - {self.me}:
            self._expel(node)
        if sealed:
            self._perform([KeepRevocations(sealed)])
            self.publish(REVOKED, msgspec.msgpack.encode(sealed), TRUST_TTL_S)

    def forget_the_old(self) -> None:
        """What has expired, who has been gone for long, and whose certificate has ended."""
        unix = self._clock.unix()
        for node in {*self.records.authors(), *(member.node for member in self.swim.table.present())}:
            if node != self.me and self.trust.standing(node, unix) is None:
                self._expel(node)
        gone = self.records.expire(unix)
        self._perform([RecordChanged(record.node, record.section) for record in gone])
        self.swim.forget_long_gone(self._clock.boot())

    # --- lane 1

    def on_datagram(self, data: bytes, source: tuple[str, int]) -> None:
        self.counters["packets_in"] += 1
        now, unix = self._clock.boot(), self._clock.unix()
        if not self._buckets.admit(source, now):
            self.counters["refused_flood"] += 1
            return
        try:
            sender, payload = self._seals.open_addressed(data, self.trust.with_tag)
            if sender in self.trust.revoked:
                self.counters["refused_revoked"] += 1
                return
            if self.trust.standing(sender, unix) is None:
                raise UnknownSender("its certificate has ended")
            packet = decode_packet(payload)
        except UnknownSender:
            self.counters["refused_foreign"] += 1
            self.want_reconcile(b"", *source)  # a member that we have not met shows its certificate there
            return
        except (EnvelopeError, WireError):
            self.counters["refused_unsigned"] += 1
            return
        if self._packets.seen_before(sender + packet.nonce.to_bytes(8, "big", signed=True)):
            self.counters["refused_replayed"] += 1
            return
        if isinstance(packet, Ack) and packet.answers in self.echoes:
            self.echoes.pop(packet.answers)()
        # Records first: a newcomer's certificate rides with its first word.
        strangers = len(self._strangers)
        for kind, sealed in packet.gossip:
            if kind == "record":
                self._take_record(sealed, rumoured=True)
        found = [self._verified(sealed) for kind, sealed in packet.gossip if kind == "member"]
        evidence = [verified for verified in found if verified is not None]
        if len(self._strangers) > strangers and now >= self._hurry_at:
            self._hurry_at = now + HURRY_PAUSE_S
            self.want_reconcile(sender, *source)  # who tells of strangers knows their certificates
        self._perform(self.swim.on_packet(sender, packet, evidence, now, source))
        self._follow_epoch()

    def seal_packet(self, to: NodeId, packet: AnyPacket) -> bytes:
        data = self._seals.seal_to(to, encode(packet))
        assert len(data) <= self._config.packet_bytes, "M9: packets fit"
        self.counters["packets_out"] += 1
        return data

    def on_timer(self, name: str, token: int, at: float) -> None:
        """A timer that was due `at`; one that comes late tells that this node stood still."""
        now = self._clock.boot()
        if now - at >= self._config.lag_s:
            self.counters["lags"] += 1
            self._perform(self.swim.on_lag(now - at, now))
        self._perform(self.swim.on_timer(name, token, now))

    def look_for_others(self, search: Search) -> float:
        """Knock where somebody may be whom we do not know; seconds until it is time to look again."""
        present = [(member.host, member.port) for member in self.swim.table.present()]
        addresses, pause_s = search.next(present)
        for host, port in addresses:
            self.want_reconcile(b"", host, port, unless_equal=len(present) > 1)
        return pause_s

    def want_reconcile(self, node: NodeId, host: str, port: int, unless_equal: bool = False) -> None:
        """Ask for a push-pull with whoever is there, unless there was one a moment ago."""
        self._perform(self.swim.want_reconcile(node, host, port, unless_equal, self._clock.boot()))

    # --- lane 2

    def converse(self, unless_equal: bool = False) -> Conversation:
        """A push-pull with whoever answers, if it is of our mesh; `unless_equal`: compare roots first."""
        nonce = self.nonce()
        if unless_equal:
            _, answer = yield Greeting(nonce, self.swim.root())
            if isinstance(answer, Done) and answer.answers == nonce:
                return None
        sender, reply = yield Hello(nonce, self.chain, self.records.digest(), self._members())
        if not isinstance(reply, Reply) or reply.answers != nonce:
            raise FrameError("an answer to something else")
        self._admit(sender, reply.chain)
        self._take_in(reply.records, reply.evidence)
        yield self._delta(reply.nonce, reply)
        self.counters["reconciled"] += 1
        return None

    def answer(self, sender: NodeId, frame: AnyFrame) -> Conversation:
        """The other side of every exchange that somebody begins with `frame`."""
        if sender in self.trust.revoked:
            return self._farewell(frame)
        if isinstance(frame, StreamPing):
            return Done(0, frame.nonce)
        if isinstance(frame, Renew):
            return self._renewed(sender, frame)
        if isinstance(frame, Greeting):
            equal = frame.root == self.swim.root() and self.trust.standing(sender, self._clock.unix()) is not None
            if equal:
                return Done(0, frame.nonce)
            sender, frame = yield Differs(0, frame.nonce)
        if not isinstance(frame, Hello):
            raise FrameError("a push-pull starts with Hello")
        self._admit(sender, frame.chain)
        nonce = self.nonce()
        missing = self._delta(frame.nonce, frame)
        again, delta = yield Reply(
            nonce,
            frame.nonce,
            self.chain,
            self.records.digest(),
            self._members(),
            missing.records,
            missing.evidence,
        )
        if again != sender or not isinstance(delta, Delta) or delta.answers != nonce:
            self.counters["refused_replayed"] += 1
            raise FrameError("an answer to something else")
        self._take_in(delta.records, delta.evidence)
        return Done(0, delta.nonce)

    def ask_renewal(self) -> Conversation:
        """Ask one who may admit for a new certificate; TrustError with its reason if it gives none."""
        nonce = self.nonce()
        _, answer = yield Renew(nonce, self.chain)
        if not isinstance(answer, Renewed) or answer.answers != nonce:
            raise FrameError("an answer to something else")
        if not answer.chain:
            raise TrustError(answer.problem or "it gave no certificate")
        if self.trust.check_chain(answer.chain, self._clock.unix()).node_id != self.me:
            raise TrustError("it gave a certificate for somebody else")
        self.show_chain(answer.chain)
        return None

    def seal_frame(self, frame: AnyFrame) -> bytes:
        return self._seals.seal("reconcile", encode_frame(frame))

    def open_frame(self, data: bytes) -> tuple[NodeId, AnyFrame]:
        sender, payload = self._seals.open("reconcile", data)
        return sender, decode_frame(payload)

    def nonce(self) -> int:
        return self._rng.getrandbits(62)

    def is_member(self, node: NodeId) -> bool:
        return self.trust.standing(node, self._clock.unix()) is not None

    # --- within

    def _seal_evidence(self, evidence: AnyEvidence) -> bytes:
        return self._seals.seal("member", encode(evidence))

    def _expel(self, node: NodeId) -> None:
        gone = self.records.drop(node)
        self._perform(self.swim.expel(node))
        self._perform([RecordChanged(record.node, record.section) for record in gone])

    def _spread(self, record: Record, urgent: bool) -> None:
        if len(record.sealed) <= GOSSIPED_RECORD_BYTES:
            self._perform(self.swim.tell(record.node, record.section, record.sealed, self._clock.boot(), urgent))

    def _take_record(self, sealed: bytes, rumoured: bool) -> None:
        if sealed[1:33] == self.me:
            self._outbid_former_life(sealed)
        applied = self.records.apply(sealed, self._clock.unix())
        if isinstance(applied, Record):
            self.counters["records_in"] += 1
            if rumoured:
                self._spread(applied, urgent=False)
            if applied.section == REVOKED and len(self.trust.revocations) > self._revocations_shown:
                self.show_revocations()
            self._perform([RecordChanged(applied.node, applied.section)])
            for waiting in self._strangers.pop(applied.node, ()) if applied.section == TRUST else ():
                self._take_evidence(waiting, rumoured)
            if applied.node == self.me:
                self._take_back(applied.section)
        elif applied == "outlives" and (mine := self._outlived(sealed)) is not None:
            self.publish(mine.section, mine.body, mine.not_after_unix - self._clock.unix())
        elif applied in {"invalid", "full"}:
            self.counters[f"record_{applied}"] += 1

    def _take_back(self, section: str) -> None:
        """Ours had ended, and what a former life said had not: end that too."""
        known = self.records.get(self.me, section, self._clock.unix())
        if known is None or section not in self._versions or known.epoch >= self.swim.epoch:
            return
        if section == TRUST:
            self.show_chain()
        elif section == REVOKED:
            self.show_revocations()
        else:
            self.publish(section, b"", 0.0)

    def _outbid_former_life(self, sealed: bytes) -> None:
        """Our disk was lost and our clock is behind: what we said before would outrank what we say now."""
        try:
            node, payload = self._seals.open("record", sealed)
            body = decode_body(payload)
        except (EnvelopeError, msgspec.MsgspecError, UnicodeDecodeError):
            return
        if node == self.me and self.swim.epoch < body.epoch < MAX_EPOCH - 1:
            self._perform(self.swim.outbid(body.epoch + 1, self._clock.boot()))
            self._follow_epoch()

    def _follow_epoch(self) -> None:
        """After an outbid, say all that we have to say once more, in the new epoch."""
        if self.swim.epoch == self._epoch:
            return
        self._epoch = self.swim.epoch
        unix = self._clock.unix()
        for section in self._versions:
            known = self.records.get(self.me, section, unix)
            if known is not None:
                self.publish(section, known.body, known.not_after_unix - unix)

    def _outlived(self, sealed: bytes) -> Record | None:
        """Our present record, made to end when this older one of ours does."""
        node, payload = self._seals.open("record", sealed)
        older = decode_body(payload)
        mine = self.records.get(self.me, older.section, self._clock.unix())
        return None if node != self.me or mine is None else replace(mine, not_after_unix=older.not_after_unix + 1)

    def _take_evidence(self, sealed: bytes, rumoured: bool) -> bool:
        """Whether it could be verified."""
        verified = self._verified(sealed)
        if verified is None:
            return False
        self._perform(self.swim.on_evidence(*verified, self._clock.boot(), rumoured=rumoured))
        self._follow_epoch()
        return True

    def _verified(self, sealed: bytes) -> Verified | None:
        """Evidence whose author and subject are members; None (counted) for anything else."""
        try:
            author, payload = self._seals.open("member", sealed)
            evidence = decode_evidence(author, payload)
        except (EnvelopeError, WireError):
            self.counters["refused_unsigned"] += 1
            return None
        unix = self._clock.unix()
        if evidence.epoch > unix * 1000 + EPOCH_AHEAD_MS:
            self.counters["refused_implausible"] += 1  # else one lie could leave its subject no life to answer with
            return None
        for node in (author, evidence.node):
            if self.trust.standing(node, unix) is None:
                self.counters["unknown_author"] += 1
                if node not in self.trust.revoked:
                    self._keep_for_later(node, sealed)
                return None
        return author, evidence, sealed

    def _keep_for_later(self, node: NodeId, sealed: bytes) -> None:
        """Its certificate is on the way; until then this waits, a little of it."""
        waiting = self._strangers.setdefault(node, [])
        if sealed not in waiting and len(waiting) < 4:
            waiting.append(sealed)
        if len(self._strangers) > STRANGERS_KEPT:
            self._strangers.popitem(last=False)

    def _take_in(self, records: list[bytes], evidence: list[bytes]) -> None:
        if len(records) + len(evidence) >= MUCH_NEWS:
            self._perform(self.swim.hurry(self._clock.boot()))
        for sealed in records:
            self._take_record(sealed, rumoured=False)
        for sealed in evidence:
            if sealed not in self._evidence and self._take_evidence(sealed, rumoured=False):
                self._evidence.seen_before(sealed)

    def _admit(self, sender: NodeId, chain: bytes) -> None:
        if self.trust.admit_chain(chain, self._clock.unix()).node_id != sender:
            raise TrustError("a node showed the certificate of another one")

    def _members(self) -> list[tuple[bytes, int, int, int]]:
        return self.swim.digest(self._clock.boot())

    def _delta(self, answers: int, theirs: Hello | Reply) -> Delta:
        records = self.records.missing_from(theirs.digest, DELTA_BYTES, self._clock.unix())
        evidence = self.swim.evidence_missing_from(theirs.members, self._clock.boot())
        return Delta(self.nonce(), answers, records, evidence)

    def _farewell(self, frame: AnyFrame) -> Reply:
        """To one who was shut out: that it was, and nothing else."""
        self.counters["refused_revoked"] += 1
        shown = self.records.get(self.me, REVOKED, self._clock.unix())
        return Reply(self.nonce(), frame.nonce, self.chain, [], [], [shown.sealed] if shown is not None else [], [])

    def _renewed(self, sender: NodeId, frame: Renew) -> Renewed:
        try:
            self._admit(sender, frame.chain)
            chain = renew_chain(self._seals, self.trust, self.chain, sender, self._clock.unix())
        except TrustError as error:
            self.counters["renewals_refused"] += 1
            return Renewed(self.nonce(), frame.nonce, b"", str(error))
        self.counters["renewals"] += 1
        return Renewed(self.nonce(), frame.nonce, chain, "")

"""The asyncio shell of membership: sockets, timers, push-pulls, disk. Every decision is made in the cores.

Lane 1 is UDP on `port`, lane 2 TCP on the same number. Nothing that is not signed by a member of this mesh changes
anything here; what is refused is counted by reason.
"""

import asyncio
import errno
import logging
import random
import time
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path

import msgspec

from membership import pushpull
from membership.config import SwimConfig
from membership.discovery import MdnsBeacon, MdnsConfig, advertised_address, parse_seed
from membership.effects import (
    Effect,
    MemberChanged,
    PersistEpoch,
    SendPacket,
    SetTimer,
    StreamPing,
    WantReconcile,
)
from membership.envelope import EnvelopeError, Recent, UnknownSender, open_addressed, open_envelope, seal, seal_to
from membership.identity import Identity, NodeId, short_id
from membership.pushpull import boottime
from membership.records import REVOKED, Record, RecordTable, encode_body
from membership.snapshot import Peer, RevocationFile, Snapshot, SnapshotFile, next_epoch
from membership.swim import Swim, Verified
from membership.trust import TrustError, TrustStore
from membership.wire import WireError, decode_evidence, decode_packet, encode

EVENT_QUEUE = 1024  # events a slow subscriber may be behind; then it gets EventsLost
GOSSIPED_RECORD_BYTES = 800  # larger ones wait for the next push-pull
RECONCILE_PAUSE_S = 0.3  # between two push-pulls with one peer
HURRY_PAUSE_S = 0.5  # between two push-pulls to learn of strangers; ours
RECONCILES_AT_ONCE = 32  # forged packets must not make us call half the world
JOIN_BACKOFF_S = (0.3, 15.0)  # first and longest pause between tries to find somebody
KNOCKS_AT_ONCE = 3  # a mesh of hundreds is remembered, and each answer tells of all of it
HEALTHY_SEARCH_S = 15.0  # a node that has company still looks for strangers, so that islands meet

log = logging.getLogger(__name__)


class PortInUse(RuntimeError):
    """Another program has the port; the text says which and what to do."""


class MemberView(msgspec.Struct, frozen=True):
    node_id: bytes
    nick: str
    user: str
    state: str
    draining: bool
    host: str
    port: int
    epoch: int
    incarnation: int
    since_unix: float


class RecordChanged(msgspec.Struct, frozen=True):
    node: bytes
    section: str


class EventsLost(msgspec.Struct, frozen=True):
    count: int


MembershipEvent = MemberChanged | RecordChanged | EventsLost


class Subscription:
    """A bounded queue of events; what does not fit is dropped and told as EventsLost."""

    def __init__(self) -> None:
        self._events: deque[MembershipEvent] = deque()
        self._lost = 0
        self._wake = asyncio.Event()

    def put(self, event: MembershipEvent) -> None:
        if len(self._events) >= EVENT_QUEUE:
            self._lost += 1
        else:
            self._events.append(event)
        self._wake.set()

    async def get(self) -> MembershipEvent:
        while not self._events:
            if self._lost:
                lost, self._lost = self._lost, 0
                return EventsLost(lost)
            self._wake.clear()
            await self._wake.wait()
        return self._events.popleft()


class MembershipNode:
    def __init__(
        self,
        identity: Identity,
        trust: TrustStore,
        own_chain: bytes,
        config: SwimConfig,
        state_dir: Path,
        *,
        bind_host: str,
        port: int,
        advertise_host: str | None = None,
        seeds: Sequence[str] = (),
        mdns: MdnsConfig | None = None,
        default_port: int = 7373,
        rng: random.Random | None = None,
    ) -> None:
        self.identity = identity
        self.trust = trust
        self.config = config
        self.port = port
        self.host = ""
        self.counters: Counter[str] = Counter()
        self.problem = ""
        self._chain = own_chain
        self._bind_host = bind_host
        self._advertise_host = advertise_host
        self._seeds = [parse_seed(seed, default_port) for seed in seeds]
        self._mdns_config = mdns
        self._beacon: MdnsBeacon | None = None
        self._snapshots = SnapshotFile(state_dir / "snapshot.json")
        self._snapshot = Snapshot()
        self._revocations = RevocationFile(state_dir / "revoked")
        self._rng = rng or random.Random()  # timing and choice, not secrets
        self._swim: Swim | None = None
        self._records = RecordTable(trust)
        self._versions: dict[str, int] = {}
        self._packets = Recent(8192)
        self._gossip_seen = Recent(8192)
        self._subscriptions: list[Subscription] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._revocations_shown = 0
        self._reconciling = 0
        self._hurry_at = 0.0
        self._reconciled: dict[tuple[str, int], float] = {}
        self._candidates: dict[tuple[str, int], NodeId | None] = {}
        self._transport: asyncio.DatagramTransport | None = None
        self._server: asyncio.Server | None = None
        self._push_pull = pushpull.PushPull(
            identity,
            trust,
            own_chain,
            self._records,
            self.counters,
            self._rng,
            lambda: self._core,
            self._take_in,
        )
        self._epoch = 0
        self._stopped = False

    # --- life

    async def start(self) -> None:
        """Bind, take a new epoch, announce, search. PortInUse or TrustError if that cannot be."""
        now_unix = time.time()
        self.standing = self.trust.admit_chain(self._chain, now_unix)
        if self.standing.node_id != self.identity.node_id:
            raise TrustError("this node's certificate is for another key: run `mesh join INVITE` again")
        await self._bind()
        towards = self._seeds[0][0] if self._seeds else None
        self.host = self._advertise_host or advertised_address(self._bind_host, towards)
        await asyncio.to_thread(self._revocations.read_into, self.trust, now_unix)
        if self.identity.node_id in self.trust.revoked:
            raise TrustError("this node's key was revoked: ask for an invite, and join with a new --state")
        self._snapshot = await asyncio.to_thread(self._snapshots.read)
        if self._snapshots.warning:
            self.problem = self._snapshots.warning
        self._epoch = next_epoch(self._snapshot.epoch, int(now_unix * 1000))
        await self._persist(self._epoch)
        self._swim = Swim(
            self.identity.node_id,
            self.host,
            self.port,
            self._epoch,
            self.config,
            self._rng,
            lambda evidence: seal(self.identity, self.trust.mesh_id, "member", encode(evidence)),
            self._records.root,
        )
        self._perform(self._swim.start(boottime()))
        self.publish("trust", self._chain, ttl_s=86_400)
        self._show_revocations()
        if self._mdns_config is not None:
            self._beacon = MdnsBeacon(
                self._mdns_config,
                self.identity.node_id,
                self.standing.nick,
                self.trust.mesh_id,
                self.host,
                self.port,
                self._found,
            )
        self._spawn(self._search(), "search")
        self._spawn(self._look_after(), "upkeep")

    async def stop(self) -> None:
        """Stop without a word: to the others this is a crash. `leave` first to go in order."""
        self._stopped = True
        for timer in self._timers.values():
            timer.cancel()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._beacon is not None:
            await self._beacon.stop()
        if self._transport is not None:
            self._transport.close()
        if self._server is not None:
            self._server.close()

    async def leave(self) -> None:
        """Tell everybody that this node goes; three farewells to each, spread over 0.2 s."""
        if self._swim is None or self._swim.left:
            return
        effects = self._swim.leave(boottime())
        third = max(1, len(effects) // 3)
        for start in range(0, len(effects), third):
            self._perform(effects[start : start + third])
            await asyncio.sleep(0.07)
        await asyncio.to_thread(self._save_peers)

    def revoke(self, sealed: bytes) -> None:
        """Take in a revocation made here, and show it to everybody."""
        if self.trust.admit_revocation(sealed, time.time()):
            self._show_revocations()

    def set_draining(self, draining: bool) -> None:
        self._perform(self._core.set_draining(draining, boottime()))

    # --- what others use

    def members(self) -> list[MemberView]:
        """Everybody known, ourselves included."""
        now, now_unix = boottime(), time.time()
        views = []
        seen = self.trust.seen()
        for member in self._core.table.all():
            standing = seen.get(member.node)
            views.append(
                MemberView(
                    node_id=member.node,
                    nick=standing.nick if standing is not None else short_id(member.node),
                    user=standing.user if standing is not None else "",
                    state="revoked" if member.node in self.trust.revoked else member.state,
                    draining=member.draining,
                    host=member.host,
                    port=member.port,
                    epoch=member.epoch,
                    incarnation=member.incarnation,
                    since_unix=now_unix - (now - member.since),
                )
            )
        return sorted(views, key=lambda view: (view.nick, view.node_id))

    def publish(self, section: str, body: bytes, ttl_s: float) -> None:
        """Replace our own section; others have it within about a second if it is small."""
        version = self._versions.get(section, 0) + 1
        self._versions[section] = version
        payload = encode_body(self._epoch, version, section, int(time.time() + ttl_s), body)
        sealed = seal(self.identity, self.trust.mesh_id, "record", payload)
        applied = self._records.apply(sealed, time.time())
        if isinstance(applied, Record):
            self._spread(applied)
            self._tell(RecordChanged(applied.node, section))

    def withdraw(self, section: str) -> None:
        """An empty section, which ends soon."""
        if self._records.get(self.identity.node_id, section) is not None:
            self.publish(section, b"", ttl_s=300)

    def records(self, prefix: str) -> list[Record]:
        return [record for record in self._records.section(prefix) if record.body]

    def record(self, node: NodeId, section: str) -> Record | None:
        record = self._records.get(node, section)
        return record if record is not None and record.body else None

    def subscribe(self) -> Subscription:
        subscription = Subscription()
        self._subscriptions.append(subscription)
        return subscription

    @property
    def _core(self) -> Swim:
        if self._swim is None:
            raise RuntimeError("the membership node has not been started")
        return self._swim

    # --- effects

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case SendPacket():
                    self._send_packet(effect)
                case SetTimer(name=name, token=token, at=at):
                    self._set_timer(name, token, at)
                case StreamPing():
                    self._spawn(self._stream_ping(effect), f"tcp ping {short_id(effect.node)}")
                case WantReconcile():
                    self._want_reconcile(effect.host, effect.port, effect.unless_equal)
                case MemberChanged():
                    self._tell(effect)
                case PersistEpoch(epoch=epoch):
                    self._epoch = epoch
                    self._spawn(self._persist(epoch), "persist epoch")

    def _send_packet(self, effect: SendPacket) -> None:
        data = seal_to(self.identity, self.trust.mesh_id, "swim", effect.to, encode(effect.packet))
        assert len(data) <= self.config.packet_bytes, "M9: packets fit"
        if self._transport is not None and not self._transport.is_closing():
            self.counters["packets_out"] += 1
            self._transport.sendto(data, (effect.host, effect.port))

    def _set_timer(self, name: str, token: int, at: float) -> None:
        old = self._timers.pop(name, None)
        if old is not None:
            old.cancel()
        if not self._stopped:
            loop = asyncio.get_running_loop()
            self._timers[name] = loop.call_later(max(0.0, at - boottime()), self._fire, name, token, at)

    def _fire(self, name: str, token: int, at: float) -> None:
        now = boottime()
        if now - at >= self.config.lag_s:
            self.counters["lags"] += 1
            self._perform(self._core.on_lag(now - at, now))
        self._perform(self._core.on_timer(name, token, now))

    async def _stream_ping(self, effect: StreamPing) -> None:
        outcome = await self._push_pull.ping(effect.node, effect.host, effect.port, self.config.probe_interval_s)
        self.counters[f"tcp_pings_{outcome}"] += 1
        self._perform(self._core.on_stream_ping(effect.node, outcome, boottime()))

    def _tell(self, event: MembershipEvent) -> None:
        for subscription in self._subscriptions:
            subscription.put(event)

    def _spread(self, record: Record) -> None:
        if len(record.sealed) <= GOSSIPED_RECORD_BYTES and self._swim is not None:
            self._swim.rumours.add("record", record.node + record.section.encode(), record.sealed)

    def _take_record(self, sealed: bytes, rumoured: bool) -> None:
        applied = self._records.apply(sealed, time.time())
        if isinstance(applied, Record):
            self.counters["records_in"] += 1
            if rumoured:
                self._spread(applied)
            if applied.section == REVOKED and len(self.trust.revocations) > self._revocations_shown:
                self._show_revocations()
            self._tell(RecordChanged(applied.node, applied.section))
        elif applied in {"invalid", "full"}:
            self.counters[f"record_{applied}"] += 1

    def _show_revocations(self) -> None:
        """Keep what is revoked on disk, and pass it on as our own section: its author may be gone when it is needed."""
        sealed = [data for _, data in self.trust.revocations.values()]
        self._revocations_shown = len(sealed)
        if sealed:
            self._spawn(asyncio.to_thread(self._revocations.write, sealed), "keep revocations")
            self.publish(REVOKED, msgspec.msgpack.encode(sealed), ttl_s=86_400)
        if self.identity.node_id in self.trust.revoked:
            self.problem = "this node's key was revoked by the mesh's founder"

    # --- lane 1

    def _on_datagram(self, data: bytes, source: tuple[str, int]) -> None:
        self.counters["packets_in"] += 1
        try:
            sender, payload = open_addressed(
                data, self.trust.mesh_id, "swim", self.identity.node_id, self.trust.with_tag
            )
            if self.trust.standing(sender, time.time()) is None:
                raise UnknownSender("its certificate has ended, or was revoked")
            packet = decode_packet(payload)
        except UnknownSender:
            self.counters["refused_foreign"] += 1
            self._want_reconcile(*source)  # a member that we have not met shows its certificate there
            return
        except (EnvelopeError, WireError):
            self.counters["refused_unsigned"] += 1
            return
        if self._packets.seen_before(sender + packet.nonce.to_bytes(8, "big", signed=True)):
            self.counters["refused_replayed"] += 1
            return
        # Records first: a newcomer's certificate rides with its first word.
        for kind, sealed in packet.gossip:
            if kind == "record":
                self._take_record(sealed, rumoured=True)
        strangers = self.counters["unknown_author"]
        found = [self._verified(sealed) for kind, sealed in packet.gossip if kind == "member"]
        evidence = [verified for verified in found if verified is not None]
        now = boottime()
        if self.counters["unknown_author"] > strangers and now >= self._hurry_at:
            self._hurry_at = now + HURRY_PAUSE_S
            self._want_reconcile(*source)  # who tells of strangers knows their certificates
        self._perform(self._core.on_packet(sender, packet, evidence, now))

    def _verified(self, sealed: bytes) -> Verified | None:
        """Evidence whose author and subject are members; None (counted) for anything else."""
        try:
            author, payload = open_envelope(sealed, self.trust.mesh_id, "member")
            evidence = decode_evidence(author, payload)
        except (EnvelopeError, WireError):
            self.counters["refused_unsigned"] += 1
            return None
        now_unix = time.time()
        if self.trust.standing(author, now_unix) is None or self.trust.standing(evidence.node, now_unix) is None:
            self.counters["unknown_author"] += 1  # its certificate comes with a push-pull, and the evidence again
            return None
        return author, evidence, sealed

    # --- lane 2

    def _want_reconcile(self, host: str, port: int, unless_equal: bool = False) -> None:
        key, now = (host, port), boottime()
        if now - self._reconciled.get(key, -1e9) < RECONCILE_PAUSE_S or self._stopped:
            return
        if self._reconciling >= RECONCILES_AT_ONCE:
            self.counters["reconciles_put_off"] += 1
            return
        self._reconciled[key] = now
        if len(self._reconciled) > 4096:
            self._reconciled = {k: at for k, at in self._reconciled.items() if now - at < 60}
        self._spawn(self._reconcile_quietly(host, port, unless_equal), f"push-pull {host}:{port}")

    async def _reconcile_quietly(self, host: str, port: int, unless_equal: bool) -> None:
        self._reconciling += 1
        try:
            await self._push_pull.exchange(host, port, unless_equal)
        except pushpull.FAILURES as e:
            self.counters["reconcile_failed"] += 1
            log.debug("push-pull with %s:%d failed: %s", host, port, e)
        finally:
            self._reconciling -= 1

    async def _serve_unless_stopped(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._stopped:
            writer.close()
            return
        await self._push_pull.serve(reader, writer)

    def _take_in(self, records: list[bytes], evidence: list[bytes]) -> None:
        for sealed in records:
            self._take_record(sealed, rumoured=False)
        for sealed in evidence:
            if sealed in self._gossip_seen:
                continue
            verified = self._verified(sealed)
            if verified is not None:
                self._gossip_seen.seen_before(sealed)
                self._perform(self._core.on_evidence(*verified, boottime(), rumoured=False))

    # --- searching and upkeep

    def _found(self, node: NodeId, host: str, port: int) -> None:
        """mDNS saw somebody."""
        self._candidates[host, port] = node
        member = self._core.table.get(node)
        if member is None or not member.present:
            self._want_reconcile(host, port)

    async def _search(self) -> None:
        if self._beacon is not None:
            await self._beacon.start()
            self.problem = self.problem or self._beacon.problem
        pause, longest = JOIN_BACKOFF_S
        while True:
            present = {(m.host, m.port) for m in self._core.table.present()}
            alone = len(present) <= 1
            for host, port in self._addresses(present):
                self._want_reconcile(host, port)
            await asyncio.sleep(pause * self._rng.uniform(0.8, 1.2) if alone else HEALTHY_SEARCH_S)
            pause = min(longest, pause * 1.5) if alone else JOIN_BACKOFF_S[0]

    def _addresses(self, present: set[tuple[str, int]]) -> list[tuple[str, int]]:
        """Where to knock now: whom we were told of, and a few of those remembered; one answer is enough."""
        told = [address for address in dict.fromkeys([*self._seeds, *self._candidates]) if address not in present]
        remembered = [address for peer in self._snapshot.peers if (address := (peer.host, peer.port)) not in present]
        chosen = self._rng.sample(told, min(KNOCKS_AT_ONCE, len(told)))
        chosen += self._rng.sample(remembered, min(KNOCKS_AT_ONCE, len(remembered)))
        return list(dict.fromkeys(chosen))

    async def _look_after(self) -> None:
        renew_at = boottime() + 6 * 3600
        while True:
            await asyncio.sleep(10)
            for record in self._records.expire(time.time()):
                self._tell(RecordChanged(record.node, record.section))
            self._core.forget_long_gone(boottime())
            await asyncio.to_thread(self._save_peers)
            if boottime() >= renew_at:
                renew_at = boottime() + 6 * 3600
                self.publish("trust", self._chain, ttl_s=86_400)
                self._show_revocations()

    def _save_peers(self) -> None:
        known = {peer.node: peer for peer in self._snapshot.peers}
        for member in self._core.table.all():
            if member.node != self.identity.node_id and member.present:
                known[member.node] = Peer(member.node, member.host, member.port, int(time.time()))
        newest = sorted(known.values(), key=lambda peer: -peer.seen_unix)[:256]
        self._snapshot = Snapshot(epoch=self._epoch, peers=tuple(newest))
        self._snapshots.write(self._snapshot)

    async def _persist(self, epoch: int) -> None:
        self._snapshot = msgspec.structs.replace(self._snapshot, epoch=epoch)
        await asyncio.to_thread(self._snapshots.write, self._snapshot)

    async def _bind(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            self._server = await asyncio.start_server(self._serve_unless_stopped, self._bind_host, self.port)
            self.port = self._server.sockets[0].getsockname()[1]
            self._transport, _ = await loop.create_datagram_endpoint(
                lambda: _Datagrams(self), local_addr=(self._bind_host, self.port)
            )
        except OSError as error:
            if self._server is not None:
                self._server.close()
            if error.errno == errno.EADDRINUSE:
                raise PortInUse(
                    f"port {self.port} on {self._bind_host} is taken by another program (another mesh daemon?). "
                    "Stop it, or choose one with --port."
                ) from error
            if error.errno == errno.EADDRNOTAVAIL:
                raise PortInUse(f"{self._bind_host} is not an address of this machine: see --bind") from error
            raise

    def _spawn(self, work: object, name: str) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work, name=name)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("membership task %s failed", task.get_name(), exc_info=task.exception())


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self, node: MembershipNode) -> None:
        self._node = node

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self._node._on_datagram(data, (addr[0], addr[1]))

    def error_received(self, exc: Exception) -> None:
        self._node.counters["socket_errors"] += 1

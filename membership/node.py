"""The asyncio shell of membership: sockets, timers, streams, disk, discovery. Every decision is made in the cores.

Lane 1 is UDP on `port`, lane 2 TCP on the same number. Nothing that is not signed by a member of this mesh changes
anything here; what is refused is counted by reason.
"""

import asyncio
import errno
import logging
import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from membership.admission import Waiting, read_allow_list
from membership.config import SwimConfig
from membership.core import Core
from membership.discovery import (
    MdnsBeacon,
    MdnsConfig,
    parse_seed,
)
from membership.effects import (
    Cloned,
    Effect,
    KeepChain,
    KeepRevocations,
    MemberChanged,
    PersistEpoch,
    RecordChanged,
    SendPacket,
    SetTimer,
    StreamPing,
    WantReconcile,
)
from membership.envelope import Seals
from membership.events import MemberView, Subscription
from membership.gate import Gate, Policy
from membership.identity import Identity, NodeId, short_id
from membership.member import Member
from membership.reconcile import Reached
from membership.records import Record
from membership.search import Search
from membership.skew import CLOCK_WARN_S
from membership.snapshot import Peer, RevocationFile, Snapshot, SnapshotFile, next_epoch
from membership.streams import FAILURES, Streams
from membership.trust import CERTIFICATE_WARN_S, RENEW_BEFORE_S, ROLES, TrustError, TrustStore
from membership.whereabouts import Standpoint, Whereabouts
from membership.wire import Ping

RECONCILES_AT_ONCE = 32  # forged packets must not make us call half the world
UPKEEP_S = 10.0
SHOW_AGAIN_S = 6 * 3600.0  # certificates and revocations, long before their sections end
REACH_S, REACH_TRIES = 1.0, 3  # the pings of such a check, of which one must be answered
RENEW_AGAIN_S = 30.0
RECEIVE_BUFFER = 4 << 20  # the default 208 KiB hold 200 packets; a mesh that starts at once sends more in a moment

log = logging.getLogger(__name__)


class PortInUse(RuntimeError):
    """Another program has the port; the text says which and what to do."""


class SystemClock:
    def boot(self) -> float:
        """CLOCK_BOOTTIME counts while the machine sleeps, so that a wake-up is seen as one."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def unix(self) -> float:
        return time.time()


class MembershipNode:
    """`on_fatal` is called with the reason when this node cannot go on as a member (another machine has its key)."""

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
        clock: SystemClock | None = None,
        policy: Policy | None = None,
        keep_chain: Callable[[bytes], None] = lambda chain: None,
        on_fatal: Callable[[str], None] = lambda reason: None,
        zone_of: Callable[[NodeId], str] = lambda node: "",
    ) -> None:
        self.identity = identity
        self.trust = trust
        self.config = config
        self.port = port
        self.counters: Counter[str] = Counter()
        self.problems: dict[str, str] = {}
        self._chain = own_chain
        self._bind_host = bind_host
        self._seeds = [parse_seed(seed, default_port) for seed in seeds]
        self._rng = rng or random.Random()  # timing and choice, not secrets
        self._where = Search(self._seeds, self._rng)
        self._mdns_config = mdns
        self._beacon: MdnsBeacon | None = None
        self._snapshots = SnapshotFile(state_dir / "snapshot.json")
        self._snapshot = Snapshot()
        self._revocations = RevocationFile(state_dir / "revoked")
        self._clock = clock or SystemClock()
        self._policy = policy or Policy()
        self._keep_chain, self._on_fatal, self._zone_of = keep_chain, on_fatal, zone_of
        self._whereabouts = Whereabouts(bind_host, advertise_host, self.problems, self._clock, self._rng)
        self._gate: Gate
        self._started: Core | None = None
        self._streams: Streams
        self._subscriptions: list[Subscription] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._reconciling = 0
        self._renew_at = 0.0
        self._transport: asyncio.DatagramTransport | None = None
        self._server: asyncio.Server | None = None
        self._epoch = 0
        self._stopped = False

    # --- life

    async def start(self) -> None:
        """Bind, take a new epoch, announce, search. PortInUse or TrustError if that cannot be."""
        now_unix = self._clock.unix()
        self.standing = self.trust.admit_chain(self._chain, now_unix)
        if self.standing.node_id != self.identity.node_id:
            raise TrustError("this node's certificate is for another key: run `mesh join INVITE` again")
        if self._policy.allow_list is not None:
            read_allow_list(self._policy.allow_list)
        await self._bind()
        await self._whereabouts.choose(self.port, self._seeds[0][0] if self._seeds else None)
        await asyncio.to_thread(self._revocations.read_into, self.trust, now_unix)
        if self.identity.node_id in self.trust.revoked:
            raise TrustError("this node's key was revoked: ask for an invite, and join with a new --state")
        self._snapshot = await asyncio.to_thread(self._snapshots.read)
        self._where.remembered = [(peer.host, peer.port) for peer in self._snapshot.peers]
        if self._snapshots.warning:
            self.problems["snapshot"] = self._snapshots.warning
        self._persist(next_epoch(self._snapshot.epoch, int(now_unix * 1000)))
        self._started = Core(
            Seals(self.identity, self.trust.mesh_id),
            self.trust,
            self._chain,
            self.config,
            self._rng,
            self._clock,
            self._perform,
            host=self.host,
            port=self.port,
            epoch=self._epoch,
            zone_of=self._zone_of,
            counters=self.counters,
        )
        self._gate = Gate(self.identity, self._core, self._policy, self.problems, self._clock)
        self._streams = Streams(self._core, self._reach, self._gate.answer)
        self._core.start()
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
        if self._started is None or self._core.swim.left or "cloned" in self.problems:
            return
        effects = self._core.swim.leave(self._clock.boot())
        third = max(1, len(effects) // 3)
        for start in range(0, len(effects), third):
            self._perform(effects[start : start + third])
            await asyncio.sleep(0.07)
        await asyncio.to_thread(self._save_peers)

    def revoke(self, sealed: bytes) -> None:
        """Take in a revocation made here, and show it to everybody."""
        self._core.revoke(sealed)

    def set_draining(self, draining: bool) -> None:
        self._perform(self._core.swim.set_draining(draining, self._clock.boot()))

    # --- what others use

    @property
    def host(self) -> str:
        """The address that others use."""
        return self._whereabouts.host

    @property
    def reached(self) -> dict[NodeId, Reached]:
        """What others have said of reaching this node."""
        return self._whereabouts.reached

    @property
    def problem(self) -> str:
        """All that is wrong, in one line; empty if nothing is."""
        return "; ".join(self.problems.values())

    @property
    def chain(self) -> bytes:
        return self._core.chain

    @property
    def clock_offset_s(self) -> float | None:
        """How far the peers' clocks are ahead of this machine's; None before any has answered."""
        return self._core.swim.skew.offset_s

    def members(self) -> list[MemberView]:
        """Everybody known, ourselves included."""
        now, now_unix = self._clock.boot(), self._clock.unix()
        seen = self.trust.seen()
        views = []
        for member in self._core.swim.table.all():
            standing = seen.get(member.node)
            views.append(
                MemberView(
                    node_id=member.node,
                    nick=standing.nick if standing is not None else short_id(member.node),
                    user=standing.user if standing is not None else "",
                    roles=standing.roles if standing is not None else (),
                    state=self._state(member),
                    draining=member.draining,
                    host=member.host,
                    port=member.port,
                    epoch=member.epoch,
                    incarnation=member.incarnation,
                    since_unix=now_unix - (now - member.since),
                )
            )
        for node in self.trust.revoked & seen.keys() - {view.node_id for view in views}:
            standing = seen[node]
            revocation, _ = self.trust.revocations[node]
            views.append(
                MemberView(
                    node_id=node,
                    nick=standing.nick,
                    user=standing.user,
                    roles=standing.roles,
                    state="revoked",
                    since_unix=revocation.revoked_unix,
                )
            )
        return sorted(views, key=lambda view: (view.nick, view.node_id))

    def host_of(self, node: NodeId) -> str | None:
        """Where a member was last seen."""
        member = self._core.swim.table.get(node)
        return member.host if member is not None else None

    def publish(self, section: str, body: bytes, ttl_s: float, urgent: bool = False) -> None:
        """Replace our own section; others have it within about a second if it is small, an urgent one at once."""
        self._core.publish(section, body, ttl_s, urgent)

    def withdraw(self, section: str) -> None:
        """An empty section, which ends soon."""
        if self.record(self.identity.node_id, section) is not None:
            self.publish(section, b"", ttl_s=300)

    def records(self, prefix: str) -> list[Record]:
        return [record for record in self._core.records.section(prefix, self._clock.unix()) if record.body]

    def record(self, node: NodeId, section: str) -> Record | None:
        record = self._core.records.get(node, section, self._clock.unix())
        return record if record is not None and record.body else None

    def subscribe(self) -> Subscription:
        subscription = Subscription()
        self._subscriptions.append(subscription)
        return subscription

    def waiting(self) -> dict[NodeId, Waiting]:
        """Everybody who has knocked anywhere in the mesh, and is no member."""
        return self._gate.waiting()

    def approve(self, node: NodeId, nick: str, user: str, roles: tuple[str, ...] = ROLES, admit: bool = False) -> None:
        """Let in one who waits; TrustError if this node may not."""
        self._gate.approve(node, nick, user, roles, admit)

    async def examine(self) -> Standpoint:
        """Ask a few others, now, how they see this node."""
        return await self._whereabouts.examine(self._core, self._streams, self._where)

    @property
    def _core(self) -> Core:
        if self._started is None:
            raise RuntimeError("the membership node has not been started")
        return self._started

    def _state(self, member: Member) -> str:
        if member.node in self.trust.revoked:
            return "revoked"
        return "unreachable" if self._core.swim.is_unreachable(member.node) else member.state

    # --- effects

    def _perform(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case SendPacket():
                    self._send(self._core.seal_packet(effect.to, effect.packet), effect.host, effect.port)
                case SetTimer(name=name, token=token, at=at):
                    self._set_timer(name, token, at)
                case StreamPing():
                    self._spawn(self._stream_ping(effect), f"tcp ping {short_id(effect.node)}")
                case WantReconcile():
                    self._reconcile(effect)
                case MemberChanged() | RecordChanged():
                    for subscription in self._subscriptions:
                        subscription.put(effect)
                case PersistEpoch(epoch=epoch):
                    self._persist(epoch)
                case KeepRevocations(sealed=sealed):
                    self._revocations.write(sealed)
                    if self.identity.node_id in self.trust.revoked:
                        self.problems["revoked"] = "this node's key was revoked by the mesh's founder"
                case KeepChain(chain=chain):
                    self._keep_chain(chain)
                    self.standing = self.trust.check_chain(chain, self._clock.unix())
                case Cloned():
                    self._on_clone(effect)

    def _send(self, data: bytes, host: str, port: int) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.sendto(data, (host, port))

    def _set_timer(self, name: str, token: int, at: float) -> None:
        old = self._timers.pop(name, None)
        if old is not None:
            old.cancel()
        if not self._stopped:
            loop = asyncio.get_running_loop()
            delay = max(0.0, at - self._clock.boot())
            self._timers[name] = loop.call_later(delay, self._core.on_timer, name, token, at)

    async def _stream_ping(self, effect: StreamPing) -> None:
        outcome = await self._streams.ping(effect.node, effect.host, effect.port, self.config.probe_interval_s)
        self.counters[f"tcp_pings_{outcome}"] += 1
        self._perform(self._core.swim.on_stream_ping(effect.node, outcome, self._clock.boot()))

    def _reconcile(self, effect: WantReconcile) -> None:
        if self._stopped:
            return
        if self._reconciling >= RECONCILES_AT_ONCE:
            self.counters["reconciles_put_off"] += 1
            return
        self._spawn(self._reconcile_quietly(effect), f"push-pull {effect.host}:{effect.port}")

    async def _reconcile_quietly(self, effect: WantReconcile) -> None:
        self._reconciling += 1
        try:
            await self._streams.hold(self._core.converse(effect.unless_equal), effect.host, effect.port)
        except FAILURES as error:
            self.counters["reconcile_failed"] += 1
            log.debug("push-pull with %s:%d failed: %s", effect.host, effect.port, error)
        finally:
            self._reconciling -= 1

    def _on_clone(self, effect: Cloned) -> None:
        where = f"{effect.host}:{effect.port}"
        first = "cloned" not in self.problems
        if not effect.younger:
            self.problems["cloned"] = (
                f"another machine, at {where}, runs with this node's key (a copied disk?): it must stop, remove its "
                "state directory and join anew"
            )
            if first:
                log.error("%s", self.problems["cloned"])
            return
        self.problems["cloned"] = (
            f"this node's key is in use on another machine, at {where}, that was started before this one (a copied "
            "disk?): remove this one's state directory, and join with a new key"
        )
        self._stopped = True
        for timer in self._timers.values():
            timer.cancel()
        if self._transport is not None:
            self._transport.close()
        if first:
            log.error("%s", self.problems["cloned"])
            self._on_fatal(self.problems["cloned"])

    # --- lane 1 and streams

    def _on_datagram(self, data: bytes, source: tuple[str, int]) -> None:
        if self._started is not None and not self._stopped:
            self._started.on_datagram(data, source)

    async def _reach(self, node: NodeId, host: str, port: int) -> bool:
        """Whether a UDP ping to this address is answered by this node."""
        answered = asyncio.Event()
        for _ in range(REACH_TRIES):
            ping = Ping(nonce=self._core.nonce(), root=self._core.swim.root(), gossip=())
            self._core.echoes[ping.nonce] = answered.set
            self._send(self._core.seal_packet(node, ping), host, port)
            try:
                async with asyncio.timeout(REACH_S / REACH_TRIES):
                    await answered.wait()
                    return True
            except TimeoutError:
                continue
            finally:
                self._core.echoes.pop(ping.nonce, None)
        return False

    async def _serve_unless_stopped(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._stopped or self._started is None:
            writer.close()
            return
        await self._streams.serve(reader, writer)

    # --- searching and upkeep

    def _found(self, node: NodeId, host: str, port: int) -> None:
        """mDNS saw somebody."""
        self._where.found((host, port))
        member = self._core.swim.table.get(node)
        if member is None or not member.present:
            self._core.want_reconcile(node, host, port)

    async def _search(self) -> None:
        if self._beacon is not None:
            await self._beacon.start()
            if self._beacon.problem:
                self.problems["mdns"] = self._beacon.problem
        while True:
            pause_s = self._core.look_for_others(self._where)
            await asyncio.sleep(pause_s)

    async def _look_after(self) -> None:
        show_again_at = self._clock.boot() + SHOW_AGAIN_S
        upkeep_at = self._clock.boot() + UPKEEP_S
        while True:
            before = self._clock.boot()
            await asyncio.sleep(1.0)
            now = self._clock.boot()
            if now >= upkeep_at:
                upkeep_at = now + UPKEEP_S
                await self._whereabouts.look_at_interfaces(self._core, self._beacon, woke_up=now - before > UPKEEP_S)
                self._core.forget_the_old()
                self._judge_clock()
                await asyncio.to_thread(self._save_peers)
            await self._renew_if_due()
            await self._whereabouts.check_if_due(self._core, self._streams)
            if now >= show_again_at:
                show_again_at = now + SHOW_AGAIN_S
                self._core.show_chain()
                self._core.show_revocations()

    def _judge_clock(self) -> None:
        skew = self._core.swim.skew
        self.problems.pop("clock", None)
        if skew.ours_is_wrong and skew.offset_s is not None and abs(skew.offset_s) > CLOCK_WARN_S:
            way = "behind" if skew.offset_s > 0 else "ahead of"
            self.problems["clock"] = (
                f"this machine's clock is {abs(skew.offset_s):.0f} s {way} those of {skew.peers} other nodes: set it "
                "(timedatectl set-ntp true); from two minutes on, other nodes refuse what this one signs"
            )

    async def _renew_if_due(self) -> None:
        """Ask somebody who may admit for a new certificate, from a month before this one ends."""
        now, left_s = self._clock.boot(), self.standing.not_after - self._clock.unix()
        if left_s > RENEW_BEFORE_S or self.identity.node_id in self.trust.genesis.roots:
            self.problems.pop("certificate", None)
            return
        if now < self._renew_at:
            return
        self._renew_at = now + RENEW_AGAIN_S * self._rng.uniform(0.8, 1.2)
        seen = self.trust.seen()
        admitters = [
            member
            for member in self._core.swim.table.present()
            if member.node != self.identity.node_id
            and seen[member.node].can_admit
            # Only the founder renews an admitter as one.
            and (member.node in self.trust.genesis.roots or not self.standing.can_admit)
        ]
        for member in self._rng.sample(admitters, len(admitters)):
            try:
                await self._streams.hold(self._core.ask_renewal(), member.host, member.port)
                self.problems.pop("certificate", None)
                return
            except FAILURES as error:
                log.info("%s did not renew our certificate: %s", seen[member.node].nick, error)
        if left_s < CERTIFICATE_WARN_S:
            names = sorted(standing.nick for standing in seen.values() if standing.can_admit)
            when = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.standing.not_after))
            self.problems["certificate"] = (
                f"this node's certificate ends on {when}, and nobody who may renew it is up ({', '.join(names)})"
            )

    def _save_peers(self) -> None:
        known = {peer.node: peer for peer in self._snapshot.peers}
        for member in self._core.swim.table.all():
            if member.node != self.identity.node_id and member.present:
                known[member.node] = Peer(member.node, member.host, member.port, int(self._clock.unix()))
        newest = sorted(known.values(), key=lambda peer: -peer.seen_unix)[:256]
        self._snapshot = Snapshot(epoch=self._epoch, peers=tuple(newest))
        self._snapshots.write(self._snapshot)

    def _persist(self, epoch: int) -> None:
        """Before anything else is sent; a few milliseconds, at a start or after an accident."""
        self._epoch = epoch
        self._snapshot = msgspec.structs.replace(self._snapshot, epoch=epoch)
        self._snapshots.write(self._snapshot)

    async def _bind(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            self._server = await asyncio.start_server(self._serve_unless_stopped, self._bind_host, self.port)
            self.port = self._server.sockets[0].getsockname()[1]
            self._transport, _ = await loop.create_datagram_endpoint(
                lambda: _Datagrams(self), local_addr=(self._bind_host, self.port)
            )
            receiver: socket.socket = self._transport.get_extra_info("socket")
            receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
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

"""Membership node: the asyncio shell with sockets, timers, streams, disk and discovery. The cores make every decision.

Lane 1 is UDP on `port`, lane 2 TCP on the same port number. Only messages signed by a member of this mesh have an effect; refused
ones are counted by reason.
"""

import asyncio
import logging
import random
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from membership.addresses import address_text, bind_problem, bound_sockets, family_of, parse_seed
from membership.admission import Admission, AdmissionPolicy, PendingJoin, read_allow_list, request_join
from membership.bootstrap import Bootstrap
from membership.clock_skew import CLOCK_WARN_S
from membership.config import SwimConfig
from membership.core import Core
from membership.discovery import MdnsConfig
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
from membership.envelope import MeshSealer
from membership.events import MemberView, Subscription
from membership.identity import Identity, NodeId, short_id
from membership.listener import Listener, Take
from membership.member import Member
from membership.reachability import NetworkReport, Reachability
from membership.reconcile import Reached
from membership.records import Record
from membership.relay import Relay
from membership.snapshot import MAX_PEERS, Peer, RevocationFile, Snapshot, SnapshotFile, UsedInvites, next_epoch
from membership.streams import FAILURES, PACKET_TIMEOUT_S, Streams
from membership.trust import CERTIFICATE_WARN_S, RENEW_BEFORE_S, TrustError, TrustStore
from membership.wire import Ping

if TYPE_CHECKING:
    from membership.mdns import MdnsBeacon

MAX_RECONCILES, MAX_UNPROVEN = 32, 16  # at a time; the second bounds the connections that forged packets can cause
MAX_STREAMING = 64  # packets over TCP at a time; as for one probe and a round of gossip every 0.1 s for two seconds
TICK_S, UPKEEP_S = 1.0, 10.0
REPUBLISH_S = 6 * 3600.0  # certificates and revocations, long before their sections expire
REACH_S, REACH_ATTEMPTS = 1.0, 3  # UDP pings of a reachability check; one ack is enough
RENEW_RETRY_S = 30.0
JOIN_AGAIN_S = 5.0  # own choice
RECEIVE_BUFFER = 4 << 20  # the default 208 KiB hold 200 packets; a mass restart sends more

log = logging.getLogger(__name__)


class PortInUse(RuntimeError):
    """Another program uses the port, or the address is wrong; the message says what to do."""


class SystemClock:
    def boot(self) -> float:
        """Seconds of CLOCK_BOOTTIME, which counts while the machine sleeps, so that a wake-up is noticed."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def unix(self) -> float:
        return time.time()


class MembershipNode:
    """A member of one mesh.

    `tls` takes over connections to the port that speak TLS. `on_fatal` is called with the reason when this node must stop being a
    member (another machine has its key). `problems` maps a topic to a message for the user. `relay_nodes`: to how many members
    that others cannot reach this one lends a port.
    """

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
        policy: AdmissionPolicy | None = None,
        keep_chain: Callable[[bytes], None] = lambda chain: None,
        on_fatal: Callable[[str], None] = lambda reason: None,
        zone_of: Callable[[NodeId], str] = lambda node: "",
        tls: Take = lambda connection, host: connection.close(),
        relay_nodes: int = 0,
        relay_mbps: float = 100.0,
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
        self._rng = rng or random.Random()  # for timing and sampling, not for secrets
        self._bootstrap = Bootstrap(self._seeds, self._rng)
        self._mdns_config = mdns
        self._beacon: MdnsBeacon | None = None
        self._snapshots = SnapshotFile(state_dir / "snapshot.json")
        self._snapshot = Snapshot()
        self._revocations = RevocationFile(state_dir / "revoked")
        self._unsaved_revocations: list[bytes] = []
        self.used_invites = UsedInvites(state_dir / "invites")
        self._clock = clock or SystemClock()
        self._policy = policy or AdmissionPolicy()
        self._keep_chain, self._on_fatal, self._zone_of = keep_chain, on_fatal, zone_of
        self._admission: Admission
        self._started: Core | None = None
        self._streams: Streams
        self._subscriptions: list[Subscription] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._reconciling = Counter[bool]()  # push-pulls by whether their addresses are unproven
        self._streaming: set[asyncio.Task[None]] = set()  # packets that go over TCP now
        self._in_contact = asyncio.Event()  # all state was exchanged with another node
        self._renew_at = 0.0
        self._transports: dict[socket.AddressFamily, asyncio.DatagramTransport] = {}
        self._listener = Listener(self._serve_unless_stopped, tls, self.counters)
        self._reachability = Reachability(
            bind_host, advertise_host, self.problems, self._clock, self._rng, self._listener.take
        )
        self._relay_nodes, self._relay_mbps = relay_nodes, relay_mbps
        self._relay: Relay
        self._epoch = 0
        self._stopped = False

    # --- lifecycle

    async def start(self) -> None:
        """Bind the port, start a new epoch, announce this node and look for others. Raises PortInUse or TrustError."""
        now_unix = self._clock.unix()
        self.credentials = self.trust.admit_chain(self._chain, now_unix)
        if self.credentials.node_id != self.identity.node_id:
            raise TrustError("this node's certificate is for another key: run `mesh join INVITE` again")
        if self._policy.allow_list is not None:
            read_allow_list(self._policy.allow_list)
        await self._bind()
        try:
            await self._reachability.choose(self.port, self._seeds[0][0] if self._seeds else None)
        except OSError as error:
            raise PortInUse(f"no address to advertise ({error}): give an IP address with --advertise") from error
        await asyncio.to_thread(self._revocations.read_into, self.trust)
        await asyncio.to_thread(self.used_invites.read, now_unix)
        if self.identity.node_id in self.trust.revoked:
            raise TrustError("this node's key was revoked: `mesh leave`, then `mesh join` with a new invite")
        self._snapshot = await asyncio.to_thread(self._snapshots.read)
        self._bootstrap.remembered = [(peer.host, peer.port) for peer in self._snapshot.peers]
        if self._snapshots.warning:
            self.problems["snapshot"] = self._snapshots.warning
        self._persist(next_epoch(self._snapshot.epoch, int(now_unix * 1000)))
        self._started = Core(
            MeshSealer(self.identity, self.trust.mesh_id),
            self.trust,
            self._chain,
            self.config,
            self._rng,
            self._clock,
            self._perform,
            host=self.own_host,
            port=self.port,
            epoch=self._epoch,
            zone_of=self._zone_of,
            counters=self.counters,
        )
        self._admission = Admission(
            self.identity, self._core, self._policy, self.used_invites, self.problems, self._clock
        )
        host_s = self.config.source_packets_s
        self._relay = Relay(self._core, self._bind_host, self.port, self._relay_nodes, self._relay_mbps, host_s)
        self._streams = Streams(self._core, self._ping_udp, self._admission.answer, self._relay)
        self._core.start()
        if self._mdns_config is not None:
            from membership.mdns import MdnsBeacon  # and zeroconf, which a node without mDNS does not need

            self._beacon = MdnsBeacon(
                self._mdns_config,
                self.identity.node_id,
                self.credentials.nick,
                self.trust.mesh_id,
                self.own_host,
                self.port,
                self._on_discovered,
            )
        self._spawn(self._contact_candidates(), "bootstrap")
        self._spawn(self._maintain(), "upkeep")

    async def stop(self) -> None:
        """Stop without a farewell; to the others this is a crash. Call `leave` first for a clean departure."""
        self._stopped = True
        for timer in self._timers.values():
            timer.cancel()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._beacon is not None:
            await self._beacon.stop()
        for transport in self._transports.values():
            transport.close()
        await self._reachability.close()
        if self._started is not None:
            await self._relay.close()
        await self._listener.close()

    async def leave(self) -> None:
        """Announce the departure: three farewells to each member, spread over 0.2 s."""
        if self._started is None or self._core.swim.left:
            return
        effects = self._core.swim.leave(self._clock.boot())
        third = max(1, len(effects) // 3)
        for start in range(0, len(effects), third):
            self._perform(effects[start : start + third])
            await asyncio.sleep(0.07)
        if self._streaming:
            await asyncio.wait(self._streaming, timeout=PACKET_TIMEOUT_S)
        await asyncio.to_thread(self._save_peers)

    async def first_contact(self, within_s: float) -> None:
        """Wait until another node has told this one all it knows, but not longer; at once if no address is known."""
        if self._seeds or self._bootstrap.remembered:
            with suppress(TimeoutError):
                async with asyncio.timeout(within_s):
                    await self._in_contact.wait()

    def publish_statement(self, sealed: bytes) -> None:
        """Apply a founder's revocation or promotion made on this node, and publish it."""
        self._core.publish_statement(sealed)

    def set_draining(self, draining: bool) -> None:
        self._perform(self._core.swim.set_draining(draining, self._clock.boot()))

    # --- queries and commands

    @property
    def address(self) -> tuple[str, int]:
        """The advertised host and port: this node's own, or those that a relay lends it."""
        return self._reachability.host, self._reachability.port

    @property
    def own_host(self) -> str:
        """This machine's address."""
        return self._reachability.own_host

    @property
    def reached(self) -> dict[NodeId, Reached]:
        """Members' latest answers on whether they reach this node."""
        return self._reachability.reached

    @property
    def problem(self) -> str:
        """All problems in one line; empty if there are none."""
        return "; ".join(self.problems.values())

    @property
    def chain(self) -> bytes:
        return self._core.chain

    @property
    def clock_offset_s(self) -> float | None:
        """Seconds by which the peers' clocks are ahead of this one; None before the first ack."""
        return self._core.swim.skew.offset_s

    def members(self) -> list[MemberView]:
        """Return every known member, this node included, and the revoked ones."""
        now, now_unix = self._clock.boot(), self._clock.unix()
        seen = self.trust.seen()
        views = []
        for member in self._core.swim.table.all():
            credentials = seen.get(member.node)
            views.append(
                MemberView(
                    node_id=member.node,
                    nick=credentials.nick if credentials is not None else short_id(member.node),
                    user=credentials.user if credentials is not None else "",
                    roles=credentials.roles if credentials is not None else (),
                    state=self._state(member),
                    draining=member.draining,
                    host=member.host,
                    port=member.port,
                    epoch=member.epoch,
                    incarnation=member.incarnation,
                    user_key=credentials.user_key if credentials is not None else b"",
                    since_unix=now_unix - (now - member.since),
                )
            )
        for node in self.trust.revoked & seen.keys() - {view.node_id for view in views}:
            credentials = seen[node]
            revocation = self.trust.revocations[node]
            views.append(
                MemberView(
                    node_id=node,
                    nick=credentials.nick,
                    user=credentials.user,
                    roles=credentials.roles,
                    state="revoked",
                    since_unix=revocation.revoked_unix,
                )
            )
        return sorted(views, key=lambda view: (view.nick, view.node_id))

    def address_of(self, node: NodeId) -> tuple[str, int] | None:
        """Return a member's last known host and port."""
        member = self._core.swim.table.get(node)
        return (member.host, member.port) if member is not None else None

    def publish(self, section: str, body: bytes, ttl_s: float, urgent: bool = False) -> bool:
        """Replace a section of this node; a small one reaches the others within about a second, an urgent one at once.

        False if it is not published: this node has MAX_SECTIONS already.
        """
        return self._core.publish(section, body, ttl_s, urgent)

    def withdraw(self, section: str) -> None:
        """Replace a section of this node by an empty one that expires soon."""
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

    def pending_joins(self) -> dict[NodeId, PendingJoin]:
        """Return the join requests pending at any node of the mesh."""
        return self._admission.pending()

    def approve(
        self,
        node: NodeId,
        nick: str,
        user: str,
        roles: tuple[str, ...] = (),
        admit: bool = False,
        existing: bool = False,
    ) -> None:
        """Admit a node; with `admit` it may admit others, with `existing` it is one more machine of the user.

        `roles`: if empty, those that it had, or both.

        TrustError if this node may not do that, or the user's name belongs to another key.
        """
        self._admission.approve(node, nick, user, roles, admit, existing)

    async def network_report(self) -> NetworkReport:
        """Ask three random members now how they reach this node."""
        return await self._reachability.report(self._core, self._streams, self._bootstrap)

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
        """Perform effects in order. One that the disk refuses holds up no later one: the core counts on its timers.

        The upkeep saves again what was not saved: epoch, revocations and certificate.
        """
        for effect in effects:
            try:
                self._perform_one(effect)
            except OSError as error:
                self.counters["effects_failed"] += 1
                log.error("%s could not be performed: %s", type(effect).__name__, error)

    def _perform_one(self, effect: Effect) -> None:
        match effect:
            case SendPacket():
                self._send_packet(effect)
            case SetTimer(name=name, token=token, at=at):
                self._set_timer(name, token, at)
            case StreamPing():
                self._spawn(self._stream_ping(effect), f"tcp ping {short_id(effect.node)}")
            case WantReconcile():
                self._reconcile(effect)
            case MemberChanged() | RecordChanged():
                for subscription in self._subscriptions:
                    subscription.put(effect)
                if isinstance(effect, RecordChanged):
                    self._admission.noticed(effect.section)
            case PersistEpoch(epoch=epoch):
                self._persist(epoch)
            case KeepRevocations(sealed=sealed):
                if self.identity.node_id in self.trust.revoked:
                    self.problems["revoked"] = "this node's key was revoked by the mesh's founders"
                self._unsaved_revocations = sealed
                self._save_revocations()
            case KeepChain(chain=chain):
                self._keep_chain(chain)
                self.credentials = self.trust.check_chain(chain, self._clock.unix())
            case Cloned():
                self._on_clone(effect)

    def _send_packet(self, effect: SendPacket) -> None:
        data = self._core.seal_packet(effect.to, effect.packet)
        if not self._core.paths.by_stream(effect.to, self._clock.boot()):
            self._send(data, effect.host, effect.port)
        elif len(self._streaming) >= MAX_STREAMING:
            self.counters["packets_put_off"] += 1
        else:
            task = self._spawn(self._stream_packet(data, effect.host, effect.port), f"packet {short_id(effect.to)}")
            self._streaming.add(task)
            task.add_done_callback(self._streaming.discard)

    async def _stream_packet(self, data: bytes, host: str, port: int) -> None:
        """Send a packet over TCP; over UDP all the same if nobody accepts it there, such as a node of an earlier version."""
        try:
            await self._streams.send_packet(data, host, port)
            self.counters["packets_by_tcp"] += 1
        except FAILURES:
            self._send(data, host, port)

    async def _try_udp(self, node: NodeId) -> None:
        """Find out whether a member that gets packets over TCP can get them over UDP again."""
        member, paths = self._core.swim.table.get(node), self._core.paths
        if member is None or not member.present:
            paths.forget(node)
        elif await self._ping_udp(node, member.host, member.port):
            paths.reached(node, self._clock.boot())

    def _send(self, data: bytes, host: str, port: int) -> None:
        transport = self._transports.get(family_of(host))
        if transport is None:
            self.counters["no_route"] += 1  # an address of a family that this node does not listen on
        elif not transport.is_closing():
            transport.sendto(data, (host, port))

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
        if outcome == "acked" and self._core.swim.is_unheard(effect.node):
            self._core.paths.missed(effect.node, self._clock.boot())
        self._perform(self._core.swim.on_stream_ping(effect.node, outcome, self._clock.boot()))

    def _reconcile(self, effect: WantReconcile) -> None:
        if self._stopped:
            return
        unproven = self._reconciling[True]
        if self._reconciling.total() >= MAX_RECONCILES or (effect.unproven and unproven >= MAX_UNPROVEN):
            self.counters["reconciles_put_off"] += 1
            return
        self._reconciling[effect.unproven] += 1
        self._spawn(self._push_pull(effect), f"push-pull {address_text(effect.host, effect.port)}")

    async def _push_pull(self, effect: WantReconcile) -> None:
        try:
            await self._streams.run(self._core.push_pull(effect.unless_equal), effect.host, effect.port)
            self._in_contact.set()
        except FAILURES as error:
            self.counters["reconcile_failed"] += 1
            log.debug("push-pull with %s failed: %s", address_text(effect.host, effect.port), error)
        finally:
            self._reconciling[effect.unproven] -= 1

    def _on_clone(self, effect: Cloned) -> None:
        address = address_text(effect.host, effect.port)
        first = "cloned" not in self.problems
        if not effect.younger:
            self.problems["cloned"] = (
                f"another machine at {address} uses this node's key (a copied disk?): stop it, remove its state directory "
                "and join with a new key there"
            )
            if first:
                log.error("%s", self.problems["cloned"])
            return
        self.problems["cloned"] = (
            f"another machine at {address} was started earlier with this node's key (a copied disk?): remove this node's "
            "state directory and join with a new key"
        )
        self._stopped = True
        for timer in self._timers.values():
            timer.cancel()
        for transport in self._transports.values():
            transport.close()
        if first:
            log.error("%s", self.problems["cloned"])
            self._on_fatal(self.problems["cloned"])

    # --- lane 1 and streams

    def _on_datagram(self, data: bytes, source: tuple[str, int]) -> None:
        if self._started is not None and not self._stopped:
            self._started.on_datagram(data, source)

    async def _ping_udp(self, node: NodeId, host: str, port: int) -> bool:
        """Ping this address over UDP; True if this node answers there."""
        answered = asyncio.Event()
        for _ in range(REACH_ATTEMPTS):
            ping = Ping(nonce=self._core.nonce(), root=self._core.swim.root(), gossip=())
            self._core.on_ack[ping.nonce] = answered.set
            self._send(self._core.seal_packet(node, ping), host, port)
            try:
                async with asyncio.timeout(REACH_S / REACH_ATTEMPTS):
                    await answered.wait()
                    return True
            except TimeoutError:
                continue
            finally:
                self._core.on_ack.pop(ping.nonce, None)
        return False

    async def _serve_unless_stopped(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str
    ) -> None:
        if self._stopped or self._started is None:
            writer.close()
            return
        await self._streams.serve(reader, writer, host)

    # --- discovery and upkeep

    def _on_discovered(self, node: NodeId, host: str, port: int) -> None:
        """Handle a node found by mDNS."""
        self._bootstrap.add((host, port))
        member = self._core.swim.table.get(node)
        if member is None or not member.present:
            self._core.want_reconcile(node, host, port, unproven=True)

    async def _contact_candidates(self) -> None:
        if self._beacon is not None:
            await self._beacon.start()
            if self._beacon.problem:
                self.problems["mdns"] = self._beacon.problem
        while True:
            interval_s = self._core.contact_candidates(self._bootstrap)
            await asyncio.sleep(interval_s)

    async def _maintain(self) -> None:
        republish_at = self._clock.boot() + REPUBLISH_S
        upkeep_at = self._clock.boot() + UPKEEP_S
        while True:
            before = self._clock.boot()
            await asyncio.sleep(TICK_S)
            now = self._clock.boot()
            steps: list[Callable[[], Awaitable[None] | None]] = []
            if now >= upkeep_at:
                upkeep_at = now + UPKEEP_S
                woke_up = now - before > UPKEEP_S
                steps += [
                    partial(self._reachability.check_interfaces, self._core, self._beacon, woke_up),
                    self._core.expire,
                    self._check_clock,
                    partial(asyncio.to_thread, self._save_peers),
                    self._save_revocations,
                ]
            steps += [
                self._reopen_transports,
                self._admission.tick,
                self._relay.end_former,
                self._try_udp_where_due,
                self._renew_if_due,
                partial(self._reachability.check_if_due, self._core, self._streams),
            ]
            if now >= republish_at:
                republish_at = now + REPUBLISH_S
                steps += [self._core.publish_chain, partial(self._core.publish_statements, refresh=True)]
            for step in steps:
                await self._attempt(step)

    async def _attempt(self, step: Callable[[], Awaitable[None] | None]) -> None:
        """Run a step of the upkeep. One that fails, as on a full disk, stops no other one, and is tried again when it is due."""
        try:
            waiting = step()
            if waiting is not None:
                await waiting
        except Exception:
            self.counters["upkeep_failed"] += 1
            log.exception("a step of the upkeep failed")

    def _try_udp_where_due(self) -> None:
        for node in self._core.paths.due(self._clock.boot()):
            self._spawn(self._try_udp(node), f"try UDP {short_id(node)}")

    def _check_clock(self) -> None:
        skew = self._core.swim.skew
        self.problems.pop("clock", None)
        if skew.local_clock_is_wrong and skew.offset_s is not None and abs(skew.offset_s) > CLOCK_WARN_S:
            direction = "behind" if skew.offset_s > 0 else "ahead of"
            self.problems["clock"] = (
                f"this machine's clock is {abs(skew.offset_s):.0f} s {direction} the clocks of {skew.peers} other nodes: set "
                "it (timedatectl set-ntp true); other nodes refuse this node's messages if it is off by two minutes or more"
            )

    async def _renew_if_due(self) -> None:
        """Ask an admitter for a new certificate in the last month of the current one; ask to be admitted again without one."""
        if reason := self.trust.refusal(self.credentials, self._clock.unix()):
            if self.identity.node_id not in self.trust.revoked:
                self.problems["certificate"] = reason
                await self._join_again()
            return
        now, left_s = self._clock.boot(), self.credentials.not_after - self._clock.unix()
        if self.identity.node_id in self.trust.genesis.roots:
            if left_s < RENEW_BEFORE_S or self.credentials.admitter != self.identity.node_id:
                self._core.publish_own_chain()
            return
        if left_s > RENEW_BEFORE_S:
            self.problems.pop("certificate", None)
            return
        if now < self._renew_at:
            return
        self._renew_at = now + RENEW_RETRY_S * self._rng.uniform(0.8, 1.2)
        seen = self.trust.seen()
        admitters = [
            member
            for member in self._core.swim.table.present()
            if member.node != self.identity.node_id
            and seen[member.node].can_admit
            # Only the founder can renew an admitter's right to admit.
            and (member.node in self.trust.genesis.roots or not self.credentials.can_admit)
        ]
        # A renewal by another node adds its key to those whose revocation ends this membership.
        known = {*self.trust.genesis.roots, *self.credentials.through}
        for member in sorted(self._rng.sample(admitters, len(admitters)), key=lambda one: one.node not in known):
            try:
                await self._streams.run(self._core.ask_renewal(), member.host, member.port)
                self.problems.pop("certificate", None)
                return
            except FAILURES as error:
                log.info("%s did not renew this node's certificate: %s", seen[member.node].nick, error)
        if left_s < CERTIFICATE_WARN_S:
            names = sorted(credentials.nick for credentials in seen.values() if credentials.can_admit)
            when = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.credentials.not_after))
            self.problems["certificate"] = (
                f"this node's certificate expires on {when}, and no node that can renew it is up ({', '.join(names)}): start one"
            )

    async def _join_again(self) -> None:
        """Ask to be admitted, after a node that it came in through was revoked or the user's name was lost to another key."""
        if self._clock.boot() < self._renew_at:
            return
        self._renew_at = self._clock.boot() + JOIN_AGAIN_S
        present = [(member.host, member.port) for member in self._core.swim.table.present()]
        remembered = [(peer.host, peer.port) for peer in self._snapshot.peers]
        known = sorted({*present, *remembered, *self._seeds} - {self.address})
        for host, port in self._rng.sample(known, min(len(known), 3)):
            nonce, me = self._core.nonce(), self.credentials
            try:
                _, _, answer = await request_join(
                    host, port, self.identity, me.nick, me.user, nonce, self._clock.unix()
                )
                if answer.granted:
                    self._core.publish_chain(answer.granted)
                    self.problems.pop("certificate", None)
                    return
            except FAILURES as error:
                log.info("%s does not take a join request: %s", address_text(host, port), error)

    def _save_peers(self) -> None:
        known = {peer.node: peer for peer in self._snapshot.peers}
        for member in self._core.swim.table.all():
            if member.node != self.identity.node_id and member.present:
                known[member.node] = Peer(member.node, member.host, member.port, int(self._clock.unix()))
        newest = sorted(known.values(), key=lambda peer: -peer.seen_unix)[:MAX_PEERS]
        self._snapshot = Snapshot(epoch=self._epoch, peers=tuple(newest))
        self._snapshots.write(self._snapshot)

    def _save_revocations(self) -> None:
        """Write the revocations to disk, unless they are there; the upkeep tries again if that fails."""
        if self._unsaved_revocations:
            self._revocations.write(self._unsaved_revocations)
            self._unsaved_revocations = []

    def _persist(self, epoch: int) -> None:
        """Write the epoch to disk before anything else is sent. This takes a few milliseconds, at a start or after an outbid."""
        self._epoch = epoch
        self._snapshot = msgspec.structs.replace(self._snapshot, epoch=epoch)
        self._snapshots.write(self._snapshot)

    async def _bind(self) -> None:
        listeners: list[socket.socket] = []
        try:
            listeners = bound_sockets(self._bind_host, self.port, socket.SOCK_STREAM)
            self.port = listeners[0].getsockname()[1]
            receivers = bound_sockets(self._bind_host, self.port, socket.SOCK_DGRAM)
        except OSError as error:
            for listener in listeners:
                listener.close()
            raise PortInUse(bind_problem(error, self._bind_host, self.port, "--port")) from error
        self._listener.start(listeners)
        await self._receive(receivers)

    async def _receive(self, receivers: Sequence[socket.socket]) -> None:
        loop = asyncio.get_running_loop()
        for receiver in receivers:
            receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
            transport, _ = await loop.create_datagram_endpoint(lambda: _Datagrams(self), sock=receiver)
            self._transports[receiver.family] = transport

    async def _reopen_transports(self) -> None:
        """Bind the UDP port again after asyncio closed a transport, which it does at an error that it does not know."""
        if self._stopped or not any(transport.is_closing() for transport in self._transports.values()):
            return
        for transport in self._transports.values():
            transport.abort()
        await asyncio.sleep(0)  # asyncio closes the sockets in its next turn
        await self._receive(bound_sockets(self._bind_host, self.port, socket.SOCK_DGRAM))
        log.warning("UDP port %d was closed by an error and is open again", self.port)

    def _spawn(self, work: object, name: str) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work, name=name)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

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

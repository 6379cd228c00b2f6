"""Reachability: choose the address this node advertises, verify it by asking other members, and follow network changes.

The route to other nodes determines the address. A random member is asked to reach it over UDP and TCP every five minutes and
after each change of the network interfaces. A node that no member reaches, as behind NAT or a firewall that lets nothing in,
advertises the port that another member lends it (`relay`), until a member reaches it at its own address again.
"""

import asyncio
import logging
import socket
from random import Random
from typing import TYPE_CHECKING

import msgspec

from membership.addresses import address_text, family_of, is_any, resolved
from membership.bootstrap import Bootstrap
from membership.core import Clock, Core
from membership.discovery import LOOPBACKS, advertised_address, lan_addresses, neighbours, without_route
from membership.identity import NodeId, short_id
from membership.listener import Take
from membership.member import Member
from membership.reconcile import Reached
from membership.relay import use
from membership.streams import FAILURES, Streams

if TYPE_CHECKING:
    from membership.mdns import MdnsBeacon

RECHECK_S, CHECK_S = 15.0, 300.0  # between two checks, after a failed one and otherwise
FIRST_CHECK_S = 2.0
MAX_ANSWERS = 8
MISSES = 2  # members in a row that do not reach this node: one may be cut off itself (own choice)
AGAIN_S = 1.0  # until another member is asked (own choice)
RELAYS_TRIED = 2  # in a row, since the rest of the upkeep waits (own choice)
SUSPECT_S = 2.0  # until a relay that does not answer is given up: a lost packet is refuted by then (own choice)

log = logging.getLogger(__name__)


class PeerReport(msgspec.Struct, frozen=True):
    """Another node's answer to "can you reach me?"; `error` is set if it did not answer."""

    nick: str
    udp: bool = False
    tcp: str = ""
    seen_host: str = ""
    error: str = ""


class NetworkReport(msgspec.Struct, frozen=True):
    """A node's view of its network, for diagnosis. Neighbours are members on this node's own networks.

    `over_tcp`: members that UDP does not reach. `no_route`: members whose address is of a family that this machine lacks.
    `relay`: the member through which others reach this node; empty if they reach it itself.
    """

    others: int
    asked: tuple[PeerReport, ...]
    mdns_problem: str
    neighbours: int
    neighbours_by_mdns: int
    clock_offset_s: float | None
    clock_peers: int
    over_tcp: int = 0
    no_route: tuple[str, ...] = ()
    relay: str = ""


class Reachability:
    """The advertised address. An `explicit` one was set by the owner and never changes.

    `problems` is shared with the node: it maps a topic to a message for the user. `own_host`: the address of this machine, also
    while another one's is advertised. `take` serves the connections that a relay passes on.
    """

    def __init__(
        self, bind_host: str, explicit: str | None, problems: dict[str, str], clock: Clock, rng: Random, take: Take
    ) -> None:
        self.own_host = ""
        self.own_port = 0
        self.reached: dict[NodeId, Reached] = {}
        self._bind_host, self._explicit = bind_host, explicit
        self._problems, self._clock, self._rng = problems, clock, rng
        self._addresses: list[str] = []
        self._check_at = 0.0
        self._take = take
        self._lent: tuple[Member, int] | None = None  # the relay, and its port
        self._relaying: asyncio.Task[None] | None = None
        self._misses = 0
        self._tried: set[NodeId] = set()  # members that do not relay, or whose port nobody reaches

    @property
    def host(self) -> str:
        return self._lent[0].host if self._lent is not None else self.own_host

    @property
    def port(self) -> int:
        return self._lent[1] if self._lent is not None else self.own_port

    async def close(self) -> None:
        """Leave the relay."""
        self._lent = None
        if self._relaying is not None:
            self._relaying.cancel()
            await asyncio.gather(self._relaying, return_exceptions=True)

    async def choose(self, port: int, towards: str | None) -> None:
        """Choose the address at a start: the one with which the kernel reaches `towards`, an address or a host name.

        A name that the owner set is resolved here, once. OSError if it has no address.
        """
        self.own_port = port
        self._addresses = await asyncio.to_thread(lan_addresses)
        host = self._explicit
        if host is None:
            host = await asyncio.to_thread(advertised_address, self._bind_host, towards)
        family = family_of(self._bind_host) if self._bind_host else socket.AF_UNSPEC
        self.own_host = await asyncio.to_thread(resolved, host, family)
        self._check_at = self._clock.boot() + FIRST_CHECK_S

    async def check_interfaces(self, core: Core, beacon: "MdnsBeacon | None", woke_up: bool) -> None:
        """Choose and announce the address again after a change of the interfaces or a wake-up from sleep."""
        addresses = await asyncio.to_thread(lan_addresses)
        if addresses == self._addresses and not woke_up:
            return
        self._addresses = addresses
        core.counters["interface_changes"] += 1
        self._misses = 0
        if self._may_choose and self.own_host not in addresses:
            peers = _sample(core, 1, self._rng)
            towards = peers[0].host if peers else None
            self._change(await asyncio.to_thread(advertised_address, self._bind_host, towards), core)
        if beacon is not None:
            await beacon.update(self.own_host)
        self._check_at = self._clock.boot()

    async def check_if_due(self, core: Core, streams: Streams) -> None:
        """Ask a random member whether it reaches this node, and follow its answer."""
        if self._lent is not None and self._has_lost(self._lent[0].node, core):
            self._tried = {self._lent[0].node}
            await self._find_relay(core)
        peers = _sample(core, 1, self._rng)
        if self._clock.boot() < self._check_at or not peers:
            return
        self._check_at = self._clock.boot() + CHECK_S
        (peer,) = peers
        try:
            own, advertised = await self._ask_both(peer, streams)
        except FAILURES as error:
            log.debug("%s did not answer a reachability check: %s", short_id(peer.node), error)
            return
        self.reached.pop(peer.node, None)
        self.reached = dict([*self.reached.items(), (peer.node, advertised)][-MAX_ANSWERS:])
        self._check_at = self._clock.boot() + await self._follow(peer, own, advertised, core)

    async def _ask_both(self, peer: Member, streams: Streams) -> tuple[Reached, Reached]:
        """Return whether this node is reached at its own address and at the advertised one. One of FAILURES.

        A relay has to reach its own address too, since the peer may be behind the same NAT.
        """
        own = await streams.ask_reached(peer.node, self.own_host, self.own_port, peer.host, peer.port)
        if self._lent is None:
            return own, own
        if own.tcp == "acked":
            relay, _ = self._lent
            own = await streams.ask_reached(relay.node, self.own_host, self.own_port, relay.host, relay.port)
        if own.tcp == "acked":
            return own, own
        return own, await streams.ask_reached(peer.node, self.host, self.port, peer.host, peer.port)

    async def _follow(self, peer: Member, own: Reached, advertised: Reached, core: Core) -> float:
        """Change the address or tell the user as the answers of a member want it; return the seconds to the next check."""
        elsewhere = own.seen_host not in {"", self.own_host}
        if self._may_choose and elsewhere and not own.udp and own.seen_host in (*self._addresses, *LOOPBACKS):
            self._change(own.seen_host, core)
            return AGAIN_S
        self._problems.pop("reach", None)
        if advertised.tcp == "acked":
            self._misses = 0
            if self._lent is not None and own.tcp == "acked":
                await self.close()
                core.set_address(self.host, self.port)
                return AGAIN_S  # that was two members' word
            if advertised.udp or self._lent is not None:
                return CHECK_S
        elif self._may_choose:
            self._misses += 1
            if self._misses < MISSES or await self._find_relay(core):
                return AGAIN_S
        self._problems["reach"] = self._describe(core.trust.seen()[peer.node].nick, advertised)
        return RECHECK_S

    def _has_lost(self, relay: NodeId, core: Core) -> bool:
        member = core.swim.table.get(relay)
        if self._relaying is None or self._relaying.done() or member is None or not member.present:
            return True
        return member.state == "suspect" and self._clock.boot() - member.since > SUSPECT_S

    async def _find_relay(self, core: Core) -> bool:
        """Leave the relay, if there is one, and borrow a port of another member; False if a few have none."""
        await self.close()
        members = [member for member in core.swim.table.present() if member.node not in {core.me, *self._tried}]
        if not members:
            self._tried.clear()
        for member in self._rng.sample(members, min(len(members), RELAYS_TRIED)):
            self._tried.add(member.node)
            if member.state == "alive" and await self._borrow(member, core):
                return True
        core.set_address(self.host, self.port)
        return False

    async def _borrow(self, member: Member, core: Core) -> bool:
        """Ask a member for a port, and advertise it; False if it lends none."""
        lent = asyncio.get_running_loop().create_future()

        def advertise(port: int) -> None:
            self._lent = member, port
            core.set_address(self.host, self.port)
            lent.set_result(None)

        async def relayed() -> None:
            try:
                await use(core, member, self._take, advertise)
            except FAILURES as error:
                log.info("%s passes no connections on: %s", nick, error or "it does not answer")

        nick = core.trust.seen()[member.node].nick
        self._relaying = asyncio.create_task(relayed(), name="relayed")
        await asyncio.wait({self._relaying, lent}, return_when=asyncio.FIRST_COMPLETED)
        if lent.done():
            log.info("no member reaches this node at %s: %s passes connections on", self.own_host, nick)
        return lent.done()

    async def report(self, core: Core, streams: Streams, bootstrap: Bootstrap) -> NetworkReport:
        """Ask three random members now how they reach this node."""
        others = [member for member in core.swim.table.present() if member.node != core.me]
        asked = await asyncio.gather(*(self._ask(peer, core, streams) for peer in _sample(core, 3, self._rng)))
        near = neighbours([member.host for member in others])
        no_route = set(without_route([member.host for member in others]))
        by_mdns = {host for host, _ in bootstrap.discovered}
        return NetworkReport(
            others=len(others),
            asked=tuple(asked),
            mdns_problem=self._problems.get("mdns", ""),
            neighbours=len(near),
            neighbours_by_mdns=sum(host in by_mdns for host in near),
            clock_offset_s=core.swim.skew.offset_s,
            clock_peers=core.swim.skew.peers,
            over_tcp=sum(core.paths.by_stream(member.node, self._clock.boot()) for member in others),
            no_route=tuple(core.trust.seen()[member.node].nick for member in others if member.host in no_route),
            relay="" if self._lent is None else core.trust.seen()[self._lent[0].node].nick,
        )

    @property
    def _may_choose(self) -> bool:
        return self._explicit is None and is_any(self._bind_host)

    def _change(self, host: str, core: Core) -> None:
        if host != self.own_host:
            log.info("this node's address changed from %s to %s", self.own_host, host)
            self.own_host = host
            core.set_address(self.host, self.port)

    async def _ask(self, peer: Member, core: Core, streams: Streams) -> PeerReport:
        nick = core.trust.seen()[peer.node].nick
        try:
            answer = await streams.ask_reached(peer.node, self.host, self.port, peer.host, peer.port)
        except FAILURES as error:
            return PeerReport(nick, error=str(error) or "no answer in time")
        return PeerReport(nick, answer.udp, answer.tcp, answer.seen_host)

    def _describe(self, nick: str, answer: Reached) -> str:
        address = address_text(self.host, self.port)
        if answer.udp:
            return (
                f"TCP from {nick} does not reach this node at {address} ({answer.tcp}), so news of other nodes arrives "
                f"late: allow TCP port {self.port} in the firewall"
            )
        if answer.tcp == "acked":
            return (
                f"UDP from {nick} does not reach this node at {address} (TCP does, and is used instead): allow UDP port "
                f"{self.port} in the firewall"
            )
        seen = f"; {nick} sees this node at {answer.seen_host}" if answer.seen_host not in {"", self.host} else ""
        return (
            f"{nick} cannot reach this node at {address} over UDP or TCP{seen}: allow port {self.port} in the firewall, or "
            "set the right address with --advertise"
        )


def _sample(core: Core, count: int, rng: Random) -> list[Member]:
    return core.swim.table.draw(count, rng, without=(core.me,))

"""Reachability: choose the address this node advertises, verify it by asking other members, and follow network changes.

The route to other nodes determines the address. A random member is asked to reach it over UDP and TCP every five minutes and
after each change of the network interfaces.
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
from membership.member import Member
from membership.reconcile import Reached
from membership.streams import FAILURES, Streams

if TYPE_CHECKING:
    from membership.mdns import MdnsBeacon

RECHECK_S, CHECK_S = 15.0, 300.0  # between two checks, after a failed one and otherwise
FIRST_CHECK_S = 2.0
MAX_ANSWERS = 8

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


class Reachability:
    """The advertised address. An `explicit` one was set by the owner and never changes.

    `problems` is shared with the node: it maps a topic to a message for the user.
    """

    def __init__(
        self, bind_host: str, explicit: str | None, problems: dict[str, str], clock: Clock, rng: Random
    ) -> None:
        self.host = ""
        self.port = 0
        self.reached: dict[NodeId, Reached] = {}
        self._bind_host, self._explicit = bind_host, explicit
        self._problems, self._clock, self._rng = problems, clock, rng
        self._addresses: list[str] = []
        self._check_at = 0.0

    async def choose(self, port: int, towards: str | None) -> None:
        """Choose the address at a start: the one with which the kernel reaches `towards`, an address or a host name.

        A name that the owner set is resolved here, once. OSError if it has no address.
        """
        self.port = port
        self._addresses = await asyncio.to_thread(lan_addresses)
        host = self._explicit
        if host is None:
            host = await asyncio.to_thread(advertised_address, self._bind_host, towards)
        family = family_of(self._bind_host) if self._bind_host else socket.AF_UNSPEC
        self.host = await asyncio.to_thread(resolved, host, family)
        self._check_at = self._clock.boot() + FIRST_CHECK_S

    async def check_interfaces(self, core: Core, beacon: "MdnsBeacon | None", woke_up: bool) -> None:
        """Choose and announce the address again after a change of the interfaces or a wake-up from sleep."""
        addresses = await asyncio.to_thread(lan_addresses)
        if addresses == self._addresses and not woke_up:
            return
        self._addresses = addresses
        core.counters["interface_changes"] += 1
        if self._may_choose and self.host not in addresses:
            peers = _sample(core, 1, self._rng)
            towards = peers[0].host if peers else None
            self._change(await asyncio.to_thread(advertised_address, self._bind_host, towards), core)
        if beacon is not None:
            await beacon.update(self.host)
        self._check_at = self._clock.boot()

    async def check_if_due(self, core: Core, streams: Streams) -> None:
        """Ask a random member whether it reaches this node at the advertised address."""
        peers = _sample(core, 1, self._rng)
        if self._clock.boot() < self._check_at or not peers:
            return
        self._check_at = self._clock.boot() + CHECK_S
        (peer,) = peers
        try:
            answer = await streams.ask_reached(peer.node, self.host, self.port, peer.host, peer.port)
        except FAILURES as error:
            log.debug("%s did not answer a reachability check: %s", short_id(peer.node), error)
            return
        self.reached.pop(peer.node, None)
        self.reached = dict([*self.reached.items(), (peer.node, answer)][-MAX_ANSWERS:])
        elsewhere = answer.seen_host not in {"", self.host}
        if self._may_choose and elsewhere and not answer.udp and answer.seen_host in (*self._addresses, *LOOPBACKS):
            self._change(answer.seen_host, core)
            self._check_at = self._clock.boot() + 1.0
            return
        self._problems.pop("reach", None)
        if not answer.udp or answer.tcp != "acked":
            self._check_at = self._clock.boot() + RECHECK_S
            self._problems["reach"] = self._describe(core.trust.seen()[peer.node].nick, answer)

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
        )

    @property
    def _may_choose(self) -> bool:
        return self._explicit is None and is_any(self._bind_host)

    def _change(self, host: str, core: Core) -> None:
        if host != self.host:
            log.info("this node's address changed from %s to %s", self.host, host)
            self.host = host
            core.set_address(host, self.port)

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

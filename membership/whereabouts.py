"""At which address this node can be reached: chosen by the route to the others, proved by asking them, changed with it."""

import asyncio
import logging
from random import Random

import msgspec

from membership.core import Clock, Core
from membership.discovery import MdnsBeacon, advertised_address, is_any, lan_addresses, neighbours
from membership.identity import NodeId, short_id
from membership.member import Member
from membership.reconcile import Reached
from membership.search import Search
from membership.streams import FAILURES, Streams

CHECK_AGAIN_S = (15.0, 300.0)  # between two checks of our own address, while something is wrong with it, and else
FIRST_CHECK_S = 2.0
ANSWERS_KEPT = 8

log = logging.getLogger(__name__)


class Asked(msgspec.Struct, frozen=True):
    """What another node said of reaching this one; `error` if it did not answer."""

    nick: str
    udp: bool = False
    tcp: str = ""
    seen_host: str = ""
    error: str = ""


class Standpoint(msgspec.Struct, frozen=True):
    """How a node stands in the network. Neighbours are other nodes on its own networks."""

    others: int
    asked: tuple[Asked, ...]
    mdns_problem: str
    neighbours: int
    neighbours_by_mdns: int
    clock_offset_s: float | None
    clock_peers: int


class Whereabouts:
    """`explicit`: the address that the owner has named, which is never changed. `problems` is shared with the node."""

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
        """At a start. `towards` may be a name, which takes a while."""
        self.port = port
        self._addresses = await asyncio.to_thread(lan_addresses)
        if self._explicit is not None:
            self.host = self._explicit
        else:
            self.host = await asyncio.to_thread(advertised_address, self._bind_host, towards)
        self._check_at = self._clock.boot() + FIRST_CHECK_S

    async def look_at_interfaces(self, core: Core, beacon: MdnsBeacon | None, woke_up: bool) -> None:
        """A cable, another network, a wake-up: announce ourselves anew, at the address that is right now."""
        addresses = await asyncio.to_thread(lan_addresses)
        if addresses == self._addresses and not woke_up:
            return
        self._addresses = addresses
        core.counters["interface_changes"] += 1
        if self._may_choose and self.host not in addresses:
            peers = _some(core, 1, self._rng)
            towards = peers[0].host if peers else None
            self._take(await asyncio.to_thread(advertised_address, self._bind_host, towards), core)
        if beacon is not None:
            await beacon.again(self.host)
        self._check_at = self._clock.boot()

    async def check_if_due(self, core: Core, streams: Streams) -> None:
        """Ask somebody whether we can be reached where we say that we are."""
        peers = _some(core, 1, self._rng)
        if self._clock.boot() < self._check_at or not peers:
            return
        self._check_at = self._clock.boot() + CHECK_AGAIN_S[1]
        (peer,) = peers
        try:
            node, answer = await streams.reached(self.host, self.port, peer.host, peer.port)
        except FAILURES as error:
            log.debug("%s did not say whether it reaches us: %s", short_id(peer.node), error)
            return
        self.reached.pop(node, None)
        self.reached = dict([*self.reached.items(), (node, answer)][-ANSWERS_KEPT:])
        elsewhere = answer.seen_host not in {"", self.host}
        if self._may_choose and elsewhere and not answer.udp and answer.seen_host in (*self._addresses, "127.0.0.1"):
            self._take(answer.seen_host, core)
            self._check_at = self._clock.boot() + 1.0
            return
        self._problems.pop("reach", None)
        if not answer.udp or answer.tcp != "acked":
            self._check_at = self._clock.boot() + CHECK_AGAIN_S[0]
            self._problems["reach"] = self._trouble(core.trust.seen()[node].nick, answer)

    async def examine(self, core: Core, streams: Streams, search: Search) -> Standpoint:
        """Ask a few others, now, how they see this node."""
        others = [member for member in core.swim.table.present() if member.node != core.me]
        asked = await asyncio.gather(*(self._ask(peer, core, streams) for peer in _some(core, 3, self._rng)))
        near = neighbours([member.host for member in others])
        seen = {host for host, _ in search.seen}
        return Standpoint(
            others=len(others),
            asked=tuple(asked),
            mdns_problem=self._problems.get("mdns", ""),
            neighbours=len(near),
            neighbours_by_mdns=sum(host in seen for host in near),
            clock_offset_s=core.swim.skew.offset_s,
            clock_peers=core.swim.skew.peers,
        )

    @property
    def _may_choose(self) -> bool:
        return self._explicit is None and is_any(self._bind_host)

    def _take(self, host: str, core: Core) -> None:
        if host != self.host:
            log.info("this node is at %s now, no longer at %s", host, self.host)
            self.host = host
            core.move(host, self.port)

    async def _ask(self, peer: Member, core: Core, streams: Streams) -> Asked:
        nick = core.trust.seen()[peer.node].nick
        try:
            _, answer = await streams.reached(self.host, self.port, peer.host, peer.port)
        except FAILURES as error:
            return Asked(nick, error=str(error) or "no answer in time")
        return Asked(nick, answer.udp, answer.tcp, answer.seen_host)

    def _trouble(self, nick: str, answer: Reached) -> str:
        where = f"{self.host}:{self.port}"
        if answer.udp:
            return (
                f"TCP does not come through from {nick} to this node at {where} ({answer.tcp}): allow TCP port "
                f"{self.port} in the firewall, or much of what others say comes late"
            )
        if answer.tcp == "acked":
            return (
                f"UDP does not come through from {nick} to this node at {where}: allow UDP port {self.port} in the "
                "firewall (TCP works, and is used instead)"
            )
        seen = f"; {nick} sees this node at {answer.seen_host}" if answer.seen_host not in {"", self.host} else ""
        return (
            f"{nick} cannot reach this node at {where} by UDP or TCP{seen}: allow port {self.port} in the firewall, or "
            "name the right address with --advertise"
        )


def _some(core: Core, count: int, rng: Random) -> list[Member]:
    return core.swim.table.draw(count, rng, without=(core.me,))

"""Discovery: mDNS, seed addresses and the machine's own addresses.

Discovery yields only addresses to try; signatures prove who answers there. mDNS reaches one subnet; a single node with a seed in
another subnet connects both, since membership is transitive. Interfaces of containers and tunnels are skipped: other nodes cannot
reach an address on docker0 (exo issue 858).
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from pathlib import Path

import ifaddr
import msgspec
from zeroconf import IPVersion, ServiceStateChange, Zeroconf
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from membership.addresses import family_of, is_any, prefer_public
from membership.identity import NodeId, short_id

SERVICE = "_campusmesh._udp.local."
SKIPPED_INTERFACES = ("docker", "veth", "virbr", "br-", "tun", "tap", "tailscale", "wg", "cni", "podman")
LOOKUP_MS = 1500
LOOPBACKS = ("127.0.0.1", "::1")
IPV6_ADDRESSES = Path("/proc/net/if_inet6")
# linux/if_addr.h: temporary, failed its check for duplicates, deprecated, still checked for duplicates
UNUSABLE_FLAGS = 0x01 | 0x08 | 0x20 | 0x40

log = logging.getLogger(__name__)


class MdnsConfig(msgspec.Struct, frozen=True):
    """`interfaces` are the addresses to use; empty means every interface of a real network."""

    interfaces: tuple[str, ...] = ()


def lan_addresses() -> list[str]:
    """Return the addresses of real interfaces, IPv4 first, without loopback, containers and tunnels.

    Of IPv6, without those that only one link or no other node can use for long: link-local and temporary ones.
    """
    return [host for host, _ in _lan_networks()]


def own_addresses() -> set[str]:
    """Return every address of this machine."""
    return {host for _, host, _ in _networks()}


def without_route(hosts: list[str]) -> list[str]:
    """Return those of these addresses whose family this machine lacks. Nothing is known of names."""
    usable = {family_of(own) for own in own_addresses() if not (is_link_local(own) or own in LOOPBACKS)}
    return [
        host
        for host in hosts
        if _is_address(host) and family_of(host) not in usable and not ip_address(host).is_loopback
    ]


def interface_of(host: str) -> int:
    """Return the index of the interface that has this address; 0 if none has it."""
    return next((adapter.index or 0 for adapter, own, _ in _networks() if own == host), 0)


def _networks() -> Iterator[tuple[ifaddr.Adapter, str, int]]:
    """Yield every address of this machine, with its interface and the length of its network's prefix."""
    for adapter in ifaddr.get_adapters():
        for ip in adapter.ips:
            yield adapter, ip.ip if isinstance(ip.ip, str) else ip.ip[0], ip.network_prefix


def _lan_networks() -> list[tuple[str, int]]:
    """Return the same addresses, each with the length of its network's prefix."""
    found, unusable = [], _unusable_ipv6()
    for adapter, host, prefix in _networks():
        address = ip_address(host)
        skipped = adapter.nice_name.startswith(SKIPPED_INTERFACES) or address.is_loopback or is_link_local(str(address))
        if not (skipped or address in unusable):
            found.append((address.compressed, prefix))
    return sorted(found, key=lambda one: ":" in one[0])


def _unusable_ipv6() -> set[IPv4Address | IPv6Address]:
    try:
        lines = IPV6_ADDRESSES.read_text().splitlines()
    except OSError:
        return set()  # a kernel without IPv6
    rows = [line.split() for line in lines]
    return {IPv6Address(bytes.fromhex(row[0])) for row in rows if int(row[4], 16) & UNUSABLE_FLAGS}


def neighbours(hosts: list[str]) -> list[str]:
    """Return those of these addresses that are on a network of this machine and are not its own."""
    networks, own = [ip_network("127.0.0.0/8"), ip_network("::1")], set()
    for host, prefix in _lan_networks():
        networks.append(ip_network(f"{host}/{prefix}", strict=False))
        own.add(host)
    near = []
    for host in hosts:
        try:
            address = ip_address(host)
        except ValueError:
            continue
        if any(address in network for network in networks) and host not in own:
            near.append(host)
    return near


def advertised_address(bind_host: str, towards: str | None) -> str:
    """Return the bound address, else the one the kernel would use towards a peer, else one of a LAN."""
    if not is_any(bind_host):
        return bind_host
    families = {family_of(bind_host)} if bind_host else {socket.AF_INET, socket.AF_INET6}
    if towards is not None:
        for source in _sources_towards(towards):
            if family_of(source) in families and not is_link_local(source):
                return source
    addresses = [host for host in lan_addresses() if family_of(host) in families]
    return addresses[0] if addresses else LOOPBACKS[bind_host == "::"]


def is_link_local(host: str) -> bool:
    """Return True for an IPv6 address that only one link knows."""
    return host.startswith("fe80:")


def _sources_towards(host: str) -> Iterator[str]:
    """Yield the addresses from which the kernel would send to this host."""
    with suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind) as probe, suppress(OSError):
                if family == socket.AF_INET6:
                    prefer_public(probe)
                probe.connect(address)  # sends no packet, only looks up the route
                yield str(probe.getsockname()[0])


class MdnsBeacon:
    """Announces this node and reports others of the same mesh to `found(node, host, port)`."""

    def __init__(
        self,
        config: MdnsConfig,
        node: NodeId,
        nick: str,
        mesh_id: bytes,
        host: str,
        port: int,
        found: Callable[[NodeId, str, int], None],
    ) -> None:
        self._config = config
        self._node, self._nick, self._mesh_id = node, nick, mesh_id
        self._host, self._port = host, port
        self._found = found
        self._zeroconf: AsyncZeroconf | None = None
        self._browser: AsyncServiceBrowser | None = None
        self._lookups: set[asyncio.Task[None]] = set()
        self.problem = ""

    async def start(self) -> None:
        """Start announcing. A network without multicast sets `problem` and raises nothing."""
        ip_version = IPVersion.All if socket.has_dualstack_ipv6() else IPVersion.V4Only
        try:
            self._zeroconf = AsyncZeroconf(interfaces=self._interfaces(), ip_version=ip_version)
            await self._zeroconf.zeroconf.async_wait_for_start()
            self._browser = AsyncServiceBrowser(self._zeroconf.zeroconf, SERVICE, handlers=[self._on_change])
            await self._zeroconf.async_register_service(self._info(), cooperating_responders=True)
        except Exception as error:  # zeroconf raises many kinds; none may stop a node
            self.problem = f"mDNS does not work here ({error!r}): use --join HOST:PORT"
            log.warning("%s", self.problem)

    async def update(self, host: str) -> None:
        """Announce this address on the current interfaces."""
        self._host = host
        if self._zeroconf is None:
            return
        try:
            await self._zeroconf.async_update_interfaces(self._interfaces())
            await self._zeroconf.async_update_service(self._info())
        except Exception as error:  # as above
            log.warning("mDNS announcement could not be updated: %r", error)

    def _interfaces(self) -> list[str]:
        return list(self._config.interfaces) or lan_addresses() or [LOOPBACKS[0]]

    def _addresses(self) -> list[str]:
        """Return what to announce: the advertised address, and one of the other family for nodes that have only that one."""
        others = [] if self._config.interfaces else [host for host in lan_addresses() if host != self._host]
        of_family = {family_of(host): host for host in [*reversed(others), self._host]}
        return [host for host in of_family.values() if _is_address(host)]

    def _info(self) -> AsyncServiceInfo:
        label = "".join(c if c.isalnum() or c == "-" else "-" for c in self._nick)[:40]
        return AsyncServiceInfo(
            SERVICE,
            f"{label}-{short_id(self._node)}.{SERVICE}",
            parsed_addresses=self._addresses(),
            port=self._port,
            properties={"v": "1", "mesh": self._mesh_id.hex()[:8], "id": self._node.hex()},
            server=f"{short_id(self._node)}.local.",
        )

    async def stop(self) -> None:
        for task in self._lookups:
            task.cancel()
        if self._browser is not None:
            await self._browser.async_cancel()
        if self._zeroconf is not None:
            await self._zeroconf.async_close()

    def _on_change(self, zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange) -> None:
        if state_change is ServiceStateChange.Removed or len(self._lookups) >= 64:
            return
        task = asyncio.get_running_loop().create_task(self._look_up(zeroconf, service_type, name), name=f"mdns {name}")
        self._lookups.add(task)
        task.add_done_callback(self._lookups.discard)

    async def _look_up(self, zeroconf: Zeroconf, service_type: str, name: str) -> None:
        info = AsyncServiceInfo(service_type, name)
        if not await info.async_request(zeroconf, LOOKUP_MS) or info.port is None:
            return
        properties = {key: value for key, value in info.properties.items() if value is not None}
        if properties.get(b"mesh") != self._mesh_id.hex()[:8].encode():
            return
        try:
            node = bytes.fromhex(properties.get(b"id", b"").decode())
        except ValueError:
            return
        if len(node) != 32 or node == self._node:
            return
        for address in info.parsed_addresses(IPVersion.All):
            if not is_link_local(address):
                self._found(node, address, info.port)


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True

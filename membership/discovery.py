"""Discovery: mDNS, seed addresses and the machine's own addresses.

Discovery yields only addresses to try; signatures prove who answers there. mDNS reaches one subnet; a single node with a seed in
another subnet connects both, since membership is transitive. Interfaces of containers and tunnels are skipped: other nodes cannot
reach an address on docker0 (exo issue 858).
"""

import asyncio
import logging
import socket
from collections.abc import Callable
from ipaddress import ip_address, ip_network

import ifaddr
import msgspec
from zeroconf import IPVersion, ServiceStateChange, Zeroconf
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from membership.identity import NodeId, short_id

SERVICE = "_campusmesh._udp.local."
SKIPPED_INTERFACES = ("docker", "veth", "virbr", "br-", "tun", "tap", "tailscale", "wg", "cni", "podman")
LOOKUP_MS = 1500

log = logging.getLogger(__name__)


class MdnsConfig(msgspec.Struct, frozen=True):
    """`interfaces` are the addresses to use; empty means every interface of a real network."""

    interfaces: tuple[str, ...] = ()


def lan_addresses() -> list[str]:
    """Return the IPv4 addresses of real interfaces, without loopback, containers and tunnels."""
    found: list[str] = []
    for adapter in ifaddr.get_adapters():
        if adapter.nice_name.startswith(SKIPPED_INTERFACES):
            continue
        for ip in adapter.ips:
            if isinstance(ip.ip, str) and not ip_address(ip.ip).is_loopback:
                found.append(ip.ip)
    return found


def neighbours(hosts: list[str]) -> list[str]:
    """Return those of these addresses that are on a network of this machine and are not its own."""
    networks, own = [ip_network("127.0.0.0/8")], set()
    for adapter in ifaddr.get_adapters():
        for ip in adapter.ips:
            if isinstance(ip.ip, str) and not adapter.nice_name.startswith(SKIPPED_INTERFACES):
                networks.append(ip_network(f"{ip.ip}/{ip.network_prefix}", strict=False))
                own.add(ip.ip)
    near = []
    for host in hosts:
        try:
            address = ip_address(host)
        except ValueError:
            continue
        if any(address in network for network in networks) and (host not in own or address.is_loopback):
            near.append(host)
    return near


def is_any(bind_host: str) -> bool:
    return bind_host in {"0.0.0.0", "::", ""}


def advertised_address(bind_host: str, towards: str | None) -> str:
    """Return the bound address, else the one the kernel would use towards a peer, else one of a LAN."""
    if not is_any(bind_host):
        return bind_host
    if towards is not None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((towards, 9))  # sends no packet, only looks up the route
                return str(probe.getsockname()[0])
            except OSError:
                pass
    addresses = lan_addresses()
    return addresses[0] if addresses else "127.0.0.1"


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
        try:
            self._zeroconf = AsyncZeroconf(interfaces=self._interfaces(), ip_version=IPVersion.V4Only)
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
        return list(self._config.interfaces) or lan_addresses() or ["127.0.0.1"]

    def _info(self) -> AsyncServiceInfo:
        label = "".join(c if c.isalnum() or c == "-" else "-" for c in self._nick)[:40]
        return AsyncServiceInfo(
            SERVICE,
            f"{label}-{short_id(self._node)}.{SERVICE}",
            addresses=[socket.inet_aton(self._host)],
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
        for address in info.parsed_addresses(IPVersion.V4Only):
            self._found(node, address, info.port)


def parse_seed(text: str, default_port: int) -> tuple[str, int]:
    """Parse `host` or `host:port`; ValueError with a message for the user."""
    host, colon, port = text.strip().rpartition(":")
    if not colon:
        host, port = text.strip(), str(default_port)
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{text!r} is not an address: write HOST or HOST:PORT, as in lab3.example.edu:{default_port}")
    return host.strip("[]"), int(port)

"""mDNS: announce this node on its networks, and hear of others of the same mesh there."""

import asyncio
import logging
import socket
from collections.abc import Callable

from zeroconf import IPVersion, ServiceStateChange, Zeroconf
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from membership.addresses import family_of, is_address
from membership.discovery import LOOPBACKS, MdnsConfig, is_link_local, lan_addresses
from membership.identity import NodeId, short_id

SERVICE = "_campusmesh._udp.local."
LOOKUP_MS = 1500

log = logging.getLogger(__name__)


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
        return [host for host in of_family.values() if is_address(host)]

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

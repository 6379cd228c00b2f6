"""Discovery: the machine's own addresses, and which of them other nodes can try.

Discovery yields only addresses to try; signatures prove who answers there. mDNS (`mdns.py`) reaches one subnet; a single node
with a seed in another subnet connects both, since membership is transitive. Interfaces of containers and tunnels are skipped:
other nodes cannot reach an address on docker0 (exo issue 858).
"""

import socket
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from pathlib import Path

import ifaddr
import msgspec

from membership.addresses import family_of, is_address, is_any, prefer_public

SKIPPED_INTERFACES = ("docker", "veth", "virbr", "br-", "tun", "tap", "tailscale", "wg", "cni", "podman")
LOOPBACKS = ("127.0.0.1", "::1")
IPV6_ADDRESSES = Path("/proc/net/if_inet6")
# linux/if_addr.h: temporary, failed its check for duplicates, deprecated, still checked for duplicates
UNUSABLE_FLAGS = 0x01 | 0x08 | 0x20 | 0x40


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
        if is_address(host) and family_of(host) not in usable and not ip_address(host).is_loopback
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
    with suppress(OSError, ValueError):  # a seed that is no name
        for family, kind, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind) as probe, suppress(OSError):
                if family == socket.AF_INET6:
                    prefer_public(probe)
                probe.connect(address)  # sends no packet, only looks up the route
                yield str(probe.getsockname()[0])

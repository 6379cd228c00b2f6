"""Addresses of hosts that jobs reach by name: public ones only, and none of this machine.

The name servers answer for the host's owner, not for this machine's: a name that is allowed today can point into the campus
tomorrow. So each answer is checked, and the connection goes to an address that was checked (DNS rebinding).
"""

import asyncio
import ipaddress
import socket
from concurrent.futures import ThreadPoolExecutor

THREADS = 8  # lookups at a time, of all jobs (own choice)
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")  # RFC 6052


class NotPublic(OSError):
    """A name has no public address."""


def is_public(text: str) -> bool:
    """Tell whether an address is a host's on the Internet; an IPv4 address inside an IPv6 address must be one, too."""
    address = ipaddress.ip_address(text)
    if isinstance(address, ipaddress.IPv6Address):
        if "%" in text or address.is_site_local:
            return False
        inner = [address.ipv4_mapped, address.sixtofour]
        if address in NAT64:
            inner.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        found = [one for one in inner if one is not None]
        if found:
            return all(is_public(str(one)) for one in found)
    return address.is_global and not address.is_multicast and not address.is_reserved


def is_this_machines(text: str) -> bool:
    """Tell whether an address is one of this machine's own."""
    family = socket.AF_INET6 if ":" in text else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((text, 0))
        except OSError:
            return False
    return True


def checked(answers: list[str]) -> list[str]:
    """Return the addresses among these that a job may reach, in order."""
    return [one for one in dict.fromkeys(answers) if is_public(one) and not is_this_machines(one)]


class PublicAddresses:
    """Looks up the public addresses of hosts, for each name once at a time: a dead name server then holds few threads."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="names")
        self._asked: dict[str, asyncio.Future[list[str]]] = {}

    async def __call__(self, host: str) -> list[str]:
        """Return the addresses of a host. NotPublic without any; OSError if the lookup fails."""
        asked = self._asked.get(host)
        if asked is None:
            asked = asyncio.get_running_loop().run_in_executor(self._threads, _look_up, host)
            self._asked[host] = asked
            asked.add_done_callback(lambda done: self._asked.pop(host, None))
        found = checked(await asyncio.shield(asked))
        if not found:
            raise NotPublic(f"{host} has no public address")
        return found


def _look_up(host: str) -> list[str]:
    """Ask for the name itself, never within this machine's search domains."""
    return [str(entry[4][0]) for entry in socket.getaddrinfo(f"{host}.", None, type=socket.SOCK_STREAM)]

"""Addresses of nodes: read them from text, write them as text, and bind sockets to them.

An IPv6 address with a port is written in brackets (RFC 3986). A node that listens on every address has one socket of each family,
so that the addresses of its peers are never IPv4 addresses in IPv6 form.
"""

import errno
import socket
from functools import lru_cache
from ipaddress import ip_address, ip_network

ANY_HOSTS = ("0.0.0.0", "::")
IPV6_ADDR_PREFERENCES, PREFER_PUBLIC = 72, 2  # linux/in6.h (RFC 5014); the socket module lacks them
MAX_ADDRESS_CHARS = 45  # of an IPv6 address that ends in an IPv4 one
NO_FAMILY = {errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL}  # of a kernel without IPv6


def parse_seed(text: str, default_port: int) -> tuple[str, int]:
    """Parse `host`, `host:port`, an IPv6 address or `[address]:port`; ValueError with a message for the user."""
    text = text.strip()
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]") or (":" in host and not host.startswith("[")):
        host, port = text, str(default_port)
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if ":" in bare or host != bare:
        try:
            bare = ip_address(bare).compressed
        except ValueError:
            bare = ""
    if not bare or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise ValueError(
            f"{text!r} is not an address: write HOST, HOST:PORT or [IPV6]:PORT, as in lab3.example.edu:{default_port}"
        )
    return bare, int(port)


def canonical(host: str) -> str:
    """Return an address as the system writes it, without brackets; a name as it is."""
    try:
        return ip_address(host.removeprefix("[").removesuffix("]")).compressed
    except ValueError:
        return host


def address_text(host: str, port: int) -> str:
    """Return `host:port`, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@lru_cache(4096)
def address_group(host: str) -> str:
    """Return the part of an address that one machine cannot vary: of IPv6, the network of 64 bits."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return host
    return host if address.version == 4 else str(ip_network((address, 64), strict=False))


@lru_cache(4096)
def is_address(host: str) -> bool:
    """Return True for an IP address without a scope, and False for a name."""
    try:
        return "%" not in host and bool(ip_address(host))
    except ValueError:
        return False


def is_endpoint(host: str, port: int) -> bool:
    """Return True for an address and a port as members state them. A name would be resolved by whoever sends to it."""
    return len(host) <= MAX_ADDRESS_CHARS and 0 < port < 65536 and is_address(host)


def is_group(host: str) -> bool:
    """Return True for what `address_group` returns of an address."""
    network = host.removesuffix("/64")
    return len(network) <= MAX_ADDRESS_CHARS and is_address(network) and address_group(network) == host


def resolved(host: str, family: socket.AddressFamily = socket.AF_UNSPEC) -> str:
    """Return an address as the system writes it; for a name its address, of IPv4 if it has one. OSError. This blocks."""
    host = canonical(host)
    if is_address(host):
        return host
    try:
        found = [str(address[0]) for *_, address in socket.getaddrinfo(host, None, family, socket.SOCK_DGRAM)]
    except ValueError as error:  # no name can be written so
        raise OSError(f"{host!r} is not a name") from error
    return min(found, key=lambda one: ":" in one)


def is_any(bind_host: str) -> bool:
    """Return True if this names every address: of one family, or of both if it is empty."""
    return bind_host in {"", *ANY_HOSTS}


def family_of(host: str) -> socket.AddressFamily:
    """Return the family of an address; a name counts as IPv4."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def bound_sockets(bind_host: str, port: int, kind: socket.SocketKind) -> list[socket.socket]:
    """Return sockets that are bound to this port: one, or one of each family if `bind_host` is empty. OSError if it is taken."""
    made: list[socket.socket] = []
    try:
        for host in (bind_host,) if bind_host else ANY_HOSTS:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=kind, flags=socket.AI_PASSIVE)[0]
            try:
                made.append(_bound(family, kind, address))
            except OSError as error:
                if not made or error.errno not in NO_FAMILY:
                    raise
            port = made[0].getsockname()[1]
    except OSError:
        for sock in made:
            sock.close()
        raise
    return made


def bind_problem(error: OSError, bind_host: str, port: int, option: str) -> str:
    """Return why `bound_sockets` has failed, and what to do; `option` names another port."""
    where = f"port {port} on {bind_host or 'this machine'}"
    match error.errno:
        case errno.EADDRINUSE:
            return f"{where} is in use by another program (another mesh daemon?). Stop it, or choose another port with {option}."
        case errno.EADDRNOTAVAIL:
            return f"{bind_host} is not an address of this machine: see --bind"
        case errno.EACCES:
            return f"this user may not use {where}. Choose one from 1024 on with {option}."
    return f"{where} cannot be used: {error.strerror or error}"


def _bound(family: socket.AddressFamily, kind: socket.SocketKind, address: object) -> socket.socket:
    sock = socket.socket(family, kind)
    try:
        sock.setblocking(False)
        if kind == socket.SOCK_STREAM:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            prefer_public(sock)
        sock.bind(address)  # type: ignore[arg-type]
    except OSError:
        sock.close()
        raise
    return sock


def prefer_public(sock: socket.socket) -> None:
    """Send from addresses that stay, not from temporary ones (RFC 8981), which others do not know."""
    sock.setsockopt(socket.IPPROTO_IPV6, IPV6_ADDR_PREFERENCES, PREFER_PUBLIC)

"""A hostile neighbour: it reaches the ports of a node, and has no key that the mesh knows."""

import socket
import ssl
from pathlib import Path

from membership.identity import Identity
from mesh.rpc import tls


def tls_context(certificate: bytes, key: Identity, directory: Path) -> ssl.SSLContext:
    """Return a client's context that trusts every server and presents this certificate (DER) with this key."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    file = directory / f"{len(list(directory.iterdir()))}.pem"
    file.write_text(private_key(key) + ssl.DER_cert_to_PEM_cert(certificate))
    context.load_cert_chain(file)
    return context


def private_key(key: Identity) -> str:
    """Return a node's key in PEM."""
    return ssl.DER_cert_to_PEM_cert(tls._PRIVATE_KEY + key.seed).replace("CERTIFICATE", "PRIVATE KEY")


def forged(mesh_id: bytes, name_of: bytes, key: Identity, extensions: bytes = b"", serial: bytes = b"\x02") -> bytes:
    """Return a certificate in one node's name for another key. Everybody can issue it (`mesh.rpc.tls`)."""
    return tls._issue(mesh_id, tls.node_name(name_of), key.node_id, serial, extensions)


def plain_context() -> ssl.SSLContext:
    """Return a client's context without a certificate, which trusts every server."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def unfinished(port: int, count: int, source: str = "127.0.0.1") -> list[socket.socket]:
    """Open connections from this address of the loopback on which nothing is ever sent."""
    return [socket.create_connection(("127.0.0.1", port), 5, (source, 0)) for _ in range(count)]


def ended(connection: socket.socket, within_s: float = 10.0) -> bool:
    """Tell whether the other end closes this connection in time, without an answer."""
    connection.settimeout(within_s)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True

"""ClientHellos for tests: made of their parts, as valid or as wrong as a test needs them."""

import ssl
from collections.abc import Iterable
from itertools import pairwise

SERVER_NAME, HOST_NAME = 0, 0


def block(size: int, data: bytes) -> bytes:
    return len(data).to_bytes(size) + data


def server_name(name: bytes, kind: int = HOST_NAME) -> bytes:
    """Return the content of a server_name extension with one name."""
    return block(2, bytes([kind]) + block(2, name))


def message(extensions: Iterable[tuple[int, bytes]], ciphers: int = 1) -> bytes:
    body = b"\x03\x03" + bytes(32) + block(1, b"") + block(2, b"\x13\x01" * ciphers) + block(1, b"\0")
    body += block(2, b"".join(kind.to_bytes(2) + block(2, data) for kind, data in extensions))
    return b"\x01" + block(3, body)


def records(data: bytes, *cuts: int) -> bytes:
    """Return a message in records, cut at these places."""
    edges = [0, *sorted(cuts), len(data)]
    pieces = [data[start:end] for start, end in pairwise(edges) if start < end]
    return b"".join(b"\x16\x03\x01" + block(2, piece) for piece in pieces)


def hello(name: bytes) -> bytes:
    return records(message([(SERVER_NAME, server_name(name))]))


def of_python(name: str) -> bytes:
    """Return what Python's own TLS sends first."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname=name)
    try:
        client.do_handshake()
    except ssl.SSLWantReadError:
        return outgoing.read()
    raise AssertionError("a client waits for its server")

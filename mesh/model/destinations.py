"""Destinations: hosts by name and port that an owner lets jobs reach, and that a job asks for (docs/explanation/egress.md).

A destination is `host:port` in one spelling: a name of the DNS in lower case, without a final dot. An address is none, in no
spelling that a resolver would take for one: the last label begins with a letter.
"""

import re
from collections.abc import Iterable

# From pip's default index: https://docs.pypi.org/api/index-api/
GROUPS = {"pypi": ("files.pythonhosted.org:443", "pypi.org:443")}
MOST_DESTINATIONS = 64
MOST_CHARACTERS = 2048  # of all of them: they stand in adverts, and a section holds 16 KiB
HTTP_PORT = 80
_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_HOST = re.compile(rf"(?:{_LABEL}\.)+(?![0-9]){_LABEL}")
_PORT = re.compile(r"[1-9][0-9]{0,4}")


class DestinationError(ValueError):
    """The text names no destination; it says why."""


def destination(text: str) -> str:
    """Return the one spelling of a destination."""
    host, colon, port = text.rpartition(":")
    host = host.removesuffix(".").lower() if host.isascii() else host
    shown = text[:80]
    if not colon:
        raise DestinationError(f"{shown!r} has no port: write it as {shown}:443, or name a group ({', '.join(GROUPS)})")
    if not host.isascii():
        raise DestinationError(f"{shown!r} is not written in ASCII: write the name as the DNS has it, as xn--...")
    if len(host) > 253 or _HOST.fullmatch(host) is None:
        raise DestinationError(f"{shown!r} is no host by its name: addresses and patterns are not taken")
    if _PORT.fullmatch(port) is None or int(port) > 65_535:
        raise DestinationError(f"{shown!r} has no port from 1 to 65535")
    return f"{host}:{port}"


def destinations(entries: Iterable[str]) -> tuple[str, ...]:
    """Return what these names and groups stand for, sorted. DestinationError."""
    found = {one for entry in entries for one in GROUPS.get(entry) or (destination(entry),)}
    if len(found) > MOST_DESTINATIONS or sum(map(len, found)) > MOST_CHARACTERS:
        raise DestinationError(
            f"at most {MOST_DESTINATIONS} destinations, of {MOST_CHARACTERS} characters together, can be named"
        )
    return tuple(sorted(found))

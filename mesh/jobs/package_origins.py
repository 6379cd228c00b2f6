"""Sources of packages outside the mesh: the index or directory of wheels, and the channels, that the owner of a node allows.

An archive is taken if it has the hash of the lock. Addresses in a lock play no part, except that a channel must be the owner's.
"""

import asyncio
import re
from base64 import b64encode
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urljoin, urlsplit
from urllib.request import getproxies_environment

from aiohttp import ClientError
from yarl import URL

from mesh.images.blobs import BlobStore, FetchFailed
from mesh.images.outside import WRITE_BYTES, Outside
from mesh.model.environment import PackageFile
from mesh.rpc.streams import read_within

PAGE_BYTES = 32 << 20  # of an index about one project; the largest on PyPI have a few MiB (own choice)
PLAIN = {"Accept": "text/html, */*", "Accept-Encoding": "identity"}

_HASH = re.compile(r"sha256=([0-9a-fA-F]{64})")


class Address(NamedTuple):
    """The address of an index without its password, and which URLs get that, in which header."""

    base: str
    secret: tuple[str, str]


class PackageOrigins:
    """The sources that the owner allows. `index`: the address of an index, a directory of wheels, or empty."""

    def __init__(self, index: str, channels: Sequence[str]) -> None:
        self._index, self._channels = index, channels

    def refusal(self, file: PackageFile) -> str:
        """Return why a package may not come from outside the mesh; empty if it may."""
        if not file.channel:
            return "" if self._index else "its owner allows no index here (uv_index in config.toml)"
        if file.channel in self._channels:
            return ""
        allowed = ", ".join(self._channels) or "none"
        return (
            f"its environment needs packages of {file.channel}, and its owner allows {allowed} here "
            "(conda_channels in config.toml)"
        )

    async def bring(self, file: PackageFile, store: BlobStore, most_bytes: int) -> None:
        """Fetch a package. FetchFailed on failure; OSError if the disk is full."""
        directory = not file.channel and self._index.startswith("/")
        try:
            if directory:
                await asyncio.to_thread(_copied, Path(self._index) / file.name, file, store, most_bytes)
                return
            where = Address(file.channel, ("", "")) if file.channel else _address(self._index)
            # A proxy of this machine is asked as by other programs of its owner.
            outside = Outside([f"{URL(where.base).origin()}/"], getproxies_environment())
            url = f"{file.channel}/{file.place}/{file.name}" if file.channel else await _found(outside, where, file)
            async with outside.visit(most_bytes) as visit, visit.get(url, PLAIN, where.secret) as response:
                await visit.keep(response, store, file.sha256)
        except (FetchFailed, ClientError, TimeoutError, ValueError) as error:
            place = file.channel or f"the {'directory' if directory else 'index'} of its owner"
            raise FetchFailed(f"{place}: {str(error) or 'it does not answer'}") from error


def _address(index: str) -> Address:
    try:
        url = URL(index.rstrip("/"))
        bare, start = str(url.with_user(None)), f"{url.origin()}/"
    except ValueError as error:  # its text may have the password
        raise FetchFailed("it is not asked: uv_index is no valid address") from error.with_traceback(None)
    named = f"{url.user or ''}:{url.password or ''}"
    return Address(bare, (start, f"Basic {b64encode(named.encode()).decode()}" if named != ":" else ""))


async def _found(outside: Outside, where: Address, file: PackageFile) -> str:
    """Return the address that an index gives for a file (PEP 503): for its hash, or for its name if it shows no hash."""
    async with (
        outside.visit(PAGE_BYTES) as visit,
        visit.get(f"{where.base}/{file.place}/", PLAIN, where.secret) as response,
    ):
        if response.status != 200:
            raise FetchFailed(f"it answers {response.status}")
        page, at = await read_within(response.content, PAGE_BYTES), str(response.url)
    if page is None:
        raise FetchFailed(f"it shows over {PAGE_BYTES >> 20} MiB about {file.place}")
    links = await asyncio.to_thread(_links, page.decode(errors="replace"))
    named = False
    for link in links:
        shown = _HASH.search(urlsplit(link).fragment)
        if shown is not None and bytes.fromhex(shown[1]) == file.sha256:
            return urljoin(at, link)
        if unquote(urlsplit(link).path.rpartition("/")[2]) == file.name:
            named = True
            if shown is None:
                return urljoin(at, link)
    raise FetchFailed("it has this name with another hash than the lock" if named else "it does not have it")


def _links(page: str) -> list[str]:
    found: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            found.extend(value for name, value in attrs if tag == "a" and name == "href" and value)

    Reader().feed(page)
    return found


def _copied(path: Path, file: PackageFile, store: BlobStore, most_bytes: int) -> None:
    part, at = store.part(), 0
    try:
        with path.open("rb") as source:
            while data := source.read(WRITE_BYTES):
                if at + len(data) > most_bytes:
                    raise FetchFailed(f"it has over {most_bytes} bytes")
                part.write(data, at)
                at += len(data)
        if not store.finish(part, file.sha256):
            raise FetchFailed("it has this name with another hash than the lock")
    except FileNotFoundError as error:
        raise FetchFailed("it does not have it") from error
    finally:
        part.close()

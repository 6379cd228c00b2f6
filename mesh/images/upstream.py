"""Public registries as a source of blobs, by digest, where the owner allows it (`image_registries`). Off by default.

An image on the list whose name there is its name in a registry (`ghcr.io/lab/tool:1`, or `library/python:3.12` in any of them) is
looked for below that name. What a registry sends is compared with its digest, and ends at the length that the manifest gives.
"""

import re
from collections.abc import Sequence
from urllib.parse import urlencode

import aiohttp
import msgspec

from membership.malformed import MALFORMED
from mesh.images.allowlist import user_of
from mesh.images.blobs import BlobStore, FetchFailed
from mesh.images.oci import MAX_MANIFEST_BYTES, TYPES, digest_text
from mesh.images.outside import Outside, Visit
from mesh.rpc.streams import read_within

TOKEN_BYTES = 1 << 16  # of the answer with a token (own choice)
HOSTS = {"docker.io": "registry-1.docker.io"}  # names of registries that are not their addresses
LOOPBACK = re.compile(r"(127\.0\.0\.1|localhost)(:\d+)?")  # without TLS, as Docker does
ACCEPTED = {"Accept": ", ".join(sorted(TYPES))}

_challenge = re.compile(r'(realm|service|scope)="([^"]*)"')


class _Token(msgspec.Struct, frozen=True):
    token: str = ""
    access_token: str = ""


class Upstream:
    """The registries that the owner allows, by host and perhaps port."""

    def __init__(self, registries: Sequence[str]) -> None:
        self._registries = tuple(registries)
        self._outside = Outside([*map(_start, registries)])

    def places(self, names: Sequence[str]) -> list[tuple[str, str]]:
        """Return the registries and repositories where images of these names may be."""
        found = []
        for name in names:
            if user_of(name) is not None:
                continue
            path = re.sub(r"(@sha256:[0-9a-f]+|:[^:/]*)$", "", name)
            host, _, rest = path.partition("/")
            named = rest != "" and (host == "localhost" or "." in host or ":" in host)
            for registry in self._registries if path else ():
                if not named or host == registry:
                    repository = rest if named else path
                    short = registry == "docker.io" and "/" not in repository
                    found.append((registry, f"library/{repository}" if short else repository))
        return list(dict.fromkeys(found))

    async def bring(
        self, store: BlobStore, places: Sequence[tuple[str, str]], digest: bytes, size: int | None, is_manifest: bool
    ) -> None:
        """Fetch a blob from the first place that has it. FetchFailed on failure; OSError if the disk is full."""
        reasons = []
        async with self._outside.visit(MAX_MANIFEST_BYTES if size is None else size) as visit:
            for registry, repository in places:
                what = "manifests" if is_manifest else "blobs"
                try:
                    source = _Source(_start(registry), self._outside.named, visit)
                    await source.fetch(f"v2/{repository}/{what}/{digest_text(digest)}", store, digest)
                    return
                except (aiohttp.ClientError, TimeoutError, FetchFailed, ValueError, *MALFORMED) as error:
                    reasons.append(f"{registry}/{repository}: {str(error) or 'it does not answer'}")
        raise FetchFailed("; ".join(reasons))


def _start(registry: str) -> str:
    """Return the start of a registry's URLs."""
    return f"{'http' if LOOPBACK.fullmatch(registry) else 'https'}://{HOSTS.get(registry, registry)}/"


class _Source:
    """A registry: the start of its URLs, and those of all that the owner has named."""

    def __init__(self, registry: str, named: tuple[str, ...], visit: Visit) -> None:
        self._registry, self._named, self._visit = registry, named, visit

    async def fetch(self, path: str, store: BlobStore, digest: bytes) -> None:
        url, token = f"{self._registry}{path}", ""
        async with self._visit.get(url, ACCEPTED) as response:
            if response.status == 401:
                token = await self._token(response.headers.get("WWW-Authenticate", ""))
            else:
                await self._visit.keep(response, store, digest)
        if token:
            async with self._visit.get(url, ACCEPTED, (self._registry, f"Bearer {token}")) as response:
                await self._visit.keep(response, store, digest)

    async def _token(self, challenge: str) -> str:
        """Get the token that a registry gives to anybody."""
        asked = dict(_challenge.findall(challenge))
        realm = asked.pop("realm", "")
        if not challenge.startswith("Bearer ") or not realm.startswith(("https://", *self._named)):
            raise FetchFailed("it wants a password")
        async with self._visit.get(f"{realm}{'&' if '?' in realm else '?'}{urlencode(asked)}", ACCEPTED) as response:
            answer = msgspec.json.decode(await read_within(response.content, TOKEN_BYTES) or b"", type=_Token)
        return answer.token or answer.access_token or "none"

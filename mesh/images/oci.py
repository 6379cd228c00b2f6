"""Manifests and indexes of OCI images (image specification 1.1, and Docker's schema 2, which has the same fields). No I/O."""

import platform
import re
from typing import NamedTuple

import msgspec

from membership.malformed import MALFORMED

MAX_MANIFEST_BYTES = 4 << 20  # distribution specification 1.1: the limit that registries should have
MAX_BLOBS = 4096  # that one manifest names (own choice; overlay2 has 127 layers)
MAX_BLOB_BYTES = 1 << 40  # own choice
INDEX, MANIFEST = "application/vnd.oci.image.index.v1+json", "application/vnd.oci.image.manifest.v1+json"
DOCKER = "application/vnd.docker.distribution.manifest"
TYPES = {INDEX, MANIFEST, f"{DOCKER}.list.v2+json", f"{DOCKER}.v2+json"}
MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}  # names of Linux and of Go

_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")


class ManifestError(ValueError):
    """The bytes are not a manifest or an index."""


class Platform(msgspec.Struct, frozen=True):
    architecture: str = ""
    os: str = ""


class Descriptor(msgspec.Struct, frozen=True):
    """A reference to a blob. `urls`: where else it is, of layers that no registry holds."""

    digest: str
    size: int
    platform: Platform = Platform()
    urls: list[str] = []

    @property
    def hash(self) -> bytes:
        return digest_hash(self.digest)


class _Document(msgspec.Struct, frozen=True, rename="camel"):
    schema_version: int
    media_type: str = ""
    config: Descriptor | None = None
    layers: list[Descriptor] = []
    manifests: list[Descriptor] | None = None


class Manifest(NamedTuple):
    """A manifest names blobs, its configuration first; an index names `manifests` and no blobs."""

    media_type: str
    blobs: tuple[Descriptor, ...] = ()
    manifests: tuple[Descriptor, ...] = ()

    @property
    def for_here(self) -> Descriptor | None:
        """Return the manifest for this machine in an index."""
        here = Platform(MACHINES.get(platform.machine(), platform.machine()), "linux")
        return next((one for one in self.manifests if one.platform == here), None)


_decoder = msgspec.json.Decoder(_Document)


def digest_hash(text: str) -> bytes:
    """Return the SHA-256 in `sha256:...`; ManifestError for any other text."""
    found = _DIGEST.fullmatch(text)
    if found is None:
        raise ManifestError(f"{text[:80]!r} is not a SHA-256 digest")
    return bytes.fromhex(found[1])


def digest_text(digest: bytes) -> str:
    return f"sha256:{digest.hex()}"


def decode_oci(data: bytes) -> Manifest:
    """Decode a manifest or an index. ManifestError for anything else."""
    try:
        if len(data) > MAX_MANIFEST_BYTES:
            raise ManifestError(f"a manifest has at most {MAX_MANIFEST_BYTES} bytes")
        document = _decoder.decode(data)
    except MALFORMED as error:
        raise ManifestError(f"not a manifest of an image: {error}") from error
    if document.schema_version != 2 or (document.config is None) == (document.manifests is None):
        raise ManifestError("not a manifest of an image: it has either a configuration or manifests")
    manifests = document.manifests or []
    blobs = [] if document.config is None else [document.config, *document.layers]
    if not all(0 <= one.size <= MAX_BLOB_BYTES and one.hash for one in (*blobs, *manifests)):
        raise ManifestError("a blob has an impossible size")
    if len(blobs) + len(manifests) > MAX_BLOBS or any(one.size > MAX_MANIFEST_BYTES for one in manifests):
        raise ManifestError("the manifest names too much")
    kind = INDEX if document.manifests is not None else MANIFEST
    held = {one.digest: one for one in blobs if not one.urls}
    media_type = document.media_type if document.media_type in TYPES else kind
    return Manifest(media_type, tuple(held.values()), tuple(manifests))

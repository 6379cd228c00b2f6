"""The parts of an image, so that it can be fetched in pieces from several nodes. No I/O.

An image is its configuration and its layers; the configuration's SHA-256 is the image's id, and it names the SHA-256 of each
layer's tar. An image manifest adds the length of each layer and the hashes of its pieces. It is not signed: it is verified by the
complete layers, and a node that gave a wrong one is caught.
"""

from collections.abc import Mapping, Sequence
from hashlib import sha256

import msgspec

from membership.malformed import MALFORMED

PIECE_BYTES = 4 << 20  # small enough to fetch again, large enough for small manifests (own choice)
PIECE_HASH_BYTES = 32  # BLAKE3, as the checkpoint store's
MAX_CONFIG_BYTES = 4 << 20
MAX_LAYERS = 127  # of overlay2
MAX_LAYER_BYTES = 1 << 40
MAX_IMAGE_MANIFEST_BYTES = 16 << 20  # of an image of 2 TiB

Place = tuple[bytes, int]  # a layer and an offset in it


class ImageManifestError(ValueError):
    """The bytes are not a manifest of that image: the sender lied or has another version."""


class Layer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A layer. `digest` is the SHA-256 of its uncompressed tar; `pieces` the concatenated hashes of its pieces."""

    digest: bytes
    size: int
    pieces: bytes

    @property
    def hashes(self) -> list[bytes]:
        return [self.pieces[at : at + PIECE_HASH_BYTES] for at in range(0, len(self.pieces), PIECE_HASH_BYTES)]

    def length(self, number: int) -> int:
        """Return the length of one of its pieces."""
        return min(PIECE_BYTES, self.size - number * PIECE_BYTES)


class ImageManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The manifest. `layers` has each layer once, in the order of the configuration."""

    config: bytes
    layers: tuple[Layer, ...]

    @property
    def size(self) -> int:
        return sum(layer.size for layer in self.layers)

    @property
    def by_digest(self) -> dict[bytes, Layer]:
        return {layer.digest: layer for layer in self.layers}


class _RootFs(msgspec.Struct):
    type: str
    diff_ids: list[str]


class _Config(msgspec.Struct):
    rootfs: _RootFs


_image_manifest_decoder = msgspec.msgpack.Decoder(ImageManifest)
_config_decoder = msgspec.json.Decoder(_Config)


def layers_of(config: bytes) -> tuple[bytes, ...]:
    """Return the SHA-256 of each layer, lowest first, from an image's configuration. ImageManifestError if it is not valid."""
    try:
        rootfs = _config_decoder.decode(config).rootfs
        digests = tuple(_digest(text) for text in rootfs.diff_ids)
    except (ValueError, *MALFORMED) as error:
        raise ImageManifestError(f"not an image's configuration: {error}") from error
    if rootfs.type != "layers" or not 1 <= len(digests) <= MAX_LAYERS:
        raise ImageManifestError(f"an image has 1 to {MAX_LAYERS} layers")
    return digests


def _digest(text: str) -> bytes:
    name, _, value = text.partition(":")
    if name != "sha256" or len(value) != 64 or value != value.lower():
        raise ValueError(f"{text[:80]!r} is not a SHA-256 digest")
    return bytes.fromhex(value)


def encode_image_manifest(image_manifest: ImageManifest) -> bytes:
    return msgspec.msgpack.encode(image_manifest)


def decode_image_manifest(data: bytes, image: bytes) -> ImageManifest:
    """Decode the manifest of this image. ImageManifestError for anything else."""
    try:
        image_manifest = _image_manifest_decoder.decode(data)
    except MALFORMED as error:
        raise ImageManifestError(f"not an image manifest: {error}") from error
    if len(image_manifest.config) > MAX_CONFIG_BYTES or sha256(image_manifest.config).digest() != image:
        raise ImageManifestError("the image manifest is of another image")
    if tuple(layer.digest for layer in image_manifest.layers) != tuple(dict.fromkeys(layers_of(image_manifest.config))):
        raise ImageManifestError("the image manifest has other layers than the image")
    for layer in image_manifest.layers:
        count = -(-layer.size // PIECE_BYTES)
        if not 0 < layer.size <= MAX_LAYER_BYTES or len(layer.pieces) != count * PIECE_HASH_BYTES:
            raise ImageManifestError("a layer's pieces do not add up")
    lengths: dict[bytes, int] = {}
    for layer in image_manifest.layers:
        for number, piece in enumerate(layer.hashes):
            if lengths.setdefault(piece, layer.length(number)) != layer.length(number):
                raise ImageManifestError("one piece has two lengths")
    return image_manifest


def places(layers: Sequence[Layer]) -> dict[bytes, list[Place]]:
    """Return the places of each piece; equal pieces have several."""
    found: dict[bytes, list[Place]] = {}
    for layer in layers:
        for number, piece in enumerate(layer.hashes):
            found.setdefault(piece, []).append((layer.digest, number * PIECE_BYTES))
    return found


def lengths(layers: Sequence[Layer]) -> dict[bytes, int]:
    return {piece: layer.length(number) for layer in layers for number, piece in enumerate(layer.hashes)}


def new_layers(image_manifest: ImageManifest, known: Sequence[tuple[bytes, ...]]) -> list[Layer]:
    """Return the layers that an engine with these images lacks; each is given by its layers, lowest first.

    An engine knows a layer only on top of the same lower layers.
    """
    wanted = layers_of(image_manifest.config)
    shared = max((_common(wanted, other) for other in known), default=0)
    lacking = set(wanted[shared:])
    return [layer for layer in image_manifest.layers if layer.digest in lacking]


def _common(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    count = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            break
        count += 1
    return count


def largest_agreement(image_manifests: Mapping[bytes, bytes]) -> tuple[bytes, list[bytes]]:
    """Return the manifest that most nodes gave (ties: the smallest), and those nodes."""
    givers: dict[bytes, list[bytes]] = {}
    for node, data in image_manifests.items():
        givers.setdefault(data, []).append(node)
    return min(givers.items(), key=lambda pair: (-len(pair[1]), pair[0]))


def archive_manifest(image_manifest: ImageManifest, tag: str) -> bytes:
    """Return `manifest.json` for `docker load`; see `archive_names`."""
    config, names = archive_names(image_manifest)
    layers = [names[digest] for digest in layers_of(image_manifest.config)]
    return msgspec.json.encode([{"Config": config, "RepoTags": [tag], "Layers": layers}])


def archive_names(image_manifest: ImageManifest) -> tuple[str, dict[bytes, str]]:
    """Return the archive's name for the configuration and for each layer."""
    return sha256(image_manifest.config).hexdigest() + ".json", {
        layer.digest: f"{layer.digest.hex()}/layer.tar" for layer in image_manifest.layers
    }

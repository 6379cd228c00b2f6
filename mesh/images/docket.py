"""What an image is made of, so that it can be fetched in pieces from several nodes. No I/O.

An image is its configuration and its layers; the configuration's SHA-256 is the image's id, and it names the SHA-256 of each
layer's tar. A docket adds how long each layer is, and the hashes of its pieces. Nobody signs it: it is believed only until the
layers are whole, and whoever gave one that does not lead to them has lied.
"""

from collections.abc import Mapping, Sequence
from hashlib import sha256

import msgspec

PIECE_BYTES = 4 << 20  # small enough to be asked for again, large enough that a docket stays small; ours
PIECE_HASH_BYTES = 32  # BLAKE3, as the checkpoint store's
MAX_CONFIG_BYTES = 4 << 20
MAX_LAYERS = 127  # of overlay2
MAX_LAYER_BYTES = 1 << 40
MAX_DOCKET_BYTES = 16 << 20  # of an image of 2 TiB

Place = tuple[bytes, int]  # a layer, and where in it


class DocketError(ValueError):
    """No docket of that image: its giver has lied, or is of another version."""


class Layer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`digest` is the SHA-256 of its tar, uncompressed; `pieces` are hashes, one after the other."""

    digest: bytes
    size: int
    pieces: bytes

    @property
    def hashes(self) -> list[bytes]:
        return [self.pieces[at : at + PIECE_HASH_BYTES] for at in range(0, len(self.pieces), PIECE_HASH_BYTES)]

    def length(self, number: int) -> int:
        """Of one of its pieces."""
        return min(PIECE_BYTES, self.size - number * PIECE_BYTES)


class Docket(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`layers` once each, in the order in which the configuration first names them."""

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


_docket_decoder = msgspec.msgpack.Decoder(Docket)
_config_decoder = msgspec.json.Decoder(_Config)


def layers_of(config: bytes) -> tuple[bytes, ...]:
    """The SHA-256 of each layer, lowest first, as an image's configuration names them; DocketError if it is none."""
    try:
        rootfs = _config_decoder.decode(config).rootfs
        digests = tuple(_digest(text) for text in rootfs.diff_ids)
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise DocketError(f"not an image's configuration: {error}") from error
    if rootfs.type != "layers" or not 1 <= len(digests) <= MAX_LAYERS:
        raise DocketError(f"an image has 1 to {MAX_LAYERS} layers")
    return digests


def _digest(text: str) -> bytes:
    name, _, value = text.partition(":")
    if name != "sha256" or len(value) != 64 or value != value.lower():
        raise ValueError(f"{text[:80]!r} is no SHA-256 digest")
    return bytes.fromhex(value)


def encode_docket(docket: Docket) -> bytes:
    return msgspec.msgpack.encode(docket)


def decode_docket(data: bytes, image: bytes) -> Docket:
    """The docket of this very image; DocketError for anything else."""
    try:
        docket = _docket_decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DocketError(f"not a docket: {error}") from error
    if len(docket.config) > MAX_CONFIG_BYTES or sha256(docket.config).digest() != image:
        raise DocketError("the docket is of another image")
    if tuple(layer.digest for layer in docket.layers) != tuple(dict.fromkeys(layers_of(docket.config))):
        raise DocketError("the docket has other layers than the image")
    for layer in docket.layers:
        count = -(-layer.size // PIECE_BYTES)
        if not 0 < layer.size <= MAX_LAYER_BYTES or len(layer.pieces) != count * PIECE_HASH_BYTES:
            raise DocketError("a layer's pieces do not add up")
    lengths: dict[bytes, int] = {}
    for layer in docket.layers:
        for number, piece in enumerate(layer.hashes):
            if lengths.setdefault(piece, layer.length(number)) != layer.length(number):
                raise DocketError("one piece has two lengths")
    return docket


def places(layers: Sequence[Layer]) -> dict[bytes, list[Place]]:
    """Where each piece belongs; equal ones stand in several places."""
    found: dict[bytes, list[Place]] = {}
    for layer in layers:
        for number, piece in enumerate(layer.hashes):
            found.setdefault(piece, []).append((layer.digest, number * PIECE_BYTES))
    return found


def lengths(layers: Sequence[Layer]) -> dict[bytes, int]:
    return {piece: layer.length(number) for layer in layers for number, piece in enumerate(layer.hashes)}


def new_layers(docket: Docket, known: Sequence[tuple[bytes, ...]]) -> list[Layer]:
    """The layers that an engine with these images (each by its layers, lowest first) lacks. It knows a layer only upon the same
    ones below it."""
    wanted = layers_of(docket.config)
    shared = max((_common(wanted, other) for other in known), default=0)
    lacking = set(wanted[shared:])
    return [layer for layer in docket.layers if layer.digest in lacking]


def _common(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    count = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            break
        count += 1
    return count


def largest_agreement(dockets: Mapping[bytes, bytes]) -> tuple[bytes, list[bytes]]:
    """The docket that most nodes give (of equally many, the least), and who they are."""
    givers: dict[bytes, list[bytes]] = {}
    for node, data in dockets.items():
        givers.setdefault(data, []).append(node)
    return min(givers.items(), key=lambda pair: (-len(pair[1]), pair[0]))


def archive_manifest(docket: Docket, tag: str) -> bytes:
    """`manifest.json` of what `docker load` takes; see `archive_names`."""
    config, names = archive_names(docket)
    layers = [names[digest] for digest in layers_of(docket.config)]
    return msgspec.json.encode([{"Config": config, "RepoTags": [tag], "Layers": layers}])


def archive_names(docket: Docket) -> tuple[str, dict[bytes, str]]:
    """What the configuration, and each layer, is called in the archive."""
    return sha256(docket.config).hexdigest() + ".json", {
        layer.digest: f"{layer.digest.hex()}/layer.tar" for layer in docket.layers
    }

"""Image manifests: valid ones lead to the image's hash, hostile ones are refused."""

import json
from hashlib import sha256
from typing import Any

import msgspec
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from mesh.images.image_manifest import (
    MAX_LAYERS,
    PIECE_BYTES,
    ImageManifest,
    ImageManifestError,
    Layer,
    archive_manifest,
    archive_names,
    decode_image_manifest,
    encode_image_manifest,
    largest_agreement,
    layers_of,
    lengths,
    new_layers,
    places,
)
from mesh.images.messages import decode_answer, decode_fetching, decode_offer, decode_pieces, encode


def layer_of(content: bytes) -> Layer:
    pieces = b"".join(blake3(content[at : at + PIECE_BYTES]).digest() for at in range(0, len(content), PIECE_BYTES))
    return Layer(sha256(content).digest(), len(content), pieces)


def image_manifest_of(*contents: bytes, **more: Any) -> tuple[bytes, ImageManifest]:
    """The image of these layers, and its image manifest."""
    layers = [layer_of(content) for content in contents]
    rootfs = {"type": "layers", "diff_ids": [f"sha256:{layer.digest.hex()}" for layer in layers]}
    config = json.dumps({"architecture": "amd64", "rootfs": rootfs, **more}).encode()
    unique = {layer.digest: layer for layer in layers}
    return sha256(config).digest(), ImageManifest(config, tuple(unique.values()))


@given(st.lists(st.binary(min_size=1, max_size=50), min_size=1, max_size=5))
def test_manifest_round_trips(contents: list[bytes]) -> None:
    image, image_manifest = image_manifest_of(*contents)
    assert decode_image_manifest(encode_image_manifest(image_manifest), image) == image_manifest
    assert layers_of(image_manifest.config) == tuple(sha256(content).digest() for content in contents)
    assert json.loads(archive_manifest(image_manifest, "a:b"))[0]["Config"] == f"{image.hex()}.json"
    assert len(json.loads(archive_manifest(image_manifest, "a:b"))[0]["Layers"]) == len(contents)
    assert set(archive_names(image_manifest)[1]) == {layer.digest for layer in image_manifest.layers}


@given(st.binary(max_size=300))
def test_malformed_manifest_is_refused(data: bytes) -> None:
    for decode in (decode_offer, decode_answer, decode_fetching, decode_pieces):
        try:
            decode(data)
        except ValueError:
            continue
    with pytest.raises(ImageManifestError):
        decode_image_manifest(data, sha256(b"").digest())


@given(
    st.binary(max_size=60)
    | st.recursive(
        st.none() | st.text(max_size=9),
        lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["rootfs", "diff_ids", "type"]), inner),
    ).map(lambda value: json.dumps(value).encode())
)
def test_malformed_configuration_is_refused(config: bytes) -> None:
    with pytest.raises(ImageManifestError):
        layers_of(config)
    with pytest.raises(ImageManifestError):
        decode_image_manifest(encode_image_manifest(ImageManifest(config, ())), sha256(config).digest())


def test_inconsistent_manifest_is_refused() -> None:
    image, image_manifest = image_manifest_of(b"one" * 99, b"two")
    first, second = image_manifest.layers
    wrong = [
        ImageManifest(image_manifest.config + b" ", image_manifest.layers),
        ImageManifest(image_manifest.config, (first,)),
        ImageManifest(image_manifest.config, (second, first)),
        ImageManifest(image_manifest.config, (first, second, layer_of(b"three"))),
        ImageManifest(image_manifest.config, (first, Layer(second.digest, PIECE_BYTES + 1, second.pieces))),
        ImageManifest(image_manifest.config, (first, Layer(second.digest, 0, b""))),
        ImageManifest(image_manifest.config, (first, Layer(second.digest, -1, b""))),
        ImageManifest(image_manifest.config, (first, Layer(second.digest, 2**62, second.pieces))),
        ImageManifest(image_manifest.config, (first, Layer(second.digest, 3, second.pieces[:-1]))),
        ImageManifest(image_manifest.config, (first, Layer(second.digest, 4, first.pieces))),
    ]
    for lie in wrong:
        with pytest.raises(ImageManifestError):
            decode_image_manifest(encode_image_manifest(lie), image)
    with pytest.raises(ImageManifestError, match="another image"):
        decode_image_manifest(encode_image_manifest(image_manifest), sha256(b"x").digest())


def test_layer_count_is_limited() -> None:
    image, image_manifest = image_manifest_of(*(str(number).encode() for number in range(MAX_LAYERS)))
    assert decode_image_manifest(encode_image_manifest(image_manifest), image)
    image, image_manifest = image_manifest_of(*(str(number).encode() for number in range(MAX_LAYERS + 1)))
    with pytest.raises(ImageManifestError, match="127"):
        decode_image_manifest(encode_image_manifest(image_manifest), image)


def test_equal_pieces_are_fetched_once() -> None:
    zeros = bytes(2 * PIECE_BYTES + 5)
    layers = [layer_of(zeros), layer_of(zeros + b"x")]
    assert len(lengths(layers)) == 3
    found = places(layers)
    assert sum(map(len, found.values())) == 6
    assert {at for where in found.values() for _, at in where} == {0, PIECE_BYTES, 2 * PIECE_BYTES}


def test_layer_needs_same_lower_layers() -> None:
    one, two, three = (sha256(content).digest() for content in (b"1", b"2", b"3"))
    _, image_manifest = image_manifest_of(b"1", b"2", b"3")

    def lacks(*known: tuple[bytes, ...]) -> list[bytes]:
        return [layer.digest for layer in new_layers(image_manifest, known)]

    assert lacks() == [one, two, three]
    assert lacks((one,), (one, two, one)) == [three]
    assert lacks((two, three), (three,)) == [one, two, three]
    assert lacks((one, two, three, one)) == []
    _, doubled = image_manifest_of(b"1", b"2", b"1")
    assert [layer.digest for layer in new_layers(doubled, [(one, two)])] == [one], "above another it is another layer"


def test_agreeing_nodes_are_grouped() -> None:
    a, b, c = b"a" * 32, b"b" * 32, b"c" * 32
    assert largest_agreement({a: b"x", b: b"y", c: b"y"}) == (b"y", [b, c])
    assert largest_agreement({b: b"y", a: b"x"}) == largest_agreement({a: b"x", b: b"y"}) == (b"x", [a])


def test_piece_request_is_bounded() -> None:
    assert decode_pieces(encode([b"p" * 32])) == [b"p" * 32]
    for wrong in ([], [b"short"], [b"p" * 32] * 5000, "text", {"a": 1}):
        with pytest.raises(ValueError):
            decode_pieces(msgspec.msgpack.encode(wrong))

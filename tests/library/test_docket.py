"""What an image is made of: dockets that lead to the image's hash, and nothing that an enemy writes in their place."""

import json
from hashlib import sha256
from typing import Any

import msgspec
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from mesh.images.docket import (
    MAX_LAYERS,
    PIECE_BYTES,
    Docket,
    DocketError,
    Layer,
    archive_manifest,
    archive_names,
    decode_docket,
    encode_docket,
    largest_agreement,
    layers_of,
    lengths,
    new_layers,
    places,
)
from mesh.images.questions import decode_answer, decode_fetching, decode_offer, decode_pieces, encode


def layer_of(content: bytes) -> Layer:
    pieces = b"".join(blake3(content[at : at + PIECE_BYTES]).digest() for at in range(0, len(content), PIECE_BYTES))
    return Layer(sha256(content).digest(), len(content), pieces)


def docket_of(*contents: bytes, **more: Any) -> tuple[bytes, Docket]:
    """The image of these layers, and its docket."""
    layers = [layer_of(content) for content in contents]
    rootfs = {"type": "layers", "diff_ids": [f"sha256:{layer.digest.hex()}" for layer in layers]}
    config = json.dumps({"architecture": "amd64", "rootfs": rootfs, **more}).encode()
    unique = {layer.digest: layer for layer in layers}
    return sha256(config).digest(), Docket(config, tuple(unique.values()))


@given(st.lists(st.binary(min_size=1, max_size=50), min_size=1, max_size=5))
def test_a_docket_comes_back_as_it_was(contents: list[bytes]) -> None:
    image, docket = docket_of(*contents)
    assert decode_docket(encode_docket(docket), image) == docket
    assert layers_of(docket.config) == tuple(sha256(content).digest() for content in contents)
    assert json.loads(archive_manifest(docket, "a:b"))[0]["Config"] == f"{image.hex()}.json"
    assert len(json.loads(archive_manifest(docket, "a:b"))[0]["Layers"]) == len(contents)
    assert set(archive_names(docket)[1]) == {layer.digest for layer in docket.layers}


@given(st.binary(max_size=300))
def test_bytes_that_are_no_docket(data: bytes) -> None:
    for decode in (decode_offer, decode_answer, decode_fetching, decode_pieces):
        try:
            decode(data)
        except ValueError:
            continue
    with pytest.raises(DocketError):
        decode_docket(data, sha256(b"").digest())


@given(
    st.binary(max_size=60)
    | st.recursive(
        st.none() | st.text(max_size=9),
        lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["rootfs", "diff_ids", "type"]), inner),
    ).map(lambda value: json.dumps(value).encode())
)
def test_a_configuration_that_is_none(config: bytes) -> None:
    with pytest.raises(DocketError):
        layers_of(config)
    with pytest.raises(DocketError):
        decode_docket(encode_docket(Docket(config, ())), sha256(config).digest())


def test_a_docket_that_lies() -> None:
    image, docket = docket_of(b"one" * 99, b"two")
    first, second = docket.layers
    wrong = [
        Docket(docket.config + b" ", docket.layers),
        Docket(docket.config, (first,)),
        Docket(docket.config, (second, first)),
        Docket(docket.config, (first, second, layer_of(b"three"))),
        Docket(docket.config, (first, Layer(second.digest, PIECE_BYTES + 1, second.pieces))),
        Docket(docket.config, (first, Layer(second.digest, 0, b""))),
        Docket(docket.config, (first, Layer(second.digest, -1, b""))),
        Docket(docket.config, (first, Layer(second.digest, 2**62, second.pieces))),
        Docket(docket.config, (first, Layer(second.digest, 3, second.pieces[:-1]))),
        Docket(docket.config, (first, Layer(second.digest, 4, first.pieces))),
    ]
    for lie in wrong:
        with pytest.raises(DocketError):
            decode_docket(encode_docket(lie), image)
    with pytest.raises(DocketError, match="another image"):
        decode_docket(encode_docket(docket), sha256(b"x").digest())


def test_no_more_layers_than_an_engine_can_stack() -> None:
    image, docket = docket_of(*(str(number).encode() for number in range(MAX_LAYERS)))
    assert decode_docket(encode_docket(docket), image)
    image, docket = docket_of(*(str(number).encode() for number in range(MAX_LAYERS + 1)))
    with pytest.raises(DocketError, match="127"):
        decode_docket(encode_docket(docket), image)


def test_equal_pieces_are_fetched_once_and_belong_to_every_place() -> None:
    zeros = bytes(2 * PIECE_BYTES + 5)
    layers = [layer_of(zeros), layer_of(zeros + b"x")]
    assert len(lengths(layers)) == 3
    found = places(layers)
    assert sum(map(len, found.values())) == 6
    assert {at for where in found.values() for _, at in where} == {0, PIECE_BYTES, 2 * PIECE_BYTES}


def test_an_engine_knows_a_layer_only_upon_the_same_ones() -> None:
    one, two, three = (sha256(content).digest() for content in (b"1", b"2", b"3"))
    _, docket = docket_of(b"1", b"2", b"3")

    def lacks(*known: tuple[bytes, ...]) -> list[bytes]:
        return [layer.digest for layer in new_layers(docket, known)]

    assert lacks() == [one, two, three]
    assert lacks((one,), (one, two, one)) == [three]
    assert lacks((two, three), (three,)) == [one, two, three]
    assert lacks((one, two, three, one)) == []
    _, doubled = docket_of(b"1", b"2", b"1")
    assert [layer.digest for layer in new_layers(doubled, [(one, two)])] == [one], "above another it is another layer"


def test_those_who_agree_are_asked_together() -> None:
    a, b, c = b"a" * 32, b"b" * 32, b"c" * 32
    assert largest_agreement({a: b"x", b: b"y", c: b"y"}) == (b"y", [b, c])
    assert largest_agreement({b: b"y", a: b"x"}) == largest_agreement({a: b"x", b: b"y"}) == (b"x", [a])


def test_a_request_for_pieces_is_bounded() -> None:
    assert decode_pieces(encode([b"p" * 32])) == [b"p" * 32]
    for wrong in ([], [b"short"], [b"p" * 32] * 5000, "text", {"a": 1}):
        with pytest.raises(ValueError):
            decode_pieces(msgspec.msgpack.encode(wrong))

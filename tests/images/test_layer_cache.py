"""Layers on the disk: gone on with where they were left, never believed, never more than there is room for."""

import io
import os
import time
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mesh.images import layer_cache as layers_module
from mesh.images.image_manifest import PIECE_BYTES, ImageManifest, Layer
from mesh.images.layer_cache import IDLE_S, PART_S, DamagedLayer, LayerStore, NoRoom
from tests.images.test_image_manifest import image_manifest_of, layer_of


@pytest.fixture
def store(tmp_path: Path) -> LayerStore:
    return LayerStore(tmp_path, 1 << 30)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test machines may have little room."""
    monkeypatch.setattr(layers_module, "SPARE_BYTES", 0)


def kept(store: LayerStore, content: bytes) -> Layer:
    digest, layer = store.take(io.BytesIO(content), {sha256(content).digest()})
    assert layer is not None and layer.digest == digest
    return layer


def pieces(content: bytes) -> list[bytes]:
    return [content[at : at + PIECE_BYTES] for at in range(0, len(content), PIECE_BYTES)]


def aged(store: LayerStore, layer: Layer, age_s: float, suffix: str = "") -> None:
    path = store._layers / (layer.digest.hex() + suffix)
    os.utime(path, (time.time() - age_s,) * 2)


CONTENT = os.urandom(2 * PIECE_BYTES + 1000)


def test_saved_layer_is_kept(store: LayerStore) -> None:
    layer = kept(store, CONTENT)
    assert layer == layer_of(CONTENT) and store.has(layer)
    assert [store.read(layer, number) for number in range(3)] == pieces(CONTENT)
    assert b"".join(store.blocks(layer)) == CONTENT
    before = set(store._layers.iterdir())
    assert store.take(io.BytesIO(b"other"), {b"x" * 32}) == (sha256(b"other").digest(), None)
    assert set(store._layers.iterdir()) == before


def test_fetch_resumes_after_restart(store: LayerStore, tmp_path: Path) -> None:
    layer = layer_of(CONTENT)
    assert store.begun(layer) == set()
    store.write(layer.digest, PIECE_BYTES, pieces(CONTENT)[1])
    again = LayerStore(tmp_path, 1 << 30)
    assert again.begun(layer) == {layer.hashes[1]}
    for number in (0, 2):
        again.write(layer.digest, number * PIECE_BYTES, pieces(CONTENT)[number])
    assert not again.has(layer) and again.finish(layer) and again.has(layer)
    assert b"".join(again.blocks(layer)) == CONTENT


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.lists(st.tuples(st.integers(0, len(CONTENT)), st.binary(max_size=2000)), max_size=4), st.booleans())
def test_only_valid_pieces_count_after_crash(store: LayerStore, damage: list[tuple[int, bytes]], cut: bool) -> None:
    layer = layer_of(CONTENT)
    store.begun(layer)
    for number, piece in enumerate(pieces(CONTENT)):
        store.write(layer.digest, number * PIECE_BYTES, piece)
    part = store._part(layer.digest)
    data = bytearray(CONTENT)
    for at, noise in damage:
        data[at : at + len(noise)] = noise
    del data[len(CONTENT) :]
    part.write_bytes(data[: len(data) // 2] if cut else data)
    found = store.begun(layer)
    for number, piece in enumerate(layer.hashes):
        same = not cut and bytes(data[number * PIECE_BYTES : (number + 1) * PIECE_BYTES]) == pieces(CONTENT)[number]
        assert (piece in found) == same
    for number, piece in enumerate(pieces(CONTENT)):
        if layer.hashes[number] not in found:
            store.write(layer.digest, number * PIECE_BYTES, piece)
    assert store.finish(layer)


def test_wrong_layer_is_removed(store: LayerStore) -> None:
    real, lie = layer_of(b"real" * 100), layer_of(b"lies" * 100)
    named = Layer(real.digest, lie.size, lie.pieces)
    store.begun(named)
    store.write(named.digest, 0, b"lies" * 100)
    assert store.begun(named) == set(lie.hashes), "its pieces are right"
    assert not store.finish(named) and not store.has(real) and not store._part(named.digest).exists()


def test_damaged_layer_is_not_given(store: LayerStore) -> None:
    image, image_manifest = image_manifest_of(CONTENT)
    layer = kept(store, CONTENT)
    store.keep(image, image_manifest)
    assert store.image_manifest(image) == image_manifest
    with store._whole(layer.digest).open("r+b") as file:
        file.seek(PIECE_BYTES + 7)
        file.write(b"\0\0\0\0")
    assert store.read(layer, 0) == pieces(CONTENT)[0]
    with pytest.raises(DamagedLayer):
        store.read(layer, 1)
    assert not store.has(layer) and store.image_manifest(image) is None


def test_damaged_manifest_is_ignored(store: LayerStore) -> None:
    image, image_manifest = image_manifest_of(CONTENT)
    kept(store, CONTENT)
    store.keep(image, ImageManifest(image_manifest.config + b" ", image_manifest.layers))
    assert store.image_manifest(image) is None and store.image_manifest(b"x" * 32) is None


def test_least_recently_used_layer_is_removed(tmp_path: Path) -> None:
    store = LayerStore(tmp_path, 3 * PIECE_BYTES)
    contents = [bytes([number]) * PIECE_BYTES for number in range(5)]
    found = [kept(store, content) for content in contents]
    for number, layer in enumerate(found):
        aged(store, layer, IDLE_S * (10 - number))
    with store.holding([found[0].digest]):
        store.trim()
        assert [store.has(layer) for layer in found] == [True, False, False, True, True]
        assert store.stored_bytes() <= 3 * PIECE_BYTES
    aged(store, found[0], IDLE_S / 2)
    aged(store, found[3], IDLE_S / 2)
    kept(store, contents[1])
    store.trim()
    assert [store.has(layer) for layer in found] == [True, True, False, True, False], (
        "nothing that was used a moment ago"
    )


def test_abandoned_part_is_removed(store: LayerStore) -> None:
    old, new, held = (layer_of(bytes([number]) * 100) for number in range(3))
    for layer in (old, new, held):
        store.begun(layer)
    aged(store, old, 2 * PART_S, ".part")
    aged(store, held, 2 * PART_S, ".part")
    with store.holding([held.digest]):
        store.trim()
    assert [store._part(layer.digest).exists() for layer in (old, new, held)] == [False, True, True]


def test_full_disk_is_reported(store: LayerStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoRoom, match=r"no space for .* GiB free"):
        store.check_room(1 << 60)
    monkeypatch.setattr(layers_module, "SPARE_BYTES", 1 << 60)
    with pytest.raises(NoRoom):
        store.take(io.BytesIO(b"x"), {sha256(b"x").digest()})
    assert list(store._layers.iterdir()) == []


def test_leftover_of_save_is_removed(tmp_path: Path) -> None:
    store = LayerStore(tmp_path, 0)
    (store._layers / "new-0123").write_bytes(b"half")
    LayerStore(tmp_path, 0)
    assert list(store._layers.iterdir()) == []

"""Sealed state: whoever keeps it can check it and cannot read it, and nobody without the key can put bytes under its ids."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.checker import verify
from ckptstore.codec import encode
from ckptstore.coding import RAW, ZSTD, Coding
from ckptstore.errors import CorruptChunk, Locked, MissingChunks, StoreError
from ckptstore.pack import HEADER_BYTES, ObjectHeader, check_stored, chunk_name, encode_header, open_chunk, wrap
from ckptstore.vault import FRONT_BYTES, SEALED_BYTES, Vault
from tests.ckptstore.worlds import VAULT, copy, open_store, read_tree, save, write_tree

OTHER = Vault(b"another key of 32 bytes........!")
SECRET = b"the weights of a model that nobody may see. "


def sealed(data: bytes, vault: Vault = VAULT, codec: int = RAW) -> tuple[ObjectHeader, bytes]:
    header, stored = wrap(chunk_name(data, vault), encode(data, Coding(codec)), len(data), codec, 0, None, vault)
    return header, bytes(stored)


def test_nothing_on_a_holders_disk_can_be_read(tmp_path: Path) -> None:
    ours, theirs = open_store(tmp_path / "ours"), open_store(tmp_path / "theirs")
    write_tree(tmp_path / "in", {"secret-name.bin": SECRET * 1000, "noise": os.urandom(5000)})
    saved = save(ours, tmp_path / "in", vault=VAULT)
    copy(ours, theirs, saved)
    for path in (tmp_path / "theirs").rglob("*"):
        if path.is_file():
            found = path.read_bytes()
            assert SECRET not in found and b"secret-name" not in found and VAULT.key not in found, path
    for vault in (None, OTHER):
        with pytest.raises(Locked, match="owner and its runners"):
            theirs.restore(saved.id, tmp_path / "out", prefix="ckpt", vault=vault)
        with pytest.raises(Locked):
            theirs.chunk(saved.manifest.chunks[0], vault)
    assert not (tmp_path / "out").exists()
    theirs.restore(saved.id, tmp_path / "out", prefix="ckpt", vault=VAULT)
    assert read_tree(tmp_path / "out") == read_tree(tmp_path / "in")
    assert (
        (info := theirs.manifests()[0]).encrypted and info.total_bytes == saved.manifest.total_bytes and info.files == 3
    )


def test_an_id_tells_nothing_to_who_can_guess_the_bytes() -> None:
    names = {chunk_name(SECRET, vault).id for vault in (None, VAULT, OTHER)}
    assert len(names) == 3 and chunk_name(SECRET, VAULT) == chunk_name(SECRET, Vault(VAULT.key))
    assert chunk_name(SECRET).id not in {VAULT.name(SECRET).inner, OTHER.name(SECRET).inner}


def test_the_same_chunk_is_never_sealed_to_the_same_bytes() -> None:
    (_, one), (_, two) = sealed(SECRET), sealed(SECRET)
    assert one[FRONT_BYTES:] != two[FRONT_BYTES:] and len(one) == len(SECRET) + SEALED_BYTES


@given(st.binary(max_size=2000), st.sampled_from([RAW, ZSTD]))
def test_what_was_sealed_is_opened(data: bytes, codec: int) -> None:
    header, stored = sealed(data, codec=codec)
    check_stored(header, stored)
    assert open_chunk(header, stored, None, VAULT) == data


@given(st.binary(min_size=1, max_size=300), st.data())
def test_any_flipped_bit_is_found_without_the_key(chunk: bytes, data: st.DataObject) -> None:
    header, stored = sealed(chunk)
    place = data.draw(st.integers(0, len(stored) * 8 - 1))
    changed = bytearray(stored)
    changed[place // 8] ^= 1 << place % 8
    with pytest.raises(CorruptChunk):
        check_stored(header, bytes(changed))


def test_nobody_without_the_key_puts_bytes_under_its_ids(tmp_path: Path) -> None:
    """A holder that saw a manifest could else be first with nonsense, and the real chunk would not be sent any more."""
    theirs = open_store(tmp_path / "theirs")
    name = chunk_name(SECRET, VAULT)
    mine, stored = wrap(chunk_name(b"nonsense", OTHER), b"nonsense", 8, RAW, 0, None, OTHER)
    real, _ = wrap(name, SECRET, len(SECRET), RAW, 0, None, VAULT)
    plain, _ = wrap(chunk_name(b"nonsense"), b"nonsense", 8, RAW, 0, None)
    renamed = [
        ObjectHeader(name.id, RAW, 0, 8, len(stored), None, mine.stored_check, True),
        ObjectHeader(name.id, RAW, 0, 8, 8, None, plain.stored_check),
    ]
    forged = VAULT.realm + name.inner + bytes(stored)[64:]
    attempts = [
        encode_header(renamed[0]) + bytes(stored),
        encode_header(renamed[1]) + b"nonsense",
        encode_header(renamed[0]) + forged,
        encode_header(real) + bytes(real.stored_length),
    ]
    for attempt in attempts:
        receiver = theirs.receive(10_000)
        with pytest.raises(CorruptChunk):
            receiver.feed(attempt)
        receiver.abort()
    assert theirs.missing([name.id]) == [name.id]


@given(st.binary(max_size=400))
def test_hostile_bytes_that_claim_to_be_sealed_are_one_kind_of_error(data: bytes) -> None:
    claimed = ObjectHeader(b"i" * 32, ZSTD, 0, 100, len(data), None, b"c" * 16, True)
    with pytest.raises(CorruptChunk):
        check_stored(claimed, data)
    for vault in (None, VAULT):
        with pytest.raises((CorruptChunk, Locked)):
            open_chunk(claimed, VAULT.realm + data, None, vault)


def test_a_swapped_meaning_is_found() -> None:
    """The bytes are those of the chunk, but the header says to decode them otherwise."""
    header, stored = sealed(SECRET * 50, codec=ZSTD)
    for changed in (
        ObjectHeader(header.id, RAW, 0, len(stored) - SEALED_BYTES, len(stored), None, header.stored_check, True),
        ObjectHeader(header.id, ZSTD, 0, header.raw_length - 1, len(stored), None, header.stored_check, True),
        ObjectHeader(header.id, ZSTD, 0, header.raw_length, len(stored), b"b" * 32, header.stored_check, True),
    ):
        with pytest.raises(CorruptChunk):
            check_stored(changed, stored)


def test_a_holder_finds_damage_without_the_key_and_is_mended(tmp_path: Path) -> None:
    ours, theirs = open_store(tmp_path / "ours"), open_store(tmp_path / "theirs")
    write_tree(tmp_path / "in", {"a": os.urandom(5000), "b": os.urandom(6000)})
    saved = save(ours, tmp_path / "in", vault=VAULT)
    copy(ours, theirs, saved)
    for offset in (0, 40, 70, 150, 2000, 5000):  # realm, inner, signature, nonce, bytes, tag
        (pack,) = [path for path in (tmp_path / "theirs" / "packs").iterdir() if path.stat().st_size > 5000][:1]
        data = bytearray(pack.read_bytes())
        data[16 + HEADER_BYTES + offset] ^= 1
        pack.write_bytes(bytes(data))
        report = verify(theirs)
        assert report.bad_chunks == 1 and report.damaged_manifests == (saved.id,)
        with pytest.raises((MissingChunks, StoreError)):
            theirs.restore(saved.id, tmp_path / "out", prefix="ckpt", vault=VAULT)
        copy(ours, theirs, saved)
        theirs.restore(saved.id, tmp_path / f"out-{offset}", prefix="ckpt", vault=VAULT)
        assert read_tree(tmp_path / f"out-{offset}") == read_tree(tmp_path / "in")


def test_a_key_has_its_length() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        Vault(b"short")
    assert Vault.fresh().realm != Vault.fresh().realm

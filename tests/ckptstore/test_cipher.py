"""Encrypted state: a holder without the key can verify it, cannot read it, and cannot add bytes under its ids."""

import os
from pathlib import Path

import pytest
from blake3 import blake3
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.checker import verify
from ckptstore.cipher import ENCRYPTION_BYTES, FRONT_BYTES, StateCipher
from ckptstore.codec import encode
from ckptstore.encoding import RAW, ZSTD, Encoding
from ckptstore.errors import CorruptChunk, MissingChunks, MissingKey, StoreError
from ckptstore.pack import HEADER_BYTES, ObjectHeader, check_stored, chunk_name, encode_header, open_chunk, wrap
from tests.ckptstore.worlds import CIPHER, chunk_id, copy, damage, feed, open_store, read_tree, save, write_tree

OTHER = StateCipher(b"another key of 32 bytes........!")
SECRET = b"the weights of a model that nobody may see. "


def sealed(data: bytes, cipher: StateCipher = CIPHER, codec: int = RAW) -> tuple[ObjectHeader, bytes]:
    header, stored = wrap(chunk_name(data, cipher), encode(data, Encoding(codec)), len(data), codec, 0, None, cipher)
    return header, bytes(stored)


def test_each_use_of_a_key_has_a_key_of_its_own() -> None:
    """The nonce and the tag of AES-GCM are those of RFC 5116; the key is derived as the format says (BLAKE3, derive_key)."""
    key = b"k" * 32
    cipher, message = StateCipher(key), b"a message"
    derived = blake3(key, derive_key_context="campus-mesh 2026-11 bytes of chunks").digest()
    encrypted = cipher.encrypt(b"purpose", message)
    assert AESGCM(derived).decrypt(encrypted[:12], encrypted[12:], b"purpose") == message
    assert cipher.encrypt(b"purpose", message)[:12] != encrypted[:12], "a nonce is used once"
    assert cipher.decrypt(b"purpose", encrypted) == message
    with pytest.raises(ValueError, match="another key, or damaged"):
        cipher.decrypt(b"another purpose", encrypted)


def test_encrypted_store_holds_no_plaintext(tmp_path: Path) -> None:
    ours, theirs = open_store(tmp_path / "ours"), open_store(tmp_path / "theirs")
    write_tree(tmp_path / "in", {"secret-name.bin": SECRET * 1000, "noise": os.urandom(5000)})
    saved = save(ours, tmp_path / "in", cipher=CIPHER)
    copy(ours, theirs, saved)
    for path in (tmp_path / "theirs").rglob("*"):
        if path.is_file():
            found = path.read_bytes()
            assert SECRET not in found and b"secret-name" not in found and CIPHER.key not in found, path
    for cipher in (None, OTHER):
        with pytest.raises(MissingKey, match="owner and its runners"):
            theirs.restore(saved.id, tmp_path / "out", prefix="ckpt", cipher=cipher)
        with pytest.raises(MissingKey):
            theirs.chunk(saved.manifest.chunks[0], cipher)
    assert not (tmp_path / "out").exists()
    theirs.restore(saved.id, tmp_path / "out", prefix="ckpt", cipher=CIPHER)
    assert read_tree(tmp_path / "out") == read_tree(tmp_path / "in")
    assert (
        (info := theirs.manifests()[0]).realm == CIPHER.realm
        and info.total_bytes == saved.manifest.total_bytes
        and info.files == 3
    )


def test_id_of_an_encrypted_chunk_does_not_confirm_a_guess() -> None:
    names = {chunk_name(SECRET, cipher).id for cipher in (None, CIPHER, OTHER)}
    assert len(names) == 3 and chunk_name(SECRET, CIPHER) == chunk_name(SECRET, StateCipher(CIPHER.key))
    assert chunk_name(SECRET).id not in {CIPHER.name(SECRET).inner, OTHER.name(SECRET).inner}


def test_no_plain_chunk_has_the_id_of_an_encrypted_one() -> None:
    """Realm and inner can be read from any encrypted chunk, and a plain chunk may have any bytes."""
    name = CIPHER.name(b"the state")
    assert chunk_id(CIPHER.realm + name.inner) != name.id


def test_encryption_of_a_chunk_is_randomized() -> None:
    (_, one), (_, two) = sealed(SECRET), sealed(SECRET)
    assert one[FRONT_BYTES:] != two[FRONT_BYTES:] and len(one) == len(SECRET) + ENCRYPTION_BYTES


@given(st.binary(max_size=2000), st.sampled_from([RAW, ZSTD]))
def test_encrypted_chunk_round_trips(data: bytes, codec: int) -> None:
    header, stored = sealed(data, codec=codec)
    check_stored(header, stored)
    assert open_chunk(header, stored, None, CIPHER) == data


@given(st.binary(min_size=1, max_size=300), st.data())
def test_flipped_bit_is_found_without_the_key(chunk: bytes, data: st.DataObject) -> None:
    header, stored = sealed(chunk)
    place = data.draw(st.integers(0, len(stored) * 8 - 1))
    changed = bytearray(stored)
    changed[place // 8] ^= 1 << place % 8
    with pytest.raises(CorruptChunk):
        check_stored(header, bytes(changed))


def test_bytes_without_the_realms_signature_are_refused(tmp_path: Path) -> None:
    """Otherwise a node that saw a manifest could store junk first, and the real chunk would not be sent any more."""
    theirs = open_store(tmp_path / "theirs")
    name = chunk_name(SECRET, CIPHER)
    mine, stored = wrap(chunk_name(b"nonsense", OTHER), b"nonsense", 8, RAW, 0, None, OTHER)
    real, _ = wrap(name, SECRET, len(SECRET), RAW, 0, None, CIPHER)
    plain, _ = wrap(chunk_name(b"nonsense"), b"nonsense", 8, RAW, 0, None)
    renamed = [
        ObjectHeader(name.id, RAW, 0, 8, len(stored), None, mine.stored_check, True),
        ObjectHeader(name.id, RAW, 0, 8, 8, None, plain.stored_check),
    ]
    forged = CIPHER.realm + name.inner + bytes(stored)[64:]
    attempts = [
        encode_header(renamed[0]) + bytes(stored),
        encode_header(renamed[1]) + b"nonsense",
        encode_header(renamed[0]) + forged,
        encode_header(real) + bytes(real.stored_length),
    ]
    for attempt in attempts:
        receiver = theirs.receive(10_000)
        with pytest.raises(CorruptChunk):
            feed(receiver, attempt)
        receiver.abort()
    assert theirs.missing([name.id]) == [name.id]


@given(st.binary(max_size=400))
def test_hostile_encrypted_bytes_raise_corrupt_chunk(data: bytes) -> None:
    claimed = ObjectHeader(b"i" * 32, ZSTD, 0, 100, len(data), None, b"c" * 16, True)
    with pytest.raises(CorruptChunk):
        check_stored(claimed, data)
    for cipher in (None, CIPHER):
        with pytest.raises((CorruptChunk, MissingKey)):
            open_chunk(claimed, CIPHER.realm + data, None, cipher)


def test_changed_header_of_an_encrypted_chunk_is_found() -> None:
    """The stored bytes are unchanged, but the header names another decoding."""
    header, stored = sealed(SECRET * 50, codec=ZSTD)
    for changed in (
        ObjectHeader(header.id, RAW, 0, len(stored) - ENCRYPTION_BYTES, len(stored), None, header.stored_check, True),
        ObjectHeader(header.id, ZSTD, 0, header.raw_length - 1, len(stored), None, header.stored_check, True),
        ObjectHeader(header.id, ZSTD, 0, header.raw_length, len(stored), b"b" * 32, header.stored_check, True),
    ):
        with pytest.raises(CorruptChunk):
            check_stored(changed, stored)


def test_holder_finds_damage_without_the_key_and_is_repaired(tmp_path: Path) -> None:
    ours, theirs = open_store(tmp_path / "ours"), open_store(tmp_path / "theirs")
    write_tree(tmp_path / "in", {"a": os.urandom(5000), "b": os.urandom(6000)})
    saved = save(ours, tmp_path / "in", cipher=CIPHER)
    copy(ours, theirs, saved)
    for offset in (0, 40, 70, 150, 2000, 5000):  # realm, inner, signature, nonce, bytes, tag
        (pack,) = [path for path in (tmp_path / "theirs" / "packs").iterdir() if path.stat().st_size > 5000][:1]
        damage(pack, 16 + HEADER_BYTES + offset)
        report = verify(theirs)
        assert report.bad_chunks == 1 and report.damaged_manifests == (saved.id,)
        with pytest.raises((MissingChunks, StoreError)):
            theirs.restore(saved.id, tmp_path / "out", prefix="ckpt", cipher=CIPHER)
        copy(ours, theirs, saved)
        theirs.restore(saved.id, tmp_path / f"out-{offset}", prefix="ckpt", cipher=CIPHER)
        assert read_tree(tmp_path / f"out-{offset}") == read_tree(tmp_path / "in")


def test_key_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        StateCipher(b"short")
    assert StateCipher.generate().realm != StateCipher.generate().realm

"""Encryption of state: any node can store and verify encrypted chunks, only holders of the key can read them.

The realm is a public key derived from the encryption key, and names it. The id of an encrypted chunk is the hash of the realm
and of a keyed hash of the chunk, so it reveals nothing about the bytes, even if they can be guessed. Each encrypted chunk
carries a signature by the realm, so that a node without the key still refuses bytes that do not belong to the id. AES-256-GCM
encrypts and authenticates; nonces are random (safe for 2^32 chunks per key).
"""

import os

import msgspec
from blake3 import blake3
from nacl.exceptions import BadSignatureError
from nacl.signing import SigningKey, VerifyKey

from ckptstore.encoding import Bytes
from ckptstore.errors import CorruptChunk, MissingKey

KEY_BYTES = REALM_BYTES = INNER_BYTES = 32
SIGNATURE_BYTES, NONCE_BYTES, TAG_BYTES = 64, 12, 16
FRONT_BYTES = REALM_BYTES + INNER_BYTES + SIGNATURE_BYTES
ENCRYPTION_BYTES = FRONT_BYTES + NONCE_BYTES + TAG_BYTES  # added to each chunk

_SIGNED = b"campus-mesh sealed chunk\0"
_PROVED = b"campus-mesh proof of a key\0"
IDS = "campus-mesh 2026-11 ids of encrypted chunks"


class Name(msgspec.Struct, frozen=True):
    """A chunk's id, and the keyed hash it is made from; empty for a chunk that is not encrypted."""

    id: bytes
    inner: bytes = b""


class StateCipher:
    """Encrypts the state of a job with one key. `realm` names the key and is public."""

    def __init__(self, key: bytes) -> None:
        # Imported late: 6 MiB that a node without encrypted state does not need.
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        if len(key) != KEY_BYTES:
            raise ValueError(f"a key has {KEY_BYTES} bytes")
        self.key = key
        self._name_key = _derive(key, "names of chunks")
        self._aead = AESGCM(_derive(key, "bytes of chunks"))
        self._signing = SigningKey(_derive(key, "signatures of chunks"))
        self.realm = bytes(self._signing.verify_key)

    @classmethod
    def generate(cls) -> "StateCipher":
        return cls(os.urandom(KEY_BYTES))

    def name(self, data: Bytes) -> Name:
        inner = blake3(data, key=self._name_key).digest()
        return Name(_chunk_id(self.realm, inner), inner)

    def encrypt_chunk(self, name: Name, meaning: bytes, encoded: Bytes) -> tuple[bytes, bytes]:
        """Return the stored form of an encoded chunk, and the hash that its signature covers.

        `meaning` is the part of the header that says how to decode it; it is authenticated too.
        """
        nonce = os.urandom(NONCE_BYTES)
        encrypted = self._aead.encrypt(nonce, encoded, meaning)
        hasher = blake3(nonce)
        hasher.update(encrypted)
        digest = hasher.digest()
        signature = self._signing.sign(_SIGNED + meaning + digest).signature
        return b"".join([self.realm, name.inner, signature, nonce, encrypted]), digest

    def decrypt_chunk(self, meaning: bytes, stored: Bytes) -> bytes:
        """Return the encoded chunk. Raises CorruptChunk, or MissingKey if it was encrypted with another key."""
        view = memoryview(stored)
        if bytes(view[:REALM_BYTES]) != self.realm:
            raise MissingKey("a chunk is encrypted with another key")
        try:
            return self._decrypt(view[FRONT_BYTES:], meaning)
        except ValueError as error:
            raise CorruptChunk("an encrypted chunk is damaged") from error

    def encrypt(self, purpose: bytes, data: bytes) -> bytes:
        """Encrypt a small message, bound to a purpose."""
        nonce = os.urandom(NONCE_BYTES)
        return nonce + self._aead.encrypt(nonce, data, purpose)

    def decrypt(self, purpose: bytes, encrypted: bytes) -> bytes:
        """Decrypt a message; ValueError unless it was encrypted with this key for this purpose."""
        try:
            return self._decrypt(memoryview(encrypted), purpose)
        except ValueError as error:
            raise ValueError("encrypted with another key, or damaged") from error

    def prove(self, statement: bytes) -> bytes:
        """Return a proof that the author of `statement` has this key."""
        return bytes(self._signing.sign(_PROVED + statement).signature)

    def _decrypt(self, encrypted: memoryview, associated: bytes) -> bytes:
        from cryptography.exceptions import InvalidTag

        try:
            return self._aead.decrypt(bytes(encrypted[:NONCE_BYTES]), encrypted[NONCE_BYTES:], associated)
        except InvalidTag as error:
            raise ValueError("the authentication tag is invalid") from error


def is_proof(realm: bytes, statement: bytes, proof: bytes) -> bool:
    """Tell whether the author of `statement` had the key of this realm."""
    try:
        VerifyKey(realm).verify(_PROVED + statement, proof)
    except (BadSignatureError, ValueError, TypeError):
        return False
    return True


def check_encrypted(identity: bytes, meaning: bytes, stored: Bytes) -> bytes:
    """Verify, without the key, that the realm signed these bytes for this id; return the signed hash. CorruptChunk if not."""
    view = memoryview(stored)
    realm, inner = bytes(view[:REALM_BYTES]), bytes(view[REALM_BYTES : REALM_BYTES + INNER_BYTES])
    signature = bytes(view[REALM_BYTES + INNER_BYTES : FRONT_BYTES])
    digest = blake3(view[FRONT_BYTES:]).digest()
    try:
        VerifyKey(realm).verify(_SIGNED + meaning + digest, signature)
    except (BadSignatureError, ValueError, TypeError) as error:
        raise CorruptChunk("the realm's signature of an encrypted chunk is invalid") from error
    if _chunk_id(realm, inner) != identity:
        raise CorruptChunk("an encrypted chunk does not belong to its id")
    return digest


def _chunk_id(realm: bytes, inner: bytes) -> bytes:
    """Return an id that no chunk which is not encrypted can have: theirs is the plain hash of their bytes."""
    return blake3(realm + inner, derive_key_context=IDS).digest()


def _derive(key: bytes, purpose: str) -> bytes:
    return blake3(key, derive_key_context=f"campus-mesh 2026-11 {purpose}").digest()

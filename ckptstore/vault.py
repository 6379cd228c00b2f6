"""The key of one lot of state. What is sealed with it can be kept and checked by anybody, and read by those who hold the key.

A chunk's id is made of the realm, which is a public key, and of a keyed hash of the chunk, so an id tells nothing of the bytes,
not even to who can guess them; and each sealed chunk bears the realm's signature, so that who cannot read it still refuses
bytes that do not belong under its id. AES-256-GCM hides and authenticates; nonces are random (good for 2^32 chunks of a key).
"""

import os

import msgspec
from blake3 import blake3
from nacl.exceptions import BadSignatureError
from nacl.signing import SigningKey, VerifyKey

from ckptstore.coding import Bytes
from ckptstore.errors import CorruptChunk, Locked

KEY_BYTES = REALM_BYTES = INNER_BYTES = 32
SIGNATURE_BYTES, NONCE_BYTES, TAG_BYTES = 64, 12, 16
FRONT_BYTES = REALM_BYTES + INNER_BYTES + SIGNATURE_BYTES
SEALED_BYTES = FRONT_BYTES + NONCE_BYTES + TAG_BYTES  # by which sealing makes a chunk longer

_SIGNED = b"campus-mesh sealed chunk\0"


class Name(msgspec.Struct, frozen=True):
    """A chunk's id, and what it is made of besides the realm; empty for a chunk that is not sealed."""

    id: bytes
    inner: bytes = b""


class Vault:
    """`realm` names the key, and can be shown to anybody."""

    def __init__(self, key: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import (
            AESGCM,
        )  # 6 MiB, which a node without sealed state need not have

        if len(key) != KEY_BYTES:
            raise ValueError(f"a key has {KEY_BYTES} bytes")
        self.key = key
        self._names = _derived(key, "names of chunks")
        self._cipher = AESGCM(_derived(key, "bytes of chunks"))
        self._signing = SigningKey(_derived(key, "signatures of chunks"))
        self.realm = bytes(self._signing.verify_key)

    @classmethod
    def fresh(cls) -> "Vault":
        return cls(os.urandom(KEY_BYTES))

    def name(self, data: Bytes) -> Name:
        inner = blake3(data, key=self._names).digest()
        return Name(_bound(self.realm, inner), inner)

    def seal(self, name: Name, meaning: bytes, encoded: Bytes) -> tuple[bytes, bytes]:
        """The stored form of a chunk that is encoded so, and the hash of what is signed of it; `meaning` is the header's part
        that says how to decode it."""
        nonce = os.urandom(NONCE_BYTES)
        hidden = self._cipher.encrypt(nonce, encoded, meaning)
        hasher = blake3(nonce)
        hasher.update(hidden)
        digest = hasher.digest()
        signature = self._signing.sign(_SIGNED + meaning + digest).signature
        return b"".join([self.realm, name.inner, signature, nonce, hidden]), digest

    def open(self, meaning: bytes, stored: Bytes) -> bytes:
        """What was encoded; CorruptChunk for anything else, Locked for what another key has sealed."""
        view = memoryview(stored)
        if bytes(view[:REALM_BYTES]) != self.realm:
            raise Locked("a chunk is sealed with another key")
        try:
            return self._decrypted(view[FRONT_BYTES:], meaning)
        except ValueError as error:
            raise CorruptChunk("a sealed chunk is not what was sealed") from error

    def hide(self, purpose: bytes, data: bytes) -> bytes:
        """Something small, for those who hold the key."""
        nonce = os.urandom(NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, data, purpose)

    def show(self, purpose: bytes, hidden: bytes) -> bytes:
        """ValueError if it was not hidden with this key for this purpose."""
        try:
            return self._decrypted(memoryview(hidden), purpose)
        except ValueError as error:
            raise ValueError("sealed with another key, or damaged") from error

    def _decrypted(self, sealed: memoryview, associated: bytes) -> bytes:
        """ValueError if this is not what was encrypted."""
        from cryptography.exceptions import InvalidTag

        try:
            return self._cipher.decrypt(bytes(sealed[:NONCE_BYTES]), sealed[NONCE_BYTES:], associated)
        except InvalidTag as error:
            raise ValueError("its tag does not fit") from error


def check_sealed(identity: bytes, meaning: bytes, stored: Bytes) -> bytes:
    """That the realm vouches for these bytes under this id: the hash of what is signed. Needs no key; CorruptChunk if not."""
    view = memoryview(stored)
    realm, inner = bytes(view[:REALM_BYTES]), bytes(view[REALM_BYTES : REALM_BYTES + INNER_BYTES])
    signature = bytes(view[REALM_BYTES + INNER_BYTES : FRONT_BYTES])
    digest = blake3(view[FRONT_BYTES:]).digest()
    try:
        VerifyKey(realm).verify(_SIGNED + meaning + digest, signature)
    except (BadSignatureError, ValueError, TypeError) as error:
        raise CorruptChunk("a sealed chunk does not bear its realm's signature") from error
    if _bound(realm, inner) != identity:
        raise CorruptChunk("a sealed chunk does not belong under its id")
    return digest


def _bound(realm: bytes, inner: bytes) -> bytes:
    return blake3(realm + inner).digest()


def _derived(key: bytes, what: str) -> bytes:
    return blake3(key, derive_key_context=f"campus-mesh 2026-11 {what}").digest()

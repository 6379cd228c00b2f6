"""A node is its Ed25519 key: the public half is its id, everywhere; names and addresses are only attributes.

Ids are shown as Syncthing shows them: base32 in groups of seven, with a check character after every 13 characters, so
that a mistyped id is found before it is believed.
"""

import base64
import os
from pathlib import Path

from nacl.exceptions import BadSignatureError, CryptoError
from nacl.public import SealedBox
from nacl.signing import SigningKey, VerifyKey

NodeId = bytes  # 32-byte Ed25519 public key

ID_BYTES = 32
_ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"
_BLOCK = 13  # 52 base32 characters in four blocks, each with one check character


class IdentityError(RuntimeError):
    """The node's key cannot be used; the text says which file and why."""


class Identity:
    """A node's key pair. The seed never leaves this object but into its own key file and its TLS certificate."""

    def __init__(self, seed: bytes) -> None:
        self.seed = seed
        self._key = SigningKey(seed)
        self.node_id: NodeId = bytes(self._key.verify_key)

    @classmethod
    def generate(cls) -> "Identity":
        return cls(bytes(SigningKey.generate()))

    @classmethod
    def load(cls, path: Path) -> "Identity":
        """Read a key file; IdentityError if others may read it or it is not a key."""
        try:
            mode = path.stat().st_mode
            data = path.read_bytes()
        except OSError as error:
            raise IdentityError(f"cannot read the node's key {path}: {error.strerror}") from error
        if mode & 0o077:
            raise IdentityError(f"{path} can be read by others: run `chmod 600 {path}`, then start again")
        if len(data) != ID_BYTES:
            raise IdentityError(
                f"{path} is not a node key ({len(data)} bytes instead of {ID_BYTES}). "
                "Restore it from a copy, or move it away and join the mesh again."
            )
        return cls(data)

    def save(self, path: Path) -> None:
        """Write the key file, readable by its owner alone; never over another key."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".new")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(self.seed)
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, path)
        temporary.unlink()

    def unsealed(self, box: bytes) -> bytes:
        """What somebody has sealed to this node; ValueError if it is not that, or damaged."""
        try:
            return bytes(SealedBox(self._key.to_curve25519_private_key()).decrypt(box))
        except (CryptoError, ValueError, TypeError) as error:
            raise ValueError(f"not sealed to this node: {error}") from error

    def sign(self, context: bytes, payload: bytes) -> bytes:
        """The 64-byte signature of `payload` in `context`."""
        return bytes(self._key.sign(context + payload).signature)


_verify_keys: dict[NodeId, VerifyKey] = {}
_VERIFY_KEYS_KEPT = 4096  # a campus; building one costs 0.3 us


def verify(node_id: NodeId, context: bytes, payload: bytes, signature: bytes) -> bool:
    """Whether `node_id` signed exactly these bytes in exactly this context."""
    key = _verify_keys.get(node_id)
    try:
        if key is None:
            key = VerifyKey(node_id)
            if len(_verify_keys) >= _VERIFY_KEYS_KEPT:
                _verify_keys.clear()
            _verify_keys[node_id] = key
        key.verify(context + payload, signature)
    except (BadSignatureError, ValueError, TypeError):
        return False
    return True


def sealed_to(node_id: NodeId, data: bytes) -> bytes:
    """What only this node can read; ValueError if that is no node's id."""
    try:
        return bytes(SealedBox(VerifyKey(node_id).to_curve25519_public_key()).encrypt(data))
    except (CryptoError, RuntimeError, TypeError) as error:
        raise ValueError(f"not a node id: {error}") from error


def short_id(node_id: NodeId) -> str:
    """The first eight characters: enough for people and logs, not for trust."""
    return base64.b32encode(node_id[:5]).decode().lower()


def format_id(node_id: NodeId) -> str:
    """The whole id as people read it to each other: eight groups of seven."""
    text = base64.b32encode(node_id).decode().rstrip("=").lower()
    blocks = [text[start : start + _BLOCK] for start in range(0, len(text), _BLOCK)]
    checked = "".join(block + _check_character(block) for block in blocks)
    return "-".join(checked[start : start + 7] for start in range(0, len(checked), 7))


def parse_id(text: str) -> NodeId:
    """The id somebody typed, in any case, with or without dashes; ValueError that points at the mistake."""
    plain = text.replace("-", "").replace(" ", "").lower()
    if len(plain) != 4 * (_BLOCK + 1):
        raise ValueError(f"a node id has {4 * (_BLOCK + 1)} characters, this one has {len(plain)}")
    for character in plain:
        if character not in _ALPHABET:
            raise ValueError(f"{character!r} cannot stand in a node id (letters a to z and digits 2 to 7)")
    blocks = [plain[start : start + _BLOCK + 1] for start in range(0, len(plain), _BLOCK + 1)]
    for number, block in enumerate(blocks, 1):
        if _check_character(block[:-1]) != block[-1]:
            raise ValueError(f"check character {number} of the node id does not fit: look at characters near {block!r}")
    joined = "".join(block[:-1] for block in blocks).upper()
    node_id = base64.b32decode(joined + "=" * (-len(joined) % 8))
    if format_id(node_id).replace("-", "") != plain:
        raise ValueError("the last characters of the node id are not possible ones")
    return node_id


def _check_character(block: str) -> str:
    """Luhn mod N over the base32 alphabet, which finds every single typo and most swaps."""
    total, factor = 0, 1
    for character in reversed(block):
        addend = factor * _ALPHABET.index(character)
        total += addend // 32 + addend % 32
        factor = 3 - factor
    return _ALPHABET[-total % 32]

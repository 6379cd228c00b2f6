"""Node identity: an Ed25519 key. The public key is the node's id; names and addresses are attributes.

Ids are displayed in Syncthing's format: base32 in groups of seven with a check character after every 13 characters, so that a
mistyped id is detected.
"""

import base64
import os
from pathlib import Path

from nacl.exceptions import BadSignatureError, CryptoError
from nacl.public import SealedBox
from nacl.signing import SigningKey, VerifyKey

NodeId = bytes  # 32-byte Ed25519 public key

ID_BYTES = 32
STATE_FILES = frozenset({"node.key", "genesis"})  # both are in the state directory of each node, and nowhere else
_ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"
_BLOCK = 13  # 52 base32 characters in four blocks, each with one check character


class IdentityError(RuntimeError):
    """The node's key cannot be used; the message names the file and the reason."""


class Identity:
    """A node's key pair. The seed is only written to its key file and used for its TLS certificate."""

    def __init__(self, seed: bytes) -> None:
        self.seed = seed
        self._key = SigningKey(seed)
        self.node_id: NodeId = bytes(self._key.verify_key)

    @classmethod
    def generate(cls) -> "Identity":
        return cls(bytes(SigningKey.generate()))

    @classmethod
    def load(cls, path: Path) -> "Identity":
        """Read a key file; IdentityError if other users can read it or it is not a key."""
        try:
            mode = path.stat().st_mode
            data = path.read_bytes()
        except OSError as error:
            raise IdentityError(f"cannot read the node's key {path}: {error.strerror}") from error
        if mode & 0o077:
            raise IdentityError(f"other users can read {path}: run `chmod 600 {path}`, then start again")
        if len(data) != ID_BYTES:
            raise IdentityError(
                f"{path} is not a node key ({len(data)} bytes instead of {ID_BYTES}). "
                "Restore it from a copy, or move it away and join the mesh again."
            )
        return cls(data)

    def save(self, path: Path) -> None:
        """Write the key file, readable by its owner only. FileExistsError if there is one: a key is never overwritten."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".new")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(self.seed)
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, path)
        temporary.unlink()

    def decrypt(self, box: bytes) -> bytes:
        """Decrypt a box made by `encrypt_to` for this node; ValueError if it is damaged or for another node."""
        try:
            return bytes(SealedBox(self._key.to_curve25519_private_key()).decrypt(box))
        except (CryptoError, ValueError, TypeError) as error:
            raise ValueError(f"not encrypted to this node: {error}") from error

    def sign(self, context: bytes, payload: bytes) -> bytes:
        """Return the 64-byte signature of `payload` in `context`."""
        return bytes(self._key.sign(context + payload).signature)


_verify_keys: dict[NodeId, VerifyKey] = {}
_VERIFY_KEYS_KEPT = 4096  # more than a campus has nodes; building one costs 0.3 us


def verify(node_id: NodeId, context: bytes, payload: bytes, signature: bytes) -> bool:
    """Return True if `node_id` signed exactly these bytes in this context."""
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


def encrypt_to(node_id: NodeId, data: bytes) -> bytes:
    """Encrypt `data` so that only this node can read it (NaCl sealed box); ValueError for an invalid node id."""
    try:
        return bytes(SealedBox(VerifyKey(node_id).to_curve25519_public_key()).encrypt(data))
    except (CryptoError, RuntimeError, TypeError) as error:
        raise ValueError(f"not a node id: {error}") from error


def to_base32(node_id: NodeId) -> str:
    """Return the id in 52 lower-case characters of base32, without check digits."""
    return base64.b32encode(node_id).decode().rstrip("=").lower()


def short_id(node_id: NodeId) -> str:
    """Return the first eight characters of the id, for display and logs; not enough for trust decisions."""
    return base64.b32encode(node_id[:5]).decode().lower()


def format_id(node_id: NodeId) -> str:
    """Return the whole id in eight groups of seven characters."""
    text = to_base32(node_id)
    blocks = [text[start : start + _BLOCK] for start in range(0, len(text), _BLOCK)]
    checked = "".join(block + _check_character(block) for block in blocks)
    return "-".join(checked[start : start + 7] for start in range(0, len(checked), 7))


def parse_id(text: str) -> NodeId:
    """Parse an id typed in any case, with or without dashes; ValueError that points at the mistake."""
    plain = text.replace("-", "").replace(" ", "").lower()
    if len(plain) != 4 * (_BLOCK + 1):
        raise ValueError(f"a node id has {4 * (_BLOCK + 1)} characters, this one has {len(plain)}")
    for character in plain:
        if character not in _ALPHABET:
            raise ValueError(f"{character!r} cannot occur in a node id (letters a to z and digits 2 to 7)")
    blocks = [plain[start : start + _BLOCK + 1] for start in range(0, len(plain), _BLOCK + 1)]
    for number, block in enumerate(blocks, 1):
        if _check_character(block[:-1]) != block[-1]:
            raise ValueError(f"check character {number} of the node id is wrong: look for a typo near {block!r}")
    joined = "".join(block[:-1] for block in blocks).upper()
    node_id = base64.b32decode(joined + "=" * (-len(joined) % 8))
    if format_id(node_id).replace("-", "") != plain:
        raise ValueError("the last characters of the node id are invalid")
    return node_id


def _check_character(block: str) -> str:
    """Luhn mod N over the base32 alphabet: detects every single typo and most transpositions."""
    total, factor = 0, 1
    for character in reversed(block):
        addend = factor * _ALPHABET.index(character)
        total += addend // 32 + addend % 32
        factor = 3 - factor
    return _ALPHABET[-total % 32]

"""SSH keys: public keys as OpenSSH writes them, and the signatures of `ssh-keygen -Y sign` (SSHSIG).

The formats are those of PROTOCOL.sshsig in OpenSSH, RFC 4253 (RSA), RFC 5656 (ECDSA), RFC 8332 and RFC 8709 (Ed25519).
"""

import base64
import hashlib
from typing import NamedTuple

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.serialization import load_ssh_public_key

ED25519, RSA = b"ssh-ed25519", b"ssh-rsa"
_ECDSA: dict[bytes, hashes.HashAlgorithm] = {  # RFC 5656, 6.2.1
    b"ecdsa-sha2-nistp256": hashes.SHA256(),
    b"ecdsa-sha2-nistp384": hashes.SHA384(),
    b"ecdsa-sha2-nistp521": hashes.SHA512(),
}
# SSHSIG permits these only: with the type `ssh-rsa`, a signature would be over SHA-1.
_RSA: dict[bytes, hashes.HashAlgorithm] = {b"rsa-sha2-256": hashes.SHA256(), b"rsa-sha2-512": hashes.SHA512()}
TYPES = (ED25519, RSA, *_ECDSA)
RSA_BITS = range(2048, 4097)  # NIST SP 800-131A; the most that fits where join requests are published
_MAGIC, _VERSION = b"SSHSIG", 1
_DIGESTS = {b"sha256": hashlib.sha256, b"sha512": hashlib.sha512}
_BEGIN, _END = "-----BEGIN SSH SIGNATURE-----", "-----END SSH SIGNATURE-----"


class SshError(ValueError):
    """Not a key or signature of a supported kind; the message says why."""


class _Signature(NamedTuple):
    key: bytes
    namespace: bytes
    reserved: bytes
    digest: bytes
    signature: bytes


def read_public_key(line: str) -> bytes:
    """Return the key in a line of a `.pub` file or of `authorized_keys`: `TYPE BASE64 [COMMENT]`."""
    words = line.split()
    if len(words) < 2 or "\n" in line.strip():
        raise SshError("not one SSH public key: a line as in ~/.ssh/id_ed25519.pub is needed")
    try:
        key = base64.b64decode(words[1], validate=True)
    except ValueError as error:
        raise SshError(f"not an SSH public key: {error}") from error
    _load(key)
    return key


def fingerprint(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def format_fingerprint(digest: bytes) -> str:
    """Return a fingerprint as `ssh-keygen -l` shows it."""
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def read_armor(text: str) -> bytes:
    """Return the signature in the output of `ssh-keygen -Y sign`."""
    lines = text.strip().splitlines()
    if lines[:1] != [_BEGIN] or lines[-1:] != [_END]:
        raise SshError("not an SSH signature")
    try:
        return base64.b64decode("".join(lines[1:-1]), validate=True)
    except ValueError as error:
        raise SshError(f"not an SSH signature: {error}") from error


def has_signed(digest: bytes, signature: bytes, namespace: bytes, message: bytes) -> bool:
    """Tell whether the key with this fingerprint has signed the message in the namespace."""
    try:
        parts = _read_signature(signature)
        if fingerprint(parts.key) != digest or parts.namespace != namespace or parts.digest not in _DIGESTS:
            return False
        hashed = _DIGESTS[parts.digest](message).digest()
        signed = _MAGIC + b"".join(map(_string, (namespace, parts.reserved, parts.digest, hashed)))
        _verify(parts.key, parts.signature, signed)
    except (SshError, InvalidSignature):
        return False
    return True


def _verify(key: bytes, signature: bytes, signed: bytes) -> None:
    public = _load(key)
    kind, raw = _fields(signature, 2)
    if isinstance(public, ed25519.Ed25519PublicKey) and kind == ED25519:
        public.verify(raw, signed)
    elif isinstance(public, rsa.RSAPublicKey) and kind in _RSA:
        public.verify(raw, signed, padding.PKCS1v15(), _RSA[kind])
    elif isinstance(public, ec.EllipticCurvePublicKey) and kind in _ECDSA and kind == _fields(key)[0]:
        r, s = (int.from_bytes(number, signed=True) for number in _fields(raw, 2))
        if min(r, s) <= 0:
            raise SshError("not a signature: a number is not positive")
        public.verify(encode_dss_signature(r, s), signed, ec.ECDSA(_ECDSA[kind]))
    else:
        raise SshError("the signature is of another kind than the key")


def _load(key: bytes) -> ed25519.Ed25519PublicKey | rsa.RSAPublicKey | ec.EllipticCurvePublicKey:
    kind = _fields(key)[0]
    if kind not in TYPES:
        names = ", ".join(one.decode() for one in TYPES)
        raise SshError(f"SSH keys of type {kind.decode(errors='replace')!r} are not supported: use one of {names}")
    try:
        public = load_ssh_public_key(kind + b" " + base64.b64encode(key))
    except (ValueError, UnsupportedAlgorithm) as error:
        raise SshError(f"not an SSH public key: {error}") from error
    if isinstance(public, rsa.RSAPublicKey) and public.key_size not in RSA_BITS:
        raise SshError(f"an RSA key has {RSA_BITS[0]} to {RSA_BITS[-1]} bits here, this one has {public.key_size}")
    assert isinstance(public, ed25519.Ed25519PublicKey | rsa.RSAPublicKey | ec.EllipticCurvePublicKey), "of TYPES"
    return public


def _read_signature(data: bytes) -> _Signature:
    head = _MAGIC + _VERSION.to_bytes(4)
    if not data.startswith(head):
        raise SshError("not an SSH signature of version 1")
    return _Signature(*_fields(data[len(head) :], 5))


def _fields(data: bytes, count: int | None = None) -> list[bytes]:
    """Return the strings of RFC 4251 that `data` consists of; SshError if there are not exactly `count`."""
    found, at = list[bytes](), 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 4])
        found.append(data[at + 4 : at + 4 + size])
        at += 4 + size
    if at != len(data) or not found or (count is not None and len(found) != count):
        raise SshError("an SSH key or signature is cut off or has wrong parts")
    return found


def _string(data: bytes) -> bytes:
    return len(data).to_bytes(4) + data

"""The TLS side of direct calls: a self-signed Ed25519 certificate made from the node's key, TLS 1.3 only.

Peers pin its SHA-256 fingerprint, which the owner publishes in its signed `facts`; no authority is involved.
"""

import hashlib
import os
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

VALID_DAYS = 3650  # trust comes from the pinned fingerprint, so the dates only have to be plausible


def server_context(path: Path, seed: bytes, common_name: str) -> tuple[ssl.SSLContext, bytes]:
    """The server's context and its certificate's SHA-256 fingerprint. One that is lost or damaged is made anew."""
    if not path.exists():
        make_certificate(path, seed, common_name)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_cert_chain(path)
        text = path.read_text(encoding="ascii")
    except (ssl.SSLError, OSError, UnicodeDecodeError):
        path.unlink()
        make_certificate(path, seed, common_name)
        context.load_cert_chain(path)
        text = path.read_text(encoding="ascii")
    certificate = text[text.index("-----BEGIN CERTIFICATE-----") :]
    return context, hashlib.sha256(ssl.PEM_cert_to_DER_cert(certificate)).digest()


def make_certificate(path: Path, seed: bytes, common_name: str) -> None:
    """For the whole life of a node, before its first start: what makes it would stay in the daemon (own measurement: 6 MiB)."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.x509.oid import NameOID

    key = Ed25519PrivateKey.from_private_bytes(seed)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name[:64])])
    today = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(today - timedelta(days=1))
        .not_valid_after(today + timedelta(days=VALID_DAYS))
        .sign(key, None)
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    temporary = path.with_suffix(".new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(private + certificate.public_bytes(serialization.Encoding.PEM))
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)

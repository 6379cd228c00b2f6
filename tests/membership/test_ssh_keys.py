"""Signatures of the real ssh-keygen: of every type of key accepted, and of nothing else."""

import subprocess
from contextlib import nullcontext
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given
from hypothesis import strategies as st

from membership.ssh_keys import (
    SshError,
    _string,
    _verify,
    fingerprint,
    format_fingerprint,
    has_signed,
    read_armor,
    read_public_key,
)
from tests.ssh import KINDS, make_key, sign

SPACE, MESSAGE = b"join@campus-mesh", b"this machine"


@pytest.mark.ssh
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("digest", ["sha256", "sha512"])
def test_signature_of_each_type_counts_for_its_key_message_and_namespace_alone(
    kind: str, digest: str, tmp_path: Path
) -> None:
    file = make_key(tmp_path / "key", kind)
    key = fingerprint(read_public_key(file.with_suffix(".pub").read_text()))
    signature = read_armor(sign(file, MESSAGE, SPACE.decode(), "-O", f"hashalg={digest}"))
    assert has_signed(key, signature, SPACE, MESSAGE)
    assert not has_signed(key, signature, SPACE, MESSAGE + b".")
    assert not has_signed(key, signature, b"git", MESSAGE)
    assert not has_signed(fingerprint(b"another"), signature, SPACE, MESSAGE)
    other = read_armor(sign(make_key(tmp_path / "other", kind), MESSAGE, SPACE.decode()))
    assert not has_signed(key, other, SPACE, MESSAGE)
    for at in range(0, len(signature), 7):
        damaged = signature[:at] + bytes([signature[at] ^ 1]) + signature[at + 1 :]
        assert not has_signed(key, damaged, SPACE, MESSAGE)
        assert not has_signed(key, signature[:at], SPACE, MESSAGE)


@pytest.mark.parametrize(("named", "digest", "valid"), [("256", "SHA256", True), ("384", "SHA384", False)])
def test_signature_names_the_curve_of_its_key(named: str, digest: str, valid: bool) -> None:
    """The name chooses the digest of the signature, and a weaker one is not the signer's to choose."""
    private = ec.generate_private_key(ec.SECP256R1())
    encoded = private.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    key = read_public_key(encoded.decode())
    numbers = decode_dss_signature(private.sign(MESSAGE, ec.ECDSA(getattr(hashes, digest)())))
    raw = b"".join(_string(number.to_bytes(33, signed=True)) for number in numbers)
    signature = _string(f"ecdsa-sha2-nistp{named}".encode()) + _string(raw)
    with nullcontext() if valid else pytest.raises(SshError, match="another kind"):
        _verify(key, signature, MESSAGE)


@given(st.binary(max_size=300))
def test_no_bytes_are_a_signature_or_break_the_reader(data: bytes) -> None:
    for signature in (data, b"SSHSIG\0\0\0\1" + data):
        assert not has_signed(fingerprint(b""), signature, SPACE, MESSAGE)


@pytest.mark.ssh
def test_fingerprint_is_the_one_that_ssh_keygen_shows(tmp_path: Path) -> None:
    public = make_key(tmp_path / "key").with_suffix(".pub")
    shown = subprocess.run(["ssh-keygen", "-l", "-f", public], capture_output=True, text=True, check=True).stdout
    assert format_fingerprint(fingerprint(read_public_key(public.read_text()))) in shown


@pytest.mark.ssh
def test_unsupported_keys_are_refused_in_words(tmp_path: Path) -> None:
    make_key(tmp_path / "small", "rsa-1024")
    with pytest.raises(SshError, match="2048 to 4096 bits here, this one has 1024"):
        read_public_key((tmp_path / "small.pub").read_text())
    hardware = "AAAAGnNrLXNzaC1lZDI1NTE5QG9wZW5zc2guY29t"
    for text, reason in [
        ("", "not one SSH public key"),
        ("ssh-ed25519 AAAA!", "not an SSH public key"),
        ("ssh-ed25519 AAAA", "cut off"),
        ("a b\nc d", "not one SSH public key"),
        (f"sk-ssh-ed25519@openssh.com {hardware}", "'sk-ssh-ed25519@openssh.com' are not supported"),
        ("-----BEGIN OPENSSH PRIVATE KEY-----", "not an SSH public key"),
    ]:
        with pytest.raises(SshError, match=reason):
            read_public_key(text)
    for text in ("", "x", "-----BEGIN SSH SIGNATURE-----\n!\n-----END SSH SIGNATURE-----"):
        with pytest.raises(SshError, match="not an SSH signature"):
            read_armor(text)

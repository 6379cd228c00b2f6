"""Signatures of the real ssh-keygen: of every type of key accepted, and of nothing else."""

import base64
import hashlib
import subprocess
from contextlib import nullcontext
from pathlib import Path

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
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
    more = _string(f"ecdsa-sha2-nistp{named}".encode()) + _string(raw + _string(b"\1"))
    with pytest.raises(SshError, match="wrong parts" if valid else "another kind"):
        _verify(key, more, MESSAGE)


def test_number_of_an_ecdsa_signature_has_one_encoding() -> None:
    """Without its leading zero it is negative, as RFC 4251 encodes it."""
    private = ec.generate_private_key(ec.SECP256R1())
    encoded = private.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    numbers = (0, 0)
    while numbers[0] < 1 << 255:
        numbers = decode_dss_signature(private.sign(MESSAGE, ec.ECDSA(hashes.SHA256())))
    first, second = numbers[0].to_bytes(32), numbers[1].to_bytes(33)
    for valid, one in ((True, b"\0" + first), (False, first)):
        signature = _string(b"ecdsa-sha2-nistp256") + _string(_string(one) + _string(second))
        with nullcontext() if valid else pytest.raises(SshError, match="not positive"):
            _verify(read_public_key(encoded.decode()), signature, MESSAGE)


def test_rsa_signature_names_a_digest_that_is_not_sha1() -> None:
    private = rsa.generate_private_key(65537, 2048)
    encoded = private.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    key = read_public_key(encoded.decode())
    for named, digest, error in (
        (b"rsa-sha2-256", hashes.SHA256(), None),
        (b"rsa-sha2-512", hashes.SHA512(), None),
        (b"rsa-sha2-512", hashes.SHA256(), InvalidSignature),
        (b"ssh-rsa", hashes.SHA1(), SshError),
    ):
        signature = _string(named) + _string(private.sign(MESSAGE, padding.PKCS1v15(), digest))
        with nullcontext() if error is None else pytest.raises(error):
            _verify(key, signature, MESSAGE)


def test_signature_has_the_parts_of_its_format_and_a_strong_digest() -> None:
    private = ed25519.Ed25519PrivateKey.generate()
    key = read_public_key(private.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode())

    def counts(digest: str = "sha256", reserved: bytes = b"", more: bytes = b"", last: bytes = b"") -> bool:
        parts = b"".join(map(_string, (SPACE, reserved, digest.encode())))
        raw = private.sign(b"SSHSIG" + parts + _string(hashlib.new(digest, MESSAGE).digest()))
        signature = _string(_string(b"ssh-ed25519") + _string(raw) + more) + last
        return has_signed(fingerprint(key), b"SSHSIG\0\0\0\1" + _string(key) + parts + signature, SPACE, MESSAGE)

    no_key = b"SSHSIG\0\0\0\1" + b"".join(map(_string, (b"", SPACE, b"", b"sha256", b"")))
    assert not has_signed(fingerprint(b""), no_key, SPACE, MESSAGE)
    assert counts() and counts("sha512") and counts(reserved=b"of a later version")
    assert not counts("sha1") and not counts(more=_string(b"more")) and not counts(last=_string(b"more"))


@given(st.binary(max_size=300))
def test_no_bytes_are_a_signature_or_break_the_reader(data: bytes) -> None:
    for signature in (data, b"SSHSIG\0\0\0\1" + data):
        assert not has_signed(fingerprint(b""), signature, SPACE, MESSAGE)


@pytest.mark.ssh
def test_fingerprint_is_the_one_that_ssh_keygen_shows(tmp_path: Path) -> None:
    public = make_key(tmp_path / "key").with_suffix(".pub")
    shown = subprocess.run(["ssh-keygen", "-l", "-f", public], capture_output=True, text=True, check=True).stdout
    assert format_fingerprint(fingerprint(read_public_key(public.read_text()))) in shown


@pytest.mark.parametrize("bits", [1024, 2047, 2048, 4096, 4097, 16_384])
def test_rsa_key_has_2048_to_4096_bits(bits: int) -> None:
    public = rsa.RSAPublicNumbers(65537, 1 << (bits - 1) | 1).public_key()
    line = public.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    valid = 2048 <= bits <= 4096
    with nullcontext() if valid else pytest.raises(SshError, match=f"2048 to 4096 bits here, this one has {bits}"):
        read_public_key(line)


def test_unsupported_keys_are_refused_in_words() -> None:
    for parts, reason in [
        ((b"ssh-ed25519", bytes(31)), "not an SSH public key"),
        ((b"\xff", bytes(32)), "are not supported"),
    ]:
        encoded = base64.b64encode(b"".join(map(_string, parts))).decode()
        with pytest.raises(SshError, match=reason):
            read_public_key(f"ssh-ed25519 {encoded}")
    hardware = "AAAAGnNrLXNzaC1lZDI1NTE5QG9wZW5zc2guY29t"
    for text, reason in [
        ("", "not one SSH public key"),
        ("ssh-ed25519", "not one SSH public key"),
        ("ssh-dss AAAAB3NzaC1kc3M=", "'ssh-dss' are not supported"),
        ("ssh-ed25519 AAAA!", "not an SSH public key"),
        ("ssh-ed25519 AAAA", "cut off"),
        ("a b\nc d", "not one SSH public key"),
        (f"sk-ssh-ed25519@openssh.com {hardware}", "'sk-ssh-ed25519@openssh.com' are not supported"),
        ("-----BEGIN OPENSSH PRIVATE KEY-----", "not an SSH public key"),
    ]:
        with pytest.raises(SshError, match=reason):
            read_public_key(text)
    begin, end = (f"-----{word} SSH SIGNATURE-----" for word in ("BEGIN", "END"))
    assert read_armor(f"\n{begin}\nAAAA\n{end}\n\n") == bytes(3)
    for text in ("", "x", f"{begin}\n!\n{end}", f"{begin}\nAAAA\nAAAA", f"AAAA\nAAAA\n{end}"):
        with pytest.raises(SshError, match="not an SSH signature"):
            read_armor(text)

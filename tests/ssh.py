"""Keys and signatures of the real ssh-keygen."""

import subprocess
from pathlib import Path

KINDS = ("ed25519", "rsa-3072", "ecdsa-256", "ecdsa-384", "ecdsa-521")


def make_key(path: Path, kind: str = "ed25519", passphrase: str = "") -> Path:
    """Make a private key, and its public one beside it with the suffix `.pub`."""
    name, _, bits = kind.partition("-")
    size = ["-b", bits] if bits else []
    subprocess.run(["ssh-keygen", "-q", "-t", name, *size, "-N", passphrase, "-f", path], check=True)
    return path


def sign(key: Path, message: bytes, namespace: str, *options: str) -> str:
    command = ["ssh-keygen", "-q", "-Y", "sign", "-f", key, "-n", namespace, *options]
    return subprocess.run(command, input=message, capture_output=True, check=True).stdout.decode()

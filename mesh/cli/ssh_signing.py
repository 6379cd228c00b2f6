"""Signatures by the user's SSH key, made by ssh-keygen: it asks for a passphrase, or ssh-agent, as `ssh` does."""

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from membership.ssh_keys import SshError, fingerprint, format_fingerprint, read_armor, read_public_key
from mesh.util.errors import ExitCode, MeshError

AGENT_S = 10.0  # to list its keys; own choice


def sign(wanted: bytes, identity: Path | None, namespace: bytes, message: bytes) -> bytes:
    """Return a signature (SSHSIG) by the key with the fingerprint `wanted`.

    `identity` is a file of the private key, or of the public key if ssh-agent has the private one. Without it, the key is looked
    for in ~/.ssh and ssh-agent.
    """
    if identity is not None:
        return _sign(identity, namespace, message)
    for line, path in _own_keys():
        if _fingerprint(line) != wanted:
            continue
        if path is not None:
            return _sign(path, namespace, message)
        with tempfile.NamedTemporaryFile("w", suffix=".pub") as public:  # ssh-keygen then asks ssh-agent for the rest
            public.write(line + "\n")
            public.flush()
            return _sign(Path(public.name), namespace, message)
    raise MeshError(
        f"this invite is for the SSH key {format_fingerprint(wanted)}, which is neither in ~/.ssh nor in ssh-agent: name its "
        "file with --ssh-identity",
        ExitCode.REFUSED,
    )


def _own_keys() -> Iterator[tuple[str, Path | None]]:
    """Yield public keys and, of those in ~/.ssh, their files."""
    for path in sorted(Path("~/.ssh").expanduser().glob("*.pub")):
        try:
            yield path.read_text(), path
        except (OSError, UnicodeDecodeError):
            continue
    try:
        listed = subprocess.run(["ssh-add", "-L"], capture_output=True, text=True, check=False, timeout=AGENT_S)
    except (OSError, UnicodeDecodeError, subprocess.TimeoutExpired):
        return
    for line in listed.stdout.splitlines():
        yield line, None


def _fingerprint(line: str) -> bytes:
    try:
        return fingerprint(read_public_key(line))
    except SshError:
        return b""


def _sign(file: Path, namespace: bytes, message: bytes) -> bytes:
    command = ["ssh-keygen", "-q", "-Y", "sign", "-n", namespace.decode(), "-f", str(file)]
    try:
        done = subprocess.run(command, input=message, capture_output=True, check=False)
        if not done.returncode:
            return read_armor(done.stdout.decode())
    except FileNotFoundError as error:
        raise MeshError(
            "the invite is bound to an SSH key, and ssh-keygen is missing: install openssh-client"
        ) from error
    except ValueError as error:
        raise MeshError(f"ssh-keygen has made no signature with {file}: {error}") from error
    said = done.stderr.decode(errors="replace").strip() or f"exit code {done.returncode}"
    raise MeshError(f"ssh-keygen cannot sign with {file}: {said}")

"""Secret vault: the user's secrets on this node, each in a file that only this node's key opens. They never leave this node as
they are: a job gets a copy, sealed for it (`mesh/checkpoints/secrets.py`).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from membership.durable import write_durably
from membership.identity import Identity, encrypt_to
from membership.malformed import MALFORMED
from mesh.model.secrets import MOST_VALUE_BYTES, NAME, SecretError, Use, check_name, is_file

MOST_KEPT = 256  # secrets of one node (own choice)


class Kept(NamedTuple):
    name: str
    changed_unix: float


class SecretVault:
    """The secrets in one directory."""

    def __init__(self, directory: Path, identity: Identity) -> None:
        self._directory, self._identity = directory, identity

    def set(self, name: str, value: bytes) -> bool:
        """Keep a secret; return whether it replaces one of that name. SecretError if it cannot be kept."""
        check_name(name)
        if not value:
            raise SecretError(f"the value of {name} is empty")
        if len(value) > MOST_VALUE_BYTES:
            raise SecretError(f"the value of {name} has {len(value)} bytes: a secret has at most {MOST_VALUE_BYTES}")
        before = {kept.name for kept in self.all()}
        if name not in before and len(before) >= MOST_KEPT:
            raise SecretError(f"this node keeps {MOST_KEPT} secrets already: `mesh secret rm NAME` removes one")
        self._directory.mkdir(mode=0o700, exist_ok=True)
        # The name is sealed too: a file that is renamed is not another secret.
        write_durably(self._directory / name, encrypt_to(self._identity.node_id, msgspec.msgpack.encode((name, value))))
        return name in before

    def all(self) -> list[Kept]:
        """Return the names, in their order, and when each was set."""
        if not self._directory.is_dir():
            return []
        names = [path for path in self._directory.iterdir() if NAME.fullmatch(path.name)]
        return sorted(Kept(path.name, path.stat().st_mtime) for path in names)

    def remove(self, name: str) -> bool:
        """Remove a secret; return whether there was one. Jobs that have it keep it."""
        check_name(name)
        path = self._directory / name
        there = path.exists()
        path.unlink(missing_ok=True)
        return there

    def values(self, uses: Sequence[Use]) -> list[bytes]:
        """Return the value for each use; SecretError if one is not here, or cannot be its target."""
        return [self._value(*use) for use in uses]

    def _value(self, name: str, target: str) -> bytes:
        try:
            sealed = (self._directory / name).read_bytes()
        except FileNotFoundError as error:
            raise SecretError(f"there is no secret {name} on this node: `mesh secret set {name}`") from error
        try:
            named, value = _decode(self._identity.decrypt(sealed))
        except (*MALFORMED, ValueError) as error:
            raise SecretError(f"the secret {name} cannot be read: `mesh secret set {name}` sets it again") from error
        if named != name:
            raise SecretError(f"the file of the secret {name} is that of another one: `mesh secret set {name}`")
        if not is_file(target) and (b"\0" in value or not _is_text(value)):
            raise SecretError(
                f"the secret {name} is no text, so it cannot be a variable: write {name}:/run/secrets/FILE"
            )
        return value


_decode = msgspec.msgpack.Decoder(tuple[str, bytes]).decode


def _is_text(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True

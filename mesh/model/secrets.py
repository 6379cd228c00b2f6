"""Secrets of a job, as its public description has them: names and targets in the clear, values sealed.

The values are encrypted with a key of their own. It is split among the job's witnesses like the key of what the job saves
(`Lock`), and kept by nobody. Where the job may run on some nodes only, a second key is needed, which is sealed to each of them.
"""

import re
from collections.abc import Sequence

import msgspec

from ckptstore.cipher import REALM_BYTES, is_proof

# Bounds (own choice): an API key has 40 bytes, the key file of a cloud account 2.4 KiB; a description stays a small message.
MOST_SECRETS = 32
MOST_VALUE_BYTES = 16 * 1024
MOST_BYTES = 32 * 1024  # of all values of one job
MOST_BOX_BYTES = 40 * 1024
MOST_READERS = 64
MOST_SEALED = 256  # bytes of a sealed share or key

DIRECTORY = "/run/secrets"  # of the guest; Docker's own place for secrets
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_FILE = re.compile(rf"{DIRECTORY}/(?!\.)[A-Za-z0-9._-]{{1,64}}")
_OWN_VARIABLES = re.compile(
    r"MESH(_.*)?|LD_.*|PATH|HOME|RANK|WORLD_SIZE|MASTER_.*|PET_.*|CUDA_VISIBLE_DEVICES|NVIDIA_.*"
)

Use = tuple[str, str]  # a secret's name, and its target: a variable, or a file in DIRECTORY
Reader = tuple[bytes, bytes]  # a node, and the second key sealed to it


class SecretError(ValueError):
    """The secrets cannot be a job's; the text gives the reason."""


class Lock(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A key: `realm` names it; each of `shares` is sealed to the witness at its place in the spec. `proof`: the author of the
    spec has the key, so they have not copied the lock from another job.
    """

    realm: bytes
    shares: tuple[bytes, ...]
    proof: bytes = b""


class SealedSecrets(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`box` holds the values in the order of `uses`; a job that only has keys of data sets (`DataNeed`) has none. With `readers`,
    only these nodes can open it, and run the job."""

    lock: Lock
    box: bytes
    uses: tuple[Use, ...]
    readers: tuple[Reader, ...] = ()

    @property
    def nodes(self) -> tuple[bytes, ...]:
        """Return the nodes on which the job may run; empty for all."""
        return tuple(node for node, _ in self.readers)


def parse_use(text: str) -> Use:
    """Parse NAME, NAME=VARIABLE or NAME:/run/secrets/FILE; SecretError if it is neither."""
    match = re.fullmatch(r"([^=:]*)(?:([=:])(.*))?", text, re.DOTALL)
    name, sign, target = match.groups() if match is not None else (text, "", "")
    use = (name, target if sign else name)
    check_uses([use])
    if (sign == ":") != is_file(use[1]):
        raise SecretError(f"{text!r} is neither NAME, NAME=VARIABLE nor NAME:{DIRECTORY}/FILE")
    return use


def is_file(target: str) -> bool:
    return target.startswith("/")


def check_name(name: str) -> None:
    if NAME.fullmatch(name) is None:
        raise SecretError(f"a secret is named with up to 64 letters, digits and _, not {name[:80]!r}")


def check_uses(uses: Sequence[Use]) -> None:
    """Raise SecretError for a name or a target that cannot be one, or a target that is used twice."""
    if len(uses) > MOST_SECRETS:
        raise SecretError(f"a job has at most {MOST_SECRETS} secrets")
    for name, target in uses:
        check_name(name)
        if is_file(target):
            if _FILE.fullmatch(target) is None:
                raise SecretError(f"the file of a secret is {DIRECTORY}/NAME, not {target[:80]!r}")
        elif NAME.fullmatch(target) is None or _OWN_VARIABLES.fullmatch(target) is not None:
            raise SecretError(f"a secret cannot be the variable {target[:80]!r}: write --secret {name}=VARIABLE")
    targets = [target for _, target in uses]
    for target in targets:
        if targets.count(target) > 1:
            raise SecretError(f"two secrets have the target {target}")


def check_secrets(secrets: SealedSecrets, witnesses: int, author: bytes) -> None:
    """Raise SecretError unless these can be the secrets of a job with so many witnesses, by this author."""
    check_uses(secrets.uses)
    check_lock(secrets.lock, witnesses)
    if not is_proof(secrets.lock.realm, author, secrets.lock.proof):
        raise SecretError("the secrets are not those of the job's submitter: they are copied from another job")
    if len(secrets.box) > MOST_BOX_BYTES:
        raise SecretError(f"the secrets of a job have at most {MOST_BYTES // 1024} KiB together")
    if len(secrets.readers) > MOST_READERS or len(set(secrets.nodes)) != len(secrets.readers):
        raise SecretError(f"secrets are for at most {MOST_READERS} different nodes")
    if any(len(node) != 32 or len(sealed) > MOST_SEALED for node, sealed in secrets.readers):
        raise SecretError("a reader of secrets is not a node with a sealed key")


def check_lock(lock: Lock, witnesses: int) -> None:
    if len(lock.realm) != REALM_BYTES or len(lock.shares) != witnesses:
        raise SecretError("a job's lock has a share for each witness")
    if any(len(share) > MOST_SEALED for share in lock.shares) or len(lock.proof) > MOST_SEALED:
        raise SecretError("a share of a job's key is too long")

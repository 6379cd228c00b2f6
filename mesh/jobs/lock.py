"""What a job's description says of the key to all that the job saves; `shares.py` and `keyring.py` say who gets it, and how."""

import msgspec

from ckptstore.vault import REALM_BYTES

MOST_SEALED = 256  # of a share


class Lock(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`realm` names the key; `shares` are sealed, each to the witness at its place in the job's description."""

    realm: bytes
    shares: tuple[bytes, ...]


def check_lock(lock: Lock, witnesses: int) -> None:
    """ValueError if no job of so many witnesses can have it."""
    if len(lock.realm) != REALM_BYTES or len(lock.shares) != witnesses:
        raise ValueError("a job's lock has a share for each witness")
    if any(len(share) > MOST_SEALED for share in lock.shares):
        raise ValueError("a share of a job's key is too long")

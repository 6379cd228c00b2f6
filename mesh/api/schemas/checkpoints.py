"""Checkpoints in this node's store."""

import msgspec

from mesh.api.schemas.jobs import Pulled


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """`use`: what the mesh needs it for, as far as this node knows; `holders`: other nodes that have it."""

    id: str
    job: str
    name: str
    kind: str
    seq: int
    term: int
    created_unix: int
    bytes: int
    files: int
    encrypted: bool
    user: str
    use: str
    holders: list[str]


class Store(msgspec.Struct, frozen=True, kw_only=True):
    """`foreign_bytes`: of other users' jobs; a quota is None if there is none."""

    checkpoints: list[Stored]
    stored_bytes: int
    foreign_bytes: int
    quota_bytes: int | None
    foreign_quota_bytes: int | None


class Verified(msgspec.Struct, frozen=True, kw_only=True):
    """`quarantined`: damaged files, moved to the directory `quarantine`; `repaired`: fetched again; `lost`: reasons, by id."""

    chunks: int
    bad_chunks: int
    quarantined: list[str]
    quarantine: str
    repaired: list[str]
    lost: dict[str, str]


class CheckpointPulled(Pulled, frozen=True, kw_only=True):
    seq: int


class Removed(msgspec.Struct, frozen=True, kw_only=True):
    removed: list[str]


class Collected(msgspec.Struct, frozen=True, kw_only=True):
    """Space freed, and space still used."""

    packs: int
    bytes: int
    stored_bytes: int

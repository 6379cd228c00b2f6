"""What this node's store keeps."""

from typing import TypedDict

from mesh.api.answers.jobs import Pulled


class Stored(TypedDict):
    """`use`: what the mesh needs it for, as far as this node knows; `holders`: who else has it."""

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


class Store(TypedDict):
    """`foreign_bytes`: of others' jobs; no quota is None."""

    checkpoints: list[Stored]
    stored_bytes: int
    foreign_bytes: int
    quota_bytes: int | None
    foreign_quota_bytes: int | None


class Verified(TypedDict):
    """`quarantined`: what was put away, in the directory `quarantine`; `repaired`: fetched again; `lost`: not, and why."""

    chunks: int
    bad_chunks: int
    quarantined: list[str]
    quarantine: str
    repaired: list[str]
    lost: dict[str, str]


class CheckpointPulled(Pulled):
    seq: int


class Removed(TypedDict):
    removed: list[str]


class Collected(TypedDict):
    """What was freed, and what is left."""

    packs: int
    bytes: int
    stored_bytes: int

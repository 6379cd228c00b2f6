"""Members of the mesh."""

import msgspec


class Invited(msgspec.Struct, frozen=True, kw_only=True):
    invite: str


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """An open join request. `node`: its id; nick and user as requested."""

    node: str
    nick: str
    user: str
    host: str
    since_unix: float


class Pending(msgspec.Struct, frozen=True, kw_only=True):
    pending: list[Waiting]


class Approved(msgspec.Struct, frozen=True, kw_only=True):
    node: str
    nick: str
    user: str


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """`node`: an id. `problem`: why it is no member now, empty if it is one. `through`: ids of the nodes that it came in through.

    `ends_unix`: of the certificate, None if none was seen; `revoked_unix`: None if it was not.
    """

    node: str
    nick: str
    user: str
    founder: bool
    can_admit: bool
    roles: list[str]
    ends_unix: int | None
    ended: bool
    revoked_unix: int | None
    reason: str
    problem: str
    through: list[str]


class Members(msgspec.Struct, frozen=True, kw_only=True):
    members: list[Member]


class CameThrough(msgspec.Struct, frozen=True, kw_only=True):
    """A member that came in through a revoked node.

    `existing`: it was a further machine of its user, so `approve` needs --existing to make it that again.
    """

    node: str
    nick: str
    user: str
    existing: bool


class Revoked(msgspec.Struct, frozen=True, kw_only=True):
    """`already`: it was revoked before. `founders` have signed, `quorum` must. `lost`: members that came in through it."""

    node: str
    nick: str
    already: bool
    founders: int
    quorum: int
    lost: list[CameThrough]


class Promoted(msgspec.Struct, frozen=True, kw_only=True):
    """`founders` have signed that the node may admit others, `quorum` must."""

    node: str
    nick: str
    founders: int
    quorum: int

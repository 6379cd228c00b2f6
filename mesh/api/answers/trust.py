"""Who belongs to the mesh."""

from typing import TypedDict


class Invited(TypedDict):
    invite: str


class Waiting(TypedDict):
    """`node`: its id; nick and user as it calls itself."""

    node: str
    nick: str
    user: str
    host: str
    since_unix: float


class Pending(TypedDict):
    pending: list[Waiting]


class Approved(TypedDict):
    node: str
    nick: str
    user: str


class Member(TypedDict):
    """`node`: an id. `ends_unix`: of the certificate, None if none was seen; `revoked_unix`: None if it was not."""

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


class Members(TypedDict):
    members: list[Member]


class Revoked(TypedDict):
    """`already`: it was before."""

    node: str
    nick: str
    already: bool

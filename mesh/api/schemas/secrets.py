"""Secrets: their names."""

import msgspec


class Secret(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    changed_unix: float


class Secrets(msgspec.Struct, frozen=True, kw_only=True):
    secrets: list[Secret]


class SecretSet(msgspec.Struct, frozen=True, kw_only=True):
    """`replaced`: there was one of that name before."""

    name: str
    replaced: bool


class SecretsRemoved(msgspec.Struct, frozen=True, kw_only=True):
    removed: list[str]

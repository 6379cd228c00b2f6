"""The decision whether an image may run on this node, and which rule refuses it. No I/O.

The owner comes first: images that the owner denies are not run, and images that the owner allows run whatever the mesh's list
says. Then the mesh's list decides. In a mesh without a list, every image on the node may run, since its owner put it there. A
user's personal image runs where the owner runs that user's. Images are compared by hash, not by name alone.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Literal

import msgspec

from mesh.images.allowlist import (
    ANYTHING,
    HASH_BYTES,
    Image,
    ListedEntry,
    ListError,
    check_alias,
    image_hash,
    user_of,
)

Rule = Literal["", "denied here", "not listed", "differs", "no engine", "not here"]
MAX_OWN = 200  # rules of one owner; adverts hold the names


class OwnRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The owner's rules: allowed images, and denied names, each with the hashes that it had at the time."""

    allowed: dict[str, Image] = {}
    denied: dict[str, tuple[bytes, ...]] = {}


class Verdict(msgspec.Struct, frozen=True):
    """The decision about an image.

    `rule` is empty if it may run: then `image`, or, if that is None, the image of that name here. `words` says why it may not.
    """

    rule: Rule
    words: str = ""
    image: Image | None = None


class Rules(msgspec.Struct, frozen=True, dict=True):
    """The mesh's list, users' personal images and the owner's rules. `listed` is None while the mesh has no list; `users`: whose
    personal images run here (None: everybody's)."""

    listed: Mapping[str, ListedEntry] | None = None
    own: OwnRules = OwnRules()
    personal: Mapping[str, ListedEntry] = {}
    users: frozenset[str] | None = None

    def judge(self, name: str, wanted: bytes | None) -> Verdict:
        """Decide whether a job that asks for `name` may run here. `wanted`: the list's hash of it when it was submitted."""
        config = wanted if wanted is not None else image_hash(name)
        denials = self.denied_hashes
        if name in self.own.denied or (config is not None and config in denials):
            return _denied(name)
        own = self.own.allowed.get(name)
        if own is not None and config in {None, own.config}:
            return _denied(name) if own.config in denials else Verdict("", image=own)
        user = user_of(name)
        if user is not None and self.users is not None and user not in self.users:
            return Verdict(
                "not listed",
                f"image {name} is of user {user}, whose images do not run here (`image_users` of its owner)",
            )
        row = self.rows.get(name)
        known = config in self.images if config is not None else row is not None and row.entry.image is not None
        if self.is_free(name) or (user is None and self.anything and not known):
            return Verdict("", image=None if config is None else Image(config))
        if config is not None:
            if known:
                return Verdict("", image=self.images[config])
            if row is None or row.entry.image is None:
                return Verdict(
                    "not listed", f"image {name} ({short(config)}) is not on the mesh's list: `mesh image ls`"
                )
            digests = f"{short(row.entry.image.config)}, not {short(config)}, which the job was submitted with"
            return Verdict(
                "differs", f"the digest of image {name} differs from the list's: that has {digests}; submit it again"
            )
        if row is None or row.entry.image is None:
            why = "has been taken from" if row is not None else "is not on"
            return Verdict("not listed", f"image {name} {why} the mesh's list: `mesh image ls` shows what is")
        return _denied(name) if row.entry.image.config in denials else Verdict("", image=row.entry.image)

    def is_free(self, name: str) -> bool:
        """Tell whether an image of this name needs no entry: the mesh has no list, and it is not a user's."""
        return self.listed is None and user_of(name) is None

    @cached_property
    def rows(self) -> Mapping[str, ListedEntry]:
        """Return all entries, by alias."""
        return {**(self.listed or {}), **self.personal}

    @property
    def of_mesh(self) -> "Rules":
        """Return what holds for the mesh: without the rules of this owner."""
        return Rules(self.listed, personal=self.personal)

    @cached_property
    def anything(self) -> bool:
        """Return whether the list allows every image."""
        row = (self.listed or {}).get(ANYTHING)
        return row is not None and row.entry.allowed

    @cached_property
    def images(self) -> dict[bytes, Image]:
        """Return the images that may run here, by hash: the list's and the owner's, without denied ones."""
        found = self.given | {image.config: image for image in self.own.allowed.values()}
        return {config: image for config, image in found.items() if config not in self.denied_hashes}

    @cached_property
    def given(self) -> dict[bytes, Image]:
        """Return the images of the mesh and of users whose images run here, denied ones included, by hash."""
        here = (row for alias, row in self.rows.items() if self.users is None or user_of(alias) in {None, *self.users})
        images = (row.entry.image for row in here)
        return {image.config: image for image in images if image is not None}

    @cached_property
    def shared(self) -> dict[bytes, Image]:
        """Return those that nodes give to each other: all but what only this owner allows."""
        return {config: image for config, image in self.images.items() if config in self.given}

    @cached_property
    def denied_hashes(self) -> frozenset[bytes]:
        denied = {config for configs in self.own.denied.values() for config in configs}
        for name in self.own.denied:
            row = self.rows.get(name)
            if row is not None and row.entry.image is not None:
                denied.add(row.entry.image.config)
        return frozenset(denied)

    def names(self, tags: Mapping[str, bytes]) -> tuple[str, ...]:
        """Return the names on this node's engine that a job may ask for by name alone. `tags`: hash by name."""
        denials = self.denied_hashes
        free = self.listed is None or self.anything
        named = [name for name, config in tags.items() if free and config not in denials]
        held = set(tags.values())
        own = [name for name, image in self.own.allowed.items() if image.config in held - denials]
        return tuple(sorted({*named, *own} - self.own.denied.keys()))


def check_own(own: OwnRules) -> OwnRules:
    """Return valid rules. ListError if they are not valid."""
    for alias in (*own.allowed, *own.denied):
        check_alias(alias)
    hashes = [image.config for image in own.allowed.values()]
    hashes += [config for configs in own.denied.values() for config in configs]
    if any(len(config) != HASH_BYTES for config in hashes):
        raise ListError("a digest in the owner's rules does not have 32 bytes")
    if len(own.allowed) + len(own.denied) > MAX_OWN:
        raise ListError(f"a node's owner has at most {MAX_OWN} rules about images")
    return own


def with_allowed(own: OwnRules, alias: str, image: Image) -> OwnRules:
    """Return the rules with an image allowed; denials of that name and of this image are dropped."""
    denied = {
        name: tuple(config for config in configs if config != image.config)
        for name, configs in own.denied.items()
        if name != alias
    }
    return check_own(OwnRules({**own.allowed, alias: image}, denied))


def with_denied(own: OwnRules, alias: str, hashes: frozenset[bytes]) -> OwnRules:
    allowed = {name: image for name, image in own.allowed.items() if name != alias}
    return check_own(OwnRules(allowed, {**own.denied, alias: tuple(sorted(hashes))}))


def without(own: OwnRules, alias: str) -> OwnRules:
    """Return the rules without an alias: the mesh's list decides about it."""
    allowed = {name: image for name, image in own.allowed.items() if name != alias}
    return OwnRules(allowed, {name: hashes for name, hashes in own.denied.items() if name != alias})


def short(config: bytes) -> str:
    """Shorten an image id as engines do."""
    return config.hex()[:12]


def _denied(name: str) -> Verdict:
    return Verdict("denied here", f"this node's owner denies image {name} (`mesh image deny`)")

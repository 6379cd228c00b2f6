"""Whether an image may be run on this node, and if not, which rule refuses it. No I/O.

The node's owner comes first: what he denies is not run, what he allows is run here whatever the mesh says. Then the mesh's list.
A mesh without a list lets run what is on the node, as its owner put it there. Images are compared by hash, not by name alone.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Literal

import msgspec

from mesh.images.allowlist import ANYTHING, HASH_BYTES, Image, ListError, Said, check_alias, image_hash

Rule = Literal["", "denied here", "not listed", "differs", "no engine", "not here"]
MAX_OWN = 200  # rules of one owner; his adverts hold the names


class OwnRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What this node's owner has said: images that he allows, and names that he denies, each with the hashes that it had then."""

    allowed: dict[str, Image] = {}
    denied: dict[str, tuple[bytes, ...]] = {}


class Verdict(msgspec.Struct, frozen=True):
    """`rule` is empty if it may be run: `image` then, or whatever is called so here if that is None. `words` say why not."""

    rule: Rule
    words: str = ""
    image: Image | None = None


class Rules(msgspec.Struct, frozen=True, dict=True):
    """`listed` is None while the mesh has no list."""

    listed: Mapping[str, Said] | None = None
    own: OwnRules = OwnRules()

    def judge(self, name: str, wanted: bytes | None) -> Verdict:
        """May a job that asks for `name` run here? `wanted`: the hash that the list had for it when it was submitted."""
        config = wanted if wanted is not None else image_hash(name)
        denials = self.denied_hashes
        if name in self.own.denied or (config is not None and config in denials):
            return _denied(name)
        own = self.own.allowed.get(name)
        if own is not None and config in {None, own.config}:
            return _denied(name) if own.config in denials else Verdict("", image=own)
        said = (self.listed or {}).get(name)
        known = config in self.images if config is not None else said is not None and said.word.image is not None
        if self.listed is None or (self.anything and not known):
            return Verdict("", image=None if config is None else Image(config))
        if config is not None:
            if known:
                return Verdict("", image=self.images[config])
            if said is None or said.word.image is None:
                return Verdict(
                    "not listed", f"image {name} ({short(config)}) is not on the mesh's list: `mesh image ls`"
                )
            told = f"{short(said.word.image.config)}, not {short(config)}, which the job was submitted with"
            return Verdict(
                "differs", f"the digest of image {name} differs from the list's: that has {told}; submit it again"
            )
        if said is None or said.word.image is None:
            why = "has been taken from" if said is not None else "is not on"
            return Verdict("not listed", f"image {name} {why} the mesh's list: `mesh image ls` shows what is")
        return _denied(name) if said.word.image.config in denials else Verdict("", image=said.word.image)

    @cached_property
    def anything(self) -> bool:
        """Whether the list itself says that every image may be run."""
        said = (self.listed or {}).get(ANYTHING)
        return said is not None and said.word.allowed

    @cached_property
    def images(self) -> dict[bytes, Image]:
        """All that may be run here by hash: the list's and the owner's, but what he denies."""
        said = [one.word.image for one in (self.listed or {}).values()]
        found = {image.config: image for image in (*said, *self.own.allowed.values()) if image is not None}
        return {config: image for config, image in found.items() if config not in self.denied_hashes}

    @cached_property
    def shared(self) -> dict[bytes, Image]:
        """Of these, those on the mesh's list: what nodes give to each other."""
        listed = {one.word.image.config for one in (self.listed or {}).values() if one.word.image is not None}
        return {config: image for config, image in self.images.items() if config in listed}

    @cached_property
    def denied_hashes(self) -> frozenset[bytes]:
        denied = {config for configs in self.own.denied.values() for config in configs}
        for name in self.own.denied:
            said = (self.listed or {}).get(name)
            if said is not None and said.word.image is not None:
                denied.add(said.word.image.config)
        return frozenset(denied)

    def names(self, tags: Mapping[str, bytes]) -> tuple[str, ...]:
        """Which of the names on this node's engine (and their hashes) a job may ask for by name alone."""
        denials = self.denied_hashes
        free = self.listed is None or self.anything
        named = [name for name, config in tags.items() if free and config not in denials]
        held = set(tags.values())
        own = [name for name, image in self.own.allowed.items() if image.config in held - denials]
        return tuple(sorted({*named, *own} - self.own.denied.keys()))


def check_own(own: OwnRules) -> OwnRules:
    """ListError if these cannot be an owner's rules."""
    for alias in (*own.allowed, *own.denied):
        check_alias(alias)
    hashes = [image.config for image in own.allowed.values()]
    hashes += [config for configs in own.denied.values() for config in configs]
    if any(len(config) != HASH_BYTES for config in hashes):
        raise ListError("a digest in the owner's rules has not 32 bytes")
    if len(own.allowed) + len(own.denied) > MAX_OWN:
        raise ListError(f"a node's owner has at most {MAX_OWN} rules about images")
    return own


def with_allowed(own: OwnRules, alias: str, image: Image) -> OwnRules:
    """He allows it here; what he denied under that name, and this image, he does no more."""
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
    """He says nothing of it any more: the mesh's list holds."""
    allowed = {name: image for name, image in own.allowed.items() if name != alias}
    return OwnRules(allowed, {name: hashes for name, hashes in own.denied.items() if name != alias})


def short(config: bytes) -> str:
    """As engines show an image id."""
    return config.hex()[:12]


def _denied(name: str) -> Verdict:
    return Verdict("denied here", f"this node's owner denies image {name} (`mesh image deny`)")

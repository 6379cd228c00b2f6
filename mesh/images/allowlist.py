"""The mesh's list of images: signed entries about aliases, merged into one list. No I/O.

Each signer keeps their own list of entries (`SignedList`), replaced whole. For each alias, the merged list holds the newest entry
by (counter, signer), so all nodes with the same input agree, in any order (invariants: docs/explanation/images.md). An entry
either names an image by its digests or denies the alias.

Aliases `@USER/NAME` are personal: only nodes of that user sign them, and each owner decides whose personal images run on their
node.
"""

import re
from collections.abc import Mapping
from typing import Annotated

import msgspec

from membership.malformed import MALFORMED

HASH_BYTES = 32
ANYTHING = "*"  # with this alias on the list, every image on a node may be run there
MAX_LIST_BYTES = 15 * 1024  # sealed and with its signer's certificates, it must fit into a section of 16 KiB
MAX_COUNTER = 2**53  # JSON represents integers exactly up to here
MAX_ALIAS = 128
MAX_PERSONAL = 16  # images of a user that one of their nodes signs; a new one displaces the oldest (own choice)

_ALIAS = re.compile(r"(?:@([A-Za-z0-9_.@+-]+)/)?[A-Za-z0-9](?:[A-Za-z0-9._/:-]*[A-Za-z0-9])?")
_ID = re.compile(r"sha256:([0-9a-f]{64})")

Natural = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNTER)]


class ListError(ValueError):
    """The bytes are not a list, or an entry is not valid; the text says why."""


class Image(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """An image.

    `config` is the SHA-256 of its configuration, which names its layers' hashes: an engine's image id. `manifest` is its digest
    in a registry, empty if none. `size` is in bytes, as counted by the engine.
    """

    config: bytes
    manifest: bytes = b""
    size: Natural = 0


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """An entry of the list. `image` is None if the alias is denied, or for `ANYTHING`."""

    alias: str
    counter: Natural
    allowed: bool
    image: Image | None = None


class SignedList(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """All entries of one signer. Of two lists of one signer, the one with the higher `number` counts. `personal`: the signer has
    never said anything for the mesh."""

    number: Natural
    entries: tuple[Entry, ...] = ()
    personal: bool = False


class ListedEntry(msgspec.Struct, frozen=True):
    """The valid entry of an alias, with its signer."""

    entry: Entry
    signer: bytes


_decoder = msgspec.msgpack.Decoder(SignedList)


def check_alias(alias: str) -> str:
    """Return a valid alias. ListError if it is not valid."""
    if not _ALIAS.fullmatch(alias) or len(alias) > MAX_ALIAS or image_hash(alias) is not None:
        raise ListError(
            f"{alias[:MAX_ALIAS]!r} cannot be an image's name: letters, digits and . _ - / : between them, perhaps after @USER/, "
            f"at most {MAX_ALIAS}"
        )
    return alias


def user_of(alias: str) -> str | None:
    """Return the user whose personal image has this alias; None if it is the mesh's."""
    found = _ALIAS.fullmatch(alias)
    return found[1] if found is not None else None


def image_hash(text: str) -> bytes | None:
    """Return the hash in `sha256:...`; None for any other text."""
    found = _ID.fullmatch(text)
    return bytes.fromhex(found[1]) if found is not None else None


def encode_list(signed: SignedList) -> bytes:
    payload = msgspec.msgpack.encode(signed)
    if len(payload) > MAX_LIST_BYTES:
        raise ListError(
            f"one signer's list holds {MAX_LIST_BYTES} bytes, about {len(signed.entries) - 1} images: deny what nobody needs "
            "(`mesh image deny ALIAS --mesh`), or let another admitter sign"
        )
    decode_list(payload)
    return payload


def decode_list(payload: bytes) -> SignedList:
    try:
        signed = _decoder.decode(payload)
    except MALFORMED as error:
        raise ListError(f"not a list of images: {error}") from error
    if len(payload) > MAX_LIST_BYTES or len({entry.alias for entry in signed.entries}) < len(signed.entries):
        raise ListError("not a list of images: too long, or an alias twice")
    for entry in signed.entries:
        _check_entry(entry)
    of_users = sum(user_of(entry.alias) is not None for entry in signed.entries)
    if of_users > MAX_PERSONAL:
        raise ListError(f"a node signs at most {MAX_PERSONAL} images of its user")
    if signed.personal and of_users < len(signed.entries):
        raise ListError("a personal list has images of the mesh")
    return signed


def _check_entry(entry: Entry) -> None:
    image = entry.image
    if entry.alias != ANYTHING:
        check_alias(entry.alias)
    if (image is not None) != (entry.allowed and entry.alias != ANYTHING):
        raise ListError(f"the entry of {entry.alias} neither names an image nor denies it")
    if image is not None and (len(image.config) != HASH_BYTES or len(image.manifest) not in {0, HASH_BYTES}):
        raise ListError(f"the digests of {entry.alias} are not valid")


def merged(lists: Mapping[bytes, SignedList]) -> dict[str, ListedEntry]:
    """Merge all signers' lists, denials included: the newest entry of each alias; the greater key wins a tie."""
    found: dict[str, ListedEntry] = {}
    for signer, signed in lists.items():
        for entry in signed.entries:
            known = found.get(entry.alias)
            if known is None or (entry.counter, signer) > (known.entry.counter, known.signer):
                found[entry.alias] = ListedEntry(entry, signer)
    return found


def amended(
    me: bytes, lists: Mapping[bytes, SignedList], alias: str, image: Image | None, allowed: bool, unix_ms: int
) -> SignedList:
    """Return this signer's list with a new entry, newer than all known entries of the alias. ListError on failure."""
    own = lists.get(me, SignedList(0))
    before = merged(lists).get(alias)
    counter = before.entry.counter + 1 if before is not None else 1
    if counter > MAX_COUNTER or own.number >= MAX_COUNTER:
        raise ListError(f"no newer entry of {alias} is possible: revoke its signer, or use another name")
    entries = [entry for entry in own.entries if entry.alias != alias]
    if user_of(alias) is not None:
        counter = max(counter, unix_ms)
        kept = sorted((entry for entry in entries if user_of(entry.alias) is not None), key=lambda entry: entry.counter)
        entries = [entry for entry in entries if entry not in kept[: -(MAX_PERSONAL - 1)]]
    others = any(entry.alias == alias for signer, signed in lists.items() if signer != me for entry in signed.entries)
    if allowed or others:  # keep a denial only against other signers' entries
        entries.append(Entry(alias, counter, allowed, image if allowed else None))
    personal = user_of(alias) is not None and (me not in lists or own.personal)
    signed = SignedList(max(own.number + 1, unix_ms), tuple(sorted(entries, key=lambda entry: entry.alias)), personal)
    encode_list(signed)
    return signed

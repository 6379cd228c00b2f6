"""The mesh's list of images: signed words about aliases, and the one list that everybody makes of them. No I/O.

Whoever may sign keeps a list of his own words (`SignedList`), replaced whole. The mesh's list is, of each alias, the newest word
by (counter, signer): the same on every node that has heard the same, in whatever order (invariants: docs/images.md). A word is an
image, by both its digests, or that the alias is denied.
"""

import re
from collections.abc import Mapping
from typing import Annotated

import msgspec

HASH_BYTES = 32
ANYTHING = "*"  # this alias on the list: whatever is on a node may be run there
MAX_LIST_BYTES = 15 * 1024  # sealed, and beside its signer's certificates, it must fit into a section of 16 KiB
MAX_COUNTER = 2**53  # what JSON keeps exactly
MAX_ALIAS = 128

_ALIAS = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._/:-]*[A-Za-z0-9])?")
_ID = re.compile(r"sha256:([0-9a-f]{64})")

Natural = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNTER)]


class ListError(ValueError):
    """Bytes that are no list, or a word that cannot be put on one; the text says why."""


class Image(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`config` is the SHA-256 of the image's configuration, which names its layers' hashes: an engine's image id. `manifest` is
    the digest by which a registry knows it, empty if none does. `size` is in bytes, as its engine counted them."""

    config: bytes
    manifest: bytes = b""
    size: Natural = 0


class Word(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`image` is None where the alias is denied (and of `ANYTHING`, which names none)."""

    alias: str
    counter: Natural
    allowed: bool
    image: Image | None = None


class SignedList(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """All that one signer says. Of two lists of one signer the one with the higher `number` holds."""

    number: Natural
    words: tuple[Word, ...] = ()


class Said(msgspec.Struct, frozen=True):
    """The word that holds, and whose it is."""

    word: Word
    signer: bytes


_decoder = msgspec.msgpack.Decoder(SignedList)


def check_alias(alias: str) -> str:
    """ListError if no image can be called so."""
    if not _ALIAS.fullmatch(alias) or len(alias) > MAX_ALIAS or image_hash(alias) is not None:
        raise ListError(
            f"{alias[:MAX_ALIAS]!r} cannot be an image's name: letters, digits and . _ - / : between them, at most {MAX_ALIAS}"
        )
    return alias


def image_hash(text: str) -> bytes | None:
    """The hash that `sha256:...` names, None for anything else."""
    found = _ID.fullmatch(text)
    return bytes.fromhex(found[1]) if found is not None else None


def encode_list(signed: SignedList) -> bytes:
    payload = msgspec.msgpack.encode(signed)
    if len(payload) > MAX_LIST_BYTES:
        raise ListError(
            f"one signer's list holds {MAX_LIST_BYTES} bytes, about {len(signed.words) - 1} images: deny what nobody needs "
            "(`mesh image deny ALIAS --mesh`), or let another admitter sign"
        )
    decode_list(payload)
    return payload


def decode_list(payload: bytes) -> SignedList:
    try:
        signed = _decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ListError(f"not a list of images: {error}") from error
    if len(payload) > MAX_LIST_BYTES or len({word.alias for word in signed.words}) < len(signed.words):
        raise ListError("not a list of images: too long, or an alias twice")
    for word in signed.words:
        _check_word(word)
    return signed


def _check_word(word: Word) -> None:
    image = word.image
    if word.alias != ANYTHING:
        check_alias(word.alias)
    if (image is not None) != (word.allowed and word.alias != ANYTHING):
        raise ListError(f"what is said of {word.alias} is neither an image nor that it is denied")
    if image is not None and (len(image.config) != HASH_BYTES or len(image.manifest) not in {0, HASH_BYTES}):
        raise ListError(f"the digests of {word.alias} are none")


def merged(lists: Mapping[bytes, SignedList]) -> dict[str, Said]:
    """The mesh's list, denials with it: of each alias the newest word; of two with one number that of the greater key."""
    found: dict[str, Said] = {}
    for signer, signed in lists.items():
        for word in signed.words:
            known = found.get(word.alias)
            if known is None or (word.counter, signer) > (known.word.counter, known.signer):
                found[word.alias] = Said(word, signer)
    return found


def amended(
    me: bytes, lists: Mapping[bytes, SignedList], alias: str, image: Image | None, allowed: bool, unix_ms: int
) -> SignedList:
    """This signer's list with a new word, which is newer than all that is known of the alias. ListError if it cannot be."""
    own = lists.get(me, SignedList(0))
    before = merged(lists).get(alias)
    counter = before.word.counter + 1 if before is not None else 1
    if counter > MAX_COUNTER or own.number >= MAX_COUNTER:
        raise ListError(f"nobody can say anything newer of {alias}: revoke who signed it, or use another name")
    words = [word for word in own.words if word.alias != alias]
    others = any(word.alias == alias for signer, signed in lists.items() if signer != me for word in signed.words)
    if allowed or others:  # a denial is kept only against what others still say
        words.append(Word(alias, counter, allowed, image if allowed else None))
    signed = SignedList(max(own.number + 1, unix_ms), tuple(sorted(words, key=lambda word: word.alias)))
    encode_list(signed)
    return signed

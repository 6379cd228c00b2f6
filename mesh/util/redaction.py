"""Removal of secrets from text that others will see: known secrets in every encoding, and patterns that look like secrets."""

import base64
import re
from collections.abc import Iterable, Iterator

REMOVED = b"[removed]"
LEAST_BYTES = 8  # of a known secret: shorter ones occur everywhere (own choice)

_NAMED = rb"(?:passw(?:or)?d|passphrase|secret|token|api[_-]?key|access[_-]?key|private[_-]?key|credential)s?"
_PATTERNS = (
    re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL),
    re.compile(rb"mesh1-[\w-]+(?:\s+[\w-]{40,})*"),  # invites
    re.compile(rb"(?i)\b(?:bearer|basic)\s+[\w.~+/=-]{8,}"),
    re.compile(rb"\b(?:gh[pousr]_|github_pat_|hf_|sk-|glpat-|xox[abprs]-|AKIA|npm_|pypi-)[\w-]{8,}"),
    re.compile(rb"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"),  # JSON web tokens
)
_CREDENTIALS = re.compile(rb"(\w://)[^\s/]+@")  # a name alone may be a token
# `some_token = "x"`, `"token": "x"`, `--token x`
_NAMED_VALUE = re.compile(
    rb"""(?i)((?:%(n)s[\w.-]{0,40}["']?\s*[:=]\s*|--[\w-]{0,40}?%(n)s[\w-]{0,40}\s+)["']?)(?!\[removed\])([^\s"',;&}]+)"""
    % {b"n": _NAMED}
)


def redacted(text: bytes, secrets: Iterable[bytes]) -> bytes:
    """Return the text without these secrets (raw, hex, base32, base64) and without what is named or looks like one."""
    text = without(text, secrets)
    for pattern in _PATTERNS:
        text = pattern.sub(REMOVED, text)
    text = _CREDENTIALS.sub(rb"\1" + REMOVED + b"@", text)
    return _NAMED_VALUE.sub(rb"\1" + REMOVED, text)


def without(text: bytes, secrets: Iterable[bytes]) -> bytes:
    """Return the text without these secrets only."""
    for secret in secrets:
        for spelling in spellings(secret):
            text = re.sub(re.escape(spelling), REMOVED, text, flags=re.IGNORECASE if _caseless(spelling, secret) else 0)
    return text


def spellings(secret: bytes) -> Iterator[bytes]:
    """Yield the encodings of a secret, also inside longer data: the digits that do not depend on the bytes around it."""
    if len(secret) < LEAST_BYTES:
        return
    yield secret
    yield secret.hex().encode()
    yield repr(secret)[2:-1].encode()
    for encode, bits in ((base64.b64encode, 6), (base64.urlsafe_b64encode, 6), (base64.b32encode, 5)):
        for before in range(5 if bits == 5 else 3):
            encoded = encode(bytes(before) + secret).rstrip(b"=")
            first, last = -(-before * 8 // bits), (before + len(secret)) * 8 // bits
            yield encoded[first:last]


def _caseless(spelling: bytes, secret: bytes) -> bool:
    return spelling == secret.hex().encode() or bool(re.fullmatch(rb"[A-Z2-7]+", spelling))

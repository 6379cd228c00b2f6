"""Access to the page: one-time tokens, sessions that follow from them, and protection against cross-site requests.

A token (from `mesh top --web`) is good for one visit within ten minutes; it is exchanged for a session, whose id is a cookie that
scripts cannot read. Only digests of both are kept. A form carries its session's own word besides, which another page cannot know.
"""

from collections.abc import Callable, Mapping
from hashlib import blake2b
from hmac import compare_digest
from typing import NamedTuple

import msgspec

TOKEN_BYTES = 32  # as JupyterLab's: cannot be guessed
TOKEN_S = 600.0  # time to open it in a browser (own choice)
SESSION_S = 12 * 3600.0  # without a request: a working day (own choice)
MOST = 64  # tokens, and sessions; the oldest is dropped (own choice)
FROM_HERE = frozenset({"", "same-origin", "none"})  # of Sec-Fetch-Site, which only browsers send


class Session(msgspec.Struct):
    """`word` goes into its forms."""

    digest: bytes
    word: str
    used: float


class Visit(NamedTuple):
    """A session, and what its cookie says."""

    session: Session
    cookie: str


class Sessions:
    """`draw` gives so many random bytes. Times are seconds of a clock that does not go back."""

    def __init__(self, draw: Callable[[int], bytes]) -> None:
        self._draw = draw
        self._tokens: dict[bytes, float] = {}  # until when
        self._sessions: dict[bytes, Session] = {}

    def invite(self, now: float) -> str:
        """A token for one visit."""
        token = self._secret()
        self._tokens[_digest(token)] = now + TOKEN_S
        while len(self._tokens) > MOST:
            del self._tokens[next(iter(self._tokens))]
        return token

    def enter(self, token: str, now: float) -> Visit | None:
        """A new session for a token, which is used up; None for one that is not good (any more)."""
        until = self._tokens.pop(_digest(token), None)
        if until is None or until < now:
            return None
        cookie = self._secret()
        session = Session(_digest(cookie), self._secret(), now)
        self._sessions[session.digest] = session
        while len(self._sessions) > MOST:
            del self._sessions[min(self._sessions, key=lambda one: self._sessions[one].used)]
        return Visit(session, cookie)

    def find(self, cookie: str, now: float) -> Session | None:
        """The session that a cookie belongs to, which was used just now."""
        session = self._sessions.get(_digest(cookie))
        if session is None:
            return None
        if now - session.used > SESSION_S:
            del self._sessions[session.digest]
            return None
        session.used = now
        return session

    def end(self, session: Session) -> None:
        self._sessions.pop(session.digest, None)

    def holds(self, session: Session) -> bool:
        return session.digest in self._sessions

    def _secret(self) -> str:
        return self._draw(TOKEN_BYTES).hex()


def is_word(session: Session, word: str) -> bool:
    """Return whether a form carries this session's token."""
    return compare_digest(session.word.encode(), word.encode(errors="replace"))


def objection(method: str, headers: Mapping[str, str], port: int) -> str:
    """Return why a request is refused; empty if it comes from this page or from a person who opened the address.

    The Host is compared because a name of another site's may be made to mean this machine (DNS rebinding).
    """
    host = headers.get("Host", "")
    if host not in {f"127.0.0.1:{port}", f"localhost:{port}"}:
        return f"this page is at 127.0.0.1:{port}, and nowhere else"
    changes = method not in {"GET", "HEAD"}
    if changes and headers.get("Origin", "") != f"http://{host}":
        return "this was not asked for by this page"
    came = headers.get("Sec-Fetch-Site", "")
    # A person may follow a link to a page; what it shows then is decided by the cookie, which does not come along.
    followed = not changes and headers.get("Sec-Fetch-Mode", "") == "navigate" and _alone(headers)
    if came not in FROM_HERE and not followed:
        return "this was asked for by another site"
    return ""


def _alone(headers: Mapping[str, str]) -> bool:
    """A page of its own, in no frame."""
    return headers.get("Sec-Fetch-Dest", "") == "document"


def _digest(secret: str) -> bytes:
    return blake2b(secret.encode(errors="replace"), digest_size=32, person=b"mesh-web").digest()

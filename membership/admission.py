"""Joining without an invite: a stranger knocks at any member, waits where all who may admit see it, and is let in by one of them.

The stranger knows nothing of the mesh, so a knock and its answer are signed outside of any mesh. It is shown the genesis and
the certificates of whom it knocked at; the person who joins compares the mesh's id with somebody's who is in it already.
"""

import asyncio
import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from membership.envelope import EnvelopeError, open_envelope, seal
from membership.framing import read_frame, write_frame
from membership.identity import Identity, NodeId, parse_id
from membership.reconcile import FrameError
from membership.trust import ROLES, TrustError, TrustStore

PENDING = "pending"  # the section in which a node shows who knocked at it
ADMITTED = "admitted"  # the section in which an admitter shows the chains it has granted
WAITING_AT_ONCE = 32
FORGOTTEN_AFTER_S = 3600.0  # without another knock
ADMITTED_KEPT = 16
PENDING_TTL_S, ADMITTED_TTL_S = FORGOTTEN_AFTER_S, 7 * 86_400.0
KNOCK_S = 5.0
_NO_MESH = b"\0" * 16
_MARK = b"K"


class Knock(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    nonce: int
    nick: str
    user: str


class KnockAnswer(msgspec.Struct, frozen=True, array_like=True):
    """`granted` is the stranger's chain, once it has been let in; `chain` that of whoever answers."""

    answers: int
    state: Literal["waiting", "admitted", "full", "revoked"]
    genesis: bytes
    chain: bytes
    granted: bytes = b""


class Waiting(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    node: bytes
    nick: str
    user: str
    host: str
    since_unix: int


class Allowed(msgspec.Struct, frozen=True):
    """A line of an allow list: who needs not wait. `nick` and `user` are what the owner of the list calls it, if he does."""

    node: bytes
    nick: str = ""
    user: str = ""
    roles: tuple[str, ...] = ROLES


_knock_decoder = msgspec.msgpack.Decoder(Knock)
_answer_decoder = msgspec.msgpack.Decoder(KnockAnswer)
_waiting_decoder = msgspec.msgpack.Decoder(list[Waiting])
_chains_decoder = msgspec.msgpack.Decoder(dict[bytes, bytes])


class Porch:
    """Who waits at this node. `decide` gives the chain of one who is let in, or nothing."""

    def __init__(self, identity: Identity, trust: TrustStore) -> None:
        self._identity, self._trust = identity, trust
        self._waiting: OrderedDict[NodeId, tuple[Waiting, float]] = OrderedDict()

    def answer(
        self,
        data: bytes,
        host: str,
        chain: bytes,
        now_unix: float,
        decide: Callable[[NodeId, Knock], bytes],
    ) -> bytes:
        """The sealed answer to a sealed knock from `host`; EnvelopeError or FrameError for anything else."""
        node, payload = open_envelope(data.removeprefix(_MARK), _NO_MESH, "knock")
        try:
            knock = _knock_decoder.decode(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise FrameError(f"not a knock: {error}") from error
        if not (0 < len(knock.nick) <= 64 and 0 < len(knock.user) <= 64):
            raise FrameError("a knock with an impossible name")
        self.forget(now_unix)
        granted = b"" if node in self._trust.revoked else decide(node, knock)
        state: Literal["waiting", "admitted", "full", "revoked"] = "admitted"
        if node in self._trust.revoked:
            state = "revoked"
        elif granted:
            self._waiting.pop(node, None)
        else:
            state = "waiting" if self._keep(node, knock, host, now_unix) else "full"
        answer = KnockAnswer(knock.nonce, state, self._trust.genesis_bytes, chain, granted)
        return seal(self._identity, _NO_MESH, "knock-answer", msgspec.msgpack.encode(answer))

    def waiting(self) -> list[Waiting]:
        return [entry for entry, _ in self._waiting.values()]

    def forget(self, now_unix: float) -> None:
        """Those who have not knocked again for an hour, and those who have become members."""
        for node, (_, last) in list(self._waiting.items()):
            if now_unix - last > FORGOTTEN_AFTER_S or self._trust.standing(node, now_unix) is not None:
                del self._waiting[node]

    def _keep(self, node: NodeId, knock: Knock, host: str, now_unix: float) -> bool:
        known = self._waiting.get(node)
        if known is None and len(self._waiting) >= WAITING_AT_ONCE:
            return False
        since = known[0].since_unix if known is not None else int(now_unix)
        self._waiting[node] = (Waiting(node, knock.nick, knock.user, host, since), now_unix)
        return True


def is_knock(data: bytes) -> bool:
    return data.startswith(_MARK)


def make_knock(identity: Identity, nonce: int, nick: str, user: str) -> bytes:
    return _MARK + seal(identity, _NO_MESH, "knock", msgspec.msgpack.encode(Knock(nonce, nick[:64], user[:64])))


def read_answer(data: bytes, nonce: int, now_unix: float) -> tuple[NodeId, TrustStore, KnockAnswer]:
    """Who answered, its mesh, and the answer; TrustError if it does not hang together."""
    try:
        node, payload = open_envelope(data, _NO_MESH, "knock-answer")
        answer = _answer_decoder.decode(payload)
    except (EnvelopeError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise TrustError("what answers there is no node of a mesh, or of another version") from error
    store = TrustStore(answer.genesis)
    if answer.answers != nonce or store.check_chain(answer.chain, now_unix).node_id != node:
        raise TrustError("the answer is not from the node that it names")
    return node, store, answer


async def knock_at(
    host: str, port: int, identity: Identity, nick: str, user: str, nonce: int, now_unix: float
) -> tuple[NodeId, TrustStore, KnockAnswer]:
    """Knock once at the node there. OSError, TimeoutError or TrustError if that fails."""
    async with asyncio.timeout(KNOCK_S):
        reader, writer = await asyncio.open_connection(host, port)
        try:
            await write_frame(writer, make_knock(identity, nonce, nick, user))
            return read_answer(await read_frame(reader), nonce, now_unix)
        except FrameError as error:
            raise TrustError("what answers there is no node of a mesh") from error
        except asyncio.IncompleteReadError as error:
            raise TrustError("it hung up: no node of a mesh, one of another version, or a busy one") from error
        finally:
            writer.close()


def encode_waiting(waiting: list[Waiting]) -> bytes:
    return msgspec.msgpack.encode(waiting)


def decode_waiting(body: bytes) -> list[Waiting]:
    """Those who wait at another node; nothing of what is not as it should be."""
    try:
        found = _waiting_decoder.decode(body) if body else []
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return []
    return [entry for entry in found[:WAITING_AT_ONCE] if len(entry.node) == 32 and len(entry.nick + entry.user) <= 128]


def encode_admitted(chains: dict[bytes, bytes]) -> bytes:
    return msgspec.msgpack.encode(chains)


def decode_admitted(body: bytes) -> dict[bytes, bytes]:
    try:
        return _chains_decoder.decode(body) if body else {}
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return {}


def read_allow_list(path: Path) -> dict[NodeId, Allowed]:
    """The lines of an allow list; TrustError that names the file, the line and the mistake.

    A line is `ID [nick=NAME] [user=NAME] [roles=provider,user]`; what follows a # is for people.
    """
    if not path.exists():
        return {}
    allowed: dict[NodeId, Allowed] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TrustError(f"{path} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            entry = _allowed(words)
        except ValueError as error:
            raise TrustError(f"{path}, line {number}: {error}") from error
        allowed[entry.node] = entry
    return allowed


def _allowed(words: list[str]) -> Allowed:
    fields: dict[str, str] = {}
    for word in words[1:]:
        found = re.fullmatch(r"(nick|user|roles)=(\S{1,64})", word)
        if found is None:
            raise ValueError(f"{word!r} is not nick=NAME, user=NAME or roles={','.join(ROLES)}")
        fields[found[1]] = found[2]
    roles = tuple(fields.get("roles", ",".join(ROLES)).split(","))
    if not set(roles) <= set(ROLES):
        raise ValueError(f"roles are {' and '.join(ROLES)}, not {fields['roles']!r}")
    return Allowed(parse_id(words[0]), fields.get("nick", ""), fields.get("user", ""), roles)

"""The images that may run on this node: the mesh's list and the owner's rules. Both outlive the daemon.

images/list/SIGNER       that signer's last list, as signed, with their certificates
      /personal          this node's own list, while it has only images of its user; those of others are heard again
      /own.json          the owner's rules
A list that was received is never forgotten: a mesh with a list stays one when its signers are away or lose the right to sign.
Their entries then no longer count, and only the owner's rules allow images.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from membership.durable import write_durably
from membership.envelope import EnvelopeError, open_envelope, seal
from membership.identity import Identity, NodeId, short_id
from membership.malformed import MALFORMED
from membership.records import Record
from membership.trust import Credentials, TrustError, TrustStore
from mesh.images.allowlist import Image, ListError, SignedList, amended, decode_list, encode_list, merged, user_of
from mesh.images.rules import OwnRules, Rules, check_own
from mesh.util.errors import MeshError

KIND = "images"  # envelope kind of a signed list
SECTION = "images"  # a signer publishes their list here; others publish it below while the signer is away
MAX_SIGNERS = 64  # in a mesh (own choice)
MAX_PERSONAL_LISTS = 1024  # of nodes of users; beyond that, a new one is not heard (own choice)
MINE = "mine"  # among the users whose images run here: this node's own

log = logging.getLogger(__name__)


class Shown(msgspec.Struct, frozen=True):
    """A sealed list with its signer's certificates, for nodes that do not know the signer."""

    sealed: bytes
    chain: bytes


_shown_decoder = msgspec.msgpack.Decoder(Shown)


class Catalogue:
    """The known lists and the owner's rules. `now_unix` returns Unix seconds; `users`: whose personal images run here.

    `unwritten`: lists of other nodes that count, and are not on disk yet, by their files.
    """

    def __init__(
        self,
        root: Path,
        identity: Identity,
        trust: TrustStore,
        now_unix: Callable[[], float],
        users: Sequence[str] = (MINE,),
    ) -> None:
        self._lists, self._personal, self._own_path = root / "list", root / "personal", root / "own.json"
        self._users = frozenset(users)
        self._identity, self._trust, self._now_unix = identity, trust, now_unix
        self._heard: dict[NodeId, tuple[SignedList, Shown]] = {}
        self.unwritten: dict[Path, bytes] = {}
        self._of_mesh: set[NodeId] = set()  # signers who have said something for the mesh
        self._begun = False
        self._own = OwnRules()
        self._rules: tuple[object, Rules] | None = None

    def load(self) -> None:
        """Read the files of an earlier run. MeshError if the owner's rules are damaged: they must not be ignored."""
        self._lists.mkdir(parents=True, exist_ok=True, mode=0o700)
        lists = sorted(self._lists.iterdir())
        self._begun = bool(lists)  # even if they are unreadable
        for path in (*lists, *([self._personal] if self._personal.exists() else ())):
            try:
                self._take(path.read_bytes(), keep=False)
            except (ListError, OSError) as error:
                log.warning("%s: %s; it is heard again from other nodes", path, error)
        if self._own_path.exists():
            try:
                self._own = check_own(msgspec.json.decode(self._own_path.read_bytes(), type=OwnRules))
            except (ListError, *MALFORMED) as error:
                raise MeshError(
                    f"{self._own_path}: not valid rules about images ({error}): correct it, or remove it to have none"
                ) from error

    # --- what holds

    @property
    def rules(self) -> Rules:
        """Return the current rules; entries of signers who may no longer sign do not count."""
        now = self._now_unix()
        known = [(self._trust.credentials(signer, now), signed) for signer, (signed, _) in self._heard.items()]
        lists = [(credentials, signed) for credentials, signed in known if credentials is not None]
        me = self._trust.credentials(self._identity.node_id, now)
        mine = "" if me is None else me.user
        numbers = tuple((one.node_id, one.user, one.can_admit, signed.number) for one, signed in lists)
        key = (numbers, mine, self._begun, self._own)
        if self._rules is None or self._rules[0] != key:
            of_mesh = merged({one.node_id: _of_user(signed, None) for one, signed in lists if one.can_admit})
            personal = merged({one.node_id: _of_user(signed, one.user) for one, signed in lists})
            run_here = None if "*" in self._users else frozenset(mine if user == MINE else user for user in self._users)
            self._rules = (key, Rules(of_mesh if self._begun else None, self._own, personal, run_here))
        return self._rules[1]

    @property
    def own(self) -> OwnRules:
        return self._own

    @own.setter
    def own(self, rules: OwnRules) -> None:
        write_durably(self._own_path, msgspec.json.format(msgspec.json.encode(rules), indent=1))
        self._own = rules

    def may_sign(self, alias: str = "") -> bool:
        """Tell whether this node may sign an entry: of the mesh, or of its own user's images."""
        me = self._trust.credentials(self._identity.node_id, self._now_unix())
        return me is not None and (me.user == user_of(alias) if user_of(alias) is not None else me.can_admit)

    def signers(self) -> list[Credentials]:
        """Return the known members who may sign."""
        return [credentials for credentials in self._trust.seen().values() if self._may_sign(credentials.node_id)]

    # --- what is said

    def say(self, alias: str, image: Image | None, allowed: bool, chain: bytes) -> bytes:
        """Sign a new entry; return the body of the section to publish. ListError on failure."""
        me = self._identity.node_id
        lists = {
            signer: signed
            for signer, (signed, _) in self._heard.items()
            if signer == me or self._fits(signed, self._trust.credentials(signer, self._now_unix()))
        }
        signed = amended(me, lists, alias, image, allowed, int(self._now_unix() * 1000))
        sealed = seal(self._identity, self._trust.mesh_id, KIND, encode_list(signed))
        body = msgspec.msgpack.encode(Shown(sealed, chain))
        self._take(body, keep=True)
        return body

    def shown(self, chain: bytes) -> bytes | None:
        """Return the body of this node's section; None if it has never signed an entry."""
        known = self._heard.get(self._identity.node_id)
        return None if known is None else msgspec.msgpack.encode(Shown(known[1].sealed, chain))

    @property
    def heard_of(self) -> list[NodeId]:
        """Return the signers of known lists who may still sign."""
        return [signer for signer in self._heard if self._may_sign(signer)]

    def orphans(self, showing: set[NodeId]) -> dict[NodeId, bytes]:
        """Return the lists of valid signers who do not publish them now: other nodes have to."""
        return {
            signer: msgspec.msgpack.encode(shown)
            for signer, (_, shown) in self._heard.items()
            if signer in set(self.heard_of) - showing
        }

    def hear(self, record: Record) -> bool:
        """Take a section; return whether it was new. An invalid one is ignored."""
        try:
            return self._take(record.body, keep=True)
        except ListError as error:
            log.info("node %s publishes an invalid list of images: %s", short_id(record.node), error)
        except OSError as error:  # this node's own list, which it has lost: it is heard again
            log.warning("this node's list of images cannot be written: %s", error)
        return False

    async def write(self) -> None:
        """Write the lists that were heard. On OSError they stay unwritten."""
        for path, body in [*self.unwritten.items()]:
            await asyncio.to_thread(write_durably, path, body)
            if self.unwritten.get(path) is body:
                del self.unwritten[path]

    def _take(self, body: bytes, keep: bool) -> bool:
        try:
            shown = _shown_decoder.decode(body)
            signer, payload = open_envelope(shown.sealed, self._trust.mesh_id, KIND)
        except (EnvelopeError, *MALFORMED) as error:
            raise ListError(f"not a signed list of images: {error}") from error
        signed = decode_list(payload)
        known = self._heard.get(signer)
        if known is not None and signed.number <= known[0].number:
            return False
        if not self._fits(signed, self._trust.credentials(signer, self._now_unix())):
            try:
                credentials = self._trust.admit_chain(shown.chain, self._now_unix())
            except TrustError as error:
                if keep:
                    raise ListError(f"its signer is not a member: {error}") from error
            else:
                if keep and (credentials.node_id != signer or not self._fits(signed, credentials)):
                    raise ListError(f"{credentials.nick} may not sign that list of images")
        personal = signed.personal and signer not in self._of_mesh
        if known is None or (signer not in self._of_mesh and not personal):
            others = len(self._heard) - len(self._of_mesh) if personal else len(self._of_mesh)
            if others >= (MAX_PERSONAL_LISTS if personal else MAX_SIGNERS):
                raise ListError("too many signers of image lists")
        if keep and signer == self._identity.node_id:
            write_durably(self._personal if personal else self._lists / signer.hex(), body)
        elif keep and not personal:
            self.unwritten[self._lists / signer.hex()] = body
        self._heard[signer] = (signed, shown)
        if not personal:
            self._of_mesh.add(signer)
            self._begun = True
        return True

    def _may_sign(self, node: NodeId) -> bool:
        credentials = self._trust.credentials(node, self._now_unix())
        return credentials is not None and credentials.can_admit

    @staticmethod
    def _fits(signed: SignedList, credentials: Credentials | None) -> bool:
        """Tell whether a member may say all that is on a list."""
        if credentials is None:
            return False
        users = {user_of(entry.alias) for entry in signed.entries}
        return users <= {credentials.user, None} and (signed.personal or credentials.can_admit)


def _of_user(signed: SignedList, user: str | None) -> SignedList:
    """Return what a list says of the images of a user, or (None) of the mesh."""
    entries = tuple(entry for entry in signed.entries if user_of(entry.alias) == user)
    return SignedList(signed.number, entries)

"""Which images may be run, as this node knows it: the mesh's list, and its owner's own rules. Both outlive the daemon.

images/list/SIGNER   what that signer said last, as he signed it, with his certificates
      /own.json      the owner's rules
A list that has been heard is never forgotten: a mesh with a list does not become one without by signers' being away, or no
signers any more. Then what they said counts for nothing, and nothing but the owner's own rules lets an image run.
"""

import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

from membership.durable import write_durably
from membership.envelope import EnvelopeError, open_envelope, seal
from membership.identity import Identity, NodeId, short_id
from membership.records import Record
from membership.trust import Standing, TrustError, TrustStore
from mesh.api.errors import MeshError
from mesh.images.allowlist import Image, ListError, SignedList, amended, decode_list, encode_list, merged
from mesh.images.rules import OwnRules, Rules, check_own

KIND = "images"  # what a signed list is sealed as
SECTION = "images"  # in which a signer shows his list; others show one below it, while he cannot
MAX_SIGNERS = 64  # of a mesh; ours

log = logging.getLogger(__name__)


class Shown(msgspec.Struct, frozen=True):
    """A sealed list, and the certificates of who signed it, for those who have never met him."""

    sealed: bytes
    chain: bytes


_shown_decoder = msgspec.msgpack.Decoder(Shown)


class Catalogue:
    """`now_unix` gives the wall clock's seconds."""

    def __init__(self, root: Path, identity: Identity, trust: TrustStore, now_unix: Callable[[], float]) -> None:
        self._lists, self._own_path = root / "list", root / "own.json"
        self._identity, self._trust, self._now_unix = identity, trust, now_unix
        self._heard: dict[NodeId, tuple[SignedList, Shown]] = {}
        self._begun = False
        self._own = OwnRules()
        self._rules: tuple[object, Rules] | None = None

    def load(self) -> None:
        """What an earlier run has kept; MeshError if the owner's rules are damaged, for they must not be forgotten."""
        self._lists.mkdir(parents=True, exist_ok=True, mode=0o700)
        for path in sorted(self._lists.iterdir()):
            self._begun = True  # even if it cannot be read any more
            try:
                self._take(path.read_bytes(), keep=False)
            except (ListError, OSError) as error:
                log.warning("%s: %s; it is heard again from other nodes", path, error)
        if self._own_path.exists():
            try:
                self._own = check_own(msgspec.json.decode(self._own_path.read_bytes(), type=OwnRules))
            except (msgspec.MsgspecError, ListError, UnicodeDecodeError) as error:
                raise MeshError(
                    f"{self._own_path}: not an owner's rules about images ({error}): mend it, or move it away to have none"
                ) from error

    # --- what holds

    @property
    def rules(self) -> Rules:
        """As they are now: whoever may not sign any more says nothing."""
        lists = {signer: signed for signer, (signed, _) in self._heard.items() if self._may_sign(signer)}
        key = (tuple((signer, signed.number) for signer, signed in lists.items()), self._begun, self._own)
        if self._rules is None or self._rules[0] != key:
            self._rules = (key, Rules(merged(lists) if self._begun else None, self._own))
        return self._rules[1]

    @property
    def own(self) -> OwnRules:
        return self._own

    @own.setter
    def own(self, rules: OwnRules) -> None:
        write_durably(self._own_path, msgspec.json.format(msgspec.json.encode(rules), indent=1))
        self._own = rules

    def may_sign(self) -> bool:
        return self._may_sign(self._identity.node_id)

    def signers(self) -> list[Standing]:
        """Who may, as far as this node has met them."""
        return [standing for standing in self._trust.seen().values() if self._may_sign(standing.node_id)]

    # --- what is said

    def say(self, alias: str, image: Image | None, allowed: bool, chain: bytes) -> bytes:
        """Sign a new word, to be shown to everybody: the body of the section. ListError if it cannot be said."""
        me = self._identity.node_id
        lists = {
            signer: signed for signer, (signed, _) in self._heard.items() if self._may_sign(signer) or signer == me
        }
        signed = amended(me, lists, alias, image, allowed, int(self._now_unix() * 1000))
        sealed = seal(self._identity, self._trust.mesh_id, KIND, encode_list(signed))
        body = msgspec.msgpack.encode(Shown(sealed, chain))
        self._take(body, keep=True)
        return body

    def shown(self, chain: bytes) -> bytes | None:
        """The body of this node's own section, if it has ever said anything."""
        known = self._heard.get(self._identity.node_id)
        return None if known is None else msgspec.msgpack.encode(Shown(known[1].sealed, chain))

    @property
    def heard_of(self) -> list[NodeId]:
        """Whoever has signed anything, and still may."""
        return [signer for signer in self._heard if self._may_sign(signer)]

    def orphans(self, showing: set[NodeId]) -> dict[NodeId, bytes]:
        """The lists of those who do not show them any more, and may still sign: others have to."""
        return {
            signer: msgspec.msgpack.encode(shown)
            for signer, (_, shown) in self._heard.items()
            if signer in set(self.heard_of) - showing
        }

    def hear(self, record: Record) -> bool:
        """What a section says; whether it was news. One that says nothing possible is passed over."""
        try:
            return self._take(record.body, keep=True)
        except ListError as error:
            log.info("node %s shows a list of images that is none: %s", short_id(record.node), error)
            return False

    def _take(self, body: bytes, keep: bool) -> bool:
        try:
            shown = _shown_decoder.decode(body)
            signer, payload = open_envelope(shown.sealed, self._trust.mesh_id, KIND)
        except (EnvelopeError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ListError(f"not a signed list of images: {error}") from error
        signed = decode_list(payload)
        known = self._heard.get(signer)
        if known is not None and signed.number <= known[0].number:
            return False
        if not self._may_sign(signer):
            try:
                standing = self._trust.admit_chain(shown.chain, self._now_unix())
            except TrustError as error:
                if keep:
                    raise ListError(f"its signer is no member: {error}") from error
            else:
                if keep and (standing.node_id != signer or not self._may_sign(signer)):
                    raise ListError(f"{standing.nick} may not sign the mesh's list of images")
        if known is None and len(self._heard) >= MAX_SIGNERS:
            raise ListError("too many have signed lists of images")
        if keep:
            write_durably(self._lists / signer.hex(), body)
        self._heard[signer] = (signed, shown)
        self._begun = True
        return True

    def _may_sign(self, node: NodeId) -> bool:
        standing = self._trust.standing(node, self._now_unix())
        return standing is not None and standing.speaks_for_mesh

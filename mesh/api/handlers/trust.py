"""Membership of the mesh: invites, join requests, certificates and revocations."""

import time

from membership.addresses import address_text
from membership.identity import Identity, format_id, short_id
from membership.node import MembershipNode
from membership.trust import (
    NameTaken,
    TrustError,
    TrustStore,
    WrongTerms,
    make_invite,
    make_promotion,
    make_revocation,
)
from mesh.api import schemas
from mesh.api.handlers.lookup import find_node
from mesh.api.requests import ApproveOrder, InviteOrder
from mesh.util.errors import ExitCode, MeshError
from mesh.util.structs import copy_as


class TrustHandlers:
    def __init__(self, identity: Identity, trust: TrustStore, membership: MembershipNode) -> None:
        self._identity, self._trust, self._membership = identity, trust, membership

    def invite(self, order: InviteOrder) -> str:
        if not 60 <= order.ttl_s <= 365 * 86_400:
            raise MeshError("an invite may live from a minute to a year", ExitCode.USAGE)
        if order.user and order.mine:
            raise MeshError("an invite is for a new user or for a machine of yours, not both", ExitCode.USAGE)
        if order.mine and order.uses != 1:
            raise MeshError("--uses needs a NAME: each machine of yours gets its own invite", ExitCode.USAGE)
        me = self._membership
        # This node decides on its invites, so the newcomer asks it first.
        others = [
            address_text(m.host, m.port)
            for m in me.members()
            if m.state == "alive" and m.node_id != self._identity.node_id
        ]
        roles = tuple[str, ...](order.roles) or me.credentials.roles
        from membership.ssh_keys import SshError, fingerprint, read_public_key  # with OpenSSL, which few orders need

        try:
            ssh_key = fingerprint(read_public_key(order.ssh_key)) if order.ssh_key else b""
            return make_invite(
                self._identity,
                self._trust,
                me.credentials,
                (address_text(*me.address), *others[:2]),
                order.ttl_s,
                time.time(),
                user=order.user,
                mine=order.mine,
                roles=roles,
                uses=order.uses,
                ssh_key=ssh_key,
            )
        except SshError as error:
            raise MeshError(str(error), ExitCode.USAGE) from error
        except NameTaken as error:
            raise MeshError(
                f"{error}: for another machine of {order.user}, run `mesh member invite --mine` on a machine of theirs; "
                "for another person, choose another name",
                ExitCode.REFUSED,
            ) from error
        except WrongTerms as error:
            raise MeshError(str(error), ExitCode.USAGE) from error
        except TrustError as error:
            raise MeshError(str(error), ExitCode.REFUSED) from error

    def pending(self) -> list[schemas.trust.Waiting]:
        """Return the open join requests of the whole mesh."""
        waiting = sorted(self._membership.pending_joins().values(), key=lambda entry: entry.since_unix)
        return [copy_as(schemas.trust.Waiting, entry, node=format_id(entry.node)) for entry in waiting]

    def approve(self, order: ApproveOrder) -> schemas.trust.Approved:
        waiting = {node: (entry.nick, entry.user) for node, entry in self._membership.pending_joins().items()}
        # Those who were members can be admitted again, as when a node that they came in through was revoked.
        for node, one in self._trust.seen().items():
            if node not in self._trust.revoked and self._trust.credentials(node, time.time()) is None:
                waiting.setdefault(node, (one.nick, one.user))
        text = order.node.lower()
        fits = [
            node
            for node, (nick, _) in waiting.items()
            if nick == order.node or (text and format_id(node).startswith(text))
        ]
        if len(fits) != 1:
            known = ", ".join(f"{nick} {format_id(node)[:7]}" for node, (nick, _) in waiting.items()) or "none"
            raise MeshError(
                f"{len(fits) or 'no'} pending join requests match {order.node!r} (pending: {known})", ExitCode.NOT_FOUND
            )
        (node,) = fits
        nick, user = order.nick or waiting[node][0], order.user or waiting[node][1]
        try:
            self._membership.approve(node, nick, user, tuple(order.roles), order.admit, order.existing)
            if order.admit and self._trust.genesis.quorum > 1:
                self._membership.publish_statement(make_promotion(self._identity, self._trust, node, time.time()))
        except NameTaken as error:
            raise MeshError(
                f"{error}: add --existing to make this a machine of theirs, or --user NAME for another name",
                ExitCode.REFUSED,
            ) from error
        except TrustError as error:
            raise MeshError(str(error), ExitCode.REFUSED) from error
        return schemas.trust.Approved(node=format_id(node), nick=nick, user=user)

    def trusted(self) -> list[schemas.trust.Member]:
        """Return every member whose certificate this node has seen, and every revoked key."""
        trust, now = self._trust, time.time()
        seen = trust.seen()
        rows: list[schemas.trust.Member] = []
        for node in {*seen, *trust.revoked}:
            credentials = seen.get(node)
            revocation = trust.revocations[node] if node in trust.revoked else None
            rows.append(
                schemas.trust.Member(
                    node=format_id(node),
                    nick=credentials.nick if credentials is not None else short_id(node),
                    user=credentials.user if credentials is not None else "",
                    founder=node in trust.genesis.roots,
                    can_admit=credentials is not None and credentials.can_admit,
                    roles=list(credentials.roles) if credentials is not None else [],
                    ends_unix=credentials.not_after if credentials is not None else None,
                    ended=credentials is not None and now > credentials.not_after,
                    revoked_unix=revocation.revoked_unix if revocation is not None else None,
                    reason=revocation.reason if revocation is not None else "",
                    problem=trust.refusal(credentials, now) if credentials is not None else "",
                    through=[format_id(key) for key in credentials.through] if credentials is not None else [],
                )
            )
        return sorted(rows, key=lambda row: (row.nick, row.node))

    def revoke(self, text: str, reason: str) -> schemas.trust.Revoked:
        node = find_node(self._membership, text, whole=True)  # it cannot be taken back
        trust, now = self._trust, time.time()
        already = node.node_id in trust.revoked
        lost = [
            schemas.trust.CameThrough(
                node=format_id(one.node_id), nick=one.nick, user=one.user, existing=one.user_key != one.node_id
            )
            for one in trust.seen().values()
            if node.node_id in one.through and one.node_id not in trust.revoked and now <= one.not_after
        ]
        try:
            sealed = make_revocation(self._identity, trust, node.node_id, reason, now)
            if not already:
                self._membership.publish_statement(sealed)
        except TrustError as error:
            raise MeshError(str(error), ExitCode.REFUSED) from error
        return schemas.trust.Revoked(
            node=format_id(node.node_id),
            nick=node.nick,
            already=already,
            founders=trust.votes("revocation", node.node_id),
            quorum=trust.genesis.quorum,
            lost=sorted(lost, key=lambda one: (one.user, one.existing, one.nick)),
        )

    def promote(self, text: str) -> schemas.trust.Promoted:
        """Sign that a node may admit others. It takes effect when enough founders have signed."""
        node = find_node(self._membership, text, whole=True)
        try:
            self._membership.publish_statement(make_promotion(self._identity, self._trust, node.node_id, time.time()))
        except TrustError as error:
            raise MeshError(str(error), ExitCode.REFUSED) from error
        return schemas.trust.Promoted(
            node=format_id(node.node_id),
            nick=node.nick,
            founders=self._trust.votes("promotion", node.node_id),
            quorum=self._trust.genesis.quorum,
        )

"""What a person at this node can ask and order, in terms of the daemon's parts."""

import os
import time
from collections import Counter
from typing import TYPE_CHECKING

from membership.events import MemberView
from membership.identity import format_id, short_id
from membership.trust import ROLES, TrustError, make_invite, make_revocation
from mesh import __version__
from mesh.api.errors import ExitCode, MeshError
from mesh.api.gpudesk import device, room
from mesh.api.lending import lend_state
from mesh.api.naming import node_meant
from mesh.api.orders import ApproveOrder, InviteOrder
from mesh.api.peer import decode_facts
from mesh.jobs.spec import format_job
from mesh.versions import WIRE
from placement.zones import zone_of

if TYPE_CHECKING:
    from mesh.api import answers
    from mesh.daemon import Daemon


class Desk:
    def __init__(self, daemon: "Daemon") -> None:
        self._daemon = daemon

    def describe(self) -> "answers.mesh.Status":
        """`mesh status`."""
        members = self._daemon.membership.members()
        return {
            "version": __version__,
            "wire": WIRE,
            "versions": self._versions(),
            "pid": os.getpid(),
            "node": format_id(self._daemon.me),
            "nick": self._daemon.membership.standing.nick,
            "user": self._daemon.membership.standing.user,
            "mesh": self._daemon.trust.genesis.name,
            "mesh_id": self._daemon.trust.mesh_id.hex(),
            "roles": list(self._daemon.membership.standing.roles),
            "may_admit": self._daemon.membership.standing.can_admit,
            "open": self._daemon.settings.open,
            "address": f"{self._daemon.membership.host}:{self._daemon.membership.port}",
            "api_port": self._daemon.api_port,
            "lending": self._daemon.inventory.lending.lending,
            "paused": self._daemon.inventory.lending.paused,
            "lend": lend_state(self._daemon),
            "leaving": self._daemon.leaving,
            "alive": sum(member.state == "alive" for member in members),
            "edge": self._daemon.edge.standing(),
            "engines": dict(self._daemon.engine_states),
            "guests": [format_job(job) for job in self._daemon.jobs.participant.hosted],
            "certificate_ends_unix": self._daemon.membership.standing.not_after,
            "clock_offset_s": self._daemon.membership.clock_offset_s,
            "waiting": len(self._daemon.membership.waiting()),
            "problem": self._daemon.membership.problem,
            "problems": self._daemon.membership.problems,
            "reached_by": self._reached_by(),
            "counters": dict(sorted(self.counters().items())),
        }

    def _versions(self) -> dict[str, str]:
        """What each node that is there runs, by its nick, as it says."""
        facts = {record.node: decode_facts(record.body) for record in self._daemon.membership.records("facts")}
        there = [member for member in self._daemon.membership.members() if member.present]
        told = {member.nick: facts.get(member.node_id) for member in there}
        return {nick: one.version[:40] for nick, one in sorted(told.items()) if one is not None}

    def counters(self) -> Counter[str]:
        """What membership, the API for peers and the job cores have counted; the names are words of the code."""
        counters = self._daemon.membership.counters + self._daemon.peer_api.counters
        counters["refused_job_messages"] += self._daemon.jobs.participant.refused
        return counters

    def _reached_by(self) -> "list[answers.mesh.Reach]":
        """What other nodes said of reaching this one at its address."""
        nicks = {member.node_id: member.nick for member in self._daemon.membership.members()}
        return [
            {
                "node": format_id(node),
                "nick": nicks.get(node, short_id(node)),
                "udp": answer.udp,
                "tcp": answer.tcp,
                "seen_host": answer.seen_host,
            }
            for node, answer in self._daemon.membership.reached.items()
        ]

    def nodes(self) -> "list[answers.mesh.Node]":
        adverts = {advert.node: advert for advert in self._daemon.jobs.outlook.adverts()}
        running: dict[bytes, int] = {}
        for status in self._daemon.jobs.board.all().values():
            if status.runner is not None and status.outcome is None:
                running[status.runner] = running.get(status.runner, 0) + 1
        rows: list[answers.mesh.Node] = []
        for member in self._daemon.membership.members():
            advert = adverts.get(member.node_id)
            rows.append(
                {
                    "node": format_id(member.node_id),
                    "nick": member.nick,
                    "user": member.user,
                    "state": "draining" if member.draining and member.state == "alive" else member.state,
                    "address": f"{member.host}:{member.port}",
                    "me": member.node_id == self._daemon.me,
                    "since_unix": round(member.since_unix, 3),
                    "zone": advert.zone if advert else "",
                    "lending": bool(advert and advert.lending and not advert.paused),
                    "paused": bool(advert and advert.lending and advert.paused),
                    "held_by": advert.held_by if advert else "",
                    "back_unix": advert.back_unix if advert else 0,
                    "gpus": [device(gpu) for gpu in advert.gpus] if advert else [],
                    "gpus_free": advert.whole_gpus_free if advert else 0,
                    "gpu_room": [room(left) for left in advert.room] if advert else [],
                    "gpu_pauses": bool(advert and advert.gpu_pauses),
                    "gpu_shares": bool(advert and advert.guards and advert.gpu_sharing),
                    "slots": advert.slots if advert else 0,
                    "slots_free": advert.slots_free if advert else 0,
                    "engines": list(advert.engines) if advert else [],
                    "interactive": advert.interactive if advert else True,
                    "weight": advert.weight if advert else 0,
                    "jobs": running.get(member.node_id, 0),
                    "path": self._path(member.node_id),
                }
            )
        return rows

    def _path(self, node: bytes) -> "answers.mesh.Path | None":
        """How fast that node takes what this one sends, as far as is known."""
        if node == self._daemon.me:
            return None
        zone = zone_of(node, self._daemon.jobs.outlook.last.hierarchy.zones)
        path = self._daemon.jobs.leaving.path(node, zone.nodes if zone is not None else ())
        return {
            "bps": round(path.bps),
            "spread": round(path.spread, 3),
            "source": path.source,
            "transfers": path.transfers,
            "age_s": path.age_s,
        }

    def invite(self, order: InviteOrder) -> str:
        if not 60 <= order.ttl_s <= 365 * 86_400:
            raise MeshError("an invite may live from a minute to a year", ExitCode.USAGE)
        if len(order.user) > 64:
            raise MeshError("a user's name has at most 64 characters", ExitCode.USAGE)
        seeds = tuple(f"{m.host}:{m.port}" for m in self._daemon.membership.members() if m.state == "alive")[:3]
        try:
            return make_invite(
                self._daemon.identity,
                self._daemon.membership.chain,
                self._daemon.trust.genesis_bytes,
                seeds,
                order.ttl_s,
                time.time(),
                tuple(order.roles) or ROLES,
                order.user,
            )
        except TrustError as error:
            raise MeshError(str(error), ExitCode.REFUSED) from error

    async def network(self) -> "answers.mesh.Network":
        """How this node stands in the network, as it and others see it now; for `mesh doctor`."""
        seen = await self._daemon.membership.examine()
        return {
            "others": seen.others,
            "asked": seen.asked,
            "mdns_problem": seen.mdns_problem,
            "neighbours": seen.neighbours,
            "neighbours_by_mdns": seen.neighbours_by_mdns,
            "clock_offset_s": seen.clock_offset_s,
            "clock_peers": seen.clock_peers,
        }

    def pending(self) -> "list[answers.trust.Waiting]":
        """Who has knocked, anywhere in the mesh, and waits to be let in."""
        waiting = sorted(self._daemon.membership.waiting().values(), key=lambda entry: entry.since_unix)
        return [
            {
                "node": format_id(entry.node),
                "nick": entry.nick,
                "user": entry.user,
                "host": entry.host,
                "since_unix": entry.since_unix,
            }
            for entry in waiting
        ]

    def approve(self, order: ApproveOrder) -> "answers.trust.Approved":
        waiting = self._daemon.membership.waiting()
        text = order.node.lower()
        fits = [
            entry
            for entry in waiting.values()
            if entry.nick == order.node or (text and format_id(entry.node).startswith(text))
        ]
        if len(fits) != 1:
            known = ", ".join(f"{entry.nick} {format_id(entry.node)[:7]}" for entry in waiting.values()) or "nobody"
            word = "nobody" if not fits else f"{len(fits)} nodes"
            raise MeshError(f"{word} that waits fits {order.node!r} (waiting: {known})", ExitCode.NOT_FOUND)
        (entry,) = fits
        nick, user = order.nick or entry.nick, order.user or entry.user
        try:
            self._daemon.membership.approve(entry.node, nick, user, tuple(order.roles) or ROLES, order.admit)
        except TrustError as error:
            raise MeshError(str(error), ExitCode.REFUSED) from error
        return {"node": format_id(entry.node), "nick": nick, "user": user}

    def trusted(self) -> "list[answers.trust.Member]":
        """Everybody with a certificate that this node has seen, and every key that was shut out."""
        trust, now = self._daemon.trust, time.time()
        seen = trust.seen()
        rows: list[answers.trust.Member] = []
        for node in {*seen, *trust.revocations}:
            standing, (revocation, _) = seen.get(node), trust.revocations.get(node, (None, b""))
            rows.append(
                {
                    "node": format_id(node),
                    "nick": standing.nick if standing is not None else short_id(node),
                    "user": standing.user if standing is not None else "",
                    "founder": node in trust.genesis.roots,
                    "can_admit": standing is not None and standing.can_admit,
                    "roles": list(standing.roles) if standing is not None else [],
                    "ends_unix": standing.not_after if standing is not None else None,
                    "ended": standing is not None and now > standing.not_after,
                    "revoked_unix": revocation.revoked_unix if revocation is not None else None,
                    "reason": revocation.reason if revocation is not None else "",
                }
            )
        return sorted(rows, key=lambda row: (row["nick"], row["node"]))

    def revoke(self, text: str, reason: str) -> "answers.trust.Revoked":
        node = self.find_node(text, whole=True)  # it cannot be taken back
        if node.node_id in self._daemon.trust.revoked:
            return {"node": format_id(node.node_id), "nick": node.nick, "already": True}
        try:
            sealed = make_revocation(self._daemon.identity, self._daemon.trust, node.node_id, reason, time.time())
        except TrustError as error:
            raise MeshError(str(error), ExitCode.REFUSED) from error
        self._daemon.membership.revoke(sealed)
        return {"node": format_id(node.node_id), "nick": node.nick, "already": False}

    def find_node(self, text: str, *, whole: bool = False) -> MemberView:
        """By nick, id, or the beginning of one; with `whole` not by that of a nick."""
        members = {format_id(member.node_id): member for member in self._daemon.membership.members()}
        return members[node_meant(text, {node: member.nick for node, member in members.items()}, whole=whole)]

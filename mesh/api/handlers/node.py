"""This node and the others: status, adverts, transfers, network report, shutdown."""

import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping

from membership.addresses import address_text
from membership.identity import NodeId, format_id, short_id
from membership.node import MembershipNode
from membership.reachability import NetworkReport
from membership.trust import TrustStore
from mesh.api import schemas
from mesh.api.handlers.gpus import device, room
from mesh.api.handlers.lending import LendingHandlers
from mesh.api.handlers.lookup import nick_in, nicks_of
from mesh.api.requests import DownOrder
from mesh.execution.engine import Availability
from mesh.gpus.inventory import Inventory
from mesh.jobs.service import JobService
from mesh.model.spec import format_job
from mesh.network.edge import Edge
from mesh.rpc.client import decode_facts
from mesh.rpc.pacing import Wire
from mesh.util.structs import copy_as
from mesh.util.text import plural
from mesh.util.version import VERSION
from mesh.util.versions import WIRE
from placement.zones import zone_of


class NodeHandlers:
    """`open_mesh`: this node admits everybody. `open_page`: serves the web page and
    returns an address for one visit. `leave`: asks the daemon to end; `leaving`: whether it does."""

    def __init__(
        self,
        me: NodeId,
        trust: TrustStore,
        membership: MembershipNode,
        inventory: Inventory,
        engines: Mapping[str, Availability],
        jobs: JobService,
        wire: Wire,
        edge: Edge,
        lending: LendingHandlers,
        *,
        open_mesh: bool,
        api_port: int,
        open_page: Callable[[], Awaitable[schemas.owner.Page]],
        leave: Callable[[float, bool], None],
        leaving: Callable[[], bool],
    ) -> None:
        self._me, self._trust, self._membership = me, trust, membership
        self._inventory, self._engines, self._jobs = inventory, engines, jobs
        self._wire, self._edge, self._lending = wire, edge, lending
        self._open, self._api_port = open_mesh, api_port
        self.page, self._leave, self._leaving = open_page, leave, leaving
        self._refusals = jobs.replicator.refusals

    def status(self) -> schemas.mesh.Status:
        """Return the state of this node."""
        members = self._membership.members()
        return schemas.mesh.Status(
            version=VERSION,
            wire=WIRE,
            versions=self._versions(),
            pid=os.getpid(),
            node=format_id(self._me),
            nick=self._membership.credentials.nick,
            user=self._membership.credentials.user,
            mesh=self._trust.genesis.name,
            mesh_id=self._trust.mesh_id.hex(),
            roles=list(self._membership.credentials.roles),
            may_admit=self._membership.credentials.can_admit,
            open=self._open,
            address=address_text(*self._membership.address),
            api_port=self._api_port,
            lending=self._inventory.lending.lending and not self._lending.barred,
            paused=self._inventory.lending.paused,
            lend=self._lending.lend_state(),
            leaving=self._leaving(),
            alive=sum(member.state == "alive" for member in members),
            edge=self._edge.state(),
            engines=dict(self._engines),
            guests=[format_job(job) for job in self._jobs.participant.hosted],
            certificate_ends_unix=self._membership.credentials.not_after,
            clock_offset_s=self._membership.clock_offset_s,
            waiting=len(self._membership.pending_joins()),
            problem=self._membership.problem,
            problems=self._membership.problems | self._namesakes(),
            reached_by=self._reached_by(),
            counters=dict(sorted(self.counters().items())),
        )

    def _namesakes(self) -> dict[str, str]:
        """Return a warning if other nodes have this one's nick."""
        nick = self._membership.credentials.nick
        others = [
            short_id(one.node_id) for one in self._membership.members() if one.nick == nick and one.node_id != self._me
        ]
        if not others:
            return {}
        words = (
            f"{plural(len(others), 'other node')} called {nick} ({', '.join(others)}): commands need the id of each. "
        )
        return {"namesake": words + "`mesh join INVITE --nick NAME` with a new --state gives this machine another name"}

    def _versions(self) -> dict[str, str]:
        """Return the software version of each present node, by nick."""
        facts = {record.node: decode_facts(record.body) for record in self._membership.records("facts")}
        there = [member for member in self._membership.members() if member.present]
        known = {member.nick: facts.get(member.node_id) for member in there}
        return {nick: one.version[:40] for nick, one in sorted(known.items()) if one is not None}

    def counters(self) -> Counter[str]:
        """Return the counters of membership, the API for peers and the job cores."""
        counters = self._membership.counters + self._refusals.counters
        counters["refused_job_messages"] += self._jobs.participant.refused
        return counters

    def _reached_by(self) -> list[schemas.mesh.Reach]:
        """Return other nodes' reports of reaching this one at its address."""
        nicks = nicks_of(self._membership)
        return [
            copy_as(schemas.mesh.Reach, answer, node=format_id(node), nick=nick_in(nicks, node))
            for node, answer in self._membership.reached.items()
        ]

    def nodes(self) -> list[schemas.mesh.Node]:
        adverts = {advert.node: advert for advert in self._jobs.mesh_view.adverts()}
        running: dict[bytes, int] = {}
        for status in self._jobs.job_table.all().values():
            if status.runner is not None and status.outcome is None:
                running[status.runner] = running.get(status.runner, 0) + 1
        rows: list[schemas.mesh.Node] = []
        for member in self._membership.members():
            advert = adverts.get(member.node_id)
            rows.append(
                schemas.mesh.Node(
                    node=format_id(member.node_id),
                    nick=member.nick,
                    user=member.user,
                    state="draining" if member.draining and member.state == "alive" else member.state,
                    address=address_text(member.host, member.port) if member.port else "",
                    me=member.node_id == self._me,
                    since_unix=round(member.since_unix, 3),
                    zone=advert.zone if advert else "",
                    lending=bool(advert and advert.lending and not advert.paused),
                    paused=bool(advert and advert.lending and advert.paused),
                    held_by=advert.held_by if advert else "",
                    back_unix=advert.back_unix if advert else 0,
                    gpus=[device(gpu) for gpu in advert.gpus] if advert else [],
                    gpus_free=advert.whole_gpus_free if advert else 0,
                    gpu_room=[room(left) for left in advert.free_portions] if advert else [],
                    gpu_pauses=bool(advert and advert.gpu_pauses),
                    gpu_shares=bool(advert and advert.guards and advert.gpu_sharing),
                    slots=advert.slots if advert else 0,
                    slots_free=advert.slots_free if advert else 0,
                    engines=list(advert.engines) if advert else [],
                    interactive=advert.interactive if advert else True,
                    network=list(advert.network) if advert else [],
                    weight=advert.weight if advert else 0,
                    jobs=running.get(member.node_id, 0),
                    path=self._path(member.node_id),
                )
            )
        return rows

    def _path(self, node: bytes) -> schemas.mesh.Path | None:
        """Return the estimated bandwidth to a node; None for this node itself."""
        if node == self._me:
            return None
        zone = zone_of(node, self._jobs.mesh_view.last.hierarchy.zones)
        path = self._jobs.departure_planner.path(node, zone.nodes if zone is not None else ())
        return copy_as(schemas.mesh.Path, path, bps=round(path.bps), spread=round(path.spread, 3))

    async def network(self) -> NetworkReport:
        """Return how this node stands in the network, as it and others see it now."""
        return await self._membership.network_report()

    def transfers(self) -> schemas.mesh.Transfers:
        """Return the open streams to other nodes, oldest first, with the bytes that they have acknowledged."""
        nicks = nicks_of(self._membership)
        names, now = {job: status.name for job, status in self._jobs.job_table.all().items()}, time.monotonic()
        rows: list[schemas.mesh.Transfer] = []
        for lane in self._wire.open:
            cargo = lane.cargo
            rows.append(
                schemas.mesh.Transfer(
                    id=id(lane),
                    kind=cargo.kind,
                    to="" if cargo.to is None else nicks.get(cargo.to, short_id(cargo.to)),
                    job=format_job(cargo.job) if any(cargo.job) else "",
                    name=names.get(cargo.job, ""),
                    sent=lane.sent,
                    bytes=cargo.size or None,
                    seconds=round(now - lane.began_s, 3),
                    urgent=lane.pace.urgent,
                )
            )
        return schemas.mesh.Transfers(transfers=rows, budget_bps=self._wire.budget_bps)

    def down(self, order: DownOrder) -> schemas.owner.Leaving:
        """Ask the daemon to end: guests save and move on first, unless it is to be at once."""
        self._leave(self._lending.notice_s(order.grace_s), order.now)
        return schemas.owner.Leaving(pid=os.getpid(), guests=len(self._jobs.participant.hosted))

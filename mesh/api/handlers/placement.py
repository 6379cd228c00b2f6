"""Placement: the reasons for a job's place, the zones of the campus, and the survival of nodes."""

import time
from collections.abc import Sequence

from membership.identity import NodeId, format_id
from membership.node import MembershipNode
from mesh.api import schemas
from mesh.api.handlers.images import ImageHandlers
from mesh.api.handlers.jobs import JobHandlers
from mesh.api.handlers.lookup import JobLookup, find_node, nick_in, nicks_of
from mesh.consensus.status import JobStatus
from mesh.jobs.service import JobService
from mesh.jobs.submission_retry import SubmissionRetry
from mesh.journal import OwnStay
from mesh.model.record import Attempt
from mesh.model.spec import attempt_request, format_job
from mesh.provider.attendance import Attendance, spans_of
from mesh.util.byte_text import amount
from mesh.util.errors import ExitCode, MeshError
from mesh.util.structs import copy_as
from mesh.util.text import plural
from placement.advert import Advert, horizon_of
from placement.availability import kaplan_meier
from placement.decision import explain
from placement.filters import FAILED_HERE, missing_mib, refusals
from placement.preemption import without_job
from placement.ranking import Ranking, fetch_s, with_data
from placement.request import Request
from placement.suggestions import NamedJob, suggest
from placement.summary import UNIT, UNSEEN
from placement.survival import Survival, weight
from placement.zones import Hierarchy, zone_of

HORIZONS_MIN = (15, 60, 240, 720, 1440)


class PlacementHandlers:
    def __init__(
        self,
        membership: MembershipNode,
        jobs: JobService,
        submissions: SubmissionRetry,
        attendance: Attendance,
        lookup: JobLookup,
        job_handlers: JobHandlers,
        images: ImageHandlers,
    ) -> None:
        self._membership, self._jobs, self._submissions = membership, jobs, submissions
        self._attendance, self._lookup = attendance, lookup
        self._job_handlers, self._images = job_handlers, images

    # --- one job

    async def why(self, text: str, would: bool = False) -> schemas.jobs.Why:
        """Rank the nodes for the job's next attempt, by this node's adverts; every node would rank alike.

        `would`: also find the nearest changes that would let it start.
        """
        found = self._lookup.find_jobs(text)
        waiting = [status for status in found if status.outcome is None and status.runner is None]
        status = waiting[0] if waiting else self._lookup.find_job(text)  # of an array, the first that waits
        spec = await self._lookup.spec_of(status)
        last = status.attempts[-1] if status.attempts else None
        attempt = 0 if last is None else last.number + bool(last.reason)
        now_ms = time.time_ns() // 1_000_000
        over = last is None or bool(last.reason)
        commit = status.commit if over else None
        request = attempt_request(status.job, spec, attempt, status.attempts, now_ms, commit=commit)
        hierarchy = self._jobs.mesh_view.hierarchy()
        own = next((job for job in self._jobs.job_table.running if job.job == status.job), None)
        # The place that the job holds does not count against its own node.
        adverts = [without_job(ad, own) if own is not None and ad.node == own.node else ad for ad in hierarchy.adverts]
        ranking = hierarchy.rank(request, adverts)
        return copy_as(
            schemas.jobs.Why,
            self._job_handlers.show(status),
            placement=self.placing(hierarchy, ranking),
            submitted_by=self._submissions.describe(status.job),
            explanation=[*self._images.objections(spec), *explain(request, ranking), *_data_lines(request, adverts)],
            candidates=[
                schemas.jobs.Candidate(
                    nick=c.nick, score=str(c.score), weight=c.weight, advert_version=c.advert_version
                )
                for c in ranking.candidates
            ],
            refused=[
                schemas.jobs.Refused(nick=r.nick, reasons=_with_end(r.reasons, status.attempts, r.node))
                for r in ranking.refused
            ],
            remaining_s=request.remaining_s,
            decision=await self._last_decision(status, hierarchy),
            would=self._changes(request, adverts) if would else None,
        )

    async def _last_decision(self, status: JobStatus, hierarchy: Hierarchy) -> schemas.jobs.Decision | None:
        """Return the last known decision of a leader, with the adverts that it used and their versions now."""
        events = await self._lookup.events_of(status)
        decided = [(actor, event) for actor, event, _ in events if event.decision is not None]
        if not decided:
            return None
        actor, event = decided[-1]
        decision = event.decision
        assert decision is not None
        nicks = nicks_of(self._membership)
        versions = {advert.node: advert.version for advert in hierarchy.adverts}
        return schemas.jobs.Decision(
            by=nick_in(nicks, actor),
            unix_ms=event.unix_ms,
            rule=decision.rule,
            attempt=decision.attempt,
            order=[
                schemas.jobs.InOrder(
                    nick=nick_in(nicks, node),
                    advert_version=version,
                    weight=weight,
                    advert_now=versions.get(node),
                )
                for node, version, weight in decision.order
            ],
            declined=[nick_in(nicks, node) for node in decision.declined],
            places_kept_for_others=[nick_in(nicks, node) for node in decision.kept],
        )

    def _changes(self, request: Request, adverts: list[Advert]) -> list[schemas.jobs.Change]:
        now, table = time.time(), self._jobs.job_table
        running = [
            NamedJob(job, f"job {format_job(job.job)[:8]}", _left_s(table.get(job.job), now)) for job in table.running
        ]
        changes = suggest(request, adverts, running, now)
        return [copy_as(schemas.jobs.Change, change) for change in changes]

    # --- zones

    def zones(self) -> schemas.mesh.Zones:
        """Return every zone with its nodes and coordinator, and the jobs that its nodes submit for others."""
        hierarchy, nicks, held = self._jobs.mesh_view.hierarchy(), self._all_nicks(), self._submissions.held_by_node()
        rows: list[schemas.mesh.Zone] = []
        for zone in hierarchy.zones:
            submits = {nicks[node]: held[node].count for node in zone.nodes if node in held}
            rows.append(
                schemas.mesh.Zone(
                    zone=zone.name,
                    nodes=sorted(nicks[node] for node in zone.nodes),
                    weight=zone.weight,
                    coordinator=nicks[zone.coordinator] if zone.coordinator is not None else None,
                    line=[nicks[node] for node in zone.line],
                    submits_for_others=submits,
                    doing="; ".join([_mode(hierarchy), *(_submits(nick, n) for nick, n in sorted(submits.items()))]),
                )
            )
        return schemas.mesh.Zones(placement=_mode(hierarchy), two_level_since=hierarchy.since, zones=rows)

    def placing(self, hierarchy: Hierarchy, ranking: Ranking) -> schemas.jobs.Placing:
        """Return how `ranking` was made: over all nodes, or by zone first, and then which zone and coordinator."""
        zone = zone_of(ranking.candidates[0].node, hierarchy.zones) if hierarchy.since and ranking.candidates else None
        coordinator = zone.coordinator if zone is not None else None
        return schemas.jobs.Placing(
            mode="two-level" if hierarchy.since else "flat",
            two_level_since=hierarchy.since,
            zone=zone.name if zone is not None else None,
            coordinator=nick_in(self._all_nicks(), coordinator) if coordinator is not None else None,
        )

    def _all_nicks(self) -> dict[NodeId, str]:
        """Return nicks by node, also of nodes that are known by their adverts only."""
        return {advert.node: advert.nick for advert in self._jobs.mesh_view.adverts()} | nicks_of(self._membership)

    # --- one node

    def survival(self, text: str) -> schemas.mesh.Survival:
        """Return how long a node is likely to stay: from this node's own record, or from the other node's summary."""
        member = find_node(self._membership, text)
        attendance, now = self._attendance, time.time()
        mine = member.node_id == self._lookup.me
        summary = attendance.summary(now) if mine else attendance.told_by(member.node_id)
        if summary is None:
            raise MeshError(
                f"{member.nick} has told nothing of its stays: it has only just come, or runs an older campus-mesh; "
                "`mesh nodes` shows since when it has been there",
                ExitCode.NOT_FOUND,
            )
        if not mine:
            attendance.meet(member.node_id, summary, now)
        known = attendance.estimator.nodes[member.node_id]
        until = summary.until_unix or None
        rows: list[schemas.mesh.Stays] = []
        for horizon in HORIZONS_MIN:
            stays = (
                attendance.estimator.survival(member.node_id, now, horizon * 60, until)
                if known.since is not None
                else Survival(0.0, 0.0, 0.0)
            )
            rows.append(
                schemas.mesh.Stays(
                    horizon_min=horizon,
                    probability=round(stays.probability, 4),
                    low=round(stays.low, 4),
                    high=round(stays.high, 4),
                )
            )
        hour = attendance.estimator.survival(member.node_id, now, 3600.0, until).probability
        return schemas.mesh.Survival(
            node=format_id(member.node_id),
            nick=member.nick,
            me=mine,
            lent=known.since is not None,
            lent_since_unix=None if known.since is None else round(known.since, 3),
            until_unix=summary.until_unix or None,
            told_unix=summary.as_of_unix,
            weight=weight(hour) if known.since is not None else 0,
            survival=rows,
            departures=round(summary.events[0] / UNIT, 2),
            lent_h=round(summary.lent / UNIT, 2),
            rate_of_zone=round(known.zone.recent.rate, 3),
            stays=_quartiles(attendance.stays) if mine else [],
            week=[None if share == UNSEEN else share for share in summary.week],
        )


def _with_end(reasons: Sequence[str], attempts: Sequence[Attempt], node: bytes) -> list[str]:
    """Return a node's reasons; that the job failed there with how it ended."""
    end = next((attempt.reason for attempt in reversed(attempts) if attempt.node == node and attempt.reason), "")
    return [f"{reason}: {end}" if reason == FAILED_HERE and end else reason for reason in reasons]


def _data_lines(request: Request, adverts: Sequence[Advert]) -> list[str]:
    """Return what each node that could take the job lacks of its data sets, and what that costs it in the ranking."""
    lines = []
    for advert in adverts:
        missing = missing_mib(request, advert)
        if missing and not refusals(request, advert):
            whole = advert.weight_for(horizon_of(request.remaining_s))
            lines.append(
                f"{advert.nick} would fetch {amount(missing << 20)} of data sets (about {fetch_s(request, advert)} s), before "
                "the job starts or, where it can stream, while it runs: its "
                f"weight is {with_data(whole, request, advert)} instead of {whole} for that"
            )
    return lines


def _left_s(status: JobStatus | None, now_unix: float) -> float | None:
    """Return the seconds a job still needs, by its reported progress and its pace so far; None if it reports none."""
    if status is None or not status.step or not status.of or status.of < status.step:
        return None
    begun = status.attempts[-1].running_unix_ms / 1000
    ran_s = sum(attempt.ran_s for attempt in status.attempts if attempt.reason) + max(0.0, now_unix - begun)
    return ran_s * (status.of - status.step) / status.step


def _mode(hierarchy: Hierarchy) -> str:
    return f"two-level since {hierarchy.since} nodes" if hierarchy.since else "flat"


def _submits(nick: str, count: int) -> str:
    return f"{nick} submits {plural(count, 'job')} for others"


def _quartiles(stays: Sequence[OwnStay]) -> list[schemas.mesh.Quantile]:
    """Return the quartiles of the Kaplan-Meier curve of this node's own stays."""
    curve = kaplan_meier(spans_of(stays))
    found: list[schemas.mesh.Quantile] = []
    for part in (0.75, 0.5, 0.25):
        reached = next((length for length, there in curve if there <= part), None)
        if reached is not None:
            found.append(schemas.mesh.Quantile(part=part, after_s=round(reached, 1)))
    return found

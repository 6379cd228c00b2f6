"""`mesh why JOB [--would]`: the ranking for a job's next attempt, how its last place was decided, and what would let it start."""

import time
from typing import TYPE_CHECKING

from membership.identity import short_id
from mesh.api.zones import placing
from mesh.jobs.spec import attempt_request, format_job
from mesh.jobs.status import JobStatus
from placement.advert import Advert
from placement.decision import explain
from placement.preemption import vacated
from placement.request import Request
from placement.would import Running, nearest
from placement.zones import Hierarchy

if TYPE_CHECKING:
    from mesh.api import answers
    from mesh.daemon import Daemon


async def explanation(daemon: "Daemon", text: str, would: bool = False) -> "answers.jobs.Why":
    """Computed from this node's adverts, as anybody would; with `would`, also the nearest changes that would let it start."""
    desk = daemon.job_desk
    status = desk.find_job(text)
    spec = await desk.spec_of(status)
    last = status.attempts[-1] if status.attempts else None
    attempt = 0 if last is None else last.number + bool(last.reason)
    now_ms = time.time_ns() // 1_000_000
    over = last is None or bool(last.reason)
    request = attempt_request(
        status.job, spec, attempt, status.attempts, now_ms, commit=status.commit if over else None
    )
    hierarchy = daemon.jobs.outlook.hierarchy()
    own = next((stay for stay in daemon.jobs.board.stays if stay.job == status.job), None)
    # Its own place is no reason against where it is.
    adverts = [vacated(ad, own) if own is not None and ad.node == own.node else ad for ad in hierarchy.adverts]
    ranking = hierarchy.rank(request, adverts)
    shown = desk.show(status)
    return {
        "job": shown["job"],
        "state": shown["state"],
        "detail": shown["detail"],
        "node": shown["node"],
        "witnesses": shown["witnesses"],
        "heir": shown["heir"],
        "warm": shown["warm"],
        "attempts": shown["attempts"],
        "placement": placing(daemon, hierarchy, ranking),
        "submitted_by": daemon.deputy.words(status.job),
        "explanation": [*daemon.image_desk.objections(spec), *explain(request, ranking)],
        "candidates": [
            {"nick": c.nick, "score": str(c.score), "weight": c.weight, "advert_version": c.advert_version}
            for c in ranking.candidates
        ],
        "refused": [{"nick": r.nick, "reasons": list(r.reasons)} for r in ranking.refused],
        "remaining_s": request.remaining_s,
        "decision": await _decided(daemon, status, hierarchy),
        "would": _would(daemon, request, adverts) if would else None,
    }


async def _decided(daemon: "Daemon", status: JobStatus, hierarchy: Hierarchy) -> "answers.jobs.Decision | None":
    """The last decision of a steward that is known: what it saw, and which of those adverts have changed since."""
    told = await daemon.job_desk.told(status)
    decided = [(actor, event) for actor, event, _ in told if event.decision is not None]
    if not decided:
        return None
    actor, event = decided[-1]
    decision = event.decision
    assert decision is not None
    nicks = {member.node_id: member.nick for member in daemon.membership.members()}
    versions = {advert.node: advert.version for advert in hierarchy.adverts}
    return {
        "by": nicks.get(actor, short_id(actor)),
        "unix_ms": event.unix_ms,
        "rule": decision.rule,
        "attempt": decision.attempt,
        "order": [
            {
                "nick": nicks.get(node, short_id(node)),
                "advert_version": version,
                "weight": weight,
                "advert_now": versions.get(node),
            }
            for node, version, weight in decision.order
        ],
        "declined": [nicks.get(node, short_id(node)) for node in decision.declined],
        "places_kept_for_others": [nicks.get(node, short_id(node)) for node in decision.kept],
    }


def _would(daemon: "Daemon", request: Request, adverts: list[Advert]) -> "list[answers.jobs.Change]":
    now = time.time()
    running = [
        Running(stay, f"job {format_job(stay.job)[:8]}", _left_s(daemon.jobs.board.get(stay.job), now))
        for stay in daemon.jobs.board.stays
    ]
    changes = nearest(request, adverts, running, now)
    return [{"of": change.of, "text": change.text, "in_s": change.in_s} for change in changes]


def _left_s(status: JobStatus | None, now_unix: float) -> float | None:
    """By how far it says it is, at the pace it has had."""
    if status is None or not status.step or not status.of or status.of < status.step:
        return None
    begun = status.attempts[-1].running_unix_ms / 1000
    ran_s = sum(attempt.ran_s for attempt in status.attempts if attempt.reason) + max(0.0, now_unix - begun)
    return ran_s * (status.of - status.step) / status.step

"""`mesh survive NODE`: how long a node is likely to stay, and its week."""

import time
from typing import TYPE_CHECKING, Any

from membership.identity import format_id
from mesh.api.errors import ExitCode, MeshError
from mesh.provider.attendance import spans_of
from placement.stays import kaplan_meier
from placement.summary import UNIT, UNSEEN
from placement.survival import Survival, weight

if TYPE_CHECKING:
    from mesh.api import answers
    from mesh.daemon import Daemon

HORIZONS_MIN = (15, 60, 240, 720, 1440)


def survival_of(daemon: "Daemon", text: str) -> "answers.mesh.Survival":
    """By this node's own stays, or by what the other one tells of its own."""
    member = daemon.desk.find_node(text)
    attendance, now = daemon.attendance, time.time()
    mine = member.node_id == daemon.me
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
    rows: list[answers.mesh.Stays] = []
    for horizon in HORIZONS_MIN:
        stays = (
            attendance.estimator.survival(member.node_id, now, horizon * 60, until)
            if known.since is not None
            else Survival(0.0, 0.0, 0.0)
        )
        rows.append(
            {
                "horizon_min": horizon,
                "probability": round(stays.probability, 4),
                "low": round(stays.low, 4),
                "high": round(stays.high, 4),
            }
        )
    hour = attendance.estimator.survival(member.node_id, now, 3600.0, until).probability
    return {
        "node": format_id(member.node_id),
        "nick": member.nick,
        "me": mine,
        "lent": known.since is not None,
        "lent_since_unix": None if known.since is None else round(known.since, 3),
        "until_unix": summary.until_unix or None,
        "told_unix": summary.as_of_unix,
        "weight": weight(hour) if known.since is not None else 0,
        "survival": rows,
        "departures": round(summary.events[0] / UNIT, 2),
        "lent_h": round(summary.lent / UNIT, 2),
        "rate_of_room": round(known.room.regime.rate, 3),
        "leave_together": round(known.room.common, 3),
        "stays": _curve(attendance.stays) if mine else [],
        "week": [None if share == UNSEEN else share for share in summary.week],
    }


def _curve(stays: Any) -> "list[answers.mesh.Quantile]":
    """Kaplan and Meier's, of this node's own stays, at the quarters."""
    curve = kaplan_meier(spans_of(stays))
    found: list[answers.mesh.Quantile] = []
    for part in (0.75, 0.5, 0.25):
        reached = next((length for length, there in curve if there <= part), None)
        if reached is not None:
            found.append({"part": part, "after_s": round(reached, 1)})
    return found

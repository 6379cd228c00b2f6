"""What this node sends to others now: checkpoints, working directories, images; the answers are plain JSON values."""

import time
from typing import TYPE_CHECKING, Any

from membership.identity import short_id
from mesh.jobs.spec import format_job

if TYPE_CHECKING:
    from mesh.daemon import Daemon


def transfer_list(daemon: "Daemon") -> dict[str, Any]:
    """Each stream under way, oldest first: bytes that the other node has acknowledged, of how many, since when."""
    nicks = {member.node_id: member.nick for member in daemon.membership.members()}
    names, now, rows = {job: status.name for job, status in daemon.job_desk.statuses().items()}, time.monotonic(), []
    for lane in daemon.wire.open:
        cargo = lane.cargo
        rows.append(
            {
                "id": id(lane),
                "kind": cargo.kind,
                "to": "" if cargo.to is None else nicks.get(cargo.to, short_id(cargo.to)),
                "job": format_job(cargo.job) if any(cargo.job) else "",
                "name": names.get(cargo.job, ""),
                "sent": lane.sent,
                "bytes": cargo.size or None,
                "seconds": round(now - lane.began_s, 3),
                "urgent": lane.pace.urgent,
            }
        )
    return {"transfers": rows, "budget_bps": daemon.wire.budget_bps}

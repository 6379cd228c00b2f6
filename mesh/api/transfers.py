"""What this node sends to others now: checkpoints, working directories, images."""

import time
from typing import TYPE_CHECKING

from membership.identity import short_id
from mesh.jobs.spec import format_job

if TYPE_CHECKING:
    from mesh.api import answers
    from mesh.daemon import Daemon


def transfer_list(daemon: "Daemon") -> "answers.mesh.Transfers":
    """Each stream under way, oldest first: bytes that the other node has acknowledged, of how many, since when."""
    nicks = {member.node_id: member.nick for member in daemon.membership.members()}
    names, now = {job: status.name for job, status in daemon.job_desk.statuses().items()}, time.monotonic()
    rows: list[answers.mesh.Transfer] = []
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

"""Where a job is to go: `mesh migrate`, with what stands against it, told before anybody gives notice; and `--home`."""

import time
from typing import TYPE_CHECKING

import msgspec

from mesh.api.errors import ExitCode, MeshError
from mesh.jobs.spec import Homing, attempt_request, format_job

if TYPE_CHECKING:
    from mesh.api import answers
    from mesh.daemon import Daemon

LOCAL_SETTLE_S = 3.0  # with the local gossip profile: who plays with a mesh on one machine does not wait for a minute


def homing_of(daemon: "Daemon", home: str | None) -> Homing:
    """What `--home` asks for; MeshError if it names no node."""
    homing = Homing(settle_s=LOCAL_SETTLE_S) if daemon.settings.profile == "local" else Homing()
    match home:
        case None:
            return homing
        case "first" | "none":
            return msgspec.structs.replace(homing, rule=home)
    return msgspec.structs.replace(homing, rule="node", node=daemon.desk.find_node(home).node_id)


async def migrate(daemon: "Daemon", text: str, to: str, force: bool) -> "answers.jobs.Migrating":
    """Ask for it; the answer says from where, and which node is first in line now."""
    status = daemon.job_desk.find_job(text)
    name, user = format_job(status.job)[:8], daemon.membership.standing.user
    daemon.job_desk.check_owner(status)
    last = status.attempts[-1] if status.attempts else None
    if status.outcome is not None or status.runner is None or last is None or not last.running_unix_ms:
        raise MeshError(f"job {name} does not run now (it is {status.state}): `mesh why {name}` says more")
    spec = await daemon.job_desk.spec_of(status)
    if spec.checkpointing is None and not force:
        raise MeshError(
            f"job {name} has no checkpoints (--ckpt), so it would start over; --force moves it all the same"
        )
    target = daemon.desk.find_node(to) if to else None
    if target is not None and target.node_id == status.runner:
        raise MeshError(f"job {name} runs on {target.nick} already")
    wanted = target.node_id if target is not None else None
    now_ms = time.time_ns() // 1_000_000
    request = attempt_request(status.job, spec, last.number + 1, status.attempts, now_ms, wanted, status.commit)
    request = msgspec.structs.replace(request, avoid=(*request.avoid, status.runner))
    ranking = daemon.jobs.outlook.hierarchy().rank(request, daemon.jobs.outlook.adverts())
    others = [candidate for candidate in ranking.candidates if candidate.node != status.runner]
    if target is not None and target.node_id not in {candidate.node for candidate in others}:
        reasons = [r.reasons for r in ranking.refused if r.node == target.node_id] or [("offers nothing",)]
        raise MeshError(f"{target.nick} cannot take job {name}: {'; '.join(reasons[0])}", ExitCode.IMPOSSIBLE)
    if not others:
        raise MeshError(f"no other node could take job {name} now: `mesh why {name}` says why", ExitCode.IMPOSSIBLE)
    daemon.jobs.migrate(status.job, user, status.runner, wanted)
    heir = next((candidate for candidate in others if target is None and candidate.node == status.heir), others[0])
    return {"job": format_job(status.job), "attempt": last.number, "from": last.nick, "to": heir.nick}

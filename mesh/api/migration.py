"""`mesh migrate`: what stands against moving a job, told before anybody gives it notice."""

from typing import TYPE_CHECKING, Any

from mesh.api.errors import ExitCode, MeshError
from mesh.jobs.ledger import left_unwillingly
from mesh.jobs.spec import format_job, placement_request
from placement.decision import rank_nodes

if TYPE_CHECKING:
    from mesh.daemon import Daemon


async def migrate(daemon: "Daemon", text: str, to: str, force: bool) -> dict[str, Any]:
    """Ask for it; the answer says from where, and which node is first in line now."""
    status = daemon.desk.find_job(text)
    name, user = format_job(status.job)[:8], daemon.membership.standing.user
    daemon.desk.check_owner(status)
    last = status.attempts[-1] if status.attempts else None
    if status.outcome is not None or status.runner is None or last is None or not last.running_unix_ms:
        raise MeshError(f"job {name} does not run now (it is {status.state}): `mesh why {name}` says more")
    spec = await daemon.desk.spec_of(status)
    if spec.checkpointing is None and not force:
        raise MeshError(
            f"job {name} has no checkpoints (--ckpt), so it would start over; --force moves it all the same"
        )
    target = daemon.desk.find_node(to) if to else None
    if target is not None and target.node_id == status.runner:
        raise MeshError(f"job {name} runs on {target.nick} already")
    avoid = (*left_unwillingly(status.attempts), status.runner)
    wanted = target.node_id if target is not None else None
    request = placement_request(status.job, spec, last.number + 1, status.excluded, avoid, wanted)
    ranking = rank_nodes(request, daemon.jobs.adverts())
    others = [candidate for candidate in ranking.candidates if candidate.node != status.runner]
    if target is not None and target.node_id not in {candidate.node for candidate in others}:
        reasons = [r.reasons for r in ranking.refused if r.node == target.node_id] or [("offers nothing",)]
        raise MeshError(f"{target.nick} cannot take job {name}: {'; '.join(reasons[0])}", ExitCode.IMPOSSIBLE)
    if not others:
        raise MeshError(f"no other node could take job {name} now: `mesh why {name}` says why", ExitCode.IMPOSSIBLE)
    daemon.jobs.migrate(status.job, user, status.runner, wanted)
    return {"job": format_job(status.job), "attempt": last.number, "from": last.nick, "to": others[0].nick}

"""`mesh recover`: asks every node for its record of a job, says what is left, and, if told to, goes on from it."""

import asyncio
from typing import TYPE_CHECKING

import msgspec

from membership.envelope import seal
from membership.identity import NodeId, short_id
from mesh.api.errors import MeshError
from mesh.api.peer import PeerError
from mesh.jobs.authority import Authority
from mesh.jobs.effects import Cell, decode_cell
from mesh.jobs.keyring import NoKey
from mesh.jobs.recovery import Plan, RecoveryError, encode_mandate, make_plan
from mesh.jobs.service import instant
from mesh.jobs.spec import SpecError, format_job

if TYPE_CHECKING:
    from mesh.api import answers
    from mesh.daemon import Daemon


async def recover(daemon: "Daemon", text: str, go: bool) -> "answers.jobs.Recovered":
    """What would be lost; with `go`, do it."""
    status = daemon.job_desk.find_job(text)
    daemon.job_desk.check_owner(status)
    cells = await _records(daemon, status.job)
    try:
        plan = make_plan(status.job, cells, daemon.jobs.outlook.look(), instant())
    except RecoveryError as error:
        raise MeshError(f"job {format_job(status.job)[:8]} cannot be recovered: {error}") from error
    keyring, vault, locked_out = daemon.jobs.keyring, None, ""
    try:
        spec = Authority(daemon.me, daemon.trust).read_spec(status.job, plan.spec)
        vault = await keyring.vault(status.job, spec, plan.kept)
    except (NoKey, SpecError) as error:
        locked_out = str(error)
    if go:
        sealed = seal(daemon.identity, daemon.trust.mesh_id, "recovery", encode_mandate(plan.mandate))
        problem = await daemon.jobs.recover(plan, sealed)
        if problem is not None:
            raise MeshError(f"the new group did not take the record: {problem}. Try again, or see `mesh nodes`.")
        if vault is not None:
            await keyring.share(status.job, vault, plan.mandate.config)
    return _shown(daemon, plan, go, locked_out)


async def _records(daemon: "Daemon", job: bytes) -> dict[NodeId, Cell]:
    """Every record of the job that can be read now."""

    async def ask(node: NodeId) -> tuple[NodeId, Cell | None]:
        try:
            return node, decode_cell(await daemon.peers.call(node, "GET", f"/v1/jobs/{job.hex()}/cell"))
        except (PeerError, msgspec.MsgspecError, UnicodeDecodeError):
            return node, None

    others = [
        member.node_id for member in daemon.membership.members() if member.present and member.node_id != daemon.me
    ]
    found = {node: cell for node, cell in await asyncio.gather(*map(ask, others)) if cell is not None}
    own = daemon.jobs.participant.witnesses.get(job)
    return found | ({daemon.me: own.cell} if own is not None else {})


def _shown(daemon: "Daemon", plan: Plan, done: bool, locked_out: str) -> "answers.jobs.Recovered":
    nicks = {member.node_id: member.nick for member in daemon.membership.members()}

    def names(nodes: tuple[bytes, ...]) -> list[str]:
        return [nicks.get(node, short_id(node)) for node in nodes]

    commit = plan.ledger.commit
    return {
        "job": format_job(plan.mandate.job),
        "done": done,
        "locked_out": locked_out,
        "lost": names(plan.lost),
        "kept": names(plan.kept),
        "witnesses": names(plan.mandate.config.nodes),
        "checkpoint": None if commit is None else {"seq": commit.seq, "step": commit.step},
        "checkpoint_unix_ms": None if commit is None else commit.created_unix_ms,
    }

"""Rows of `mesh top` for nodes, jobs, GPUs and streams."""

from typing import Any

import msgspec
from msgspec import UNSET

from mesh.api.schemas.gpus import Gpu
from mesh.api.schemas.jobs import Described, Event, Job
from mesh.api.schemas.mesh import Node, Transfer
from mesh.api.schemas.owner import Rehearsed
from mesh.top.answers import Look
from mesh.top.table import Cell, Column, Row, Sorting, Tone, age, bar, clock, coming
from mesh.util.byte_text import amount
from mesh.util.duration import lasting
from mesh.util.text import OVER, doing, saving_words

STATE_TONES: dict[str, Tone] = {
    **dict.fromkeys(("alive", "running", "done"), "good"),
    **dict.fromkeys(
        ("suspect", "draining", "queued", "pending", "starting", "vacating", "saving", "frozen", "cancelling"), "warn"
    ),
    **dict.fromkeys(("dead", "failed", "lost", "stranded"), "bad"),
    **dict.fromkeys(("left", "cancelled"), "dim"),
}


def state_cell(state: str) -> Cell:
    return Cell(state, STATE_TONES.get(state, ""))


# --- nodes

NODE_COLUMNS = (
    Column("NODES", 20),
    Column("STATE", 9),
    Column("LENDS", 22),
    Column("GPUS USED", 17, 1),
    Column("JOBS", 5, 0, True),
    Column("SINCE", 7, 2, True),
    Column("USER", 12, 3),
    Column("ZONE", 12, 5),
    Column("MODEL", 24, 4),
    Column("ENGINES", 16, 6),
)


def gpus_free(node: Node) -> float:
    """Return the free GPU time, in GPUs; a GPU without free memory has none."""
    return sum(left.share for left in node.gpu_room if left.vram_mib) / 100


NODE_SORTINGS = (
    Sorting("name", 0, lambda node: (not node.me, node.nick, node.node)),
    Sorting("state", 1, lambda node: (node.state == "alive", node.state, node.nick, node.node)),
    Sorting("free", 2, lambda node: (not node.lending, -gpus_free(node), -node.slots_free, node.nick, node.node)),
    Sorting("jobs", 4, lambda node: (-node.jobs, node.nick, node.node)),
)


def lends(node: Node) -> str:
    """Return the free resources of a node, or why it lends nothing."""
    if node.lending:
        parts = [f"{gpus_free(node):g}/{len(node.gpus)} GPUs"] if node.gpus else []
        parts += [f"{node.slots_free}/{node.slots} slots"] if node.slots else []
        return ", ".join(parts) or "-"
    if not node.paused:
        return "-"
    if node.back_unix:
        return f"from {clock(node.back_unix, '%a %H:%M')}"
    return {"owner": "owner present", "hours": "outside hours"}.get(node.held_by, "paused")


def node_row(node: Node, now: float, news: bool) -> Row:
    used = ""
    if node.gpus:
        taken = len(node.gpus) - gpus_free(node)
        used = f"{bar(taken / len(node.gpus))} {taken:.3g}/{len(node.gpus)}"
    models = dict.fromkeys(gpu.model for gpu in node.gpus)
    return Row(
        node.node,
        (
            Cell(node.nick + (" *" if node.me else ""), "bold" if news or node.me else ""),
            state_cell(node.state),
            Cell(lends(node), "" if node.lending else "dim"),
            Cell(used),
            Cell(str(node.jobs), "" if node.jobs else "dim"),
            Cell(age(now - node.since_unix), "dim"),
            Cell(node.user),
            Cell(node.zone),
            Cell(", ".join(models)),
            Cell(",".join(node.engines), "dim"),
        ),
    )


# --- jobs

JOB_COLUMNS = (
    Column("JOBS", 12),
    Column("NAME", 16, 1),
    Column("STATE", 10),
    Column("NODE", 14),
    Column("MOVES", 5, 2, True),
    Column("STEP", 13, 4, True),
    Column("SAVED", 12, 1, True),
    Column("AT RISK", 7, 0, True),
    Column("NEXT", 6, 3, True),
    Column("USER", 12, 7),
    Column("GPUS", 5, 8, True),
    Column("COMMAND", 100, 6),
)
JOB_SORTINGS = (
    Sorting("newest", 0, lambda job: (job.state in OVER, -job.created_unix_ms, job.job)),
    Sorting("state", 2, lambda job: (job.state in OVER, job.state, -job.created_unix_ms, job.job)),
    Sorting("node", 3, lambda job: (job.state in OVER, job.node or "~", -job.created_unix_ms, job.job)),
    Sorting("moves", 4, lambda job: (-moves(job), -job.created_unix_ms, job.job)),
    Sorting("at risk", 7, lambda job: (-(job.at_risk_s or 0), job.state in OVER, -job.created_unix_ms, job.job)),
)


def moves(job: Job) -> int:
    """Return how often a job has moved. Attempts that never ran do not count; only the last ones are listed."""
    never_ran = sum(not attempt.running_unix_ms for attempt in job.attempts)
    return max(0, job.attempts[-1].number - never_ran) if job.attempts else 0


def short(job: Job) -> str:
    return job.job[:8] if job.array is None else f"{job.array.array[:8]}_{job.array.label}"


def called(job: str, name: str) -> str:
    return name or job[:8]


def job_row(job: Job, now: float, news: bool) -> Row:
    over, details = job.state in OVER, doing(job.detail, _saving(job))
    step = "" if job.step is None else f"{job.step}/{job.of}" if job.of else str(job.step)
    saved, kept = "", job.checkpoint
    if kept is not None:
        saved = f"{lasting(now - kept.created_unix_ms / 1000)} on {len(kept.holders)}"
    due = "" if job.next_checkpoint is None or over else coming(job.next_checkpoint.due_unix - now)
    risk = job.at_risk_s or 0
    return Row(
        job.job,
        (
            Cell(short(job), "bold" if news else ""),
            Cell(job.name),
            state_cell(job.state),
            Cell((job.node or "-") + (f" +{len(job.gang)}" if job.gang else ""), "" if job.node else "dim"),
            Cell(str(moves(job)), "" if moves(job) else "dim"),
            Cell(step),
            Cell(saved or "-", "" if saved else "dim"),
            Cell(lasting(risk) if risk else "-", "" if risk else "dim"),
            Cell(due),
            Cell(job.user),
            Cell("-" if not job.gpus else f"{job.gpus * job.gpu_share / 100:g}"),
            Cell(f"{job.command}  {details}".rstrip() if over else details or job.command, "dim"),
        ),
    )


def _saving(job: Job) -> dict[str, Any] | None:
    return None if job.saving is None else msgspec.structs.asdict(job.saving)


# --- this node's GPUs and guests

GPU_COLUMNS = (
    Column("THIS NODE", 9),
    Column("MODEL", 22, 2),
    Column("TIME GIVEN", 15),
    Column("MEMORY GIVEN", 24, 1),
    Column("GUESTS", 90),
)


def gpu_row(index: int, gpu: Gpu, look: Look) -> Row:
    time_part = 1 - gpu.share_free / 100
    memory_part = 1 - gpu.vram_free_mib / gpu.vram_mib if gpu.vram_mib else 0.0
    given, whole = (gpu.vram_mib - gpu.vram_free_mib) / 1024, gpu.vram_mib / 1024
    guests = "; ".join(
        f"{called(one.job, one.name)} of {one.user} {one.share} %"
        + (" (off)" if one.gate == "closed" else "" if one.share_now is UNSET else f" (now {one.share_now:g} %)")
        + ("" if one.memory is UNSET else f" {one.memory / 2**30:.3g} GiB")
        for one in gpu.jobs
    )
    owner = next((lent for lent in look.status.lend.gpus if lent.uuid == gpu.uuid), None)
    held = ""
    if owner is not None and owner.withheld:
        held = "taken back"
    elif owner is not None and owner.level != "lend":
        held = f"{owner.why}: {', '.join(program.name for program in owner.programs)}".rstrip(": ")
    words = "; ".join(filter(None, [held, guests]))
    return Row(
        gpu.uuid,
        (
            Cell(f"GPU {index}"),
            Cell(gpu.model),
            Cell(f"{bar(time_part)} {100 - gpu.share_free:3d} %"),
            Cell(f"{bar(memory_part)} {given:.3g}/{whole:.3g} GiB"),
            Cell(words or "free", "warn" if held else "" if guests else "dim"),
        ),
    )


def slots_row(look: Look) -> Row | None:
    """Return the row of guests without a GPU; None if the node has no slots."""
    me = next((node for node in look.nodes if node.me), None)
    on_gpus = {one.job for gpu in look.gpus for one in gpu.jobs}
    names = {job.job: job for job in look.jobs}
    guests = [names.get(guest) for guest in look.status.guests if guest not in on_gpus]
    if me is None or (not me.slots and not guests):
        return None
    words = ", ".join(f"{called(job.job, job.name)} of {job.user}" for job in guests if job is not None)
    taken = max(me.slots - me.slots_free, 0)
    return Row(
        "slots",
        (
            Cell("slots"),
            Cell("without a GPU", "dim"),
            Cell(f"{bar(taken / me.slots if me.slots else 0.0)} {taken:3d}/{me.slots}"),
            Cell(""),
            Cell(words or "free", "" if words else "dim"),
        ),
    )


# --- transfers and events

TRANSFER_COLUMNS = (
    Column("SENDS TO", 20),
    Column("WHAT", 28),
    Column("SENT", 22),
    Column("RATE", 12, 0, True),
    Column("FOR", 6, 1, True),
    Column("", 8, 2),
)


def transfer_row(transfer: Transfer, rate_bps: float) -> Row:
    sent = amount(transfer.sent)
    if transfer.bytes:
        sent = f"{bar(transfer.sent / transfer.bytes)} {amount(min(transfer.sent, transfer.bytes))}/{amount(transfer.bytes)}"
    what = f"{transfer.kind} of {called(transfer.job, transfer.name)}" if transfer.job else transfer.kind
    return Row(
        str(transfer.id),
        (
            Cell(transfer.to),
            Cell(what),
            Cell(sent),
            Cell(f"{amount(rate_bps)}/s"),
            Cell(lasting(transfer.seconds), "dim"),
            Cell("urgent" if transfer.urgent else "", "warn"),
        ),
    )


EVENT_COLUMNS = (Column("EVENTS", 8), Column("", 12), Column("", 8), Column("", 160))


def event_row(event: Event) -> Row:
    cells = (clock(event.unix_ms / 1000), event.actor, (event.job or "-")[:8], event.text)
    return Row(f"{event.id}", tuple(Cell(text, "dim" if place == 0 else "") for place, text in enumerate(cells)))


# --- one job's page

ATTEMPT_COLUMNS = (
    Column("ATTEMPT", 7),
    Column("NODE", 20),
    Column("BEGAN", 8),
    Column("RAN", 7, 0, True),
    Column("FROM STEP", 9, 2, True),
    Column("TO STEP", 9, 1, True),
    Column("ENDED", 80),
)


def attempts(described: Described, now: float) -> list[Row]:
    rows = []
    for one in reversed(described.job.attempts):
        end = (one.ended_unix_ms or (one.seen_unix_ms if one.reason else 0) or now * 1000) / 1000
        steps = ["-" if step is None else str(step) for step in (one.resumed_step, one.last_step)]
        ran = lasting(end - one.running_unix_ms / 1000) if one.running_unix_ms else "-"
        texts = [str(one.number), one.node, clock(one.started_unix_ms / 1000), ran, *steps]
        end_cell = Cell(one.reason, "") if one.reason else Cell("running", "good")
        if described.job.state in OVER and not one.reason:
            end_cell = Cell("-", "dim")
        rows.append(Row(str(one.number), (*map(Cell, texts), end_cell)))
    return rows


def job_lines(described: Described, now: float) -> list[list[Cell]]:
    """Return the head of a job's page."""
    job = described.job
    kept, due = job.checkpoint, job.next_checkpoint
    saved = "no checkpoint yet"
    if kept is not None:
        step = f" at step {kept.step}" if kept.step is not None else ""
        holders = ", ".join(str(holder) for holder in kept.holders) or "its host only"
        holders += f" (at risk: {kept.wanted} wanted)" if kept.at_risk else ""
        saved = f"checkpoint {kept.seq}{step}, {lasting(now - kept.created_unix_ms / 1000)} ago, on {holders}"
    if due is not None and job.state not in OVER:
        saved += f"; next {'due ' if due.due_unix <= now else 'in '}{coming(due.due_unix - now)}"
    if job.saving is not None:
        saved += f"; {saving_words(_saving(job))}"
    risk = job.at_risk_s or 0
    title = f"{short(job)}  {job.name}".rstrip()
    where = f"  on {job.node}" if job.node else ""
    standby = f", standby {job.standby}" if job.standby else ""
    return [
        [Cell(title, "bold"), Cell("  "), state_cell(job.state), Cell(f"{where}{standby}  of {job.user}")],
        [Cell(job.command, "dim")],
        [Cell(saved), Cell(f"; at risk {lasting(risk)}" if risk else "", "warn")],
        [Cell(job.detail, "warn")],
    ]


# --- cost of a reclaim

COST_COLUMNS = (
    Column("JOB", 16),
    Column("USER", 10),
    Column("RAN", 7, 2, True),
    Column("GPUS", 4, 4, True),
    Column("AT RISK", 7, 0, True),
    Column("SAVING", 7, 3, True),
    Column("SHIPPING", 16, 3, True),
    Column("IN TIME", 7, 1, True),
    Column("GOES TO", 14, 1),
    Column("LOSES", 40),
)


def cost_rows(cost: Rehearsed) -> list[Row]:
    rows = []
    for guest in cost.guests:
        size = "" if guest.ship_bytes is None else f"{amount(guest.ship_bytes)} "
        ship = "?" if guest.ship_s is None else f"{guest.ship_s:.1f}s"
        texts = [
            called(guest.job, guest.name),
            guest.user,
            lasting(guest.ran_s),
            str(len(guest.gpus)) if guest.gpus else "-",
            lasting(guest.at_risk_s) if guest.leads else "-",
            "?" if guest.save_s is None else f"{guest.save_s:.1f}s",
            size + ship,
            "?" if guest.chance is None else f"{guest.chance:.0%}",
            guest.goes_to or "-",
        ]
        loses = Cell(guest.loses, "bad") if guest.loses else Cell("nothing", "good")
        rows.append(Row(guest.job, (*map(Cell, texts), loses)))
    return rows

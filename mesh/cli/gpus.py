"""`mesh gpus`: this machine's GPUs, and the share of each guest."""

from collections.abc import Iterable
from typing import Any

import click

from mesh.cli.listing import listing, show
from mesh.cli.names import JOB
from mesh.cli.output import print_json, say, table
from mesh.cli.terminal import SIZE, client, job_path, json_option


@click.group(invoke_without_command=True)
@click.option("--receipts", is_flag=True, help="Show the signed receipts of ended attempts instead.")
@listing
@click.pass_context
def gpus(ctx: click.Context, /, receipts: bool, **form: bool) -> None:
    """Show this node's GPUs: the free part of each, and what its jobs have and use."""
    if ctx.invoked_subcommand is not None:
        return
    daemon = client(ctx)
    if receipts:
        show(form, lambda: daemon.get("/v1/receipts"), _receipt_jobs, _draw_receipts)
        return
    show(form, lambda: daemon.get("/v1/gpus"), lambda answer: [gpu["uuid"] for gpu in answer["gpus"]], _draw)


def _draw(answer: dict[str, Any]) -> None:
    rows = [row for gpu in answer["gpus"] for row in _rows(gpu)]
    table(
        ["GPU", "MODEL", "FREE", "JOB", "SHARE (now)", "MEMORY", "GPU TIME", "REFUSED"],
        rows,
        spare=["GPU TIME", "MODEL"],
    )
    for problem in _problems(answer):
        say(f"mesh: {problem}", err=True)


@gpus.command("set")
@click.argument("job", type=JOB)
@click.option("--share", type=click.IntRange(1, 99), help="Guaranteed per cent of each GPU's time.")
@click.option("--limit", type=click.IntRange(1, 100), help="Per cent that it may use while the GPU is idle otherwise.")
@click.option("--vram", "vram_mib", type=SIZE, help="Guaranteed memory of each GPU, as 6g.")
@click.option("--vram-limit", "vram_limit_mib", type=SIZE, help="Memory that it may use while no other job needs it.")
@json_option
@click.pass_context
def set_(ctx: click.Context, /, job: str, as_json: bool, **order: int | None) -> None:
    """Change the share that JOB has of this node's GPUs, at once. On other nodes it has the share it was submitted with."""
    if all(value is None for value in order.values()):
        raise click.UsageError("name a change: --share, --limit, --vram or --vram-limit", ctx)
    answer = client(ctx).post(f"{job_path(job)}/share", order)
    if as_json:
        print_json(answer)
        return
    memory = f"{_gib(answer['vram_mib'])}{_up_to(answer)} GiB"
    say(f"{answer['share']} % guaranteed, up to {answer['limit']} %, {memory} of each GPU")


@gpus.command()
@click.argument("job", type=JOB)
@json_option
@click.pass_context
def pause(ctx: click.Context, job: str, as_json: bool) -> None:
    """Pause JOB on this node's GPUs: it stays alive, and its GPU memory is freed if the driver supports that."""
    answer = client(ctx).post(f"{job_path(job)}/gpu-pause", {"paused": True}, timeout_s=None)
    if as_json:
        print_json(answer)
        return
    memory = "its GPU memory is free" if answer["freed"] else f"its GPU memory is not freed: {answer['problem']}"
    say(f"paused; {memory}. `mesh gpus resume {job}` resumes it")


@gpus.command()
@click.argument("job", type=JOB)
@json_option
@click.pass_context
def resume(ctx: click.Context, job: str, as_json: bool) -> None:
    """Resume JOB after `mesh gpus pause`, or after it was stopped because it bypassed the guard."""
    answer = client(ctx).post(f"{job_path(job)}/gpu-pause", {"paused": False}, timeout_s=None)
    if as_json:
        print_json(answer)
        return
    say("resumed")


def _receipt_jobs(answer: dict[str, Any]) -> Iterable[str]:
    return dict.fromkeys(row["job"] for row in answer["receipts"])


def _draw_receipts(answer: dict[str, Any]) -> None:
    rows = [
        [row["job"][:8], str(row["attempt"]), row["user"], use["uuid"][:12], *_used(use)]
        for row in answer["receipts"]
        for use in row["devices"]
    ]
    table(["JOB", "ATTEMPT", "USER", "GPU", "GPU TIME", "BY NVML", "MEMORY", "PEAK", "LAUNCHES"], rows)


def _used(use: dict[str, Any]) -> list[str]:
    by_nvml = "-" if use["nvml_ns"] is None else f"{use['nvml_ns'] / 1e9:.1f} s"
    memory = [f"{use['byte_s'] / 2**30 / 3600:.3g} GiB h", f"{_gib(use['peak'] / 2**20)} GiB"]
    return [f"{use['gpu_ns'] / 1e9:.1f} s", by_nvml, *memory, str(use["launches"])]


def _rows(gpu: dict[str, Any]) -> list[list[str]]:
    model = f"{gpu['model']}, {_gib(gpu['vram_mib'])} GiB"
    free = f"{gpu['share_free']} %, {_gib(gpu['vram_free_mib'])} GiB"
    heads = [[gpu["uuid"][:12], model, free]] + [["", "", ""]] * (len(gpu["jobs"]) - 1)
    tails = [_job(job) for job in gpu["jobs"]] or [["-"] * 5]
    return [head + tail for head, tail in zip(heads, tails, strict=True)]


def _job(job: dict[str, Any]) -> list[str]:
    called = job["name"] or job["job"][:8]
    share = f"{job['share']} %" + (f" to {job['limit']} %" if job["limit"] > job["share"] else "")
    if not job["guarded"]:
        return [called, share, f"{_gib(job['vram_mib'])} GiB", "-", "-"]
    closed = "paused" if "owner" in job.get("closed_by", []) else "gate closed"
    now = closed if job["gate"] == "closed" else f"{job['share_now']:g} %"
    lent = f" (now {_gib(job['memory_now'] / 2**20)})" if _up_to(job) and job["memory_now"] is not None else ""
    memory = f"{_gib(job['memory'] / 2**20)}/{_gib(job['vram_mib'])}{_up_to(job)} GiB{lent}"
    return [called, f"{share} ({now})", memory, f"{job['gpu_s']:.1f} s", str(job["refused"])]


def _problems(answer: dict[str, Any]) -> list[str]:
    jobs = {job["job"]: job for gpu in answer["gpus"] for job in gpu["jobs"]}
    degraded = [
        f"guard degraded: a program of job {name[:8]} may call {call}, which the guard does not support"
        for name, job in jobs.items()
        for call in job.get("unguarded_calls", [])
    ]
    past = [
        f"job {job['job'][:8]} bypasses the guard: {finding['detail']}"
        for gpu in answer["gpus"]
        for job in gpu["jobs"]
        for finding in job.get("findings", [])
    ]
    return [*filter(None, [answer["problem"]]), *degraded, *past]


def _up_to(row: dict[str, Any]) -> str:
    """Return the memory that it may use beyond its guarantee."""
    return f" to {_gib(row['vram_limit_mib'])}" if row["vram_limit_mib"] > row["vram_mib"] else ""


def _gib(mib: float) -> str:
    return f"{mib / 1024:.3g}"

"""`mesh gpus`: this machine's GPUs, and what its guests have of them."""

from collections.abc import Iterable
from typing import Any

import click

from mesh.cli.listing import listing, show
from mesh.cli.names import JOB
from mesh.cli.terminal import SIZE, client, job_path, json_option, print_json, table


@click.group(invoke_without_command=True)
@click.option(
    "--receipts", is_flag=True, help="What attempts that have ended used of them, as this node has signed it."
)
@listing
@click.pass_context
def gpus(ctx: click.Context, /, receipts: bool, **form: bool) -> None:
    """Show this node's GPUs: what is left of each, and what each job on it has and uses."""
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
        click.echo(f"mesh: {problem}", err=True)


@gpus.command("set")
@click.argument("job", type=JOB)
@click.option("--share", type=click.IntRange(1, 99), help="Per cent of each GPU's time that it is guaranteed.")
@click.option("--limit", type=click.IntRange(1, 100), help="Per cent that it may use while others leave it idle.")
@click.option("--vram", "vram_mib", type=SIZE, help="Memory of each GPU that it is guaranteed, as 6g.")
@click.option(
    "--vram-limit", "vram_limit_mib", type=SIZE, help="Memory that it may have while no other's share needs it."
)
@json_option
@click.pass_context
def set_(ctx: click.Context, /, job: str, as_json: bool, **order: int | None) -> None:
    """Change what JOB has of this node's GPUs, at once. It asks for what it was submitted with wherever it goes next."""
    if all(value is None for value in order.values()):
        raise click.UsageError("say what is to change: --share, --limit, --vram or --vram-limit", ctx)
    answer = client(ctx).post(f"{job_path(job)}/share", order)
    if as_json:
        print_json(answer)
        return
    memory = f"{_gib(answer['vram_mib'])}{_up_to(answer)} GiB"
    click.echo(f"{answer['share']} % guaranteed, up to {answer['limit']} %, {memory} of each GPU")


@gpus.command()
@click.argument("job", type=JOB)
@json_option
@click.pass_context
def pause(ctx: click.Context, job: str, as_json: bool) -> None:
    """Take JOB off this node's GPUs where it is, alive: it computes nothing, and its GPU memory is freed if the driver can."""
    answer = client(ctx).post(f"{job_path(job)}/gpu-pause", {"paused": True}, timeout_s=None)
    if as_json:
        print_json(answer)
        return
    words = "its GPU memory is free" if answer["freed"] else f"its GPU memory stays: {answer['problem']}"
    click.echo(f"paused; {words}. `mesh gpus resume {job}` lets it go on")


@gpus.command()
@click.argument("job", type=JOB)
@json_option
@click.pass_context
def resume(ctx: click.Context, job: str, as_json: bool) -> None:
    """Let JOB go on where it is, after `mesh gpus pause`, or after it was stopped for being past the guard."""
    answer = client(ctx).post(f"{job_path(job)}/gpu-pause", {"paused": False}, timeout_s=None)
    if as_json:
        print_json(answer)
        return
    click.echo("it goes on")


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
        f"guard degraded: a program of job {name[:8]} may use {call}, which the guard does not know"
        for name, job in jobs.items()
        for call in job.get("unguarded_calls", [])
    ]
    past = [
        f"job {job['job'][:8]} is past the guard: {finding['detail']}"
        for gpu in answer["gpus"]
        for job in gpu["jobs"]
        for finding in job.get("findings", [])
    ]
    return [*filter(None, [answer["problem"]]), *degraded, *past]


def _up_to(row: dict[str, Any]) -> str:
    """What it may have of a GPU's memory beyond what it is guaranteed."""
    return f" to {_gib(row['vram_limit_mib'])}" if row["vram_limit_mib"] > row["vram_mib"] else ""


def _gib(mib: float) -> str:
    return f"{mib / 1024:.3g}"

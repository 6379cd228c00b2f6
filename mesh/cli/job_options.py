"""Options of commands that submit a job, and the request they become."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from mesh.cli.names import IMAGE, JOB_LIST, NODE, NODE_LIST, SECRET, ZONE
from mesh.cli.terminal import ARRAY, DEADLINE, DURATION, ENGINES, EVERY, MOST_IN_BATCH, NODES, SIZE, VERSION

_OPTIONS: list[Callable[[Any], Any]] = [
    click.option("--gpus", type=click.IntRange(0, 4096), help="Number of GPUs (default 0; 1 with --gpu-share)."),
    click.option(
        "--gpu-share",
        type=click.IntRange(1, 100),
        help="Guaranteed per cent of each GPU's time (default 100: the job has the GPU alone).",
    ),
    click.option(
        "--gpu-share-limit",
        type=click.IntRange(1, 100),
        help="Per cent that it may use while the GPU is idle otherwise (default: --gpu-share).",
    ),
    click.option(
        "--vram", type=SIZE, default=0, help="Memory that each GPU must have, as 20g; of a share, the memory it gets."
    ),
    click.option(
        "--vram-limit",
        type=SIZE,
        default=0,
        help="Memory of each GPU that it may use while no other job needs it (default: --vram).",
    ),
    click.option("--gpu-model", default="", metavar="NAME", help="Part of the GPUs' name, as A6000 (`mesh gpus`)."),
    click.option("--compute-capability", type=VERSION, help="Lowest compute capability of the GPUs, as 8.0."),
    click.option("--driver", type=VERSION, help="Lowest version of NVIDIA's driver, as 550.54."),
    click.option("--memory", type=SIZE, help="Memory limit, as 8g (6m or more)."),
    click.option("--cpus", type=click.FloatRange(0.1, 1024), help="CPU limit (docker engine)."),
    click.option("--image", type=IMAGE, help="Container image (default: none, the job is a plain process)."),
    click.option(
        "--build",
        type=click.Path(file_okay=False, exists=True),
        metavar="DIR",
        help="Build DIR's Dockerfile here, and run it in that image.",
    ),
    click.option("--engine", type=click.Choice(ENGINES), help="Require this engine."),
    click.option("--name", default="", help="Name of the job: up to 64 letters, digits and _ . -"),
    click.option(
        "--data",
        multiple=True,
        metavar="NAME[:/data/DIR]",
        help="Data set that it reads, at $MESH_DATA_NAME (`mesh data`). Repeatable.",
    ),
    click.option(
        "--cache",
        multiple=True,
        metavar="NAME",
        help="Cache of yours that it may fill for later jobs, at $MESH_CACHE_NAME; huggingface, torch, pip and uv find theirs "
        "(docs/how-to/caches.md). Repeatable.",
    ),
    click.option(
        "-e",
        "--env",
        multiple=True,
        metavar="KEY[=VALUE]",
        help="Set an environment variable; without =VALUE, to its value here. Repeatable.",
    ),
    click.option(
        "--env-file",
        type=click.Path(dir_okay=False),
        metavar="FILE",
        help="Set environment variables from lines KEY[=VALUE]; --env wins.",
    ),
    click.option(
        "--secret",
        type=SECRET,
        multiple=True,
        metavar="NAME[=VARIABLE|:/run/secrets/FILE]",
        help="Give it a secret (`mesh secret set`) as a variable or a file in memory. Repeatable.",
    ),
    click.option(
        "--secret-nodes",
        type=NODE_LIST,
        metavar="mine|trusted|NODE,...",
        help="Run it only on these nodes, since the owner of a node can read its secrets (default: all nodes).",
    ),
    click.option(
        "--uv", is_flag=True, help="Run it in the Python environment of uv.lock, or of a script's own lock (PEP 723)."
    ),
    click.option(
        "--conda",
        type=click.Path(dir_okay=False),
        metavar="environment.yml",
        help="Run it in an environment of conda packages: of this file, or of a list (`conda list --explicit --sha256`).",
    ),
    click.option(
        "--network",
        multiple=True,
        metavar="HOST:PORT|pypi",
        help="Let it reach this host by a proxy, and no other but those named so (docs/how-to/network.md). Repeatable.",
    ),
    click.option("--ckpt", metavar="DIR", help="Directory of checkpoints, inside the working directory."),
    click.option(
        "--ckpt-mode",
        type=click.Choice(["rename", "marker", "stable", "system"]),
        default="stable",
        show_default=True,
        help="How a checkpoint shows that it is complete; `system`: mesh saves the whole container "
        "(docs/reference/job-contract.md).",
    ),
    click.option(
        "--ckpt-every",
        type=EVERY,
        metavar="auto|TIME",
        help="Ask the job to save: when mesh decides, or every 30m (docs/explanation/schedule.md). The default of "
        "--ckpt-mode system is auto.",
    ),
    click.option("--ckpt-to", type=NODE_LIST, metavar="NODE,NODE", help="Nodes that store the checkpoints."),
    click.option(
        "--replicas", type=click.IntRange(0, 16), default=2, show_default=True, help="Number of copies on other nodes."
    ),
    click.option("--grace", type=DURATION, help="Time that the job needs to save after a notice (default 30s)."),
    click.option(
        "--retries",
        type=click.IntRange(0, 1000),
        default=0,
        show_default=True,
        help="Retries after failures (evictions do not count).",
    ),
    click.option(
        "--priority",
        type=click.IntRange(0, 100),
        default=50,
        show_default=True,
        help="Higher starts first; ten minutes of waiting add a point.",
    ),
    click.option(
        "--after",
        type=JOB_LIST,
        multiple=True,
        metavar="[any:]JOB,...",
        help="Start after these jobs have succeeded; any:JOB, once it is over, however it ends. Repeatable.",
    ),
    click.option(
        "--retry-on",
        multiple=True,
        type=click.IntRange(1, 255),
        metavar="CODE",
        help="Retry only after this exit code. Repeatable.",
    ),
    click.option(
        "--deadline",
        type=DEADLINE,
        help="Fail the job if it has not ended by then: 6h, 2026-12-01T08:00, or the end of 2026-12-01.",
    ),
    click.option(
        "--array", type=ARRAY, metavar="1-100%10", help="Submit a job for each index ($MESH_ARRAY_INDEX), 10 at a time."
    ),
    click.option(
        "--batch",
        type=click.IntRange(1, MOST_IN_BATCH),
        default=1,
        metavar="N",
        help="With --array: run N indices in each job, one after another.",
    ),
    click.option("--max-time", type=DURATION, help="End the job, with notice, after this running time in total."),
    click.option(
        "--on-partition",
        type=click.Choice(["freeze", "compute_uncommitted"]),
        default="freeze",
        show_default=True,
        help="While cut off from its witnesses: freeze, or compute at the risk of doing work twice.",
    ),
    click.option(
        "--nodes",
        type=NODES,
        default=(1, 1),
        metavar="K|K..M",
        help="Run on this many nodes at once, all or nothing, as torchrun expects.",
    ),
    click.option(
        "--home",
        type=NODE,
        metavar="NODE|first|none",
        help="Node to return to when it is free; first: where it ran first (default: this node, if it had to leave it).",
    ),
    click.option("--zone", type=ZONE, help="Only nodes of this zone."),
    click.option("--on", type=NODE_LIST, metavar="mine|trusted|NODE,...", help="Run it only on these nodes."),
    click.option("--not-on", type=NODE_LIST, metavar="mine|trusted|NODE,...", help="Do not run it on these nodes."),
    click.option(
        "--workdir",
        type=click.Path(file_okay=False),
        default=".",
        help="Directory to copy to the node (default: this one).",
    ),
    click.option("--no-workdir", is_flag=True, help="Copy no directory."),
]


def job_settings(function: Any) -> Any:
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def job_options(function: Any) -> Any:
    return click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)(job_settings(function))


def make_order(command: tuple[str, ...], options: dict[str, Any]) -> dict[str, Any]:
    """Return the body of a submission."""
    share = options["gpu_share"]
    order = {
        "argv": list(command),
        "name": options["name"],
        "env": {**_env_file(options["env_file"]), **dict(_variable(pair, "--env") for pair in options["env"])},
        "workdir": None if options["no_workdir"] else str(Path(options["workdir"]).resolve()),
        "image": options["image"],
        "engine": options["engine"],
        "gpus": int(share is not None) if options["gpus"] is None else options["gpus"],
        "gpu_share": 100 if share is None else share,
        "gpu_share_limit": options["gpu_share_limit"],
        "vram_mib": options["vram"],
        "vram_limit_mib": options["vram_limit"],
        "gpu_model": options["gpu_model"],
        "capability": (*(options["compute_capability"] or ()), 0, 0)[:2],
        "driver": options["driver"] or (),
        "memory_mib": options["memory"],
        "cpus": options["cpus"],
        "zone": options["zone"],
        "on": _listed(options["on"]),
        "not_on": _listed(options["not_on"]),
        "least_nodes": options["nodes"][0],
        "most_nodes": options["nodes"][1],
        "ckpt": options["ckpt"],
        "ckpt_mode": options["ckpt_mode"],
        "ckpt_every": options["ckpt_every"],
        "ckpt_to": _listed(options["ckpt_to"]),
        "replicas": options["replicas"],
        "grace_s": options["grace"],
        "retries": options["retries"],
        "retry_on": list(options["retry_on"]),
        "deadline_unix": options["deadline"],
        "array": list(options["array"][0]) if options["array"] else [],
        "array_limit": options["array"][1] if options["array"] else 0,
        "array_batch": options["batch"],
        "on_partition": options["on_partition"],
        "max_time_s": options["max_time"],
        "priority": options["priority"],
        "after": [name for names in options["after"] for name in _listed(names)],
        "home": options["home"],
        "uv": options["uv"],
        "conda": options["conda"] or "",
        "secrets": list(options["secret"]),
        "secret_nodes": _listed(options["secret_nodes"]),
        "data": list(options["data"]),
        "caches": list(options["cache"]),
        "network": list(options["network"]),
    }
    for name, value in order.items():
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            what = {"argv": "the command", "env": "a variable (-e)"}.get(name, name.replace("_", " "))
            raise click.UsageError(f"{what} has bytes that are not UTF-8: put them into a file") from error
    return order


def _listed(names: str | None) -> list[str]:
    return [name for name in (names or "").split(",") if name]


def _env_file(path: str | None) -> dict[str, str]:
    """Read variables as `docker run --env-file` does: a line each, # begins a comment."""
    if path is None:
        return {}
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise click.BadParameter(f"cannot read {path}: {reason}", param_hint="--env-file") from error
    return dict(_variable(line.lstrip(), "--env-file") for line in lines if line.strip() and line.lstrip()[0] != "#")


def _variable(pair: str, option: str) -> tuple[str, str]:
    key, equals, value = pair.partition("=")
    if not key or (not equals and key not in os.environ):
        reason = "has no name" if not key else "has no value, and is not set in this environment"
        raise click.BadParameter(f"{pair!r} {reason}: write KEY=VALUE", param_hint=option)
    return key, value if equals else os.environ[key]

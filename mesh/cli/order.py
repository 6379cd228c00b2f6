"""What a job asks for: the options of `mesh run` and `submit`, and the order that they become."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from mesh.cli.names import IMAGE, JOB, NODE, NODE_LIST, ZONE
from mesh.cli.terminal import ARRAY, DEADLINE, DURATION, EVERY, NODES, SIZE, VERSION

_OPTIONS: list[Callable[[Any], Any]] = [
    click.option("--gpus", type=click.IntRange(0, 4096), help="GPUs the job needs (default 0; 1 with --gpu-share)."),
    click.option(
        "--gpu-share",
        type=click.IntRange(1, 100),
        help="Per cent of each GPU's time that the job is guaranteed (default 100: it has the GPU alone).",
    ),
    click.option(
        "--gpu-share-limit",
        type=click.IntRange(1, 100),
        help="Per cent that it may use while others leave it idle (default: as --gpu-share).",
    ),
    click.option(
        "--vram", type=SIZE, default=0, help="Memory each GPU must have, as 20g; of a share, the memory the job gets."
    ),
    click.option(
        "--vram-limit",
        type=SIZE,
        default=0,
        help="Memory that it may have of each GPU while no other job's share needs it (default: as --vram).",
    ),
    click.option("--gpu-model", default="", metavar="NAME", help="A part of the GPUs' name, as A6000 (`mesh gpus`)."),
    click.option("--compute-capability", type=VERSION, help="The least that each GPU must have, as 8.0."),
    click.option("--driver", type=VERSION, help="The least version of NVIDIA's driver, as 550.54."),
    click.option("--memory", type=SIZE, help="Memory limit, as 8g."),
    click.option("--cpus", type=click.FloatRange(0.1, 1024), help="CPU limit (docker engine)."),
    click.option("--image", type=IMAGE, help="Container image; without one the job is a plain process."),
    click.option("--engine", type=click.Choice(["process", "docker"]), help="Insist on an engine."),
    click.option("--name", default="", help="A name to call the job by."),
    click.option("--env", multiple=True, metavar="KEY=VALUE", help="Environment variable. Repeatable."),
    click.option("--ckpt", metavar="DIR", help="Directory, inside the working directory, that holds checkpoints."),
    click.option(
        "--ckpt-mode",
        type=click.Choice(["rename", "marker", "stable", "system"]),
        default="stable",
        show_default=True,
        help="How a checkpoint shows that it is complete; `system`: the program saves nothing, all of its container is saved "
        "(docs/job-contract.md).",
    ),
    click.option(
        "--ckpt-every",
        type=EVERY,
        metavar="auto|TIME",
        help="Give the job a notice when it is to save: by the mesh's rule, or as 30m (docs/schedule.md). With --ckpt-mode "
        "system it is saved then, by that rule if nothing is said.",
    ),
    click.option("--ckpt-to", type=NODE_LIST, metavar="NODE,NODE", help="Nodes that are to hold the checkpoints."),
    click.option("--replicas", type=click.IntRange(0, 16), default=2, show_default=True, help="Copies on other nodes."),
    click.option("--grace", type=DURATION, help="What the job needs to save at a notice (default 30s)."),
    click.option(
        "--retries",
        type=click.IntRange(0, 1000),
        default=0,
        show_default=True,
        help="Errors to forgive. Departures never count.",
    ),
    click.option(
        "--priority",
        type=click.IntRange(0, 100),
        default=50,
        show_default=True,
        help="Higher goes first; ten minutes of waiting are worth a point.",
    ),
    click.option("--after", type=JOB, multiple=True, metavar="JOB", help="Wait until this job is done. Repeatable."),
    click.option(
        "--retry-on",
        multiple=True,
        type=click.IntRange(1, 255),
        metavar="CODE",
        help="Forgive errors with this exit code only. Repeatable.",
    ),
    click.option("--deadline", type=DEADLINE, help="Fail it when it is not done by then: 6h, or 2026-12-01T08:00."),
    click.option(
        "--array", type=ARRAY, metavar="1-100%10", help="A job for each index ($MESH_ARRAY_INDEX), 10 at a time."
    ),
    click.option("--max-time", type=DURATION, help="End it, with notice, when it has run this long in all."),
    click.option(
        "--on-partition",
        type=click.Choice(["freeze", "compute_uncommitted"]),
        default="freeze",
        show_default=True,
        help="While cut off from its witnesses: stand still, or go on at the risk of doing it twice.",
    ),
    click.option(
        "--nodes",
        type=NODES,
        default=(1, 1),
        metavar="K|K..M",
        help="Run on so many nodes at once, all or nothing, as torchrun expects it.",
    ),
    click.option(
        "--home",
        type=NODE,
        metavar="NODE|first|none",
        help="Where it goes back to when that is free: a node, or where it ran first (default: your own, if it had to leave it).",
    ),
    click.option("--zone", type=ZONE, help="Only nodes of this zone."),
    click.option(
        "--workdir", type=click.Path(file_okay=False), default=".", help="Directory to take along (default: here)."
    ),
    click.option("--no-workdir", is_flag=True, help="Take nothing along."),
]


def job_settings(function: Any) -> Any:
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def job_options(function: Any) -> Any:
    return click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)(job_settings(function))


def make_order(command: tuple[str, ...], options: dict[str, Any]) -> dict[str, Any]:
    """The body of a submission from the command line's values."""
    env = {}
    for pair in options["env"]:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise click.BadParameter(f"{pair!r} is not KEY=VALUE", param_hint="--env")
        env[key] = value
    share = options["gpu_share"]
    return {
        "argv": list(command),
        "name": options["name"],
        "env": env,
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
        "least_nodes": options["nodes"][0],
        "most_nodes": options["nodes"][1],
        "ckpt": options["ckpt"],
        "ckpt_mode": options["ckpt_mode"],
        "ckpt_every": options["ckpt_every"],
        "ckpt_to": [name for name in (options["ckpt_to"] or "").split(",") if name],
        "replicas": options["replicas"],
        "grace_s": options["grace"],
        "retries": options["retries"],
        "retry_on": list(options["retry_on"]),
        "deadline_unix": options["deadline"],
        "array": list(options["array"][0]) if options["array"] else [],
        "array_limit": options["array"][1] if options["array"] else 0,
        "on_partition": options["on_partition"],
        "max_time_s": options["max_time"],
        "priority": options["priority"],
        "after": list(options["after"]),
        "home": options["home"],
    }

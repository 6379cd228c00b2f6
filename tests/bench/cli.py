"""Latency of the command line: `mesh --help` and `mesh ps` with a running daemon, beside a bare interpreter.

Also the CPU time of an idle daemon, and of `mesh top`.
"""

import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from mesh.daemon.stack import Stack  # noqa: E402
from tests.bench import top  # noqa: E402
from tests.bench.harness import command, cpu_s, interleave, resident_mib, row, write  # noqa: E402
from tests.tiers import docker_problem  # noqa: E402

ROUNDS = 30
GOAL_MS = 150.0
OVER_MS = 80.0  # limit of `mesh --help`, beyond the start of the interpreter
IDLE_MIB, IDLE_PERCENT = 70.0, 0.5
SETTLE_S, IDLE_S, SLICES = 20.0, 60.0, 6


def idle_rows() -> list[dict[str, Any]]:
    """Measure one idle daemon with LAN timings, alone in its mesh, with the process engine, in slices of ten seconds."""
    with Stack(1, overrides={"profile": "lan"}) as stack:
        stack.start_all()
        process = stack.nodes[0].process
        assert process is not None
        time.sleep(SETTLE_S)
        percents, mebibytes = [], []
        for _ in range(SLICES):
            before = cpu_s(process.pid)
            begun = time.monotonic()
            time.sleep(IDLE_S / SLICES)
            percents.append(100 * (cpu_s(process.pid) - before) / (time.monotonic() - begun))
            mebibytes.append(resident_mib(process.pid))
    cpu, memory = statistics.median(percents), max(mebibytes)
    return [
        row("idle daemon, memory", mebibytes, "MiB", goal=f"<= {IDLE_MIB:g} MiB", met=memory <= IDLE_MIB),
        row("idle daemon, CPU of one core", percents, "%", goal=f"<= {IDLE_PERCENT:g} %", met=cpu <= IDLE_PERCENT),
    ]


def main() -> None:
    mesh = str(Path(sys.executable).parent / "mesh")
    with Stack(1) as stack:
        stack.start_all()
        state = str(stack.nodes[0].where.root)
        subjects = {
            "mesh --help": command([mesh, "--help"]),
            "mesh ps": command([mesh, "--state", state, "ps"]),
            "mesh nodes --json": command([mesh, "--state", state, "nodes", "--json"]),
            "python -c pass": command([sys.executable, "-c", "pass"]),
        }
        if shutil.which("docker") and not docker_problem():
            subjects["docker ps"] = command(["docker", "ps"])
        taken = {name: [1000 * s for s in seconds] for name, seconds in interleave(subjects, ROUNDS).items()}
    bare = statistics.median(taken["python -c pass"])
    over = [value - bare for value in taken["mesh --help"]]
    met = statistics.median(over) <= OVER_MS
    rows = [row("mesh --help, beyond python -c pass", over, "ms", goal=f"<= {OVER_MS:g} ms", met=met)]
    for name in ("mesh --help", "mesh ps", "mesh nodes --json"):
        peer = "docker ps" if name != "mesh --help" and "docker ps" in taken else "python -c pass"
        met = statistics.median(taken[name]) < GOAL_MS
        rows.append(row(name, taken[name], "ms", goal=f"< {GOAL_MS:g} ms", met=met, peer=peer, peer_values=taken[peer]))
    rows += idle_rows()
    rows += top.rows()
    write("cli", rows)


if __name__ == "__main__":
    main()

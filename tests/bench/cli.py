"""How fast the command line answers: `mesh --help`, and `mesh ps` against a running daemon, beside a bare interpreter; and what
the daemon takes while it has nothing to do."""

import os
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from mesh.stack import Stack  # noqa: E402
from tests.bench.harness import command, interleave, row, write  # noqa: E402
from tests.tiers import docker_problem  # noqa: E402

ROUNDS = 30
GOAL_MS = 150.0
OVER_MS = 80.0  # of `mesh --help`, beyond what the interpreter itself takes
IDLE_MIB, IDLE_PERCENT = 70.0, 0.5
SETTLE_S, IDLE_S, SLICES = 20.0, 60.0, 6


def idle_rows() -> list[dict[str, Any]]:
    """One daemon of the timings of a LAN, alone in its mesh, with the process engine; in slices of ten seconds."""
    with Stack(1, overrides={"profile": "lan"}) as stack:
        stack.start_all()
        process = stack.nodes[0].process
        assert process is not None
        proc = Path("/proc") / str(process.pid)
        time.sleep(SETTLE_S)
        percents, mebibytes = [], []
        for _ in range(SLICES):
            before = _cpu_s(proc)
            begun = time.monotonic()
            time.sleep(IDLE_S / SLICES)
            percents.append(100 * (_cpu_s(proc) - before) / (time.monotonic() - begun))
            pages = int((proc / "statm").read_text().split()[1])
            mebibytes.append(pages * os.sysconf("SC_PAGE_SIZE") / 2**20)
    cpu, memory = statistics.median(percents), max(mebibytes)
    return [
        row("idle daemon, memory", mebibytes, "MiB", goal=f"<= {IDLE_MIB:g} MiB", met=memory <= IDLE_MIB),
        row("idle daemon, CPU of one core", percents, "%", goal=f"<= {IDLE_PERCENT:g} %", met=cpu <= IDLE_PERCENT),
    ]


def _cpu_s(proc: Path) -> float:
    """User and system time: fields 14 and 15 of proc_pid_stat(5)."""
    fields = (proc / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


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
    write("cli", rows)


if __name__ == "__main__":
    main()

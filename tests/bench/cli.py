"""How fast the command line answers: `mesh --help`, and `mesh ps` against a running daemon, beside a bare interpreter."""

import shutil
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from mesh.stack import Stack  # noqa: E402
from tests.bench.harness import command, interleave, row, write  # noqa: E402
from tests.tiers import docker_problem  # noqa: E402

ROUNDS = 30
GOAL_MS = 150.0


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
    rows = []
    for name in ("mesh --help", "mesh ps", "mesh nodes --json"):
        peer = "docker ps" if name != "mesh --help" and "docker ps" in taken else "python -c pass"
        met = statistics.median(taken[name]) < GOAL_MS
        rows.append(row(name, taken[name], "ms", goal=f"< {GOAL_MS:g} ms", met=met, peer=peer, peer_values=taken[peer]))
    write("cli", rows)


if __name__ == "__main__":
    main()

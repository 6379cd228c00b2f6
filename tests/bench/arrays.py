"""An array whose indices do nothing, on three daemons of this machine: what the mesh itself costs for each index.

Once with a job for each index, and once with jobs that run a batch of them. Beside it, where they are installed: the same array
under Slurm on three nodes (which needs root), and GNU parallel, which only starts processes. All have three places for jobs, and
this machine's cores to themselves, round after round.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from mesh.api.client import Client  # noqa: E402
from mesh.daemon.stack import Stack  # noqa: E402
from mesh.util.processes import descendants_of  # noqa: E402
from tests.bench.cluster import QUICK, Cluster  # noqa: E402
from tests.bench.harness import not_run, row, write  # noqa: E402
from tests.bench.slurm import missing  # noqa: E402
from tests.bench.training import until  # noqa: E402
from tests.netns.lan import Lan  # noqa: E402

NODES = 3
WAIT_S = 900.0
LOOK_S = 0.5
BATCH = 25
GOAL_S, GOAL_CPU_MS = 40.0, 15.0  # for 1,000 indices; of each index
BATCHES, MESH, SLURM, PARALLEL = f"batches of {BATCH}", "mesh", "Slurm", "GNU parallel"


class Cost(NamedTuple):
    """The seconds until the last job has ended, and the milliseconds of CPU of one index."""

    wall_s: float
    cpu_ms: float


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=(BATCHES, MESH, SLURM, PARALLEL), action="append", default=[])
    options = parser.parse_args()
    arms: dict[str, Callable[[int], Cost]] = {BATCHES: partial(mesh, batch=BATCH), MESH: mesh}
    lacks = {}
    if why := missing():
        lacks[SLURM] = why
    else:
        arms[SLURM] = slurm
    if shutil.which("parallel") is None:
        lacks[PARALLEL] = "parallel not installed (Debian: apt-get install parallel)"
    else:
        arms[PARALLEL] = parallel
    if options.only:
        arms = {name: arm for name, arm in arms.items() if name in options.only}
    found: dict[str, list[Cost]] = {name: [] for name in arms}
    for number in range(options.rounds):
        for name, arm in arms.items():
            load = os.getloadavg()[0]
            found[name].append(arm(options.jobs))
            wall_s, cpu_ms = found[name][-1]
            print(
                f"round {number + 1}, {name}: {wall_s:.1f} s, {cpu_ms:.1f} ms of CPU each; load {load:.1f}", flush=True
            )
    write("arrays", report(options.jobs, found, lacks))


def mesh(jobs: int, batch: int = 1) -> Cost:
    with Stack(NODES) as stack:
        stack.start_all()
        pids = [node.process.pid for node in stack.nodes if node.process is not None]
        user = stack.nodes[0].client
        before, begun = cpu_s(pids), time.monotonic()
        order = {"argv": ["true"], "array": list(range(jobs)), "array_batch": batch}
        array = user.post("/v1/jobs", order, timeout_s=WAIT_S)["job"]
        over(user, array)
        cost = Cost(time.monotonic() - begun, 1000 * (cpu_s(pids) - before) / jobs)
        ends = [job["outcome"]["kind"] for job in user.get(f"/v1/jobs?fits={array}", timeout_s=WAIT_S)["jobs"]]
        assert ends == ["done"] * -(-jobs // batch), ends
        return cost


def over(user: Client, array: str) -> None:
    """Wait for the end of all its jobs. A list of them all costs as much as a job does, so few are asked for."""
    while left := user.get(f"/v1/jobs?fits={array}&over=false", timeout_s=WAIT_S)["jobs"]:
        one = left[-1]["job"]
        wait(lambda one=one: user.get(f"/v1/jobs/{one}", timeout_s=WAIT_S)["job"]["outcome"])  # type: ignore[misc]


def slurm(jobs: int) -> Cost:
    """Run the array under Slurm. The CPU of its job steps, which leave the trees of its daemons, is not counted."""
    with tempfile.TemporaryDirectory(prefix="mesh-slurm-") as root, Lan(Path(root)) as lan:
        cluster = Cluster(lan, NODES, shared=True, timings=QUICK, grace_s=10)
        pids = [host.daemon.pid for host in (cluster.control, *cluster.nodes) if host.daemon is not None]
        before, begun = cpu_s(pids), time.monotonic()
        cluster.array(jobs)
        wait(lambda: not cluster.queued())
        return Cost(time.monotonic() - begun, 1000 * (cpu_s(pids) - before) / jobs)


def parallel(jobs: int) -> Cost:
    before, begun = os.times(), time.monotonic()
    words = "".join(f"{number}\n" for number in range(jobs))
    subprocess.run(["parallel", f"-j{NODES}", "true"], input=words, text=True, check=True)
    after = os.times()
    cpu = sum(after[2:4]) - sum(before[2:4])
    return Cost(time.monotonic() - begun, 1000 * cpu / jobs)


def cpu_s(pids: list[int]) -> float:
    """Return the CPU time of processes, of their descendants, and of those that they have reaped (proc_pid_stat(5))."""
    total = 0
    for pid in set(pids).union(*map(descendants_of, pids)):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += sum(map(int, fields[11:15]))
    return total / os.sysconf("SC_CLK_TCK")


def wait(over: Callable[[], object]) -> None:
    until(over, "the array to end", WAIT_S, LOOK_S)


def report(jobs: int, found: dict[str, list[Cost]], lacks: dict[str, str]) -> list[dict[str, Any]]:
    whole, each = f"array of {jobs} times `true` on {NODES} daemons", "CPU of each"
    rows = []
    for name, costs in found.items():
        walls, cpus = [cost.wall_s for cost in costs], [cost.cpu_ms for cost in costs]
        goal_s = GOAL_S * jobs / 1000
        if name in (BATCHES, MESH):
            met = statistics.median(walls) <= goal_s
            rows.append(row(f"{name}: {whole}", walls, "s", goal=f"<= {goal_s:g} s", met=met))
            met = statistics.median(cpus) <= GOAL_CPU_MS
            rows.append(row(f"{name}: {each}", cpus, "ms", goal=f"<= {GOAL_CPU_MS:g} ms", met=met))
        else:
            rows.append(row(f"{name}: {whole}", walls, "s", goal="none: told beside", met=None))
            rows.append(row(f"{name}: {each}", cpus, "ms", goal="none: told beside", met=None))
    rows += [not_run(f"{name}: {whole}", "s", "none: told beside", why) for name, why in lacks.items()]
    return rows


if __name__ == "__main__":
    main()

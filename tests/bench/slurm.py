"""The same training under campus-mesh and under Slurm with preempt-and-requeue, with the same departures in the same run.

In each round three systems run it at once, each on its own machines (network namespaces): a mesh; a Slurm cluster whose nodes
share a directory, from which the training resumes (S1); and one where a requeued job starts over (S0).
docs/explanation/slurm.md discusses the fairness of this comparison. Needs root and Debian's Slurm.
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.bench.cluster import NEEDS, PACKAGES, QUICK, SHIPPED, Cluster  # noqa: E402
from tests.bench.harness import not_run, row, write  # noqa: E402
from tests.bench.training import Kind, Ordeal, Script, System, Trace, endure  # noqa: E402
from tests.e2e.commands import PROJECT, count_digest  # noqa: E402
from tests.netns.lan import Host, Lan, office  # noqa: E402

NODES = 4
GRACE_S = 10
PACE_S = 0.25
SCRIPT: Script = ((8.0, "notice"), (20.0, "killed"), (36.0, "cut"))
KINDS: dict[Kind, str] = {
    "notice": "owner reclaims the machine",
    "killed": "all processes of a machine killed",
    "cut": "a machine cut off",
}
LOST, AGAIN = "work lost", "until it runs elsewhere"
IN_ALL = f"{len(SCRIPT)} departures: all work lost"
LONGER = f"{len(SCRIPT)} departures: extra time over undisturbed"
GOAL = "<= Slurm S1"


class Mesh:
    """A user's machine, which lends nothing, and several lenders."""

    def __init__(self, lan: Lan, nodes: int, *, profile: str) -> None:
        self.settings: dict[str, Any] = {"profile": profile, "lend": True, "slots": 1, "grace_s": float(GRACE_S)}
        self.settings["process_home"] = "shared"  # jobs write their trace to a file beside the nodes' directories
        self.hosts: list[Host] = office(lan, nodes + 1, **self.settings)
        self.hosts[0].client.post("/v1/pause", {"paused": True})

    def submit(self, trace: Trace, steps: int, pace_s: float) -> str:
        order = {
            "argv": [sys.executable, "count.py", str(steps), str(pace_s)],
            "workdir": str(PROJECT),
            "ckpt": "ckpts",
            "ckpt_mode": "rename",
            "env": {"TRACE": str(trace.path)},
        }
        return str(self.hosts[0].client.post("/v1/jobs", order, timeout_s=60)["job"])

    def depart(self, kind: Kind, node: str) -> None:
        host = self._host(node)
        if kind == "notice":
            host.client.post("/v1/reclaim", {"grace_s": float(GRACE_S), "now": False}, timeout_s=60)
        elif kind == "killed":
            host.power_off()
        else:
            host.cut_off()

    def come_back(self, kind: Kind, node: str) -> None:
        host = self._host(node)
        if kind == "notice":
            host.client.post("/v1/pause", {"paused": False})
        elif kind == "killed":
            host.up(**self.settings)
        else:
            host.reconnect()

    def result(self, job: str) -> str:
        user = self.hosts[0].client
        if not user.get(f"/v1/jobs/{job}", timeout_s=60)["job"]["outcome"]:
            return ""
        words = b"".join(user.stream(f"/v1/jobs/{job}/log")).decode().split()
        return words[-1] if words else "nothing"

    def _host(self, name: str) -> Host:
        return next(host for host in self.hosts if host.name == name)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5, help="each about two minutes")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--shipped", action="store_true", help="use the default timings of both, not the shortest: 25 minutes a round"
    )
    options = parser.parse_args()
    why = missing()
    if why:
        single = [f"{words}: {what}" for words in KINDS.values() for what in (LOST, AGAIN)]
        write("slurm", [not_run(measure, "s", GOAL, why) for measure in (*single, IN_ALL, LONGER)])
        return
    ordeals: dict[str, list[Ordeal]] = {}
    for number in range(options.rounds):
        for name, ordeal in one_round(number, options.steps, options.shipped).items():
            ordeals.setdefault(name, []).append(ordeal)
            lost = ", ".join(f"{d.kind} {d.lost_steps} steps {d.still_s:.1f} s" for d in ordeal.departures)
            print(
                f"round {number + 1}, {name}: {lost}; {ordeal.took_s:.1f} s, {ordeal.calm_s:.1f} undisturbed",
                flush=True,
            )
    write("slurm", report(ordeals))


def missing() -> str:
    """Return why this machine cannot run the benchmark; empty if it can."""
    if os.geteuid() != 0:
        return "needs network namespaces: run it as root"
    absent = [name for name in NEEDS if shutil.which(name) is None]
    return f"{', '.join(absent)} not installed (Debian: apt-get install {PACKAGES})" if absent else ""


def one_round(number: int, steps: int, shipped: bool) -> dict[str, Ordeal]:
    """Run all three at once, so that a slow moment hits all alike. Each round departs at another phase between checkpoints."""
    phase = (5, 1, 7, 3, 9)[number % 5]
    digest = count_digest(steps)
    timings = SHIPPED if shipped else QUICK
    with tempfile.TemporaryDirectory(prefix="mesh-slurm-") as root, ExitStack() as stack:
        lans = {}
        for name in ("mesh", "S1", "S0"):
            (Path(root) / name).mkdir()
            lans[name] = stack.enter_context(Lan(Path(root) / name))
        systems: dict[str, System] = {"mesh": Mesh(lans["mesh"], NODES, profile="lan" if shipped else "local")}
        for name in ("S1", "S0"):
            systems[name] = Cluster(lans[name], NODES, shared=name == "S1", timings=timings, grace_s=GRACE_S)

        def run(name: str) -> Ordeal:
            course = {"phase": phase, "steps": steps, "pace_s": PACE_S, "digest": digest}
            return endure(systems[name], lans[name].directory, SCRIPT, **course)  # type: ignore[arg-type]

        with ThreadPoolExecutor(len(systems)) as workers:
            return dict(zip(systems, workers.map(run, systems), strict=True))


# --- the report


def report(ordeals: dict[str, list[Ordeal]]) -> list[dict[str, Any]]:
    rows = []
    for kind, words in KINDS.items():
        met = {name: [d for ordeal in of for d in ordeal.departures if d.kind == kind] for name, of in ordeals.items()}
        lost = {name: [d.lost_steps * PACE_S for d in of] for name, of in met.items()}
        away = {name: [d.still_s for d in of] for name, of in met.items()}
        rows += [*beside(f"{words}: {LOST}", lost), *beside(f"{words}: {AGAIN}", away)]
    in_all = {name: [PACE_S * sum(d.lost_steps for d in o.departures) for o in of] for name, of in ordeals.items()}
    # The undisturbed time is a property of the training, so the shortest of the three is the least disturbed.
    calm = [min(ordeal.calm_s for ordeal in of) for of in zip(*ordeals.values(), strict=True)]
    longer = {name: [o.took_s - c for o, c in zip(of, calm, strict=True)] for name, of in ordeals.items()}
    rows += [*beside(IN_ALL, in_all), *beside(LONGER, longer)]
    for name, of in ordeals.items():
        right = [100.0 * o.right for o in of]
        moves = [float(o.unasked) for o in of]
        rows.append(row(f"{name}: result equal to an undisturbed one", right, "%", goal="100 %", met=min(right) == 100))
        rows.append(row(f"{name}: moves without a departure", moves, "", goal="0", met=max(moves) == 0))
    return rows


def beside(measure: str, values: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Return rows of the mesh against the best Slurm variant, then each Slurm variant alone."""
    peers = {f"Slurm {name}": of for name, of in values.items() if name != "mesh"}
    said = ", ".join(f"{name} {statistics.median(of):.3g}" for name, of in peers.items())
    good = statistics.median(values["mesh"]) <= statistics.median(values["S1"])
    ours = row(measure, values["mesh"], "s", goal=GOAL, met=good, peer=said, peer_values=values["S1"])
    return [ours, *(row(f"{name}, {measure}", of, "s", goal="-", met=None) for name, of in peers.items())]


if __name__ == "__main__":
    main()

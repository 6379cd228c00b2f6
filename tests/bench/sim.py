"""`make bench-sim`: speed of the simulator, beside SimPy, and its results for the policies; writes build/bench/sim.json.

Times are CPU time, which other load changes little. `--seeds N` and `--quick` shorten it.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from typing import Any

from tests.bench.harness import ROOT, not_run, row, write
from tests.bench.studies import closed_form_rows, executor_rows, import_rows, python_rows, sweep_rows

NODES, DAYS = 500, 30
ROUNDS = 5
SWEEP_SEEDS = 30
MEAN_AWAY_S, TICK_S = (
    7200.0,
    600.0,
)  # the churn model: Weibull stays, exponential absences, a checkpoint each ten minutes
SHAPE, SCALE_S = 0.57, 5.55 * 3600.0  # fitted to 1,266 stays of a university cluster


def churn_here(nodes: int, days: float) -> tuple[int, float]:
    """Return the number of events, and the work in seconds that departures cost."""
    from sim.kernel import Kernel, Streams

    kernel, streams = Kernel(), Streams(1)
    post = kernel.post
    lost, stale = 0.0, 0

    class Node:
        __slots__ = ("epoch", "last", "stream")

        def __init__(self, number: int) -> None:
            self.stream = streams.get(str(number), "churn")
            self.epoch = 0
            self.last = 0.0
            self.come()

        def come(self) -> None:
            self.last = kernel.now
            post(self.stream.weibullvariate(SCALE_S, SHAPE), self.go)
            post(TICK_S, self.tick, self.epoch)

        def tick(self, epoch: int) -> None:
            nonlocal stale
            if epoch != self.epoch:
                stale += 1
                return
            self.last = kernel.now
            post(TICK_S, self.tick, epoch)

        def go(self) -> None:
            nonlocal lost
            lost += kernel.now - self.last
            self.epoch += 1
            post(self.stream.expovariate(1 / MEAN_AWAY_S), self.come)

    for number in range(nodes):
        Node(number)
    kernel.run(days * 86_400.0)
    return kernel.executed - stale, lost


def churn_simpy(nodes: int, days: float) -> tuple[int, float]:
    """Run the same model in SimPy as its documentation suggests: processes and interrupts."""
    import simpy

    from sim.kernel import Streams

    streams = Streams(1)
    environment = simpy.Environment()
    lost, events = 0.0, 0

    def work(last: list[float]) -> Any:
        nonlocal events
        try:
            while True:
                yield environment.timeout(TICK_S)
                events += 1
                last[0] = environment.now
        except simpy.Interrupt:
            return

    def node(number: int) -> Any:
        nonlocal lost, events
        stream = streams.get(str(number), "churn")
        while True:
            last = [environment.now]
            stay = stream.weibullvariate(SCALE_S, SHAPE)
            working = environment.process(work(last))
            yield environment.timeout(stay)
            events += 1
            lost += environment.now - last[0]
            working.interrupt()
            yield environment.timeout(stream.expovariate(1 / MEAN_AWAY_S))
            events += 1

    for number in range(nodes):
        environment.process(node(number))
    environment.run(until=days * 86_400.0)
    return events, lost


def replication(world: str, policy: str, changes: list[str]) -> tuple[int, float]:
    from sim.campus.policies import POLICIES
    from sim.campus.replication import replicate
    from sim.campus.world_files import find_world

    result = replicate(find_world(world, changes), POLICIES[policy], 1)
    return result.events, result.metrics["lost"]


def measure(what: str) -> None:
    """Measure in a separate process, for its own memory: events, result, CPU seconds, MiB."""
    name, _, rest = what.partition(" ")
    begun = time.process_time()
    if name == "here":
        events, answer = churn_here(NODES, DAYS)
    elif name == "simpy":
        events, answer = churn_simpy(NODES, DAYS)
    else:
        world, policy, *changes = rest.split()
        events, answer = replication(world, policy, changes)
    spent = time.process_time() - begun
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"events": events, "answer": answer, "cpu_s": spent, "rss_mib": memory}))


def measured(what: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.sim", "--measure", what],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def kernel_rows(rounds: int) -> list[dict[str, Any]]:
    title = f"kernel, churn of {NODES} nodes for {DAYS} days"
    try:
        import simpy  # noqa: F401
    except ImportError:
        beside = False
    else:
        beside = True
    ours: list[dict[str, float]] = []
    theirs: list[dict[str, float]] = []
    for _ in range(rounds):  # in turns, so that a slow moment hits both
        ours.append(measured("here"))
        if beside:
            theirs.append(measured("simpy"))
    speed = [run["events"] / run["cpu_s"] for run in ours]
    rows = []
    if theirs:
        assert all(abs(run["answer"] - ours[0]["answer"]) < 1e-3 for run in theirs), "the two models differ"
        ratio = [their["cpu_s"] / our["cpu_s"] for our, their in zip(ours, theirs, strict=True)]
        rows.append(
            row(
                title,
                speed,
                "events/s of CPU",
                goal=">= 1.2 x SimPy",
                met=sorted(ratio)[len(ratio) // 2] >= 1.2,
                peer="SimPy",
                peer_values=[run["events"] / run["cpu_s"] for run in theirs],
            )
        )
        rows.append(
            row(
                f"{title}: SimPy's time over this kernel's",
                ratio,
                "x",
                goal=">= 1.2",
                met=sorted(ratio)[rounds // 2] >= 1.2,
            )
        )
    else:
        rows.append(row(title, speed, "events/s of CPU", goal=">= 1.2 x SimPy", met=None))
        rows.append(not_run(f"{title}: beside SimPy", "x", ">= 1.2", "SimPy is not installed (pip install simpy)"))
    memory = [run["rss_mib"] for run in ours]
    rows.append(row(f"{title}: memory", memory, "MiB", goal="< 60", met=max(memory) < 60))
    return rows


TIMES = "groups.0.count={} groups.1.count={} groups.2.count={} groups.3.count={}"
# world, policy, changes, limit in seconds, slow
RUNS = (
    ("reclaimnet-54", "mesh", "", 5.0, False),
    ("reclaimnet-54", "gpunion", "", 5.0, False),
    ("campus-500", "mesh", "", 60.0, True),
    ("campus-500", "gpunion", "", 60.0, True),
    # The same number of jobs for all, so that memory depends on the machines only.
    ("campus-500", "mesh", "days=7", None, True),
    ("campus-500", "mesh", f"{TIMES.format(480, 360, 100, 60)} days=7", None, True),
    ("campus-500", "mesh", f"{TIMES.format(2400, 1800, 500, 300)} days=7", None, True),
)


def run_rows(quick: bool, rounds: int) -> list[dict[str, Any]]:
    from sim.campus.world_files import find_world

    rows = []
    for world, policy, changes, limit, slow in RUNS:
        if quick and slow:
            continue
        found = [measured(f"run {world} {policy} {changes}") for _ in range(1 if slow else rounds)]
        size = f" with {find_world(world, changes.split()).machines} machines, 7 days" if changes else ""
        name = f"{world}{size}, one replication of {policy}"
        spent = [run["cpu_s"] for run in found]
        goal = "finishes" if limit is None else f"<= {limit:g}"
        rows.append(
            row(name, spent, "s of CPU", goal=goal, met=limit is None or sorted(spent)[len(spent) // 2] <= limit)
        )
        speed = [run["events"] / run["cpu_s"] for run in found]
        rows.append(row(f"{name}: speed", speed, "events/s of CPU", goal=">= 150000", met=min(speed) >= 150_000))
        rows.append(row(f"{name}: memory", [run["rss_mib"] for run in found], "MiB", goal="none", met=None))
    return rows


def claim_rows(seeds: int) -> list[dict[str, Any]]:
    """Return the table of claims; the values of a row are the ends of its interval."""
    done = subprocess.run(
        [sys.executable, "-m", "mesh.cli", "debug", "sim", "claims", "--seeds", str(seeds), "--json"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    rows = []
    for claim in json.loads(done.stdout)["rows"]:
        met = {"met": True, "not met": False}.get(claim["verdict"])
        line = row(
            f"{claim['source']}: {claim['claim']} ({claim['world']})",
            [claim["value"]],
            "share",
            goal=claim["verdict"] + (f"; {claim['caveat']}" if claim["differs"] else ""),
            met=met,
        )
        rows.append({**line, "min": round(claim["low"], 4), "max": round(claim["high"], 4), "n": claim["n"]})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--seeds", type=int, default=30, help="replications for the table of claims; 0 leaves it out")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--quick", action="store_true", help="without the runs of 500 and 5,000 machines")
    parser.add_argument("--python", action="append", default=[], help="another Python whose digests must be the same")
    options = parser.parse_args()
    if options.measure:
        measure(options.measure)
        return
    rows = [*kernel_rows(options.rounds), *run_rows(options.quick, min(3, options.rounds))]
    rows += [*import_rows(options.rounds), *closed_form_rows(), *executor_rows(), *python_rows(options.python)]
    rows += sweep_rows(2 if options.quick else SWEEP_SEEDS)
    if options.seeds:
        rows += claim_rows(options.seeds)
    write("sim", rows)


if __name__ == "__main__":
    main()

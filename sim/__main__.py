"""`python -m sim membership|jobs --seed N`: run one protocol world in virtual time. Prints the seed first, the digest last.

`membership` runs membership alone, `jobs` adds jobs; both under the faults that the seed draws, with all checkers.
"""

import argparse
import time
from collections import Counter

from sim.protocol.job_checkers import all_job_checkers
from sim.protocol.jobs import JobsWorld
from sim.protocol.membership import MembershipWorld
from sim.protocol.membership_checkers import all_checkers


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m sim", description="Run one protocol world in virtual time.")
    parser.add_argument("world", choices=["membership", "jobs"])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--nodes", type=int, help="default: 20; drawn from the seed with jobs")
    parser.add_argument("--jobs", type=int, default=6)
    parser.add_argument("--minutes", type=float, help="virtual minutes of the run; default: 30; 10 with jobs")
    options = parser.parse_args()
    print(f"SEED={options.seed}", flush=True)
    if options.world == "membership":
        run_membership(options.seed, options.nodes or 20, options.minutes or 30.0)
    else:
        run_jobs(options.seed, options.nodes, options.minutes or 10.0, options.jobs)


def run_membership(seed: int, nodes: int, minutes: float) -> None:
    world = MembershipWorld(seed, nodes=nodes, minutes=minutes, checkers=all_checkers())
    print(f"faults {world.faults}")
    started = time.monotonic()
    digest = world.run()
    took = time.monotonic() - started
    print(
        f"{world.kernel.executed} events in {took:.1f} s ({minutes * 60 / took:.0f} x real time), {world.incidents} incidents, "
        f"{world.exchanges} exchanges, {world.broken_exchanges} of them broken off"
    )
    print(f"digest {digest}")


def run_jobs(seed: int, nodes: int | None, minutes: float, count: int) -> None:
    world = JobsWorld(seed, nodes=nodes, minutes=minutes, jobs=count, job_checkers=all_job_checkers())
    print(f"{len(world.nodes)} nodes of {world.mesh}")
    print(f"faults {world.faults}")
    started = time.monotonic()
    digest = world.run()
    ends = Counter(world.outcome(job) or "lost" for job in world.accepted)
    print(
        f"{world.kernel.executed} events in {time.monotonic() - started:.1f} s, {world.incidents} incidents, "
        f"{world.steps} guest steps, {world.commits} commits, {world.returns} migrations back; jobs: {dict(sorted(ends.items()))}"
    )
    print(f"digest {digest}")


if __name__ == "__main__":
    main()

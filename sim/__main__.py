"""`python -m sim jobs|gossip --seed N`: one run of the mesh in virtual time. Prints the seed first, the digest last.

`jobs` runs whole nodes with jobs, `gossip` membership alone under the full menu of faults.
"""

import argparse
import time

from sim.gossip import GossipWorld
from sim.world import World


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m sim")
    parser.add_argument("what", choices=["jobs", "gossip"])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--nodes", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=6)
    parser.add_argument("--until", type=float, default=400.0, help="virtual seconds (jobs)")
    parser.add_argument("--minutes", type=float, default=30.0, help="virtual minutes (gossip)")
    options = parser.parse_args()
    print(f"SEED={options.seed}", flush=True)
    if options.what == "gossip":
        gossip(options.seed, options.nodes, options.minutes)
    else:
        jobs(options)


def gossip(seed: int, nodes: int, minutes: float) -> None:
    world = GossipWorld(seed, nodes=nodes, minutes=minutes)
    print(f"mix {world.mix}")
    begun = time.monotonic()
    digest = world.run()
    took = time.monotonic() - begun
    print(
        f"{world.kernel.executed} events in {took:.1f} s ({minutes * 60 / took:.0f} times real time), "
        f"{world.strikes} strikes, {world.conversations} push-pulls of which {world.broken_conversations} broke off"
    )
    print(f"digest {digest}")


def jobs(options: argparse.Namespace) -> None:
    begun = time.monotonic()
    world = World(options.seed, nodes=options.nodes, jobs=options.jobs)
    digest = world.run(options.until)
    ends = {job.hex()[:8]: sorted(kinds) for job, kinds in world.outcomes().items()}
    print(
        f"{world.kernel.executed} events in {time.monotonic() - begun:.1f} s, {world.invariants.commits} commits, {ends}"
    )
    print(f"digest {digest}")


if __name__ == "__main__":
    main()

"""`python -m sim jobs|gossip --seed N`: one run of the mesh in virtual time. Prints the seed first, the digest last.

`gossip` is membership alone, `jobs` has jobs on it; both under the full menu of faults.
"""

import argparse
import time
from collections import Counter

from sim.gossip import GossipWorld
from sim.world import World


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m sim")
    parser.add_argument("what", choices=["jobs", "gossip"])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--nodes", type=int, help="default 20; 12 with jobs")
    parser.add_argument("--jobs", type=int, default=6)
    parser.add_argument("--minutes", type=float, help="of faults and healing, virtual; default 30; 10 with jobs")
    options = parser.parse_args()
    print(f"SEED={options.seed}", flush=True)
    if options.what == "gossip":
        gossip(options.seed, options.nodes or 20, options.minutes or 30.0)
    else:
        jobs(options.seed, options.nodes or 12, options.minutes or 10.0, options.jobs)


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


def jobs(seed: int, nodes: int, minutes: float, count: int) -> None:
    world = World(seed, nodes=nodes, minutes=minutes, jobs=count)
    print(f"mix {world.mix}")
    begun = time.monotonic()
    digest = world.run()
    ends = Counter(world.outcome(job) or "nothing is left" for job in world.accepted)
    print(
        f"{world.kernel.executed} events in {time.monotonic() - begun:.1f} s, {world.strikes} strikes, "
        f"{world.steps} steps of guests, {world.commits} commits, {world.returns} returns home; "
        f"jobs: {dict(sorted(ends.items()))}"
    )
    print(f"digest {digest}")


if __name__ == "__main__":
    main()

"""`python -m sim --seed N`: one run of the mesh in virtual time. Prints the seed first, the digest last."""

import argparse
import time

from sim.world import World


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m sim")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--nodes", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=6)
    parser.add_argument("--until", type=float, default=400.0, help="virtual seconds")
    options = parser.parse_args()
    print(f"SEED={options.seed}", flush=True)
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

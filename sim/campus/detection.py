"""How long a mesh takes to know that a machine is gone without a word: measured in the membership protocol's own simulation.

`python -m sim.campus.detection` measures anew, and writes `detection.json` beside this file, which campus studies load.
"""

from functools import cache
from pathlib import Path

import msgspec

FILE = Path(__file__).with_name("detection.json")
STEPS = 20  # of the quantiles, from the least to the most
NODES, SEEDS = 20, 100
SETTLE_S, LOOK_S, LIMIT_S = 40.0, 0.05, 60.0
LOSS = 0.01


class Detected(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds from a power cut until half of the others hold the machine present no more."""

    how: str
    n: int
    quantiles_s: tuple[float, ...]


@cache
def quantiles_s() -> tuple[float, ...]:
    return msgspec.json.decode(FILE.read_bytes(), type=Detected).quantiles_s


def measure(seeds: int = SEEDS) -> Detected:
    found = sorted(detected_after_s(seed) for seed in range(seeds))
    quantiles = tuple(round(found[round(step / STEPS * (len(found) - 1))], 3) for step in range(STEPS + 1))
    how = f"membership cores, {NODES} nodes, lan timings, {LOSS:.0%} loss, one machine without power"
    return Detected(how, seeds, quantiles)


def detected_after_s(seed: int) -> float:
    from sim.gossip import GossipWorld
    from sim.mix import Mix

    world = GossipWorld(seed, nodes=NODES, mix=Mix(loss=LOSS), checkers=())
    world.begin()
    rng = world.streams.get("world", "detection")
    world.kernel.run(SETTLE_S + rng.uniform(0.0, 5.0))
    victim = rng.choice(world.nodes)
    victim.dark = True
    victim.crash()
    begun = world.kernel.now
    others = [node for node in world.nodes if node is not victim]

    def known(by: int = len(others) // 2) -> bool:
        members = (node.core.swim.table.get(victim.id) for node in others)
        return sum(member is None or not member.present for member in members) >= by

    while not known():
        if world.kernel.now - begun > LIMIT_S:
            raise AssertionError(f"not detected within {LIMIT_S:g} s: seed {seed}")
        world.kernel.run(world.kernel.now + LOOK_S)
    return world.kernel.now - begun


if __name__ == "__main__":
    FILE.write_bytes(msgspec.json.format(msgspec.json.encode(measure())) + b"\n")
    print(FILE.read_text())

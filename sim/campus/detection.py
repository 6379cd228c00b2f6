"""Detection delays of sudden departures, measured in the simulation of the membership protocol.

`python -m sim.campus.detection` repeats the measurement and writes `detection.json` beside this file, which campus studies load.
"""

from functools import cache
from pathlib import Path

import msgspec

FILE = Path(__file__).with_name("detection.json")
STEPS = 20  # between the quantiles, from minimum to maximum
NODES, SEEDS = 20, 100
SETTLE_S, OBSERVE_S, LIMIT_S = 40.0, 0.05, 60.0
LOSS = 0.01


class Detected(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Quantiles of the seconds from a power cut until half of the other nodes no longer see the machine."""

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
    from sim.protocol.faults import FaultPlan
    from sim.protocol.membership import MembershipWorld

    world = MembershipWorld(seed, nodes=NODES, faults=FaultPlan(loss=LOSS), checkers=())
    world.begin()
    rng = world.streams.get("world", "detection")
    world.kernel.run(SETTLE_S + rng.uniform(0.0, 5.0))
    victim = rng.choice(world.nodes)
    victim.powered_off = True
    victim.crash()
    begun = world.kernel.now
    others = [node for node in world.nodes if node is not victim]

    def known(by: int = len(others) // 2) -> bool:
        members = (node.core.swim.table.get(victim.id) for node in others)
        return sum(member is None or not member.present for member in members) >= by

    while not known():
        if world.kernel.now - begun > LIMIT_S:
            raise AssertionError(f"not detected within {LIMIT_S:g} s: seed {seed}")
        world.kernel.run(world.kernel.now + OBSERVE_S)
    return world.kernel.now - begun


if __name__ == "__main__":
    FILE.write_bytes(msgspec.json.format(msgspec.json.encode(measure())) + b"\n")
    print(FILE.read_text())

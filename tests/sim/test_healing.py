"""The classical failures of SWIM in the field, by name, in virtual time on the production core."""

import pytest

from membership.config import SwimConfig
from membership.search import Search
from membership.swim import Swim
from sim.gossip import GossipNode, GossipWorld
from sim.mix import Mix

QUIET = Mix(loss=0.05, drift=0.01, until_s=1e9)
NODES = 20


def make_world(seed: int) -> GossipWorld:
    world = GossipWorld(seed, nodes=NODES, mix=QUIET, config=SwimConfig.local(), checkers=())
    world.begin(spread_s=1.0)
    world.kernel.run(30.0)
    assert agreed(world), f"SEED={seed}: they never met"
    return world


def seen(node: GossipNode) -> set[bytes]:
    return {member.node for member in node.core.swim.table.present()}


def agreed(world: GossipWorld) -> bool:
    up = {node.id for node in world.nodes if node.up}
    return all(seen(node) == up for node in world.nodes if node.up)


def until_agreed(world: GossipWorld, within_s: float) -> float:
    """Virtual seconds until all see all; fails with the seed."""
    begun = world.kernel.now
    while not agreed(world):
        world.kernel.run(world.kernel.now + 0.5)
        assert world.kernel.now - begun <= within_s, f"SEED={world.seed}: no agreement within {within_s} s"
    return world.kernel.now - begun


def cut(world: GossipWorld, share: float, for_s: float) -> None:
    side = frozenset(node.id for node in world.nodes[: int(NODES * share)])
    everybody = [node.id for node in world.nodes]
    world.cuts.append({(one, other) for one in everybody for other in everybody if (one in side) != (other in side)})
    world.kernel.run(world.kernel.now + for_s)
    for node in world.nodes:
        mine = side if node.id in side else {other.id for other in world.nodes} - side
        assert seen(node) == mine, f"SEED={world.seed}: the sides are not dead to each other yet"
    world.cuts.clear()


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("share", [0.05, 0.4])
def test_a_partition_heals_though_both_sides_are_long_dead_to_each_other(seed: int, share: float) -> None:
    """memberlist issue 222: a node cut off for minutes never came back by itself."""
    world = make_world(seed)
    cut(world, share, for_s=300.0)
    assert until_agreed(world, within_s=35.0) > 0


def test_without_knocking_at_the_dead_it_would_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control; nor does anybody who has company look for strangers, which would be a second way back."""
    monkeypatch.setattr(Swim, "_reconcile_with_one", lambda self, members, unless_equal, now: [])
    searched = Search.next
    monkeypatch.setattr(
        Search, "next", lambda self, present: searched(self, present) if len(present) <= 1 else ([], 15.0)
    )
    world = make_world(1)
    cut(world, 0.4, for_s=300.0)
    with pytest.raises(AssertionError, match="no agreement"):
        until_agreed(world, within_s=300.0)


@pytest.mark.parametrize("seed", range(10))
def test_a_mass_restart_converges(seed: int) -> None:
    """memberlist issue 311: the reborn are accused for what their former lives left behind."""
    world = make_world(seed)
    rng = world.streams.get("test", "restart")
    for node in world.nodes:
        world.kernel.after(rng.uniform(0.0, 3.0), node.crash)
        world.kernel.after(rng.uniform(4.0, 20.0), node.start)
    world.kernel.run(world.kernel.now + 20.0)
    until_agreed(world, within_s=30.0)


@pytest.mark.parametrize("seed", range(5))
def test_a_crash_is_known_to_all_soon_and_nobody_else_is_accused(seed: int) -> None:
    world = make_world(seed)
    world.nodes[7].crash()
    took = until_agreed(world, within_s=15.0)
    assert took <= 6.0, f"SEED={seed}: {took} s"
    world.kernel.run(world.kernel.now + 120.0)
    assert agreed(world), f"SEED={seed}: a healthy node was given up under 5 % loss"

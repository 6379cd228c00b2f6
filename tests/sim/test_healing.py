"""Known field failures of SWIM implementations, replayed in virtual time on the production core."""

import pytest

from membership.bootstrap import Bootstrap
from membership.config import SwimConfig
from membership.swim import Swim
from sim.protocol.faults import FaultPlan
from sim.protocol.membership import MembershipNode, MembershipWorld
from tests.sim.seeds import seeds

QUIET = FaultPlan(loss=0.05, drift=0.01, until_s=1e9)
NODES = 20


def make_world(seed: int) -> MembershipWorld:
    world = MembershipWorld(seed, nodes=NODES, faults=QUIET, config=SwimConfig.local(), checkers=())
    world.begin(spread_s=1.0)
    world.kernel.run(30.0)
    assert agreed(world), f"SEED={seed}: they never met"
    return world


def seen(node: MembershipNode) -> set[bytes]:
    return {member.node for member in node.core.swim.table.present()}


def agreed(world: MembershipWorld) -> bool:
    up = {node.id for node in world.nodes if node.up}
    return all(seen(node) == up for node in world.nodes if node.up)


def until_agreed(world: MembershipWorld, within_s: float) -> float:
    """Return the virtual seconds until all nodes see each other; fail with the seed after `within_s`."""
    begun = world.kernel.now
    while not agreed(world):
        world.kernel.run(world.kernel.now + 0.5)
        assert world.kernel.now - begun <= within_s, f"SEED={world.seed}: no agreement within {within_s} s"
    return world.kernel.now - begun


def cut(world: MembershipWorld, share: float, for_s: float) -> None:
    side = frozenset(node.id for node in world.nodes[: int(NODES * share)])
    everybody = [node.id for node in world.nodes]
    world.cuts.append({(one, other) for one in everybody for other in everybody if (one in side) != (other in side)})
    world.kernel.run(world.kernel.now + for_s)
    for node in world.nodes:
        mine = side if node.id in side else {other.id for other in world.nodes} - side
        assert seen(node) == mine, f"SEED={world.seed}: the sides are not dead to each other yet"
    world.cuts.clear()


@pytest.mark.parametrize("seed", seeds(1, 10))
@pytest.mark.parametrize("share", [0.05, 0.4])
def test_partition_heals_after_both_sides_declared_each_other_dead(seed: int, share: float) -> None:
    """memberlist issue 222: a node that was partitioned for minutes never rejoined."""
    world = make_world(seed)
    cut(world, share, for_s=300.0)
    assert until_agreed(world, within_s=35.0) > 0


@pytest.mark.slow
def test_partition_does_not_heal_without_reconciling_with_the_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A negative control. Discovery is off for nodes that have peers, because it would heal the partition too."""
    monkeypatch.setattr(Swim, "_reconcile_with_one", lambda self, members, unless_equal, now: [])
    searched = Bootstrap.next
    monkeypatch.setattr(
        Bootstrap, "next", lambda self, present: searched(self, present) if len(present) <= 1 else ([], 15.0)
    )
    world = make_world(1)
    cut(world, 0.4, for_s=300.0)
    with pytest.raises(AssertionError, match="no agreement"):
        until_agreed(world, within_s=300.0)


@pytest.mark.parametrize("seed", seeds(4, 10))
def test_mass_restart_converges(seed: int) -> None:
    """memberlist issue 311: restarted nodes were accused because of rumours about their earlier runs."""
    world = make_world(seed)
    rng = world.streams.get("test", "restart")
    for node in world.nodes:
        world.kernel.after(rng.uniform(0.0, 3.0), node.crash)
        world.kernel.after(rng.uniform(4.0, 20.0), node.start)
    world.kernel.run(world.kernel.now + 20.0)
    until_agreed(world, within_s=30.0)


@pytest.mark.parametrize("seed", seeds(2, 5))
def test_crash_is_known_to_all_and_no_other_node_is_accused(seed: int) -> None:
    world = make_world(seed)
    world.nodes[7].crash()
    took = until_agreed(world, within_s=15.0)
    assert took <= 6.0, f"SEED={seed}: {took} s"
    world.kernel.run(world.kernel.now + 120.0)
    assert agreed(world), f"SEED={seed}: a healthy node was given up under 5 % loss"

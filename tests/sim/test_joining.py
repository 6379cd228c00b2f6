"""Many nodes that start within seconds: the node that a newcomer joins by tells the other members about it."""

import pytest

from sim.protocol.faults import FaultPlan
from sim.protocol.membership import MembershipWorld
from sim.protocol.membership_checkers import all_checkers

QUIET = FaultPlan(loss=0.0, news_every_s=0.0, until_s=1e9)
WITHIN_S = 1.0  # of virtual time; by rumours and push-pulls alone it takes two to five


@pytest.mark.parametrize(
    ("nodes", "spread_s", "seed"),
    [(60, 0.5, 1), (60, 5.0, 2), (60, 20.0, 3), pytest.param(120, 10.0, 4, marks=pytest.mark.slow)],
)
def test_all_know_all_within_a_second_of_the_last_start(nodes: int, spread_s: float, seed: int) -> None:
    world = MembershipWorld(seed, nodes=nodes, faults=QUIET, checkers=all_checkers())
    for number, node in enumerate(world.nodes):  # the first two are the seeds of the others
        world.kernel.at(0.0 if number < 2 else 1.0 + spread_s * number / nodes, node.start)
    world.kernel.run(1.0 + spread_s)
    assert all(node.up for node in world.nodes)
    world.until(lambda: all(node.core.swim.table.present_count == nodes for node in world.nodes), WITHIN_S, "M8")

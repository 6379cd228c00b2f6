"""Max-min shares against closed forms, and incremental sharing against sharing all flows at once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.campus.network import BACKGROUND_FLOWS, Demand, Flow, Link, Network, Path, max_min
from sim.kernel import Kernel


def path(*links: int) -> tuple[tuple[int, float], ...]:
    return tuple((link, 1.0) for link in links)


@pytest.mark.parametrize(
    ("demands", "capacities", "rates"),
    [
        ([Demand(path(0))], [10], [10]),
        ([Demand(path(0)), Demand(path(0))], [10], [5, 5]),
        # Parking lot: one long flow over two links, and a short flow on each.
        ([Demand(path(0, 1)), Demand(path(0)), Demand(path(1))], [10, 20], [5, 5, 15]),
        # After Bertsekas and Gallager, figure 6.13: the narrow link limits some flows, the others share the rest.
        ([Demand(path(0)), Demand(path(0, 1)), Demand(path(1)), Demand(path(1))], [12, 9], [9, 3, 3, 3]),
        ([Demand(path(0), 2.0), Demand(path(0), 1.0)], [9], [6, 3]),
        ([Demand(path(0), 1.0, 2.0), Demand(path(0))], [10], [2, 8]),
        # Two copies leave through one port, which they cross twice.
        ([Demand(((0, 2.0), (1, 1.0), (2, 1.0)))], [10, 10, 10], [5]),
        ([Demand(((0, 2.0), (1, 1.0))), Demand(path(0))], [9, 100], [3, 3]),
        ([Demand(path(0), 1.0, 0.0), Demand(path(0))], [7], [0, 7]),
    ],
)
def test_shares_match_closed_forms(demands: list[Demand], capacities: list[float], rates: list[float]) -> None:
    assert max_min(demands, capacities) == pytest.approx(rates)


@st.composite
def scenes(draw: st.DrawFn) -> tuple[list[Demand], list[float]]:
    count = draw(st.integers(1, 5))
    capacities = [draw(st.integers(1, 50)) * 1.0 for _ in range(count)]
    demands = []
    for _ in range(draw(st.integers(1, 7))):
        links = draw(st.sets(st.integers(0, count - 1), min_size=1))
        uses = tuple((link, float(draw(st.integers(1, 2)))) for link in sorted(links))
        demands.append(Demand(uses, float(draw(st.integers(1, 3))), float(draw(st.integers(1, 60)))))
    return demands, capacities


@given(scenes())
def test_shares_are_max_min_fair(scene: tuple[list[Demand], list[float]]) -> None:
    demands, capacities = scene
    rates = max_min(demands, capacities)
    load = [0.0] * len(capacities)
    for demand, rate in zip(demands, rates, strict=True):
        assert 0 <= rate <= demand.limit + 1e-9
        for link, uses in demand.path:
            load[link] += uses * rate
    assert all(used <= capacity * (1 + 1e-6) for used, capacity in zip(load, capacities, strict=True))
    for demand, rate in zip(demands, rates, strict=True):
        if rate >= demand.limit - 1e-6:
            continue
        bottlenecks = [link for link, _ in demand.path if load[link] >= capacities[link] * (1 - 1e-6)]
        levels = [
            max(r / d.weight for d, r in zip(demands, rates, strict=True) if link in dict(d.path))
            for link in bottlenecks
        ]
        assert any(rate / demand.weight >= level - 1e-6 for level in levels)


@settings(max_examples=60)
@given(st.data())
def test_incremental_sharing_equals_sharing_all_flows(data: st.DataObject) -> None:
    """After each start, end and change of other traffic, all rates equal the max-min shares."""
    kernel = Kernel()
    network = Network(kernel)
    links = [Link(f"l{n}", float(data.draw(st.integers(1, 20)))) for n in range(4)]
    flows: list[Flow] = []
    for _ in range(data.draw(st.integers(1, 15))):
        step = data.draw(st.sampled_from(["start", "start", "stop", "demand", "wait"]))
        if step == "start":
            chosen = data.draw(st.sets(st.integers(0, 3), min_size=1))
            uses = [(links[n], float(data.draw(st.integers(1, 2)))) for n in sorted(chosen)]
            count = float(data.draw(st.integers(1, 1000)))
            flow = network.start(Path(uses), count, lambda: None, data.draw(st.booleans()))
            flow.done = lambda flow=flow: flows.remove(flow)  # type: ignore[misc]
            flows.append(flow)
        elif step == "stop" and flows:
            network.stop(flows.pop(data.draw(st.integers(0, len(flows) - 1))))
        elif step == "demand":
            network.set_demand(links[data.draw(st.integers(0, 3))], float(data.draw(st.integers(0, 25))))
        else:
            kernel.run(kernel.now + data.draw(st.floats(0.01, 50)))
        rates, short = _all_at_once(flows, links)
        assert [flow.rate for flow in flows] == pytest.approx(rates, rel=1e-6, abs=1e-6)
        for link, missing in zip(links, short, strict=True):
            if any(not flow.yields for flow in link.flows):
                assert link.short == pytest.approx(max(0.0, missing), rel=1e-6, abs=1e-6)
            elif not link.flows:
                assert link.short == 0.0


def _all_at_once(flows: list[Flow], links: list[Link]) -> tuple[list[float], list[float]]:
    """Return all rates, and the rate that other traffic lacks on each link."""
    number = {link: place for place, link in enumerate(links)}
    left = [link.capacity for link in links]
    own = [Demand(((place, 1.0),), BACKGROUND_FLOWS, link.demand) for place, link in enumerate(links)]
    rates = dict.fromkeys(flows, 0.0)
    short = [0.0] * len(links)
    for yields in (False, True):
        these = [flow for flow in flows if flow.yields == yields]
        demands = [Demand(tuple((number[k], u) for k, u in flow.path), 1.0, flow.peak) for flow in these]
        beside = own if not yields else []
        found = max_min([*demands, *beside], left)
        for demand, rate in zip([*demands, *beside], found, strict=True):
            for link, uses in demand.path:
                left[link] = max(0.0, left[link] - uses * rate)
        rates |= dict(zip(these, found, strict=False))
        if not yields:
            got = found[len(these) :]
            short = [min(link.demand, link.capacity) - had for link, had in zip(links, got, strict=True)]
    return [rates[flow] for flow in flows], short


def test_bytes_arrive_at_the_time_of_their_shares() -> None:
    """Two flows of 100 and 300 bytes on a link of 10: both at 5 until the first ends at 20; the other ends at 40."""
    kernel, network, seen = Kernel(), None, []
    network = Network(kernel)
    link = Link("wire", 10.0, carried={})
    network.start(Path([(link, 1.0)]), 100.0, lambda: seen.append(("short", kernel.now)), False)
    network.start(Path([(link, 1.0)]), 300.0, lambda: seen.append(("long", kernel.now)), False)
    kernel.run(1000.0)
    assert seen == [("short", 20.0), ("long", 40.0)]
    assert link.carried == {0: 400.0} and not link.flows


def test_yielding_flow_takes_nothing_from_other_traffic() -> None:
    kernel = Kernel()
    network = Network(kernel)
    link = Link("uplink", 10.0)
    network.set_demand(link, 8.0)
    flow = network.start(Path([(link, 1.0)]), 1e6, lambda: None, True)
    assert flow.rate == pytest.approx(2.0)
    kernel.run(100.0)
    network.stop(flow)
    assert link.lost == 0.0
    flow = network.start(Path([(link, 1.0)]), 1e6, lambda: None, False)
    assert flow.rate == pytest.approx(2.0)  # more than its ninth, because other traffic asks for less
    network.set_demand(link, 10.0)
    assert flow.rate == pytest.approx(10 / 9)
    kernel.run(190.0)
    network.stop(flow)
    assert link.lost == pytest.approx(90 * 10 / 9)

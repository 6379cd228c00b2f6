"""Zones: members, coordinators and two-level ranking; equal on all nodes and stable."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.advert import Advert
from placement.ranking import rank_nodes, zone_order
from placement.rendezvous import rank
from placement.request import Request
from placement.zones import (
    Hierarchy,
    homes,
    stand_in_order,
    subnet,
    two_level_since,
    zone_of,
    zones,
)
from tests.consensus.worlds import make_advert

JOBS = [bytes([number]) * 16 for number in range(40)]


def request(job: bytes, **changes: object) -> Request:
    return Request(job=job, attempt=0, user="ada", **changes)  # type: ignore[arg-type]


@st.composite
def meshes(draw: st.DrawFn) -> list[Advert]:
    count = draw(st.integers(1, 24))
    return [
        make_advert(
            bytes([number + 1]) * 32, zone=draw(st.sampled_from("abc")), weight=draw(st.integers(1, 64)), slots_free=1
        )
        for number in range(count)
    ]


def first(job: bytes, adverts: list[Advert]) -> bytes:
    return rank_nodes(request(job), adverts, homes(zones(adverts, {}))).candidates[0].node


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("10.3.7.200", "10.3.7.0/24"),
        ("fd00:1:2:3:aaaa::1", "fd00:1:2:3::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("[fd00::1]", "fd00::/64"),
        ("::ffff:10.3.7.9", "10.3.7.0/24"),
        ("gpu7.lab", ""),
        ("", ""),
    ],
)
def test_node_without_named_zone_is_in_its_subnet(host: str, network: str) -> None:
    assert subnet(host) == network


def test_named_zone_overrides_subnet() -> None:
    plain, named = make_advert(b"p" * 32), make_advert(b"n" * 32, zone="east")
    hosts = {plain.node: "10.0.0.1", named.node: "10.0.0.2"}
    found = {zone.name: zone.nodes for zone in zones([plain, named], hosts)}
    assert found == {"10.0.0.0/24": (plain.node,), "east": (named.node,)}


@given(meshes(), st.randoms(use_true_random=False))
def test_zones_and_ranking_do_not_depend_on_order_of_adverts(adverts: list[Advert], rng: object) -> None:
    other = list(adverts)
    rng.shuffle(other)  # type: ignore[attr-defined]
    assert zones(adverts, {}) == zones(other, {})
    among = zones(adverts, {})
    assert rank_nodes(request(JOBS[0]), adverts, homes(among)) == rank_nodes(request(JOBS[0]), other, homes(among))
    order = stand_in_order(JOBS[0], adverts, among, (), 1, "b")
    assert order == stand_in_order(JOBS[0], other, among, (), 1, "b") and len(order) == len(adverts)


@given(meshes())
def test_coordinator_is_among_most_stable_nodes(adverts: list[Advert]) -> None:
    weights = {advert.node: advert.weight for advert in adverts}
    for zone in zones(adverts, {}):
        assert zone.coordinator in zone.nodes and zone.weight == sum(weights[node] for node in zone.nodes)
        heavier = sum(weights[node] > weights[zone.line[0]] for node in zone.nodes)
        assert heavier < max(3, -(-len(zone.nodes) // 4))
    leaving = {zone.line[0] for zone in zones(adverts, {})}
    for zone in zones(adverts, {}, leaving):
        assert zone.coordinator not in leaving and (zone.coordinator is not None or set(zone.nodes) <= leaving)


@given(meshes(), st.data())
def test_leaving_coordinator_changes_only_its_zone(adverts: list[Advert], data: st.DataObject) -> None:
    before = {zone.name: zone for zone in zones(adverts, {})}
    gone = before[data.draw(st.sampled_from(sorted(before)))]
    left = [advert for advert in adverts if advert.node != gone.coordinator]
    after = {zone.name: zone for zone in zones(left, {})}
    assert {name: zone for name, zone in after.items() if name != gone.name} == {
        name: zone for name, zone in before.items() if name != gone.name
    }


@given(meshes(), st.data())
def test_leaving_node_moves_no_job_of_other_zones(adverts: list[Advert], data: st.DataObject) -> None:
    gone = data.draw(st.sampled_from(adverts))
    left = [advert for advert in adverts if advert is not gone]
    home = {advert.node: advert.zone for advert in adverts}
    for job in JOBS if left else []:
        before, after = first(job, adverts), first(job, left)
        if home[before] != gone.zone or (before != gone.node and home[after] == gone.zone):
            assert after == before
        # Its zone weighs less now, so some of that zone's other jobs may go to another zone: those alone.


@given(meshes())
def test_ranking_within_one_zone_is_flat(adverts: list[Advert]) -> None:
    adverts = [msgspec.structs.replace(advert, zone="a") for advert in adverts]
    ask = request(JOBS[1], avoid=(adverts[0].node,), prefer=adverts[-1].node)
    assert rank_nodes(ask, adverts, homes(zones(adverts, {}))) == rank_nodes(ask, adverts)


def test_only_fitting_nodes_count_for_zone_and_preferences_go_first() -> None:
    small = [make_advert(bytes([number]) * 32, zone="big", slots_free=0, weight=64) for number in range(1, 20)]
    fits = make_advert(b"f" * 32, zone="small", weight=1)
    late = make_advert(b"l" * 32, zone="big", weight=64)
    adverts = [*small, fits, late]
    among = zones(adverts, {})
    only = rank_nodes(request(JOBS[2]), [*small, fits], homes(among))
    assert [c.node for c in only.candidates] == [fits.node] and len(only.refused) == len(small)
    for job in JOBS:
        assert rank_nodes(request(job, avoid=(late.node,)), adverts, homes(among)).candidates[0].node == fits.node
        assert rank_nodes(request(job, prefer=fits.node), adverts, homes(among)).candidates[0].node == fits.node


def test_zones_get_jobs_by_weight() -> None:
    adverts = [make_advert(bytes([n]) * 32, zone="a" if n <= 9 else "b") for n in range(1, 13)]
    jobs = [bytes([high, low]) * 8 for high in range(20) for low in range(20)]
    share = sum(first(job, adverts) <= bytes([9]) * 32 for job in jobs) / len(jobs)
    assert 0.68 < share < 0.82  # three quarters of the weight


@pytest.mark.parametrize(("members", "stable"), [(2, 2), (8, 3), (12, 3), (13, 4), (20, 5)])
def test_coordinator_is_of_the_heaviest_quarter_or_three(members: int, stable: int) -> None:
    adverts = [make_advert(bytes([n]) * 32, zone="lab", weight=n) for n in range(1, members + 1)]
    (zone,) = zones(adverts, {})
    heaviest = [(ad.node, 1) for ad in adverts[-stable:]]
    assert list(zone.line) == [node for node, _ in rank(b"zonelab", heaviest)], "the same on every release"
    (staying,) = zones(adverts, {}, {zone.line[0]})
    assert staying.coordinator != zone.coordinator and staying.weight == zone.weight == sum(range(members + 1))


def test_stand_ins_come_from_home_zone_first_then_each_zone_once() -> None:
    adverts = [make_advert(bytes([n]) * 32, zone="abc"[n % 3]) for n in range(1, 10)]
    full = make_advert(b"f" * 32, zone="b", store_free_mib=0)
    among = zones([*adverts, full], {})
    order = stand_in_order(JOBS[0], [*adverts, full], among, {adverts[0].node}, 10, "b")
    names = [zone.name for node in order if (zone := zone_of(node, among)) is not None]
    assert len(order) == 8 and full.node not in order and adverts[0].node not in order
    assert names[0] == "b" and set(names[:3]) == set("abc") and names[3:6] == names[:3]
    just = [make_advert(bytes([n]) * 32, zone="abc"[n % 3], store_free_mib=10 + n % 2, weight=n) for n in range(1, 31)]
    roomy = [advert for advert in just if advert.store_free_mib == 11]
    weights = {name: sum(ad.weight for ad in roomy if ad.zone == name) for name in "abc"}
    for job in JOBS:
        order = stand_in_order(job, just, zones(just, {}), (), 10, None)
        assert sorted(order) == sorted(advert.node for advert in roomy), "with more room than they need"
        firsts = [zone.name for node in order[:3] if (zone := zone_of(node, zones(just, {}))) is not None]
        assert firsts == zone_order(job, weights), "by what the nodes with room weigh together"


def test_two_level_ranking_starts_above_200_and_ends_below_180() -> None:
    since, seen = 0, []
    for members in (200, 201, 190, 180, 179, 200, 250, 201):
        since = two_level_since(since, members)
        seen.append(since)
    assert seen == [0, 201, 201, 201, 0, 0, 250, 250]


def test_hierarchy_ranks_flat_and_two_level() -> None:
    adverts = tuple(make_advert(number.to_bytes(32, "big"), zone="abcd"[number % 4]) for number in range(1, 202))
    flat, zoned = Hierarchy(0, adverts), Hierarchy(201, adverts)
    asks = [request(job) for job in JOBS]
    assert all(flat.rank(ask, adverts) == rank_nodes(ask, adverts) for ask in asks)
    assert all(zoned.rank(ask, adverts) == rank_nodes(ask, adverts, homes(zones(adverts, {}))) for ask in asks)
    assert any(zoned.rank(ask, adverts) != flat.rank(ask, adverts) for ask in asks)

"""Ranking: equal on all nodes, stable under changes, and in favour of nodes that stay."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement import ranking
from placement.advert import HORIZONS_S, HOUR, MAX_WEIGHT, Advert, Gpu
from placement.allocation import all_free, reserve
from placement.ranking import rank_nodes
from placement.rendezvous import rank
from placement.request import Request, expected_s
from tests.placement.test_placement import JOB, NODES, advert

ROOT = Path(__file__).parents[2]


def request(job: int | bytes = 0, **changes: object) -> Request:
    return Request(job if isinstance(job, bytes) else b"job %d" % job, 0, "ada", **changes)  # type: ignore[arg-type]


def order(asked: Request, adverts: list[Advert]) -> list[bytes]:
    return [candidate.node for candidate in rank_nodes(asked, adverts).candidates]


@st.composite
def campuses(draw: st.DrawFn) -> list[Advert]:
    """Draw machines of one to four GPUs, some in use."""
    found = []
    for node in draw(st.lists(st.sampled_from(NODES), min_size=1, unique=True)):
        gpus = tuple(Gpu(f"{node[0]}-{n}", "fake", 1000) for n in range(draw(st.integers(1, 4))))
        stays = draw(st.just(()) | st.tuples(*[st.integers(1, MAX_WEIGHT)] * len(HORIZONS_S)))
        room = all_free(gpus)[draw(st.integers(0, 1)) :]
        found.append(
            advert(
                node, gpus=gpus, free_portions=room, weight=draw(st.integers(1, MAX_WEIGHT)), weights=stays, guards=True
            )
        )
    return found


ASKED = st.builds(
    Request,
    job=st.binary(min_size=1, max_size=16),
    attempt=st.integers(0, 3),
    user=st.just("ada"),
    gpus=st.integers(1, 2),
    gpu_share=st.sampled_from((100, 30)),
    vram_mib=st.just(300),
    prefer=st.none() | st.sampled_from(NODES),
    avoid=st.lists(st.sampled_from(NODES), max_size=2, unique=True).map(tuple),
    near=st.lists(st.sampled_from(NODES), max_size=2, unique=True).map(tuple),
    remaining_s=st.sampled_from(HORIZONS_S),
)


@given(campuses(), ASKED, st.data())
def test_joining_or_leaving_node_keeps_order_of_others(
    adverts: list[Advert], asked: Request, data: st.DataObject
) -> None:
    """For GPU jobs: no rank depends on other nodes, so a leaving node moves only its own jobs."""
    gone = data.draw(st.sampled_from(adverts)).node
    before = [node for node in order(asked, adverts) if node != gone]
    assert order(asked, [ad for ad in adverts if ad.node != gone]) == before


@given(campuses(), ASKED, st.data())
def test_higher_survival_never_lowers_rank(adverts: list[Advert], asked: Request, data: st.DataObject) -> None:
    node = data.draw(st.sampled_from(adverts))
    surer = msgspec.structs.replace(
        node,
        weight=data.draw(st.integers(node.weight, MAX_WEIGHT)),
        weights=tuple(data.draw(st.integers(stay, MAX_WEIGHT)) for stay in node.weights),
    )
    before = order(asked, adverts)
    if node.node in before:
        after = order(asked, [surer if ad is node else ad for ad in adverts])
        assert after.index(node.node) <= before.index(node.node)


@given(campuses(), ASKED, st.randoms(use_true_random=False))
def test_first_candidates_lead_full_ranking(adverts: list[Advert], asked: Request, rng: object) -> None:
    """Lazy and full ranking agree, with or without cached grades and in any order, and have the scores of the definition."""
    cold = [msgspec.structs.replace(ad) for ad in adverts]
    rng.shuffle(cold)  # type: ignore[attr-defined]
    every, again = rank_nodes(asked, adverts), rank_nodes(asked, cold)
    assert every == again == rank_nodes(asked, adverts)
    assert again.first(2) == list(every.candidates[:2]) and len(every) == len(every.candidates)
    assert again.first(9, but=[c.node for c in every.candidates[:1]]) == list(every.candidates[1:10])
    plain = msgspec.structs.replace(asked, prefer=None, avoid=(), near=())
    alike = [msgspec.structs.replace(ad, gpus=(), free_portions=(), slots=9, slots_free=9) for ad in adverts]
    plain = msgspec.structs.replace(plain, gpus=0, gpu_share=100, vram_mib=0)
    horizon = HORIZONS_S.index(asked.remaining_s)
    weights = [(ad.node, ad.weight_for(horizon) ** 16) for ad in alike]
    assert [(c.node, c.score) for c in rank_nodes(plain, alike)] == rank(plain.key, weights)


def test_shares_are_proportional_to_the_weights_power() -> None:
    weights = {NODES[0]: 60, NODES[1]: 62, NODES[2]: 64}
    adverts = [advert(node, weight=weight, slots=99, slots_free=99) for node, weight in weights.items()]
    jobs = 6000
    wins = Counter(rank_nodes(request(job), adverts).first(1)[0].node for job in range(jobs))
    total = sum(weight**16 for weight in weights.values())
    expected = {node: jobs * weight**16 / total for node, weight in weights.items()}
    assert sum((wins[node] - share) ** 2 / share for node, share in expected.items()) < 20, (
        wins
    )  # as above: 1 in 20,000


def test_narrow_jobs_leave_whole_machines_to_wide_jobs() -> None:
    def machine(node: bytes, gpus: int, weight: int) -> Advert:
        there = tuple(Gpu(f"{node[0]}-{n}", "fake", 1000) for n in range(gpus))
        return advert(node, gpus=there, free_portions=all_free(there), weight=weight)

    adverts = {ad.node: ad for ad in (machine(NODES[0], 8, 64), machine(NODES[1], 4, 60), machine(NODES[2], 1, 8))}
    for job in range(5):  # one job on the machine with one GPU, four on the machine with four
        chosen = rank_nodes(request(job, gpus=1), adverts.values()).first(1)[0].node
        adverts[chosen] = reserve(adverts[chosen], request(job, gpus=1))
    assert [ad.whole_gpus_free for ad in adverts.values()] == [8, 0, 0]
    assert rank_nodes(request(9, gpus=8), adverts.values()).first(1)[0].node == NODES[0]


def test_ranking_uses_weight_for_remaining_run_time() -> None:
    night = advert(NODES[0], weight=60, weights=(64, 62, 60, 4, 1, 1, 1), slots=9, slots_free=9)  # lent until 08:00
    steady = advert(NODES[1], weight=40, weights=(60, 50, 40, 40, 36, 32, 30), slots=9, slots_free=9)
    short = [order(request(job, remaining_s=900), [night, steady])[0] for job in range(100)]
    long = [order(request(job, remaining_s=36_000), [night, steady])[0] for job in range(100)]
    assert set(long) == {NODES[1]} and short.count(NODES[0]) > 60
    for remaining_s, index in ((900, 0), (3600, HOUR), (36_000, 6)):
        assert rank_nodes(request(remaining_s=remaining_s), [night]).first(1)[0].weight == night.weights[index]
    stays = rank_nodes(request(remaining_s=36_000), [night, advert(NODES[1], weight=20)]).settle(NODES[0])
    assert stays is not None and stays.node == NODES[1], "the first one would leave before the end"


@pytest.mark.parametrize(
    ("ran_s", "most_s", "expected"),
    [(0, 1e9, 3600), (0, 60, 900), (5000, 1e9, 7200), (5000, 1000, 1800), (1e9, 1e9, 57_600)],
)
def test_expected_run_time_is_as_long_as_job_has_run(ran_s: float, most_s: float, expected: int) -> None:
    assert expected_s(ran_s, most_s) == expected


def test_settle_keeps_incumbent_unless_another_is_much_better() -> None:
    def settle(now: int, other: int, **changes: object) -> bytes:
        adverts = [advert(NODES[0], weight=now), advert(NODES[1], weight=other)]
        found = rank_nodes(request(JOB, **changes), adverts).settle(NODES[0])
        assert found is not None
        return found.node

    assert {settle(20, weight) for weight in range(1, 33)} == {NODES[0]}
    assert settle(20, 33) == NODES[1]
    assert settle(60, 1, prefer=NODES[1]) == NODES[1] == settle(60, 1, avoid=(NODES[0],))
    assert settle(20, 60, avoid=NODES[:2]) == NODES[1]
    assert {settle(20, weight, avoid=NODES[:2]) for weight in range(1, 33)} == {NODES[0]}, "the other is no better"
    excluded = rank_nodes(request(), [advert(NODES[0], weight=60), advert(NODES[1], weight=60)])
    for node, other in (NODES[:2], NODES[1::-1]):
        found = excluded.settle(node, but=(node,))
        assert found is not None and found.node == other
    assert rank_nodes(request(), []).settle(NODES[0]) is None
    only = rank_nodes(request(), [advert(NODES[1])]).settle(NODES[0])
    assert only is not None and only.node == NODES[1], "the first node can no longer take the job"


@given(st.lists(st.integers(1, MAX_WEIGHT), min_size=2, max_size=8), st.integers(1, 60))
def test_no_node_gets_more_than_twice_mean_load(weights: list[int], jobs: int) -> None:
    adverts = {node: advert(node, weight=w, slots=100, slots_free=100) for node, w in zip(NODES, weights, strict=False)}
    for job in range(jobs):
        chosen = rank_nodes(request(job), adverts.values()).first(1)[0].node
        adverts[chosen] = reserve(adverts[chosen], request(job))
        taken = [ad.slots - ad.slots_free for ad in adverts.values()]
        assert max(taken) <= max(1, 2 * (job + 1) // len(taken))


def test_only_nodes_above_twice_the_mean_load_come_last() -> None:
    busy = advert(NODES[0], weight=MAX_WEIGHT, slots=4, slots_free=2)
    idle = [advert(node, weight=1, slots=4, slots_free=4) for node in NODES[1:3]]
    assert order(request(), [busy, idle[0]]) == [busy.node, idle[0].node], "with one more job it has twice the mean"
    assert order(request(), [busy, *idle])[2:] == [busy.node]


def test_grades_in_an_advert_are_bounded() -> None:
    machine = advert(NODES[0], gpus=(Gpu("G", "fake", 1000),), free_portions=all_free((Gpu("G", "fake", 1000),)))
    for vram_mib in range(192):
        rank_nodes(request(gpus=1, vram_mib=vram_mib), [machine])
        assert 1 <= len(machine.grades) <= 64


def machine(node: bytes, gpus: int, free: int, **changes: object) -> Advert:
    """Return a node with this many GPUs, some of them free."""
    there = tuple(Gpu(f"{node[0]}-{n}", "fake", 1000) for n in range(gpus))
    return advert(node, gpus=there, free_portions=all_free(there)[:free], **changes)


def test_rankings_with_other_refusals_differ() -> None:
    one, other = advert(NODES[0]), advert(NODES[1], lending=False)
    assert rank_nodes(request(), [one, other]) != rank_nodes(request(), [one])


def test_grade_is_computed_once_for_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    found = rank_nodes(request(1), [advert(NODES[0])])
    adverts = [advert(NODES[0])]
    rank_nodes(request(0), adverts)
    monkeypatch.setattr(ranking, "_grade", None)
    assert rank_nodes(request(1), adverts) == found


def test_slots_in_use_are_nothing_to_a_job_with_gpus() -> None:
    busy, idle = machine(NODES[0], 1, 1, slots=4, slots_free=0), machine(NODES[1], 2, 2, slots=40, slots_free=40)
    assert order(request(gpus=1), [busy, idle]) == [busy.node, idle.node], "it leaves no GPU over"


def test_share_goes_where_it_splits_the_fewest_gpus() -> None:
    split = machine(NODES[0], 3, 3, guards=True)
    split = reserve(split, request(gpus=1, gpu_share=50, vram_mib=500))
    whole = machine(NODES[1], 1, 1, guards=True, weight=64)
    for job in range(20):
        assert order(request(job, gpus=1, gpu_share=30, vram_mib=300), [split, whole])[0] == split.node


def test_nodes_that_a_request_names_come_first_or_last() -> None:
    adverts = [advert(node) for node in NODES]
    for job in range(10):
        first = order(request(job, near=(NODES[3],)), adverts)
        assert first[0] == NODES[3], "it has the last checkpoint"
        wished = order(request(job, prefer=NODES[1], near=(NODES[3],), avoid=(NODES[5],)), adverts)
        assert wished[:2] == [NODES[1], NODES[3]] and wished[-1] == NODES[5]
        assert order(request(job, near=(NODES[3],), avoid=(NODES[3],)), adverts)[-1] == NODES[3]
        few, many = machine(NODES[0], 4, 4), machine(NODES[1], 1, 1)
        assert order(request(job, gpus=1, near=NODES[:2]), [few, many]) == [many.node, few.node]


def test_zones_come_before_nodes_by_the_weights_of_all_that_fit() -> None:
    adverts = [
        machine(node, gpus, gpus, zone=zone, weight=weight)
        for node, gpus, zone, weight in zip(
            NODES, (1, 4, 1, 4, 1, 4), ("a", "a", "b", "b", "c", "c"), (60, 1, 2, 40, 8, 20), strict=False
        )
    ]
    homes = {ad.node: ad.zone for ad in adverts}
    for job in range(60):
        asked = request(job, gpus=1)
        weights = {"a": 61, "b": 42, "c": 28}
        ranked = rank(asked.key + b"zone", [(name.encode(), weight) for name, weight in weights.items()])
        zones = [name.decode() for name, _ in ranked]
        found = [candidate.node for candidate in rank_nodes(asked, adverts, homes).candidates]
        assert [homes[node] for node in found] == [zone for zone in zones for _ in range(2)]
        assert [NODES.index(node) % 2 for node in found] == [0, 1] * 3, "in each zone the fewest GPUs left over first"
        for wish, place in (("prefer", 0), ("near", 0), ("avoid", -1)):
            for node in NODES[:6]:
                named = request(job, gpus=1, **{wish: node if wish == "prefer" else (node,)})
                assert rank_nodes(named, adverts, homes).candidates[place].node == node, "whatever its zone"
        assert rank_nodes(asked, adverts, {}) == rank_nodes(asked, adverts), "nodes without a zone are in one"


PROGRAM = """
import sys
from random import Random
import msgspec
from placement.decision import decide
from placement.ranking import rank_nodes
from placement.request import Request
from tests.bench.rankings import campus
adverts = campus(60, 7)
Random(int(sys.argv[1])).shuffle(adverts)
homes = {advert.node: advert.zone for advert in adverts}
for number in range(40):
    request = Request(b"%d" % number, number % 3, "ada", gpus=number % 3, vram_mib=1000 * (number % 2))
    for where in (None, homes):
        print(msgspec.msgpack.encode(decide(request, rank_nodes(request, adverts, where))).hex())
"""


def test_two_processes_decide_alike() -> None:
    """Processes with other hash seeds and another order of adverts agree."""
    found = {
        subprocess.run(
            [sys.executable, "-c", PROGRAM, seed],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "4242")
    }
    assert len(found) == 1 and len(set(found.pop().split())) == 80

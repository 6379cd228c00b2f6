"""Rendezvous hashing, filters, decisions and adverts."""

import re
from collections import Counter
from hashlib import blake2b
from math import log2
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.model.events import MAX_EVENT_BYTES, REASON_CHARS
from placement.advert import (
    MAX_WEIGHT,
    Advert,
    AdvertError,
    Gpu,
    Portion,
    SystemCheckpoints,
    decode_advert,
    encode_advert,
    horizon_of,
)
from placement.allocation import all_free, allocate
from placement.decision import RULE, cannot_ever, decide, explain, replay, replica_order, witness_order
from placement.filters import engine_for, refusals
from placement.ranking import rank_nodes
from placement.rendezvous import FRACTION_BITS, draws, lane, negative_log2, rank
from placement.request import Request

NODES = [bytes([n]) * 32 for n in range(1, 9)]
JOB = b"j" * 16


def advert(node: bytes, **changes: object) -> Advert:
    base = Advert(
        version=1,
        node=node,
        nick=f"n{node[0]}",
        user="owner",
        zone="",
        weight=32,
        up_since_unix=0,
        lending=True,
        paused=False,
        gpus=(),
        free_portions=(),
        guards=False,
        gpu_sharing=True,
        slots=1,
        slots_free=1,
        cpus=4,
        memory_mib=8192,
        engines=("process",),
        own_only=(),
        images=(),
        accepts=("*",),
        store_free_mib=1000,
    )
    return msgspec.structs.replace(base, **changes)


SHARE = {"gpus": 1, "gpu_share": 30, "vram_mib": 600}


def gpu(number: int, vram_mib: int) -> Gpu:
    return Gpu(f"GPU-{number}", "fake", vram_mib, (8, 6))


@given(st.integers(1, 2**64 - 1))
def test_negative_log2_matches_logarithm(draw: int) -> None:
    exact = (64 - log2(draw)) * 2**FRACTION_BITS
    assert exact - 2 <= negative_log2(draw) <= exact * (1 + 1e-9) + 190  # units of 2**-32: 4.4e-8


@given(st.integers(1, 2**64 - 2), st.integers(0, 2**20))
def test_negative_log2_never_rises_with_draw(draw: int, more: int) -> None:
    assert negative_log2(min(2**64 - 1, draw + more)) <= negative_log2(draw)


def _draw(key: bytes, node: bytes) -> int:
    """Compute the draw of one lane as `draws` does for all."""
    secret = blake2b(key, digest_size=16, person=b"mesh-hrw2-key").digest()
    mixed = int.from_bytes(blake2b(node, digest_size=8, person=b"mesh-hrw2-node").digest(), "little")
    mixed = (mixed ^ int.from_bytes(secret[8:], "little")) * (int.from_bytes(secret[:8], "little") | 1) % 2**64
    mixed = (mixed ^ mixed >> 32) * 0xFF51AFD7ED558CCD % 2**64
    mixed = (mixed ^ mixed >> 29) * 0xC4CEB9FE1A85EC53 % 2**64
    return mixed ^ mixed >> 32


@given(st.binary(max_size=40), st.lists(st.binary(max_size=40), max_size=40))
def test_draw_depends_on_key_and_node_only(key: bytes, nodes: list[bytes]) -> None:
    assert list(draws(key, [lane(node) for node in nodes])) == [_draw(key, node) for node in nodes]


def test_draws_are_uniform_and_independent() -> None:
    """Count first and second ranks over 20,000 jobs and 20 nodes: each pair is equally frequent."""
    lanes = [lane(bytes([number]) * 32) for number in range(20)]
    pairs: Counter[tuple[int, ...]] = Counter()
    for job in range(20_000):
        found = draws(b"%d" % job, lanes)
        pairs[tuple(sorted(range(20), key=found.__getitem__)[:-3:-1])] += 1
    expected = 20_000 / (20 * 19)
    freedom = 20 * 19 - 1
    chi2 = sum((pairs[one, two] - expected) ** 2 / expected for one in range(20) for two in range(20) if one != two)
    assert 0.8 < chi2 / freedom < 1.25  # three standard deviations


WEIGHTED = st.dictionaries(st.sampled_from(NODES), st.integers(1, 64), min_size=2)


@given(st.binary(max_size=20), WEIGHTED, st.data())
def test_removing_node_keeps_order_of_others(key: bytes, weights: dict[bytes, int], data: st.DataObject) -> None:
    gone = data.draw(st.sampled_from(sorted(weights)))
    before = [node for node, _ in rank(key, weights.items()) if node != gone]
    after = [node for node, _ in rank(key, [(n, w) for n, w in weights.items() if n != gone])]
    assert before == after


@given(st.binary(max_size=20), WEIGHTED, st.data())
def test_larger_weight_never_lowers_rank(key: bytes, weights: dict[bytes, int], data: st.DataObject) -> None:
    node = data.draw(st.sampled_from(sorted(weights)))

    def place(table: dict[bytes, int]) -> int:
        return [name for name, _ in rank(key, table.items())].index(node)

    assert place({**weights, node: weights[node] + data.draw(st.integers(1, 64))}) <= place(weights)


def test_shares_are_proportional_to_weights() -> None:
    weights = {NODES[0]: 10, NODES[1]: 20, NODES[2]: 30}
    wins = dict.fromkeys(weights, 0)
    keys = 6000
    for number in range(keys):
        wins[rank(b"%d" % number, weights.items())[0][0]] += 1
    chi2 = sum((wins[n] - keys * w / 60) ** 2 / (keys * w / 60) for n, w in weights.items())
    assert chi2 < 20, wins  # two degrees of freedom: 20 is one in twenty thousand


@given(st.permutations(NODES))
def test_decision_replays_for_any_order_of_adverts(order: list[bytes]) -> None:
    request = Request(job=JOB, attempt=0, user="ada", avoid=(NODES[2],))
    ranking = rank_nodes(request, [advert(node) for node in order])
    assert ranking == rank_nodes(request, [advert(node) for node in NODES])
    decision = decide(request, ranking)
    assert decision is not None and replay(decision, request, rank_nodes(request, [advert(node) for node in order]))
    assert not replay(decision, request, rank_nodes(request, [advert(node, version=2) for node in order]))
    assert not replay(decision, msgspec.structs.replace(request, cpus=1), ranking)
    first = decide(request, ranking, declined=[decision.chosen])
    assert first is not None and first.chosen == decision.order[1][0] and replay(first, request, ranking)
    largest = decide(request, ranking, [bytes([number]) * 32 for number in range(100, 200)], NODES * 9)
    assert largest is not None and len(msgspec.msgpack.encode(largest)) < MAX_EVENT_BYTES - REASON_CHARS - 500
    assert ranking.candidates[-1].node == NODES[2], "the node that the job just left is ranked last but not excluded"


@pytest.mark.parametrize(
    ("changes", "request_changes", "words"),
    [
        ({"lending": False}, {}, "does not lend"),
        ({"paused": True}, {}, "paused"),
        ({"accepts": ("bob",)}, {}, "bob only"),
        ({"engines": ()}, {}, "no process engine"),
        ({"uv": False}, {"uv": True}, "has no uv for the job's environment"),
        (
            {},
            {"conda": True},
            "has no py-rattler for the job's environment (its owner can run `pip install py-rattler`)",
        ),
        ({"own_only": ("process",)}, {}, "no sandbox"),
        ({}, {"image": "torch"}, "no docker engine"),
        ({"engines": ("docker",)}, {"image": "torch"}, "no image torch"),
        ({}, {"zone": "b2"}, "zone"),
        ({}, {"memory_mib": 10**6}, "memory"),
        ({"interactive": False}, {"interactive": True}, "allows no interactive sessions"),
        ({"cpus": 2}, {"cpus": 3}, "lends at most 2 CPUs to a job, and it asks for 3"),
        ({"slots_free": 0}, {}, "its only job slot is taken"),
        ({"slots": 2, "slots_free": 0}, {}, "all 2 job slots are taken"),
        ({"slots": 0}, {}, "only GPU jobs"),
        ({}, {"gpus": 1}, "has 0 GPUs"),
        (
            {"gpus": (gpu(1, 1000),), "free_portions": (Portion("GPU-1", 100, 1000),)},
            {"gpus": 1, "vram_mib": 2000},
            "up to 1000 MiB",
        ),
        ({"gpus": (gpu(1, 1000),)}, {"gpus": 1}, "are free"),
        (
            {"gpus": (gpu(1, 1000),), "free_portions": (Portion("GPU-1", 99, 999),), "guards": True},
            {"gpus": 1},
            "0 of 1 fitting GPUs are",
        ),
        ({"gpus": (gpu(1, 1000),), "driver": (535, 1)}, {"gpus": 1, "driver": (550,)}, "driver 535.1, 550 asked"),
        ({"gpus": (gpu(1, 1000),)}, {"gpus": 1, "driver": (550,)}, "does not say which driver it has, 550 asked"),
        ({"gpus": (gpu(1, 1000),)}, {"gpus": 1, "gpu_model": "H200"}, "0 GPUs called H200 (it has fake), 1 asked"),
        ({"gpus": (gpu(1, 1000),)}, {"gpus": 1, "capability": (9, 0)}, "capability 8.6 at most, 9.0 on 1 asked"),
        ({"gpus": (gpu(1, 1000),)}, SHARE, "cannot keep a job to a share of a GPU"),
        ({"gpus": (gpu(1, 1000),), "guards": True, "gpu_sharing": False}, SHARE, "lends whole GPUs only"),
        ({"gpus": (gpu(1, 500),), "guards": True}, SHARE, "up to 500 MiB, 600 MiB on 1 asked"),
        (
            {"gpus": (gpu(1, 1000),), "free_portions": (Portion("GPU-1", 29, 1000),), "guards": True},
            SHARE,
            "0 of 1 fitting GPUs have 30 % and 600 MiB left, 1 asked",
        ),
        ({}, {"exclude": (NODES[0],)}, "failed this job a moment ago"),
    ],
)
def test_refusal_names_reason(changes: dict[str, object], request_changes: dict[str, object], words: str) -> None:
    request = msgspec.structs.replace(Request(job=JOB, attempt=0, user="ada"), **request_changes)
    ranking = rank_nodes(request, [advert(NODES[0], **changes)])
    assert ranking.candidates == ()
    assert words in " ".join(ranking.refused[0].reasons)
    assert words in explain(request, ranking)[0]


def test_gpu_model_matches_any_part_of_name() -> None:
    one, other = gpu(1, 1000), Gpu("GPU-2", "NVIDIA RTX A6000", 1000, (8, 9))
    both = advert(NODES[0], gpus=(one, other), free_portions=all_free((one, other)), driver=(550, 54, 14))
    kind = Request(JOB, 0, "ada", gpus=1, gpu_model="a6000", capability=(8, 9), driver=(550, 54))
    assert len(rank_nodes(kind, [both])) == 1 and allocate(kind, both.gpus, both.free_portions)[0].uuid == "GPU-2"
    assert (
        "0 of 1 fitting GPUs are free"
        in rank_nodes(kind, [msgspec.structs.replace(both, free_portions=all_free((one,)))]).refused[0].reasons[0]
    )


def test_job_runs_on_the_nodes_that_it_names_and_on_no_others() -> None:
    there = [advert(node) for node in NODES[:3]]
    on = Request(JOB, 0, "a", on=NODES[1:3], not_on=NODES[2:3])
    ranking = rank_nodes(on, there)
    assert [candidate.node for candidate in ranking.candidates] == [NODES[1]]
    reasons = {refused.node: refused.reasons for refused in ranking.refused}
    assert "(--on)" in reasons[NODES[0]][0] and "(--not-on)" in reasons[NODES[2]][0]
    assert cannot_ever(Request(JOB, 0, "a", on=NODES[:1], not_on=NODES[:1]), there)
    away = [advert(NODES[0], lending=False), advert(NODES[1])]
    assert cannot_ever(Request(JOB, 0, "a", on=NODES[:1]), away) is None, "its node may be lent later"


def test_owner_runs_own_jobs_without_sandbox() -> None:
    request = Request(job=JOB, attempt=0, user="owner")
    assert rank_nodes(request, [advert(NODES[0], own_only=("process",), accepts=())]).candidates


def test_engine_for_its_owner_alone_is_no_others_by_name() -> None:
    own = advert(NODES[0], own_only=("process",))
    for request in (Request(JOB, 0, "ada"), Request(JOB, 0, "ada", engine="process")):
        assert engine_for(request, own) is None and "only its owner's jobs" in refusals(request, own)[0]
    assert engine_for(Request(JOB, 0, "owner", engine="process"), own) == "process"


def test_refusal_tells_of_the_gpus_of_the_requested_kind_alone() -> None:
    small, large = Gpu("GPU-1", "T4", 1000, (7, 5)), Gpu("GPU-2", "A100", 8000, (8, 0))
    node = advert(NODES[0], gpus=(small, large), driver=(550, 54))

    def told(**asks: Any) -> str:
        (reason,) = refusals(Request(JOB, 0, "ada", **{"gpus": 1, **asks}), node)
        return reason

    assert told(gpus=3) == "has 2 GPUs, 3 asked"
    assert told(gpus=2, gpu_model="a100") == "has 1 GPUs called a100 (it has A100, T4), 2 asked"
    assert told(gpu_model="t4", capability=(8, 0)).startswith("its GPUs have compute capability 7.5 at most, 8.0 on 1")
    assert told(gpu_model="t4", vram_mib=2000) == "its GPUs have up to 1000 MiB, 2000 MiB on 1 asked"
    assert told(driver=(550, 54)) == "0 of 2 fitting GPUs are free, 1 asked", "its driver is new enough"


def test_image_runs_by_docker_else_by_apptainer() -> None:
    request = Request(JOB, 0, "a", image="tool")
    both = advert(NODES[0], engines=("apptainer", "docker"), images=("tool",))
    only = advert(NODES[0], engines=("process", "apptainer"), images=("tool",))
    assert engine_for(request, both) == "docker" and engine_for(request, only) == "apptainer"
    assert engine_for(Request(JOB, 0, "a"), only) == "process", "a job without an image is a plain process"
    assert refusals(request, only) == []
    assert refusals(msgspec.structs.replace(request, engine="docker"), only) == ["has no docker engine"]
    own = msgspec.structs.replace(only, own_only=("process", "apptainer"))
    assert "only its owner's jobs with the apptainer engine" in refusals(request, own)[0]
    assert "needs an image" in refusals(Request(JOB, 0, "a", engine="apptainer"), only)[0]
    plain = msgspec.structs.replace(request, engine="process")
    assert refusals(plain, only) == ["its process engine runs no image"], "it would run outside of its image"
    assert "has no image" in refusals(Request(JOB, 0, "a", image="other"), only)[0]
    with_gpu = advert(NODES[0], engines=("apptainer",), images=("tool",), gpus=(gpu(1, 1000),))
    asks = Request(JOB, 0, "a", image="tool", gpus=1)
    assert not [reason for reason in refusals(asks, with_gpu) if "apptainer" in reason]


def test_impossible_request_is_refused_at_submission() -> None:
    adverts = [advert(NODES[0], gpus=(gpu(1, 1000),)), advert(NODES[1])]
    assert "no node has 99 GPUs; the largest, n1, has 1" in str(cannot_ever(Request(JOB, 0, "a", gpus=99), adverts))
    assert "5000 MiB" in str(cannot_ever(Request(JOB, 0, "a", gpus=1, vram_mib=5000), adverts))
    assert cannot_ever(Request(JOB, 0, "a", gpus=1), adverts) is None, "a GPU in use may become free"
    share = Request(JOB, 0, "a", **SHARE)  # type: ignore[arg-type]
    assert "n1: cannot keep a job to a share of a GPU" in str(cannot_ever(share, adverts))
    assert cannot_ever(share, [advert(NODES[0], gpus=(gpu(1, 1000),), guards=True)]) is None
    assert "no node can run it now (30 % of 1 GPUs, 600 MiB each)" in explain(share, rank_nodes(share, adverts))[0]


NUMBERS = st.integers(-1, 101) | st.sampled_from((999, 1000, 1001, 2**31, 2**63 - 1))
PORTIONS = st.tuples(st.sampled_from(("GPU-1", "GPU-2", "GPU-3", "")), NUMBERS, NUMBERS)


@given(st.lists(PORTIONS, max_size=4), st.lists(NUMBERS, min_size=2, max_size=2))
def test_hostile_free_portions_are_refused_or_possible(room: list[tuple[str, int, int]], sizes: list[int]) -> None:
    gpus = tuple(gpu(number, size) for number, size in enumerate(sizes, 1))
    data = encode_advert(advert(NODES[0], gpus=gpus, free_portions=tuple(Portion(*part) for part in room)))
    try:
        told = decode_advert(NODES[0], data)
    except AdvertError:
        return
    assert len({left.uuid for left in told.free_portions}) == len(told.free_portions) <= len(gpus)
    for left in told.free_portions:
        size = next(gpu.vram_mib for gpu in gpus if gpu.uuid == left.uuid)
        assert 0 <= left.share <= 100 and 0 <= left.vram_mib <= size and (left.share or left.vram_mib)
        assert (left.share == 100) == (left.vram_mib == size), "a job on a GPU uses some of its time and of its memory"


def test_share_ranks_node_first_where_no_whole_gpu_is_split() -> None:
    one = (gpu(1, 1000),)
    whole = [advert(node, gpus=one, free_portions=all_free(one), guards=True, weight=64) for node in NODES[1:]]
    shared = advert(NODES[0], gpus=one, free_portions=(Portion("GPU-1", 30, 600),), guards=True, weight=1)
    for number in range(20):
        request = Request(b"%d" % number, 0, "ada", **SHARE)  # type: ignore[arg-type]
        assert rank_nodes(request, [*whole, shared]).candidates[0].node == NODES[0]
        left = msgspec.structs.replace(request, avoid=(NODES[0],))
        assert rank_nodes(left, [*whole, shared]).candidates[-1].node == NODES[0], (
            "the node that the job left still ranks last"
        )


@given(st.binary(max_size=300))
def test_hostile_adverts_are_refused(data: bytes) -> None:
    with pytest.raises(AdvertError):
        decode_advert(NODES[0], data)


ONE = {"gpus": (gpu(1, 1000),)}
IMPOSSIBLE_ROOM: list[dict[str, object]] = [
    {"gpus": (gpu(1, 1000), gpu(1, 1000))},
    {"gpus": (gpu(1, -1),)},
    {"gpus": (gpu(1, 2**31),)},
    {"free_portions": (Portion("ghost", 100, 1000),)},
    {**ONE, "free_portions": (Portion("GPU-1", 50, 500), Portion("GPU-1", 50, 500))},
    *({**ONE, "free_portions": (Portion("GPU-1", share, vram),)} for share, vram in ((101, 1000), (-1, 500), (50, -1))),
    *(
        {**ONE, "free_portions": (Portion("GPU-1", share, vram),)}
        for share, vram in ((99, 1000), (100, 999), (99, 1001), (0, 0))
    ),
]


IMPOSSIBLE_NUMBERS: list[dict[str, object]] = [
    *({field: number} for field in ("back_unix", "up_since_unix", "version", "cpus") for number in (-1, 1 << 53)),
    {"slots": -1},
    {"slots": 1025, "slots_free": 0},
    {"slots": 2, "slots_free": 3},
    {"slots_free": -1},
]


@pytest.mark.parametrize("changes", [{"weight": 0}, {"weight": 65}, *IMPOSSIBLE_NUMBERS, *IMPOSSIBLE_ROOM])
def test_impossible_adverts_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(AdvertError):
        decode_advert(NODES[0], encode_advert(advert(NODES[0], **changes)))
    with pytest.raises(AdvertError, match="its own author"):
        decode_advert(NODES[1], encode_advert(advert(NODES[0])))
    assert decode_advert(NODES[0], encode_advert(advert(NODES[0]))) == advert(NODES[0])


def test_replica_order_spreads_over_zones_with_free_space() -> None:
    adverts = [advert(node, zone="ab"[number % 2]) for number, node in enumerate(NODES)]
    adverts[3] = advert(NODES[3], store_free_mib=0)
    order = replica_order(JOB, adverts, {NODES[0]}, need_mib=10)
    assert NODES[0] not in order and NODES[3] not in order and len(order) == 6
    zones = {ad.node: ad.zone for ad in adverts}
    assert zones[order[0]] != zones[order[1]]


def test_replica_order_begins_in_zones_that_hold_nothing() -> None:
    adverts = [advert(node, zone="abc"[number % 3]) for number, node in enumerate(NODES)]
    zones = {ad.node: ad.zone for ad in adverts}
    holder = NODES[0]
    order = replica_order(JOB, adverts, {holder}, need_mib=10, holders={holder})
    assert {zones[node] for node in order[:2]} == {"b", "c"}
    assert {zones[node] for node in order[2:5]} == {"a", "b", "c"}
    assert replica_order(JOB, adverts, {holder}, 10, {holder}, most=2) == order[:2]


def test_orders_of_copies_and_witnesses_are_the_same_on_every_release() -> None:
    weights = dict(zip(NODES, (1, 8, 60, 64, 2, 30, 7, 16), strict=True))
    adverts = [advert(node, zone=str(number), weight=weights[node]) for number, node in enumerate(NODES)]
    for order, key in (
        (replica_order(JOB, adverts, (), need_mib=1), JOB + b"replica"),
        (list(witness_order(JOB, adverts, NODES)), JOB + b"witness"),
    ):
        assert order == [node for node, _ in rank(key, weights.items())]


def test_place_of_a_job_or_why_it_waits_is_explained() -> None:
    alone = advert(NODES[0], nick="desk")
    full = advert(NODES[1], nick="den", slots_free=0)
    plain, two = Request(JOB, 0, "ada"), Request(JOB, 0, "ada", nodes=2)
    model = Request(JOB, 0, "ada", gpus=2, gpu_model="H200", vram_mib=900)
    for request, adverts, words in (
        (plain, [], "no node of this mesh offers anything yet"),
        (plain, [alone, full], "desk is the only node that could run it"),
        (plain, [alone, advert(NODES[2], nick="lab")], r"(desk|lab) is first of 2 nodes that could run it"),
        (two, [alone, full], r"1 of the 2 nodes it needs could take it now \(den: its only job slot is taken\)"),
        (model, [alone], r"no node can run it now \(2 GPUs, H200, 900 MiB each\); desk: has 0 GPUs, 2 asked"),
        (Request(JOB, 0, "ada", image="tool"), [alone], r"no node can run it now \(one slot, image tool\); desk: .*"),
        (plain, [full, advert(NODES[2], nick="lab", slots_free=0)], r"no node .* \(one slot\); .* taken; and 1 more"),
    ):
        assert re.fullmatch(words, explain(request, rank_nodes(request, adverts))[0]), words


def test_what_no_idle_node_has_is_told_at_submission() -> None:
    one = advert(NODES[0], nick="desk", gpus=(gpu(1, 1000),), engines=("docker",))
    image = Request(JOB, 0, "ada", image="tool:1")
    for request, adverts, words in (
        (Request(JOB, 0, "ada", gpus=1), [advert(NODES[0])], "no node that lends has a GPU, and it needs 1"),
        (Request(JOB, 0, "ada", gpus=2), [one], "no node has 2 GPUs; the largest, desk, has 1"),
        (image, [one], "no lending node has image tool:1: load it"),
        (msgspec.structs.replace(image, image_id=b"i" * 32), [one], "no lending node can run image tool:1 (desk: "),
        (
            image,
            [one, msgspec.structs.replace(one, node=NODES[1], images=("tool:1",), slots=0)],
            "no node could run it",
        ),
    ):
        assert (cannot_ever(request, adverts) or "").startswith(words), words


def test_witness_order_has_all_nodes() -> None:
    adverts = [advert(node) for node in NODES[:4]]
    order = witness_order(JOB, adverts, NODES)
    assert sorted(order) == sorted(NODES)
    assert order == witness_order(JOB, list(reversed(adverts)), list(reversed(NODES)))


def test_advert_may_reach_its_bounds_and_not_pass_them() -> None:
    for field, most in (
        ("weight", MAX_WEIGHT),
        ("slots", 1024),
        ("memory_mib", 2**53 - 1),
        ("back_unix", 2**53 - 1),
    ):
        told = advert(NODES[0], **{field: most})
        assert decode_advert(NODES[0], encode_advert(told)) == told
        with pytest.raises(AdvertError):
            decode_advert(NODES[0], encode_advert(advert(NODES[0], **{field: most + 1})))
    gpus = tuple(gpu(number, 1000) for number in range(65))
    listed = {
        "gpus": gpus,
        "driver": (1,) * 5,
        "data_ids": (b"x",) * 257,
        "data_paths": ("x",) * 257,
        "network": ("x",) * 257,
        "image_denials": ("x",) * 257,
    }
    for field, values in listed.items():
        decode_advert(NODES[0], encode_advert(advert(NODES[0], **{field: values[1:]})))
        with pytest.raises(AdvertError):
            decode_advert(NODES[0], encode_advert(advert(NODES[0], **{field: values})))
    for changes in (
        {"weights": (0,) + (1,) * 6},
        {"weights": (1,) * 6},
        {"weights": (65,) + (1,) * 6},
        {"slots": 1, "slots_free": 2},
        {"driver": (550, -1)},
        {"system": SystemCheckpoints(platform="two\nlines")},
    ):
        with pytest.raises(AdvertError):
            decode_advert(NODES[0], encode_advert(advert(NODES[0], **changes)))


def test_horizon_is_the_shortest_that_is_long_enough() -> None:
    assert [horizon_of(seconds) for seconds in (0, 900, 901, 1800, 57_600, 1e9)] == [0, 0, 1, 1, 6, 6]
    assert (
        advert(NODES[0], weights=tuple(range(1, 8))).weight_for(2) == 3
        and advert(NODES[0], weight=9).weight_for(2) == 9
    )


def test_load_counts_one_more_job_and_is_none_on_an_idle_node() -> None:
    assert advert(NODES[0], slots=4, slots_free=4).load == 0 == advert(NODES[0], slots=0, slots_free=0).load
    assert advert(NODES[0], slots=4, slots_free=3).load == 2**20 // 2


def test_what_a_job_asks_for_exactly_is_enough() -> None:
    gpus = (gpu(1, 1000),)
    node = advert(
        NODES[0],
        gpus=gpus,
        free_portions=(Portion("GPU-1", 30, 600),),
        guards=True,
        driver=(550,),
        memory_mib=8192,
        cpus=4,
    )
    exact = Request(JOB, 0, "ada", **SHARE, memory_mib=8192, cpus=4, driver=(550,), capability=(8, 6))  # type: ignore[arg-type]
    assert refusals(exact, node) == []
    for more in ({"memory_mib": 8193}, {"cpus": 5}, {"driver": (550, 1)}, {"gpu_share": 31}, {"vram_mib": 601}):
        assert refusals(msgspec.structs.replace(exact, **more), node), more
    assert refusals(msgspec.structs.replace(exact, capability=(8, 7)), node)
    for need in ({"uv": True}, {"conda": True}, {"interactive": True}):
        lacks = msgspec.structs.replace(node, uv=False, conda=False, interactive=False)
        assert refusals(msgspec.structs.replace(exact, **need), lacks) and not refusals(exact, lacks)
        has = msgspec.structs.replace(node, uv=True, conda=True, interactive=True)
        assert not refusals(msgspec.structs.replace(exact, **need), has)


def test_name_of_the_owner_opens_nothing_without_their_key() -> None:
    node = advert(NODES[0], user="ada", user_key=b"a" * 32, accepts=(), own_only=("process",))
    own = Request(JOB, 0, "ada", user_key=b"a" * 32)
    assert refusals(own, node) == []
    for other in (msgspec.structs.replace(own, user_key=b"b" * 32), msgspec.structs.replace(own, user="bob")):
        assert len(refusals(other, node)) == 2, "neither the machine nor the engine"


def test_node_that_failed_a_job_is_refused_to_that_job_only() -> None:
    node = advert(NODES[0])
    assert refusals(Request(JOB, 0, "ada", exclude=(NODES[0],)), node) == ["failed this job a moment ago"]
    assert refusals(Request(b"", 0, "ada", exclude=(NODES[0],)), node) == []


def test_copies_go_to_nodes_with_more_room_than_they_need() -> None:
    adverts = [advert(node, store_free_mib=100 + number) for number, node in enumerate(NODES)]
    assert set(replica_order(JOB, adverts, (), need_mib=103)) == set(NODES[4:])
    assert len(replica_order(JOB, adverts, (), need_mib=1, most=3)) == 3
    assert set(replica_order(JOB, adverts, set(NODES[1:]), need_mib=1)) == {NODES[0]}


def test_submission_is_refused_only_for_what_idle_nodes_lack() -> None:
    full = [advert(node, paused=True, slots_free=0) for node in NODES[:2]]
    assert cannot_ever(Request(JOB, 0, "ada"), full) is None
    assert cannot_ever(Request(JOB, 0, "ada", nodes=2), full) is None
    assert "2 of the nodes could run it, and it needs 3" in (cannot_ever(Request(JOB, 0, "ada", nodes=3), full) or "")
    assert cannot_ever(Request(JOB, 0, "ada", cpus=99), [advert(NODES[0], lending=False)]) is None, "it may lend again"
    many = [advert(node) for node in NODES[:5]]
    told = cannot_ever(Request(JOB, 0, "ada", cpus=99), many) or ""
    assert told.count("lends at most 4 CPUs") == 3 and told.endswith("; and 2 more")
    assert "more" not in (cannot_ever(Request(JOB, 0, "ada", cpus=99), many[:3]) or "more")
    image = Request(JOB, 0, "ada", image="tool", image_id=b"i" * 32)
    told = cannot_ever(image, [msgspec.structs.replace(one, engines=("docker",)) for one in many]) or ""
    assert told.startswith("no lending node can run image tool (") and told.count("not on this node") == 3
    machines = [advert(NODES[0]), advert(NODES[1], gpus=(gpu(1, 1000),))]
    assert "the largest, n2, has 1" in (cannot_ever(Request(JOB, 0, "ada", gpus=2), machines) or "")
    assert cannot_ever(Request(JOB, 0, "ada", cpus=99, on=(NODES[7],)), many) is None


def test_decision_lists_a_bounded_number_of_nodes() -> None:
    ranking = rank_nodes(Request(JOB, 0, "ada"), [advert(node) for node in NODES])
    decision = decide(Request(JOB, 0, "ada"), ranking, NODES[:1] + [bytes([n]) * 32 for n in range(100, 120)])
    assert decision is not None and len(decision.order) == 4 and len(decision.declined) == 8
    assert NODES[0] not in [node for node, _, _ in decision.order] and decision.declined[0] == NODES[0]
    assert explain(Request(JOB, 0, "ada", nodes=9), ranking) == ["8 of the 9 nodes it needs could take it now"]


def test_decision_is_replayed_by_the_same_rule_request_and_passed_nodes_alone() -> None:
    request = Request(JOB, 0, "ada")
    ranking = rank_nodes(request, [advert(node, version=7, weight=20) for node in NODES])
    declined, kept = [NODES[6], NODES[5]], [NODES[7], NODES[4]]
    decision = decide(request, ranking, declined, kept)
    assert decision is not None and decision == decide(request, ranking, declined[::-1], kept[::-1])
    assert (decision.rule, decision.declined, decision.kept) == (RULE, (NODES[5], NODES[6]), (NODES[4], NODES[7]))
    assert {place[1:] for place in decision.order} == {(7, 20)}
    assert decision.words == "by its advert 7, survival 20/64, before 3 named after it"
    assert replay(decision, request, ranking)
    for changes in ({"rule": RULE + 1}, {"kept": ()}, {"declined": ()}, {"attempt": 1}):
        changed = replay(msgspec.structs.replace(decision, **changes), request, ranking)  # type: ignore[arg-type]
        assert changed is ("kept" in changes), "which places were kept says nothing of this ranking"
    later = msgspec.structs.replace(request, remaining_s=900)
    assert rank_nodes(later, [advert(node, version=7, weight=20) for node in NODES]) == ranking
    assert not replay(decision, later, ranking), "the decision was for another request"


def test_nodes_closest_to_a_fit_are_explained() -> None:
    request = Request(JOB, 0, "ada")
    far = advert(NODES[0], nick="far", slots_free=0, paused=True)
    near = [advert(node, nick=f"near{node[0]}", slots_free=0) for node in NODES[1:3]]
    first, second = explain(request, rank_nodes(request, [far, *near]))
    assert first.endswith("; near2: its only job slot is taken; and 1 more")
    assert second == "near3: its only job slot is taken"
    gang, full = msgspec.structs.replace(request, nodes=2), [advert(node, slots_free=0) for node in NODES[1:6]]
    (told,) = explain(gang, rank_nodes(gang, [advert(NODES[0]), *full]))
    assert told.count("its only job slot is taken") == 3
    ranking = rank_nodes(request, [advert(node) for node in NODES])
    assert explain(request, ranking) == [f"{ranking.candidates[0].nick} is first of 8 nodes that could run it"]
    assert explain(gang, rank_nodes(gang, [advert(node) for node in NODES[:2]]))[0].endswith(
        "of 2 nodes that could run it"
    )


def test_only_the_given_nodes_are_witnesses() -> None:
    assert set(witness_order(JOB, [advert(node) for node in NODES], NODES[:3])) == set(NODES[:3])


def test_copies_come_last_to_a_zone_that_holds_several() -> None:
    adverts = [advert(node, zone="ab"[number % 2]) for number, node in enumerate(NODES)]
    zones = {ad.node: ad.zone for ad in adverts}
    holders = {NODES[0], NODES[2]}
    for job in (b"%d" % number for number in range(20)):
        order = replica_order(job, adverts, holders, 10, holders)
        assert [zones[node] for node in order[:2]] == ["b", "b"] and set(order) == set(NODES) - holders
        for most in range(1, 8):
            assert replica_order(job, adverts, holders, 10, holders, most) == order[:most]

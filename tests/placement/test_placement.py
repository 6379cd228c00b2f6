from collections import Counter
from hashlib import blake2b
from math import log2

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.jobs.events import MAX_EVENT_BYTES, REASON_CHARS
from placement.advert import Advert, AdvertError, Gpu, Portion, decode_advert, encode_advert
from placement.allotment import allot, untouched
from placement.decision import cannot_ever, decide, explain, replay, replica_order, witness_order
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
        room=(),
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
def test_the_integer_logarithm_is_the_logarithm(draw: int) -> None:
    exact = (64 - log2(draw)) * 2**FRACTION_BITS
    assert exact - 2 <= negative_log2(draw) <= exact * (1 + 1e-9) + 190  # units of 2**-32: 4.4e-8


@given(st.integers(1, 2**64 - 2), st.integers(0, 2**20))
def test_a_better_draw_never_has_the_larger_logarithm(draw: int, more: int) -> None:
    assert negative_log2(min(2**64 - 1, draw + more)) <= negative_log2(draw)


def _draw(key: bytes, node: bytes) -> int:
    """What `draws` does in all lanes at once, for one."""
    secret = blake2b(key, digest_size=16, person=b"mesh-hrw2-key").digest()
    mixed = int.from_bytes(blake2b(node, digest_size=8, person=b"mesh-hrw2-node").digest(), "little")
    mixed = (mixed ^ int.from_bytes(secret[8:], "little")) * (int.from_bytes(secret[:8], "little") | 1) % 2**64
    mixed = (mixed ^ mixed >> 32) * 0xFF51AFD7ED558CCD % 2**64
    mixed = (mixed ^ mixed >> 29) * 0xC4CEB9FE1A85EC53 % 2**64
    return mixed ^ mixed >> 32


@given(st.binary(max_size=40), st.lists(st.binary(max_size=40), max_size=40))
def test_a_draw_depends_on_its_key_and_node_alone(key: bytes, nodes: list[bytes]) -> None:
    assert list(draws(key, [lane(node) for node in nodes])) == [_draw(key, node) for node in nodes]


def test_draws_are_even_and_independent() -> None:
    """Who is first and who second, over 20,000 jobs and 20 nodes: each pair as often as any other."""
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
def test_removing_a_node_moves_nobody_else(key: bytes, weights: dict[bytes, int], data: st.DataObject) -> None:
    gone = data.draw(st.sampled_from(sorted(weights)))
    before = [node for node, _ in rank(key, weights.items()) if node != gone]
    after = [node for node, _ in rank(key, [(n, w) for n, w in weights.items() if n != gone])]
    assert before == after


@given(st.binary(max_size=20), WEIGHTED, st.data())
def test_more_weight_never_costs_a_rank(key: bytes, weights: dict[bytes, int], data: st.DataObject) -> None:
    node = data.draw(st.sampled_from(sorted(weights)))

    def place(table: dict[bytes, int]) -> int:
        return [name for name, _ in rank(key, table.items())].index(node)

    assert place({**weights, node: weights[node] + data.draw(st.integers(1, 64))}) <= place(weights)


def test_shares_follow_weights() -> None:
    weights = {NODES[0]: 10, NODES[1]: 20, NODES[2]: 30}
    wins = dict.fromkeys(weights, 0)
    keys = 6000
    for number in range(keys):
        wins[rank(b"%d" % number, weights.items())[0][0]] += 1
    chi2 = sum((wins[n] - keys * w / 60) ** 2 / (keys * w / 60) for n, w in weights.items())
    assert chi2 < 20, wins  # two degrees of freedom: 20 is one in twenty thousand


@given(st.permutations(NODES))
def test_the_order_of_adverts_does_not_matter_and_decisions_replay(order: list[bytes]) -> None:
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
    assert ranking.candidates[-1].node == NODES[2], "the node it has just left comes last, but it comes"


@pytest.mark.parametrize(
    ("changes", "request_changes", "words"),
    [
        ({"lending": False}, {}, "does not lend"),
        ({"paused": True}, {}, "paused"),
        ({"accepts": ("bob",)}, {}, "bob only"),
        ({"engines": ()}, {}, "no process engine"),
        ({"own_only": ("process",)}, {}, "no sandbox"),
        ({}, {"image": "torch"}, "no docker engine"),
        ({"engines": ("docker",)}, {"image": "torch"}, "no image torch"),
        ({}, {"zone": "b2"}, "zone"),
        ({}, {"memory_mib": 10**6}, "memory"),
        ({"interactive": False}, {"interactive": True}, "allows no interactive sessions"),
        ({"cpus": 2}, {"cpus": 3}, "lends 2 CPUs to a job, 3 asked"),
        ({"slots_free": 0}, {}, "slots are taken"),
        ({"slots": 0}, {}, "only GPU jobs"),
        ({}, {"gpus": 1}, "has 0 GPUs"),
        (
            {"gpus": (gpu(1, 1000),), "room": (Portion("GPU-1", 100, 1000),)},
            {"gpus": 1, "vram_mib": 2000},
            "up to 1000 MiB",
        ),
        ({"gpus": (gpu(1, 1000),)}, {"gpus": 1}, "are free"),
        (
            {"gpus": (gpu(1, 1000),), "room": (Portion("GPU-1", 99, 999),), "guards": True},
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
            {"gpus": (gpu(1, 1000),), "room": (Portion("GPU-1", 29, 1000),), "guards": True},
            SHARE,
            "0 of 1 fitting GPUs have 30 % and 600 MiB left, 1 asked",
        ),
        ({}, {"exclude": (NODES[0],)}, "failed this job a moment ago"),
    ],
)
def test_each_refusal_says_why(changes: dict[str, object], request_changes: dict[str, object], words: str) -> None:
    request = msgspec.structs.replace(Request(job=JOB, attempt=0, user="ada"), **request_changes)
    ranking = rank_nodes(request, [advert(NODES[0], **changes)])
    assert ranking.candidates == ()
    assert words in " ".join(ranking.refused[0].reasons)
    assert words in explain(request, ranking)[0]


def test_a_kind_of_gpu_is_found_by_any_part_of_its_name() -> None:
    one, other = gpu(1, 1000), Gpu("GPU-2", "NVIDIA RTX A6000", 1000, (8, 9))
    both = advert(NODES[0], gpus=(one, other), room=untouched((one, other)), driver=(550, 54, 14))
    kind = Request(JOB, 0, "ada", gpus=1, gpu_model="a6000", capability=(8, 9), driver=(550, 54))
    assert len(rank_nodes(kind, [both])) == 1 and allot(kind, both.gpus, both.room)[0].uuid == "GPU-2"
    assert (
        "0 of 1 fitting GPUs are free"
        in rank_nodes(kind, [msgspec.structs.replace(both, room=untouched((one,)))]).refused[0].reasons[0]
    )


def test_owners_run_their_own_jobs_without_a_sandbox() -> None:
    request = Request(job=JOB, attempt=0, user="owner")
    assert rank_nodes(request, [advert(NODES[0], own_only=("process",), accepts=())]).candidates


def test_an_impossible_request_is_told_at_once() -> None:
    adverts = [advert(NODES[0], gpus=(gpu(1, 1000),)), advert(NODES[1])]
    assert "no node has 99 GPUs; the largest, n1, has 1" in str(cannot_ever(Request(JOB, 0, "a", gpus=99), adverts))
    assert "5000 MiB" in str(cannot_ever(Request(JOB, 0, "a", gpus=1, vram_mib=5000), adverts))
    assert cannot_ever(Request(JOB, 0, "a", gpus=1), adverts) is None, "taken today is not never"
    share = Request(JOB, 0, "a", **SHARE)  # type: ignore[arg-type]
    assert "n1 cannot keep a job to a share of a GPU" in str(cannot_ever(share, adverts))
    assert cannot_ever(share, [advert(NODES[0], gpus=(gpu(1, 1000),), guards=True)]) is None
    assert "no node can run it now (30 % of 1 GPUs, 600 MiB each)" in explain(share, rank_nodes(share, adverts))[0]


NUMBERS = st.integers(-1, 101) | st.sampled_from((999, 1000, 1001, 2**31, 2**63 - 1))
PORTIONS = st.tuples(st.sampled_from(("GPU-1", "GPU-2", "GPU-3", "")), NUMBERS, NUMBERS)


@given(st.lists(PORTIONS, max_size=4), st.lists(NUMBERS, min_size=2, max_size=2))
def test_a_hostile_room_is_refused_or_possible(room: list[tuple[str, int, int]], sizes: list[int]) -> None:
    gpus = tuple(gpu(number, size) for number, size in enumerate(sizes, 1))
    data = encode_advert(advert(NODES[0], gpus=gpus, room=tuple(Portion(*part) for part in room)))
    try:
        told = decode_advert(NODES[0], data)
    except AdvertError:
        return
    assert len({left.uuid for left in told.room}) == len(told.room) <= len(gpus)
    for left in told.room:
        size = next(gpu.vram_mib for gpu in gpus if gpu.uuid == left.uuid)
        assert 0 <= left.share <= 100 and 0 <= left.vram_mib <= size and (left.share or left.vram_mib)
        assert (left.share == 100) == (left.vram_mib == size), (
            "whoever is on a GPU has some of its time and of its memory"
        )


def test_a_share_goes_where_it_breaks_no_whole_gpu() -> None:
    one = (gpu(1, 1000),)
    whole = [advert(node, gpus=one, room=untouched(one), guards=True, weight=64) for node in NODES[1:]]
    shared = advert(NODES[0], gpus=one, room=(Portion("GPU-1", 30, 600),), guards=True, weight=1)
    for number in range(20):
        request = Request(b"%d" % number, 0, "ada", **SHARE)  # type: ignore[arg-type]
        assert rank_nodes(request, [*whole, shared]).candidates[0].node == NODES[0]
        left = msgspec.structs.replace(request, avoid=(NODES[0],))
        assert rank_nodes(left, [*whole, shared]).candidates[-1].node == NODES[0], "but not back to where it comes from"


@given(st.binary(max_size=300))
def test_hostile_adverts_are_refused(data: bytes) -> None:
    with pytest.raises(AdvertError):
        decode_advert(NODES[0], data)


ONE = {"gpus": (gpu(1, 1000),)}
IMPOSSIBLE_ROOM: list[dict[str, object]] = [
    {"gpus": (gpu(1, 1000), gpu(1, 1000))},
    {"gpus": (gpu(1, -1),)},
    {"gpus": (gpu(1, 2**31),)},
    {"room": (Portion("ghost", 100, 1000),)},
    {**ONE, "room": (Portion("GPU-1", 50, 500), Portion("GPU-1", 50, 500))},
    *({**ONE, "room": (Portion("GPU-1", share, vram),)} for share, vram in ((101, 1000), (-1, 500), (50, -1))),
    *(
        {**ONE, "room": (Portion("GPU-1", share, vram),)}
        for share, vram in ((99, 1000), (100, 999), (99, 1001), (0, 0))
    ),
]


@pytest.mark.parametrize("changes", [{"weight": 0}, {"weight": 65}, {"slots": -1}, *IMPOSSIBLE_ROOM])
def test_impossible_adverts_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(AdvertError):
        decode_advert(NODES[0], encode_advert(advert(NODES[0], **changes)))
    with pytest.raises(AdvertError, match="its own author"):
        decode_advert(NODES[1], encode_advert(advert(NODES[0])))
    assert decode_advert(NODES[0], encode_advert(advert(NODES[0]))) == advert(NODES[0])


def test_replicas_go_to_other_zones_first_and_to_whoever_has_room() -> None:
    adverts = [advert(node, zone="ab"[number % 2]) for number, node in enumerate(NODES)]
    adverts[3] = advert(NODES[3], store_free_mib=0)
    order = replica_order(JOB, adverts, {NODES[0]}, need_mib=10)
    assert NODES[0] not in order and NODES[3] not in order and len(order) == 6
    zones = {ad.node: ad.zone for ad in adverts}
    assert zones[order[0]] != zones[order[1]]


def test_witnesses_are_everybody_in_one_order() -> None:
    adverts = [advert(node) for node in NODES[:4]]
    order = witness_order(JOB, adverts, NODES)
    assert sorted(order) == sorted(NODES)
    assert order == witness_order(JOB, list(reversed(adverts)), list(reversed(NODES)))

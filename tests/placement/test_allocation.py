"""Allocation of GPUs: never more than is free, packed, and equal on all nodes."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from placement.advert import WHOLE, Gpu, Portion, decode_advert, encode_advert
from placement.allocation import FreeGpus, all_free, allocate, gpu_percent, release, reserve, subtract
from placement.decision import decide
from placement.preemption import RunningJob, without_job
from placement.queue import Queue, Waiting
from placement.ranking import rank_nodes
from placement.request import Request
from tests.consensus.worlds import A, B, C, make_advert

GPUS = (Gpu("a", "A100", 80_000, (8, 0)), Gpu("b", "A100", 80_000, (8, 0)), Gpu("c", "T4", 16_000, (7, 5)))


def request(job: bytes = b"job", **needs: object) -> Request:
    return Request(job=job, attempt=0, user="ada", **{"gpus": 1, **needs})  # type: ignore[arg-type]


def share(per_cent: int, vram_mib: int, **needs: object) -> Request:
    return request(gpu_share=per_cent, vram_mib=vram_mib, **needs)


def uuids(portions: tuple[Portion, ...]) -> str:
    return "".join(portion.uuid for portion in portions)


def test_request_for_whole_gpu_takes_smallest_fitting_gpu() -> None:
    free = all_free(GPUS)
    assert allocate(request(), GPUS, free) == (Portion("c", WHOLE, 16_000),)
    assert allocate(request(vram_mib=20_000), GPUS, free) == (Portion("a", WHOLE, 80_000),)
    assert uuids(allocate(request(gpus=3), GPUS, free)) == "cab"
    assert allocate(request(gpus=3, vram_mib=20_000), GPUS, free) == ()
    assert uuids(allocate(request(capability=(8, 0)), GPUS, free)) == "a"
    assert allocate(request(gpus=0), GPUS, free) == ()


def test_share_takes_fitting_gpu_with_least_left() -> None:
    free = (Portion("a", 60, 40_000), Portion("b", 40, 70_000), Portion("c", WHOLE, 16_000))
    assert allocate(share(30, 6_000), GPUS, free) == (Portion("b", 30, 6_000),)
    assert uuids(allocate(share(50, 6_000), GPUS, free)) == "a"
    assert uuids(allocate(share(70, 6_000), GPUS, free)) == "c", "a whole GPU is split only if nothing else is left"
    assert uuids(allocate(share(30, 50_000), GPUS, free)) == "b" and allocate(share(50, 50_000), GPUS, free) == ()
    assert uuids(allocate(share(30, 6_000, gpus=2), GPUS, free)) == "ba", "of several GPUs, different ones"
    level = tuple(Portion(uuid, 50, 10_000) for uuid in "ba")
    assert uuids(allocate(share(10, 10), GPUS, level)) == "a"
    assert uuids(allocate(share(10, 10), GPUS, (Portion("a", 60, 10_000), Portion("b", 50, 70_000)))) == "b", (
        "time is scarcer than memory"
    )
    assert uuids(allocate(share(10, 10), GPUS, (Portion("a", 50, 70_000), Portion("b", 50, 10_000)))) == "b"


def test_request_for_whole_gpu_refuses_used_gpus() -> None:
    free = (Portion("a", 99, 79_999), Portion("b", 50, 80_000 - 1))
    assert allocate(request(), GPUS, free) == ()


def test_gpu_with_time_but_no_memory_left_fits_no_request() -> None:
    free = subtract(all_free(GPUS[:1]), (Portion("a", 40, 80_000),))
    assert free == (Portion("a", 60, 0),) and allocate(share(1, 1), GPUS, free) == ()
    assert release(GPUS, free, (Portion("a", 40, 80_000),)) == all_free(GPUS[:1])
    assert subtract(free, (Portion("a", 60, 0),)) == ()


def test_memory_of_a_gpu_without_time_left_is_not_lost() -> None:
    halves = (Portion("a", 50, 10_000), Portion("a", 50, 20_000))
    free = subtract(subtract(all_free(GPUS[:1]), halves[:1]), halves[1:])
    assert free == (Portion("a", 0, 50_000),) and allocate(share(1, 1), GPUS, free) == ()
    assert release(GPUS, free, halves[:1]) == (Portion("a", 50, 60_000),)


def test_more_than_a_whole_gpu_or_slot_is_neither_given_back_nor_taken() -> None:
    assert release(GPUS, (Portion("a", 70, 70_000),), (Portion("a", 60, 20_000),)) == all_free(GPUS[:1])
    full = make_advert(A, slots=1, slots_free=0)
    assert reserve(full, request(gpus=0)).slots_free == 0
    assert without_job(make_advert(A, slots=1, slots_free=1), RunningJob(b"job", A, 50, 0, True)).slots_free == 1


def test_release_never_exceeds_whole_gpu() -> None:
    lies = (Portion("a", 90, 2**31 - 1), Portion("ghost", 100, 5))
    assert release(GPUS, (Portion("a", 60, 0),), lies) == all_free(GPUS[:1])


def test_gpu_percent_of_slot_gpu_and_share() -> None:
    assert [gpu_percent(0, WHOLE), gpu_percent(2, WHOLE), gpu_percent(1, 30), gpu_percent(3, 1)] == [100, 200, 30, 3]


SHARES = st.builds(share, st.integers(1, 99), st.integers(1, 90_000), gpus=st.integers(1, 3))
WHOLES = st.builds(request, gpus=st.integers(1, 3), vram_mib=st.integers(0, 90_000))
REQUESTS = SHARES | WHOLES
STEPS = st.lists(st.tuples(REQUESTS, st.none() | st.integers(0, 20)), max_size=25)


@given(STEPS)
def test_no_gpu_is_allocated_twice(steps: list[tuple[Request, int | None]]) -> None:
    free: FreeGpus = all_free(GPUS)
    given_out: list[tuple[Portion, ...]] = []
    for wanted, leaves in steps:
        if leaves is not None and leaves < len(given_out):
            free = release(GPUS, free, given_out.pop(leaves))
        before = {left.uuid: left for left in free}
        portions = allocate(wanted, GPUS, free)
        if not portions:
            continue
        assert len({portion.uuid for portion in portions}) == wanted.gpus
        if wanted.gpu_share == WHOLE:
            assert all(before[portion.uuid] == portion for portion in portions)
            assert {portion.uuid for portion in portions} <= {p.uuid for p in all_free(GPUS) if p in free}
        free = subtract(free, portions)
        given_out.append(portions)
        for gpu in GPUS:
            here = [portion for portions in given_out for portion in portions if portion.uuid == gpu.uuid]
            left = next((left for left in free if left.uuid == gpu.uuid), Portion(gpu.uuid, 0, 0))
            assert sum(portion.share for portion in here) + left.share == WHOLE
            assert sum(portion.vram_mib for portion in here) + left.vram_mib == gpu.vram_mib
            assert len(here) <= 1 or all(portion.share < WHOLE for portion in here)
        told = make_advert(A, gpus=GPUS, free_portions=free)
        assert decode_advert(A, encode_advert(told)) == told, "the resulting advert is valid for other nodes"
    for portions in given_out:
        free = release(GPUS, free, portions)
    assert free == all_free(GPUS)


@given(st.lists(REQUESTS, min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_queue_reserves_same_places_for_same_adverts(wanted: list[Request], rng: object) -> None:
    jobs = [msgspec.structs.replace(one, job=b"%d" % number) for number, one in enumerate(wanted)]
    adverts = [make_advert(node, gpus=GPUS, free_portions=all_free(GPUS), guards=True) for node in (A, B, C)]
    shuffled = [msgspec.structs.replace(ad, free_portions=ad.free_portions[::-1], gpus=ad.gpus[::-1]) for ad in adverts]
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    waiting = [Waiting(job, 50, number) for number, job in enumerate(jobs)]
    queues = [Queue(waiting, {}, seen, 1000) for seen in (adverts, shuffled)]
    assert queues[0].kept == queues[1].kept
    for job, place in zip(jobs, waiting, strict=True):
        lefts = [queue.left_for(place, seen) for queue, seen in zip(queues, (adverts, shuffled), strict=True)]
        rooms = [{ad.node: set(ad.free_portions) for ad in left} for left in lefts]
        assert rooms[0] == rooms[1]
        one, two = (rank_nodes(job, left) for left in lefts)
        assert one == two and (not one.candidates or decide(job, one) == decide(job, two))

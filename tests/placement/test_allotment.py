"""What a request gets of GPUs: never more than there is, beside others rather than alone, and the same everywhere."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from placement.advert import WHOLE, Gpu, Portion, decode_advert, encode_advert
from placement.allotment import Room, allot, percent, returned, untouched, without
from placement.decision import decide
from placement.queue import Queue, Waiting
from placement.ranking import rank_nodes
from placement.request import Request
from tests.jobs.worlds import A, B, C, make_advert

GPUS = (Gpu("a", "A100", 80_000, (8, 0)), Gpu("b", "A100", 80_000, (8, 0)), Gpu("c", "T4", 16_000, (7, 5)))


def request(job: bytes = b"job", **needs: object) -> Request:
    return Request(job=job, attempt=0, user="ada", **{"gpus": 1, **needs})  # type: ignore[arg-type]


def share(per_cent: int, vram_mib: int, **needs: object) -> Request:
    return request(gpu_share=per_cent, vram_mib=vram_mib, **needs)


def uuids(portions: tuple[Portion, ...]) -> str:
    return "".join(portion.uuid for portion in portions)


def test_the_smallest_whole_gpu_that_fits_is_taken_whole() -> None:
    room = untouched(GPUS)
    assert allot(request(), GPUS, room) == (Portion("c", WHOLE, 16_000),)
    assert allot(request(vram_mib=20_000), GPUS, room) == (Portion("a", WHOLE, 80_000),)
    assert uuids(allot(request(gpus=3), GPUS, room)) == "cab"
    assert allot(request(gpus=3, vram_mib=20_000), GPUS, room) == ()
    assert uuids(allot(request(capability=(8, 0)), GPUS, room)) == "a"
    assert allot(request(gpus=0), GPUS, room) == ()


def test_a_share_goes_beside_others_where_the_least_is_left() -> None:
    room = (Portion("a", 60, 40_000), Portion("b", 40, 70_000), Portion("c", WHOLE, 16_000))
    assert allot(share(30, 6_000), GPUS, room) == (Portion("b", 30, 6_000),)
    assert uuids(allot(share(50, 6_000), GPUS, room)) == "a"
    assert uuids(allot(share(70, 6_000), GPUS, room)) == "c", "a whole one is broken only where nothing else is left"
    assert uuids(allot(share(30, 50_000), GPUS, room)) == "b" and allot(share(50, 50_000), GPUS, room) == ()
    assert uuids(allot(share(30, 6_000, gpus=2), GPUS, room)) == "ba", "of several GPUs, different ones"
    level = tuple(Portion(uuid, 50, 10_000) for uuid in "ba")
    assert uuids(allot(share(10, 10), GPUS, level)) == "a"


def test_who_wants_a_whole_gpu_gets_none_that_has_anybody_on_it() -> None:
    room = (Portion("a", 99, 79_999), Portion("b", 50, 80_000 - 1))
    assert allot(request(), GPUS, room) == ()


def test_what_has_room_of_one_kind_only_takes_nobody_and_is_told_all_the_same() -> None:
    room = without(untouched(GPUS[:1]), (Portion("a", 40, 80_000),))
    assert room == (Portion("a", 60, 0),) and allot(share(1, 1), GPUS, room) == ()
    assert returned(GPUS, room, (Portion("a", 40, 80_000),)) == untouched(GPUS[:1])
    assert without(room, (Portion("a", 60, 0),)) == ()


def test_more_is_never_given_back_than_there_is() -> None:
    lies = (Portion("a", 90, 2**31 - 1), Portion("ghost", 100, 5))
    assert returned(GPUS, (Portion("a", 60, 0),), lies) == untouched(GPUS[:1])


def test_a_slot_counts_as_a_gpu_and_a_share_as_its_part() -> None:
    assert [percent(0, WHOLE), percent(2, WHOLE), percent(1, 30), percent(3, 1)] == [100, 200, 30, 3]


SHARES = st.builds(share, st.integers(1, 99), st.integers(1, 90_000), gpus=st.integers(1, 3))
WHOLES = st.builds(request, gpus=st.integers(1, 3), vram_mib=st.integers(0, 90_000))
REQUESTS = SHARES | WHOLES
STEPS = st.lists(st.tuples(REQUESTS, st.none() | st.integers(0, 20)), max_size=25)


@given(STEPS)
def test_no_gpu_is_ever_given_twice_whoever_comes_and_goes(steps: list[tuple[Request, int | None]]) -> None:
    room: Room = untouched(GPUS)
    given_out: list[tuple[Portion, ...]] = []
    for wanted, leaves in steps:
        if leaves is not None and leaves < len(given_out):
            room = returned(GPUS, room, given_out.pop(leaves))
        before = {left.uuid: left for left in room}
        portions = allot(wanted, GPUS, room)
        if not portions:
            continue
        assert len({portion.uuid for portion in portions}) == wanted.gpus
        if wanted.gpu_share == WHOLE:
            assert all(before[portion.uuid] == portion for portion in portions)
            assert {portion.uuid for portion in portions} <= {p.uuid for p in untouched(GPUS) if p in room}
        room = without(room, portions)
        given_out.append(portions)
        for gpu in GPUS:
            here = [portion for portions in given_out for portion in portions if portion.uuid == gpu.uuid]
            left = next((left for left in room if left.uuid == gpu.uuid), Portion(gpu.uuid, 0, 0))
            assert sum(portion.share for portion in here) + left.share == WHOLE
            assert sum(portion.vram_mib for portion in here) + left.vram_mib == gpu.vram_mib
            assert len(here) <= 1 or all(portion.share < WHOLE for portion in here)
        told = make_advert(A, gpus=GPUS, room=room)
        assert decode_advert(A, encode_advert(told)) == told, "what comes of it is an advert that others believe"
    for portions in given_out:
        room = returned(GPUS, room, portions)
    assert room == untouched(GPUS)


@given(st.lists(REQUESTS, min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_the_same_adverts_give_the_same_decisions(wanted: list[Request], rng: object) -> None:
    jobs = [msgspec.structs.replace(one, job=b"%d" % number) for number, one in enumerate(wanted)]
    adverts = [make_advert(node, gpus=GPUS, room=untouched(GPUS), guards=True) for node in (A, B, C)]
    shuffled = [msgspec.structs.replace(ad, room=ad.room[::-1], gpus=ad.gpus[::-1]) for ad in adverts]
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    waiting = [Waiting(job, 50, number) for number, job in enumerate(jobs)]
    queues = [Queue(waiting, {}, seen, 1000) for seen in (adverts, shuffled)]
    assert queues[0].kept == queues[1].kept
    for job, place in zip(jobs, waiting, strict=True):
        lefts = [queue.left_for(place, seen) for queue, seen in zip(queues, (adverts, shuffled), strict=True)]
        rooms = [{ad.node: set(ad.room) for ad in left} for left in lefts]
        assert rooms[0] == rooms[1]
        one, two = (rank_nodes(job, left) for left in lefts)
        assert one == two and (not one.candidates or decide(job, one) == decide(job, two))

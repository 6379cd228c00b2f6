"""Who makes room: only for much more, only what loses nothing, the least important that is enough."""

import pytest

from placement.advert import Advert, Gpu, Portion
from placement.allotment import untouched
from placement.preemption import MARGIN, MIN_STAY_S, Stay, must_yield, victim
from placement.request import Request
from tests.jobs.worlds import A, B, make_advert

NOW = 10_000.0
REQUEST = Request(job=b"mine", attempt=0, user="ada")


def stay(name: str, node: bytes = A, **changes: object) -> Stay:
    fields: dict[str, object] = {"priority": 10, "since_unix": 0, "saves": True, **changes}
    return Stay(name.encode(), node, **fields)  # type: ignore[arg-type]


def full(node: bytes = A, **changes: object) -> Advert:
    return make_advert(node, **{"slots": 2, "slots_free": 0, **changes})


def chosen(*stays: Stay, adverts: tuple[Advert, ...] = (full(), full(B)), request: Request = REQUEST) -> str | None:
    found = victim(request, 50, adverts, stays, NOW)
    return None if found is None else found.job.decode()


def test_the_least_important_goes_and_of_those_the_youngest() -> None:
    assert chosen(stay("low"), stay("lower", priority=5), stay("equal", priority=50)) == "lower"
    assert chosen(stay("old"), stay("young", since_unix=9_000)) == "young"


@pytest.mark.parametrize(
    "spared",
    [
        stay("near", priority=51 - MARGIN),
        stay("new", since_unix=int(NOW) - MIN_STAY_S + 1),
        stay("unsaved", saves=False),
        stay("elsewhere", node=b"unknown"),
    ],
)
def test_who_is_left_in_peace(spared: Stay) -> None:
    assert chosen(spared) is None


def test_nobody_goes_where_that_would_not_help() -> None:
    assert chosen(stay("on a paused node"), adverts=(full(paused=True),)) is None
    gpus = tuple(Gpu(f"GPU-{number}", "A100", 80_000) for number in range(2))
    two = Request(job=b"mine", attempt=0, user="ada", gpus=2)
    both, busy = untouched(gpus), full(gpus=gpus, room=())
    assert chosen(stay("one", portions=both[:1]), adverts=(busy,), request=two) is None
    assert chosen(stay("both", portions=both), adverts=(busy,), request=two) == "both"
    assert chosen(stay("a slot"), adverts=(busy,), request=two) is None


def test_a_share_goes_if_what_it_leaves_is_enough_on_its_own_gpu() -> None:
    gpus = tuple(Gpu(f"GPU-{number}", "A100", 80_000) for number in range(2))
    room = (Portion("GPU-0", 0, 10_000), Portion("GPU-1", 40, 60_000))
    shared = full(gpus=gpus, room=room, guards=True)
    half = Request(job=b"mine", attempt=0, user="ada", gpus=1, gpu_share=50, vram_mib=40_000)
    here, there = Portion("GPU-0", 50, 20_000), Portion("GPU-1", 10, 1_000)
    assert chosen(stay("too little memory", portions=(here,)), adverts=(shared,), request=half) is None
    assert chosen(stay("enough", portions=(there,)), adverts=(shared,), request=half) == "enough"
    whole = Request(job=b"mine", attempt=0, user="ada", gpus=1)
    assert chosen(stay("enough", portions=(there,)), adverts=(shared,), request=whole) is None
    last = stay("last", portions=(Portion("GPU-1", 60, 20_000),))
    assert chosen(last, adverts=(shared,), request=whole) == "last"


def test_the_runner_judges_by_the_same_rule() -> None:
    assert must_yield(50, stay("low"), NOW) and not must_yield(50, stay("equal", priority=50), NOW)

"""Preemption: only for much higher priority, only of jobs with checkpoints, the least important first."""

import pytest

from placement.advert import Advert, Gpu, Portion
from placement.allocation import all_free
from placement.preemption import RunningJob, must_yield, victim
from placement.request import Request
from tests.consensus.worlds import A, B, make_advert

NOW = 10_000.0
REQUEST = Request(job=b"mine", attempt=0, user="ada")


def running_job(name: str, node: bytes = A, **changes: object) -> RunningJob:
    fields: dict[str, object] = {"priority": 10, "since_unix": 0, "saves": True, **changes}
    return RunningJob(name.encode(), node, **fields)  # type: ignore[arg-type]


def full(node: bytes = A, **changes: object) -> Advert:
    return make_advert(node, **{"slots": 2, "slots_free": 0, **changes})


def chosen(
    *running: RunningJob, adverts: tuple[Advert, ...] = (full(), full(B)), request: Request = REQUEST
) -> str | None:
    found = victim(request, 50, adverts, running, NOW)
    return None if found is None else found.job.decode()


def test_victim_is_least_important_then_youngest() -> None:
    assert chosen(running_job("low"), running_job("lower", priority=5), running_job("equal", priority=50)) == "lower"
    assert chosen(running_job("old"), running_job("young", since_unix=9_000)) == "young"


@pytest.mark.parametrize(
    "spared",
    [
        running_job("near", priority=31),
        running_job("leaves", leaves=True),
        running_job("new", since_unix=int(NOW) - 119),
        running_job("unsaved", saves=False),
        running_job("elsewhere", node=b"unknown"),
    ],
)
def test_job_is_not_preempted(spared: RunningJob) -> None:
    assert chosen(spared) is None


def test_no_victim_if_preemption_would_not_help() -> None:
    assert chosen(running_job("on a paused node"), adverts=(full(paused=True),)) is None
    gpus = tuple(Gpu(f"GPU-{number}", "A100", 80_000) for number in range(2))
    two = Request(job=b"mine", attempt=0, user="ada", gpus=2)
    both, busy = all_free(gpus), full(gpus=gpus, free_portions=())
    assert chosen(running_job("one", portions=both[:1]), adverts=(busy,), request=two) is None
    assert chosen(running_job("both", portions=both), adverts=(busy,), request=two) == "both"
    assert chosen(running_job("a slot"), adverts=(busy,), request=two) is None


def test_share_is_preempted_if_its_gpu_then_fits_request() -> None:
    gpus = tuple(Gpu(f"GPU-{number}", "A100", 80_000) for number in range(2))
    room = (Portion("GPU-0", 0, 10_000), Portion("GPU-1", 40, 60_000))
    shared = full(gpus=gpus, free_portions=room, guards=True)
    half = Request(job=b"mine", attempt=0, user="ada", gpus=1, gpu_share=50, vram_mib=40_000)
    here, there = Portion("GPU-0", 50, 20_000), Portion("GPU-1", 10, 1_000)
    assert chosen(running_job("too little memory", portions=(here,)), adverts=(shared,), request=half) is None
    assert chosen(running_job("enough", portions=(there,)), adverts=(shared,), request=half) == "enough"
    whole = Request(job=b"mine", attempt=0, user="ada", gpus=1)
    assert chosen(running_job("enough", portions=(there,)), adverts=(shared,), request=whole) is None
    last = running_job("last", portions=(Portion("GPU-1", 60, 20_000),))
    assert chosen(last, adverts=(shared,), request=whole) == "last"


def test_must_yield_compares_priorities() -> None:
    assert must_yield(50, running_job("low"), NOW) and not must_yield(50, running_job("equal", priority=50), NOW)


def test_margin_and_stay_hold_to_the_point_and_the_second() -> None:
    low, new = running_job("low", priority=30), running_job("new", since_unix=int(NOW) - 120)
    assert must_yield(50, low, NOW) and not must_yield(49, low, NOW)
    assert must_yield(30, new, NOW)

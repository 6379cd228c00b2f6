"""Who goes first: priority, share, age; what does not fit blocks nobody; everybody forms the same queue."""

from hypothesis import given
from hypothesis import strategies as st

from placement.advert import Advert, Gpu
from placement.queue import AGE_POINT_S, FAIR_POINTS, HALF_LIFE_S, MAX_PRIORITY, Queue, Waiting, decayed
from placement.request import Request
from tests.jobs.worlds import A, B, C, make_advert

NOW = 1_000_000


def waiting(name: str, *, user: str = "ada", priority: int = 50, waited_s: int = 0, **needs: object) -> Waiting:
    request = Request(job=name.encode(), attempt=0, user=user, **needs)  # type: ignore[arg-type]
    return Waiting(request, priority, NOW - waited_s)


def order(*jobs: Waiting, usage: dict[str, int] | None = None) -> list[str]:
    queue = Queue(jobs, usage or {}, (), NOW)
    return [job.job.decode() for job in sorted(jobs, key=queue.key)]


def slots(node: bytes, free: int) -> Advert:
    return make_advert(node, slots=4, slots_free=free)


def ahead(mine: Waiting, others: list[Waiting], *adverts: Advert) -> tuple[int, list[bytes]]:
    """How many go first, and which nodes still have a free slot then."""
    left, count = Queue([*others, mine], {}, adverts, NOW).left_for(mine, adverts)
    return count, [advert.node for advert in left if advert.slots_free]


def test_priority_goes_first_and_then_who_came_first() -> None:
    assert order(waiting("low", priority=10), waiting("high", priority=90), waiting("mid")) == ["high", "mid", "low"]
    assert order(waiting("late", waited_s=5), waiting("early", waited_s=90)) == ["early", "late"]


def test_whoever_has_had_less_goes_first() -> None:
    jobs = (waiting("greedy", user="bob", waited_s=500), waiting("modest", user="ada"))
    assert order(*jobs, usage={"bob": 100_000, "ada": 0}) == ["modest", "greedy"]
    assert order(*jobs, usage={"bob": 100, "ada": 100}) == ["greedy", "modest"]


def test_nothing_starves() -> None:
    worst = waiting("worst", user="bob", priority=0, waited_s=(MAX_PRIORITY + FAIR_POINTS + 1) * AGE_POINT_S)
    best = waiting("best", user="ada", priority=MAX_PRIORITY)
    assert order(best, worst, usage={"bob": 10**9, "ada": 0}) == ["worst", "best"]


def test_use_is_forgotten_by_halves() -> None:
    assert (
        decayed(1000, 4, 0) == 4000
        and decayed(1000, 4, HALF_LIFE_S) == 2000
        and decayed(1000, 0, 2 * HALF_LIFE_S) == 250
    )
    assert decayed(1000, 1, -5) == 1000, "of a clock that is ahead"


def test_those_ahead_have_their_places_first() -> None:
    mine = waiting("mine")
    assert ahead(mine, [], slots(A, 1)) == (0, [A])
    assert ahead(mine, [waiting("first", waited_s=60)], slots(A, 1)) == (1, [])
    assert ahead(mine, [waiting("first", waited_s=60)], slots(A, 2)) == (1, [A])
    assert ahead(mine, [waiting("behind", priority=1)], slots(A, 1)) == (0, [A])
    count, free = ahead(
        mine, [waiting(name, priority=60) for name in ("x", "y")], slots(A, 1), slots(B, 1), slots(C, 1)
    )
    assert count == 2 and len(free) == 1


def test_a_job_that_nothing_free_fits_blocks_nobody() -> None:
    mine = waiting("mine")
    for hopeless in (waiting("zone", priority=100, zone="atlantis"), waiting("gpus", priority=100, gpus=8)):
        assert ahead(mine, [hopeless], slots(A, 1)) == (0, [A])


def test_gpus_are_taken_one_by_one_and_only_those_that_fit() -> None:
    gpus = (Gpu("small", "T4", 16_000), Gpu("large", "A100", 80_000))
    advert = make_advert(A, gpus=gpus, gpus_free=("small", "large"))
    first, mine = waiting("first", priority=60, gpus=1, vram_mib=40_000), waiting("mine", gpus=1)
    left, count = Queue([first, mine], {}, [advert], NOW).left_for(mine, [advert])
    assert count == 1 and left[0].gpus_free == ("small",)


def test_it_never_keeps_more_than_there_is() -> None:
    many = [waiting(f"job{number}", priority=60) for number in range(500)]
    mine = waiting("mine")
    left, count = Queue([*many, mine], {}, [slots(A, 3)], NOW).left_for(mine, [slots(A, 3)])
    assert count == 3 and left[0].slots_free == 0


jobs = st.lists(
    st.builds(
        waiting,
        st.text("abc", min_size=1, max_size=3),
        user=st.sampled_from(["ada", "bob"]),
        priority=st.integers(0, MAX_PRIORITY),
        waited_s=st.integers(-100, 10**6),
    ),
    max_size=12,
    unique_by=lambda job: job.job,
)


@given(jobs, st.randoms(use_true_random=False), st.integers(0, 4), st.integers(0, 4))
def test_every_node_forms_the_same_queue_and_somebody_can_always_go(
    mixed: list[Waiting], rng: object, a: int, b: int
) -> None:
    adverts = [slots(A, a), slots(B, b)]
    other = list(mixed)
    rng.shuffle(other)  # type: ignore[attr-defined]
    usage = {"ada": 500, "bob": 70_000}
    one, two = Queue(mixed, usage, adverts, NOW), Queue(other, usage, adverts[::-1], NOW)
    may_go = 0
    for job in mixed:
        left, count = one.left_for(job, adverts)
        assert (sorted(ad.node for ad in left if ad.slots_free), count) == (
            sorted(ad.node for ad in two.left_for(job, adverts)[0] if ad.slots_free),
            count,
        )
        may_go += any(advert.slots_free for advert in left)
    assert may_go == min(len(mixed), a + b), "as many as there are places, and no more"

"""Queue: order by priority, usage and age, equal on all nodes; jobs that fit nowhere block no other job."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from placement.advert import WHOLE, Advert, Gpu, Portion
from placement.allocation import all_free, gpu_percent
from placement.queue import MAX_PRIORITY, Patience, Queue, Waiting, decayed, fair_points, mean_of
from placement.ranking import rank_nodes
from placement.request import Request
from tests.consensus.worlds import A, B, C, make_advert

NOW = 1_000_000


def waiting(name: str, *, user: str = "ada", priority: int = 50, waited_s: int = 0, **needs: object) -> Waiting:
    request = Request(job=name.encode(), attempt=0, user=user, **needs)  # type: ignore[arg-type]
    return Waiting(request, priority, NOW - waited_s)


def order(*jobs: Waiting, usage: dict[str, int] | None = None) -> list[str]:
    queue = Queue(jobs, usage or {}, (), NOW)
    return [job.job.decode() for job in sorted(jobs, key=queue.key)]


def slots(node: bytes, free: int) -> Advert:
    return make_advert(node, slots=4, slots_free=free)


def left(mine: Waiting, others: list[Waiting], *adverts: Advert) -> list[bytes]:
    """Return the nodes with a free slot after the jobs ahead have theirs."""
    offers = Queue([*others, mine], {}, adverts, NOW).left_for(mine, adverts)
    return [advert.node for advert in offers if advert.slots_free]


def test_queue_orders_by_priority_then_submission() -> None:
    assert order(waiting("low", priority=10), waiting("high", priority=90), waiting("mid")) == ["high", "mid", "low"]
    assert order(waiting("late", waited_s=5), waiting("early", waited_s=90)) == ["early", "late"]


def test_queue_puts_nearer_deadline_first_among_equals() -> None:
    late, soon = (
        msgspec.structs.replace(waiting(name), deadline_unix=NOW + s) for name, s in (("late", 99), ("soon", 9))
    )
    assert order(waiting("never", waited_s=5), late, soon) == ["soon", "late", "never"]
    assert order(late, waiting("more", priority=51)) == ["more", "late"]


def test_queue_puts_user_with_less_usage_first() -> None:
    jobs = (waiting("greedy", user="bob", waited_s=500), waiting("modest", user="ada"))
    assert order(*jobs, usage={"bob": 100_000, "ada": 0}) == ["modest", "greedy"]
    assert order(*jobs, usage={"bob": 100, "ada": 100}) == ["greedy", "modest"]


def test_waiting_job_overtakes_any_priority() -> None:
    best = waiting("best", priority=MAX_PRIORITY)
    for waited_s, first in (((100 * 10 - 1) * 60, "best"), (100 * 10 * 60, "worst")):
        worst = waiting("worst", priority=0, waited_s=waited_s)
        assert order(best, worst)[0] == first, "ten minutes count as much as a point of priority"
    assert order(waiting("ahead", waited_s=-7200), waiting("now"))[0] == "now"
    assert order(waiting("ahead", priority=51, waited_s=-7200), waiting("now"))[0] == "ahead", (
        "a clock that is ahead costs a job no points"
    )


def test_user_without_usage_leads_by_up_to_twenty_points() -> None:
    assert [fair_points(used, 100) for used in (0, 100, 300, 10**9)] == [20, 10, 5, 0]
    assert mean_of({"ada": 0, "bob": 300, "eve": 0}) == 100 and mean_of({}) == mean_of({"ada": 0}) == 1
    for priority, first in ((65, "modest"), (66, "greedy")):
        greedy = waiting("greedy", user="bob", priority=priority)
        assert order(greedy, waiting("modest", waited_s=5), usage={"bob": 300, "ada": 0, "eve": 0})[0] == first


def test_user_who_has_run_nothing_leads_over_one_with_usage() -> None:
    for priority, first in ((60, "new"), (61, "used")):
        used = waiting("used", user="bob", priority=priority)
        assert order(used, waiting("new", waited_s=5), usage={"bob": 100})[0] == first, "twenty points against ten"


def test_usage_decays_by_halves() -> None:
    four, slot, share = gpu_percent(4, WHOLE), gpu_percent(0, WHOLE), gpu_percent(2, 15)
    week_s = 7 * 24 * 3600
    assert decayed(1000, four, week_s - 1) == 400_000 and decayed(1000, four, week_s) == 200_000
    assert decayed(1000, slot, 2 * week_s) == 25_000 and decayed(1000, share, 0) == 30_000
    assert decayed(1000, slot, -5) == 100_000, "the time is from a clock that is ahead"


def test_left_for_subtracts_places_of_jobs_ahead() -> None:
    mine = waiting("mine")
    assert left(mine, [], slots(A, 1)) == [A]
    assert left(mine, [waiting("first", waited_s=60)], slots(A, 1)) == []
    assert left(mine, [waiting("first", waited_s=60)], slots(A, 2)) == [A]
    assert left(mine, [waiting("behind", priority=1)], slots(A, 1)) == [A]
    others = [waiting(name, priority=60) for name in ("x", "y")]
    assert len(left(mine, others, slots(A, 1), slots(B, 1), slots(C, 1))) == 1


def test_places_of_the_jobs_behind_are_left() -> None:
    mine, behind = waiting("mine"), [waiting("behind", priority=1)]
    assert left(mine, behind, slots(A, 1), slots(B, 1)) == [A, B], "it takes any of them"
    queue = Queue([mine, waiting("first", priority=60)], {}, [slots(A, 1), slots(B, 1)], NOW)
    offers = [offer for node in (A, B) for offer in queue.left_for(mine, [slots(node, 1)])]
    assert [offer.node for offer in offers] == [A, B] and sum(offer.slots_free for offer in offers) == 1, (
        "of those asked"
    )


def test_place_reserved_for_an_earlier_attempt_is_the_jobs_own() -> None:
    earlier, mine = waiting("mine", waited_s=9), waiting("mine")
    queue = Queue([earlier], {}, [slots(A, 1)], NOW)
    assert [offer.slots_free for offer in queue.left_for(mine, [slots(A, 1)])] == [1]


def test_gpus_of_a_node_without_slots_are_reserved() -> None:
    gpus = (Gpu("one", "A100", 80_000), Gpu("two", "A100", 80_000))
    advert = make_advert(A, gpus=gpus, free_portions=all_free(gpus), slots=1, slots_free=0)
    ahead, mine = [waiting(name, priority=60, gpus=1) for name in ("first", "second")], waiting("mine", gpus=1)
    for jobs, free in ((ahead[:1], 1), (ahead, 0)):
        (offer,) = Queue([*jobs, mine], {}, [advert], NOW).left_for(mine, [advert])
        assert offer.whole_gpus_free == free


def test_job_without_a_fitting_place_blocks_no_other_job() -> None:
    mine = waiting("mine")
    for hopeless in (waiting("zone", priority=100, zone="atlantis"), waiting("gpus", priority=100, gpus=8)):
        assert left(mine, [hopeless], slots(A, 1)) == [A]


def test_job_that_failed_on_a_node_hides_no_job_of_its_kind() -> None:
    failed, other = waiting("failed", priority=100, exclude=(A,)), waiting("other", priority=90)
    assert left(waiting("mine"), [failed, other], slots(A, 1)) == [], "the other one takes the place"


def test_places_are_assigned_by_the_given_ranking() -> None:
    adverts = [slots(A, 1), slots(B, 1)]
    for there in adverts:
        queue = Queue(
            [waiting("first")], {}, adverts, NOW, ranked=lambda request, free, one=there: rank_nodes(request, [one])
        )
        assert queue.kept == {(b"first", there.node)}


def test_gang_without_enough_nodes_takes_no_place_from_a_job_on_one() -> None:
    gang, single, mine = waiting("gang", priority=90, nodes=2), waiting("single", priority=80), waiting("mine")
    assert left(mine, [gang, single], slots(A, 1)) == [], "the gang fits nowhere, and the other job of its kind does"
    assert left(mine, [gang], slots(A, 1)) == [A], "and nothing is reserved of the gang's places until all are free"
    assert left(mine, [gang], slots(A, 1), slots(B, 1)) == []


def test_queue_reserves_single_fitting_gpus() -> None:
    gpus = (Gpu("small", "T4", 16_000), Gpu("large", "A100", 80_000))
    advert = make_advert(A, gpus=gpus, free_portions=all_free(gpus))
    first, mine = waiting("first", priority=60, gpus=1, vram_mib=40_000), waiting("mine", gpus=1)
    (offer,) = Queue([first, mine], {}, [advert], NOW).left_for(mine, [advert])
    assert offer.free_portions == all_free(gpus[:1])


def test_queue_packs_shares() -> None:
    gpus = (Gpu("one", "A100", 80_000), Gpu("two", "A100", 80_000))
    advert = make_advert(A, gpus=gpus, free_portions=all_free(gpus), guards=True)
    share = {"gpus": 1, "gpu_share": 40, "vram_mib": 30_000}
    first, second, third = (waiting(name, waited_s=len(name), **share) for name in ("first", "second", "yet another"))
    mine = waiting("mine", gpus=1)
    (offer,) = Queue([first, second, mine], {}, [advert], NOW).left_for(mine, [advert])
    assert offer.free_portions == (Portion("one", 20, 20_000), *all_free(gpus[1:]))
    (offer,) = Queue([first, second, third, mine], {}, [advert], NOW).left_for(mine, [advert])
    assert not offer.whole_gpus_free, "the third job fits beside neither of the others"


def test_queue_never_reserves_more_than_is_free() -> None:
    many = [waiting(f"job{number}", priority=60) for number in range(500)]
    mine = waiting("mine")
    queue = Queue([*many, mine], {}, [slots(A, 3)], NOW)
    assert queue.left_for(mine, [slots(A, 3)])[0].slots_free == 0 and len(queue.kept) == 3


def test_job_that_does_not_take_its_place_is_passed_for_twice_as_long_each_time() -> None:
    patience, place, now = Patience(), (b"job", A), 0.0
    for idle_s in (120, 240, 480):
        for waited_s in (0, 20):
            patience.saw([place], now + waited_s)
            assert not patience.idle(now + waited_s), "a place is reserved for twenty seconds"
        now += 20.5
        patience.saw([place], now)
        patience.saw([place], now + idle_s - 1)
        assert patience.idle(now + idle_s - 1) == {b"job"} and not patience.idle(now + idle_s)
        now += idle_s
        patience.saw([], now)
    for day in range(1, 12):
        patience.saw([place], now)
        patience.saw([place], now + 21)
        now += 21 + min(86_400, 480 * 2**day)
        patience.saw([], now)
        assert patience.idle(now - 1) and not patience.idle(now), "for a day at most"
    for absent_s, idle_s in ((86_000, 86_400), (86_400, 120)):
        now += absent_s
        assert not patience.idle(now)
        patience.saw([place], now)
        patience.saw([place], now + 21)
        now += 21 + idle_s
        patience.saw([], now)
        assert patience.idle(now - 1) and not patience.idle(now), "after another day it is a job like any other"


def test_reservation_that_was_interrupted_counts_from_its_new_start() -> None:
    patience, place = Patience(), (b"job", A)
    for now in (0.0, 15.0, 30.0):
        patience.saw([place] if now != 15.0 else [], now)
    assert not patience.idle(30.0)


def test_nothing_is_reserved_for_an_idle_job() -> None:
    idle, mine = waiting("idle", priority=90), waiting("mine")
    queue = Queue([idle, mine], {}, [slots(A, 1)], NOW, idle={idle.job})
    assert queue.left_for(mine, [slots(A, 1)])[0].slots_free == 1


def test_jobs_that_nobody_can_start_leave_the_places_to_others_ever_longer() -> None:
    """Regression (simulator seed 1222043): the reservations of seven jobs without witnesses followed each other for ever."""
    patience, lost, slot = Patience(), [waiting(f"lost{n}", priority=90) for n in range(50)], slots(A, 1)
    free_s, step_s, all_s = 0, 5, 12 * 3600
    for now in range(0, all_s, step_s):
        queue = Queue(lost, {}, [slot], NOW, idle=patience.idle(now))
        patience.saw(queue.kept, now)
        free_s += 0 if queue.kept else step_s
    assert free_s > all_s / 2
    assert patience.idle(now) and not patience.idle(now + 2 * 86_400), "and get another chance"


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
def test_queue_is_equal_on_all_nodes_and_some_job_can_start(mixed: list[Waiting], rng: object, a: int, b: int) -> None:
    adverts = [slots(A, a), slots(B, b)]
    other = list(mixed)
    rng.shuffle(other)  # type: ignore[attr-defined]
    usage = {"ada": 500, "bob": 70_000}
    one, two = Queue(mixed, usage, adverts, NOW), Queue(other, usage, adverts[::-1], NOW)
    may_go = 0
    for job in mixed:
        offers = one.left_for(job, adverts)
        assert sorted(ad.node for ad in offers if ad.slots_free) == sorted(
            ad.node for ad in two.left_for(job, adverts) if ad.slots_free
        )
        may_go += any(advert.slots_free for advert in offers)
    assert may_go == min(len(mixed), a + b), "exactly as many jobs may start as there are places"

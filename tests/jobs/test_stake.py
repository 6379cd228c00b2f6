"""What is lost of a job's work when its host is taken back."""

from hypothesis import given
from hypothesis import strategies as st

from mesh.jobs.stake import Lost, Stake


def stake() -> Stake:
    return Stake(100, lambda text: None)


def test_work_is_lost_since_what_others_hold() -> None:
    job = stake()
    assert job.lost(50.0, None) == Lost(0.0), "it has not begun"
    job.began(100.0, False, None)
    assert job.lost(130.0, None) == Lost(30.0) and job.lost(130.0, 12) == Lost(30.0, 12)
    job.stored(120.0, 10)
    assert job.lost(130.0, 12) == Lost(10.0, 2) and job.lost(110.0, 10) == Lost(0.0, 0)
    job.stored(125.0, None)
    assert job.lost(130.0, 12) == Lost(5.0), "of a checkpoint without a step nobody knows how many"


def test_of_one_that_yields_nothing_is_lost_after_what_it_saved_at_its_notice() -> None:
    job = stake()
    job.began(100.0, False, None)
    job.stored(110.0, None)
    job.yielded(120.0)
    assert job.lost(120.0, None) == Lost(10.0), "there was no notice"
    job.noticed(130.0, 60.0)
    job.yielded(140.0)
    assert job.lost(140.0, None) == Lost(30.0), "it did not save for it"
    job.stored(141.0, 5)
    job.yielded(145.0)
    assert job.lost(145.0, 7) == Lost(0.0, 2), "but for steps that it told itself"
    job.yielded(141.0)
    assert job.lost(145.0, None).seconds == 0.0


def test_it_is_told_in_steps_or_else_in_seconds() -> None:
    assert Lost(9.0, 0).words == "" and Lost(0.05).words == ""
    assert Lost(9.0, 1).words == "1 step since its last checkpoint"
    assert Lost(9.0, 2).words == "2 steps since its last checkpoint"
    assert Lost(9.04).words == "9.0 s of work since its last checkpoint"


@given(st.lists(st.tuples(st.sampled_from(["computes", "stands still", "saves"]), st.floats(0.1, 100)), max_size=30))
def test_only_time_in_which_it_computed_is_lost(parts: list[tuple[str, float]]) -> None:
    job, now, computed = stake(), 1000.0, 0.0
    job.began(now, False, None)
    for what, length in parts:
        begun, now = now, now + length
        if what == "computes":
            computed += length
        elif what == "stands still":
            job.stood_still(begun, now)
        else:
            job.stored(now, None)
            computed = 0.0
        assert abs(job.lost(now, None).seconds - computed) < 1e-6

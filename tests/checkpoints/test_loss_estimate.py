"""Estimates of the work that a job loses when its host is reclaimed."""

from hypothesis import given
from hypothesis import strategies as st

from mesh.checkpoints.loss_estimate import LossEstimate, Lost


def loss() -> LossEstimate:
    return LossEstimate(100, lambda text: None)


def test_loss_counts_from_the_last_checkpoint_stored_elsewhere() -> None:
    job = loss()
    assert job.lost(50.0, None) == Lost(0.0), "the job has not started"
    job.began(100.0, False, None)
    assert job.lost(130.0, None) == Lost(30.0) and job.lost(130.0, 12) == Lost(30.0, 12)
    job.stored(120.0, 10)
    assert job.lost(130.0, 12) == Lost(10.0, 2) and job.lost(110.0, 10) == Lost(0.0, 0)
    job.stored(125.0, None)
    assert job.lost(130.0, 12) == Lost(5.0), "a checkpoint without a step gives no step count"


def test_yielding_job_loses_nothing_after_its_save_at_the_notice() -> None:
    job = loss()
    job.began(100.0, False, None)
    job.stored(110.0, None)
    job.yielded(120.0)
    assert job.lost(120.0, None) == Lost(10.0), "without a notice the loss counts from the last checkpoint"
    job.noticed(130.0, 60.0)
    job.yielded(140.0)
    assert job.lost(140.0, None) == Lost(30.0), "the job did not save after its notice"
    job.stored(141.0, 5)
    job.yielded(145.0)
    assert job.lost(145.0, 7) == Lost(0.0, 2), "steps that the job reported still count"
    job.yielded(141.0)
    assert job.lost(145.0, None).seconds == 0.0


def test_second_notice_does_not_move_the_first() -> None:
    job = loss()
    job.began(100.0, False, None)
    job.noticed(130.0, 60.0)
    job.stored(135.0, None)
    job.noticed(140.0, 60.0)
    job.yielded(150.0)
    assert job.lost(150.0, None) == Lost(0.0), "it has saved since its notice"


def test_loss_is_reported_in_steps_or_in_seconds() -> None:
    assert Lost(9.0, 0).text == "" and Lost(0.05).text == ""
    assert Lost(9.0, 1).text == "1 step since its last checkpoint"
    assert Lost(9.0, 2).text == "2 steps since its last checkpoint"
    assert Lost(9.04).text == "9.0 s of work since its last checkpoint"


@given(st.lists(st.tuples(st.sampled_from(["computes", "stands still", "saves"]), st.floats(0.1, 100)), max_size=30))
def test_only_computing_time_counts_as_lost(parts: list[tuple[str, float]]) -> None:
    job, now, computed = loss(), 1000.0, 0.0
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

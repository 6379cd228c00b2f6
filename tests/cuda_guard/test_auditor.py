"""What the auditor makes of looks; and the outer loop of shares."""

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuda_guard.auditor import CONTEXT_MOST, OVER_S, Auditor, Claim, DeviceLook, Finding, Foreign, Seen, Verdict
from cuda_guard.trim import RESOLUTION, TRIM_MOST, Pace, Trim

GPU, JOB = "GPU-1", "job"
MIB = 1 << 20
GIB = 1 << 30


def look(*processes: Seen, tells_busy: bool = True) -> DeviceLook:
    used = sum(seen.memory or 0 for seen in processes)
    return DeviceLook(GPU, 16 * GIB, used, processes, tells_busy)


def claim(charged: dict[int, int | None], *pids: int, context: int = 0, share: float = 100, job: str = JOB) -> Claim:
    return Claim(job, GPU, frozenset({*pids, *charged}), charged, context=context, limit=2 * GIB, share=share)


class Watch:
    """An auditor that is asked once a second."""

    def __init__(self) -> None:
        self.auditor = Auditor()
        self._now = 0.0

    def look(self, device: DeviceLook, *claims: Claim, times: int = 1) -> Verdict:
        for _ in range(times):
            self._now += 1
            verdict = self.auditor.judge([device], claims, self._now)
        return verdict

    def overhead(self, device: DeviceLook, *claims: Claim, times: int = 1) -> int:
        return self.look(device, *claims, times=times).overheads[JOB, GPU]


def test_what_nvml_sees_beyond_a_jobs_own_charges_is_its_overhead() -> None:
    watch = Watch()
    one, two = Seen(1, 800 * MIB), Seen(2, 400 * MIB)
    assert watch.overhead(look(one, two), claim({1: 500 * MIB, 2: 100 * MIB})) == 600 * MIB
    assert watch.overhead(look(one), claim({1: 500 * MIB})) == 300 * MIB
    assert watch.overhead(look(), claim({})) == 0


def test_a_charge_that_moves_while_nvml_is_asked_changes_nothing() -> None:
    watch = Watch()
    job = claim({1: 500 * MIB})
    assert watch.overhead(look(Seen(1, 800 * MIB)), job) == 300 * MIB
    assert watch.overhead(look(Seen(1, 1800 * MIB)), claim({1: None})) == 300 * MIB
    # The charge is made before the memory is taken: a lower figure is not believed at once.
    assert watch.overhead(look(Seen(1, 800 * MIB)), claim({1: 1500 * MIB}), times=2) == 300 * MIB
    assert watch.overhead(look(Seen(1, 800 * MIB)), claim({1: 1500 * MIB})) == 0


@given(st.lists(st.tuples(st.integers(0, 4 * GIB), st.integers(0, 4 * GIB) | st.none()), min_size=1))
def test_an_overhead_is_never_negative_nor_more_than_was_seen(looks: list[tuple[int, int | None]]) -> None:
    watch = Watch()
    for memory, charged in looks:
        overhead = watch.overhead(look(Seen(1, memory)), claim({1: charged}))
        assert 0 <= overhead <= max(seen for seen, _ in looks)


def test_contexts_are_learned_once_they_are_steady_and_only_from_jobs_that_were_not_charged_for_them() -> None:
    watch = Watch()
    seen = look(Seen(1, 800 * MIB))
    watch.look(seen, claim({1: 500 * MIB}), times=2)
    assert watch.auditor.contexts == {}
    watch.look(seen, claim({1: 500 * MIB}))
    assert watch.auditor.contexts == {GPU: 300 * MIB}
    watch.look(seen, claim({1: 500 * MIB}, context=250 * MIB, job="later"), times=5)
    watch.look(seen, claim({1: 300 * MIB}, job="fatter"), times=5)
    watch.look(seen, claim({}, 1), times=5)
    assert watch.auditor.contexts == {GPU: 300 * MIB}
    watch.look(seen, claim({1: 600 * MIB}, job="leaner"), times=5)
    assert watch.auditor.contexts == {GPU: 200 * MIB}


def kinds(verdict: Verdict) -> list[tuple[str, int]]:
    return [(found.kind, found.pid) for found in verdict.findings]


def test_a_process_without_the_guard_is_found_at_the_second_look() -> None:
    watch = Watch()
    job = claim({1: 100 * MIB}, 7)
    device = look(Seen(1, 100 * MIB), Seen(7, 300 * MIB))
    assert kinds(watch.look(device, job)) == []
    (found,) = watch.look(device, job).findings
    assert found == Finding("unguarded", JOB, GPU, 7, "process 7 uses 300 MiB of the GPU without the guard")
    assert watch.look(device, job).overheads[JOB, GPU] == 300 * MIB, "and is charged to its job"
    assert kinds(watch.look(look(Seen(1, 100 * MIB)), job)) == []
    assert kinds(watch.look(device, job)) == [], "it is counted from the start"
    assert kinds(watch.look(look(Seen(7, None)), job)) == [("unguarded", 7)]
    assert kinds(watch.look(look(Seen(7, None)), claim({7: None}))) == [], "one that is ending"


def test_memory_beyond_the_quota_is_found_after_a_while() -> None:
    watch = Watch()
    within = look(Seen(1, 2 * GIB + CONTEXT_MOST))
    beyond = look(Seen(1, 2 * GIB + CONTEXT_MOST + 1))
    job = claim({1: 2 * GIB})
    assert kinds(watch.look(within, job, times=30)) == []
    assert kinds(watch.look(beyond, job, times=int(OVER_S))) == []
    assert kinds(watch.look(beyond, job)) == [("memory", 1)]
    assert kinds(watch.look(within, job)) == []
    assert kinds(watch.look(beyond, job, times=int(OVER_S))) == []


def test_time_beyond_the_share_is_found_after_a_while() -> None:
    watch = Watch()
    job = claim({1: 0, 2: 0}, share=30)
    beyond = look(Seen(1, 0, busy=11), Seen(2, 0, busy=30))
    assert kinds(watch.look(beyond, job, times=int(OVER_S))) == []
    (found,) = watch.look(beyond, job).findings
    assert (found.kind, found.pid) == ("utilisation", 2)
    assert found.detail == "process 2 uses 41 % of a device's time where it may have 30 %"
    assert kinds(watch.look(look(Seen(1, 0, busy=39)), job, times=30)) == []
    assert kinds(watch.look(beyond, claim({1: 0, 2: 0}), times=30)) == [], "all of the device is its own"
    assert kinds(watch.look(look(Seen(1, 0), tells_busy=False), job, times=30)) == []


def test_whose_a_process_is_decides_what_it_is() -> None:
    watch = Watch()
    device = look(Seen(1, 10 * MIB, 5), Seen(2, 20 * MIB, 6), Seen(8, 30 * MIB), Seen(9, 40 * MIB, 50), Seen(10, 0, 3))
    verdict = watch.look(device, claim({1: 0}), claim({2: 0}, job="other"))
    assert verdict.foreign == {GPU: Foreign(2, 70 * MIB)}
    assert (verdict.held[JOB, GPU].memory, verdict.held[JOB, GPU].busy) == (10 * MIB, 5)
    assert verdict.held["other", GPU].busy == 6
    assert watch.look(look(Seen(1, None)), claim({1: 0})).held[JOB, GPU].memory is None


# --- the outer loop


@given(st.floats(0.92, 1.08), st.integers(10, 95), st.integers(0, 2**32))
def test_a_trim_converges(sees: float, share: int, seed: int) -> None:
    """NVML sees so many times what events measure, give or take its noise."""
    trim, noise = Trim(), random.Random(seed)
    for _ in range(60):
        trim.update(share, share * trim.factor * sees + noise.uniform(-0.5, 0.5), throttled=True)
    assert share * trim.factor * sees == pytest.approx(share, abs=RESOLUTION + 0.5)


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100) | st.none(), st.booleans())))
def test_a_trim_stays_in_its_bounds_and_moves_only_when_throttled(
    looks: list[tuple[float, float | None, bool]],
) -> None:
    trim = Trim()
    for share, measured, throttled in looks:
        before = trim.factor
        after = trim.update(share, measured, throttled)
        assert 1 - TRIM_MOST <= after <= 1 + TRIM_MOST
        if not throttled or measured is None:
            assert after == before


def test_a_trim_is_not_wound_up() -> None:
    trim = Trim()
    for _ in range(1000):
        trim.update(30, 90, throttled=True)
    assert trim.factor == 1 - TRIM_MOST
    trim.update(30, 15, throttled=True)
    assert trim.factor == pytest.approx(1.0)


def test_only_a_share_that_held_its_job_is_trimmed() -> None:
    def paced(works: float, measured: float | None = 40, share: float = 30, lent: float = 30) -> float:
        pace = Pace()
        pace.step(0, 0, share, measured)
        return pace.step(1, works / 100, lent, measured)

    assert paced(works=30) < 1
    assert paced(works=20) == 1, "it wanted no more"
    assert paced(works=60, lent=60) == 1, "it was lent some meanwhile"
    assert paced(works=100, share=100, lent=100) == 1
    assert paced(works=30, measured=None) == 1
    pace = Pace()
    for second in range(5):  # its own trim is no change of what was agreed
        factor = pace.step(second, second * 0.3, 30 * pace.trim.factor, 33)
    assert 0.9 <= factor < 0.95


def test_processes_that_are_not_on_the_device_allow_no_memory() -> None:
    """Each context may take something beside the quota; who only has a place in the page has none."""
    watch = Watch()
    large, idle = Seen(1, 8 * GIB), dict.fromkeys(range(2, 200), 0)
    found = watch.look(look(large), claim({1: 8 * GIB, **idle}), times=int(OVER_S) + 2).findings
    assert [finding.kind for finding in found] == ["memory"]


def test_what_a_context_takes_is_learned_anew_after_a_lie() -> None:
    """A job that charges itself nothing has all that it takes for its context, and later ones would be charged that."""
    watch = Watch()
    watch.look(look(Seen(1, 2 * GIB)), claim({1: 0}), times=4)
    assert watch.auditor.contexts == {GPU: CONTEXT_MOST}
    honest = Seen(2, 500 * MIB)
    assert watch.overhead(look(honest), claim({2: 100 * MIB + CONTEXT_MOST}, context=CONTEXT_MOST), times=4) == 0
    assert watch.auditor.contexts == {}
    watch.look(look(Seen(3, 500 * MIB)), claim({3: 100 * MIB}), times=4)
    assert watch.auditor.contexts == {GPU: 400 * MIB}
    watch.look(look(Seen(4, 500 * MIB)), claim({4: 500 * MIB - 1}, job="liar"), times=4)
    assert watch.auditor.contexts == {GPU: 400 * MIB}, "no context is as small as that"


def test_a_page_that_tells_less_than_there_is_is_found() -> None:
    """What a job says it has is what the lender believes: who has borrowed and denies it would not be asked to give back."""
    watch, large = Watch(), look(Seen(1, 3 * GIB // 2))
    for told, kinds in ((GIB, []), (0, ["page"])):
        job = msgspec.structs.replace(claim({1: 0}), told=told)
        assert [one.kind for one in watch.look(large, job, times=int(OVER_S) + 2).findings] == kinds

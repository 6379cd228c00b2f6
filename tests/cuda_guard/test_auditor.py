"""Auditor."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from cuda_guard.auditor import (
    CONTEXT_MAX,
    OVER_S,
    PROCESS_MAX,
    Auditor,
    AuditReport,
    Claim,
    DeviceSample,
    Finding,
    Foreign,
    GpuProcess,
)

GPU, JOB = "GPU-1", "job"
MIB = 1 << 20
GIB = 1 << 30


def look(*processes: GpuProcess, reports_busy: bool = True) -> DeviceSample:
    used = sum(seen.memory or 0 for seen in processes)
    return DeviceSample(GPU, 16 * GIB, used, processes, reports_busy)


def claim(charged: dict[int, int | None], *pids: int, context: int = 0, share: float = 100, job: str = JOB) -> Claim:
    return Claim(job, GPU, frozenset({*pids, *charged}), charged, context=context, limit=2 * GIB, share=share)


class Watch:
    """An auditor with one sample a second."""

    def __init__(self) -> None:
        self.auditor = Auditor()
        self._now = 0.0

    def look(self, device: DeviceSample, *claims: Claim, times: int = 1) -> AuditReport:
        for _ in range(times):
            self._now += 1
            verdict = self.auditor.audit([device], claims, self._now)
        return verdict

    def overhead(self, device: DeviceSample, *claims: Claim, times: int = 1) -> int:
        return self.look(device, *claims, times=times).overheads[JOB, GPU]


def test_overhead_is_nvml_usage_beyond_the_jobs_charges() -> None:
    watch = Watch()
    one, two = GpuProcess(1, 800 * MIB), GpuProcess(2, 400 * MIB)
    assert watch.overhead(look(one, two), claim({1: 500 * MIB, 2: 100 * MIB})) == 600 * MIB
    assert watch.overhead(look(one), claim({1: 500 * MIB})) == 300 * MIB
    assert watch.overhead(look(), claim({})) == 0


def test_charge_that_changes_during_the_sample_is_ignored() -> None:
    watch = Watch()
    job = claim({1: 500 * MIB})
    assert watch.overhead(look(GpuProcess(1, 800 * MIB)), job) == 300 * MIB
    assert watch.overhead(look(GpuProcess(1, 1800 * MIB)), claim({1: None})) == 300 * MIB
    # The charge is made before the memory is taken: a lower figure is not believed at once.
    assert watch.overhead(look(GpuProcess(1, 800 * MIB)), claim({1: 1500 * MIB}), times=2) == 300 * MIB
    assert watch.overhead(look(GpuProcess(1, 800 * MIB)), claim({1: 1500 * MIB})) == 0


@given(st.lists(st.tuples(st.integers(0, 4 * GIB), st.integers(0, 4 * GIB) | st.none()), min_size=1))
def test_overhead_is_between_zero_and_the_measured_usage(looks: list[tuple[int, int | None]]) -> None:
    watch = Watch()
    for memory, charged in looks:
        overhead = watch.overhead(look(GpuProcess(1, memory)), claim({1: charged}))
        assert 0 <= overhead <= max(seen for seen, _ in looks)


def test_context_size_is_learned_from_steady_samples_of_uncharged_jobs() -> None:
    watch = Watch()
    seen = look(GpuProcess(1, 800 * MIB))
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


def kinds(verdict: AuditReport) -> list[tuple[str, int]]:
    return [(found.kind, found.pid) for found in verdict.findings]


def test_unguarded_process_is_found_at_the_second_sample() -> None:
    watch = Watch()
    job = claim({1: 100 * MIB}, 7)
    device = look(GpuProcess(1, 100 * MIB), GpuProcess(7, 300 * MIB))
    assert kinds(watch.look(device, job)) == []
    (found,) = watch.look(device, job).findings
    assert found.proves and found == Finding(
        "unguarded", JOB, GPU, 7, "process 7 uses 300 MiB of the GPU without the guard"
    )
    assert watch.look(device, job).overheads[JOB, GPU] == 300 * MIB, "the unguarded memory is charged to its job"
    assert kinds(watch.look(look(GpuProcess(1, 100 * MIB)), job)) == []
    assert kinds(watch.look(device, job)) == [], "the count restarts after the process was gone"
    assert kinds(watch.look(look(GpuProcess(7, None)), job)) == [("unguarded", 7)]
    assert kinds(watch.look(look(GpuProcess(7, None)), claim({7: None}))) == [], "an ending process is ignored"


def test_memory_over_the_quota_is_found_after_over_s() -> None:
    watch = Watch()
    within = look(GpuProcess(1, 2 * GIB + PROCESS_MAX))
    beyond = look(GpuProcess(1, 2 * GIB + PROCESS_MAX + 1))
    job = claim({1: 2 * GIB})
    assert kinds(watch.look(within, job, times=30)) == []
    assert kinds(watch.look(beyond, job, times=int(OVER_S))) == []
    assert kinds(watch.look(beyond, job)) == [("memory", 1)]
    assert kinds(watch.look(within, job)) == []
    assert kinds(watch.look(beyond, job, times=int(OVER_S))) == []


def test_full_quota_and_two_contexts_of_unknown_size_are_no_finding() -> None:
    context = 536128 << 10  # of an H100
    watch = Watch()
    job = msgspec.structs.replace(claim({1: 2 * GIB}), reported=2 * GIB)
    assert kinds(watch.look(look(GpuProcess(1, 2 * GIB + 2 * context)), job, times=30)) == []


def test_time_over_the_share_is_found_after_over_s() -> None:
    watch = Watch()
    job = claim({1: 0, 2: 0}, share=30)
    beyond = look(GpuProcess(1, 0, busy=11), GpuProcess(2, 0, busy=30))
    assert kinds(watch.look(beyond, job, times=int(OVER_S))) == []
    (found,) = watch.look(beyond, job).findings
    assert (found.kind, found.pid, found.proves) == ("utilisation", 2, False), "NVML reads above the time of kernels"
    assert found.detail == "process 2 uses 41 % of a device's time where its share is 30 %"
    assert kinds(watch.look(look(GpuProcess(1, 0, busy=39)), job, times=30)) == []
    assert kinds(watch.look(beyond, claim({1: 0, 2: 0}), times=30)) == [], "the job owns the whole device"
    assert kinds(watch.look(look(GpuProcess(1, 0), reports_busy=False), job, times=30)) == []


def test_processes_are_assigned_to_their_jobs() -> None:
    watch = Watch()
    device = look(
        GpuProcess(1, 10 * MIB, 5),
        GpuProcess(2, 20 * MIB, 6),
        GpuProcess(8, 30 * MIB),
        GpuProcess(9, 40 * MIB, 50),
        GpuProcess(10, 0, 3),
    )
    verdict = watch.look(device, claim({1: 0}), claim({2: 0}, job="other"))
    assert verdict.foreign == {GPU: Foreign(2, 70 * MIB)}
    assert (verdict.measured[JOB, GPU].memory, verdict.measured[JOB, GPU].busy) == (10 * MIB, 5)
    assert verdict.measured["other", GPU].busy == 6
    assert watch.look(look(GpuProcess(1, None)), claim({1: 0})).measured[JOB, GPU].memory is None


# --- the outer loop


def test_processes_outside_the_device_add_no_allowance() -> None:
    """Each context may exceed the quota by its size; a process that only has a slot in the page has no context."""
    watch = Watch()
    large, idle = GpuProcess(1, 8 * GIB), dict.fromkeys(range(2, 200), 0)
    found = watch.look(look(large), claim({1: 8 * GIB, **idle}), times=int(OVER_S) + 2).findings
    assert [finding.kind for finding in found] == ["memory"]


def test_context_size_is_learned_again_after_a_false_report() -> None:
    """All memory of a job that charges nothing looks like its context, and would be charged to later jobs."""
    watch = Watch()
    watch.look(look(GpuProcess(1, 2 * GIB)), claim({1: 0}), times=4)
    assert watch.auditor.contexts == {GPU: CONTEXT_MAX}
    honest = GpuProcess(2, 500 * MIB)
    assert watch.overhead(look(honest), claim({2: 100 * MIB + CONTEXT_MAX}, context=CONTEXT_MAX), times=4) == 0
    assert watch.auditor.contexts == {}
    watch.look(look(GpuProcess(3, 500 * MIB)), claim({3: 100 * MIB}), times=4)
    assert watch.auditor.contexts == {GPU: 400 * MIB}
    watch.look(look(GpuProcess(4, 500 * MIB)), claim({4: 500 * MIB - 1}, job="liar"), times=4)
    assert watch.auditor.contexts == {GPU: 400 * MIB}, "such a small value is not a context"


def test_page_with_underreported_memory_is_found() -> None:
    """The lender relies on the page: a job that hides borrowed memory would not be asked to return it."""
    watch, large = Watch(), look(GpuProcess(1, 5 * GIB // 2))
    for told, kinds in ((GIB, []), (0, ["page"])):
        job = msgspec.structs.replace(claim({1: 0}), reported=told)
        assert [one.kind for one in watch.look(large, job, times=int(OVER_S) + 2).findings] == kinds

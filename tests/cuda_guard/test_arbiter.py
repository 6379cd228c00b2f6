"""Arbiter in virtual time: shares and turns of simulated jobs, and hostile job pages."""

import ctypes
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuda_guard.build import Libraries
from cuda_guard.host import load
from cuda_guard.page import DEVICES, LAYOUT, MAGIC, SLOTS, JobPage, Pages, PolicyPage, Quota
from tests.cuda_guard.arbiter import Arbiter, Contender

pytestmark = pytest.mark.cc

MS = 1_000_000
PPM = 1_000_000
FREE, WAIT, GO = 0, 1, 2
WINDOW, CAP, TURN, IDLE, DRAIN = 4 * MS, 900_000, 10 * MS, 1 * MS, 100 * MS
START = 1_000_000 * MS


class Job:
    """A simulated guarded job. It launches in its turn while it has time left and the window is not full."""

    def __init__(self, share: float, limit: float, kernel_ns: int) -> None:
        self.policy, self.page = PolicyPage(), JobPage()
        self.share, self.limit = round(share * PPM / 100), round(limit * PPM / 100)
        self.kernel_ns = kernel_ns
        rate = self.policy.allowances[0].rates[0]
        rate.t0_ns, rate.share_ppm, rate.burst_ns = START, self.share, 30 * MS
        self.slot = self.page.table[1]
        self.slot.pid = 1
        self.works = self.lives = True
        self.left: list[int] = []  # remaining time of each kernel in flight

    def launch(self, native: ctypes.CDLL, now: int) -> None:
        policy, page = ctypes.addressof(self.policy), ctypes.addressof(self.page)
        while True:
            may = (
                self.works
                and self.policy.allowances[0].turn & 3 != WAIT
                and native.host_wait(policy, page, 0, now) == 0
            )
            self.slot.waiting[0] = int(self.works and not may)
            if not may or (self.left and self.slot.under_way[0] + self.kernel_ns > WINDOW):
                return
            native.host_spend(policy, page, 0, self.kernel_ns, now)
            self.slot.under_way[0] += self.kernel_ns
            self.page.uses[0].last_launch_ns = now
            self.left.append(self.kernel_ns)

    def run(self, ns: int) -> int:
        """Run the device for this job and return the unused time."""
        while self.left and ns:
            step = min(ns, self.left[0])
            self.left[0] -= step
            ns -= step
            if not self.left[0]:
                self.left.pop(0)
                if self.lives:
                    self.slot.under_way[0] -= self.kernel_ns
                    self.page.uses[0].busy_ns += self.kernel_ns
        return ns


class Play:
    """One device, its jobs and the arbiter; `had` is the device time of each, in ns."""

    def __init__(self, native: ctypes.CDLL, jobs: Sequence[Job]) -> None:
        self.native, self.jobs, self.now = native, jobs, START
        self.arbiter = Arbiter(len(jobs), -1, -1, CAP, TURN, IDLE, DRAIN, 0)
        for job, contender in zip(jobs, self.arbiter.contenders, strict=False):
            contender.policy, contender.job = ctypes.addressof(job.policy), ctypes.addressof(job.page)
            contender.share_ppm, contender.limit_ppm = job.share, job.limit
        self.had = [0] * len(jobs)
        self.most = 0.0  # largest total lent, in per cent
        self._next = START

    def set_share(self, which: int, share: float) -> None:
        self.arbiter.contenders[which].share_ppm = self.arbiter.contenders[which].limit_ppm = round(share * PPM / 100)

    def lent(self, which: int) -> float:
        return float(self.arbiter.contenders[which].lent_ppm) * 100 / PPM

    def go(self, seconds: float, tick_ns: int = 100_000) -> list[float]:
        """Return each job's part of the device in this time, in per cent."""
        before, until = list(self.had), self.now + round(seconds * 1e9)
        while self.now < until:
            if self.now >= self._next:
                self._next = self.native.arbiter_step(ctypes.byref(self.arbiter), self.now)
                assert self.now < self._next <= self.now + 1000 * MS
            for job in self.jobs:
                if job.lives:
                    job.launch(self.native, self.now)
            left = tick_ns
            for n in sorted(range(len(self.jobs)), key=lambda _: random.random()):
                rest = self.jobs[n].run(left)
                self.had[n] += left - rest
                left = rest
            self.now += tick_ns
        return [(a - b) / seconds / 1e7 for a, b in zip(self.had, before, strict=True)]


@pytest.fixture
def native(built: Libraries) -> ctypes.CDLL:
    return load(built.host)


kernels = st.integers(20_000, 3 * MS)


@settings(max_examples=12)
@given(
    st.lists(st.tuples(st.integers(5, 40), kernels), min_size=2, max_size=4).filter(
        lambda jobs: sum(s for s, _ in jobs) <= 90
    )
)
def test_each_job_gets_its_share_with_any_kernels(built: Libraries, jobs: list[tuple[int, int]]) -> None:
    play = Play(load(built.host), [Job(share, share, kernel) for share, kernel in jobs])
    play.go(0.5)
    assert play.go(2) == pytest.approx([share for share, _ in jobs], abs=2.5)


@settings(max_examples=8)
@given(st.lists(st.tuples(st.integers(20, 100), kernels), min_size=2, max_size=3))
def test_oversubscribed_jobs_do_not_starve(built: Libraries, jobs: list[tuple[int, int]]) -> None:
    play = Play(load(built.host), [Job(share, share, kernel) for share, kernel in jobs])
    play.go(0.5)
    total = sum(share for share, _ in jobs)
    for had, (share, _) in zip(play.go(2), jobs, strict=True):
        assert had <= share + 2.5 and had >= min(share, 100 * share / total) * 0.7


@pytest.mark.parametrize("kernel", [50_000, 100_000, 1 * MS])
def test_two_jobs_with_all_of_a_device_get_equal_parts(native: ctypes.CDLL, kernel: int) -> None:
    play = Play(native, [Job(10, 10, 100_000), Job(90, 90, kernel)])
    play.go(0.5)
    small, large = play.go(10)
    assert 8.7 < large / small < 9.3


def test_new_share_takes_effect_at_once(native: ctypes.CDLL) -> None:
    play = Play(native, [Job(10, 10, 100_000)])
    play.go(0.5)
    for share in (50, 10, 80):
        play.set_share(0, share)
        play.go(0.1)
        assert play.go(0.2) == pytest.approx([share], abs=3)


def test_idle_time_is_lent_up_to_the_cap_and_taken_back_at_once(native: ctypes.CDLL) -> None:
    lender, borrower, third = Job(40, 40, 100_000), Job(20, 90, 100_000), Job(10, 60, 200_000)
    play = Play(native, [lender, borrower, third])
    lender.works = third.works = False
    play.go(0.1)
    assert play.lent(1) == 90 and play.go(0.5)[1] == pytest.approx(90, abs=3)
    third.works = True
    play.go(0.1)
    assert play.lent(1) + play.lent(2) <= 90 and play.lent(1) == pytest.approx(60, abs=1)
    lender.works = True
    play.go(0.025)
    assert [play.lent(n) for n in range(3)] == pytest.approx([40, 100 / 3, 50 / 3], abs=0.1)
    play.go(0.3)
    assert sum(play.go(1)) <= 93


def test_dead_or_silent_job_does_not_block_others(native: ctypes.CDLL) -> None:
    """A process that launches and never calls the driver again leaves work in flight in its page for ever."""
    good, silent = Job(45, 45, 100_000), Job(45, 45, 2 * MS)
    play = Play(native, [good, silent])
    play.go(0.3)
    silent.lives = False
    silent.slot.waiting[0] = 0
    silent.slot.under_way[0] = 3 * MS
    play.go(0.3)
    assert play.go(1)[0] == pytest.approx(45, abs=2.5)
    assert good.policy.allowances[0].turn & 3 != WAIT, "the job is alone on its device"


@pytest.mark.parametrize("busy", [0, 1, 2**64 - 1, 2**63])
@pytest.mark.parametrize("under_way", [0, 1, 2**63 - 1, -(2**63)])
def test_false_reports_gain_no_turns(native: ctypes.CDLL, busy: int, under_way: int) -> None:
    good, liar = Job(45, 45, 100_000), Job(45, 45, 100_000)
    play = Play(native, [good, liar])
    play.go(0.2)
    liar.lives = False
    for _ in range(20):
        use = liar.page.uses[0]
        use.busy_ns, use.spent_ns, use.last_launch_ns = (use.busy_ns + busy) % 2**64, -(2**63), play.now
        for slot in liar.page.table:
            slot.pid, slot.waiting[0], slot.under_way[0] = 1, 255, under_way
        play.go(0.1)
    assert play.go(1)[0] > 20


@settings(max_examples=40)
@given(st.binary(min_size=64, max_size=400), st.integers(0, 2**32))
def test_garbage_in_a_job_page_neither_crashes_nor_blocks_the_daemon(
    built: Libraries, tmp_path_factory: pytest.TempPathFactory, noise: bytes, seed: int
) -> None:
    """The page holds random bytes after a valid header, and has canaries around it."""
    native, rng = load(built.host), random.Random(seed)
    size = ctypes.sizeof(JobPage)
    memory = ctypes.create_string_buffer(b"\xaa" * (size + 3 * 4096), size + 3 * 4096)
    start = (ctypes.addressof(memory) + 4096 + 63) // 64 * 64
    before, after = start - ctypes.addressof(memory), start - ctypes.addressof(memory) + size
    page, policy = JobPage.from_address(start), PolicyPage()
    ctypes.memmove(start, rng.randbytes(size // 7) * 8, size)
    ctypes.memmove(start + 64 + rng.randrange(size - 64 - len(noise)), noise, len(noise))
    page.magic, page.layout, page.slots = MAGIC, LAYOUT, SLOTS
    edge = memory.raw[:before], memory.raw[after:]
    policy.allowances[0].rates[0].share_ppm = PPM
    arbiter = Arbiter(1, -1, -1, CAP, TURN, IDLE, DRAIN, 0)
    arbiter.contenders[0] = Contender(ctypes.addressof(policy), start, -1, 0, PPM // 2, PPM)
    for step in range(20):
        now = START + step * MS
        assert now < native.arbiter_step(ctypes.byref(arbiter), now) <= now + 1000 * MS
        native.host_wait(ctypes.addressof(policy), start, 0, now)
    file = os.open(tmp_path_factory.mktemp("garbage") / "job", os.O_RDWR | os.O_CREAT)
    try:
        assert native.ledger_sweep(start, file, 0) >= 0
        for device in range(DEVICES):
            native.ledger_change(start, 0, device, rng.choice([1, -1, 2**40, -(2**63)]), rng.choice([0, 1000, 2**63]))
            native.host_correct(start, device, rng.randrange(-(2**63), 2**63))
    finally:
        os.close(file)
    assert (memory.raw[:before], memory.raw[after:]) == edge, "nothing was written outside the page"


class Rank:
    """One device's part of a simulated job that always wants to work, and whose work ends 1 ms after its turn."""

    def __init__(self, job: "Job", place: int) -> None:
        self.job, self.place, self.went = job, place, False
        job.policy.allowances[place].rates[0].share_ppm = PPM
        job.policy.allowances[place].rates[0].t0_ns = START

    @property
    def turn(self) -> int:
        return int(self.job.policy.allowances[self.place].turn & 3)

    def work(self, now: int) -> None:
        use = self.job.page.uses[self.place]
        goes = self.turn != WAIT
        self.job.slot.waiting[self.place] = not goes
        if goes:
            use.last_launch_ns, self.went = now, True
            use.busy_ns += MS // 2
        self.job.slot.under_way[self.place] = MS if goes or now - use.last_launch_ns < MS else 0


def join(devices: ctypes.Array[Arbiter], job: Job, on: Sequence[int], share_ppm: int) -> None:
    """Let a job contend for these devices, which are at its places in this order."""
    for place, number in enumerate(on):
        device = devices[number]
        contender = device.contenders[device.count]
        contender.policy, contender.job = ctypes.addressof(job.policy), ctypes.addressof(job.page)
        contender.place, contender.share_ppm, contender.limit_ppm = place, share_ppm, share_ppm
        device.count += 1


def machine() -> ctypes.Array[Arbiter]:
    devices = (Arbiter * 16)(*(Arbiter(0, -1, -1, CAP, TURN, IDLE, DRAIN, 0) for _ in range(16)))
    for number, device in enumerate(devices):
        device.devices, device.number = ctypes.addressof(devices), number
    return devices


@settings(max_examples=10)
@given(
    st.lists(st.sets(st.integers(0, 3), min_size=1), min_size=2, max_size=6),
    st.sets(st.integers(0, 5), max_size=2),
    st.integers(0, 2**32),
)
def test_gangs_go_on_all_their_devices_or_on_none_and_nobody_starves(
    built: Libraries, jobs: list[set[int]], in_debt: set[int], seed: int
) -> None:
    """Jobs on any devices: no two go on one device, a gang goes on all of its devices together, and each goes again and again.

    A job that says it has spent more than it ever may, on one of its devices, keeps nobody from going.
    """
    native, rng = load(built.host), random.Random(seed)
    devices = machine()
    gangs: list[dict[int, Rank]] = []
    for n, on in enumerate(jobs):
        job = Job(100, 100, MS)
        join(devices, job, sorted(on), PPM)
        gangs.append({number: Rank(job, place) for place, number in enumerate(sorted(on))})
        if n in in_debt:
            job.page.uses[len(on) - 1].spent_ns = 2**63 - 1
    now = START
    for _ in range(3):
        for rank in (rank for ranks in gangs for rank in ranks.values()):
            rank.went = False
        for _ in range(1500):
            now += MS // 4
            for number in rng.sample(range(4), 4):
                native.arbiter_step(ctypes.byref(devices[number]), now)
            for ranks in gangs:
                assert not {WAIT, GO} <= {rank.turn for rank in ranks.values()}, "a gang goes on a part of its devices"
                for rank in ranks.values():
                    rank.work(now)
            for number in range(4):
                assert sum(ranks[number].turn == GO for ranks in gangs if number in ranks) <= 1
        able = [ranks for n, ranks in enumerate(gangs) if n not in in_debt]
        assert all(rank.went for ranks in able for rank in ranks.values()), "a job starves"


@pytest.mark.parametrize("in_debt", [False, True])
def test_gang_pays_for_the_devices_that_it_keeps_while_it_waits(native: ctypes.CDLL, in_debt: bool) -> None:
    """It waits for its second device, which three others use, and hardly uses its first. In debt there, it gets neither."""
    devices, now, tick = machine(), START, MS // 4
    gang, beside, others = Job(10, 10, MS), Job(80, 80, MS), [Job(30, 30, MS) for _ in range(3)]
    for job, on in ((gang, [0, 1]), (beside, [0]), *((other, [1]) for other in others)):
        join(devices, job, on, job.share)
    ctypes.memmove(ctypes.byref(gang.policy.allowances[1]), ctypes.byref(gang.policy.allowances[0]), 128)
    if in_debt:
        gang.page.uses[1].spent_ns = 2**63 - 1

    def work(job: Job, place: int, ns: int) -> int:
        policy, page = ctypes.addressof(job.policy), ctypes.addressof(job.page)
        may = job.policy.allowances[place].turn & 3 != WAIT and native.host_wait(policy, page, place, now) == 0
        job.slot.waiting[place] = not may
        if not may:
            return 0
        native.host_spend(policy, page, place, ns, now)
        job.page.uses[place].busy_ns += ns
        job.page.uses[place].last_launch_ns = now
        return ns

    had = [0, 0]
    while now < START + 2000 * MS:
        now += tick
        for device in devices[:2]:
            native.arbiter_step(ctypes.byref(device), now)
            assert not in_debt or device.holder != 0
        work(gang, 0, tick // 8)
        had[0] += work(gang, 1, tick)
        had[1] += work(beside, 0, tick)
        for other in others:
            work(other, 0, tick)
    assert had[0] > 160 * MS or in_debt
    assert had[1] == pytest.approx(1600 * MS, rel=0.05)


def test_names_from_a_job_page_are_sanitized(make_pages: Callable[..., Pages]) -> None:
    pages = make_pages()
    pages.job.audits = 2**32 - 1
    for n in range(32):
        ctypes.memmove(pages.job.audit[n], b"\x1b]0;owned\x07" * 7, 64)
    assert len(pages.audited()) == 32 and all(name.isprintable() for name in pages.audited())


TICK, RING = 8192, 1023 * 32  # native/timeline.h: ns of a tick, and ticks for which it remembers


@settings(max_examples=200)
@given(
    st.integers(0, 2**40),
    st.lists(st.tuples(st.integers(0, 20_000), st.integers(0, 3000)), max_size=60),
)
def test_overlapping_work_is_counted_once(built: Libraries, begin: int, spans: list[tuple[int, int]]) -> None:
    """Compared with sets of points in time, in whatever order the stretches come."""
    native, page, covered = load(built.host), JobPage(), set[int]()
    for start, length in spans:
        fresh = set(range(begin + start, begin + start + length)) - covered
        at = (begin + start) * TICK
        assert native.host_timeline(ctypes.addressof(page), 3, at, at + length * TICK) == len(fresh) * TICK
        covered |= fresh


def test_time_longer_ago_than_the_timeline_is_taken_for_new_and_a_place_in_use_is_not_given_back(
    native: ctypes.CDLL,
) -> None:
    page = JobPage()

    def add(start: int, end: int) -> int:
        return int(native.host_timeline(ctypes.addressof(page), 0, start * TICK, end * TICK)) // TICK

    assert add(5, 5 + 3 * RING) == 3 * RING and add(5, 5 + 3 * RING) == 2 * RING
    assert add(0, 32) == 0, "its place is in use for later work"
    assert add(10 * RING, 10 * RING + 1) == 1


@settings(max_examples=200)
@given(
    share=st.integers(0, PPM),
    changes=st.lists(st.tuples(st.integers(0, 50 * MS), st.integers(-20 * MS, 100 * MS)), max_size=20),
)
def test_allowance_is_exact(built: Libraries, share: int, changes: list[tuple[int, int]]) -> None:
    """Compared with arbitrary-precision integers: what may be spent, what is forfeited, and how long to wait."""
    native, policy, page = load(built.host), PolicyPage(), JobPage()
    rate = policy.allowances[0].rates[0]
    rate.t0_ns, rate.share_ppm, rate.burst_ns = START, share, 30 * MS
    at, job, now, spent = ctypes.addressof(policy), ctypes.addressof(page), START, 0
    for later, ns in changes:
        now += later
        allowed = (now - START) * share // PPM
        assert native.host_allowed(at, 0, now) == allowed
        debt = spent - allowed
        wait = native.host_wait(at, job, 0, now)
        if debt <= 0:
            assert wait == 0
        elif share == 0:
            assert wait == 2**63 - 1
        else:
            assert (debt * PPM) // share <= wait <= (debt * PPM) // share + 1
            assert native.host_wait(at, job, 0, now + wait) == 0
        native.host_spend(at, job, 0, ns, now)
        spent = (max(spent, allowed - 30 * MS) if ns > 0 else spent) + ns
        assert page.uses[0].spent_ns == spent


def test_job_without_a_share_never_pays_its_debt(built: Libraries) -> None:
    native, policy, page = load(built.host), PolicyPage(), JobPage()
    policy.allowances[0].rates[0].t0_ns, page.uses[0].spent_ns = START, 1
    assert native.host_wait(ctypes.addressof(policy), ctypes.addressof(page), 0, START + 3600 * 1000 * MS) == 2**63 - 1


def test_policy_with_too_many_devices_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at most"):
        Pages.create(tmp_path, (Quota("GPU-00000000-0000-0000-0000-000000000001"),) * 17, Path("/a"), Path("/b"), 0)

"""Lending of memory: whatever jobs do and however limits change, every guarantee is available and nothing is promised twice."""

import ctypes
import os
import time
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from cuda_guard.build import Libraries
from cuda_guard.host import load
from cuda_guard.page import NO_LIMIT, UNIT, JobPage, PolicyPage
from tests.cuda_guard.allocations import alloc, refused
from tests.cuda_guard.arbiter import Arbiter
from tests.cuda_guard.guests import CONTEXT, MIB, Bench
from tests.fake.client import Driver

pytestmark = pytest.mark.cc

TOTAL, CAP = 1000 * MIB, 900 * MIB
ALL_MEMORY = 2**63 - 1  # native/arbiter.h
sizes = st.integers(1, 1000).map(lambda mib: mib * MIB)


class Tenant:
    """The effect of a job's processes on its pages; `started`: it once had all its guaranteed memory."""

    def __init__(self) -> None:
        self.policy, self.page = PolicyPage(), JobPage()
        self.page.table[1].pid = 1
        self.away = self.started = False

    @property
    def limit(self) -> int:
        return int(self.policy.allowances[0].memory_limit)

    @property
    def used(self) -> int:
        return int(self.page.uses[0].memory >> 26) * UNIT


class Lending(RuleBasedStateMachine):
    """The oracle: accounts for a device's memory independently."""

    native: ctypes.CDLL

    @initialize(foreign=st.sampled_from([0, 0, 300 * MIB]))
    def begin(self, foreign: int) -> None:
        self.arbiter = Arbiter(0, -1, -1, 900_000, 10, 1, 100, 0, TOTAL, foreign)
        self.tenants: list[Tenant] = []

    @property
    def contenders(self) -> list[ctypes.Structure]:
        return list(self.arbiter.contenders[: self.arbiter.count])

    def guaranteed(self) -> int:
        return sum(contender.memory for contender in self.contenders)

    def room(self) -> int:
        return max(0, CAP - self.guaranteed() - self.arbiter.memory_foreign)

    def step(self) -> None:
        before = self.beyond()
        self.native.lend_memory(ctypes.byref(self.arbiter))
        assert self.beyond() <= max(self.room(), before), "only memory without a guarantee is lent"

    def some(self, number: int) -> int:
        return number % len(self.tenants)

    @precondition(lambda self: len(self.tenants) < 6)
    @rule(memory=sizes, more=st.sampled_from([0, 200 * MIB, TOTAL]))
    def come(self, memory: int, more: int) -> None:
        memory = min(memory, TOTAL - self.guaranteed())
        if not memory:
            return
        tenant, contender = Tenant(), self.arbiter.contenders[self.arbiter.count]
        ctypes.memset(ctypes.byref(contender), 0, ctypes.sizeof(contender))
        contender.policy, contender.job = ctypes.addressof(tenant.policy), ctypes.addressof(tenant.page)
        contender.memory, contender.memory_most = memory, memory + more
        contender.share_ppm = contender.limit_ppm = 1_000_000
        self.tenants.append(tenant)
        self.arbiter.count += 1
        self.step()

    @precondition(lambda self: self.tenants)
    @rule(which=st.integers(0, 5))
    def go(self, which: int) -> None:
        which = self.some(which)
        for n in range(which, self.arbiter.count - 1):
            ctypes.pointer(self.arbiter.contenders[n])[0] = self.arbiter.contenders[n + 1]
        self.arbiter.count -= 1
        del self.tenants[which]
        self.step()

    @precondition(lambda self: self.tenants)
    @rule(which=st.integers(0, 5), size=sizes)
    def take(self, which: int, size: int) -> None:
        tenant = self.tenants[self.some(which)]
        if tenant.away:
            return
        fits = tenant.used + size <= tenant.limit
        page = ctypes.addressof(tenant.page)
        assert self.native.ledger_change(page, 1, 0, size // UNIT, tenant.limit // UNIT) == fits

    @precondition(lambda self: self.tenants)
    @rule(which=st.integers(0, 5), size=sizes)
    def give(self, which: int, size: int) -> None:
        tenant = self.tenants[self.some(which)]
        if not tenant.away:
            self.native.ledger_change(ctypes.addressof(tenant.page), 1, 0, -min(size, tenant.used) // UNIT, 0)

    @precondition(lambda self: self.tenants)
    @rule(which=st.integers(0, 5), memory=sizes, more=st.sampled_from([0, 100 * MIB, TOTAL]))
    def change(self, which: int, memory: int, more: int) -> None:
        which = self.some(which)
        contender, tenant = self.arbiter.contenders[which], self.tenants[which]
        memory = min(memory, TOTAL - self.guaranteed() + contender.memory)
        if tenant.used > memory + more:
            return  # refused, see mesh/gpus/tenant.py
        tenant.started = tenant.started and memory <= contender.memory
        contender.memory, contender.memory_most = memory, memory + more
        self.step()

    @precondition(lambda self: self.tenants)
    @rule(which=st.integers(0, 5), away=st.booleans())
    def move_to_host(self, which: int, away: bool) -> None:
        which = self.some(which)
        tenant = self.tenants[which]
        contender = ctypes.byref(self.arbiter.contenders[which])
        came = self.native.lend_away(ctypes.byref(self.arbiter), contender, away)
        tenant.away = away or not came
        assert came or (not away and tenant.used > self.arbiter.contenders[which].memory)

    @rule(foreign=st.sampled_from([0, 100 * MIB, TOTAL]))
    def others(self, foreign: int) -> None:
        self.arbiter.memory_foreign = foreign

    def claims(self) -> list[int]:
        return [max(tenant.limit, 0 if tenant.away else tenant.used) for tenant in self.tenants]

    def beyond(self) -> int:
        return sum(max(0, has - job.memory) for has, job in zip(self.claims(), self.contenders, strict=True))

    @rule()
    def time_goes_by(self) -> None:
        self.step()
        both = list(zip(self.contenders, self.tenants, strict=True))
        if any(tenant.limit < contender.memory for contender, tenant in both):
            assert any(t.used > t.limit for t in self.tenants if not t.away), (
                "a job waits only for another that exceeds its limit"
            )
        elif self.beyond() <= self.room():
            open_ = [t for c, t in both if not t.away and t.limit < c.memory_most]
            lent = sum(tenant.limit - contender.memory for contender, tenant in both)
            assert not open_ or lent >= self.room() - len(both), "idle memory is lent"

    @invariant()
    def every_guarantee_can_be_had(self) -> None:
        both = list(zip(self.contenders, self.tenants, strict=True))
        for contender, tenant in both:
            assert tenant.limit <= contender.memory_most or tenant.limit == 0
            assert not tenant.started or tenant.limit >= contender.memory
            tenant.started = tenant.started or tenant.limit >= contender.memory
        assert sum(self.claims()) <= TOTAL, "all limits fit on the device at the same time"


def test_every_guarantee_is_available_whatever_is_lent(built: Libraries) -> None:
    native = load(built.host)
    machine = type("OnThisDevice", (Lending,), {"native": native})
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=120, stateful_step_count=40, suppress_health_check=[HealthCheck.too_slow]),
    )


def shared_by(tenants: list[Tenant], memory: int, most: int) -> Arbiter:
    arbiter = Arbiter(0, -1, -1, 900_000, 10, 1, 100, 0, TOTAL, 0)
    for contender, tenant in zip(arbiter.contenders, tenants, strict=False):
        contender.policy, contender.job = ctypes.addressof(tenant.policy), ctypes.addressof(tenant.page)
        contender.memory, contender.memory_most = memory, most
    arbiter.count = len(tenants)
    return arbiter


def test_nothing_is_lent_beside_a_job_that_has_the_whole_device(built: Libraries) -> None:
    native, tenants = load(built.host), [Tenant(), Tenant()]
    arbiter = shared_by(tenants, 100 * MIB, TOTAL)
    arbiter.contenders[1].memory = arbiter.contenders[1].memory_most = ALL_MEMORY
    tenants[1].policy.allowances[0].memory_limit = NO_LIMIT
    assert not native.lend_memory(ctypes.byref(arbiter))
    assert [tenant.limit for tenant in tenants] == [100 * MIB, NO_LIMIT]


def test_page_that_claims_too_much_takes_nothing_from_others(built: Libraries) -> None:
    native, tenants = load(built.host), [Tenant(), Tenant()]
    arbiter = shared_by(tenants, 400 * MIB, 400 * MIB)
    tenants[0].page.uses[0].memory = (1 << 64) - 1
    native.lend_memory(ctypes.byref(arbiter))
    assert [tenant.limit for tenant in tenants] == [400 * MIB, 400 * MIB]


def test_memory_lent_to_a_suspended_job_is_lent_to_others(built: Libraries) -> None:
    native, tenants = load(built.host), [Tenant(), Tenant()]
    arbiter = shared_by(tenants, 100 * MIB, TOTAL)
    native.lend_memory(ctypes.byref(arbiter))
    lent = tenants[0].limit
    assert native.ledger_change(ctypes.addressof(tenants[0].page), 1, 0, lent // UNIT, lent // UNIT)
    assert native.lend_away(ctypes.byref(arbiter), ctypes.byref(arbiter.contenders[0]), True)
    assert [tenant.limit for tenant in tenants] == [100 * MIB, 800 * MIB]


def test_job_stays_suspended_while_others_use_the_memory_that_it_had(built: Libraries) -> None:
    native, tenants = load(built.host), [Tenant(), Tenant()]
    arbiter = shared_by(tenants, 100 * MIB, TOTAL)
    native.lend_memory(ctypes.byref(arbiter))
    for tenant in tenants:
        if tenant is tenants[1]:
            assert native.lend_away(ctypes.byref(arbiter), ctypes.byref(arbiter.contenders[0]), True)
        limit = tenant.limit // UNIT
        assert native.ledger_change(ctypes.addressof(tenant.page), 1, 0, limit, limit)
    assert not native.lend_away(ctypes.byref(arbiter), ctypes.byref(arbiter.contenders[0]), False)
    assert arbiter.contenders[0].is_away and sum(tenant.limit for tenant in tenants) <= CAP


def test_borrower_sees_and_is_held_to_its_current_limit(make_bench: Callable[..., Bench]) -> None:
    """With the real shim: it uses memory without a guarantee, and is refused at once when a guarantee needs it."""
    machine = make_bench(memory=4000 * MIB)
    borrower = machine.job(memory=1000 * MIB, memory_limit=3000 * MIB)
    (turn, go), (told, tell) = os.pipe(), os.pipe()

    def work(driver: Driver) -> None:
        driver.start()
        assert (
            driver.free_memory() == (3000 * MIB - CONTEXT, 3000 * MIB)
            and driver.out("cuDeviceTotalMem_v2", 0) == 3000 * MIB
        )
        held = driver.out("cuMemAlloc_v2", 2000 * MIB)
        os.write(tell, b".")
        os.read(turn, 1)
        assert driver.free_memory()[0] == 0 and refused(driver, alloc, 2 * MIB)
        driver.cuMemFree_v2(held)
        os.write(tell, b".")
        os.read(turn, 1)
        free, total = driver.free_memory()
        assert total - free == CONTEXT and 1000 * MIB <= total < 1200 * MIB

    guest = machine.start(borrower, work)
    os.read(told, 1)
    newcomer = machine.job(memory=2500 * MIB)
    assert not newcomer.has_guarantee and borrower.excess(0) == CONTEXT + 2000 * MIB - borrower.memory_limit(0)
    assert newcomer.memory_limit(0) == 4000 * MIB - CONTEXT - 2000 * MIB, "the newcomer gets exactly the rest"
    os.write(go, b".")
    os.read(told, 1)
    until = time.monotonic() + 20
    while not newcomer.has_guarantee and time.monotonic() < until:
        time.sleep(0.001)
    assert newcomer.has_guarantee and borrower.excess(0) == 0
    os.write(go, b".")
    guest.result()

    def take(driver: Driver) -> None:
        driver.start()
        alloc(driver, 2500 * MIB - CONTEXT)

    machine.run(newcomer, take)

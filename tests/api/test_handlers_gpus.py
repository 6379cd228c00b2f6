"""Orders about the GPUs of a node."""

from base64 import b64decode
from types import SimpleNamespace
from typing import Any

import pytest

from cuda_guard.auditor import Finding
from membership.envelope import seal
from membership.identity import Identity
from mesh.api.handlers.gpus import GpuHandlers
from mesh.api.requests import ShareOrder
from mesh.gpus.receipts import KIND, Receipt, encode_receipt
from mesh.model.spec import format_job
from mesh.util.errors import ExitCode, MeshError
from placement.advert import Portion
from tests.gpus.test_inventory import lender, request


def test_share_that_the_guard_refuses_is_not_given_in_the_inventory_either() -> None:
    inventory, asked = lender(), request("one", gpu_share=30, vram_mib=10)
    assert inventory.admit(asked) is None
    before, told = inventory.portions_of(asked.job), list[str]()

    def refuse(*change: object) -> None:
        raise ValueError("it uses more already")

    nothing: Any = None
    tenant = SimpleNamespace(portions=before, limit=30, vram_limit_mib=0, change=refuse)
    jobs: Any = SimpleNamespace(attempts={asked.job: SimpleNamespace(portions=before)})
    guard: Any = SimpleNamespace(tenant=lambda job: tenant)
    lookup: Any = SimpleNamespace(find_job=lambda text: SimpleNamespace(job=asked.job))
    handlers = GpuHandlers(b"", {}, nothing, guard, inventory, jobs, lookup, lambda: told.append("changed"))
    with pytest.raises(MeshError, match="more already") as refused:
        handlers.change_share("one", ShareOrder(share=20, vram_mib=5))
    assert refused.value.code == ExitCode.REFUSED and not told
    assert inventory.portions_of(asked.job) == before


class Shares:
    """A job that has a share of two GPUs, and another one on the first."""

    def __init__(self, **tenant: Any) -> None:
        nothing: Any = None
        self.inventory, self.told, self.events = lender(), list[str](), list[str]()
        self.asked = request("one", gpu_share=30, vram_mib=1000)
        assert self.inventory.admit(self.asked) is None
        self.before = self.inventory.portions_of(self.asked.job)
        self.changes: list[Any] = []
        given = {"portions": self.before, "limit": 30, "vram_limit_mib": 0, "change": self._change}
        self.tenant = SimpleNamespace(**given | tenant)
        self.attempt = SimpleNamespace(portions=self.before)
        self.guard = SimpleNamespace(tenant=lambda job: self.tenant)
        jobs: Any = SimpleNamespace(
            attempts={self.asked.job: self.attempt},
            event_log=SimpleNamespace(add=lambda job, kind, text, new: self.events.append(f"{new}: {text}")),
        )
        lookup: Any = SimpleNamespace(find_job=lambda text: SimpleNamespace(job=self.asked.job))
        guard: Any = self.guard
        self.handlers = GpuHandlers(
            b"m" * 16, {}, nothing, guard, self.inventory, jobs, lookup, lambda: self.told.append("changed")
        )

    def _change(self, portions: Any, limit: int, vram_limit_mib: int) -> None:
        self.changes.append((portions, limit, vram_limit_mib))
        self.tenant.portions = portions

    def refusal(self, **order: int) -> tuple[str, ExitCode]:
        with pytest.raises(MeshError) as refused:
            self.handlers.change_share("one", ShareOrder(**order))
        assert not self.changes and not self.told and self.inventory.portions_of(self.asked.job) == self.before
        return str(refused.value), refused.value.code


def test_changed_share_holds_in_inventory_guard_and_advert() -> None:
    shares = Shares()
    told = shares.handlers.change_share("one", ShareOrder(share=50))
    assert (told.share, told.limit, told.vram_mib, told.vram_limit_mib) == (50, 50, 1000, 1000), "the rest stays"
    portions = shares.inventory.portions_of(shares.asked.job)
    assert {portion.share for portion in portions} == {50} and shares.changes == [(portions, 50, 0)]
    assert shares.attempt.portions == portions and shares.told == ["changed"]
    assert shares.events == ["share: 50 per cent, up to 50, and 1000 MiB of each of its GPUs, by its node's owner"]
    told = shares.handlers.change_share("one", ShareOrder(limit=80, vram_mib=500, vram_limit_mib=2000))
    assert (told.share, told.limit, told.vram_mib, told.vram_limit_mib) == (50, 80, 500, 2000)
    assert shares.events[1].startswith("share: 50 per cent, up to 80, and 500 MiB, up to 2000,")


def test_share_above_its_limit_is_refused() -> None:
    said, code = Shares().refusal(share=40, limit=39)
    assert said == "it cannot be guaranteed 40 per cent and be held to 39" and code == ExitCode.USAGE
    said, code = Shares().refusal(vram_limit_mib=999)
    assert said == "it cannot be guaranteed 1000 MiB and be held to 999" and code == ExitCode.USAGE
    shares = Shares()
    assert shares.handlers.change_share("one", ShareOrder(share=40, limit=40)).limit == 40


def test_share_that_others_have_is_refused() -> None:
    shares = Shares()
    assert shares.inventory.admit(request("two", gpu_share=60, vram_mib=10)) is None
    assert shares.inventory.portions_of(b"two")[0].uuid == shares.before[0].uuid
    said, code = shares.refusal(share=41)
    assert "has 40 %" in said and code == ExitCode.REFUSED


def test_job_without_a_share_has_none_to_change() -> None:
    whole = Shares(portions=(Portion("b", 100, 16_000),))
    said, code = whole.refusal(share=40)
    assert "has no share of a GPU of this node" in said and code == ExitCode.NOT_FOUND
    absent = Shares()
    absent.guard.tenant = lambda job: None  # type: ignore[assignment,return-value]
    assert absent.refusal(share=40)[1] == ExitCode.NOT_FOUND


@pytest.mark.parametrize("problem", ["", "the driver is too old"])
async def test_paused_job_says_whether_its_memory_is_freed(problem: str) -> None:
    shares = Shares()
    asked: list[str] = []

    async def act(tenant: object) -> str:
        asked.append("asked")
        return problem

    shares.guard.pause = shares.guard.resume = act
    told = await shares.handlers.pause_job("one", True)
    assert (told.paused, told.freed, told.problem) == (True, not problem, problem)
    assert ("is freed" in shares.events[0]) == (not problem) and problem in shares.events[0]
    if problem:
        with pytest.raises(MeshError, match="it cannot go on: the driver") as refused:
            await shares.handlers.pause_job("one", False)
        assert refused.value.code == ExitCode.REFUSED and len(shares.events) == 1
    else:
        told = await shares.handlers.pause_job("one", False)
        assert (told.paused, told.freed) == (False, False) and shares.events[1].startswith("gpu resumed")
    shares.guard.tenant = lambda job: None  # type: ignore[assignment,return-value]
    with pytest.raises(MeshError, match="not under guard here") as refused:
        await shares.handlers.pause_job("one", True)
    assert refused.value.code == ExitCode.NOT_FOUND and len(asked) == 2


async def test_receipts_of_another_mesh_are_left_out() -> None:
    node = Identity.generate()
    made = Receipt("j", 0, node.node_id, "ada", 1, 2, ())
    sealed = [seal(node, mesh, KIND, encode_receipt(made)) for mesh in (b"m" * 16, b"x" * 16)]
    shares, asked = Shares(), list[object]()

    async def receipts(job: bytes | None) -> list[bytes]:
        asked.append(job)
        return [*sealed, b"nonsense"]

    parts: Any = shares.handlers
    parts._journal = SimpleNamespace(receipts=receipts)
    (row,) = (await shares.handlers.receipt_list(None)).receipts
    assert row.user == "ada" and row.submitter == "" and b64decode(row.sealed) == sealed[0]
    await shares.handlers.receipt_list("one")
    assert asked == [None, shares.asked.job]


def test_list_of_gpus_has_the_jobs_on_each_and_what_is_left() -> None:
    shares, whole = Shares(gate_closed=True, closed_by={"owner", "audit"}, suspended=(7,)), request("two")
    assert shares.inventory.admit(whole) is None
    use = {"gpu_s": 1.5, "launches": 2, "memory": 3, "peak": 4, "refused": 0, "processes": 1, "memory_now": 5}
    found = [Finding("context", "one", uuid, 7, "why") for uuid in ("a", "b")]
    vars(shares.tenant).update(
        vram_limit_mib=2000,
        usage=lambda: (SimpleNamespace(**use),),
        shares_now=lambda: (30.04,),
        held_now=lambda place: 9,
        unguarded_calls=lambda: ["cuX"],
        findings=found,
    )
    parts: Any = shares.handlers
    spec = SimpleNamespace(name="train", user="ada")
    jobs = {job: shares.inventory.portions_of(job) for job in (shares.asked.job, whole.job)}
    parts._jobs.attempts = {
        job: SimpleNamespace(portions=portions, job=job, number=1, spec=spec) for job, portions in jobs.items()
    }
    tenants = {format_job(shares.asked.job): shares.tenant}
    vars(shares.guard).update(tenant=tenants.get, foreign={}, audit_problem="", pause_problem="too old")
    parts._problems = {"guard": "no compiler"}
    told = shares.handlers.gpu_list()
    a, b = told.gpus
    assert (told.problem, told.pause_problem) == ("no compiler", "too old")
    assert (a.share_free, a.vram_free_mib, b.share_free, b.vram_free_mib) == (0, 0, 70, 15_000)
    ((unguarded,), (guarded,)) = a.jobs, b.jobs
    assert (unguarded.guarded, unguarded.limit, unguarded.vram_limit_mib) == (False, 100, 80_000)
    assert (guarded.guarded, guarded.share, guarded.limit, guarded.share_now) == (True, 30, 30, 30.0)
    assert (guarded.vram_mib, guarded.vram_limit_mib, guarded.memory, guarded.peak) == (1000, 2000, 3, 4)
    assert (guarded.gate, guarded.closed_by, guarded.suspended) == ("closed", ["audit", "owner"], True)
    assert guarded.findings == found[1:], "those of this GPU"

"""Orders about the GPUs of a node."""

from types import SimpleNamespace
from typing import Any

import pytest

from mesh.api.handlers.gpus import GpuHandlers
from mesh.api.requests import ShareOrder
from mesh.util.errors import ExitCode, MeshError
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

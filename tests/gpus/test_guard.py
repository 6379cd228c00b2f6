"""The node's guard, and its reports when there can be none."""

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import msgspec
import pytest

from cuda_guard.build import BuildError, find_compiler
from cuda_guard.page import AUDITS
from mesh.execution.engine import EngineError, Launch
from mesh.gpus.guard import NodeGuard, page_directory
from placement.advert import Portion
from tests.guards import Watched, gpu, use_driver

GPU = gpu(UUID(int=1))
SHARE, WHOLE = Portion(GPU.uuid, 30, 1024), Portion(GPU.uuid, 100, GPU.vram_mib)


def launch(*gpus: Portion) -> Launch:
    fields = dict.fromkeys(("work_dir", "ckpt_dir", "out_dir", "ctl_dir", "log_path", "node"), "")
    return Launch(job="j" * 26, attempt=0, argv=("true",), env={}, grace_s=1.0, gpus=gpus, **fields)  # type: ignore[arg-type]


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that looks like NVIDIA's."""
    directory = tmp_path / "driver"
    directory.mkdir()
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        (directory / name).touch()
    use_driver(monkeypatch, directory)
    return directory


async def test_pages_are_removed_with_daemon(driver: Path, tmp_path: Path) -> None:
    async with Watched(tmp_path / "pages", (GPU,)) as watched:
        assert watched.told == [""] and list((tmp_path / "pages").iterdir()) == []
        first, second = (watched.guard.admit(launch(SHARE), own_root=False) for _ in range(2))
        assert first is not None and second is not None and watched.guard.tenant("j" * 26) is second
        writable = [mount.source.name for mount in first.injection.mounts if not mount.read_only]
        assert writable == ["job"] and len(list((tmp_path / "pages").iterdir())) == 2
        first.release()
        first.set_gate(True, "too late to matter")
        assert watched.guard.tenants == [second]
    assert second.released and not (tmp_path / "pages").exists()


async def test_gate_that_the_kill_switch_shut_is_opened_by_no_other_hand(driver: Path, tmp_path: Path) -> None:
    async with Watched(tmp_path / "pages", (GPU,)) as watched:
        tenant = watched.guard.admit(launch(SHARE), own_root=False)
        assert tenant is not None
        watched.guard.shut_gates()
        tenant.set_gate(True, "the owner pauses it", by="owner")
        tenant.set_gate(False, "the owner resumes it", by="owner")
        assert tenant.gate_closed


async def test_container_mounts_are_read_only_except_use(driver: Path, tmp_path: Path) -> None:
    async with Watched(tmp_path / "pages", (GPU,)) as watched:
        tenant = watched.guard.admit(launch(SHARE), own_root=True)
        assert tenant is not None and tenant.injection.env == {}
        writable = [mount for mount in tenant.injection.mounts if not mount.read_only]
        assert [str(mount.target) for mount in writable] == ["/run/mesh/guard/job"]
        assert {mount.target for mount in tenant.injection.mounts} >= {
            driver / "libcuda.so.1",
            Path("/etc/ld.so.preload"),
        }


async def test_missing_compiler_disables_shares(driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise BuildError("GPUs cannot be shared: no C compiler")

    monkeypatch.setattr("mesh.gpus.guard.libraries", fail)
    async with Watched(tmp_path / "pages", (GPU,)) as watched:
        assert watched.told == ["GPUs cannot be shared: no C compiler"]
        with pytest.raises(EngineError, match="no C compiler"):
            watched.guard.admit(launch(SHARE), own_root=False)
        with pytest.raises(EngineError, match="no C compiler"):
            watched.guard.admit(launch(WHOLE, SHARE), own_root=False)
        assert watched.guard.admit(launch(WHOLE), own_root=False) is None


async def test_missing_driver_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mesh.gpus.guard.find_driver", lambda: None)
    async with Watched(tmp_path / "pages", (GPU,)) as watched:
        assert "libcuda.so.1 and" in watched.told[0]


async def test_node_without_gpus_reports_nothing(tmp_path: Path) -> None:
    async with Watched(tmp_path / "pages", ()) as watched:
        assert watched.told == [] and not (tmp_path / "pages").exists()


async def test_unknown_call_is_named_once(driver: Path, tmp_path: Path) -> None:
    async with Watched(tmp_path / "pages", (GPU,)) as watched:
        tenant = watched.guard.admit(launch(SHARE), own_root=False)
        assert tenant is not None and tenant.new_unguarded_calls() == []
        page = tenant.guarded.pages.job
        page.audit[0].value, page.audits = b"cuMemAllocNext", 1
        del page
        assert (tenant.new_unguarded_calls(), tenant.new_unguarded_calls()) == (
            ["cuMemAllocNext"],
            [],
        ) and tenant.unguarded_calls() == ["cuMemAllocNext"]


async def test_calls_that_a_job_invents_are_named_to_a_bound(driver: Path, tmp_path: Path) -> None:
    async with Watched(tmp_path / "pages", (GPU,)) as watched:
        tenant = watched.guard.admit(launch(SHARE), own_root=False)
        assert tenant is not None
        page, named = tenant.guarded.pages.job, list[str]()
        for look in range(3):
            for slot in range(AUDITS):
                page.audit[slot].value = b"cuInvented%d_%d" % (look, slot)
            page.audits = AUDITS
            named += tenant.new_unguarded_calls()
        assert len(named) == AUDITS


async def test_spoilt_page_is_a_finding_that_proves(driver: Path, tmp_path: Path) -> None:
    async with Watched(tmp_path / "pages", (GPU,)) as watched:
        tenant = watched.guard.admit(launch(SHARE), own_root=False)
        assert tenant is not None and tenant.spoilt_page() is None
        os.truncate(tenant.guarded.pages.directory / "job", 1 << 20)
        found = tenant.spoilt_page()
        assert found is not None and found.proves and "length" in found.detail and tenant.spoilt_page() is None
        tenant.guarded.lock_flooded = True
        found = tenant.spoilt_page()
        assert found is not None and found.proves and "locks" in found.detail
        tenant.release()
        assert tenant.spoilt_page() is None


async def test_job_without_a_memory_request_pins_what_one_job_may_have(driver: Path, tmp_path: Path) -> None:
    async with Watched(tmp_path / "pages", (GPU,)) as watched:
        watched.guard._pinned_mib = 4096
        for asked_mib, pinned_mib in ((None, 4096), (512, 512)):
            asked = msgspec.structs.replace(launch(WHOLE), memory_mib=asked_mib)
            tenant = watched.guard.admit(asked, own_root=False)
            assert tenant is not None and tenant.guarded.pages.policy.host_limit == pinned_mib << 20


async def test_calls_of_newer_driver_are_named(driver: Path, tmp_path: Path) -> None:
    names = [f"cuTomorrow{n}" for n in range(7)]
    source = "".join(f"int {name}(void) {{ return 0; }}\n" for name in names)
    command = [*find_compiler(), "-shared", "-fPIC", "-x", "c", "-", "-o", str(driver / "libcuda.so.1")]
    subprocess.run(command, input=source, text=True, check=True)
    async with Watched(tmp_path / "pages", (GPU,)) as watched:
        (warning,) = watched.warned
        assert "has 7 calls" in warning and "cuTomorrow4, ...)" in warning


def test_daemons_have_separate_page_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    one, other = page_directory(b"a" * 32), page_directory(b"b" * 32)
    assert one != other and one.parent == other.parent == tmp_path
    assert page_directory(b"a" * 32) != one, "another user could take a name that they know"
    (tmp_path / "kept").mkdir()
    for number, node in enumerate("aab"):
        (tmp_path / f"mesh-guard-{node.encode().hex() * 16}-{number}").mkdir()
    link = tmp_path / f"mesh-guard-{b'a'.hex() * 8}-9"
    link.symlink_to(tmp_path / "kept")
    page_directory(b"a" * 32)
    assert {path.name for path in tmp_path.iterdir()} == {"kept", link.name, f"mesh-guard-{b'b'.hex() * 16}-2"}
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/nowhere")
    assert page_directory(b"a" * 32).parent in {Path("/run"), Path("/dev/shm")}


async def test_unwanted_tenant_stops_waiting_for_memory(tmp_path: Path) -> None:
    guard = NodeGuard(tmp_path, (), lambda words: None, lambda words: None)
    tenant: Any = SimpleNamespace(job="j" * 26, guarded=SimpleNamespace(has_guarantee=False))
    asked = iter([True, True, False])
    with pytest.raises(EngineError, match="it was stopped while it waited"):
        await guard.make_room(tenant, lambda: next(asked))
    tenant.guarded.has_guarantee = True
    await guard.make_room(tenant, lambda: False)

"""NVML reader: answers, and missing answers."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cuda_guard.auditor import GpuProcess
from cuda_guard.nvml import Nvml, NvmlError
from tests.fake.child import Child, Talk
from tests.fake.client import Driver
from tests.fake.world import MIB, World

pytestmark = pytest.mark.cc


def work(driver: Driver, talk: Talk) -> None:
    driver.start()
    kernel = driver.kernel("k_5ms")
    for _ in range(80):
        driver.launch(kernel)
    driver.cuCtxSynchronize()
    talk.say("worked")
    talk.hear()


@pytest.fixture
def nvml(world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Nvml]:
    """Load a copy of the fake, which stays with its first world."""
    monkeypatch.setenv("FAKE_GPU_WORLD", str(world.path))
    own = tmp_path / "libnvidia-ml.so.1"
    shutil.copy(world.fakes.nvml, own)
    made = Nvml((f"GPU-{world.uuids[0]}", "GPU-00000000-0000-0000-0000-000000000001"), own)
    yield made
    made.close()


def test_sample_has_processes_with_memory_and_time(world: World, nvml: Nvml) -> None:
    (idle,) = nvml.sample()
    assert (idle.uuid, idle.total, idle.used, idle.processes) == (f"GPU-{world.uuids[0]}", 16384 * MIB, 0, ())
    with Child(world, work) as child:
        child.hear()
        (look,) = nvml.sample()
        (seen,) = look.processes
        assert (seen.pid, seen.memory, look.used) == (child.pid, 300 * MIB, 300 * MIB) and look.reports_busy
        assert seen.busy is not None and seen.busy > 50
        assert nvml.holders() == {child.pid}
    assert nvml.holders() == set()


def test_figures_that_nvml_does_not_report_are_none(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    import pynvml

    def refuse(*words: Any) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    one = SimpleNamespace(pid=7, usedGpuMemory=None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetProcessUtilization", refuse)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetGraphicsRunningProcesses", refuse)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", lambda handle: [one])
    (look,) = nvml.sample()
    assert look.processes == (GpuProcess(7, None, None),) and not look.reports_busy
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", refuse)
    assert nvml.sample() == (), "a failing device is left out"


def test_missing_nvml_is_an_error_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "libnvidia-ml.so.1").touch()
    with pytest.raises(NvmlError, match=r"NVML does not work: .*file too short"):
        Nvml((), tmp_path / "libnvidia-ml.so.1")

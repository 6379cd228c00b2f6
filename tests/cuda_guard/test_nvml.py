"""NVML reader: answers, and missing answers."""

import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from cuda_guard import nvml as nvml_module
from cuda_guard.auditor import GpuProcess
from cuda_guard.nvml import SAMPLE_S, Nvml, NvmlError
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


def raises(error: int) -> Callable[..., Any]:
    def fail(*words: Any) -> None:
        raise pynvml.NVMLError(error)

    return fail


def test_figures_that_nvml_does_not_report_are_none(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse = raises(pynvml.NVML_ERROR_NOT_SUPPORTED)
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


def row(pid: int, at_us: int, per_cent: int) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, timeStamp=at_us, smUtil=per_cent)


def test_utilisation_is_the_mean_since_the_last_sample(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    now, asked = 100.0, list[int]()
    monkeypatch.setattr(nvml_module, "time", SimpleNamespace(monotonic=lambda: now))

    def answers(*rows: SimpleNamespace) -> None:
        def utilization(handle: object, newest_us: int) -> list[SimpleNamespace]:
            asked.append(newest_us)
            return list(rows)

        monkeypatch.setattr(pynvml, "nvmlDeviceGetProcessUtilization", utilization)

    def busy() -> dict[int, float | None]:
        (look,) = nvml.sample()
        assert look.reports_busy and list(look.processes) == sorted(look.processes, key=lambda one: one.pid)
        return {one.pid: one.busy for one in look.processes}

    answers(row(2, 300, 100), row(1, 100, 40), row(1, 200, 60), row(3, 0, 50), row(4, 150, 4_000_000_000))
    assert busy() == {1: 50.0, 2: 100.0}
    answers(row(1, 250, 90), row(1, 400, 10), row(5, 350, 0))
    assert busy() == {1: 10.0, 5: 0.0} and asked == [0, 300]
    answers(row(1, 390, 90))
    assert busy() == {}, "nothing new"
    answers(row(1, 500, 70))
    assert busy() == {1: 70.0} and asked[-2:] == [400, 400]
    monkeypatch.setattr(pynvml, "nvmlDeviceGetProcessUtilization", raises(pynvml.NVML_ERROR_NOT_FOUND))
    now += 0.9 * SAMPLE_S
    assert busy() == {1: 70.0}, "the next sample is not due yet"
    now += 0.2 * SAMPLE_S
    assert busy() == {}
    monkeypatch.setattr(pynvml, "nvmlDeviceGetProcessUtilization", raises(pynvml.NVML_ERROR_NO_PERMISSION))
    (look,) = nvml.sample()
    assert not look.reports_busy


def test_processes_that_draw_count_too(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    both, computes, draws = (SimpleNamespace(pid=pid, usedGpuMemory=pid * MIB) for pid in (1, 2, 3))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", lambda handle: [both, computes])
    monkeypatch.setattr(pynvml, "nvmlDeviceGetGraphicsRunningProcesses", lambda handle: [both, draws])
    monkeypatch.setattr(pynvml, "nvmlDeviceGetProcessUtilization", lambda handle, newest_us: [row(9, 1, 5)])
    (look,) = nvml.sample()
    assert look.processes == (
        GpuProcess(1, MIB, 0.0, True),
        GpuProcess(2, 2 * MIB, 0.0, True),
        GpuProcess(3, 3 * MIB, 0.0, False),
        GpuProcess(9, 0, 5.0, False),
    )
    assert nvml.holders() == {1, 2, 3}
    monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", raises(pynvml.NVML_ERROR_GPU_IS_LOST))
    assert nvml.holders() == set() and nvml.sample() == (), "it gives no answer, which is not none"


def test_device_that_fails_does_not_hide_the_others(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = make_world(devices=2)
    monkeypatch.setenv("FAKE_GPU_WORLD", str(world.path))
    shutil.copy(world.fakes.nvml, tmp_path / "libnvidia-ml.so.1")
    uuids = [f"GPU-{uuid}" for uuid in world.uuids]
    unknown = "GPU-00000000-0000-0000-0000-0000000000ff"
    with caplog.at_level(logging.WARNING):
        nvml = Nvml((unknown, *uuids), tmp_path / "libnvidia-ml.so.1")
    assert f"does not list {unknown}" in caplog.text
    real, first = pynvml.nvmlDeviceGetMemoryInfo, nvml._handles[uuids[0]]

    def info(handle: object) -> object:
        if handle is first:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return real(handle)

    assert [look.uuid for look in nvml.sample()] == uuids
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", info)
    assert [look.uuid for look in nvml.sample()] == uuids[1:] and f"no answer for {uuids[0]}" in caplog.text
    shut, calls = pynvml.nvmlShutdown, list[int]()
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: calls.append(1) or shut())
    nvml.close()
    assert calls and pynvml.nvmlLib is None and not pynvml._nvmlGetFunctionPointer_cache


@pytest.mark.parametrize("when", ["nvmlInit", "nvmlShutdown"])
def test_library_that_fails_is_not_kept(fakes: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, when: str) -> None:
    shutil.copy(fakes.nvml, tmp_path / "libnvidia-ml.so.1")
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, when, raises(pynvml.NVML_ERROR_UNKNOWN))
    if when == "nvmlInit":
        with pytest.raises(NvmlError, match="NVML does not work: Unknown Error"):
            Nvml((), tmp_path / "libnvidia-ml.so.1")
    else:
        Nvml((), tmp_path / "libnvidia-ml.so.1").close()
    assert pynvml.nvmlLib is None

"""The fake NVML, as used by the mesh's code."""

import ctypes
import time
from collections.abc import Callable
from typing import Any

import pytest

from mesh.gpus.nvml import inventory
from tests.cuda_guard.guests import CONTEXT
from tests.cuda_guard.test_fake_processes import busy
from tests.fake.child import Child
from tests.fake.world import MIB, World

pytestmark = pytest.mark.cc

MakeWorld = Callable[..., World]


@pytest.fixture
def nvml(make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> tuple[World, Any]:
    import pynvml

    world = make_world(devices=2, memory=24576 * MIB, name="Fake L4", capability=89)
    own = tmp_path / "libnvidia-ml.so.1"  # a copy stays with its first world
    own.write_bytes(world.fakes.nvml.read_bytes())
    monkeypatch.setenv("FAKE_GPU_WORLD", str(world.path))
    monkeypatch.setattr(pynvml, "nvmlLib", ctypes.CDLL(str(own)))
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    return world, pynvml


def test_mesh_finds_the_gpus(nvml: tuple[World, Any]) -> None:
    world, _ = nvml
    assert [(gpu.uuid, gpu.model, gpu.vram_mib, gpu.capability) for gpu in inventory()] == [
        (f"GPU-{number}", "Fake L4", 24576, (8, 9)) for number in world.uuids
    ]


def test_nvml_reports_memory_processes_and_utilisation(nvml: tuple[World, Any]) -> None:
    world, pynvml = nvml
    pynvml.nvmlInit()
    first, second = (pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(2))
    assert (
        pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{world.uuids[1]}")) == f"GPU-{world.uuids[1]}"
    )
    assert pynvml.nvmlSystemGetCudaDriverVersion() == 13000
    assert pynvml.nvmlSystemGetDriverVersion().startswith("580")
    with Child(world, busy, "k_1ms", 0.6) as child:
        child.hear()
        child.tell()
        for call in (pynvml.nvmlDeviceGetComputeRunningProcesses_v2, pynvml.nvmlDeviceGetComputeRunningProcesses_v3):
            assert [(entry.pid, entry.usedGpuMemory) for entry in call(first)] == [(child.pid, CONTEXT)]
            assert call(second) == []
        for version in (None, pynvml.nvmlMemory_v2):
            info = pynvml.nvmlDeviceGetMemoryInfo(first, version)
            assert (info.total, info.used, info.free) == (24576 * MIB, CONTEXT, 24576 * MIB - CONTEXT)
        child.result()
    assert pynvml.nvmlDeviceGetComputeRunningProcesses(first) == []
    samples = pynvml.nvmlDeviceGetProcessUtilization(first, 0)
    assert [entry.pid for entry in samples] == [child.pid]
    assert abs(samples[0].timeStamp / 1e6 - time.time()) < 5
    infos = pynvml.nvmlDeviceGetProcessesUtilizationInfo(first, 0)
    assert [(entry.pid, entry.smUtil) for entry in infos] == [(child.pid, samples[0].smUtil)]
    with pytest.raises(pynvml.NVMLError_NotFound):
        pynvml.nvmlDeviceGetProcessUtilization(first, samples[0].timeStamp)
    with pytest.raises(pynvml.NVMLError_NotSupported):
        pynvml.nvmlDeviceGetFanSpeed(first)
    pynvml.nvmlShutdown()
    with pytest.raises(pynvml.NVMLError_Uninitialized):
        pynvml.nvmlDeviceGetCount()

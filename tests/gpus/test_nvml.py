"""The GPU view: none without a driver, all of them with one (a fake NVML behind the real binding's names and errors)."""

import logging
from types import SimpleNamespace

import pynvml
import pytest

from mesh.gpus.nvml import Reading, driver_version, inventory, readings
from placement.advert import Gpu


class FakeNvml:
    """A driver with two GPUs. Nothing answers before init or after shutdown, as in the real one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, init_error: int | None = None, lost: bool = False) -> None:
        self.open = False
        self._init_error, self._lost = init_error, lost
        for name in ("Init", "Shutdown", "DeviceGetCount", "DeviceGetHandleByIndex", "DeviceGetName", "DeviceGetUUID"):
            monkeypatch.setattr(pynvml, f"nvml{name}", getattr(self, name))
        monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", self.DeviceGetMemoryInfo)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetCudaComputeCapability", self.DeviceGetCudaComputeCapability)

    def _check(self) -> None:
        if not self.open:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)

    def Init(self) -> None:
        if self._init_error is not None:
            raise pynvml.NVMLError(self._init_error)
        self.open = True

    def Shutdown(self) -> None:
        self._check()
        self.open = False

    def DeviceGetCount(self) -> int:
        self._check()
        return 2

    def DeviceGetHandleByIndex(self, index: int) -> int:
        self._check()
        if self._lost and index == 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return index

    def DeviceGetName(self, handle: int) -> str | bytes:
        return b"NVIDIA Fake 24" if handle else "NVIDIA Fake 80"

    def DeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}"

    def DeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(total=(24 if handle else 80) << 30, used=handle << 30, free=(23 if handle else 80) << 30)

    def DeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:
        return (8, 6) if handle else (9, 0)


def test_inventory_lists_every_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml(monkeypatch)
    assert inventory() == (
        Gpu(uuid="GPU-0", model="NVIDIA Fake 80", vram_mib=81_920, capability=(9, 0)),
        Gpu(uuid="GPU-1", model="NVIDIA Fake 24", vram_mib=24_576, capability=(8, 6)),
    )
    assert not nvml.open, "NVML is let go of"


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (b"550.54.14", (550, 54, 14)),
        ("580.00", (580, 0)),
        ("rc", ()),
        ("", ()),
        ("1.2.3.4.5", (1, 2, 3, 4)),
        ("1.²", ()),
    ],
)
def test_driver_version_is_parsed(monkeypatch: pytest.MonkeyPatch, text: str | bytes, version: tuple[int, ...]) -> None:
    nvml = FakeNvml(monkeypatch)
    monkeypatch.setattr(pynvml, "nvmlSystemGetDriverVersion", lambda: text)
    assert driver_version() == version and not nvml.open
    FakeNvml(monkeypatch, init_error=pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    assert driver_version() == ()


@pytest.mark.parametrize("error", [pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED])
def test_missing_driver_means_no_gpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: int
) -> None:
    FakeNvml(monkeypatch, init_error=error)
    with caplog.at_level(logging.DEBUG):
        assert inventory() == ()
    assert caplog.records == []


def test_failing_driver_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    FakeNvml(monkeypatch, init_error=pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
    assert inventory() == () and "offers no GPU" in caplog.text
    caplog.clear()
    nvml = FakeNvml(monkeypatch, lost=True)
    assert inventory() == () and "offers none" in caplog.text and not nvml.open


def test_readings_are_of_every_gpu_that_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(handle: int) -> int:
        if handle == 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return 0

    def temperature(handle: int, sensor: int) -> int:
        assert sensor == pynvml.NVML_TEMPERATURE_GPU
        return 40 * refuse(handle) + 41

    rates = SimpleNamespace(gpu=35, memory=70)
    nvml = FakeNvml(monkeypatch)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUtilizationRates", lambda handle: refuse(handle) or rates)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetTemperature", temperature)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetPowerUsage", lambda handle: refuse(handle) + 250_500)
    first = Reading("GPU-0", "NVIDIA Fake 80", 0.35, 0, 80 << 30, 41.0, 250.5)
    assert readings() == (first, Reading("GPU-1", "NVIDIA Fake 24", None, 1 << 30, 24 << 30, None, None))
    assert not nvml.open
    monkeypatch.setattr(pynvml, "nvmlDeviceGetTemperature", lambda handle, sensor: 0)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetPowerUsage", lambda handle: 0)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda handle: refuse(1))
    last = readings()[1]
    assert (last.celsius, last.watts) == (0.0, 0.0) and (last.used_bytes, last.total_bytes) == (None, None)
    lost = FakeNvml(monkeypatch, lost=True)
    assert [reading.uuid for reading in readings()] == ["GPU-0"] and not lost.open


def test_no_readings_without_a_driver_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNvml(monkeypatch, init_error=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    assert readings() == ()
    nvml = FakeNvml(monkeypatch)

    def fail() -> int:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", fail)
    assert readings() == () and not nvml.open
    monkeypatch.setattr(pynvml, "nvmlSystemGetDriverVersion", fail)
    assert driver_version() == () and not nvml.open, "NVML is let go of"


def test_real_machine_answers() -> None:
    assert all(gpu.vram_mib > 0 and gpu.uuid for gpu in inventory())

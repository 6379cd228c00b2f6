"""The GPUs of this machine, by NVML. A machine without NVIDIA's driver has no GPUs, which is not an error."""

import logging
from collections.abc import Callable
from typing import Any

import msgspec

from placement.advert import MAX_DRIVER_PARTS, Gpu

log = logging.getLogger(__name__)


def inventory() -> tuple[Gpu, ...]:
    """Return every GPU that this user may use; empty without a driver. Other errors are logged."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        if not isinstance(error, pynvml.NVMLError_LibraryNotFound | pynvml.NVMLError_DriverNotLoaded):
            log.warning("NVML does not work here, so this node offers no GPU: %s", error)
        return ()
    try:
        return tuple(_describe(pynvml, number) for number in range(pynvml.nvmlDeviceGetCount()))
    except pynvml.NVMLError as error:
        log.warning("NVML failed while listing GPUs, so this node offers none: %s", error)
        return ()
    finally:
        pynvml.nvmlShutdown()


def driver_version() -> tuple[int, ...]:
    """Return the version of NVIDIA's driver, as (550, 54, 14); empty if unknown."""
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            text = _text(pynvml.nvmlSystemGetDriverVersion())
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return ()
    parts = text.split(".")[:MAX_DRIVER_PARTS]
    return tuple(map(int, parts)) if all(part.isascii() and part.isdigit() for part in parts) else ()


class Reading(msgspec.Struct, frozen=True):
    """Readings of one GPU; None if the driver does not report a value."""

    uuid: str
    model: str
    busy: float | None  # part of the last sample period, 0 to 1
    used_bytes: int | None
    total_bytes: int | None
    celsius: float | None
    watts: float | None


def readings() -> tuple[Reading, ...]:
    """Return readings of every GPU; empty without a driver. A GPU that has fallen off the bus is left out."""
    import pynvml

    try:
        pynvml.nvmlInit()  # reference-counted: cheap while another user has it open
    except pynvml.NVMLError:
        return ()
    try:
        found = [_read(pynvml, number) for number in range(pynvml.nvmlDeviceGetCount())]
        return tuple(reading for reading in found if reading is not None)
    except pynvml.NVMLError as error:
        log.debug("NVML failed while reading GPUs: %s", error)
        return ()
    finally:
        pynvml.nvmlShutdown()


def _read(nvml: Any, number: int) -> Reading | None:
    def ask(question: Callable[..., Any], *more: Any) -> Any:
        try:
            return question(handle, *more)
        except nvml.NVMLError:  # not every GPU has every sensor
            return None

    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(number)
        uuid, model = _text(nvml.nvmlDeviceGetUUID(handle)), _text(nvml.nvmlDeviceGetName(handle))
    except nvml.NVMLError as error:
        log.debug("GPU %d cannot be read: %s", number, error)
        return None
    rates, memory = ask(nvml.nvmlDeviceGetUtilizationRates), ask(nvml.nvmlDeviceGetMemoryInfo)
    celsius = ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU)
    milliwatts = ask(nvml.nvmlDeviceGetPowerUsage)
    return Reading(
        uuid=uuid,
        model=model,
        busy=None if rates is None else rates.gpu / 100,
        used_bytes=None if memory is None else int(memory.used),
        total_bytes=None if memory is None else int(memory.total),
        celsius=None if celsius is None else float(celsius),
        watts=None if milliwatts is None else milliwatts / 1000,
    )


def _describe(nvml: Any, number: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(number)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Gpu(
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        model=_text(nvml.nvmlDeviceGetName(handle)),
        vram_mib=int(nvml.nvmlDeviceGetMemoryInfo(handle).total) >> 20,
        capability=(int(major), int(minor)),
    )


def _text(value: str | bytes) -> str:
    """Decode bytes of older bindings."""
    return value.decode() if isinstance(value, bytes) else value

"""The GPUs of this machine, by NVML. A machine without NVIDIA's driver is a node with none, and no error."""

import logging
from typing import Any

from placement.advert import MAX_DRIVER_PARTS, Gpu

log = logging.getLogger(__name__)


def inventory() -> tuple[Gpu, ...]:
    """Every GPU this user may use; empty where there is no driver. Any other trouble is logged."""
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
    """Of NVIDIA's driver, as (550, 54, 14); nothing where there is none, or it does not say."""
    import pynvml

    try:
        pynvml.nvmlInit()
        text = _text(pynvml.nvmlSystemGetDriverVersion())
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return ()
    parts = text.split(".")[:MAX_DRIVER_PARTS]
    return tuple(map(int, parts)) if all(part.isascii() and part.isdigit() for part in parts) else ()


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
    """Older bindings give bytes."""
    return value.decode() if isinstance(value, bytes) else value

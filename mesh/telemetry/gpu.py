"""The GPUs of this machine, by NVML. A machine without NVIDIA's driver is a node with none, and no error."""

import logging

from placement.advert import Gpu

log = logging.getLogger(__name__)


def inventory() -> tuple[Gpu, ...]:
    """Every GPU this user may use; empty where there is no driver. Any other trouble is logged."""
    try:
        import pynvml
    except ImportError:
        return ()
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


def _describe(pynvml: object, number: int) -> Gpu:
    nvml: object = pynvml
    handle = nvml.nvmlDeviceGetHandleByIndex(number)  # type: ignore[attr-defined]
    name = nvml.nvmlDeviceGetName(handle)  # type: ignore[attr-defined]
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)  # type: ignore[attr-defined]
    return Gpu(
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),  # type: ignore[attr-defined]
        model=_text(name),
        vram_mib=int(nvml.nvmlDeviceGetMemoryInfo(handle).total) >> 20,  # type: ignore[attr-defined]
        capability=(int(major), int(minor)),
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value

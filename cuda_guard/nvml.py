"""NVML reader: the processes on this machine's GPUs, with their memory and utilisation."""

import ctypes
import logging
import time
from pathlib import Path
from typing import Any

from cuda_guard.auditor import DeviceSample, GpuProcess

SAMPLE_S = 1.0  # longest time between two samples (NVML's documentation of nvmlUtilization_t)

log = logging.getLogger(__name__)


class NvmlError(RuntimeError):
    """NVML cannot be used here; the message gives the reason."""


class Nvml:
    """Reads these devices. `library`: path of NVIDIA's library. The driver may block calls: keep them off the event loop."""

    def __init__(self, uuids: tuple[str, ...], library: Path | None = None) -> None:
        import pynvml

        self._nvml: Any = pynvml
        try:
            self._use(None if library is None else ctypes.CDLL(str(library)))
            pynvml.nvmlInit()
        except (OSError, pynvml.NVMLError) as error:
            self._use(None)
            raise NvmlError(f"NVML does not work: {error}") from error
        self._handles: dict[str, Any] = {}
        for uuid in uuids:
            try:
                self._handles[uuid] = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            except pynvml.NVMLError as error:
                log.warning("NVML does not list %s, which is not audited: %s", uuid, error)
        self._newest_us = dict.fromkeys(self._handles, 0)  # timestamp of the newest sample
        self._sampled_at = dict.fromkeys(self._handles, 0.0)
        self._last_busy: dict[str, dict[int, float]] = {}

    def sample(self) -> tuple[DeviceSample, ...]:
        """Sample every device that answers; utilisation by process is the mean since the last sample."""
        samples = []
        for uuid, handle in self._handles.items():
            try:
                samples.append(self._sample(uuid, handle))
            except self._nvml.NVMLError as error:
                log.warning("NVML gave no answer for %s: %s", uuid, error)
        return tuple(samples)

    def holders(self) -> set[int]:
        """Return the processes that have memory on any device now. Can be called from any thread, also during `sample`."""
        found: set[int] = set()
        for handle in self._handles.values():
            try:
                found |= self._listed(handle, self._nvml.nvmlDeviceGetComputeRunningProcesses).keys()
                found |= self._listed(handle, self._nvml.nvmlDeviceGetGraphicsRunningProcesses).keys()
            except self._nvml.NVMLError as error:
                log.warning("NVML gave no answer for a device: %s", error)
        return found

    def close(self) -> None:
        try:
            self._nvml.nvmlShutdown()
        except self._nvml.NVMLError as error:
            log.warning("NVML: %s", error)
        self._use(None)

    def _use(self, library: ctypes.CDLL | None) -> None:
        """Set the library of pynvml, which has one per process; None makes it search for one when it is needed."""
        self._nvml.nvmlLib = library
        self._nvml._nvmlGetFunctionPointer_cache.clear()

    def _sample(self, uuid: str, handle: Any) -> DeviceSample:
        busy = self._busy(uuid, handle)
        computing = self._listed(handle, self._nvml.nvmlDeviceGetComputeRunningProcesses)
        memory = {**computing, **self._listed(handle, self._nvml.nvmlDeviceGetGraphicsRunningProcesses)}
        info = self._nvml.nvmlDeviceGetMemoryInfo(handle)
        return DeviceSample(
            uuid=uuid,
            total=int(info.total),
            used=int(info.used),
            processes=tuple(
                GpuProcess(pid, memory.get(pid, 0), None if busy is None else busy.get(pid, 0.0), pid in computing)
                for pid in sorted({*memory, *(busy or {})})
            ),
            reports_busy=busy is not None,
        )

    def _listed(self, handle: Any, ask: Any) -> dict[int, int | None]:
        """Return bytes by pid, None where the driver does not report them (WSL).

        A process that computes and draws is in both lists with the same figure.
        """
        try:
            listed = ask(handle)
        except self._nvml.NVMLError_NotSupported:
            return {}
        return {int(one.pid): None if one.usedGpuMemory is None else int(one.usedGpuMemory) for one in listed}

    def _busy(self, uuid: str, handle: Any) -> dict[int, float] | None:
        """Return utilisation in per cent by pid; None where it is not reported.

        Without a new sample the last one holds until the next one is overdue.
        """
        try:
            samples = self._nvml.nvmlDeviceGetProcessUtilization(handle, self._newest_us[uuid])
        except self._nvml.NVMLError_NotFound:
            if time.monotonic() - self._sampled_at[uuid] >= SAMPLE_S:
                self._last_busy.pop(uuid, None)
            return self._last_busy.get(uuid, {})
        except (self._nvml.NVMLError_NotSupported, self._nvml.NVMLError_NoPermission):
            return None
        taken: dict[int, list[int]] = {}
        for sample in samples:
            if sample.timeStamp > self._newest_us[uuid] and sample.smUtil <= 100:  # some drivers leave rows unfilled
                taken.setdefault(int(sample.pid), []).append(int(sample.smUtil))
        self._newest_us[uuid] = max([self._newest_us[uuid], *(int(sample.timeStamp) for sample in samples)])
        self._sampled_at[uuid] = time.monotonic()
        self._last_busy[uuid] = {pid: sum(values) / len(values) for pid, values in taken.items()}
        return self._last_busy[uuid]

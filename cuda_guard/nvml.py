"""Looks at this machine's GPUs by NVML: whose processes are on them, with how much memory and time."""

import ctypes
import logging
import time
from pathlib import Path
from typing import Any

from cuda_guard.auditor import DeviceLook, Seen

SAMPLE_S = 1.0  # the longest time between two samples (NVML's documentation of nvmlUtilization_t)

log = logging.getLogger(__name__)


class NvmlError(RuntimeError):
    """NVML cannot be asked here; the text says why."""


class Nvml:
    """`library`: NVIDIA's own, where it is not to be looked for. Calls take as long as the driver likes: not on an event loop."""

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
                log.warning("NVML does not show %s, which is not audited: %s", uuid, error)
        self._seen_us = dict.fromkeys(self._handles, 0)  # of the newest sample
        self._sampled_at = dict.fromkeys(self._handles, 0.0)
        self._last_busy: dict[str, dict[int, float]] = {}

    def look(self) -> tuple[DeviceLook, ...]:
        """Every device that can be asked now; per-process times are means since the last look."""
        looks = []
        for uuid, handle in self._handles.items():
            try:
                looks.append(self._look(uuid, handle))
            except self._nvml.NVMLError as error:
                log.warning("NVML does not tell about %s: %s", uuid, error)
        return tuple(looks)

    def holders(self) -> set[int]:
        """Processes that have memory on any device now. Beside `look`, from any thread."""
        found: set[int] = set()
        for handle in self._handles.values():
            try:
                found |= self._listed(handle, self._nvml.nvmlDeviceGetComputeRunningProcesses).keys()
                found |= self._listed(handle, self._nvml.nvmlDeviceGetGraphicsRunningProcesses).keys()
            except self._nvml.NVMLError as error:
                log.warning("NVML does not tell about a device: %s", error)
        return found

    def close(self) -> None:
        try:
            self._nvml.nvmlShutdown()
        except self._nvml.NVMLError as error:
            log.warning("NVML: %s", error)
        self._use(None)

    def _use(self, library: ctypes.CDLL | None) -> None:
        """pynvml has one library for the whole process; None lets it look for one when it is next needed."""
        self._nvml.nvmlLib = library
        self._nvml._nvmlGetFunctionPointer_cache.clear()

    def _look(self, uuid: str, handle: Any) -> DeviceLook:
        busy = self._busy(uuid, handle)
        computing = self._listed(handle, self._nvml.nvmlDeviceGetComputeRunningProcesses)
        memory = {**computing, **self._listed(handle, self._nvml.nvmlDeviceGetGraphicsRunningProcesses)}
        info = self._nvml.nvmlDeviceGetMemoryInfo(handle)
        return DeviceLook(
            uuid=uuid,
            total=int(info.total),
            used=int(info.used),
            processes=tuple(
                Seen(pid, memory.get(pid, 0), None if busy is None else busy.get(pid, 0.0), pid in computing)
                for pid in sorted({*memory, *(busy or {})})
            ),
            tells_busy=busy is not None,
        )

    def _listed(self, handle: Any, ask: Any) -> dict[int, int | None]:
        """Bytes by pid, None where the driver does not say (as under WSL). One that computes and draws is in both lists, with the
        same figure."""
        try:
            listed = ask(handle)
        except self._nvml.NVMLError_NotSupported:
            return {}
        return {int(one.pid): None if one.usedGpuMemory is None else int(one.usedGpuMemory) for one in listed}

    def _busy(self, uuid: str, handle: Any) -> dict[int, float] | None:
        """Per cent by pid; None where this is not told. No newer sample than the last says nothing until it should have come."""
        try:
            samples = self._nvml.nvmlDeviceGetProcessUtilization(handle, self._seen_us[uuid])
        except self._nvml.NVMLError_NotFound:
            if time.monotonic() - self._sampled_at[uuid] >= SAMPLE_S:
                self._last_busy.pop(uuid, None)
            return self._last_busy.get(uuid, {})
        except (self._nvml.NVMLError_NotSupported, self._nvml.NVMLError_NoPermission):
            return None
        taken: dict[int, list[int]] = {}
        for sample in samples:
            if sample.timeStamp > self._seen_us[uuid] and sample.smUtil <= 100:  # some drivers leave rows unfilled
                taken.setdefault(int(sample.pid), []).append(int(sample.smUtil))
        self._seen_us[uuid] = max([self._seen_us[uuid], *(int(sample.timeStamp) for sample in samples)])
        self._sampled_at[uuid] = time.monotonic()
        self._last_busy[uuid] = {pid: sum(values) / len(values) for pid, values in taken.items()}
        return self._last_busy[uuid]

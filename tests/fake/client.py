"""A process's use of a CUDA driver, by ctypes; fast to import, for processes that tests start by the dozen."""

import ctypes
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LEGACY, PER_THREAD = 1, 2
NON_BLOCKING = 1


def timed(act: Callable[[], object]) -> float:
    """Seconds."""
    start = time.monotonic()
    act()
    return time.monotonic() - start


class CudaError(Exception):
    def __init__(self, name: str, code: int) -> None:
        super().__init__(f"{name} gave {code}")
        self.code = code


class Driver:
    """`driver.cuCtxSynchronize()` makes the call, and raises CudaError unless it succeeds; `driver.out("cuStreamCreate", 0)`
    is for calls that write what they give to their first parameter."""

    def __init__(self, path: str | Path) -> None:
        self.library = ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_LOCAL)

    def code(self, name: str, *words: Any) -> int:
        """Return the code of the call. Integers are passed as 64 bits, which the calling conventions allow for narrower types."""
        converted = [ctypes.c_uint64(word & (1 << 64) - 1) if isinstance(word, int) else word for word in words]
        return int(getattr(self.library, name)(*converted))

    def call(self, name: str, *words: Any) -> None:
        code = self.code(name, *words)
        if code:
            raise CudaError(name, code)

    def __getattr__(self, name: str) -> Callable[..., None]:
        if not name.startswith("cu"):
            raise AttributeError(name)
        return lambda *words: self.call(name, *words)

    def out(self, name: str, *words: Any) -> int:
        value = ctypes.c_uint64(0)
        self.call(name, ctypes.byref(value), *words)
        return value.value

    def start(self, device: int = 0) -> int:
        """Initialised, with the device's primary context current."""
        self.cuInit(0)
        context = self.out("cuDevicePrimaryCtxRetain", device)
        self.cuCtxSetCurrent(context)
        return context

    def kernel(self, name: str) -> int:
        module = self.out("cuModuleLoadData", b"image")
        return self.out("cuModuleGetFunction", module, name.encode())

    def launch(self, function: int, stream: int = 0, grid: int = 1, suffix: str = "") -> None:
        self.call(f"cuLaunchKernel{suffix}", function, grid, 1, 1, 1, 1, 1, 0, stream, None, None)

    def record(self, stream: int = 0) -> int:
        """A new event, recorded in the stream."""
        event = self.out("cuEventCreate", 0)
        self.cuEventRecord(event, stream)
        return event

    def elapsed_ms(self, start: int, end: int) -> float:
        value = ctypes.c_float(0)
        self.cuEventElapsedTime(ctypes.byref(value), start, end)
        return value.value

    def free_memory(self) -> tuple[int, int]:
        """Free and total bytes."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def address(self, name: str, version: int, flags: int = 0) -> tuple[int, int | None]:
        """cuGetProcAddress_v2's status and address."""
        pointer, status = ctypes.c_void_p(), ctypes.c_int(-1)
        self.cuGetProcAddress_v2(name.encode(), ctypes.byref(pointer), version, flags, ctypes.byref(status))
        return status.value, pointer.value

    def export(self, name: str) -> int | None:
        return ctypes.cast(getattr(self.library, name), ctypes.c_void_p).value

"""A kernel whose work is counted in iterations, launched by the driver API alone.

It fills the device, and its time is that of its iterations: unlike a kernel that waits for a clock, it makes no progress while it
is preempted. The driver compiles it from PTX. The fake driver knows its name without PTX, so the same code measures both. The
iterations of a microsecond are measured, or come from SPIN_PER_US: agents that are compared need the same number.
"""

import ctypes
import os
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.fake.client import Driver

PER_US_ENV = "SPIN_PER_US"
NAME = "k_1us_per_arg"  # its first parameter: microseconds, once calibrated
THREADS, BLOCKS_PER_MULTIPROCESSOR = (
    1024,
    2,
)  # 2,048 threads fill a multiprocessor (CUDA Programming Guide, compute capabilities)
MULTIPROCESSORS = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
GRAPH_NODES = 50
GUESS, CALIBRATION_US = 400, 2000  # iterations per microsecond before they are measured; time to measure them
PTX = f"""
.version 6.3
.target sm_75
.address_size 64
.visible .entry {NAME}(.param .u32 us, .param .u32 per_us, .param .u64 sink) {{
  .reg .u32 %count, %scale;
  .reg .u64 %out;
  .reg .f32 %x;
  .reg .pred %more, %odd;
  ld.param.u32 %count, [us];
  ld.param.u32 %scale, [per_us];
  ld.param.u64 %out, [sink];
  mul.lo.u32 %count, %count, %scale;
  mov.f32 %x, 0f3F000000;
AGAIN:
  fma.rn.f32 %x, %x, %x, 0f3E800000;
  sub.u32 %count, %count, 1;
  setp.gt.s32 %more, %count, 0;
  @%more bra AGAIN;
  setp.eq.f32 %odd, %x, 0fC0000000;
  @%odd st.global.f32 [%out], %x;
  ret;
}}
"""  # the last store never happens, and keeps the compiler from dropping the loop


class Spinner:
    """The first device with a context, a stream and the kernel, calibrated."""

    def __init__(self, calibrate: bool = True) -> None:
        self.driver = Driver("libcuda.so.1")
        self.context = self.driver.start()
        self.function = self.load()
        self.stream = self.driver.out("cuStreamCreate", 1)
        count = ctypes.c_int()
        self.driver.cuDeviceGetAttribute(ctypes.byref(count), MULTIPROCESSORS, 0)
        self._grid = count.value * BLOCKS_PER_MULTIPROCESSOR
        self._scale, self._sink = ctypes.c_uint32(GUESS), ctypes.c_uint64(self.driver.out("cuMemAlloc_v2", 4))
        if known := os.environ.get(PER_US_ENV):
            self._scale.value = int(known)
        elif calibrate:
            self.elapsed_us(CALIBRATION_US)  # loads it
            took = self.elapsed_us(CALIBRATION_US)
            self._scale.value = max(1, round(GUESS * CALIBRATION_US / max(took, 1)))

    @property
    def per_us(self) -> int:
        """The iterations of a microsecond."""
        return self._scale.value

    def load(self) -> int:
        return self.driver.out(
            "cuModuleGetFunction", self.driver.out("cuModuleLoadData", PTX.encode() + b"\0"), NAME.encode()
        )

    def elapsed_us(self, us: int) -> float:
        start = self.driver.record(self.stream)
        self.kernel(us)()
        end = self.driver.record(self.stream)
        self.driver.cuEventSynchronize(end)
        return self.driver.elapsed_ms(start, end) * 1000

    def kernel(self, us: int, function: int = 0) -> Callable[[], int]:
        """Return a function that launches so many microseconds of work and returns them."""
        number = ctypes.c_uint32(us)
        params = (ctypes.c_void_p * 3)(*map(ctypes.addressof, (number, self._scale, self._sink)))
        words = (function or self.function, self._grid, 1, 1, THREADS, 1, 1, 0, self.stream, params, None)

        def launch() -> int:
            self.driver.cuLaunchKernel(*words)
            return number.value

        return launch

    def graph(self) -> Callable[[], int]:
        one, graph = self.kernel(20), ctypes.c_uint64()
        self.driver.cuStreamBeginCapture_v2(self.stream, 0)
        for _ in range(GRAPH_NODES):
            one()
        self.driver.cuStreamEndCapture(self.stream, ctypes.byref(graph))
        executable = self.driver.out("cuGraphInstantiateWithFlags", graph, 0)

        def launch() -> int:
            self.driver.cuGraphLaunch(executable, self.stream)
            return 20 * GRAPH_NODES

        return launch

    def fill(self) -> Callable[[], int]:
        """Return a function that fills and copies 256 MiB within the device, and returns the MiB moved."""
        size = 256 << 20
        one, other = (self.driver.out("cuMemAlloc_v2", size) for _ in range(2))

        def move() -> int:
            self.driver.cuMemsetD8Async(one, 0, size, self.stream)
            self.driver.cuMemcpyDtoDAsync_v2(other, one, size, self.stream)
            return 512

        return move

    def wait(self) -> None:
        self.driver.cuStreamSynchronize(self.stream)

    def is_idle(self) -> bool:
        return self.driver.code("cuStreamQuery", self.stream) == 0

    def hold(self, size: int) -> None:
        """Allocate memory that stays allocated."""
        self.driver.cuMemsetD8_v2(self.driver.out("cuMemAlloc_v2", size), 1, size)
        self.driver.cuCtxSynchronize()

"""Kernels with a fixed run time, launched by the driver API alone: `k_20us` spins for 20 microseconds.

The driver compiles them from PTX. The fake driver knows these names without PTX, so the same code measures both.
"""

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.fake.client import Driver

NAMES = {"k_20us": 20_000, "k_250us": 250_000}
GRAPH_NODES = 50
HEADER = ".version 6.3\n.target sm_75\n.address_size 64\n"  # the oldest that CUDA 13 supports
KERNEL = """
.visible .entry {name}() {{
  .reg .u64 %begun, %now, %passed;
  .reg .pred %early;
  mov.u64 %begun, %globaltimer;
AGAIN_{name}:
  mov.u64 %now, %globaltimer;
  sub.u64 %passed, %now, %begun;
  setp.lt.u64 %early, %passed, {ns};
  @%early bra AGAIN_{name};
  ret;
}}
"""


def ptx() -> str:
    return HEADER + "".join(KERNEL.format(name=name, ns=ns) for name, ns in NAMES.items())


class Spinner:
    """The first device with a context, a stream and these kernels."""

    def __init__(self) -> None:
        self.driver = Driver("libcuda.so.1")
        self.context = self.driver.start()
        module = self.driver.out("cuModuleLoadData", ptx().encode() + b"\0")
        self._functions = {name: self.driver.out("cuModuleGetFunction", module, name.encode()) for name in NAMES}
        self.stream = self.driver.out("cuStreamCreate", 1)

    def kernel(self, name: str) -> Callable[[], None]:
        function, stream = self._functions[name], self.stream
        return lambda: self.driver.launch(function, stream)

    def graph(self) -> Callable[[], None]:
        one, graph = self.kernel("k_20us"), ctypes.c_uint64()
        self.driver.cuStreamBeginCapture_v2(self.stream, 0)
        for _ in range(GRAPH_NODES):
            one()
        self.driver.cuStreamEndCapture(self.stream, ctypes.byref(graph))
        executable = self.driver.out("cuGraphInstantiateWithFlags", graph, 0)
        return lambda: self.driver.cuGraphLaunch(executable, self.stream)

    def wait(self) -> None:
        self.driver.cuStreamSynchronize(self.stream)

    def is_idle(self) -> bool:
        return self.driver.code("cuStreamQuery", self.stream) == 0

    def hold(self, size: int) -> None:
        """Allocate memory that stays allocated."""
        self.driver.cuMemsetD8_v2(self.driver.out("cuMemAlloc_v2", size), 1, size)
        self.driver.cuCtxSynchronize()

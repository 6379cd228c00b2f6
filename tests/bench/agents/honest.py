"""A program of the zoo on a real driver: prints what it computed. `honest.py NAME`"""

import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.cuda_guard import zoo
from tests.fake.client import CudaError, Driver

NOT_FOUND = 500
UNITS_NS = {"us": 1_000, "ms": 1_000_000}
PTX = """
.version 6.3
.target sm_75
.address_size 64
.visible .entry {name}() {{
  .reg .u64 %begun, %now;
  .reg .pred %more;
  mov.u64 %begun, %globaltimer;
AGAIN:
  mov.u64 %now, %globaltimer;
  sub.u64 %now, %now, %begun;
  setp.lt.u64 %more, %now, {ns};
  @%more bra AGAIN;
  ret;
}}
"""


class TimedDriver(Driver):
    """A driver whose kernels take the time in their name, as the fake driver's do: one thread watches the device's clock."""

    def kernel(self, name: str) -> int:
        parts = re.fullmatch(r"k_(\d+)(us|ms)", name)
        if parts is None:
            raise CudaError("cuModuleGetFunction", NOT_FOUND)
        text = PTX.format(name=name, ns=int(parts[1]) * UNITS_NS[parts[2]])
        return self.out("cuModuleGetFunction", self.out("cuModuleLoadData", text.encode() + b"\0"), name.encode())


if __name__ == "__main__":
    program = next(program for program in zoo.PROGRAMS if program.__name__ == sys.argv[1])
    print(json.dumps(program(TimedDriver("libcuda.so.1"))))

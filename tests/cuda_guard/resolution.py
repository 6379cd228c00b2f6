"""What `cuGetProcAddress` should give out: for tests by the double, and for the first look at a real driver. Without pytest."""

import re
from pathlib import Path
from typing import Any

from cuda_guard.build import NATIVE
from tests.fake.build import exports, typedefs
from tests.fake.client import CudaError, Driver

HOOKED = set(re.findall(r"^(?:HOOK|GATE|DENY)\((\w+)", (NATIVE / "hooks.def").read_text(), re.MULTILINE))


def pairs() -> set[tuple[str, int]]:
    """Every form of every call that cuda.h knows."""
    return {(name, version) for name, version, _ in typedefs()}


def misresolved(driver: Driver, behind: Path) -> list[tuple[str, int, int]]:
    """The queries whose answer is not what it should be, or whose status is not the driver's."""
    real = Driver(behind)

    def ask(one: Driver, *query: Any) -> tuple[int, int | None]:
        try:
            return one.address(*query)
        except CudaError as error:  # as drivers before CUDA 12 say that there is none
            return error.code, None

    by_address = {real.export(name): name for name in exports() if hasattr(real.library, name)}  # one of its age
    wrong = []
    for name, version, flags in ((*pair, flags) for pair in sorted(pairs()) for flags in (0, 1, 2)):
        status, address = ask(real, name, version, flags)
        symbol = by_address.get(address)
        hooked = driver.export(symbol) if symbol in HOOKED else address
        if ask(driver, name, version, flags) != (status, hooked) or (address and not symbol):
            wrong.append((name, version, flags))
    return wrong

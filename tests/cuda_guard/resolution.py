"""Expected results of `cuGetProcAddress`, for tests with the fake and for a real driver. Without pytest."""

import re
from pathlib import Path
from typing import Any

from cuda_guard.build import NATIVE
from tests.fake.build import exports, typedefs
from tests.fake.client import CudaError, Driver

HOOKED = set(re.findall(r"^(?:HOOK|COPY|PAUSE|DENY)\((\w+)", (NATIVE / "hooks.def").read_text(), re.MULTILINE))


def pairs() -> set[tuple[str, int]]:
    """Return every variant of every function in cuda.h."""
    return {(name, version) for name, version, _ in typedefs()}


def misresolved(driver: Driver, behind: Path) -> list[tuple[str, int, int]]:
    """Return the queries with a wrong answer or another status than the driver's."""
    real = Driver(behind)

    def ask(one: Driver, *query: Any) -> tuple[int, int | None]:
        try:
            return one.address(*query)
        except CudaError as error:  # drivers before CUDA 12 report a missing function so
            return error.code, None

    by_address = {
        real.export(name): name for name in exports() if hasattr(real.library, name)
    }  # those this driver exports
    wrong = []
    for name, version, flags in ((*pair, flags) for pair in sorted(pairs()) for flags in (0, 1, 2)):
        status, address = ask(real, name, version, flags)
        symbol = by_address.get(address)
        hooked = driver.export(symbol) if symbol in HOOKED else address
        if ask(driver, name, version, flags) != (status, hooked) or (address and not symbol):
            wrong.append((name, version, flags))
    return wrong

"""Seeds of the simulator: `make test` plays the first few, `make test-slow` the others."""

from typing import Any

import pytest


def seeds(few: int, count: int) -> list[Any]:
    """Return the parameters 0 to `count`; those after the first few are marked `slow`."""
    return [seed if seed < few else pytest.param(seed, marks=pytest.mark.slow) for seed in range(count)]

"""Memory for chunks is used again and again, and not given back to the kernel between two of them.

Otherwise glibc maps and unmaps each buffer of some MiB, and the kernel's zeroed pages cost more than all that is done with them
(own measurement, saving 573 MB: 100,000 page faults and 1.2 s of the kernel's time without this, 5,000 and 0.3 s with it; the
peak of memory is the same).
"""

import ctypes
from contextlib import suppress

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # mallopt(3)
MAPPED_FROM_BYTES, KEPT_BYTES = 16 << 20, 64 << 20


def room(length: int) -> memoryview:
    """Memory of so many bytes, with whatever is in it: it is about to be written over."""
    import numpy as np

    return np.empty(length, np.uint8).data


def keep_memory() -> None:
    """For this process; does nothing where malloc is not glibc's."""
    with suppress(OSError, AttributeError):
        malloc = ctypes.CDLL(None)
        malloc.mallopt(M_MMAP_THRESHOLD, MAPPED_FROM_BYTES)
        malloc.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)

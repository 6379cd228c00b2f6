"""Named steps at which a test can end the process as a power cut would: SIGKILL, nothing flushed, nothing cleaned.

`MESH_FAILPOINT=name` or `name:N` (at the N-th passing). Costs one comparison when unset.
"""

import os
import signal

_wanted, _, _count = os.environ.get("MESH_FAILPOINT", "").partition(":")
_left = int(_count) if _count.isdigit() else 1

NAMES = (
    "pack-write",
    "pack-before-fsync",
    "pack-before-rename",
    "pack-after-rename",
    "manifest-before-fsync",
    "manifest-before-rename",
    "manifest-after-rename",
    "fence-before-rename",
    "restore-before-rename",
    "collect-before-unlink",
    "collect-after-unlink",
)


def failpoint(name: str) -> None:
    global _left  # noqa: PLW0603 - the one mutable thing here is the countdown
    if name == _wanted:
        _left -= 1
        if _left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

"""Failpoints: named steps at which a test ends the process as a power failure would (SIGKILL, no flush, no cleanup).

`MESH_FAILPOINT=name`, or `name:N` for the N-th time the step is reached. Costs one comparison when unset.
"""

import os
import signal

_wanted, _, _count = os.environ.get("MESH_FAILPOINT", "").partition(":")
_remaining = int(_count) if _count.isdigit() else 1

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
    global _remaining  # noqa: PLW0603 - the countdown is this module's only state
    if name == _wanted:
        _remaining -= 1
        if _remaining == 0:
            os.kill(os.getpid(), signal.SIGKILL)

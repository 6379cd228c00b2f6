"""CLOCK_BOOTTIME: the time, and an alarm as a file descriptor.

The alarm fires at once after the machine has slept, where `sleep` and the timeout of `poll` would count on. Standard library
only: the processes that enforce leases use it.
"""

import contextlib
import ctypes
import math
import os
import time

TFD_NONBLOCK, TFD_TIMER_ABSTIME = 0o4000, 1

_libc = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Setting(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class Alarm:
    """A timer whose descriptor is readable from the moment that was set; `math.inf` is never."""

    def __init__(self) -> None:
        self._fd = _libc.timerfd_create(time.CLOCK_BOOTTIME, TFD_NONBLOCK)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "no timer on CLOCK_BOOTTIME")

    def fileno(self) -> int:
        return int(self._fd)

    def set(self, boot_s: float) -> None:
        setting = _Setting()
        if math.isfinite(boot_s):
            nanoseconds = max(1, int(boot_s * 1e9))  # zero would disarm it
            setting.value = _Timespec(*divmod(nanoseconds, 1_000_000_000))
        if _libc.timerfd_settime(self._fd, TFD_TIMER_ABSTIME, ctypes.byref(setting), None) != 0:
            raise OSError(ctypes.get_errno(), "cannot set a timer")

    def clear(self) -> None:
        """Acknowledge that it has fired."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._fd, 8)


def boot_s() -> float:
    """Return the seconds since boot, sleep included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)

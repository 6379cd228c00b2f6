"""Host library of the daemon: a thread that assigns shares and turns, and ordered writes to the shared pages."""

import atexit
import ctypes
from pathlib import Path

from cuda_guard.page import DEVICES, NO_LIMIT, Pages, Quota, ppm

_pointer, _u32, _u64, _i64 = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int64
_int, _bool = ctypes.c_int, ctypes.c_bool

PROTOTYPES: dict[str, tuple[object, list[object]]] = {
    "host_start": (_pointer, []),
    "host_stop": (None, [_pointer]),
    "host_join": (_bool, [_pointer, _u32, _pointer, _pointer, _int, _u32, _u32, _u32, _u64, _u64]),
    "host_leave": (None, [_pointer, _pointer]),
    "host_size": (None, [_pointer, _u32, _u64, _u64]),
    "host_away": (_bool, [_pointer, _u32, _pointer, _bool]),
    "host_claim": (_bool, [_pointer, _pointer, _int, _u32]),
    "host_forget": (None, [_pointer, _pointer]),
    "host_correct": (_bool, [_pointer, _u32, _i64]),
    "host_allowed": (_i64, [_pointer, _u32, _i64]),
    "host_wait": (_i64, [_pointer, _pointer, _u32, _i64]),
    "host_spend": (None, [_pointer, _pointer, _u32, _i64, _i64]),
    "policy_set_gate": (None, [_pointer, _bool]),
    "policy_set_rate": (None, [_pointer, _u32, _u32, _i64, _i64]),
    "policy_set_turn": (None, [_pointer, _u32, _u32]),
    "ledger_claim": (_int, [_pointer, _int, _u32]),
    "ledger_claim_slot": (_bool, [_pointer, _int, _u32, _u32]),
    "ledger_change": (_bool, [_pointer, _u32, _u32, _i64, _u64]),
    "ledger_used": (_u64, [_pointer, _u32]),
    "ledger_sweep": (_int, [_pointer, _int, _int]),
    "ledger_owner": (_u32, [_int, _u32]),
    "host_timeline": (_i64, [_pointer, _u32, _i64, _i64]),
    "arbiter_step": (_i64, [_pointer, _i64]),
    "lend_memory": (_bool, [_pointer]),
    "lend_away": (_bool, [_pointer, _pointer, _bool]),
}


def load(path: Path) -> ctypes.CDLL:
    """Load the library and declare its functions. OSError if it cannot be loaded."""
    library = ctypes.CDLL(str(path))
    for name, (result, arguments) in PROTOTYPES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


class Host:
    """Arbitrates the devices that jobs share on this machine. `device` is the daemon's number of one, below 16."""

    def __init__(self, path: Path) -> None:
        self._library = load(path)
        self._host = self._library.host_start()
        if not self._host:
            raise OSError("the arbiter thread of the guard could not be started")
        atexit.register(self.close)  # before the interpreter unmaps the pages that the thread reads

    def join(self, pages: Pages, place: int, device: int, quota: Quota) -> None:
        """Give the job this quota of the device, or change it.

        A new job gets its memory once that is free; a job that has more than its quota keeps it. Call `leave` before the pages
        are closed.
        """
        if not 0 <= device < DEVICES:
            raise ValueError(f"no device {device}")
        policy, job = _address(pages.policy), _address(pages.job)
        memory = NO_LIMIT if quota.memory is None else quota.memory
        most = memory if quota.memory_limit is None else quota.memory_limit
        shares = ppm(quota.share), ppm(quota.limit)
        if not self._library.host_join(self._host, device, policy, job, pages.job_file, place, *shares, memory, most):
            raise OSError(f"too many jobs share device {device}")

    def size(self, device: int, memory: int, foreign: int = 0) -> None:
        """Set the size of the device in bytes, and the bytes used outside of jobs, which are not lendable."""
        self._library.host_size(self._host, device, memory, foreign)

    def away(self, pages: Pages, device: int, away: bool) -> bool:
        """Record that the job's device memory is on the host (`away`), or is to come back; False if there is no space for it."""
        return bool(self._library.host_away(self._host, device, _address(pages.policy), away))

    def leave(self, pages: Pages) -> None:
        """Remove the job from all devices; call this before its pages are closed."""
        self._library.host_leave(self._host, _address(pages.policy))
        self._library.host_forget(_address(pages.policy), _address(pages.job))

    def set_gate(self, pages: Pages, closed: bool) -> None:
        """Close or open the job's gate; no launch starts while it is closed."""
        self._library.policy_set_gate(_address(pages.policy), closed)

    def claim(self, pages: Pages, pid: int) -> bool:
        """Claim the daemon's slot in the job's page; False if another daemon has it."""
        policy, job = _address(pages.policy), _address(pages.job)
        return bool(self._library.host_claim(policy, job, pages.job_file, pid))

    def set_overhead(self, pages: Pages, place: int, units: int) -> None:
        """Charge the job `units` in addition to what its processes charge themselves."""
        self._library.host_correct(_address(pages.job), place, units)

    def owner(self, pages: Pages, slot: int) -> int:
        """Return the pid, in this process's namespace, of the job's process in a slot; 0 if it is gone."""
        return int(self._library.ledger_owner(pages.job_file, slot))

    def close(self) -> None:
        atexit.unregister(self.close)
        if self._host:
            self._library.host_stop(self._host)
        self._host = None


def _address(page: ctypes.Structure) -> int:
    return ctypes.addressof(page)

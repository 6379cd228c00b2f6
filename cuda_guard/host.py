"""The daemon's native half: one thread that gives out shares and turns, and changes to pages in the order their readers need."""

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
    "host_trim": (None, [_pointer, _u32, _pointer, _u32]),
    "host_size": (None, [_pointer, _u32, _u64, _u64]),
    "host_away": (_bool, [_pointer, _u32, _pointer, _bool]),
    "host_tune": (None, [_pointer, _u32, _u32, _i64]),
    "host_claim": (_bool, [_pointer, _int, _u32]),
    "host_forget": (None, [_pointer]),
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
    "cover_add": (_i64, [_pointer, _i64, _i64]),
    "arbiter_step": (_i64, [_pointer, _i64]),
    "lend_memory": (_bool, [_pointer]),
    "lend_away": (_bool, [_pointer, _pointer, _bool]),
}


def load(path: Path) -> ctypes.CDLL:
    """The library with its functions' prototypes. OSError if it cannot be loaded."""
    library = ctypes.CDLL(str(path))
    for name, (result, arguments) in PROTOTYPES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


class Host:
    """Looks after the devices that jobs share on this machine. `device` is the daemon's own number of one, below 16."""

    def __init__(self, path: Path) -> None:
        self._library = load(path)
        self._host = self._library.host_start()
        if not self._host:
            raise OSError("no thread for the guard's shares and turns")
        atexit.register(self.close)  # before the interpreter unmaps the pages that the thread looks at

    def join(self, pages: Pages, place: int, device: int, quota: Quota) -> None:
        """From now on the job has this of the device. Also changes a job that has joined. One that comes is given its memory once
        there is room for it, one that has more than it may keeps that. The pages must not be closed before `leave`."""
        if not 0 <= device < DEVICES:
            raise ValueError(f"no device {device}")
        policy, job = _address(pages.policy), _address(pages.job)
        memory = NO_LIMIT if quota.memory is None else quota.memory
        most = memory if quota.memory_limit is None else quota.memory_limit
        shares = ppm(quota.share), ppm(quota.limit)
        if not self._library.host_join(self._host, device, policy, job, pages.job_file, place, *shares, memory, most):
            raise OSError(f"too many jobs share device {device}")

    def size(self, device: int, memory: int, foreign: int = 0) -> None:
        """How many bytes the device has, and how many of them are in the hands of who is no job: what of it can be lent."""
        self._library.host_size(self._host, device, memory, foreign)

    def away(self, pages: Pages, device: int, away: bool) -> bool:
        """What the job had on the device is on the host, or is to come back; whether there is room for that."""
        return bool(self._library.host_away(self._host, device, _address(pages.policy), away))

    def leave(self, pages: Pages) -> None:
        """Before its pages are closed."""
        self._library.host_leave(self._host, _address(pages.policy))
        self._library.host_forget(_address(pages.job))

    def trim(self, pages: Pages, device: int, factor: float) -> None:
        """Let the job's share of the device be `factor` times what was agreed, for what NVML sees and events do not."""
        self._library.host_trim(self._host, device, _address(pages.policy), round(factor * 1_000_000))

    def tune(self, device: int, cap: float, turn_ms: float) -> None:
        """How much of a device may be lent in all, in per cent, and how long a turn on it is."""
        self._library.host_tune(self._host, device, ppm(cap), round(turn_ms * 1e6))

    def set_gate(self, pages: Pages, closed: bool) -> None:
        """Nothing that the job has not launched yet starts while its gate is closed."""
        self._library.policy_set_gate(_address(pages.policy), closed)

    def claim(self, pages: Pages, pid: int) -> bool:
        """Take the daemon's own place in the job's page; false if another daemon has it."""
        return bool(self._library.host_claim(_address(pages.job), pages.job_file, pid))

    def correct(self, pages: Pages, place: int, units: int) -> None:
        """Charge the job so much beside what its processes charge themselves, from now on."""
        self._library.host_correct(_address(pages.job), place, units)

    def sweep(self, pages: Pages) -> int:
        """Give back what dead processes of the job held; how many there were."""
        return max(0, int(self._library.ledger_sweep(_address(pages.job), pages.job_file, 0)))

    def owner(self, pages: Pages, slot: int) -> int:
        """The pid, in this process's namespace, of the job's process in a slot; 0 if it is gone."""
        return int(self._library.ledger_owner(pages.job_file, slot))

    def close(self) -> None:
        atexit.unregister(self.close)
        if self._host:
            self._library.host_stop(self._host)
        self._host = None


def _address(page: ctypes.Structure) -> int:
    return ctypes.addressof(page)

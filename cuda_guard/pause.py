"""Pause: suspend running processes from their GPUs and resume them, with the driver's checkpoint calls. Memory moves to the host.

The driver's calls can take minutes, and sometimes never return. So a helper makes them: this module, run as a separate program
by a bare interpreter (standard library only). It prints one JSON object: `steps` with the duration of each call, and `error`,
empty on success, else with the `states` of the processes. States and calls: cuda.h of CUDA 13.0, `cuCheckpointProcess*`.

    RUNNING -- lock --> LOCKED -- checkpoint --> CHECKPOINTED
    RUNNING <- unlock - LOCKED <-- restore ----- CHECKPOINTED
"""

import contextlib
import ctypes
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import TypedDict

MIN_VERSION = 12080  # CUDA 12.8 (driver 570), the first with these calls
RUNNING, LOCKED, CHECKPOINTED = 0, 1, 2  # CUprocessState
NOT_INITIALIZED = 3
ERRORS = {
    1: "the driver knows no such process",
    2: "there is not enough memory",
    401: "the process is in the wrong state",
    600: "its work did not finish in time",
    801: "the driver or the device does not support it",
}
LOCK_S = 10.0  # for work in flight to finish; with a closed gate that is at most a window
# 290 GB on several H100 take ten minutes, 56 GB a minute and a half (NVIDIA/nvcf#1183).
TIMEOUT_S = 300.0
PROBE_S = 10.0


class Step(TypedDict):
    """A completed call of the driver."""

    pid: int
    step: str
    ms: float


class PauseError(RuntimeError):
    """Suspending or resuming failed; the message gives the reason.

    `states`: the state that each living process is in now; None if the driver did not say.
    """

    def __init__(self, text: str, states: dict[int, int] | None = None) -> None:
        super().__init__(text)
        self.states = states


class Pause:
    """Uses the driver library at this path. Calls block; a timeout ends the helper, not the caller."""

    def __init__(self, driver: Path) -> None:
        self._driver = driver

    def suspend(self, pids: tuple[int, ...], timeout: float = TIMEOUT_S) -> list[Step]:
        """Free everything these processes have on their devices, in at most `timeout` seconds.

        Each process blocks in its next call of the driver. All or none: PauseError leaves them running.
        """
        try:
            return self._ask("suspend", pids, timeout)
        except subprocess.TimeoutExpired as error:
            raise self._undone(pids, timeout) from error

    def resume(self, pids: tuple[int, ...], timeout: float = TIMEOUT_S) -> list[Step]:
        """Restore what `suspend` freed. PauseError leaves them suspended; after a timeout, those run that can."""
        try:
            return self._ask("resume", pids, timeout)
        except subprocess.TimeoutExpired as error:
            raise self._undone(pids, timeout) from error

    def _undone(self, pids: tuple[int, ...], timeout: float) -> PauseError:
        """Let the processes run after an order that took too long; return its error."""
        late = f"it took longer than {timeout:g} s"
        try:
            self._ask("release", pids, timeout)
        except subprocess.TimeoutExpired as error:
            return PauseError(f"{late}; and they could not be released: {error}")
        except PauseError as error:
            return PauseError(f"{late}; and they could not be released: {error}", error.states)
        return PauseError(f"{late}; they run again", dict.fromkeys(pids, RUNNING))

    def _ask(self, order: str, pids: tuple[int, ...], timeout: float) -> list[Step]:
        result = _run(self._driver, order, pids, timeout)
        if result["error"]:
            states = result.get("states")
            raise PauseError(result["error"], states and {int(pid): state for pid, state in states.items()})
        steps: list[Step] = result["steps"]
        return steps


def available(driver: Path) -> str | None:
    """Return the reason why this driver cannot pause processes; None if it can.

    Limits of a certain process (managed memory, memory shared between processes, MPS) show only when it is suspended.
    """
    try:
        result = _run(driver, "probe", (), PROBE_S)
    except subprocess.TimeoutExpired:
        return f"the driver did not answer within {PROBE_S:g} s"
    return result["error"] or None


def _run(driver: Path, order: str, pids: tuple[int, ...], timeout: float) -> dict:  # type: ignore[type-arg]
    command = [sys.executable, "-I", "-S", __file__, order, str(driver), *map(str, pids)]
    try:
        helper = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    except OSError as error:
        return {"steps": [], "error": f"the helper cannot be started: {error}"}
    try:
        answer, errors = helper.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        helper.kill()  # without waiting: it may be stuck in the driver
        raise
    try:
        return dict(json.loads(answer))
    except ValueError:
        last = errors.strip().splitlines()[-1:] or [f"status {helper.returncode}"]
        return {"steps": [], "error": f"the helper failed: {last[0]}"}


# --- in the helper


class CallError(Exception):
    """The driver refused a call."""


class Checkpoints:
    """The driver's checkpoint calls, timed."""

    def __init__(self, path: str) -> None:
        self.steps: list[Step] = []
        self._library = ctypes.CDLL(path)

    def probe(self) -> None:
        version = ctypes.c_int()
        self._library.cuDriverGetVersion(ctypes.byref(version))
        if version.value < MIN_VERSION:
            found = f"{version.value // 1000}.{version.value % 1000 // 10}"
            raise CallError(f"the driver supports CUDA {found}, and pausing needs 12.8 or newer")
        for name in ("GetState", "Lock", "Checkpoint", "Restore", "Unlock"):
            if not hasattr(self._library, f"cuCheckpointProcess{name}"):
                raise CallError(f"the driver has no cuCheckpointProcess{name}")

    def state(self, pid: int) -> int:
        value = ctypes.c_int(-1)
        self._call(pid, "GetState", ctypes.byref(value))
        return value.value

    def lock(self, pid: int) -> None:
        self._step(pid, "Lock", (ctypes.c_uint * 16)(int(LOCK_S * 1000)))  # CUcheckpointLockArgs: begins with timeoutMs

    def checkpoint(self, pid: int) -> None:
        self._step(pid, "Checkpoint", None)

    def restore(self, pid: int) -> None:
        self._library.cuInit(0)  # else the devices would need persistence mode (cuda.h)
        self._step(pid, "Restore", None)

    def unlock(self, pid: int) -> None:
        self._step(pid, "Unlock", None)

    def _step(self, pid: int, name: str, arguments: object) -> None:
        begun = time.perf_counter()
        self._call(pid, name, arguments)
        took_ms = (time.perf_counter() - begun) * 1e3
        self.steps.append({"pid": pid, "step": name.lower(), "ms": round(took_ms, 3)})

    def _call(self, pid: int, name: str, arguments: object) -> None:
        function = getattr(self._library, f"cuCheckpointProcess{name}")
        code = function(ctypes.c_int(pid), arguments)
        if code == NOT_INITIALIZED and self._library.cuInit(0) == 0:
            code = function(ctypes.c_int(pid), arguments)
        if code:
            raise CallError(f"{name.lower()} of process {pid}: {ERRORS.get(code, 'CUDA error')} ({code})")


def suspend(driver: Checkpoints, pids: list[int]) -> None:
    """Lock all processes, then checkpoint them: they may depend on each other."""
    try:
        for pid in pids:
            driver.lock(pid)
        for pid in pids:
            driver.checkpoint(pid)
    except CallError as error:
        raise CallError(f"{error}; {undo(driver, pids)}") from error


def resume(driver: Checkpoints, pids: list[int]) -> None:
    """Restore all processes, then unlock them."""
    restored = []
    try:
        for pid in pids:
            if driver.state(pid) == CHECKPOINTED:
                driver.restore(pid)
                restored.append(pid)
    except CallError as error:
        for pid in restored:  # there is not enough memory for all, so none is resumed
            driver.checkpoint(pid)
        raise CallError(f"{error}; they are still suspended") from error
    for pid in pids:
        if driver.state(pid) == LOCKED:
            driver.unlock(pid)


def release(driver: Checkpoints, pids: list[int]) -> None:
    """Let every process run that can, from any state."""
    failed = []
    for pid in pids:
        try:
            if driver.state(pid) == CHECKPOINTED:
                driver.restore(pid)
            if driver.state(pid) == LOCKED:
                driver.unlock(pid)
        except CallError as error:
            failed.append(str(error))
    if failed:
        raise CallError("; ".join(failed))


def undo(driver: Checkpoints, pids: list[int]) -> str:
    try:
        release(driver, pids)
    except CallError as error:
        return f"and they could not be released: {error}"
    return "they run again"


def main() -> None:
    order, path = sys.argv[1], sys.argv[2]
    pids = [int(word) for word in sys.argv[3:] if Path(f"/proc/{word}").exists()]
    steps, problem, states, driver = [], "", None, None
    try:
        driver = Checkpoints(path)
        steps = driver.steps
        driver.probe()
        if order != "probe":
            {"suspend": suspend, "resume": resume, "release": release}[order](driver, pids)
    except (CallError, OSError) as error:
        problem = str(error)
        with contextlib.suppress(CallError):
            states = driver and {pid: driver.state(pid) for pid in pids}
    print(json.dumps({"steps": steps, "error": problem, "states": states}))


if __name__ == "__main__":
    main()

"""Pausing: a helper suspends processes from their devices and resumes them, also when a call fails."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cuda_guard import pause
from cuda_guard.pause import Pause, PauseError, available
from tests.fake.child import Child, Talk
from tests.fake.client import Driver
from tests.fake.world import MIB, World

pytestmark = pytest.mark.cc

HELD = 400 * MIB  # including its context


def hold(driver: Driver, talk: Talk) -> str:
    """Launch a kernel per message, and report the number of launches."""
    driver.start()
    driver.out("cuMemAlloc_v2", 100 * MIB)
    kernel = driver.kernel("k_1ms")
    for count in range(1000):
        talk.say(count)
        if talk.hear() == "end":
            break
        driver.launch(kernel)
        driver.cuCtxSynchronize()
    return "ended"


@pytest.fixture
def pausing(world: World, monkeypatch: pytest.MonkeyPatch) -> Pause:
    for name, value in world.environment().items():
        monkeypatch.setenv(name, value)
    return Pause(world.fakes.cuda)


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    return lambda faults: monkeypatch.setenv("FAKE_FAIL", faults)


def runs(child: Child) -> bool:
    """Return True if the process can launch once more."""
    child.tell("go")
    return child.hear() > 0


def test_suspend_frees_memory_and_resume_restores_it(world: World, pausing: Pause) -> None:
    with Child(world, hold) as child:
        assert child.hear() == 0 and world.used() == HELD
        steps = pausing.suspend((child.pid,))
        assert [(step["pid"], step["step"]) for step in steps] == [(child.pid, "lock"), (child.pid, "checkpoint")]
        assert all(step["ms"] >= 0 for step in steps)
        assert world.used() == 0
        child.tell("go")
        assert child.silent(0.2), "the process blocks in its next call"
        assert [step["step"] for step in pausing.resume((child.pid,))] == ["restore", "unlock"]
        assert child.hear() == 1 and world.used() == HELD
        child.tell("end")
        assert child.result() == "ended"


@pytest.mark.parametrize(
    ("faults", "words"),
    [
        ("cuCheckpointProcessLock:2=401", "lock of process .*the process is in the wrong state"),
        ("cuCheckpointProcessLock:1=600", "its work did not finish in time"),
        ("cuCheckpointProcessCheckpoint:1=801", "checkpoint of process .*does not support it"),
        ("cuCheckpointProcessCheckpoint:2=999", r"CUDA error \(999\)"),
    ],
)
def test_processes_run_again_if_one_cannot_be_suspended(
    world: World, pausing: Pause, fail: Callable[[str], None], faults: str, words: str
) -> None:
    with Child(world, hold) as one, Child(world, hold) as other:
        one.hear()
        other.hear()
        fail(faults)
        with pytest.raises(PauseError, match=f"{words}.*; they run again"):
            pausing.suspend((one.pid, other.pid))
        assert world.used() == 2 * HELD and runs(one) and runs(other)
        fail("")
        pausing.suspend((one.pid, other.pid))
        assert world.used() == 0
        pausing.resume((one.pid, other.pid))
        assert runs(one) and runs(other)


def test_error_names_a_process_that_cannot_be_released(
    world: World, pausing: Pause, fail: Callable[[str], None]
) -> None:
    with Child(world, hold) as child:
        child.hear()
        fail("cuCheckpointProcessCheckpoint:1=2,cuCheckpointProcessUnlock:1=999")
        with pytest.raises(PauseError, match=r"not enough memory.*could not be released: unlock of process"):
            pausing.suspend((child.pid,))
        fail("")
        pausing.resume((child.pid,))
        assert runs(child), "resume unlocks a process that stayed locked"


def test_all_stay_suspended_without_enough_memory(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch, fail: Callable[[str], None]
) -> None:
    world = make_world(memory=1024 * MIB)
    monkeypatch.setenv("FAKE_GPU_WORLD", str(world.path))
    pausing = Pause(world.fakes.cuda)
    with Child(world, hold) as one, Child(world, hold) as other:
        one.hear()
        other.hear()
        pids = (one.pid, other.pid)
        pausing.suspend(pids)
        with Child(world, hold) as owner:
            owner.hear()
            with pytest.raises(PauseError, match=r"not enough memory.*they are still suspended") as refused:
                pausing.resume(pids)
            assert refused.value.states == dict.fromkeys(pids, pause.CHECKPOINTED)
            assert world.used() == HELD
        pausing.resume(pids)
        assert world.used() == 2 * HELD and runs(one) and runs(other)


def test_resume_ignores_a_process_that_is_gone(world: World, pausing: Pause) -> None:
    with Child(world, hold) as one, Child(world, hold) as other:
        one.hear()
        other.hear()
        pids = (one.pid, other.pid)
        pausing.suspend(pids)
        one.kill()
        pausing.resume(pids)
        assert runs(other)
    with pytest.raises(PauseError, match="knows no such process"):
        pausing.suspend((os.getpid(),))


def test_hanging_helper_is_killed_and_processes_run_again(
    world: World, pausing: Pause, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with Child(world, hold) as child:
        child.hear()
        slow = tmp_path / "slow.py"  # the first helper hangs after locking; later ones work
        text, head = Path(pause.__file__).read_text(), "def checkpoint(self, pid: int) -> None:\n"
        wait = f"time.sleep(0 if Path({str(tmp_path / 'quick')!r}).exists() else 60)"
        slow.write_text(text.replace(head, f"{head}        {wait}\n"))
        assert slow.read_text() != text
        monkeypatch.setattr(pause, "__file__", str(slow))
        helpers: list[subprocess.Popen[str]] = []

        def helper(*command: Any, **options: Any) -> subprocess.Popen[str]:
            helpers.append(real(*command, **options))
            return helpers[-1]

        real = subprocess.Popen
        monkeypatch.setattr(pause.subprocess, "Popen", helper)
        begun = time.monotonic()
        with pytest.raises(PauseError, match=r"longer than 1.5 s; they run again") as late:
            pausing.suspend((child.pid,), timeout=1.5)
        assert late.value.states == {child.pid: pause.RUNNING}
        assert time.monotonic() - begun < 10 and runs(child)
        assert helpers[0].wait(10) == -signal.SIGKILL
        (tmp_path / "quick").touch()
        pausing.suspend((child.pid,))
        assert world.used() == 0
        os.kill(child.pid, signal.SIGKILL)


class Calls:
    """Records the calls of the driver."""

    def __init__(self) -> None:
        self.made: list[tuple[str, int]] = []

    def lock(self, pid: int) -> None:
        self.made.append(("lock", pid))

    def checkpoint(self, pid: int) -> None:
        self.made.append(("checkpoint", pid))


def test_all_processes_are_locked_before_the_first_is_checkpointed() -> None:
    calls: Any = Calls()
    pause.suspend(calls, [1, 2])
    assert calls.made == [("lock", 1), ("lock", 2), ("checkpoint", 1), ("checkpoint", 2)]


def test_available_gives_the_reason_or_none(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    world = make_world()
    monkeypatch.setenv("FAKE_GPU_WORLD", str(world.path))
    assert available(world.fakes.cuda) is None
    old = make_world(driver_version=12040)
    monkeypatch.setenv("FAKE_GPU_WORLD", str(old.path))
    assert available(old.fakes.cuda) == "the driver supports CUDA 12.4, and pausing needs 12.8 or newer"
    with pytest.raises(PauseError, match=r"12\.4"):
        Pause(old.fakes.cuda).suspend((1,))
    assert "cannot open" in (available(tmp_path / "libcuda.so.1") or "")
    monkeypatch.setattr(pause, "__file__", str(tmp_path / "nothing.py"))
    assert (available(world.fakes.cuda) or "").startswith("the helper failed: ")

"""Processes are taken off their devices and brought back by a helper, whatever goes wrong on the way."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cuda_guard import pause
from cuda_guard.pause import Pause, PauseError, available
from tests.fake.child import Child, Talk
from tests.fake.client import Driver
from tests.fake.world import MIB, World

pytestmark = pytest.mark.cc

HELD = 400 * MIB  # with its context


def hold(driver: Driver, talk: Talk) -> str:
    """Counts its launches, one whenever it is told to."""
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


def goes_on(child: Child) -> bool:
    """It launches once more."""
    child.tell("go")
    return child.hear() > 0


def test_memory_is_freed_and_brought_back_and_the_process_goes_on(world: World, pausing: Pause) -> None:
    with Child(world, hold) as child:
        assert child.hear() == 0 and world.used() == HELD
        steps = pausing.suspend((child.pid,))
        assert [(step["pid"], step["step"]) for step in steps] == [(child.pid, "lock"), (child.pid, "checkpoint")]
        assert all(step["ms"] >= 0 for step in steps)
        assert world.used() == 0
        child.tell("go")
        assert child.silent(0.2), "it waits in its next call"
        assert [step["step"] for step in pausing.resume((child.pid,))] == ["restore", "unlock"]
        assert child.hear() == 1 and world.used() == HELD
        child.tell("end")
        assert child.result() == "ended"


@pytest.mark.parametrize(
    ("faults", "words"),
    [
        ("cuCheckpointProcessLock:2=401", "lock of process .*not in a state for that"),
        ("cuCheckpointProcessLock:1=600", "its work did not end in time"),
        ("cuCheckpointProcessCheckpoint:1=801", "checkpoint of process .*does not support it"),
        ("cuCheckpointProcessCheckpoint:2=999", r"CUDA error \(999\)"),
    ],
)
def test_what_cannot_be_suspended_as_a_whole_runs_again(
    world: World, pausing: Pause, fail: Callable[[str], None], faults: str, words: str
) -> None:
    with Child(world, hold) as one, Child(world, hold) as other:
        one.hear()
        other.hear()
        fail(faults)
        with pytest.raises(PauseError, match=f"{words}.*; they run again"):
            pausing.suspend((one.pid, other.pid))
        assert world.used() == 2 * HELD and goes_on(one) and goes_on(other)
        fail("")
        pausing.suspend((one.pid, other.pid))
        assert world.used() == 0
        pausing.resume((one.pid, other.pid))
        assert goes_on(one) and goes_on(other)


def test_what_cannot_be_let_go_is_told(world: World, pausing: Pause, fail: Callable[[str], None]) -> None:
    with Child(world, hold) as child:
        child.hear()
        fail("cuCheckpointProcessCheckpoint:1=2,cuCheckpointProcessUnlock:1=999")
        with pytest.raises(PauseError, match=r"not enough memory.*could not be let go: unlock of process"):
            pausing.suspend((child.pid,))
        fail("")
        pausing.resume((child.pid,))
        assert goes_on(child), "it was left locked, and that can be mended"


def test_without_room_all_stay_suspended(
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
            with pytest.raises(PauseError, match=r"not enough memory.*they are still suspended"):
                pausing.resume(pids)
            assert world.used() == HELD
        pausing.resume(pids)
        assert world.used() == 2 * HELD and goes_on(one) and goes_on(other)


def test_one_that_is_gone_is_no_obstacle(world: World, pausing: Pause) -> None:
    with Child(world, hold) as one, Child(world, hold) as other:
        one.hear()
        other.hear()
        pids = (one.pid, other.pid)
        pausing.suspend(pids)
        one.kill()
        pausing.resume(pids)
        assert goes_on(other)
    with pytest.raises(PauseError, match="knows no such process"):
        pausing.suspend((os.getpid(),))


def test_a_helper_that_hangs_is_given_up(
    world: World, pausing: Pause, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with Child(world, hold) as child:
        child.hear()
        slow = tmp_path / "slow.py"  # the first hangs once it has locked; later ones are as they should be
        text, head = Path(pause.__file__).read_text(), "def checkpoint(self, pid: int) -> None:\n"
        wait = f"time.sleep(0 if Path({str(tmp_path / 'quick')!r}).exists() else 60)"
        slow.write_text(text.replace(head, f"{head}        {wait}\n"))
        assert slow.read_text() != text
        monkeypatch.setattr(pause, "__file__", str(slow))
        begun = time.monotonic()
        with pytest.raises(PauseError, match=r"longer than 1.5 s; they run again"):
            pausing.suspend((child.pid,), timeout=1.5)
        assert time.monotonic() - begun < 10 and goes_on(child)
        (tmp_path / "quick").touch()
        pausing.suspend((child.pid,))
        assert world.used() == 0
        os.kill(child.pid, signal.SIGKILL)


def test_who_can_says_so(make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    world = make_world()
    monkeypatch.setenv("FAKE_GPU_WORLD", str(world.path))
    assert available(world.fakes.cuda) is None
    old = make_world(driver_version=12040)
    monkeypatch.setenv("FAKE_GPU_WORLD", str(old.path))
    assert available(old.fakes.cuda) == "the driver is of CUDA 12.4, and 12.8 can"
    with pytest.raises(PauseError, match=r"12\.4"):
        Pause(old.fakes.cuda).suspend((1,))
    assert "cannot open" in (available(tmp_path / "libcuda.so.1") or "")
    monkeypatch.setattr(pause, "__file__", str(tmp_path / "nothing.py"))
    assert (available(world.fakes.cuda) or "").startswith("the helper failed: ")

"""Work that several wait for, that ends with the first, of which few run at once, or that another interpreter does."""

import asyncio
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from mesh.util.few_at_once import few_at_once
from mesh.util.isolated import isolated
from mesh.util.race import race
from mesh.util.remembered import Remembered
from mesh.util.shared_task import SharedTask
from mesh.util.slow_calls import apart


async def test_no_more_than_the_bound_run_at_once() -> None:
    running, most = 0, 0

    async def work(number: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return -number

    assert await few_at_once(2, work, range(6)) == {number: -number for number in range(6)}
    assert most == 2


async def test_race_ends_with_the_first_and_its_error() -> None:
    undone = []

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(5):
                await asyncio.sleep(0)
            undone.append(True)

    async def ends() -> None:
        await asyncio.sleep(0)

    async def fails() -> None:
        await asyncio.sleep(0)
        raise OSError("the connection is gone")

    await race("two", waits(), ends())
    assert undone == [True], "the other one has ended too"
    with pytest.raises(OSError, match="is gone"):
        await race("two", waits(), fails())
    assert undone == [True, True]


async def begun(shared: SharedTask, report: Callable[[], object] | None = None) -> asyncio.Task[None]:
    waiter = asyncio.create_task(shared.wait(report, 0.001))
    await asyncio.sleep(0)
    return waiter


async def left(waiter: asyncio.Task[None]) -> None:
    waiter.cancel()
    await asyncio.gather(waiter, return_exceptions=True)
    await asyncio.sleep(0)


async def test_shared_task_ends_with_the_last_who_waits_unless_it_is_kept() -> None:
    for kept in (False, True):
        shared = SharedTask(asyncio.sleep(60), "shared")
        first, second = await begun(shared), await begun(shared)
        await left(first)
        assert not shared.task.cancelled() and not shared.task.cancelling()
        shared.kept = kept
        await left(second)
        assert bool(shared.task.cancelling()) is not kept
        await shared.end()
        assert shared.task.cancelled()


async def test_shared_task_tells_its_error_and_reports_until_it_ends() -> None:
    go, told = asyncio.Event(), list[int]()

    async def work() -> None:
        await go.wait()
        raise OSError("no room")

    shared = SharedTask(work(), "shared")
    waiter = await begun(shared, lambda: told.append(1))
    while len(told) < 3:
        await asyncio.sleep(0.001)
    go.set()
    with pytest.raises(OSError, match="no room"):
        await waiter
    cancelled = SharedTask(asyncio.sleep(60), "shared")
    waiter = await begun(cancelled)
    await cancelled.end()
    assert cancelled.task.done(), "end waits for it"
    await waiter


async def test_call_apart_returns_and_raises_and_holds_up_no_exit() -> None:
    assert await apart(lambda: threading.current_thread().daemon, "one") is True
    assert await apart(lambda: threading.current_thread().name, "its name") == "its name"

    class Worse(BaseException):
        """No Exception: its caller must not wait for ever."""

    def fails() -> None:
        raise Worse

    with pytest.raises(Worse):
        await asyncio.wait_for(apart(fails, "one"), 5)


def test_what_was_kept_last_is_remembered() -> None:
    remembered = Remembered[str, int](2)
    for key in ("a", "b"):
        remembered.keep(key, 1)
    assert list(remembered) == ["a", "b"]
    remembered.keep("a", 2)
    remembered.keep("c", 1)
    assert list(remembered.items()) == [("a", 2), ("c", 1)]


def test_helper_sees_neither_the_environment_of_its_starter_nor_packages(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('it is loaded')")
    told = "print(sys.flags.isolated, sys.flags.no_site, budget.__name__)"
    for packages in (False, True):
        done = subprocess.run(
            isolated("mesh.util", "budget", f"import json; {told}", packages),
            cwd=tmp_path,
            env={"PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout.split() == ["1", str(int(not packages)), "mesh.util.budget"], done.stderr
    assert isolated("mesh.util", "budget")[-1].endswith("budget.main()")

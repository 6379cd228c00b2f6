"""Work beside: kept, logged when it fails, ended with its owner."""

import asyncio
import gc
import logging
import weakref

import pytest

from mesh.util import task_set
from mesh.util.task_set import TaskSet, restarted

log = logging.getLogger("owner")


async def fails() -> None:
    raise OSError("no room")


async def test_failed_task_is_logged_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    told: list[BaseException] = []
    tasks = TaskSet(log, told.append)
    go = asyncio.Event()
    other = tasks.start(go.wait(), "other")
    with pytest.raises(OSError, match="no room"):
        await tasks.start(fails(), "put away")
    await asyncio.sleep(0)
    assert [str(error) for error in told] == ["no room"]
    assert "put away failed" in caplog.text and "no room" in caplog.text
    go.set()
    assert await other is True


async def test_task_that_has_ended_is_kept_no_longer() -> None:
    tasks = TaskSet(log)
    ended = weakref.ref(tasks.start(asyncio.sleep(0), "short"))
    for _ in range(3):
        await asyncio.sleep(0)
    gc.collect()
    assert ended() is None


async def test_close_cancels_tasks_without_failure(caplog: pytest.LogCaptureFixture) -> None:
    tasks = TaskSet(log)
    undone = []

    async def works() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            undone.append(True)

    task = tasks.start(works(), "works")
    await asyncio.sleep(0)
    await tasks.close()
    assert task.cancelled() and undone == [True] and not caplog.text


async def test_lasting_work_begins_again_unless_its_failure_is_fatal(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(task_set, "AGAIN_S", 0.0)
    ends: list[Exception] = [OSError("a full disk"), ValueError("nonsense"), LookupError("fatal")]

    async def work() -> None:
        raise ends.pop(0)

    with pytest.raises(LookupError):
        await restarted(work, "the work", log, LookupError)
    assert not ends and [record.exc_info[0] for record in caplog.records if record.exc_info] == [OSError, ValueError]

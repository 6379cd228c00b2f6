"""Work beside: kept, logged when it fails, ended with its owner."""

import asyncio
import logging

import pytest

from mesh.chores import Chores

log = logging.getLogger("owner")


async def fails() -> None:
    raise OSError("no room")


async def test_what_fails_is_logged_and_told_and_ends_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    told: list[BaseException] = []
    chores = Chores(log, told.append)
    go = asyncio.Event()
    other = chores.start(go.wait(), "other")
    with pytest.raises(OSError, match="no room"):
        await chores.start(fails(), "put away")
    await asyncio.sleep(0)
    assert [str(error) for error in told] == ["no room"]
    assert "put away failed" in caplog.text and "no room" in caplog.text
    go.set()
    assert await other is True


async def test_what_goes_on_is_ended_with_its_owner_and_that_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    chores = Chores(log)
    undone = []

    async def works() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            undone.append(True)

    task = chores.start(works(), "works")
    await asyncio.sleep(0)
    await chores.close()
    assert task.cancelled() and undone == [True] and not caplog.text

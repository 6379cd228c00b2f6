"""The thread of a data set's order uses the store until it ends, also if nobody waits for the order any more."""

import asyncio
import threading

import pytest

from mesh.data.library import _finished


async def test_order_that_is_cancelled_ends_after_its_thread() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def works() -> None:
        begun.set()
        assert go_on.wait(60)

    order = asyncio.create_task(_finished(asyncio.to_thread(works)))
    assert await asyncio.to_thread(begun.wait, 60)
    order.cancel()
    try:
        for _ in range(10):
            await asyncio.sleep(0)
        assert not order.done()
    finally:
        go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await order

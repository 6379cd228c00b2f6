"""Orders on data sets: a thread uses the store until it ends, also if nobody waits for it any more, and ends with the daemon."""

import asyncio
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckptstore import dataset_adder
from ckptstore.dataset_adder import Progress, Stopped
from membership.identity import Identity
from mesh.data.library import DataLibrary, _finished


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


async def test_daemon_that_stops_ends_an_add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, stopped = threading.Event(), list[Path]()

    class Endless:
        """Adds files for ten seconds, unless it is stopped."""

        def __init__(self, store: object, tell: Any, rehash: bool) -> None:
            self.tell = tell

        def add(self, path: Path) -> None:
            begun.set()
            for _ in range(1000):
                try:
                    self.tell(Progress(0, 0, 0))
                except Stopped:
                    stopped.append(path)
                    raise
                time.sleep(0.01)

    monkeypatch.setattr(dataset_adder, "Adder", Endless)
    nobody: Any = SimpleNamespace()
    library = DataLibrary(
        tmp_path / "data", None, 0.0, {}, Identity.generate(), nobody, nobody, nobody, print, lambda: None
    )
    await library.holdings.open()
    library.add("pictures", tmp_path, (), False, False)
    assert await asyncio.to_thread(begun.wait, 60)
    await library.close()
    assert stopped == [tmp_path]

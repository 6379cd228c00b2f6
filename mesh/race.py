"""Work that is over for all when the first is: both ways of a connection, something and its watch."""

import asyncio
from collections.abc import Coroutine
from typing import Any


async def race(name: str, *works: Coroutine[Any, Any, None]) -> None:
    """Run them side by side until one ends, and end the others; they have ended when this returns. What it raises is raised."""
    tasks = [asyncio.create_task(work, name=f"{name}, {number}") for number, work in enumerate(works, 1)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

"""Run coroutines until the first one ends, as for both directions of a connection."""

import asyncio
from collections.abc import Coroutine
from typing import Any


async def race(name: str, *works: Coroutine[Any, Any, None]) -> None:
    """Run coroutines until one ends, then cancel the others and wait for them. Raise what the first one raised."""
    tasks = [asyncio.create_task(work, name=f"{name}, {number}") for number, work in enumerate(works, 1)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

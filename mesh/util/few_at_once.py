"""Few at once: bounded concurrency."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


async def few_at_once(most: int, work: Callable[[K], Awaitable[V]], keys: Iterable[K]) -> dict[K, V]:
    """Return the result of `work` for each key; at most so many are worked on at the same time."""
    turns = asyncio.Semaphore(most)

    async def one(key: K) -> tuple[K, V]:
        async with turns:
            return key, await work(key)

    return dict(await asyncio.gather(*map(one, keys)))

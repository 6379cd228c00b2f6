"""Carries out a plan to fetch things from several holders at once (`ckptstore.fetch`): its requests, side by side."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from ckptstore.fetch import Cancel, Fetch, Fetched, Request
from membership.identity import NodeId, short_id


async def fetched(
    plan: Fetch,
    ask: Callable[[Request], Coroutine[Any, Any, Sequence[bytes]]],
    fault: Callable[[NodeId, BaseException], str | None],
) -> str:
    """What is wrong in the end, empty when everything has come. `ask` carries out one request: the ids of what has come. `fault`
    says in words how its holder has failed by what `ask` raised; None where that is nobody's fault: it is raised here."""
    clock = asyncio.get_running_loop().time
    running: dict[asyncio.Task[Sequence[bytes]], NodeId] = {}
    actions = plan.start(clock())
    try:
        while True:
            for action in actions:
                match action:
                    case Fetched(problem=problem):
                        return problem
                    case Cancel(source=source):
                        for task in [task for task, other in running.items() if other == source]:
                            del running[task]
                            task.cancel()
                    case Request(source=source):
                        name = f"fetch from {short_id(source)}"
                        running[asyncio.create_task(ask(action), name=name)] = source
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            actions = []
            for task in done:
                source, error = running.pop(task), task.exception()
                if error is None:
                    actions += plan.arrived(source, task.result(), clock())
                elif (words := fault(source, error)) is not None:
                    actions += plan.failed(source, words or type(error).__name__, clock())
                else:
                    raise error
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

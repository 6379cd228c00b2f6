"""Runs a plan to fetch items from several holders at once (`ckptstore.fetch`), with its requests in parallel."""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

from ckptstore.fetch import Ask, Cancel, Fetch, FetchEnded, Request
from ckptstore.receiver import Receiver
from membership.identity import NodeId, short_id
from mesh.rpc.client import PeerClient
from mesh.rpc.direct import DirectBody
from mesh.rpc.streams import Patience, fed, received

Pulled = tuple[list[bytes], asyncio.Task[int]]  # the chunks that arrived, and the task that makes them durable
Answer = Collection[bytes]  # the ids of what arrived, or of what a partial source has


class Swarm(NamedTuple):
    """The nodes that are fetching the same chunks now, and how to ask one of them which of some chunks it has."""

    nodes: Callable[[], Sequence[NodeId]]
    ask: Callable[[NodeId, Sequence[bytes]], Coroutine[Any, Any, Answer]]


async def _no_answer(source: NodeId, ids: Sequence[bytes]) -> Answer:
    return ()


NO_SWARM = Swarm(tuple, _no_answer)


async def pulled(peers: PeerClient, request: Request, path: str, body: bytes, receiver: Receiver) -> Pulled:
    """Carry out one request for chunks: feed what the holder answers to the receiver, which is aborted if that fails."""
    try:
        async with AsyncExitStack() as stack:
            response = await stack.enter_async_context(peers.stream(request.source, "POST", path, body))
            transport = response.connection.transport if response.connection is not None else None
            stack.enter_context(peers.wire.taking(transport))
            if response.content_length is None:  # up to version 0.1, a holder does not say it
                await received(response.content, receiver, Patience())
            else:
                receiver.expect(response.content_length)
                arriving = stack.enter_context(DirectBody(response, receiver.objects))
                await fed(arriving.read, receiver)
    except BaseException:
        await asyncio.to_thread(receiver.abort)
        raise
    finish = asyncio.create_task(asyncio.to_thread(receiver.keep), name="keep what came")
    return [identity for identity in request.ids if identity in receiver.arrived], finish


async def fetched_chunks(
    plan: Fetch,
    pull: Callable[[Request], Coroutine[Any, Any, Pulled]],
    fault: Callable[[NodeId, BaseException], str | None],
    tell: Callable[[int], None],
    swarm: Swarm = NO_SWARM,
) -> str:
    """Run a plan whose requests are `pulled`, as `fetched` does; what arrived is durable on return.

    `tell` is called with the bytes that have arrived so far.
    """
    total = plan.left_bytes
    finishing: list[asyncio.Task[int]] = []  # so that no source waits for this disk

    async def ask(request: Request) -> Answer:
        arrived, finish = await pull(request)
        finishing.append(finish)
        tell(total - plan.left_bytes)
        return arrived

    try:
        problem = await fetched(plan, ask, fault, swarm)
        if not problem:
            await asyncio.gather(*finishing)
        return problem
    finally:
        await asyncio.gather(*finishing, return_exceptions=True)


async def fetched(
    plan: Fetch,
    ask: Callable[[Request], Coroutine[Any, Any, Answer]],
    fault: Callable[[NodeId, BaseException], str | None],
    swarm: Swarm = NO_SWARM,
) -> str:
    """Run a plan; return what went wrong, empty if everything arrived.

    `ask` carries out one request and returns the ids of what arrived. `fault` turns an error of `ask` into a text about the
    holder's failure, or returns None if no holder is at fault; then the error is raised here.
    """
    clock = asyncio.get_running_loop().time
    running: dict[asyncio.Task[Answer], Request | Ask] = {}

    async def question(order: Ask) -> Answer:
        await asyncio.sleep(order.delay_s)
        return await swarm.ask(order.source, order.ids)

    actions = plan.join(swarm.nodes(), clock()) + plan.start(clock())
    try:
        while True:
            for action in actions:
                match action:
                    case FetchEnded(problem=problem):
                        return problem
                    case Cancel(source=source):
                        for task in [task for task, order in running.items() if order.source == source]:
                            del running[task]
                            task.cancel()
                    case Request() | Ask():
                        work = ask(action) if isinstance(action, Request) else question(action)
                        task = asyncio.create_task(work, name=f"fetch from {short_id(action.source)}")
                        running[task] = action
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            actions = []
            for task in done:
                order, error = running.pop(task), task.exception()
                if error is None:
                    happened = plan.arrived if isinstance(order, Request) else plan.told
                    actions += happened(order.source, task.result(), clock())
                elif (words := fault(order.source, error)) is not None:
                    actions += plan.failed(order.source, words or type(error).__name__, clock())
                else:
                    raise error
            actions += plan.join(swarm.nodes(), clock())
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

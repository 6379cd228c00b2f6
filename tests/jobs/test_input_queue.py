"""Bounds of the input queue. What the service does when it is full is in test_service.py."""

import asyncio

import pytest

from mesh.consensus.view import Instant
from mesh.jobs import input_queue
from mesh.jobs.input_queue import Input, InputQueue, Overloaded
from tests.consensus.worlds import B, C

AT = Instant(1.0, 1)


def nothing(at: Instant) -> list[object]:
    return []


IDLE: Input = nothing  # type: ignore[assignment]


async def test_half_of_the_queue_is_for_inputs_of_this_node() -> None:
    queue = InputQueue()
    for _ in range(4_999):
        queue.put_now(IDLE)
    assert queue.has_room_for_peers
    queue.put_now(IDLE)
    assert not queue.has_room_for_peers
    for _ in range(5_000):
        queue.put_now(IDLE)
    with pytest.raises(Overloaded):
        queue.put_now(IDLE)
    with pytest.raises(Overloaded):
        queue.put_of_peer(B, 512, IDLE)
    assert await queue.room_for(B), "what found no room does not count"


async def test_inputs_of_one_peer_wait_up_to_a_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_queue, "ROOM_S", 0.01)
    queue = InputQueue()
    queue.put_of_peer(B, 511, IDLE)
    assert await queue.room_for(B)
    queue.put_of_peer(B, 1, IDLE)
    assert not await queue.room_for(B) and await queue.room_for(C)
    first, second = await queue.batch()
    second(AT)
    assert await queue.room_for(B), "each input gives back what it costs"
    first(AT)
    assert not queue._of_peer, "nothing is kept of a peer of which nothing waits"


async def test_batch_has_up_to_256_inputs_or_what_the_worker_caused_itself() -> None:
    queue = InputQueue()
    for _ in range(600):
        queue.put_now(IDLE)
    async with asyncio.timeout(5):
        assert [len(await queue.batch()) for _ in range(3)] == [256, 256, 88]
    for _ in range(10_000):
        queue.put_now(IDLE)
    for _ in range(300):
        queue.put_own(IDLE)
    assert [len(await queue.batch()) for _ in range(2)] == [300, 256], "what it causes itself waits for no room"
    queue = InputQueue()
    queue._overflow.append(IDLE)
    async with asyncio.timeout(5):
        assert await queue.batch() == [IDLE], "nor for another input"

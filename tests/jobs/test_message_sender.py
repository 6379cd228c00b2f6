"""Message sender: messages arrive in order and in batches, and callers never wait."""

import asyncio
from typing import Literal

import msgspec
import pytest

from mesh.jobs import message_sender as message_sender_module
from mesh.jobs.message_sender import MessageSender, decode_batch, next_batch
from mesh.rpc.client import PeerError

PEER, OTHER = b"p" * 32, b"o" * 32


class Road:
    """A receiver of messages; a closed gate delays them."""

    def __init__(self) -> None:
        self.arrived: dict[bytes, list[bytes]] = {PEER: [], OTHER: []}
        self.calls = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.broken = False

    async def deliver(self, node: bytes, body: bytes) -> None:
        self.calls += 1
        if node == PEER:
            await self.gate.wait()
        if self.broken:
            raise PeerError("gone")
        self.arrived[node] += decode_batch(body)


async def test_messages_arrive_in_order_in_few_calls() -> None:
    road = Road()
    message_sender = MessageSender(road.deliver)
    for number in range(100):
        message_sender.post(PEER, msgspec.msgpack.encode(number))
    await message_sender.flush(5)
    assert [msgspec.msgpack.decode(data) for data in road.arrived[PEER]] == list(range(100))
    assert road.calls <= 5
    await message_sender.close()


async def test_message_that_comes_as_the_task_of_an_idle_peer_ends_is_delivered() -> None:
    road = Road()
    message_sender = MessageSender(road.deliver)

    class LateWake(asyncio.Event):
        """A wake that comes when the wait for it has just timed out."""

        late = False

        async def wait(self) -> Literal[True]:
            if not self.late and not message_sender._queues[PEER]:
                self.late = True
                message_sender.post(PEER, b"late")
                raise TimeoutError
            return await super().wait()

    message_sender._wake[PEER] = LateWake()
    message_sender.post(PEER, b"first")
    async with asyncio.timeout(60):
        while b"late" not in road.arrived[PEER]:
            await asyncio.sleep(0)
    assert road.arrived[PEER] == [b"first", b"late"]
    await message_sender.close()


async def test_nothing_stays_of_an_idle_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_sender_module, "IDLE_S", 0.0)
    road = Road()
    message_sender = MessageSender(road.deliver)
    for body in (b"first", b"again"):
        message_sender.post(PEER, body)
        async with asyncio.timeout(60):
            while message_sender._tasks:
                await asyncio.sleep(0)
        assert not (message_sender._queues or message_sender._wake or message_sender._empty)
    assert road.arrived[PEER] == [b"first", b"again"]


async def test_slow_peer_delays_no_other_and_loses_its_oldest_messages() -> None:
    road = Road()
    road.gate.clear()
    message_sender = MessageSender(road.deliver)
    for number in range(306):
        message_sender.post(PEER, msgspec.msgpack.encode(number))
    message_sender.post(OTHER, b"x")
    async with asyncio.timeout(60):
        while not road.arrived[OTHER]:
            await asyncio.sleep(0)
    assert message_sender.dropped == 50
    road.gate.set()
    await message_sender.flush(60)
    arrived = [msgspec.msgpack.decode(data) for data in road.arrived[PEER]]
    assert arrived[-100:] == list(range(206, 306)), "the newest have arrived"
    await message_sender.close()


async def test_messages_dropped_during_a_call_take_no_others_with_them() -> None:
    road = Road()
    road.gate.clear()
    message_sender = MessageSender(road.deliver)
    for number in range(256):
        message_sender.post(PEER, msgspec.msgpack.encode(number))
    async with asyncio.timeout(60):
        while not road.calls:
            await asyncio.sleep(0)
    for number in range(256, 306):
        message_sender.post(PEER, msgspec.msgpack.encode(number))
    road.gate.set()
    await message_sender.flush(60)
    arrived = [msgspec.msgpack.decode(data) for data in road.arrived[PEER]]
    assert message_sender.dropped == 18 and len(arrived) == 306 - message_sender.dropped
    await message_sender.close()


def test_call_carries_a_bounded_batch_of_at_least_one_message() -> None:
    large = bytes(4 << 20)
    assert next_batch([]) == []
    assert next_batch([large + b"x", b"a"]) == [large + b"x"], "one that is too long goes alone"
    assert next_batch([large[1:], b"a", b"b"]) == [large[1:], b"a"]
    assert next_batch([b"a"] * 33) == [b"a"] * 32


async def test_failed_call_is_not_repeated_and_later_messages_arrive() -> None:
    road = Road()
    message_sender = MessageSender(road.deliver)
    road.broken = True
    message_sender.post(PEER, b"lost")
    await message_sender.flush(5)
    road.broken = False
    message_sender.post(PEER, b"kept")
    await message_sender.flush(5)
    assert road.arrived[PEER] == [b"kept"]
    await message_sender.close()

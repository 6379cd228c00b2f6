"""Message sender: messages arrive in order and in batches, and callers never wait."""

import asyncio

import msgspec

from mesh.jobs.message_sender import BATCH_LIMIT, QUEUE_LIMIT, MessageSender, decode_batch
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
    assert road.calls <= 100 // BATCH_LIMIT + 2
    await message_sender.close()


async def test_slow_peer_delays_no_other_and_loses_its_oldest_messages() -> None:
    road = Road()
    road.gate.clear()
    message_sender = MessageSender(road.deliver)
    for number in range(QUEUE_LIMIT + 50):
        message_sender.post(PEER, msgspec.msgpack.encode(number))
    message_sender.post(OTHER, b"x")
    async with asyncio.timeout(60):
        while not road.arrived[OTHER]:
            await asyncio.sleep(0)
    assert message_sender.dropped == 50
    road.gate.set()
    await message_sender.flush(60)
    assert msgspec.msgpack.decode(road.arrived[PEER][-1]) == QUEUE_LIMIT + 49
    await message_sender.close()


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

"""Mail in order, in batches, and never waited for."""

import asyncio

import msgspec

from mesh.api.peer import PeerError
from mesh.jobs.postman import BATCH_LIMIT, QUEUE_LIMIT, Postman, open_mail

PEER, OTHER = b"p" * 32, b"o" * 32


class Road:
    """Where mail arrives; a closed gate holds it up."""

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
        self.arrived[node] += open_mail(body)


async def test_mail_arrives_in_order_in_few_calls() -> None:
    road = Road()
    postman = Postman(road.deliver)
    for number in range(100):
        postman.post(PEER, msgspec.msgpack.encode(number))
    await postman.flush(5)
    assert [msgspec.msgpack.decode(data) for data in road.arrived[PEER]] == list(range(100))
    assert road.calls <= 100 // BATCH_LIMIT + 2
    await postman.close()


async def test_one_slow_peer_holds_up_nobody_else_and_loses_its_oldest() -> None:
    road = Road()
    road.gate.clear()
    postman = Postman(road.deliver)
    for number in range(QUEUE_LIMIT + 50):
        postman.post(PEER, msgspec.msgpack.encode(number))
    postman.post(OTHER, b"x")
    async with asyncio.timeout(60):
        while not road.arrived[OTHER]:
            await asyncio.sleep(0)
    assert postman.dropped == 50
    road.gate.set()
    await postman.flush(60)
    assert msgspec.msgpack.decode(road.arrived[PEER][-1]) == QUEUE_LIMIT + 49
    await postman.close()


async def test_a_lost_call_is_not_sent_again_and_later_mail_arrives() -> None:
    road = Road()
    postman = Postman(road.deliver)
    road.broken = True
    postman.post(PEER, b"lost")
    await postman.flush(5)
    road.broken = False
    postman.post(PEER, b"kept")
    await postman.flush(5)
    assert road.arrived[PEER] == [b"kept"]
    await postman.close()

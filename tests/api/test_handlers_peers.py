"""Messages of peers: a batch of them comes in one call."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from ckptstore.messages import MAX_IDS, encode_ids
from mesh.api.handlers import peers
from mesh.api.handlers.peers import PeerHandlers
from mesh.consensus.messages import MessageError

ME = b"m" * 32
BUSY, UNKNOWN = b"start", b"of a newer version"


class Receiver:
    """A node that is too busy for `BUSY` and does not know `UNKNOWN`."""

    def __init__(self) -> None:
        self.taken: list[bytes] = []
        nothing: Any = None
        jobs: Any = SimpleNamespace(
            deliver=self._deliver,
            replicator=SimpleNamespace(refusals=SimpleNamespace(counters={"refused_malformed": 0})),
        )
        others: Any = [nothing] * 10
        self.handlers: Any = PeerHandlers(
            nothing, nothing, nothing, nothing, jobs, nothing, nothing, nothing, (), *others[:6]
        )
        self.handlers._admit = self._admit

    async def _admit(self, request: bytes) -> tuple[Any, bytes]:
        return SimpleNamespace(node_id=ME), request

    def _deliver(self, sender: bytes, message: bytes) -> bool:
        assert sender == ME
        if message == UNKNOWN:
            raise MessageError("no such message")
        if message == BUSY:
            return False
        self.taken.append(message)
        return True

    async def post(self, *messages: bytes) -> int:
        answer = await self.handlers._messages(msgspec.msgpack.encode(messages))
        return int(answer.status)


@pytest.mark.parametrize(("refused", "status"), [((BUSY,), 503), ((UNKNOWN,), 400), ((), 200)])
async def test_refused_message_takes_no_other_of_its_batch_with_it(refused: tuple[bytes, ...], status: int) -> None:
    receiver = Receiver()
    assert await receiver.post(b"one", *refused, b"two") == status and receiver.taken == [b"one", b"two"]
    assert receiver.handlers._counters["refused_malformed"] == refused.count(UNKNOWN)


def test_longest_answer_about_chunks_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[tuple[str, str], Any] = {}
    monkeypatch.setattr(
        peers, "bounded", lambda bounds, memory: found.update(bounds) or peers.web.normalize_path_middleware()
    )
    receiver = Receiver()
    data: Any = SimpleNamespace(routes=lambda admit: [])
    receiver.handlers._data = data
    receiver.handlers.application()
    longest = len(encode_ids([number.to_bytes(32) for number in range(MAX_IDS)]))
    assert found["POST", "/v1/chunks/missing"].answer >= longest

"""A hostile lender or witness answers with more than there can be, or with impossible numbers: bounded, and nothing stops."""

import itertools
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from aiohttp import web

from mesh.api.handlers import usage
from mesh.api.handlers.lookup import JobLookup
from mesh.api.handlers.usage import TOLD, Told, UsageHandlers
from mesh.checkpoints.replicator import Replicator
from mesh.cli.interactive import NOTE_LIMIT, _report_notes
from mesh.gpus.receipts import ReceiptError
from mesh.jobs.log_times import LOG_BYTES, LogPiece, decode_piece, encode_piece
from mesh.jobs.logs import COPIES, JobLogs, LogShipping
from mesh.journal import EVENTS_READ
from mesh.model.events import MAX_EVENT_BYTES
from mesh.rpc import client as client_module
from mesh.sdk import futures
from mesh.util.log_text import HELD_MOST, LogText
from tests.ckptstore.worlds import open_store, save, write_tree
from tests.rpc.nodes import Keeper, client_of, node_named

JOB, WITNESS, HOST = b"j" * 16, b"w" * 32, b"h" * 32
MIB = 1 << 20


def peak(act: Callable[[], Any]) -> int:
    """Return how much memory this took at most."""
    tracemalloc.start()
    try:
        act()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("answer", [b"9" * 30, b"-5", b"9" * 4000, b"9" * 10_000, b"", b"\xff", b"1_0"])
async def test_log_goes_on_to_be_sent_whatever_a_witness_answers(answer: bytes, tmp_path: Path) -> None:
    """An offset of 30 digits overflowed the next read, and ended the shipping of every log on the host."""
    log, sent = tmp_path / "000.txt", []

    async def call(node: bytes, method: str, path: str, body: bytes, timeout_s: float) -> bytes:
        sent.append(decode_piece(body))
        return answer if len(sent) == 1 else str(sent[-1].end).encode()

    peers: Any = SimpleNamespace(call=call)
    shipping = LogShipping(peers)
    for text in ("first\n", "second\n", "third\n"):
        with log.open("a") as file:
            file.write(text)
        await shipping.ship({(JOB, 0): (log, [WITNESS])})
    assert b"".join(piece.data for piece in sent).endswith(b"third\n") and sent[-1].end == log.stat().st_size


def test_copies_of_one_job_are_bounded_however_many_attempts_its_runner_claims(tmp_path: Path) -> None:
    logs = JobLogs(tmp_path)
    for number in range(3 * COPIES):
        logs.append_copy(JOB, number * 10**9, HOST, LogPiece(0, b"x", ((1, 1),)), b"ada")
    assert len([*tmp_path.rglob("*.copy")]) == len([*tmp_path.rglob("*.times")]) == COPIES
    assert logs.read_copy(JOB, (3 * COPIES - 1) * 10**9, HOST, 0) is not None


def test_piece_beyond_any_log_is_refused() -> None:
    decode_piece(encode_piece(LogPiece(LOG_BYTES - 2, b"x", ((1, LOG_BYTES - 1),))))
    with pytest.raises(ValueError, match="do not fit"):
        decode_piece(encode_piece(LogPiece(LOG_BYTES - 1, b"x", ((1, LOG_BYTES),))))


def test_end_of_an_endless_log_for_an_error_message_is_bounded() -> None:
    job: Any = SimpleNamespace(logs=lambda: itertools.chain(itertools.repeat("x" * 65_536, 500), ["the end"]))
    endless: Any = SimpleNamespace(logs=lambda: itertools.repeat("x" * 65_536))
    assert len(futures._tail(endless)) < futures.LOG_TAIL + 100
    tail = ""

    def read() -> None:
        nonlocal tail
        tail = futures._tail(job)

    assert peak(read) < 2 * MIB
    assert tail.endswith("the end") and len(tail) < futures.LOG_TAIL + 100


def test_unended_line_of_a_session_is_bounded(capsys: pytest.CaptureFixture[str]) -> None:
    def stream(path: str) -> Iterator[bytes]:
        yield from itertools.repeat(b"MARK" + b"y" * 65_532, 500)
        yield b"\nMARK the address\n"

    daemon: Any = SimpleNamespace(stream=stream, get=lambda path: {"job": {"outcome": {}}})
    assert peak(lambda: _report_notes(daemon, "job", "MARK")) < 4 * MIB
    shown = capsys.readouterr().err
    assert "the address" in shown and len(shown) < NOTE_LIMIT + 70_000


def test_unended_escape_sequence_is_not_held_back() -> None:
    text = LogText(colours=True)
    pieces = itertools.chain([b"\x1b]0;"], itertools.repeat(b"t" * 65_536, 100))
    assert peak(lambda: deque(map(text.feed, pieces), maxlen=0)) < 4 * MIB
    assert len(text.finish()) <= 2 * HELD_MOST


async def test_receipts_of_one_answer_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[bytes] = []

    def refuse(sealed: bytes, mesh_id: bytes) -> None:
        opened.append(sealed)
        if len(opened) == 2 * TOLD:
            raise ReceiptError("enough")

    async def call(*arguments: object, **more: object) -> bytes:
        return msgspec.msgpack.encode(Told(tuple(b"%d" % number for number in range(2 * TOLD)), True))

    monkeypatch.setattr(usage, "open_receipt", refuse)
    peers: Any = SimpleNamespace(call=call)
    nothing: Any = None
    handlers = UsageHandlers(b"mesh", nothing, nothing, peers, nothing, SimpleNamespace(me=b"me"))  # type: ignore[arg-type]
    assert len(await handlers._told_by(WITNESS, 0)) == TOLD == len(opened)


async def test_events_of_one_answer_are_bounded() -> None:
    """838,860 of five bytes fit into an answer, and took eight seconds of the loop that renews leases."""
    told = [[b"%d" % number for number in range(count)] for count in (EVENTS_READ, EVENTS_READ + 1)]
    told.append([bytes(MAX_EVENT_BYTES + 1)])
    answers = iter(map(msgspec.msgpack.encode, told))

    async def call(*arguments: object, **more: object) -> bytes:
        return next(answers)

    nothing: Any = None
    peers: Any = SimpleNamespace(call=call)
    lookup = JobLookup(b"me", nothing, nothing, nothing, nothing, peers)
    assert [await lookup._events_from(WITNESS, JOB) for _ in told] == [told[0], [], []]


async def test_answer_of_a_node_that_takes_chunks_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was kept whole: a node that answered a copy without end took all memory of the node that runs the job."""
    monkeypatch.setattr(client_module, "ANSWER_BYTES", 1 << 16)

    class Talker(Keeper):
        async def _chunks(self, request: web.Request) -> web.Response:
            await super()._chunks(request)
            return web.Response(body=bytes((1 << 16) + 1))

    talker = Talker(tmp_path / "theirs", identity=node_named("t"))
    peers, store = await client_of({talker.identity.node_id: await talker.serve()}), open_store(tmp_path / "ours")
    write_tree(tmp_path / "in", {"a": b"A"})
    try:
        copies = await Replicator(peers, store).replicate(
            save(store, tmp_path / "in").id, [talker.identity.node_id], [], 1
        )
    finally:
        await peers.close()
        await talker.close()
        store.close()
    assert not copies.holders and "with over 65536 bytes" in copies.short

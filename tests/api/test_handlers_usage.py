"""Receipts of other nodes are checked and bounded; nodes that do not answer are named."""

import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import msgspec
import pytest
from aiohttp import web

from membership.envelope import seal
from membership.identity import Identity
from mesh.api.handlers import peers
from mesh.api.handlers import usage as module
from mesh.api.handlers.usage import Told, UsageHandlers
from mesh.gpus.receipts import KIND, Receipt, encode_receipt
from mesh.rpc.client import PeerError

MESH = b"m" * 16
ME, HONEST, LIAR, SILENT = (Identity(letter * 32) for letter in (b"a", b"b", b"c", b"d"))
NICKS = {ME: "here", HONEST: "honest", LIAR: "liar", SILENT: "silent"}


def receipt(of: Identity, user: str, by: Identity | None = None, **fields: Any) -> bytes:
    now = time.time_ns() // 1_000_000
    told = {"job": "j", "attempt": 0, "node": of.node_id, "user": user, "from_unix_ms": now - 3_600_000}
    made = Receipt(**{**told, "until_unix_ms": now, "devices": (), "gpu_percent": 100, **fields})
    return seal(by or of, MESH, KIND, encode_receipt(made))


def handlers(answers: dict[Identity, bytes | Exception]) -> UsageHandlers:
    membership, jobs, accounts = Mock(), Mock(), Mock()
    accounts.history = AsyncMock(return_value=[receipt(ME, "bob")])
    membership.members.return_value = [
        SimpleNamespace(node_id=one.node_id, nick=nick, user=f"{nick}'s", present=True) for one, nick in NICKS.items()
    ]
    membership.credentials.user = "here's"
    jobs.mesh_view.adverts.return_value = [SimpleNamespace(node=ME.node_id, zone="lab1")]
    jobs.job_table.usage.return_value = {"bob": 360_000, "carl": 0}
    by_node = {identity.node_id: answer for identity, answer in answers.items()}

    async def call(node: bytes, *_: object, **__: object) -> bytes:
        answer = by_node[node]
        if isinstance(answer, Exception):
            raise answer
        return answer

    return UsageHandlers(MESH, membership, jobs, Mock(call=call), accounts, Mock(me=ME.node_id))


async def test_usage_counts_only_receipts_signed_by_the_lending_node(monkeypatch: pytest.MonkeyPatch) -> None:
    encode = msgspec.msgpack.encode
    now = time.time_ns() // 1_000_000
    lies = (
        receipt(HONEST, "bob", by=LIAR, attempt=1),  # the receipt of another node, signed by the liar
        receipt(HONEST, "bob", attempt=2),  # a genuine receipt of another node
        receipt(LIAR, "bob", until_unix_ms=now + 10**9),
        receipt(LIAR, "bob", from_unix_ms=now + 1, until_unix_ms=now),
        b"nonsense",
    )
    node = handlers(
        {HONEST: encode(Told((receipt(HONEST, "bob"),))), LIAR: encode(Told(lies)), SILENT: PeerError("gone", None)}
    )
    found = await node.usage(86_400, "user", here=False)
    rows = {row.name: row for row in found.rows}
    assert rows["bob"].borrowed_gpu_h == pytest.approx(2, abs=0.01) and rows["bob"].attempts == 2
    assert rows["bob"].decayed_gpu_h == 1 and rows["carl"].fair_points > rows["bob"].fair_points
    assert rows["honest's"].lent_gpu_h == pytest.approx(1, abs=0.01) and "liar's" not in rows
    assert (found.refused, found.silent, found.cut, found.asked) == (3, ["silent"], [], 3)
    assert [run.user for run in found.runs] == ["bob"], "only attempts on this node"

    zones = {row.name: row for row in (await node.usage(86_400, "zone", here=True)).rows}
    assert zones["lab1"].lent_gpu_h == pytest.approx(1, abs=0.01), "from this node's own receipts"

    monkeypatch.setattr(module, "OPENED", 6)
    many = Told(tuple(receipt(HONEST, "bob", attempt=number) for number in range(5)), whole=False)
    flood = handlers({HONEST: encode(many), LIAR: b"\xff" * 100, SILENT: encode([1, 2])})
    cut = await flood.usage(86_400, "node", here=False)
    assert cut.silent == ["liar", "silent"] and cut.cut == ["honest"]
    assert {row.name: row.attempts for row in cut.rows}["honest"] == 3


@pytest.mark.parametrize("text", ["²", "٣", "-1", "1.0", "", "1" * 16])
def test_peers_give_numbers_in_ascii_digits(text: str) -> None:
    assert peers._number("0123") == 123
    with pytest.raises(web.HTTPBadRequest):
        peers._number(text)

"""What others tell of hours lent is checked, bounded, and missed by name where it does not come."""

import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import msgspec
import pytest

from membership.envelope import seal
from membership.identity import Identity
from mesh.api import usage as module
from mesh.api.peer import PeerError
from mesh.api.usage import Told, usage
from mesh.provider.receipts import KIND, Receipt, encode_receipt

MESH = b"m" * 16
ME, HONEST, LIAR, SILENT = (Identity(letter * 32) for letter in (b"a", b"b", b"c", b"d"))
NICKS = {ME: "here", HONEST: "honest", LIAR: "liar", SILENT: "silent"}


def receipt(of: Identity, user: str, by: Identity | None = None, **fields: Any) -> bytes:
    now = time.time_ns() // 1_000_000
    told = {"job": "j", "attempt": 0, "node": of.node_id, "user": user, "from_unix_ms": now - 3_600_000}
    made = Receipt(**{**told, "until_unix_ms": now, "devices": (), "gpu_percent": 100, **fields})
    return seal(by or of, MESH, KIND, encode_receipt(made))


def mesh_that_tells(answers: dict[Identity, bytes | Exception]) -> Any:
    daemon = Mock(me=ME.node_id)
    daemon.trust.mesh_id = MESH
    daemon.accounts.history = AsyncMock(return_value=[receipt(ME, "bob")])
    daemon.membership.members.return_value = [
        SimpleNamespace(node_id=one.node_id, nick=nick, user=f"{nick}'s", present=True) for one, nick in NICKS.items()
    ]
    daemon.membership.standing.user = "here's"
    daemon.jobs.outlook.adverts.return_value = [SimpleNamespace(node=ME.node_id, zone="lab1")]
    daemon.jobs.board.usage.return_value = {"bob": 360_000, "carl": 0}
    by_node = {identity.node_id: answer for identity, answer in answers.items()}

    async def call(node: bytes, *_: object, **__: object) -> bytes:
        answer = by_node[node]
        if isinstance(answer, Exception):
            raise answer
        return answer

    daemon.peers.call = call
    return daemon


async def test_only_what_a_node_has_signed_of_itself_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    encode = msgspec.msgpack.encode
    now = time.time_ns() // 1_000_000
    lies = (
        receipt(HONEST, "bob", by=LIAR, attempt=1),  # another's, signed by itself
        receipt(HONEST, "bob", attempt=2),  # another's own, told by this one
        receipt(LIAR, "bob", until_unix_ms=now + 10**9),
        receipt(LIAR, "bob", from_unix_ms=now + 1, until_unix_ms=now),
        b"nonsense",
    )
    daemon = mesh_that_tells(
        {HONEST: encode(Told((receipt(HONEST, "bob"),))), LIAR: encode(Told(lies)), SILENT: PeerError("gone", None)}
    )
    found = await usage(daemon, 86_400, "user", here=False)
    rows = {row["name"]: row for row in found["rows"]}
    assert rows["bob"]["borrowed_gpu_h"] == pytest.approx(2, abs=0.01) and rows["bob"]["attempts"] == 2
    assert rows["bob"]["decayed_gpu_h"] == 1 and rows["carl"]["fair_points"] > rows["bob"]["fair_points"]
    assert rows["honest's"]["lent_gpu_h"] == pytest.approx(1, abs=0.01) and "liar's" not in rows
    assert (found["refused"], found["silent"], found["cut"], found["asked"]) == (3, ["silent"], [], 3)
    assert [run["user"] for run in found["runs"]] == ["bob"], "what ran here"

    zones = {row["name"]: row for row in (await usage(daemon, 86_400, "zone", here=True))["rows"]}
    assert zones["lab1"]["lent_gpu_h"] == pytest.approx(1, abs=0.01), "by this node's own word"

    monkeypatch.setattr(module, "OPENED", 6)
    many = Told(tuple(receipt(HONEST, "bob", attempt=number) for number in range(5)), whole=False)
    flood = mesh_that_tells({HONEST: encode(many), LIAR: b"\xff" * 100, SILENT: encode([1, 2])})
    cut = await usage(flood, 86_400, "node", here=False)
    assert cut["silent"] == ["liar", "silent"] and cut["cut"] == ["honest"]
    assert {row["name"]: row["attempts"] for row in cut["rows"]}["honest"] == 3

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
from mesh.gpus.receipts import KIND, DeviceUse, Receipt, encode_receipt
from mesh.model.spec import format_job
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


async def test_history_that_is_cut_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TOLD", 2)
    node = handlers({})
    for count, whole in ((2, True), (3, False)):
        history: Any = AsyncMock(return_value=[receipt(ME, "bob", attempt=number) for number in range(count)])
        monkeypatch.setattr(node._accounts, "history", history)
        told = msgspec.msgpack.decode(await node.told_to_peer(5), type=Told)
        assert (len(told.receipts), told.whole) == (2, whole) and history.call_args.args == (5, 3)
        found = await node.usage(86_400, "user", here=True)
        assert found.cut == ([] if whole else ["here"]) and found.asked == 0
        assert time.time() * 1000 - found.since_unix_ms == pytest.approx(86_400_000, abs=60_000)


async def test_absent_and_surplus_nodes_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = msgspec.msgpack.encode(Told(()))
    node = handlers({HONEST: empty, LIAR: empty, SILENT: empty})
    monkeypatch.setattr(module, "ASKED", 1)
    found = await node.usage(86_400, "user", here=False)
    assert found.silent == ["liar", "silent"] and found.asked == 3, "those beyond the bound are named"
    node._membership.members()[1].present = False
    found = await node.usage(86_400, "user", here=False)
    assert found.silent == ["silent"]


async def test_runs_are_listed_newest_first_with_what_was_lost() -> None:
    node, now = handlers({}), time.time_ns() // 1_000_000
    use = DeviceUse("GPU-a", 1_500_000_000, 0, 0, 3 << 20)
    runs = [
        receipt(ME, "bob", job="old", until_unix_ms=now - 60_000, lost_ms=2500),
        receipt(ME, "bob", job="new", devices=(use,), submitter=HONEST.node_id, reason="done"),
    ]
    history: Any = AsyncMock(return_value=runs)
    node._accounts.history = history  # type: ignore[method-assign]
    new, old = (await node.usage(86_400, "user", here=True)).runs
    assert (new.job, new.submitter, new.measured_gpu_s, new.end) == ("new", "honest", 1.5, "done")
    assert (old.job, old.submitter, old.measured_gpu_s, old.lost_s) == ("old", "", None, 2.5)


async def test_needs_of_a_job_are_those_of_its_own_receipts() -> None:
    job = b"j" * 16
    status = SimpleNamespace(job=job, created_unix_ms=5)
    status.attempts = [SimpleNamespace(node=one.node_id, ran_s=10.00049) for one in (HONEST, LIAR, HONEST, SILENT)]

    def peak(mib: float) -> tuple[DeviceUse, ...]:
        return (DeviceUse("GPU-a", 0, 0, 0, int(mib * 2**20)),)

    name = format_job(job)
    honest = (receipt(HONEST, "bob", job=name, devices=peak(7.1)), receipt(HONEST, "bob", devices=peak(99)))
    lies = (receipt(HONEST, "bob", job=name, devices=peak(50)), receipt(LIAR, "bob", job=name, devices=peak(2)))
    node = handlers(
        {
            HONEST: msgspec.msgpack.encode(Told(honest)),
            LIAR: msgspec.msgpack.encode(Told(lies)),
            SILENT: PeerError("gone", None),
        }
    )
    node._lookup.find_job = lambda text: status  # type: ignore[assignment,return-value,method-assign]
    needs = await node.needs("j")
    assert (needs.job, needs.receipts, needs.vram_mib, needs.ran_s) == (name, 2, 8, 40.002)
    status.attempts = []
    assert (await node.needs("j")).vram_mib is None

"""`mesh usage`: hours lent and borrowed, by this node's receipts and those that others tell."""

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from membership.identity import NodeId, format_id, short_id
from mesh.api.peer import PeerError
from mesh.provider.receipts import Receipt, ReceiptError, open_receipt
from mesh.provider.usage import Account, By, accounts, by_month, newest
from placement.queue import HALF_LIFE_S, fair_points, mean_of

if TYPE_CHECKING:
    from mesh.api import answers
    from mesh.daemon import Daemon

TOLD = 2000  # receipts of one node in one answer, about 1 MB; the newest; ours
OPENED = 100_000  # receipts in all: some ten seconds of checking signatures, in a thread; ours
ASKED = 256  # nodes; ours
AT_ONCE = 16
WITHIN_S = 5.0
PERCENT_S_OF_GPU_H = 360_000  # seconds times per cent of a GPU
RUNS_SHOWN = 200


class Told(msgspec.Struct, frozen=True):
    """Sealed receipts, newest first; `whole`: there are no more of that time."""

    receipts: tuple[bytes, ...]
    whole: bool = True


_told_decoder = msgspec.msgpack.Decoder(Told)


async def told_to_peer(daemon: "Daemon", since_ms: int) -> bytes:
    """What this node has lent since then, for others' books."""
    sealed = await daemon.accounts.history(since_ms, TOLD + 1)
    return msgspec.msgpack.encode(Told(tuple(sealed[:TOLD]), len(sealed) <= TOLD))


async def usage(daemon: "Daemon", since_s: float, by: By, here: bool) -> "answers.mesh.Usage":
    """`here`: by this node's own receipts alone, nobody is asked."""
    now_ms = time.time_ns() // 1_000_000
    since_ms = max(0, now_ms - round(since_s * 1000))
    own = await daemon.accounts.history(since_ms, TOLD + 1)
    books = [(daemon.me, Told(tuple(own[:TOLD]), len(own) <= TOLD))]
    silent: list[NodeId] = []
    if not here:
        answers, silent = await _ask_all(daemon, since_ms)
        books += answers
    most = min(TOLD, OPENED // len(books))
    receipts, refused = await asyncio.to_thread(_opened, books, most, daemon.trust.mesh_id)
    kept = newest(receipts, now_ms)
    nicks = _nicks(daemon)
    rows = _rows(daemon, kept, since_ms, by, nicks)
    runs = sorted((one for one in kept if one.node == daemon.me), key=lambda one: -one.until_unix_ms)
    return {
        "by": by,
        "since_unix_ms": since_ms,
        "rows": rows,
        "asked": len(books) - 1 + len(silent),
        "silent": [nicks.get(node, short_id(node)) for node in silent],
        "cut": [nicks.get(node, short_id(node)) for node, told in books if not told.whole or len(told.receipts) > most],
        "refused": refused,
        "half_life_s": HALF_LIFE_S,
        "runs": [_run(one, nicks) for one in runs[:RUNS_SHOWN]],
    }


async def _ask_all(daemon: "Daemon", since_ms: int) -> tuple[list[tuple[NodeId, Told]], list[NodeId]]:
    """What the nodes that are there have lent, and who did not answer."""
    turns = asyncio.Semaphore(AT_ONCE)

    async def ask(node: NodeId) -> tuple[NodeId, Told | None]:
        async with turns:
            try:
                body = await daemon.peers.call(node, "GET", f"/v1/usage?since={since_ms}", timeout_s=WITHIN_S)
                return node, _told_decoder.decode(body)
            except (PeerError, msgspec.MsgspecError, UnicodeDecodeError):
                return node, None

    there = [member.node_id for member in daemon.membership.members() if member.present and member.node_id != daemon.me]
    answers = await asyncio.gather(*(ask(node) for node in there[:ASKED]))
    silent = [node for node, told in answers if told is None] + there[ASKED:]
    return [(node, told) for node, told in answers if told is not None], silent


def _opened(books: list[tuple[NodeId, Told]], most: int, mesh_id: bytes) -> tuple[list[Receipt], int]:
    """The receipts that each node has told of itself, and how many were none of it."""
    receipts, refused = [], 0
    for teller, told in books:
        for sealed in told.receipts[:most]:
            try:
                receipt = open_receipt(sealed, mesh_id)
            except ReceiptError:
                refused += 1
                continue
            if receipt.node == teller:
                receipts.append(receipt)
            else:
                refused += 1
    return receipts, refused


def _rows(
    daemon: "Daemon", receipts: list[Receipt], since_ms: int, by: By, nicks: dict[NodeId, str]
) -> "list[answers.mesh.Account]":
    users = {member.node_id: member.user for member in daemon.membership.members()}
    zones = {advert.node: advert.zone for advert in daemon.jobs.outlook.adverts()}

    def nick(node: NodeId) -> str:
        return nicks.get(node) or (short_id(node) if node else "?")

    names: dict[str, tuple[Callable[[Receipt], str], Callable[[Receipt], str]]] = {
        "user": (lambda one: users.get(one.node) or nick(one.node), lambda one: one.user or "?"),
        "node": (lambda one: nick(one.node), lambda one: nick(one.submitter)),
        "zone": (lambda one: zones.get(one.node) or "-", lambda one: zones.get(one.submitter) or "-"),
    }
    if by == "month":
        found = by_month(receipts, since_ms, daemon.me, daemon.membership.standing.user)
    else:
        found = accounts(receipts, since_ms, *names[by])
    # What counts of each user's use in the queue, of the jobs that this node still knows, halved every half-life.
    had = daemon.jobs.board.usage(time.time()) if by == "user" else {}
    for user in had:
        found.setdefault(user, Account())
    mean = mean_of(had)
    rows = {name: _row(name, account) for name, account in sorted(found.items())}
    for user, used in had.items():
        rows[user]["decayed_gpu_h"] = round(used / PERCENT_S_OF_GPU_H, 6)
        rows[user]["fair_points"] = fair_points(used, mean)
    return list(rows.values())


def _row(name: str, account: Account) -> "answers.mesh.Account":
    return {
        "name": name,
        "lent_gpu_h": round(account.lent_gpu_h, 6),
        "lent_slot_h": round(account.lent_slot_h, 6),
        "borrowed_gpu_h": round(account.borrowed_gpu_h, 6),
        "borrowed_slot_h": round(account.borrowed_slot_h, 6),
        "own_gpu_h": round(account.own_gpu_h, 6),
        "own_slot_h": round(account.own_slot_h, 6),
        "measured_gpu_h": round(account.measured_gpu_h, 6),
        "lost_h": round(account.lost_h, 6),
        "attempts": account.attempts,
    }


def _run(receipt: Receipt, nicks: dict[NodeId, str]) -> "answers.mesh.Run":
    submitter = receipt.submitter
    return {
        "job": receipt.job,
        "name": receipt.name,
        "attempt": receipt.attempt,
        "user": receipt.user,
        "submitter": nicks.get(submitter, format_id(submitter)) if submitter else "",
        "engine": receipt.engine,
        "from_unix_ms": receipt.from_unix_ms,
        "until_unix_ms": receipt.until_unix_ms,
        "gpu_percent": receipt.gpu_percent,
        "measured_gpu_s": round(sum(use.gpu_ns for use in receipt.devices) / 1e9, 3) if receipt.devices else None,
        "end": receipt.reason,
        "lost_s": receipt.lost_ms / 1000,
    }


def _nicks(daemon: "Daemon") -> dict[NodeId, str]:
    return {member.node_id: member.nick for member in daemon.membership.members()}

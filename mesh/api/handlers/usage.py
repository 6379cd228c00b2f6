"""Hours lent and borrowed, by the signed receipts of this node and of the others that answer."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec

from membership.identity import NodeId, format_id, short_id
from membership.malformed import MALFORMED
from membership.node import MembershipNode
from mesh.api import schemas
from mesh.api.handlers.lookup import JobLookup, nick_in, nicks_of
from mesh.gpus.receipts import Receipt, ReceiptError, open_receipt
from mesh.jobs.service import JobService
from mesh.model.spec import format_job
from mesh.provider.accounts import Accounts
from mesh.provider.usage import Account, By, accounts, by_month, newest
from mesh.rpc.client import PeerClient, PeerError
from mesh.util.structs import copy_as
from placement.queue import HALF_LIFE_S, fair_points, mean_of

TOLD = 2000  # newest receipts of one node in one answer, about 1 MB (own choice)
OPENED = 100_000  # receipts in all: about ten seconds of checking signatures, in a thread (own choice)
ASKED = 256  # nodes (own choice)
MIB = 1 << 20
AT_ONCE = 16
WITHIN_S = 5.0
PERCENT_S_OF_GPU_H = 360_000  # seconds times per cent of a GPU
RUNS_SHOWN = 200
HOURS = (
    "lent_gpu_h",
    "lent_slot_h",
    "borrowed_gpu_h",
    "borrowed_slot_h",
    "own_gpu_h",
    "own_slot_h",
    "measured_gpu_h",
    "lost_h",
)


class Told(msgspec.Struct, frozen=True):
    """Sealed receipts, newest first; `whole`: there are no more of that time."""

    receipts: tuple[bytes, ...]
    whole: bool = True


_told_decoder = msgspec.msgpack.Decoder(Told)


class UsageHandlers:
    def __init__(
        self,
        mesh_id: bytes,
        membership: MembershipNode,
        jobs: JobService,
        peers: PeerClient,
        accounts: Accounts,
        lookup: JobLookup,
    ) -> None:
        self._me, self._mesh_id, self._membership = lookup.me, mesh_id, membership
        self._jobs, self._peers, self._accounts, self._lookup = jobs, peers, accounts, lookup

    async def told_to_peer(self, since_ms: int) -> bytes:
        """Return this node's receipts since then, encoded for another node."""
        sealed = await self._accounts.history(since_ms, TOLD + 1)
        return msgspec.msgpack.encode(Told(tuple(sealed[:TOLD]), len(sealed) <= TOLD))

    async def usage(self, since_s: float, by: By, here: bool) -> schemas.mesh.Usage:
        """Return hours lent and borrowed; `here`: by this node's own receipts, without asking others."""
        now_ms = time.time_ns() // 1_000_000
        since_ms = max(0, now_ms - round(since_s * 1000))
        own = await self._accounts.history(since_ms, TOLD + 1)
        books = [(self._me, Told(tuple(own[:TOLD]), len(own) <= TOLD))]
        silent: list[NodeId] = []
        if not here:
            answers, silent = await self._ask_all(since_ms)
            books += answers
        most = min(TOLD, OPENED // len(books))
        receipts, refused = await asyncio.to_thread(_opened, books, most, self._mesh_id)
        kept = newest(receipts, now_ms)
        nicks = nicks_of(self._membership)
        rows = self._rows(kept, since_ms, by, nicks)
        runs = sorted((one for one in kept if one.node == self._me), key=lambda one: -one.until_unix_ms)
        return schemas.mesh.Usage(
            by=by,
            since_unix_ms=since_ms,
            rows=rows,
            asked=len(books) - 1 + len(silent),
            silent=[nick_in(nicks, node) for node in silent],
            cut=[nick_in(nicks, node) for node, told in books if not told.whole or len(told.receipts) > most],
            refused=refused,
            half_life_s=HALF_LIFE_S,
            runs=[_run(one, nicks) for one in runs[:RUNS_SHOWN]],
        )

    async def _ask_all(self, since_ms: int) -> tuple[list[tuple[NodeId, Told]], list[NodeId]]:
        """Return the receipts of the present nodes, and the nodes that did not answer."""
        turns = asyncio.Semaphore(AT_ONCE)

        async def ask(node: NodeId) -> tuple[NodeId, Told | None]:
            async with turns:
                try:
                    body = await self._peers.call(node, "GET", f"/v1/usage?since={since_ms}", timeout_s=WITHIN_S)
                    return node, _told_decoder.decode(body)
                except (PeerError, *MALFORMED):
                    return node, None

        there = [
            member.node_id for member in self._membership.members() if member.present and member.node_id != self._me
        ]
        answers = await asyncio.gather(*(ask(node) for node in there[:ASKED]))
        silent = [node for node, book in answers if book is None] + there[ASKED:]
        return [(node, book) for node, book in answers if book is not None], silent

    def _rows(
        self, receipts: list[Receipt], since_ms: int, by: By, nicks: dict[NodeId, str]
    ) -> list[schemas.mesh.Account]:
        users = {member.node_id: member.user for member in self._membership.members()}
        zones = {advert.node: advert.zone for advert in self._jobs.mesh_view.adverts()}

        def nick(node: NodeId) -> str:
            return nicks.get(node) or (short_id(node) if node else "?")

        names: dict[str, tuple[Callable[[Receipt], str], Callable[[Receipt], str]]] = {
            "user": (lambda one: users.get(one.node) or nick(one.node), lambda one: one.user or "?"),
            "node": (lambda one: nick(one.node), lambda one: nick(one.submitter)),
            "zone": (lambda one: zones.get(one.node) or "-", lambda one: zones.get(one.submitter) or "-"),
        }
        if by == "month":
            found = by_month(receipts, since_ms, self._me, self._membership.credentials.user)
        else:
            found = accounts(receipts, since_ms, *names[by])
        # What counts of each user's use in the queue, of the jobs that this node still knows, halved every half-life.
        had = self._jobs.job_table.usage(time.time()) if by == "user" else {}
        for user in had:
            found.setdefault(user, Account())
        mean = mean_of(had)
        queue = {
            user: {"decayed_gpu_h": round(used / PERCENT_S_OF_GPU_H, 6), "fair_points": fair_points(used, mean)}
            for user, used in had.items()
        }
        return [_row(name, account, queue.get(name, {})) for name, account in sorted(found.items())]

    async def needs(self, text: str) -> schemas.jobs.Needs:
        """Return what a job has needed, by the receipts of the nodes that ran it: its peak GPU memory and running time."""
        status = self._lookup.find_job(text)
        job, since_ms = format_job(status.job), status.created_unix_ms
        receipts = [
            receipt
            for node in dict.fromkeys(attempt.node for attempt in status.attempts)
            for receipt in await self._told_by(node, since_ms)
            if receipt.job == job and receipt.node == node
        ]
        peaks = [use.peak for receipt in receipts for use in receipt.devices]
        return schemas.jobs.Needs(
            job=job,
            receipts=len(receipts),
            vram_mib=-(-max(peaks) // MIB) if peaks else None,
            ran_s=round(sum(attempt.ran_s for attempt in status.attempts), 3),
        )

    async def _told_by(self, node: bytes, since_ms: int) -> list[Receipt]:
        """Return a node's receipts; none if it does not answer."""
        try:
            if node == self._me:
                sealed: tuple[bytes, ...] = tuple(await self._accounts.history(since_ms, TOLD))
            else:
                body = await self._peers.call(node, "GET", f"/v1/usage?since={since_ms}", timeout_s=WITHIN_S)
                sealed = msgspec.msgpack.decode(body, type=Told).receipts[:TOLD]
            return await asyncio.to_thread(lambda: [open_receipt(one, self._mesh_id) for one in sealed])
        except (PeerError, ReceiptError, *MALFORMED):
            return []


def _opened(books: list[tuple[NodeId, Told]], most: int, mesh_id: bytes) -> tuple[list[Receipt], int]:
    """Return the receipts that nodes have signed of themselves, and the number of all others."""
    receipts, refused = [], 0
    for teller, book in books:
        for sealed in book.receipts[:most]:
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


def _row(name: str, account: Account, queue: dict[str, Any]) -> schemas.mesh.Account:
    hours = {field: round(getattr(account, field), 6) for field in HOURS}
    return schemas.mesh.Account(name=name, attempts=account.attempts, **hours, **queue)


def _run(receipt: Receipt, nicks: dict[NodeId, str]) -> schemas.mesh.Run:
    submitter = receipt.submitter
    return copy_as(
        schemas.mesh.Run,
        receipt,
        submitter=nicks.get(submitter, format_id(submitter)) if submitter else "",
        measured_gpu_s=round(sum(use.gpu_ns for use in receipt.devices) / 1e9, 3) if receipt.devices else None,
        end=receipt.reason,
        lost_s=receipt.lost_ms / 1000,
    )

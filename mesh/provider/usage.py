"""Hours lent and borrowed, computed from receipts. A receipt is the lender's claim alone."""

import time
from calendar import timegm
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import msgspec

from membership.identity import NodeId
from mesh.gpus.receipts import Receipt
from placement.advert import WHOLE

By = Literal["user", "node", "zone", "month"]
AHEAD_MS = 300_000  # a receipt further in the future has a wrong clock (`membership.trust.CLOCK_GRACE_S`)
HOUR_MS = 3_600_000


class Account(msgspec.Struct):
    """Totals of one user, node, zone or month: hours of whole GPUs, by the shares that attempts held, and of slots.

    `own`: lender and borrower are the same. `measured_gpu_h`: computing time on lent devices, measured by guards; `lost_h`:
    borrowed work that was lost when it had to leave.
    """

    lent_gpu_h: float = 0.0
    lent_slot_h: float = 0.0
    borrowed_gpu_h: float = 0.0
    borrowed_slot_h: float = 0.0
    own_gpu_h: float = 0.0
    own_slot_h: float = 0.0
    measured_gpu_h: float = 0.0
    lost_h: float = 0.0
    attempts: int = 0


def newest(receipts: Iterable[Receipt], now_ms: int) -> list[Receipt]:
    """Return the last valid receipt of each attempt on each node; times must be ordered and not in the future."""
    found: dict[tuple[NodeId, str, int], Receipt] = {}
    for receipt in receipts:
        if not 0 <= receipt.from_unix_ms <= receipt.until_unix_ms <= now_ms + AHEAD_MS or receipt.gpu_percent < 0:
            continue
        key = (receipt.node, receipt.job, receipt.attempt)
        known = found.get(key)
        if known is None or known.until_unix_ms < receipt.until_unix_ms:
            found[key] = receipt
    return list(found.values())


def accounts(
    receipts: Iterable[Receipt], since_ms: int, lender: Callable[[Receipt], str], borrower: Callable[[Receipt], str]
) -> dict[str, Account]:
    """Return totals by the names that `lender` and `borrower` give ("" counts for none), for the time after `since_ms`."""
    found: dict[str, Account] = {}
    for receipt in receipts:
        begun = max(receipt.from_unix_ms, since_ms)
        if receipt.until_unix_ms >= begun:
            _enter(found, receipt, (receipt.until_unix_ms - begun) / HOUR_MS, lender(receipt), borrower(receipt))
    return found


def by_month(receipts: Iterable[Receipt], since_ms: int, node: NodeId, user: str) -> dict[str, Account]:
    """Return what this node lent and this user borrowed in each month (UTC)."""
    found: dict[str, Account] = {}
    for receipt in receipts:
        lent, borrowed = receipt.node == node, receipt.user == user
        for month, hours in _months(max(receipt.from_unix_ms, since_ms), receipt.until_unix_ms):
            if lent or borrowed:
                _enter(found, receipt, hours, month if lent else "", month if borrowed else "")
    return found


def _enter(found: dict[str, Account], receipt: Receipt, hours: float, lender: str, borrower: str) -> None:
    gpu_h, slot_h = hours * receipt.gpu_percent / WHOLE, 0.0 if receipt.gpu_percent else hours
    whole_ms = receipt.until_unix_ms - receipt.from_unix_ms
    part = hours * HOUR_MS / whole_ms if whole_ms else 1.0
    for name in dict.fromkeys([lender, borrower]):
        if not name:
            continue
        account = found.setdefault(name, Account())
        account.attempts += 1
        if lender == borrower:
            account.own_gpu_h += gpu_h
            account.own_slot_h += slot_h
        elif name == lender:
            account.lent_gpu_h += gpu_h
            account.lent_slot_h += slot_h
        else:
            account.borrowed_gpu_h += gpu_h
            account.borrowed_slot_h += slot_h
        if name == lender:
            account.measured_gpu_h += part * sum(max(0, use.gpu_ns) for use in receipt.devices) / 3.6e12
        if name == borrower:
            account.lost_h += part * max(0, receipt.lost_ms) / HOUR_MS


def _months(begun_ms: int, until_ms: int) -> Iterator[tuple[str, float]]:
    """Yield the hours of an interval in each month."""
    while begun_ms <= until_ms:
        moment = time.gmtime(begun_ms // 1000)
        year, month = divmod(moment.tm_year * 12 + moment.tm_mon, 12)  # of the month after it, from 0
        following = timegm((year, month + 1, 1, 0, 0, 0)) * 1000
        end = min(until_ms, following)
        yield f"{moment.tm_year:04}-{moment.tm_mon:02}", (end - begun_ms) / HOUR_MS
        if end == until_ms:
            return
        begun_ms = end

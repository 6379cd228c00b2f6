"""When most of a job's witnesses are gone for good: its user may say which record goes on.

Everything else about a job is decided by majorities, so that nothing that was decided can be forgotten. This is the one
exception, so it takes the user's signature. The group it names outranks all that the old one can have decided while nobody
looked: members of the old one that come back find themselves replaced, and what only they knew is lost.
"""

from collections.abc import Mapping

import msgspec

from mesh.jobs.effects import Cell
from mesh.jobs.ledger import Config, Ledger, Seat
from mesh.jobs.steward import WANT_WITNESSES
from mesh.jobs.view import Instant, View

LEAP = 1 << 20  # terms, and changes of the group, that the lost ones can have had among themselves
RECORD_LOST = "its record was lost"


class RecoveryError(ValueError):
    """There is nothing to recover, or nothing to recover it from; the text says which."""


class Mandate(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What the user signs: this group keeps the job's record from this term on."""

    job: bytes
    term: int
    config: Config


class Plan(msgspec.Struct, frozen=True):
    """`lost`: who of the last known group does not answer, or has lost its disk; `kept`: who still has a record."""

    mandate: Mandate
    ledger: Ledger
    spec: bytes
    lost: tuple[bytes, ...]
    kept: tuple[bytes, ...]


def make_plan(job: bytes, cells: Mapping[bytes, Cell], view: View, at: Instant) -> Plan:
    """From the records that can still be read, by node; RecoveryError if there are none, or enough."""
    if not cells:
        raise RecoveryError("no node that can be reached has a record of it: what is left is to submit it again")
    if any(cell.final for cell in cells.values()):
        raise RecoveryError("it is over, and a node that knows how can be reached")
    config = max((cell.config for cell in cells.values()), key=lambda config: config.order)
    standing = {Seat(node, cell.disk) for node, cell in cells.items()}
    if config.quorum(standing):
        raise RecoveryError("most of the nodes that keep its record can be reached: it goes on by itself")
    best_first = sorted(
        cells, key=lambda node: (cells[node].accepted_term, cells[node].ledger.version, node), reverse=True
    )
    seats = [Seat(node, cells[node].disk) for node in best_first]
    seats += [Seat(node, view.disks[node]) for node in view.witnesses(job) if node in view.disks and node not in cells]
    seats = [seat for seat in seats if seat.node in view.staying][:WANT_WITNESSES]
    if not seats:
        raise RecoveryError("no node that stays could keep its record")
    term = max(cell.promised for cell in cells.values()) + LEAP
    group = Config(number=config.number + LEAP, term=term, members=tuple(seats[: len(seats) - (len(seats) + 1) % 2]))
    best = cells[best_first[0]]
    return Plan(
        mandate=Mandate(job, term, group),
        ledger=best.ledger.written_off(RECORD_LOST, at.unix_ms),
        spec=best.spec,
        lost=tuple(node for node in config.nodes if node not in cells),
        kept=tuple(best_first),
    )


_decoder = msgspec.msgpack.Decoder(Mandate)


def encode_mandate(mandate: Mandate) -> bytes:
    return msgspec.msgpack.encode(mandate)


def decode_mandate(payload: bytes) -> Mandate | None:
    try:
        return _decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None

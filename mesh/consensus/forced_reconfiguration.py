"""Forced reconfiguration: the job's user names a new witness group after most witnesses are lost for good.

Everything else about a job is decided by majorities, so that no decision is forgotten. This is the one exception, and it
needs the user's signature. The new group has a number and a term that are higher than any the lost witnesses can have used;
old members that return find themselves replaced, and what only they knew is lost. Two recoveries on two sides of a cut never
have the same number. Their orders are gossiped, and the group with the lower number gives the job up.
"""

from collections.abc import Mapping
from hashlib import blake2b

import msgspec

from membership.lengths import Id
from membership.malformed import MALFORMED
from mesh.consensus.effects import WitnessRecord
from mesh.consensus.proposer import WANT_WITNESSES
from mesh.consensus.view import Instant, View
from mesh.model.record import Config, JobRecord, Number, Voter

LEAP = 1 << 20  # more terms and group changes than the lost witnesses can have had among themselves
MOST_REACHED = 1 << 52  # no honest node counts so far, and a term above it has room for the ties
TIES = 1 << 24  # recoveries that start from equal numbers differ in so many ways; 2^53 leaves room for 500 of them
RECORD_LOST = "its record was lost"


class RecoveryError(ValueError):
    """There is nothing to recover, or nothing to recover it from; the text names the reason."""


class ForcedReconfiguration(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The statement that the user signs: this group keeps the job's record, of this hash, from this term on.

    The order is gossiped, so any member has it; without the hash it could bring another record under it.
    """

    job: Id
    term: Number
    config: Config
    record: Id = b""  # in orders of 0.1.0, which nobody takes up any more


class Plan(msgspec.Struct, frozen=True):
    """`lost`: members of the last known group that do not answer or have lost their disk. `kept`: nodes that still have a
    record.
    """

    reconfiguration: ForcedReconfiguration
    record: JobRecord
    spec: bytes
    lost: tuple[bytes, ...]
    kept: tuple[bytes, ...]


def make_plan(job: bytes, witness_records: Mapping[bytes, WitnessRecord], view: View, at: Instant) -> Plan:
    """Plan a recovery from the records that can still be read, by node; RecoveryError if there are none, or a majority."""
    witness_records = {node: record for node, record in witness_records.items() if _reached(record) < MOST_REACHED}
    if not witness_records:
        raise RecoveryError("no node that can be reached has a record of the job: submit it again")
    if any(witness_record.final for witness_record in witness_records.values()):
        raise RecoveryError("the job is over, and a node that has its outcome can be reached")
    config = max(
        (witness_record.config for witness_record in witness_records.values()), key=lambda config: config.order
    )
    reachable = {Voter(node, witness_record.disk) for node, witness_record in witness_records.items()}
    if config.quorum(reachable):
        raise RecoveryError("a majority of the witnesses can be reached: the job needs no recovery")
    best_first = sorted(
        witness_records,
        key=lambda node: (witness_records[node].accepted_term, witness_records[node].record.version, node),
        reverse=True,
    )
    # The group grows by itself then, with nodes that have said that they can vote.
    voters = [Voter(node, witness_records[node].disk) for node in best_first if node in view.staying][:WANT_WITNESSES]
    if not voters:
        voters = [Voter(node, view.disks[node]) for node in view.witnesses(job) if node in view.disks][:WANT_WITNESSES]
    if not voters:
        raise RecoveryError("no node could keep the job's record")
    best = witness_records[best_first[0]]
    record = best.record.written_off(RECORD_LOST, at.unix_ms)
    members = tuple(voters[: len(voters) - (len(voters) + 1) % 2])
    reached = max(_reached(witness_record) for witness_record in witness_records.values())
    term = _number_above(reached, msgspec.msgpack.encode((members, record)))
    group = Config(number=term, term=term, members=members)
    return Plan(
        reconfiguration=ForcedReconfiguration(job, term, group, record_hash(record)),
        record=record,
        spec=best.spec,
        lost=tuple(node for node in config.nodes if node not in witness_records),
        kept=tuple(best_first),
    )


def _reached(witness_record: WitnessRecord) -> int:
    return max(witness_record.config.number, witness_record.promised)


def record_hash(record: JobRecord) -> bytes:
    return blake2b(msgspec.msgpack.encode(record), digest_size=32).digest()


def _number_above(reached: int, content: bytes) -> int:
    """Return a number that the lost witnesses cannot have reached; two plans with other content have numbers a leap apart."""
    tie = int.from_bytes(blake2b(content, digest_size=8).digest()) % TIES
    return (reached // LEAP + 1 + tie) * LEAP


_decoder = msgspec.msgpack.Decoder(ForcedReconfiguration)


def encode_reconfiguration(reconfiguration: ForcedReconfiguration) -> bytes:
    return msgspec.msgpack.encode(reconfiguration)


def decode_reconfiguration(payload: bytes) -> ForcedReconfiguration | None:
    try:
        return _decoder.decode(payload)
    except MALFORMED:
        return None

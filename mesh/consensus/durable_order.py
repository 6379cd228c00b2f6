"""Durable order: the one order in which a shell saves and sends what the job cores ask for.

A promise is on disk before anything that follows from the same inputs leaves the node: the condition under which an acceptor
may restart (Lamport 2001). The job service and the simulator both perform these steps.
"""

from collections.abc import Sequence

import msgspec

from mesh.consensus.effects import SaveWitnessRecord, WitnessRecord
from mesh.consensus.participant import Directed


class SaveRecords(msgspec.Struct, frozen=True):
    """Write these records, all or none, and fsync them. If that fails, no further step follows: the node stops, since its cores
    already go by what was not saved.
    """

    records: tuple[WitnessRecord, ...]


Step = SaveRecords | Directed


def in_durable_order(outputs: Sequence[Directed]) -> list[Step]:
    """Return the steps that perform these effects: first the last record of each job in one write, then the rest in order."""
    records: dict[bytes, WitnessRecord] = {}
    rest: list[Step] = []
    for output in outputs:
        if isinstance(output.effect, SaveWitnessRecord):
            records[output.job] = output.effect.witness_record
        else:
            rest.append(output)
    return [SaveRecords(tuple(records.values())), *rest] if records else rest

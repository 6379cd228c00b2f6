"""Journals that are restored from an older copy: a backup, or the snapshot of a virtual machine."""

from random import Random

import msgspec

from mesh.consensus.disk_age import DiskAge
from mesh.consensus.effects import WitnessRecord

COPIED_EVERY_S = (5.0, 60.0)
KEPT = 3  # copies of each journal


class JournalCopy(msgspec.Struct, frozen=True):
    age: DiskAge
    witness_records: dict[bytes, WitnessRecord]


class Backups:
    """The copies of one node's journal."""

    def __init__(self) -> None:
        self._copies: list[JournalCopy] = []

    def take(self, age: DiskAge, witness_records: dict[bytes, WitnessRecord]) -> None:
        self._copies = [*self._copies, JournalCopy(age, dict(witness_records))][-KEPT:]

    def older_than(self, age: DiskAge, rng: Random) -> JournalCopy | None:
        """Return a copy that lacks saves of this journal, or None."""
        older = [copy for copy in self._copies if copy.age.disk == age.disk and copy.age.saves < age.saves]
        return rng.choice(older) if older else None

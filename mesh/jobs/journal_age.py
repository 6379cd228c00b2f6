"""Journal age: publishes how many saves this node's journal has, and notices a journal that is an old copy (`disk_age.py`)."""

import asyncio
import logging

from membership.node import MembershipNode
from mesh.consensus.disk_age import (
    HEAR_WITHIN_S,
    PUBLISH_EVERY_S,
    SECTION,
    TTL_S,
    DiskAge,
    encode_disk_age,
    is_old_copy,
)
from mesh.journal import Journal, JournalError

log = logging.getLogger(__name__)


class JournalAge:
    def __init__(self, membership: MembershipNode, journal: Journal) -> None:
        self._membership, self._journal = membership, journal

    async def check(self) -> bool:
        """Rename the journal's disk if another node knows it newer; tell whether that was so.

        Call it after membership has started, and before anything is published here or any promise is read.
        """
        await self._membership.first_contact(HEAR_WITHIN_S)
        old = is_old_copy(await self._age(), self._heard())
        if old:
            await self._journal.rename_disk()
            log.warning("the journal is older than what other nodes know of it: its promises no longer count")
        return old

    async def run(self) -> None:
        """Publish the age whenever it has changed, and before it expires.

        JournalError if others know of saves that this run has not made: the machine was set back with all its memory.
        """
        loop, last, published_at = asyncio.get_running_loop(), None, 0.0
        while True:
            age = await self._age()
            if is_old_copy(age, self._heard()):
                raise JournalError("this machine was set back to an earlier state: start the node again")
            if age != last or loop.time() - published_at > TTL_S / 4:
                self._membership.publish(SECTION, encode_disk_age(age), TTL_S)
                last, published_at = age, loop.time()
            await asyncio.sleep(PUBLISH_EVERY_S)

    def _heard(self) -> bytes | None:
        record = self._membership.record(self._membership.identity.node_id, SECTION)
        return record.body if record is not None else None

    async def _age(self) -> DiskAge:
        return DiskAge(self._journal.disk, await self._journal.saves())

"""Journal age: publishes how old this node's journal and its used invites are, and notices old copies (`disk_age.py`)."""

import asyncio
import logging
import time

from membership.node import MembershipNode
from membership.snapshot import UsedInvites
from mesh.consensus.disk_age import (
    HEAR_WITHIN_S,
    PUBLISH_EVERY_S,
    SECTION,
    TTL_S,
    DiskAge,
    encode_disk_age,
    is_old_copy,
    uses_heard,
)
from mesh.journal import Journal, JournalError

log = logging.getLogger(__name__)


class JournalAge:
    def __init__(self, membership: MembershipNode, journal: Journal, invites: UsedInvites) -> None:
        self._membership, self._journal, self._invites = membership, journal, invites

    async def check(self) -> bool:
        """Rename the journal's disk if another node knows it newer; tell whether that was so.

        Void the invites if uses of them are forgotten, and let them be decided on. Call it after membership has started, and
        before anything is published here or any promise is read.
        """
        await self._membership.first_contact(HEAR_WITHIN_S)
        age, heard = await self._age(), self._heard()
        old = is_old_copy(age, heard)
        if old or uses_heard(heard) > age.uses:
            await asyncio.to_thread(self._invites.void, uses_heard(heard), time.time())
            log.warning("the used invites are an old copy: invites that this node made before now are void")
        self._invites.held = False
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
            heard = self._heard()
            if is_old_copy(age, heard) or uses_heard(heard) > age.uses:
                raise JournalError("this machine was set back to an earlier state: start the node again")
            if age != last or loop.time() - published_at > TTL_S / 4:
                self._membership.publish(SECTION, encode_disk_age(age), TTL_S)
                last, published_at = age, loop.time()
            await asyncio.sleep(PUBLISH_EVERY_S)

    def _heard(self) -> bytes | None:
        record = self._membership.record(self._membership.identity.node_id, SECTION)
        return record.body if record is not None else None

    async def _age(self) -> DiskAge:
        uses = self._invites.count  # before the journal is asked: what is published is certainly on disk
        return DiskAge(self._journal.disk, await self._journal.saves(), uses)

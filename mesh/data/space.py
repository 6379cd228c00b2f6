"""Space for data sets on this node: what goes when the quota is full, and what other nodes say of theirs."""

import asyncio
import logging
import os
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from membership.identity import NodeId
from mesh.data.directory import ASK_S, DataDirectory
from mesh.data.eviction import LACKS, PINNED, UNPINNED_S, WHOLE, keepers, may_rely, order
from mesh.data.holdings import Holdings
from mesh.data.manifest import FetchFailed
from mesh.rpc.client import PeerClient, PeerError
from mesh.util.byte_text import amount

REMOVAL_S = 30 * 86_400.0  # for which a removal is announced: longer than machines are usually off (own choice)
ASKED = 16  # holders asked whether they keep a data set (own choice)
LEAST_FREE = 1 << 30  # bytes that a fetch leaves free on the disk (own choice)
LEAST_INODES = LEAST_FREE >> 14  # that files leave free: as many as ext4 has by default on so many bytes

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Room:
    """Room on the disk or in the quota that is kept for something: `left` bytes of it have not come yet, nor have `files`."""

    left: int = 0
    files: int = 0


class Space:
    """`keep_s`: how long an older version stays; `changed` is called when a data set has gone."""

    def __init__(
        self,
        me: NodeId,
        holdings: Holdings,
        directory: DataDirectory,
        peers: PeerClient,
        keep_s: float,
        changed: Callable[[], None],
    ) -> None:
        self._me, self._holdings, self._directory, self._peers = me, holdings, directory, peers
        self._keep_s, self._changed, self._freeing = keep_s, changed, asyncio.Lock()
        self._rooms: list[Room] = []
        self._arriving: list[Room] = []

    @asynccontextmanager
    async def room(self, more: int, what: str, identity: bytes, files: int = 0) -> AsyncIterator[Room]:
        """Keep room for `more` bytes of a data set, and so many files, during the block, which lowers `left` as they come.

        FetchFailed if they do not fit the disk, or the quota even if all goes that may go. `arrival` makes room for what comes.
        """
        room = Room()
        self._rooms.append(room)
        try:
            async with self._freeing:
                await self._make_inodes(files, what)
                await self._check_disk(more, what)
                await self._check_quota(more, what, identity)
                room.left = more
                room.files = files
            yield room
        finally:
            self._rooms.remove(room)

    @asynccontextmanager
    async def arrival(self, more: int, what: str, identity: bytes) -> AsyncIterator[Room]:
        """Let `more` bytes of a data set come during the block, which lowers `left`. FetchFailed if the quota has no space.

        Others are evicted for what is pinned or in use here, not for what another node has this one fetch; and only for what
        comes now: anybody can sign a manifest that claims many bytes.
        """
        quota_bytes, room = self._holdings.store.quota_bytes, Room(more)
        if quota_bytes is None or await self._used_bytes() + more <= quota_bytes:  # without waiting for other evictions
            self._arriving.append(room)
        else:
            async with self._freeing:
                await self._evict_for(more, what, identity, quota_bytes)
                self._arriving.append(room)
        try:
            yield room
        finally:
            self._arriving.remove(room)

    async def _check_disk(self, more: int, what: str) -> None:
        free = (await asyncio.to_thread(shutil.disk_usage, self._holdings.root)).free - self._promised_bytes()
        if free < more + LEAST_FREE:
            raise FetchFailed(f"{what}: {amount(more)} are needed and the disk has {amount(max(0, free))} free")

    async def _check_quota(self, more: int, what: str, identity: bytes) -> None:
        quota_bytes = self._holdings.store.quota_bytes
        if quota_bytes is None:
            return
        if more > quota_bytes:
            quota = amount(quota_bytes)
            raise FetchFailed(f"{what}: {amount(more)} are more than this node keeps ({quota}, data_quota_gib)")
        stays = await asyncio.to_thread(self._holdings.used_bytes)
        if self._may_evict_for(identity):
            stays = max(0, stays - self._holdings.evictable_bytes())
        if stays + self._promised_bytes() + more > quota_bytes:
            raise self._full(more, what, identity, stays + self._promised_bytes())

    async def _evict_for(self, more: int, what: str, identity: bytes, quota_bytes: int) -> None:
        steps = (self._drop_one_tree, self._evict_one, self._await_unpinned, self._evict_one)
        used = await self._used_bytes()
        for step in steps if self._may_evict_for(identity) else ():
            used = await self._used_bytes()
            while used + more > quota_bytes and await step():
                before, used = used, await self._used_bytes()
                if used >= before:  # its packs are still relied on: evicting more would not help now
                    break
        if used + more > quota_bytes:
            raise self._full(more, what, identity, used)

    def _may_evict_for(self, identity: bytes) -> bool:
        return self._holdings.pinned(identity) or self._holdings.used[identity] > 0

    def _full(self, more: int, what: str, identity: bytes, used: int) -> FetchFailed:
        why = "by what is on its way, pinned, in use, or on no other node"
        if not self._may_evict_for(identity):
            why = "and nothing goes for this one"
        quota = amount(self._holdings.store.quota_bytes or 0)
        return FetchFailed(
            f"{what}: {amount(more)} are needed; of the {quota} for data sets (data_quota_gib) {amount(used)} are used {why}"
        )

    async def _make_inodes(self, files: int, what: str) -> None:
        """Drop files that no guest uses until the disk has room for so many more. FetchFailed if it has not."""
        while files and (free := await asyncio.to_thread(self._free_inodes)) < files + LEAST_INODES:
            if not await self._drop_one_tree():
                raise FetchFailed(
                    f"{what}: they are {files}, and the disk has inodes for {max(0, free - LEAST_INODES)} more"
                )

    def _free_inodes(self) -> int:
        disk = os.statvfs(self._holdings.root)
        free = disk.f_favail if disk.f_files else sys.maxsize  # some file systems, such as btrfs, have no bound
        return free - sum(room.files for room in self._rooms)

    def _promised_bytes(self) -> int:
        return sum(room.left for room in self._rooms)

    async def _used_bytes(self) -> int:
        used = await asyncio.to_thread(self._holdings.used_bytes)
        return used + sum(room.left for room in self._arriving)

    async def _drop_one_tree(self) -> bool:
        """Drop the files of the longest unused set: they can be made again from its chunks."""
        for one in sorted(self._holdings.kept(), key=lambda kept: kept.used_unix):
            if self._holdings.store.tree(one.id).exists() and await self._holdings.drop_tree(one.id):
                return True
        return False

    async def _evict_one(self) -> bool:
        """Evict one set that another node keeps; tell whether there was one."""
        for one in order(self._holdings.kept()):
            if self._holdings.unpinned.get(one.id, 0.0) > time.monotonic() - UNPINNED_S:
                continue
            name = self._directory.known[one.id].full_name
            if (
                await self._is_kept_elsewhere(one.id)
                and not self._holdings.pinned(one.id)
                and await self._holdings.drop(one.id)
            ):
                log.info("data set %s is evicted: the quota is full", name)
                self._changed()
                return True
        return False

    async def _await_unpinned(self) -> bool:
        """Wait until what was unpinned a moment ago may be evicted."""
        since = [
            self._holdings.unpinned[one.id] for one in order(self._holdings.kept()) if one.id in self._holdings.unpinned
        ]
        left = max(since, default=-UNPINNED_S) + UNPINNED_S - time.monotonic()
        if since and left > 0:
            await asyncio.sleep(left)
        return False

    async def _is_kept_elsewhere(self, identity: bytes) -> bool:
        """Ask the holders, those first that come before this node."""
        holders = self._directory.holders(identity)
        before = keepers(identity, self._me, holders)
        for node in [*before, *(node for node in holders if node not in before)][:ASKED]:
            if may_rely(identity, self._me, node, await self._ask_held(node, identity)):
                return True
        return False

    async def _ask_held(self, node: NodeId, identity: bytes) -> bytes:
        with suppress(PeerError):
            return await self._peers.call(node, "GET", f"/v1/data/{identity.hex()}/held", timeout_s=ASK_S)
        return LACKS

    def held_answer(self, identity: bytes) -> bytes:
        """Return what this node answers about a data set."""
        if not self._holdings.is_whole(identity):
            return LACKS
        return PINNED if self._holdings.pinned(identity) else WHOLE

    async def is_last_copy(self, identity: bytes) -> bool:
        """Tell whether no other node confirms that it has a data set whole."""
        answers = [await self._ask_held(node, identity) for node in self._directory.holders(identity)[:ASKED]]
        return not any(answer in {WHOLE, PINNED} for answer in answers)

    async def tidy(self) -> None:
        """Drop older versions after some days, removed data sets that guests still used, and what no set needs."""
        now = time.time()
        for one in self._holdings.kept():
            name, unused = self._directory.known[one.id].full_name, one.used_unix < now - self._keep_s
            old = one.superseded and unused and not self._holdings.pinned(one.id)
            if (old or self._is_removed(one.id)) and await self._holdings.drop(one.id):
                log.info("an older version of data set %s is dropped", name)
        for removal in [one for one in self._holdings.held if self._directory.known[one].removes]:
            if self._directory.known[removal].created_unix < now - REMOVAL_S:
                await self._holdings.drop(removal)
        await asyncio.to_thread(self._holdings.store.free, now)

    def _is_removed(self, identity: bytes) -> bool:
        newest = self._directory.newest_of(self._directory.known[identity].key)
        return newest is not None and self._directory.known[newest].root is None

"""Data sets on this node: which are here, which of them are damaged, which guests use, which are pinned."""

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ckptstore.cipher import StateCipher
from ckptstore.dataset_store import DataSets, remove_tree
from ckptstore.errors import StoreError
from membership.durable import write_durably
from membership.envelope import OVERHEAD
from mesh.data.directory import DataDirectory
from mesh.data.eviction import Kept, order
from mesh.data.manifest import MAX_GROUPS, DataError, decode_manifest

HEADERS = 64  # a chunk takes at most a part of this more when it is encoded, but for tiny ones (own choice)

log = logging.getLogger(__name__)


def left_in_the_clear(root: Path) -> list[Path]:
    """Return the directories with files of encrypted data sets, which guests no longer use once the daemon has ended.

    Those of sets that are not here, or were not whole, count as encrypted, and so do tables with names of files.
    """
    found = list((root / "tmp").glob("*.bundled"))
    for tree in sorted((root / "trees").glob("*")):
        with suppress(OSError, DataError):
            if not decode_manifest((root / "sets" / tree.name).read_bytes()[OVERHEAD:]).realm:
                continue
        found.append(tree)
    return found


class Holdings:
    """A shell around the store. Open it before anything else but the keys; `known` gives the key of a realm that is here."""

    store: DataSets

    def __init__(
        self,
        root: Path,
        quota_bytes: int | None,
        directory: DataDirectory,
        known: Callable[[bytes], StateCipher | None],
    ) -> None:
        self.root, self._quota_bytes, self._directory, self._known = root, quota_bytes, directory, known
        self.held: set[bytes] = set()
        self.damaged: set[bytes] = set()  # those that lack chunks: they stay, and are not offered
        self.used: Counter[bytes] = Counter()
        self.unpinned: dict[bytes, float] = {}  # since when
        self._going: dict[bytes, asyncio.Future[object]] = {}  # data sets that are being removed, or their files

    async def open(self) -> None:
        """Open the store, and know again what is in it."""
        self.store = await asyncio.to_thread(DataSets, self.root, self._quota_bytes)
        (self.root / "pinned").mkdir(exist_ok=True)
        await asyncio.to_thread(self._reopen)

    def _reopen(self) -> None:
        entered = self.store.known()
        for identity in self.store.held():
            try:
                sealed = self.store.sealed(identity)
                manifest = self._directory.opened(identity, sealed)
                if manifest.root is not None and identity not in entered:
                    self.store.enter(identity, manifest.root, self._known(manifest.realm))
            except (DataError, StoreError, OSError) as error:
                log.warning("data set %s is not offered: %s", identity.hex()[:12], error)
                continue
            self._directory.remember(identity, sealed, manifest)
            self.held.add(identity)
        for tree in left_in_the_clear(self.root):  # the guests of an earlier run died with it
            remove_tree(tree)
        self.find_damaged()

    def find_damaged(self) -> None:
        """Note which data sets lack chunks. It blocks."""
        with self.store.mending:  # a pack that is salvaged is in no index for a moment
            self.damaged = {identity for identity in tuple(self.held) if self.store.missing_of(identity)}

    async def close(self) -> None:
        await asyncio.gather(*self._going.values(), return_exceptions=True)
        await asyncio.to_thread(self.store.close)

    def is_here(self, identity: bytes) -> bool:
        return identity in self.held and self._directory.known[identity].root is not None

    def is_whole(self, identity: bytes) -> bool:
        return self.is_here(identity) and identity not in self.damaged

    def is_encrypted(self, identity: bytes) -> bool:
        return bool(self._directory.known[identity].realm)

    def needs(self, identity: bytes) -> bool:
        """Tell whether a data set is here or on its way to a guest."""
        return identity in self.held or self.used[identity] > 0

    def versions(self, key: tuple[bytes, str], but: bytes) -> list[bytes]:
        """Return the other versions of a data set that are here."""
        return [one for one in self.held if self._directory.known[one].key == key and one != but]

    def pinned(self, identity: bytes) -> bool:
        return (self.root / "pinned" / identity.hex()).exists()

    def pin(self, identity: bytes, pinned: bool) -> None:
        mark = self.root / "pinned" / identity.hex()
        if pinned:
            mark.touch()
        elif mark.exists():
            self.unpinned[identity] = time.monotonic()
            mark.unlink(missing_ok=True)

    def touch(self, identity: bytes) -> None:
        with suppress(OSError):
            os.utime(self.store.sets / identity.hex())

    async def drop(self, identity: bytes) -> bool:
        """Drop a data set, and free the space of its chunks that no other needs; False if a guest uses it."""

        def removal() -> None:
            self.store.free(time.time(), self.store.forget(identity))

        going = self._go(identity, removal)
        if going is None:
            return False
        self.held.discard(identity)
        self.pin(identity, False)
        await asyncio.shield(going)
        return True

    async def unused(self, identity: bytes) -> None:
        """One use of a data set is over. After the last, files that are encrypted in the packs go from the disk."""
        self.used[identity] -= 1
        if identity in self._directory.known and self.is_encrypted(identity):
            try:
                await self.drop_tree(identity)
            except OSError as error:
                log.error("files of data set %s stay in the clear until the next start: %s", identity.hex()[:12], error)

    async def drop_tree(self, identity: bytes) -> bool:
        """Drop the files of a data set, which are made again at its next use; False if a guest uses them."""
        going = self._go(identity, lambda: self.store.drop_tree(identity))
        if going is None:
            return False
        await asyncio.shield(going)
        return True

    def _go(self, identity: bytes, removal: Callable[[], None]) -> asyncio.Future[object] | None:
        """Begin a removal in a thread, unless a guest uses the data set. Whoever comes now waits for its end (`gone`)."""
        if self.used[identity] or identity in self._going:
            return None
        going = self._going[identity] = asyncio.ensure_future(asyncio.to_thread(removal))
        going.add_done_callback(lambda _: self._going.pop(identity))
        return going

    async def gone(self, identity: bytes) -> None:
        """Wait until no removal of a data set is under way. One that is counted as used before that stays from then on."""
        if (going := self._going.get(identity)) is not None:
            await asyncio.wait([going])

    def used_bytes(self) -> int:
        """Return the bytes of all packs and trees."""
        known = self._directory.known
        trees = [bytes.fromhex(path.name) for path in self.store.trees.iterdir() if len(path.name) == 64]
        return self.store.stored_bytes() + sum(known[one].tree_bytes for one in trees if one in known)

    def evictable_bytes(self) -> int:
        """Return an upper bound of what goes if all goes that may, whether or not other nodes keep it."""
        kept, known = self.kept(), self._directory.known
        unused = [one.id for one in kept if not one.in_use and self.store.tree(one.id).exists()]
        packed = sum(one.bytes for one in order(kept))
        return packed + packed // HEADERS + sum(known[one].tree_bytes for one in unused)

    def kept(self) -> list[Kept]:
        """Return what is here, for eviction."""
        sizes = self.store.known()
        found = []
        for identity in self.held:
            if self._directory.known[identity].root is None:
                continue
            with suppress(FileNotFoundError):
                used_unix = (self.store.sets / identity.hex()).stat().st_mtime
                size = sizes[identity].bytes if identity in sizes else 0
                newest = self._directory.is_newest(identity)
                in_use = self.used[identity] > 0
                found.append(Kept(identity, size, used_unix, self.pinned(identity), in_use, not newest))
        return found

    async def keep_groups(self, user_key: bytes) -> None:
        """Keep the newest known versions of this user's groups, and of those that the data sets here name; drop the others.

        Of one user at most MAX_GROUPS: those with members first, then the newest.
        """
        known, count = self._directory.known, Counter[bytes]()
        named = {group.key for one in self.held for group in known[one].groups}
        kept = set[bytes]()
        for identity, one in sorted(self._directory.groups(), key=lambda one: (not one[1].readers, -one[1].number)):
            if (one.user_key == user_key or one.key in named) and count[one.user_key] < MAX_GROUPS:
                count[one.user_key] += 1
                kept.add(identity)
        others = {one for one in self.held if known[one].is_group} - kept
        for identity in kept - self.held:
            if identity in known:  # still
                await self.keep_statement(identity)
        for identity in others:
            await self.drop(identity)

    async def keep_statement(self, identity: bytes) -> None:
        """Keep a manifest without content, which the directory knows: a group, or that a data set is removed."""
        sealed = self._directory.sealed(identity)
        assert sealed is not None
        await asyncio.to_thread(write_durably, self.store.sets / identity.hex(), sealed)
        self.held.add(identity)

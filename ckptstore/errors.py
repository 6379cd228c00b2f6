"""What can go wrong in the checkpoint store, each with its own name and a text for people."""


class StoreError(RuntimeError):
    """Something the store cannot do; the text says what failed, why, and what to do."""


class DiskFull(StoreError):
    """No room on the disk. Every earlier checkpoint is as it was."""


class ReadOnlyStore(StoreError):
    """The store's directory cannot be written."""


class QuotaExceeded(StoreError):
    """The owner's limit for stored bytes would be passed."""


class CorruptChunk(StoreError):
    """Bytes that are not what their id says."""


class MissingChunks(StoreError):
    """A manifest names chunks that are not here."""

    def __init__(self, text: str, ids: list[bytes]) -> None:
        super().__init__(text)
        self.ids = ids


class Locked(StoreError):
    """Sealed with a key that is not here."""


class FenceError(StoreError):
    """The writer's (config, term) is lower than one already accepted for this job: it was replaced."""


class SaveTorn(StoreError):
    """A file changed while it was read. Nothing was saved; try again when it is complete."""


class BadManifest(StoreError):
    """Not a manifest this store can trust."""


class BadPath(BadManifest):
    """A path that leaves its tree, or cannot be a path."""


class NotFound(StoreError):
    """No such manifest or file in this store."""

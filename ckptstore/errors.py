"""Errors of the checkpoint store. Each message says what failed, why, and what to do."""


class StoreError(RuntimeError):
    """The store cannot do what was asked."""


class DiskFull(StoreError):
    """The disk is full. Earlier checkpoints are intact."""


class ReadOnlyStore(StoreError):
    """The store's directory is not writable."""


class QuotaExceeded(StoreError):
    """The owner's limit for stored bytes would be exceeded."""


class TooLarge(StoreError):
    """The files of a manifest hold more bytes than the caller accepts. Nothing was written."""


class CorruptChunk(StoreError):
    """Bytes that do not match their id or header."""


class MissingChunks(StoreError):
    """A manifest names chunks that this store lacks."""

    def __init__(self, text: str, ids: list[bytes]) -> None:
        super().__init__(text)
        self.ids = ids


class MissingKey(StoreError):
    """Encrypted with a key that this node does not have."""


class FenceError(StoreError):
    """The writer's (config, term) is lower than one already accepted for this job: the writer was replaced."""


class FileChanged(StoreError):
    """A file changed while it was read. Nothing was saved; the save can be tried again."""


class BadManifest(StoreError):
    """The manifest is invalid."""


class BadPath(BadManifest):
    """A path that leaves its tree, or is invalid."""


class NotFound(StoreError):
    """This store has no such manifest or file."""


class Stopped(RuntimeError):
    """Raised by a report of progress, to end the work; what an add has stored stays for the next one."""

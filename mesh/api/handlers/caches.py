"""Caches: after a job is done, this node adds what the job has added to its user's caches to the next version of each."""

from functools import partial

from ckptstore.errors import StoreError
from mesh.api.handlers.lookup import JobLookup
from mesh.data.cache_files import MAX_ENTRIES
from mesh.data.library import DataLibrary
from mesh.data.manifest import DataError, FetchFailed
from mesh.jobs.attempt import saved_as
from mesh.model.record import Outcome
from mesh.model.spec import format_job
from mesh.util.byte_text import amount
from mesh.util.errors import MeshError
from mesh.util.text import plural


class CacheWriter:
    """Only a node of the user can sign a version, and the one that submitted the job does."""

    def __init__(self, lookup: JobLookup, library: DataLibrary) -> None:
        self._lookup, self._library = lookup, library

    async def write_back(self, job: bytes, names: str, outcome: Outcome) -> str:
        """Write back the job's caches, separated by commas; return in words what was added. MeshError: try again."""
        status = self._lookup.find_job(format_job(job))
        manifest, words = outcome.manifest, list[str]()
        if outcome.kind != "done" or manifest is None:
            return ""
        await self._lookup.fetch(status, manifest, outcome.holders)  # now, since other adds wait for a write-back
        had = {need.last: need.manifest for need in (await self._lookup.spec_of(status)).data if need.cache}
        for name in names.split(","):
            restore = partial(
                self._lookup.restore, status, manifest, outcome.holders, saved_as(name), part=2, most=MAX_ENTRIES
            )
            try:
                grown = await self._library.write_back(name, restore, had.get(name, b""))
            except (FetchFailed, DataError, StoreError, OSError) as error:
                raise MeshError(f"cache {name}: {error}") from error
            if grown.files:
                words.append(f"{name} has {plural(grown.files, 'new file')} with {amount(grown.bytes)}")
        return "; ".join(words)

"""Pruning: which manifests a node's store no longer needs. Pure, but for the store that it is given."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from ckptstore.store import ManifestInfo
from mesh.consensus.status import JobStatus


class PrunedStore(Protocol):
    def forget_old(self, job: bytes, needed: Collection[int]) -> list[bytes]: ...


def forget_superseded(
    store: PrunedStore, statuses: Mapping[bytes, JobStatus], infos: Sequence[ManifestInfo]
) -> list[bytes]:
    """Forget the checkpoints among `infos` that their jobs cannot need any more; return the forgotten ids."""
    forgotten = []
    for job in dict.fromkeys(info.job for info in infos):
        if job in statuses:
            forgotten += store.forget_old(job, statuses[job].needed)
    return forgotten


def longest_over(infos: Iterable[ManifestInfo], since: Mapping[bytes, float], excess: int) -> Iterator[ManifestInfo]:
    """Yield manifests to remove, all of the job that ended first, then of the next, until they make up for `excess` bytes.

    Shared chunks are stored once, so fewer bytes may become free; then the next call finds more to remove.
    """
    kept: dict[bytes, list[ManifestInfo]] = {}
    for info in infos:
        if info.job in since:
            kept.setdefault(info.job, []).append(info)
    for job in sorted(kept, key=lambda job: (since[job], job)):
        if excess <= 0:
            return
        excess -= sum(info.total_bytes for info in kept[job])
        yield from kept[job]

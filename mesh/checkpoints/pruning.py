"""Pruning: which manifests a node's store no longer needs. No I/O.

What nodes publish only hints at what can go: any member can publish it. The records of the job's witnesses decide.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping

from ckptstore.store import ManifestInfo
from mesh.consensus.status import JobStatus


def with_superseded(views: Mapping[bytes, Collection[JobStatus]], infos: Iterable[ManifestInfo]) -> list[bytes]:
    """Return the jobs with a checkpoint among `infos` that a view of them does not need any more."""
    numbers: dict[bytes, list[int]] = {}
    for info in infos:
        if info.kind == "checkpoint":
            numbers.setdefault(info.job, []).append(info.seq)
    return [
        job
        for job, here in numbers.items()
        if any(
            number < max(view.needed, default=0) for view in views.get(job, ()) for number in {*here} - {*view.needed}
        )
    ]


def needed_by_all(records: Collection[Collection[int]]) -> frozenset[int]:
    """Return the numbers of checkpoints that one of these records needs, up to where the record that is furthest behind is."""
    newest = min((max(needed, default=0) for needed in records), default=0)
    return frozenset(number for needed in records for number in needed if number <= newest)


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
